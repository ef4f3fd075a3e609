"""GeoQ: Algorithm 1 of the paper, from the calibration to the answers."""

import copy
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoq import archive, files, masks, parameters, preparation
from geoq.arrays import (
    Array,
    Inputs,
    Rows,
    converted,
    few_threads,
    joined,
    restore,
    to_tensor,
)
from geoq.assessment import Assessment, QueryFeatures
from geoq.checks import check_finite
from geoq.conformal import (
    POINTWISE,
    ConformalFactors,
    Guarantee,
    exact_of,
    factors_from_pairs,
    levels_of,
)
from geoq.crossfit import Observations, cross_fit
from geoq.description import describe
from geoq.fold_plan import FoldPlan, draw_folds
from geoq.folds import Folds, default_folds
from geoq.geometry import Geometry, mean_over_field, uses_neighborhood
from geoq.increments.protocol import (
    ChecksErrors,
    HasExpectedError,
    IncrementModel,
    fit_increment,
)
from geoq.increments.two_laws import TwoLawIncrement
from geoq.metric import Metric, SensitivityMetric, all_coordinates, coordinates_of
from geoq.probing import unchanged
from geoq.queries import (
    answers,
    embed,
    explained,
    level_bounds,
    query_rows,
    restored,
    views,
    zero_if_exact,
)
from geoq.regions.safe_region import Region, fit_region
from geoq.regions.support_region import SupportRegion
from geoq.repeats import Repeats
from geoq.representation import Representation
from geoq.scratch import larger_than_memory, stored
from geoq.surrogate import ErrorFunctional, Surrogate, TrainSurrogate, absolute_error
from geoq.table import (
    Table,
    check_same_order,
    input_rows,
    native,
    output_names,
    output_rows,
)
from geoq.training.checkpoint import Checkpoint, FinishedFolds
from geoq.training.duration import TrainingTime, measure
from geoq.training.fold_surrogates import (
    FoldSurrogates,
    count_trainings,
    deployed,
    sources_of,
)
from geoq.training.progress import BAR, ShowProgress, check_progress, shown, stage
from geoq.unanswered import Gaps


@dataclass(eq=False, repr=False)
class GeoQ:
    r"""Error bound, safe flag and reason for the predictions of a fixed, trained surrogate.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + g_\eta(\psi_{k_a, k}(x))  (eq:anchor_error_decomposition)

    Attributes:
        surrogate: the trained model, kept fixed and called on batches. None trains it on all data first.
        train_surrogate: a function ``train_surrogate(x, y)`` that returns a new surrogate. It is called once per fold, or
            once for many folds if it is a ``TrainTogether``. ``TrainedFolds`` and ``PredictedFolds`` use folds that were
            trained elsewhere. None means that no retraining is possible: the data given to ``fit`` were never seen by the
            surrogate, and all errors are its own.
        representation: how distances are measured. A metric, by default ``SensitivityMetric()``, serves anchors, support
            distance, increment model and safe region alike. A function phi(x), fixed and shared by all folds, is the paper's
            form: anchors are found in phi(x) and support distances are measured in standardised inputs; ``identity`` is the
            paper's choice of phi.
        error_functional: rho, the error that is bounded.
        folds: which points are held out together; scikit-learn's splitters can be used as well.
        increment_model: g, copied before it is fitted.
        n_anchors: k_a, the number of anchors whose errors are averaged.
        n_support: k, the number of points that the support distance averages over. None means the paper's 20, or as many as
            the folds leave.
        safe_region: the rule of the safe region; ``SafeRegion()`` is the paper's.

    Example:
        >>> import numpy as np
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> def train(x, y):
        ...     line = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: np.polyval(line, x[:, 0])
        >>> geoq = GeoQ(None, train, folds=RandomFolds(5)).fit(x, np.sin(3 * x[:, 0]))
        >>> geoq.assess(np.array([[0.5], [3.0]])).safe
        array([ True, False])
    """

    surrogate: Surrogate | None
    train_surrogate: TrainSurrogate | FoldSurrogates | None = field(
        default_factory=preparation.no_recipe  # required: None is a statement about the data
    )
    _: KW_ONLY
    representation: Representation | Metric = field(default_factory=SensitivityMetric)
    error_functional: ErrorFunctional = absolute_error
    folds: Folds = field(default_factory=default_folds)
    increment_model: IncrementModel = field(default_factory=TwoLawIncrement)
    n_anchors: int = 1
    n_support: int | None = None
    safe_region: Region = field(default_factory=SupportRegion)

    def fit(
        self,
        x: Inputs,
        y: Inputs,
        *,
        groups: Sequence[Any] | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = BAR,
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
            checkpoint: a folder, or a ``Checkpoint``, that keeps each finished fold. A run that was interrupted continues from
                there when it is started again, with the same result.
            progress: ``ProgressBar()``, a bar on terminals and in notebooks; a function that receives a ``Progress`` after each
                training, such as ``print``; or None. The same lines are logged at the level INFO.

        Raises:
            ValueError: x, y or a setting is unusable, or the checkpoint belongs to another calibration. These checks come
                before any training.
        """
        # On a copy, so that an interrupted or refused fit leaves the estimator unchanged.
        fitted = copy.copy(self)
        with unchanged(x=x, y=y), larger_than_memory(x, y), torch.enable_grad():
            inputs, outputs = input_rows(stored(x)), output_rows(stored(y))
            fitted._fit(inputs, outputs, groups, checkpoint, progress)
        vars(self).update(vars(fitted))
        return self

    def _fit(
        self,
        x: Rows,
        y: Rows,
        groups: Sequence[Any] | None,
        checkpoint: str | Path | Checkpoint | None,
        show: ShowProgress,
    ) -> None:
        """Algorithm 1. Lines 2, 3 and 5 precede line 1, so that unusable data are refused before any training."""
        check_progress(show)
        self.mask_ = masks.Mask.of(y)
        absent, for_training = masks.some_absent(self.mask_, y)
        y = masks.filled(self.mask_, y)
        inputs, plan = self._plan(x, y, groups)
        finished = preparation.open_checkpoint(self, checkpoint, x, y, plan)
        # One step per fold with a surrogate of its own, one for the increment model and one for the safe region.
        n_folds, given = len(plan.splits), self.surrogate
        n_trainings = count_trainings(given, self.train_surrogate, n_folds)
        n_steps = n_folds * (self.train_surrogate is not None) + (given is None) + 2
        with shown(show, n_trainings, n_steps):
            # Line 1: the deployed surrogate, given or trained on all data.
            trained = deployed(self.surrogate, self.train_surrogate, x, for_training)
            self.surrogate_ = masks.masked_surrogate(trained, self.mask_)
            # Line 4, second half: the observed errors E.
            prediction, error = preparation.observed(self, x, y, absent)
            probes = preparation.check_deployed(self, x, y, prediction)
            self.error_ = masks.present_mean(converted(error, inputs), absent)
            if isinstance(self.increment_model, ChecksErrors):
                self.increment_model.check_errors(
                    prediction.to(self.error_), self.error_
                )
            self.error_size_ = mean_over_field(masks.outside(self.mask_, self.error_))
            # Line 3: phi, or the metric, which needs the deployed surrogate.
            self.metric_ = preparation.fit_metric(self, inputs, x, y, finished)
            embedding = embed(self, x, all_coordinates(self.coordinates_, inputs))
            way_out = "representation must return finite numbers"
            check_finite(embedding.z, "representation(x)", way_out)
            data = Observations(
                x=x,
                y=y,
                embedding=embedding,
                error=self.error_,
                prediction=prediction.to(inputs.device),
                metric=self.metric_,
                coordinates=self.coordinates_,
                absent=absent,
                training_y=for_training,
            )
            folds = masks.masked_folds(self.train_surrogate, self.mask_)
            self._calibrate(data, plan, sources_of(folds, trained), finished)
        self.conformal_factors_ = ConformalFactors()
        probes.check_unchanged()
        self.probes_ = probes.inputs
        self.schema_ = x.schema if isinstance(x, Table) else None
        self.output_names_ = output_names(y)

    def _calibrate(
        self,
        data: Observations,
        plan: FoldPlan,
        source: FoldSurrogates | None,
        finished: FinishedFolds | None,
    ) -> None:
        """Lines 6-12 and the threshold of line 16."""
        self.geometry_ = Geometry(
            data.embedding,
            n_anchors=self.n_anchors,
            n_support=self.n_support_,
            collects=uses_neighborhood(self.increment_model),
        )
        # Lines 6-11: the calibration tuples of all folds, and T.
        self.calibration_ = cross_fit(
            data,
            plan,
            fold_surrogates=source,
            error_functional=self.error_functional,
            geometry=self.geometry_,
            checkpoint=finished,
        )
        self.exact_ = exact_of(self.calibration_, self.increment_model)
        row_numbers = math.prod(data.x.shape[1:]) + data.error[0].numel()
        n_numbers = len(self.calibration_) * row_numbers
        # Line 12: the increment model g.
        with stage("increment model"), few_threads(n_numbers):
            model = fit_increment(self.increment_model, self.calibration_)
            self.increment_model_ = model
        # The threshold tau_safe of line 16.
        with stage("safe region"), few_threads(n_numbers):
            self.safe_region_ = fit_region(self.safe_region, self.calibration_)

    def _plan(
        self, x: Rows, y: Rows, groups: Sequence[Any] | None
    ) -> tuple[Tensor, FoldPlan]:
        """The inputs as numbers and the folds; refused if the data or a setting is unusable."""
        inputs = preparation.check_arguments(self, x, y)
        # Line 4, first half: the coordinates nu, fitted to the inputs of line 2.
        self.coordinates_ = coordinates_of(self.representation, inputs, x)
        # Line 5: the folds.
        coordinates = all_coordinates(self.coordinates_, inputs)
        points = coordinates.reshape(len(inputs), -1).cpu().numpy()
        plan = draw_folds(self.folds, points, groups)
        self.repeats_ = Repeats.of(points, to_tensor(y, "y"))
        self.n_support_ = preparation.check_problem(self, x, y, plan)
        return inputs, plan

    def estimate(
        self, x: Inputs, y: Inputs, *, groups: Sequence[Any] | None = None
    ) -> TrainingTime:
        """Train the surrogate of one fold, and estimate the time of all trainings of ``fit`` with the same arguments.

        The time of the increment model and of the safe region is not included.

        Example:
            >>> import numpy as np
            >>> from sklearn.linear_model import Ridge
            >>> from geoq import GeoQ, RandomFolds
            >>> x = np.linspace(0, 1, 60)[:, None]
            >>> geoq = GeoQ(None, lambda x, y: Ridge().fit(x, y).predict, folds=RandomFolds(5))
            >>> geoq.estimate(x, np.sin(3 * x[:, 0])).n_trainings
            6
        """
        rows, outputs = input_rows(stored(x)), output_rows(stored(y))
        outputs = masks.filled(mask := masks.Mask.of(outputs), outputs)
        _, plan = copy.copy(self)._plan(rows, outputs, groups)
        n = count_trainings(self.surrogate, self.train_surrogate, len(plan.splits))
        folds = masks.masked_folds(self.train_surrogate, mask)
        source = sources_of(folds, self.surrogate)
        return measure(source, rows, outputs, plan.splits, n)

    def assess(self, x: Inputs) -> Assessment:
        """Error bound, safe flag and their parts at each query (lines 13-17).

        Args:
            x: queries, one per row, of the shape of the inputs of ``fit``. A data frame must have the columns of ``fit``; columns
                in another order are put into that order.
        """
        queries = query_rows(self, x)
        parts = list(answers(self, queries))
        tensors = {name: joined([part[name] for part in parts]) for name in parts[0]}
        lost = tensors.pop("lost")
        gaps = Gaps.of(lost, queries, self.coordinates_) if lost.any() else None
        explanations = explained(self, queries, tensors)
        arrays = {name: restore(tensor, queries) for name, tensor in tensors.items()}
        for name in ("prediction", "error_hat", "anchor_error", "increment"):
            arrays[name] = masks.hidden(self.mask_, arrays[name])
        features = QueryFeatures(
            arrays.pop("displacement"), arrays.pop("support_distance")
        )
        return Assessment(
            **arrays,
            features=features,
            threshold=self.safe_region_.threshold,
            meaning=self.safe_region_.meaning,
            typical_distance=self.calibration_.typical_distance,
            typical_support_distance=self.calibration_.typical_support_distance,
            explanations=explanations,
            gaps=gaps,
            input_names=self.schema_,
            output_names=self.output_names_,
            repeats=self.repeats_,
            quantile=self.increment_model_.quantile,
            asked=native(queries) if isinstance(queries, Table) else None,
        )

    def bound(self, x: Inputs) -> Array:
        """The error bound of each query, ``assess(x).error_hat``, without the other parts in memory."""
        queries = query_rows(self, x)
        return restored(self, [a["error_hat"] for a in answers(self, queries)], queries)

    def bounds(self, x: Inputs, levels: Sequence[float] | Array) -> dict[float, Array]:
        """Error bounds by quantile level; bounds of different levels do not cross.

        Models with ``HasLevels`` compute each level. The bounds of other models are scaled by factors from the calibration.

        Args:
            x: queries, one per row.
            levels: quantile levels, for example ``(0.5, 0.9)``.
        """
        queries = query_rows(self, x)
        parts = level_bounds(self, queries, levels_of(levels))
        return {level: restored(self, part, queries) for level, part in parts.items()}

    def expected_error(self, x: Inputs) -> Array:
        """The expected error at each query: not a bound, but a sharper map of where a field is wrong.

        Raises:
            TypeError: the increment model estimates only a quantile.
        """
        queries = query_rows(self, x)
        model = self.increment_model_
        if not isinstance(model, HasExpectedError):
            raise TypeError(
                f"{type(model).__name__} estimates an upper quantile of the error and not its mean; look at bounds(x, (0.5,))."
            )
        parts = [
            view.blank(zero_if_exact(self, model.expected_error(view.features)))
            for view in views(self, queries)
        ]
        return restored(self, parts, queries)

    def conformalize(
        self, x: Inputs, y: Inputs, *, guarantee: Guarantee = POINTWISE
    ) -> "GeoQ":
        """Scale the bound so that it holds at its level on pairs that neither surrogate nor calibration has seen.

        There is one factor for safe queries and one for the others. A safe query that is exchangeable with the pairs is
        covered with at least the probability ``quantile``; of a field, this fraction of the values is expected to be covered.

        Args:
            x: inputs of the pairs.
            y: their reference outputs.
            guarantee: the coverage statement; ``WholeField(0.9)`` makes a statement about whole fields.

        Raises:
            ValueError: the pairs are unusable, some of them are pairs of ``fit``, or too few of them are safe.
            TypeError: the increment model cannot be scaled, or ``guarantee`` is not a guarantee.
        """
        queries, outputs = query_rows(self, x), output_rows(y)
        check_same_order(queries, outputs)
        self.conformal_factors_ = factors_from_pairs(self, queries, outputs, guarantee)
        return self

    def save(self, path: str | Path, *, calibration: bool = True) -> None:
        """Write the calibrated estimator to one file of arrays and numbers.

        The file contains no callables, but their answers at a few stored inputs, to recognise them.

        Args:
            path: the file.
            calibration: False leaves the calibration tuples out. ``assess`` and ``conformalize`` do not need them; ``bounds``
                needs them for increment models without ``HasLevels``.
        """
        archive.write(path, *files.state(self, calibration=calibration))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Representation | None = None,
        increment_model: IncrementModel | None = None,
        error_functional: ErrorFunctional | None = None,
    ) -> "GeoQ":
        """Read a calibrated estimator; it gives bit for bit the same answers as the saved one.

        Args:
            path: a file that ``save`` wrote.
            surrogate: the model that the file was calibrated with.
            representation: the representation that it was calibrated with, if any.
            increment_model: the fitted increment model, if it was an object of the user.
            error_functional: the error functional, if it was a function of the user; only ``conformalize`` uses it.

        Raises:
            ValueError: the file is truncated, altered or foreign, or a callable differs from the original one.
        """
        return files.load(
            cls,
            path,
            archive.read(path),
            surrogate=surrogate,
            representation=representation,
            increment_model=increment_model,
            error_functional=error_functional,
        )

    def describe(self) -> str:
        """The calibration, the fitted bound, the influence of the inputs and the safe region, in a few sentences."""
        return describe(self)

    def __repr__(self) -> str:
        return parameters.represent(self, fitted=hasattr(self, "probes_"))

    get_params = parameters.get_params
    set_params = parameters.set_params
