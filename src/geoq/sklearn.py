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
from geoq.conformal import POINTWISE, Guarantee
from geoq.estimator import GeoQ
from geoq.folds import Folds, default_folds
from geoq.increments.power_law import PowerLawIncrement
from geoq.increments.protocol import IncrementModel
from geoq.representation import Representation
from geoq.safe_region import DistanceRegion, Region
from geoq.surrogate import ErrorFunctional, absolute_error


class GeoQRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""A scikit-learn regressor that also bounds the errors of its predictions.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + g_\eta(\psi_{k_a, k}(x))  (eq:anchor_error_decomposition)

    ``predict`` returns the prediction of the regressor, in the shape of y; ``score`` and searches over ``estimator__...``
    evaluate that prediction. The calibration fits one clone of the regressor per fold, with the same defaults as ``GeoQ``.
    Data frames are converted to arrays, so the regressor does not receive column names.

    Args:
        estimator: the regressor, cloned before it is fitted. None means ``RandomForestRegressor(random_state=0)``.
        representation: phi; None means the standardised input.
        error_functional: rho, the error that is bounded.
        folds: which points are held out together. None means ``default_folds()``, 15 fits of the regressor;
            ``RandomFolds(5)`` is cheaper and suits queries inside the data.
        increment_model: g, copied before it is fitted; None means ``PowerLawIncrement()``.
        n_anchors: k_a, the number of anchors whose errors are averaged.
        n_support: k, the number of points that the support distance averages over; None means the paper's 20, or as many as
            the folds leave.
        safe_region: the rule of the safe region; None means ``DistanceRegion()``.

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
        checkpoint: str | Path | None = None,
    ) -> "GeoQRegressor":
        """Fit the regressor on all data and calibrate its errors on the folds.

        Args:
            X: inputs, one row per sample.
            y: targets, one per row: a number or a row of several outputs.
            groups: a label per row, for fold schemes that hold out whole groups.
            checkpoint: a folder that keeps each finished fold, see ``GeoQ.fit``.

        Raises:
            ValueError: the data or a setting is unusable. These checks come before any training.
        """
        x, y = validate_data(
            self, X, y, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        geoq = GeoQ(
            None,
            _TrainClone(self._regressor),
            representation=self.representation,
            error_functional=self.error_functional,
            folds=default_folds() if self.folds is None else self.folds,
            increment_model=PowerLawIncrement()
            if self.increment_model is None
            else self.increment_model,
            n_anchors=self.n_anchors,
            n_support=self.n_support,
            safe_region=DistanceRegion()
            if self.safe_region is None
            else self.safe_region,
        )
        self.geoq_ = geoq.fit(x, y, groups=groups, checkpoint=checkpoint)
        assert isinstance(self.geoq_.surrogate_, _FittedClone)
        self.estimator_ = self.geoq_.surrogate_.estimator
        return self

    def predict(self, X: Any) -> Array:
        """The prediction of the regressor fitted on all data."""
        return self._fitted.surrogate_(self._validated(X))

    def bound(self, X: Any) -> Array:
        """Upper bound of the error of the prediction at each row, in the shape of the error."""
        return self._fitted.bound(self._validated(X))

    def bounds(self, X: Any, levels: Sequence[float]) -> dict[float, Array]:
        """Error bounds at several quantile levels, see ``GeoQ.bounds``."""
        return self._fitted.bounds(self._validated(X), levels)

    def expected_error(self, X: Any) -> Array:
        """The expected error at each row, see ``GeoQ.expected_error``."""
        return self._fitted.expected_error(self._validated(X))

    def assess(self, X: Any) -> Assessment:
        """Prediction, bound, safe flag and their parts at each row."""
        return self._fitted.assess(self._validated(X))

    def conformalize(
        self, X: Any, y: Any, *, guarantee: Guarantee = POINTWISE
    ) -> "GeoQRegressor":
        """Scale the bound so that it holds on pairs that were set aside, see ``GeoQ.conformalize``."""
        self._fitted.conformalize(
            self._validated(X), np.asarray(y), guarantee=guarantee
        )
        return self

    def save(self, path: str | Path) -> None:
        """Write the calibration to one file, see ``GeoQ.save``; the fitted regressor is not in it."""
        numbers, arrays = files.state(self._fitted)
        assert isinstance(self.geoq_.surrogate_, _FittedClone)
        own = {
            "output_shape": list(self.geoq_.surrogate_.output_shape),
            "n_features_in": int(self.n_features_in_),
            "feature_names": [*map(str, getattr(self, "feature_names_in_", ()))],
        }
        archive.write(path, numbers | {"sklearn": own}, arrays)

    @classmethod
    def load(cls, path: str | Path, *, estimator: Any) -> "GeoQRegressor":
        """Read a calibration; ``estimator`` is the fitted regressor, ``estimator_`` of the saved object.

        Raises:
            ValueError: the file is unusable, or the regressor is not the one that was calibrated.
        """
        numbers, _ = archive.read(path)
        if "sklearn" not in numbers:
            raise ValueError(
                f"{path} was not saved by a GeoQRegressor; load it with the class that saved it."
            )
        own = numbers["sklearn"]
        fitted = _FittedClone(estimator, tuple(own["output_shape"]))
        regressor = cls(estimator)
        regressor.geoq_ = GeoQ.load(path, surrogate=fitted)
        regressor.estimator_ = estimator
        regressor.n_features_in_ = own["n_features_in"]
        if own["feature_names"]:
            regressor.feature_names_in_ = np.array(own["feature_names"], dtype=object)
        return regressor

    @property
    def _fitted(self) -> GeoQ:
        check_is_fitted(self, "geoq_")
        return self.geoq_

    def _validated(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "geoq_")
        validated: np.ndarray = validate_data(self, X, reset=False)
        return validated

    @property
    def _regressor(self) -> Any:
        return (
            RandomForestRegressor(random_state=0)
            if self.estimator is None
            else self.estimator
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = get_tags(
            self._regressor
        ).target_tags.multi_output
        return tags


@dataclass(frozen=True)
class _TrainClone:
    """Fits a clone of the regressor. This is a class because closures cannot be pickled."""

    estimator: Any

    def __call__(self, x: Array, y: Array) -> "_FittedClone":
        return _FittedClone(clone(self.estimator).fit(x, y), y.shape[1:])


@dataclass(frozen=True)
class _FittedClone:
    """A fitted regressor that predicts in the shape of y; some regressors drop the dimension of a single column."""

    estimator: Any
    output_shape: tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        return np.reshape(self.estimator.predict(x), (len(x), *self.output_shape))
