"""The scikit-learn face of GeoQ: any regressor, with bounds on its errors beside its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import RandomForestRegressor
from sklearn.utils import Tags, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from geoq.assessment import Assessment
from geoq.estimator import GeoQ
from geoq.folds import Folds, RandomFolds
from geoq.increment import IncrementModel
from geoq.power_law import PowerLawIncrement
from geoq.representation import Representation
from geoq.safe_region import DistanceRegion, SafeRule
from geoq.surrogate import Array, ErrorFunctional, absolute_error


class GeoQRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""A scikit-learn regressor that also says how wrong its predictions may be.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + g_\eta(\psi_{k_a, k}(x))  (eq:anchor_error_decomposition)

    ``predict`` is the regressor's own answer, in y's shape; ``score`` and searches over ``estimator__...`` judge that
    answer. Calibration fits one fresh clone per fold. Tables become arrays on the way in, so the regressor sees no column
    names.

    Args:
        estimator: the regressor, cloned before it is fitted. None means ``RandomForestRegressor(random_state=0)``, which
            needs no scaling and serves one output or many.
        representation: phi; None means the standardised input.
        error_functional: rho, which error is meant.
        folds: which points are held out together. None means ``RandomFolds()``, a departure from GeoQ's default that suits
            queries drawn like the data, as scikit-learn's own splits draw them; for queries beyond the data pass
            ``ClusterFolds()``.
        increment_model: g, copied before it is fitted; None means ``PowerLawIncrement()``.
        n_anchors: k_a, anchors whose errors are averaged.
        n_support: k, points that the support distance averages over; None means the paper's 20, or as many as the folds
            leave.
        n_safe: K_safe, calibration features that the support score averages over; None as for ``n_support``.
        safe_quantile: alpha_safe, share of the calibration that its own safe region contains.
        safe_region: the rule of the safe region.

    Attributes:
        estimator_: the regressor fitted on all data.
        geoq_: the calibrated GeoQ.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, where X is a table with names.
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
        n_safe: int | None = None,
        safe_quantile: float = 0.95,
        safe_region: SafeRule = DistanceRegion,
    ) -> None:
        self.estimator = estimator
        self.representation = representation
        self.error_functional = error_functional
        self.folds = folds
        self.increment_model = increment_model
        self.n_anchors = n_anchors
        self.n_support = n_support
        self.n_safe = n_safe
        self.safe_quantile = safe_quantile
        self.safe_region = safe_region

    def fit(
        self, X: Any, y: Any, groups: Sequence[Any] | None = None
    ) -> "GeoQRegressor":
        """Fit the regressor on all data and calibrate its errors on the folds.

        Args:
            X: inputs, one row per sample.
            y: targets, one per row: a number or a row of several outputs.
            groups: a label per row, for fold schemes that hold out whole groups.

        Raises:
            ValueError: the data or a setting is unusable; said before any training starts.
        """
        x, y = validate_data(
            self, X, y, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        geoq = GeoQ(
            None,
            _TrainClone(self._regressor),
            representation=self.representation,
            error_functional=self.error_functional,
            folds=RandomFolds() if self.folds is None else self.folds,
            increment_model=PowerLawIncrement()
            if self.increment_model is None
            else self.increment_model,
            n_anchors=self.n_anchors,
            n_support=self.n_support,
            n_safe=self.n_safe,
            safe_quantile=self.safe_quantile,
            safe_region=self.safe_region,
        )
        self.geoq_ = geoq.fit(x, y, groups=groups)
        assert isinstance(self.geoq_.surrogate_, _FittedClone)
        self.estimator_ = self.geoq_.surrogate_.estimator
        return self

    def predict(self, X: Any) -> Array:
        """What the regressor fitted on all data predicts."""
        check_is_fitted(self, "geoq_")
        return self.geoq_.surrogate_(validate_data(self, X, reset=False))

    def predict_error(self, X: Any) -> Array:
        """Upper bound of the prediction's error at each row, of the error's shape."""
        check_is_fitted(self, "geoq_")
        return self.geoq_.predict(validate_data(self, X, reset=False))

    def assess(self, X: Any) -> Assessment:
        """Prediction, bound, safe flag and their parts at each row."""
        check_is_fitted(self, "geoq_")
        return self.geoq_.assess(validate_data(self, X, reset=False))

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
    """A fresh clone of the regressor, fitted; a class, because closures cannot be pickled."""

    estimator: Any

    def __call__(self, x: Array, y: Array) -> "_FittedClone":
        return _FittedClone(clone(self.estimator).fit(x, y), y.shape[1:])


@dataclass(frozen=True)
class _FittedClone:
    """A fitted regressor that answers in y's shape: for y of one column some regressors drop the column."""

    estimator: Any
    output_shape: tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        return np.reshape(self.estimator.predict(x), (len(x), *self.output_shape))
