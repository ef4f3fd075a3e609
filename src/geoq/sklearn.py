"""The scikit-learn interface of GeoQ: a regressor with error bounds beside its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import RandomForestRegressor
from sklearn.utils import Tags, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from geoq import archive, files
from geoq.arrays import Array
from geoq.assessment import Assessment
from geoq.checks import check_count
from geoq.conformal import POINTWISE, Guarantee
from geoq.estimator import GeoQ
from geoq.folds import Folds
from geoq.increments.protocol import IncrementModel
from geoq.regions.safe_region import Region
from geoq.representation import Representation
from geoq.surrogate import ErrorFunctional, absolute_error
from geoq.table import is_frame
from geoq.training.checkpoint import Checkpoint
from geoq.training.progress import BAR, ShowProgress


class GeoQRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""A scikit-learn regressor that also bounds the errors of its predictions.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + g_\eta(\psi_{k_a, k}(x))  (eq:anchor_error_decomposition)

    ``predict`` returns the prediction of the regressor, in the shape of y; ``score`` and searches over ``estimator__...``
    evaluate that prediction. The calibration fits one clone of the regressor per fold. The defaults are the defaults of
    ``GeoQ``. The regressor receives data frames as they are, so it can be a pipeline with a ``ColumnTransformer``. Columns can
    hold numbers, dates, booleans, strings or categories, and missing values if the regressor accepts them.

    Args:
        estimator: the regressor, cloned before it is fitted. None means ``RandomForestRegressor(random_state=0)``.
        representation: a metric or a function phi; None means ``SensitivityMetric()``.
        error_functional: rho, the error that is bounded.
        folds: which points are held out together. None means ``default_folds()``, 15 fits of the regressor;
            ``RandomFolds(5)`` is cheaper and suits queries inside the data.
        increment_model: g, copied before it is fitted; None means ``TwoLawIncrement()``.
        n_anchors: k_a, the number of anchors whose errors are averaged.
        n_support: k, the number of points that the support distance averages over; None means the paper's 20, or as many as
            the folds leave.
        safe_region: the rule of the safe region; None means ``SupportRegion()``.

    Attributes:
        estimator_: the regressor fitted on all data.
        geoq_: the calibrated GeoQ.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X is a data frame with string names.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import Ridge
        >>> from geoq.sklearn import GeoQRegressor
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> model = GeoQRegressor(Ridge()).fit(X, X[:, 0] ** 2 + X[:, 1])
        >>> model.bound(X[:3]).shape
        (3,)
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        representation: Representation | None = None,
        error_functional: ErrorFunctional = absolute_error,
        folds: Folds | None = None,
        increment_model: IncrementModel | None = None,
        n_anchors: int = 1,
        n_support: int | None = None,
        safe_region: Region | None = None,
    ) -> None:
        self.estimator = estimator
        self.representation = representation
        self.error_functional = error_functional
        self.folds = folds
        self.increment_model = increment_model
        self.n_anchors = n_anchors
        self.n_support = n_support
        self.safe_region = safe_region

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Sequence[Any] | None = None,
        *,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = BAR,
    ) -> "GeoQRegressor":
        """Fit the regressor on all data and calibrate its errors on the folds.

        Args:
            X: inputs, one row per sample: an array, or a data frame of pandas or polars.
            y: targets, one per row: a number or a row of several outputs.
            groups: a label per row, for fold schemes that hold out whole groups.
            checkpoint: a folder, or a ``Checkpoint``, that stores each finished fold, see ``GeoQ.fit``.
            progress: how the progress is shown, see ``GeoQ.fit``.

        Raises:
            ValueError: the data or a setting is unusable. These checks come before any training.
        """
        if is_frame(X):
            # The regressor checks the columns.
            x = validate_data(self, X, skip_check_array=True)
        else:
            x, y = validate_data(
                self, X, y, multi_output=True, y_numeric=True, ensure_min_samples=2
            )
        settings = self.get_params(deep=False)
        del settings["estimator"]
        # GeoQ has the defaults of the settings that are None.
        chosen = {name: part for name, part in settings.items() if part is not None}
        geoq = GeoQ(None, _TrainClone(self._regressor), **chosen)
        self.geoq_ = geoq.fit(
            x, y, groups=groups, checkpoint=checkpoint, progress=progress
        )
        self.estimator_ = self._surrogate.estimator
        return self

    def predict(self, X: Any) -> Array:
        """Return the prediction of the regressor that was fitted on all data."""
        check_is_fitted(self, "geoq_")
        return self._surrogate(self._validated(X))

    def bound(self, X: Any) -> Array:
        """Return an upper bound of the error of the prediction at each row, in the shape of the error."""
        return self._calibrated.bound(self._validated(X))

    def bounds(self, X: Any, levels: Sequence[float]) -> dict[float, Array]:
        """Return error bounds at several quantile levels, see ``GeoQ.bounds``."""
        return self._calibrated.bounds(self._validated(X), levels)

    def expected_error(self, X: Any) -> Array:
        """Return the expected error at each row, see ``GeoQ.expected_error``."""
        return self._calibrated.expected_error(self._validated(X))

    def assess(self, X: Any) -> Assessment:
        """Return the prediction, the bound, the safe flag and their parts at each row."""
        return self._calibrated.assess(self._validated(X))

    def conformalize(
        self, X: Any, y: Any, *, guarantee: Guarantee = POINTWISE
    ) -> "GeoQRegressor":
        """Scale the bound so that it holds on pairs that ``fit`` has not seen, see ``GeoQ.conformalize``."""
        self._calibrated.conformalize(self._validated(X), y, guarantee=guarantee)
        return self

    def save(self, path: str | Path) -> None:
        """Write the calibration to one file, see ``GeoQ.save``. The file does not contain the regressor."""
        numbers, arrays = files.state(self._calibrated)
        own = {
            "output_shape": list(self._surrogate.output_shape),
            "n_features_in": int(self.n_features_in_),
            "feature_names": [*map(str, getattr(self, "feature_names_in_", ()))],
        }
        archive.write(path, numbers | {"sklearn": own}, arrays)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        estimator: Any,
        representation: Representation | None = None,
        increment_model: IncrementModel | None = None,
        error_functional: ErrorFunctional | None = None,
    ) -> "GeoQRegressor":
        """Read a calibrated regressor; its answers are bit for bit the answers of the saved one.

        Args:
            path: a file that ``save`` wrote.
            estimator: the fitted regressor, ``estimator_`` of the saved object.
            representation: see ``GeoQ.load``, as for the arguments below.
            increment_model: the fitted increment model, if it was an object of the user.
            error_functional: the error functional, if it was a function of the user.

        Raises:
            ValueError: the file is unusable, or the regressor is not the one that was calibrated.
        """
        content = archive.read(path)
        if "sklearn" not in content[0]:
            raise ValueError(
                f"{path} was not saved by a GeoQRegressor; load it with the class that saved it."
            )
        archive.check_given(estimator, "estimator", path)
        own = content[0]["sklearn"]
        with archive.restoring(path):
            output_shape = tuple(own["output_shape"])
            n_features, names = own["n_features_in"], own["feature_names"]
            check_count(n_features, "n_features_in")
            possible = not names or len(names) == n_features
            archive.check_value("feature_names", possible, "not one name per column")
        geoq = files.load(
            GeoQ,
            path,
            content,
            surrogate=_FittedClone(estimator, output_shape),
            representation=representation,
            increment_model=increment_model,
            error_functional=error_functional,
        )
        settings = geoq.get_params()
        del settings["surrogate"], settings["train_surrogate"]
        regressor = cls(estimator, **settings)
        regressor.geoq_, regressor.estimator_ = geoq, estimator
        regressor.n_features_in_ = n_features
        if names:
            regressor.feature_names_in_ = np.array(names, dtype=object)
        return regressor

    @property
    def _calibrated(self) -> GeoQ:
        check_is_fitted(self, "geoq_")
        return self.geoq_

    @property
    def _surrogate(self) -> "_FittedClone":
        surrogate = self.geoq_.surrogate_
        assert isinstance(surrogate, _FittedClone)
        return surrogate

    @property
    def _regressor(self) -> Any:
        if self.estimator is None:
            return RandomForestRegressor(random_state=0)
        return self.estimator

    def _validated(self, X: Any) -> Any:
        if self.geoq_.schema_ is not None:
            return validate_data(self, X, reset=False, skip_check_array=True)
        return validate_data(self, X, reset=False)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = get_tags(
            self._regressor
        ).target_tags.multi_output
        return tags


@dataclass(frozen=True)
class _TrainClone:
    """A recipe that fits a clone of the regressor. It is a class because closures cannot be pickled."""

    estimator: Any

    def __call__(self, x: Array, y: Array) -> "_FittedClone":
        return _FittedClone(clone(self.estimator).fit(x, y), tuple(y.shape[1:]))


@dataclass(frozen=True)
class _FittedClone:
    """A fitted regressor that predicts in the shape of y; some regressors drop the dimension of a single column."""

    estimator: Any
    output_shape: tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        return np.reshape(self.estimator.predict(x), (len(x), *self.output_shape))
