"""GeoQ: Algorithm 1 of the paper as an estimator with settings."""

from dataclasses import KW_ONLY, dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from geoq import state
from geoq.arrays import few_workers
from geoq.bounds.two_laws import TwoLawBound
from geoq.checks import check_fitted, check_quantile, module_with_torch
from geoq.core.assessment import Assessment
from geoq.core.calibrate import calibrate
from geoq.core.conformal import WholeField, conformalized, guarantee_of
from geoq.core.fitted import Fitted
from geoq.core.folds import ClusterFolds, Folds, default_folds
from geoq.core.opinion import calibration_text
from geoq.core.pair_checks import beyond_text
from geoq.core.pairs import Pairs
from geoq.core.update import refit_due, updated
from geoq.data.domain import Domain, Layout
from geoq.data.metric import Metric, SensitivityMetric, identity
from geoq.regions.region import PaperRegion, Region, SafeRegion
from geoq.surrogate import ErrorFunctional, Surrogate, TrainSurrogate, absolute_error
from geoq.training.checkpoint import Checkpoint
from geoq.training.sources import (
    PairFolds,
    PredictedFolds,
    ShowProgress,
    TrainedFolds,
    TrainingTime,
    measure,
    progress_bar,
)

# Settings are shown in full up to this many characters. Longer settings are shown by the name of their type.
LONGEST_SETTING = 100
T = TypeVar("T")


def get_params(estimator: Any, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 (scikit-learn's signature)
    """The constructor arguments by name, as scikit-learn's ``clone`` needs them; a base class of it would import it slowly."""
    del deep
    return {part.name: getattr(estimator, part.name) for part in fields(estimator)}


def set_params(estimator: T, /, **params: Any) -> T:
    """Change constructor arguments; if one of the names is wrong, none is changed."""
    names = [*get_params(estimator)]
    for name in params:
        if name not in names:
            raise ValueError(
                f"{type(estimator).__name__} has no parameter {name!r}; it has {', '.join(names)}."
            )
    for name, value in params.items():
        setattr(estimator, name, value)
    return estimator


def represent(estimator: Any) -> str:
    """The names of the two models, all settings that differ from the defaults, and whether the estimator is fitted."""
    defaults = get_params(type(estimator)(None, None))
    parts = []
    for name, value in get_params(estimator).items():
        text, kind = repr(value), str(getattr(value, "__qualname__", type(value).__name__))
        if name in ("surrogate", "train_surrogate"):
            parts.append(f"{name}={None if value is None else kind}")
        elif text != repr(defaults[name]):
            if hasattr(value, "__qualname__"):
                text = kind
            fits = len(text) <= LONGEST_SETTING and "\n" not in text
            parts.append(f"{name}={text if fits else f'{kind}(...)'}")
    state = "fitted" if hasattr(estimator, "fitted_") else "not fitted"
    return f"{type(estimator).__name__}({', '.join(parts)}), {state}{guarantee_of(estimator)}"


def represent_html(estimator: Any) -> str:
    """The settings, and after ``fit`` the description if there is one, for notebooks."""
    fitted = hasattr(estimator, "fitted_") and hasattr(estimator, "describe")
    about = f"<p>{escape(estimator.describe())}</p>" if fitted else ""
    return f"<p><code>{escape(represent(estimator))}</code></p>{about}"


def _no_recipe() -> Any:
    """Raise for a missing recipe: ``train_surrogate=None`` is a statement about the data."""
    raise TypeError(
        "GeoQ needs train_surrogate, the recipe for the fold surrogates; pass a function train_surrogate(x, y) that returns a "
        "trained model, or None if the surrogate has never seen the data that fit will receive."
    )


@dataclass(eq=False, repr=False)
class GeoQ:
    """Error bounds for the predictions of a trained model: a bound, a safe flag and a reason for each query.

    The bound is a quantile of the errors at points that were held out, as a function of their distance to the data, of the errors
    nearby, and of the difference to a Gaussian process through the same data. The model stays as it is.

    ======================  ======================================  ===================================
    call                    data for ``fit``                        trainings
    ======================  ======================================  ===================================
    ``GeoQ(model, train)``  the training data of the model          15, each without a part of the data
    ``GeoQ(None, train)``   the training data                       16; the first one makes the model
    ``GeoQ(model, None)``   data that the model has **never** seen  none
    ======================  ======================================  ===================================

    Warning: in the last form, training data of the model give bounds that are far too small.

    Attributes:
        surrogate: the trained model, kept fixed and called on batches. None trains it on all data first.
        train_surrogate: a function ``train_surrogate(x, y)`` that returns a new surrogate. It is called once per fold, or
            once for many folds if it has ``train_many``. ``TrainedFolds`` and ``PredictedFolds`` use folds that were
            trained elsewhere. None means that the surrogate has never seen the data given to ``fit``.
        quantile: the quantile level of the bound.
        domain: where inputs and errors lie: ``Table()``, ``Grid(n_axes)`` or ``Mesh(nodes)``. None finds it from the shapes.
        representation: how distances are measured. A metric, by default ``SensitivityMetric()``, serves anchors, support
            distance, bound and safe region alike. A function phi(x), fixed and shared by all folds, is the paper's
            form: anchors are found in phi(x) and support distances are measured in standardised inputs.
        error_functional: rho, the error that is bounded; ``log_error`` for positive outputs over several decades.
        folds: which points are held out together; scikit-learn's splitters can be used as well.
        bound_model: how the bound is fitted. None means ``TwoLawBound()`` for tables and ``FieldBound()`` for fields.
        n_anchors: k_a, the number of anchors whose errors are averaged.
        n_support: k, the number of points that the support distance averages over. None means the paper's 20, or as many as
            the folds leave.
        safe_region: the rule of the safe region; ``PaperRegion()`` is the paper's.
        limits: known limits of the outputs, a pair (low, high) of numbers or of arrays with a number for each output; None in
            place of a number means no limit. Bounds and intervals never exceed them.
        features: a function ``features(x, prediction)`` that returns a number per row, or a few, from which the size of the error can be
            seen, such as the norm of a residual. The bound alone uses it, if that lowers its held-out loss.
        fitted_: after ``fit``, everything that the calibration has found.

    Example:
        >>> import numpy as np
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> def train(x, y):
        ...     line = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: np.polyval(line, x[:, 0])
        >>> estimator = GeoQ(None, train, folds=RandomFolds(5)).fit(x, np.sin(3 * x[:, 0]))
        >>> estimator.assess(np.array([[0.5], [3.0]])).safe
        array([ True, False])
    """

    surrogate: Surrogate | None
    train_surrogate: TrainSurrogate | TrainedFolds | PredictedFolds | None = field(
        default_factory=_no_recipe
    )
    _: KW_ONLY
    quantile: float = 0.95
    domain: Domain | None = None
    representation: Metric | Any = field(default_factory=SensitivityMetric)
    error_functional: ErrorFunctional = absolute_error
    folds: Folds = field(default_factory=default_folds)
    bound_model: Any = None
    n_anchors: int = 1
    n_support: int | None = None
    safe_region: SafeRegion = field(default_factory=Region)
    limits: Any = None
    features: Any = None

    @classmethod
    def paper(
        cls,
        surrogate: Surrogate | None,
        train_surrogate: TrainSurrogate | TrainedFolds | PredictedFolds | None,
        **settings: Any,
    ) -> "GeoQ":
        r"""The form of the paper: its distances, cluster folds, bound and safe region; the bound needs torch.

        .. math:: \widehat E(x) = \overline E_{k_a}(x) + \|\psi\| \, h_\eta(T(\psi))  (eq:anchor_error_decomposition)

        ``settings`` change single ones, for example ``n_anchors=50`` or ``representation=encoder``.
        """
        bounds = module_with_torch("geoq.bounds.paper", "GeoQ.paper")
        form: dict[str, Any] = {
            "representation": identity,
            "folds": ClusterFolds(5),
            "bound_model": bounds.NormScaledBound(),
            "safe_region": PaperRegion(),
        }
        return cls(surrogate, train_surrogate, **(form | settings))

    def bound_for(self, layout: Layout) -> Any:
        """The model of the bound: the chosen one, or the default for tables or for fields."""
        if self.bound_model is not None:
            return self.bound_model
        if layout.is_table:
            return TwoLawBound()
        from geoq.bounds.fields import FieldBound

        return FieldBound()

    def fit(
        self,
        x: Any,
        y: Any,
        *,
        groups: Any = None,
        planned: Any = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = progress_bar,
        n_jobs: int | None = None,
    ) -> "GeoQ":
        """Calibrate on pairs of inputs and reference outputs (lines 1-12).

        Args:
            x: inputs, one per row: an array of any shape, or a data frame of pandas or polars. The surrogate and the recipe
                receive data frames as they are. Columns can hold numbers, dates, booleans, strings or categories. A memory map, an
                HDF5 dataset, a Zarr array or a Dask array can be larger than memory; callables receive NumPy arrays.
            y: reference outputs, one per row: an array of any shape, a Series or a data frame. Cells of a
                masked array that are masked in all rows, such as land, or in some rows, such as clouds, do not count. The surrogate
                may return anything there, and the answers are masked arrays. The recipe receives 0 in cells that are masked in all
                rows; if other cells are masked, it receives the masked array, with nan under the mask.
            groups: a label per row; rows with the same label are held out together.
            planned: inputs at which the surrogate will be used, in the kind and shape of x. ``planning.MatchedFolds`` chooses the
                folds by them. With any folds a warning states how many of them are beyond all held-out points.
            checkpoint: a folder, or a ``Checkpoint``, that keeps each finished fold. A run that was interrupted continues from
                there when it is started again.
            progress: a function that receives a ``Progress`` after each training, such as ``print``; by default a bar on
                terminals and in notebooks. None shows nothing. The same lines are logged at the level INFO.
            n_jobs: the number of processes that share the trainings, -1 for one per core; None means ``joblib.parallel_config``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: x, y or a setting is unusable, or the checkpoint belongs to another calibration. These checks come
                before any training.
        """
        check_quantile(self.quantile, "quantile")
        pairs = Pairs.of(self, x, y, groups, planned)
        finished = pairs.open_checkpoint(checkpoint)
        with few_workers(pairs.inputs.size, n_jobs):
            self.fitted_: Fitted = calibrate(pairs, progress, finished)
        return self

    def estimate(
        self, x: Any, y: Any, *, groups: Any = None, planned: Any = None, n_jobs: int | None = None
    ) -> TrainingTime:
        """Train the surrogate of one fold, and estimate the time of all trainings of ``fit`` with the same arguments.

        Returns:
            The number of trainings and their time, without the time of the bound and of the safe region.

        Example:
            >>> import numpy as np
            >>> from sklearn.linear_model import Ridge
            >>> from geoq import GeoQ, RandomFolds
            >>> x = np.linspace(0, 1, 60)[:, None]
            >>> estimator = GeoQ(None, lambda x, y: Ridge().fit(x, y).predict, folds=RandomFolds(5))
            >>> estimator.estimate(x, np.sin(3 * x[:, 0])).n_trainings
            6
        """
        pairs = Pairs.of(self, x, y, groups, planned)
        source = PairFolds(self.train_surrogate, pairs.x, pairs.for_training)
        with few_workers(pairs.inputs.size, n_jobs):
            return measure(source, pairs.plan.splits, pairs.n_trainings)

    @property
    def surrogate_(self) -> Any:
        """The deployed surrogate: the given one, or the one that ``fit`` has trained."""
        return self._fitted.surrogate

    @property
    def _fitted(self) -> Fitted:
        check_fitted(self)
        return self.fitted_

    def assess(self, x: Any) -> Assessment:
        """Error bound, safe flag and their parts at each query (lines 13-17).

        Args:
            x: queries, one per row, of the shape of the inputs of ``fit``. A data frame must have the columns of ``fit``; columns
                in another order are put into that order.

        Returns:
            One row per query. A query with a missing or infinite input has no answer; it is not safe, and its numbers are nan.
        """
        return self._fitted.assess(x)

    def bound(self, x: Any) -> Any:
        """The error bound of each query, ``assess(x).error_hat``, without the other parts in memory."""
        return self._fitted.bound_of(x)

    def bounds(self, x: Any, levels: Any) -> dict[float, Any]:
        """Error bounds by quantile level; bounds of different levels do not cross.

        Bounds with ``has_levels`` compute each level. Others are scaled by factors from the calibration.

        Args:
            x: queries, one per row.
            levels: quantile levels, for example ``(0.5, 0.9)``.

        Returns:
            An array of bounds for each level.
        """
        return self._fitted.bounds(x, levels)

    def predict_interval(self, x: Any, quantile: float | None = None) -> tuple[Any, Any]:
        """The lower and the upper ends of intervals around the predictions, ``assess(x).interval(quantile)``.

        Example:
            >>> import numpy as np
            >>> from geoq import GeoQ, RandomFolds
            >>> x = np.linspace(0, 1, 60)[:, None]
            >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5), limits=(0, 1))
            >>> lower, upper = estimator.fit(x, np.sin(x[:, 0])).predict_interval(x, 0.9)
            >>> bool((lower >= 0).all())
            True
        """
        return self.assess(x).interval(quantile)

    def expected_error(self, x: Any) -> Any:
        """The expected error at each query: not a bound, but a sharper map of where a field is wrong.

        Raises:
            TypeError: the bound estimates only a quantile.
        """
        return self._fitted.expected_error(x)

    def conformalize(self, x: Any, y: Any, *, guarantee: WholeField | None = None) -> "GeoQ":
        """Scale the bound so that it holds at its level on pairs that neither surrogate nor calibration has seen.

        There is one factor for safe queries and one for the others. A safe query that is exchangeable with the pairs is
        covered with at least the probability ``quantile``; of a field, this fraction of the values is expected to be covered.

        Args:
            x: inputs of the pairs.
            y: their reference outputs.
            guarantee: ``WholeField(0.9)`` makes a statement about whole fields; None is the statement above.

        Returns:
            The estimator itself.

        Raises:
            ValueError: the pairs are unusable, some of them are pairs of ``fit``, or too few of them are safe.
            TypeError: the bound cannot be scaled, or ``guarantee`` is something else.
        """
        self.fitted_ = conformalized(self._fitted, x, y, guarantee)
        return self

    def update(self, x: Any, y: Any) -> "GeoQ":
        """Add verified queries to the data of the bound and of the safe region, without a training.

        Queries near them get the bounds and flags that their errors allow, and the factors of the bound follow these errors. The
        surrogate does not change. There is a warning when a new ``fit`` is due. Afterwards no coverage is guaranteed.

        Args:
            x: inputs that were simulated after ``fit``. Rows that were added before change nothing.
            y: their reference outputs.

        Returns:
            The estimator itself.

        Raises:
            ValueError: the pairs are unusable, some of them are pairs of ``fit``, or the estimator was saved without its data.
            TypeError: the bound cannot be scaled.
        """
        self.fitted_ = updated(self._fitted, x, y)
        return self

    def save(self, path: str | Path, *, calibration: bool = True) -> None:
        """Write the calibrated estimator to one file of arrays and numbers.

        The file contains no callables, but their answers at a few stored inputs, to recognise them.

        Args:
            path: the file.
            calibration: False leaves the calibration tuples out. ``assess`` and ``conformalize`` do not need them; ``bounds``
                needs them for bounds without ``has_levels``.
        """
        state.save(path, self, calibration=calibration)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Any = None,
        error_functional: ErrorFunctional | None = None,
        features: Any = None,
    ) -> "GeoQ":
        """Read a calibrated estimator; it gives bit for bit the same answers as the saved one.

        Args:
            path: a file that ``save`` wrote.
            surrogate: the model that the file was calibrated with; ``surrogate_`` of an estimator that has trained it.
            representation: the representation that it was calibrated with, if it was a function.
            error_functional: the error functional, if it was a function of the user; only ``conformalize`` uses it.
            features: the function that it was calibrated with, if there was one.

        Returns:
            The calibrated estimator.

        Raises:
            ValueError: the file is truncated, altered or foreign, or a callable differs from the original one.
        """
        given = {"representation": representation, "error_functional": error_functional}
        return state.load(path, cls, surrogate=surrogate, features=features, **given)

    def describe(self) -> str:
        """The calibration, the fitted bound, the influence of the inputs and the safe region, in a few sentences."""
        fitted, factors = self._fitted, self._fitted.conformal
        text = f"The bound is a {type(fitted.bound).__name__}"
        if hasattr(fitted.bound, "describe"):
            text = fitted.bound.describe().rstrip(".")
        if fitted.metric is not None:
            influence = fitted.metric.describe(fitted.schema)
            text = f"{text}. {influence[:1].upper()}{influence[1:]}"
        covered = (
            "No coverage is guaranteed, since conformalize was not called."
            if not factors.n_pairs
            else f"The bounds are multiplied by the conformal factors {factors.safe:.3g} (safe) and {factors.unsafe:.3g} (not safe), "
            f"from {factors.n_pairs} pairs that were set aside."
        )
        if fitted.n_verified:
            unsafe, own = factors.used
            due = refit_due(fitted)
            covered = (
                f"{fitted.n_verified} of the points are verified queries; since then the bounds are multiplied by {own:.3g} (safe) and "
                f"{unsafe:.3g} (not safe), and no coverage is guaranteed. {f'{due}; a new fit is due.' if due else ''}".strip()
            )
        safe = "Safe means within the region of the held-out points."
        planned = f" {beyond_text(fitted.beyond)}" if fitted.beyond is not None else ""
        return f"{calibration_text(fitted)}{planned} {text}. {safe} {covered}"

    __repr__, _repr_html_ = represent, represent_html
    get_params = get_params
    set_params = set_params
