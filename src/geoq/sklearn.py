"""The scikit-learn interface of GeoQ: a regressor with error bounds beside its predictions."""

import sys
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import RandomForestRegressor
from sklearn.utils import Tags, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from geoq.arrays import native
from geoq.checks import add_note_on_error, warn
from geoq.core.assessment import Assessment
from geoq.core.conformal import guarantee_of
from geoq.core.estimator import GeoQ
from geoq.core.folds import Folds
from geoq.data.domain import Domain
from geoq.data.table import is_frame
from geoq.regions.region import SafeRegion
from geoq.surrogate import ErrorFunctional, absolute_error
from geoq.training.checkpoint import Checkpoint
from geoq.training.sources import ShowProgress, TrainingTime, progress_bar


@dataclass(eq=False, repr=False)
class GeoQRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A scikit-learn regressor that also bounds the errors of its predictions.

    ``predict`` returns the prediction of the regressor, in the shape of y; ``score`` and searches over ``estimator__...``
    evaluate that prediction. The calibration fits one clone of the regressor per fold. The regressor receives data frames as
    they are, so it can be a pipeline with a ``ColumnTransformer``. Columns can hold numbers, dates, booleans, strings or
    categories, and missing values if the regressor accepts them.

    Args:
        estimator: the regressor, cloned before it is fitted. None means ``RandomForestRegressor(random_state=0)``.
        quantile: the quantile level of the bound.
        domain: where inputs and errors lie; None finds it from the shapes.
        representation: a metric or a function phi; None means ``SensitivityMetric()``.
        error_functional: rho, the error that is bounded.
        folds: which points are held out together. None means ``default_folds()``, 15 fits of the regressor;
            ``RandomFolds(5)`` is cheaper and suits queries inside the data.
        bound_model: how the bound is fitted; None means ``TwoLawBound()``.
        n_anchors: the number of anchors whose errors are averaged.
        n_support: the number of points that the support distance averages over; None means 20, or as many as the folds leave.
        safe_region: the rule of the safe region; None means ``Region()``.
        limits: known limits of the outputs, a pair (low, high).
        features: a function ``features(x, prediction)`` that informs the bound.
        prefit: whether the regressor is trained already and has never seen the data of ``fit``; then nothing is trained.
        n_jobs: the number of processes that share the trainings.

    Attributes:
        estimator_: the regressor fitted on all data.
        geoq_: the calibrated ``GeoQ``. Everything else is reached through it, such as ``bounds``, ``update`` and ``save``;
            ``GeoQ.load(path, surrogate=model.geoq_.surrogate_)`` reads its files.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X is a data frame with string names.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> from geoq.sklearn import GeoQRegressor
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> model = GeoQRegressor(Ridge()).fit(X, X[:, 0] ** 2 + X[:, 1])
        >>> lower, upper = model.predict_interval(X[:3], 0.9)
        >>> bool((lower <= model.predict(X[:3])).all())
        True
    """

    estimator: Any = None
    _: KW_ONLY
    quantile: float = 0.95
    domain: Domain | None = None
    representation: Any = None
    error_functional: ErrorFunctional = absolute_error
    folds: Folds | None = None
    bound_model: Any = None
    n_anchors: int = 1
    n_support: int | None = None
    safe_region: SafeRegion | None = None
    limits: Any = None
    features: Any = None
    prefit: bool = False
    n_jobs: int | None = None

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        *,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = progress_bar,
    ) -> "GeoQRegressor":
        """Fit the regressor on all data and calibrate its errors on the folds; the arguments as in ``GeoQ.fit``."""
        estimator, X, y = self._prepared(X, y)
        how: dict[str, Any] = {"checkpoint": checkpoint, "progress": progress}
        self.geoq_ = estimator.fit(X, y, groups=groups, n_jobs=self.n_jobs, **how)
        self.estimator_ = self.geoq_.surrogate_.args[0]
        return self

    def estimate(self, X: Any, y: Any, groups: Any = None) -> TrainingTime:
        """Fit the regressor of one fold, and estimate the time of all fits, see ``GeoQ.estimate``."""
        estimator, X, y = copy(self)._prepared(X, y)
        return estimator.estimate(X, y, groups=groups, n_jobs=self.n_jobs)

    def _prepared(self, X: Any, y: Any) -> tuple[GeoQ, Any, Any]:
        """The ``GeoQ`` with these settings, and the checked data."""
        if not hasattr(self._regressor, "predict"):
            raise TypeError(
                f"estimator={self._regressor!r} has no predict, but it must be a regressor; pass for example estimator=Ridge()."
            )
        if is_frame(X):
            # The regressor checks the columns.
            X = validate_data(self, X, skip_check_array=True)
        else:
            # GeoQ refuses values that are not finite.
            numbers = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
            X, y = validate_data(self, X, y, ensure_all_finite=False, **numbers)
        _warn_of_search_around()
        # GeoQ has the defaults of the settings that are None.
        given, own = self.get_params(deep=False), ("estimator", "prefit", "n_jobs")
        chosen = {n: part for n, part in given.items() if part is not None and n not in own}
        models: Any = None, partial(_train, self._regressor)
        if self.prefit:
            check_is_fitted(self._regressor)
            models = partial(_predict, self._regressor, tuple(np.shape(y)[1:])), None
        return GeoQ(*models, **chosen), X, y

    def predict(self, X: Any) -> Any:
        """The prediction of the regressor that was fitted on all data."""
        rows = self._calibrated.fitted_.rows_of(self._validated(X))
        return self._calibrated.surrogate_(native(rows))

    def bound(self, X: Any) -> Any:
        """An upper bound of the error of the prediction at each row, in the shape of the error."""
        return self._calibrated.bound(self._validated(X))

    def assess(self, X: Any) -> Assessment:
        """The prediction, the bound, the safe flag and their parts at each row."""
        return self._calibrated.assess(self._validated(X))

    def predict_interval(
        self, X: Any, quantile: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lower and the upper ends of intervals around the predictions, see ``GeoQ.predict_interval``."""
        return self.assess(X).interval(quantile)

    def conformalize(self, X: Any, y: Any, **how: Any) -> "GeoQRegressor":
        """Scale the bound so that it holds on pairs that ``fit`` has not seen; the arguments as in ``GeoQ.conformalize``."""
        self._calibrated.conformalize(self._validated(X), y, **how)
        return self

    def describe(self) -> str:
        """The calibration in a few sentences, see ``GeoQ.describe``."""
        return self._calibrated.describe()

    @property
    def _calibrated(self) -> GeoQ:
        check_is_fitted(self, "geoq_")
        return self.geoq_

    @property
    def _regressor(self) -> Any:
        return RandomForestRegressor(random_state=0) if self.estimator is None else self.estimator

    def _validated(self, X: Any) -> Any:
        is_table = self._calibrated.fitted_.schema is not None
        return validate_data(self, X, reset=False, skip_check_array=is_table)

    def __repr__(self, **how: Any) -> str:
        return f"{super().__repr__(**how)}{guarantee_of(getattr(self, 'geoq_', None))}"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = get_tags(self._regressor).target_tags.multi_output
        return tags


def _warn_of_search_around() -> None:
    """Warn once if a search of scikit-learn calibrates each of its candidates."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if name == ("sklearn.model_selection._validation", "_fit_and_score"):
            if frame.f_locals.get("parameters"):
                warn(
                    "a search around GeoQRegressor trains each candidate once for the search and once per fold of the calibration; put the "
                    "search inside, GeoQRegressor(GridSearchCV(regressor, ...)), which calibrates the best one."
                )
            return


# Partial functions, because closures cannot be pickled.
def _train(estimator: Any, x: Any, y: Any) -> Any:
    """The prediction of a clone of the regressor, fitted."""
    without = "GeoQ(None, lambda x, y: Regressor(...).fit(x, y).predict)"
    with add_note_on_error(f"each fold needs a clone of the regressor; {without} needs none"):
        own = clone(estimator)
    return partial(_predict, own.fit(x, y), tuple(y.shape[1:]))


def _predict(estimator: Any, output_shape: tuple[int, ...], x: Any) -> np.ndarray:
    """The prediction in the shape of y; some regressors drop the dimension of a single column."""
    return np.reshape(estimator.predict(x), (len(x), *output_shape))
