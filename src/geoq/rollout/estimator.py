"""RolloutGeoQ: error bounds along autoregressive forecasts, and the horizon up to which they can be trusted."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoq import parameters
from geoq.arrays import Array, chunks, restore, to_tensor
from geoq.checks import check_callable, check_count, check_fitted, check_rows
from geoq.fold_plan import FoldPlan
from geoq.folds import Folds, TemporalFolds
from geoq.parameters import represent
from geoq.probing import N_PROBES, Probes
from geoq.regions.safe_region import Region, fit_region
from geoq.representation import Representation, Standardization
from geoq.rollout import files
from geoq.rollout.assessment import RolloutAssessment
from geoq.rollout.checks import (
    check_all_stored,
    check_lengths,
    check_models,
    check_tolerance,
    one_step,
    plan_starts,
)
from geoq.rollout.crossfit import RolloutProblem, cross_fit_rollouts
from geoq.rollout.features import Embed
from geoq.rollout.fold_rollouts import (
    deployed_surrogate,
    open_checkpoint,
    source_of_rollouts,
)
from geoq.rollout.forcing import Forcing, check_arguments
from geoq.rollout.horizon import HeldOutRollouts, Trust, n_leading, over_tolerance
from geoq.rollout.joint_band import JointBand, excess_of
from geoq.rollout.memory import REMEDY
from geoq.rollout.output import Output
from geoq.rollout.region import InitialStates, RolloutRegion, first_steps, score_along
from geoq.rollout.runaways import warn_of_runaways
from geoq.rollout.saturating import SaturatingGrowth
from geoq.rollout.scheme import RolloutScheme, bound_of, fit_scheme
from geoq.rollout.tolerance import Relative
from geoq.rollout.trajectories import TrainStepper, roll_out
from geoq.settings import check_object
from geoq.surrogate import Surrogate
from geoq.training.checkpoint import Checkpoint, FinishedFolds
from geoq.training.fold_surrogates import TrainedFolds, count_trainings
from geoq.training.progress import BAR, ShowProgress, check_progress, shown, stage
from geoq.unanswered import Gaps, blank, unusable_rows, with_stand_in


@dataclass(eq=False, repr=False)
class RolloutGeoQ:
    r"""Error bounds, safe flags and a trusted horizon for the rollouts of a fixed surrogate of one time step.

    .. math:: \widehat u_{n+1} = \widehat F(\widehat u_n), \quad E_n = |u_n - \widehat u_n|, \quad E_0 = 0

    A forced surrogate also receives inputs that are given at every step,
    :math:`\widehat u_{n+1} = \widehat F(\widehat u_n, f_n)`; see the argument ``forcing`` of ``fit``.

    Unlike ``GeoQ``, it has no ``conformalize``, because conformal risk control on whole held-out rollouts already sets the bound of
    each step at the quantile level of the default scheme. For the same reason it has no ``bounds`` at several levels: each level
    needs its own fit, with another ``quantile`` of the scheme. The schemes do not estimate an ``expected_error``.

    Attributes:
        surrogate: the trained model, a function from a batch of states to the next states, or ``step(states, forcing)``.
            None trains it on all trajectories first.
        train_surrogate: a function ``train_surrogate(segments)`` that returns a new surrogate. It is called once per fold
            with a list of contiguous pieces of trajectories, which contain no held-out state; with forcing, each piece is a
            pair (states, forcing) of arrays of equal length. ``TrainRollout`` is such a recipe. ``TrainedFolds`` uses
            surrogates that were trained elsewhere. None means that no retraining is possible: the surrogate has never seen
            the trajectories given to ``fit``.
        representation: phi, fixed and shared by all folds. It determines the anchors and displacements, which
            ``AdditiveRecursion`` and ``SafeRegion`` use; the default scheme and region use distances of standardised states alone,
            so a representation is refused with them. None means the standardised state, and with forcing the standardised
            state and forcing; a function receives both.
        folds: which states are held out together; the group of a state is the number of its trajectory. The default holds
            out blocks of time, because a forecast starts after the data and not between them. The paper's folds are
            ``ClusterFolds(5)``.
        scheme: the bound as a function of the features along the rollout, copied before it is fitted.
            ``AdditiveRecursion()`` is the paper's.
        n_calibration: the calibration horizon, the number of steps of the calibration rollouts.
        n_starts: the number of calibration rollouts per fold.
        n_anchors: k_a, the number of anchors that displacements are measured from.
        n_support: k, the number of states that the support distance averages over in a fold. For queries it is larger in
            proportion to the number of states.
        safe_region: the rule of the safe region. ``SafeRegion()`` is the paper's; its quantile refers to single steps, the
            quantile of the default to whole rollouts.
        output: the part of the state that is predicted, bounded and compared with the tolerance: an index of one state, such
            as -1, ``slice(0, 3)`` or a mask. None means the whole state.

    Example:
        >>> import numpy as np
        >>> from geoq import RolloutGeoQ
        >>> angle = 0.1 * np.arange(400)
        >>> states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> def train(segments):
        ...     before = np.concatenate([segment[:-1] for segment in segments])
        ...     after = np.concatenate([segment[1:] for segment in segments])
        ...     matrix = np.linalg.lstsq(np.tanh(before), after)[0]
        ...     return lambda x: np.tanh(x) @ matrix
        >>> geoq = RolloutGeoQ(None, train, n_calibration=30).fit(states[:300])
        >>> assessment = geoq.assess(states[300:302], n_steps=20, tolerance=0.5)
        >>> assessment.error_hat.shape
        (2, 20, 2)
        >>> assessment.trusted_horizon
        array([6, 6])
    """

    surrogate: Surrogate | None
    train_surrogate: TrainStepper | TrainedFolds | None
    _: KW_ONLY
    representation: Representation | None = None
    folds: Folds = field(default_factory=lambda: TemporalFolds(5))
    scheme: RolloutScheme = field(default_factory=SaturatingGrowth)
    n_calibration: int = 300
    n_starts: int = 40
    n_anchors: int = 1
    n_support: int = 20
    safe_region: Region = field(default_factory=RolloutRegion)
    output: Any = None

    def fit(
        self,
        trajectories: Array | Sequence[Array],
        *,
        forcing: Array | Sequence[Array] | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = BAR,
    ) -> "RolloutGeoQ":
        """Calibrate on true trajectories.

        Args:
            trajectories: one trajectory, an array of shape (n_times, *state), or a list of such arrays.
            forcing: the inputs of each step, for each trajectory an array of shape (n_times, *forcing): ``forcing[t]`` drives
                the step from state t to state t + 1. A parameter of a trajectory is a forcing that is constant in time.
            checkpoint: a folder, or a ``Checkpoint``, that keeps the rollouts of each finished fold. A run that was interrupted
                continues from there when it is started again, with the same result.
            progress: how the progress is shown, see ``GeoQ.fit``.

        Raises:
            ValueError: the trajectories or a setting is unusable, or the checkpoint belongs to another calibration. These
                checks come before any training.
        """
        # On a copy, so that an interrupted or refused fit leaves the estimator unchanged.
        fitted = copy.copy(self)
        with torch.enable_grad():
            fitted._fit(trajectories, forcing, checkpoint, progress)
        vars(self).update(vars(fitted))
        return self

    def _fit(
        self,
        trajectories: Array | Sequence[Array],
        forcing: Array | Sequence[Array] | None,
        checkpoint: str | Path | Checkpoint | None,
        show: ShowProgress,
    ) -> None:
        self._check_arguments()
        check_progress(show)
        gathered, self.forcing_ = Forcing.gather(trajectories, forcing)
        check_arguments(self.surrogate, forced=forcing is not None)
        check_lengths(gathered, self.n_calibration)
        states = to_tensor(gathered.states, "trajectories")
        self.normalization_ = Standardization.fit(states)
        self.probes_ = gathered.states[:N_PROBES]
        embed = Embed(self.normalization_, self._phi, self.probes_)
        embedding = embed(states)
        self.limit_, self.data_range_ = self.forcing_.limits(
            embedding.normalized, self.normalization_
        )
        points = embedding.normalized.flatten(start_dim=1).cpu().numpy()
        plan = FoldPlan.draw(self.folds, points, gathered.number)
        starts = plan_starts(self, gathered, plan)
        problem = RolloutProblem(
            gathered,
            embed,
            embedding,
            self.data_range_,
            self.scheme.quantile,
            self.n_anchors,
            self.n_support,
            Output.of(self.output, self.forcing_.state),
            self.forcing_.state,
        )
        finished = open_checkpoint(self, checkpoint, gathered, plan, starts)
        # One step of the progress bar per training, one for the scheme and one for the safe region. A fold from which no
        # rollout starts is not trained.
        n_trained = sum(len(first) > 0 for first in starts)
        given = self.surrogate
        n_trainings = count_trainings(given, self.train_surrogate, n_trained)
        with shown(show, n_trainings, n_trained + 2 + (given is None)):
            self._calibrate(problem, plan, starts, finished)

    def _calibrate(
        self,
        problem: RolloutProblem,
        plan: FoldPlan,
        starts: list[np.ndarray],
        checkpoint: FinishedFolds | None,
    ) -> None:
        """Train the surrogate, cross-fit the rollouts, fit the scheme and the safe region, and bound the held-out rollouts."""
        self.surrogate_ = deployed_surrogate(self, problem.trajectories)
        ask = one_step(self._step)
        probes = Probes.of(ask, self.probes_, ask(self.probes_), remedy=REMEDY)
        self.reference_states_ = problem.all_states(plan, self.folds)
        self.calibration_ = cross_fit_rollouts(
            problem,
            plan,
            starts,
            fold_rollouts=source_of_rollouts(self, len(plan.splits)),
            checkpoint=checkpoint,
        )
        self.n_calibrated_ = self.calibration_.n_steps
        # Without a recipe the deployed surrogate has made the calibration rollouts.
        deployed = None if self.train_surrogate is None else self._step
        data = (problem.trajectories, self.data_range_, self.forcing_.n_forcing)
        warn_of_runaways(self.calibration_, deployed, *data)
        with stage("scheme"):
            self.scheme_ = fit_scheme(self.scheme, self.calibration_)
        with stage("safe region"):
            self.safe_region_ = fit_region(self.safe_region, self.calibration_.tuples)
        features = self.calibration_.features
        score = score_along(self.safe_region_, features).flatten()
        safe = self.safe_region_.contains(score)
        bound = bound_of(self.scheme_, features).flatten(start_dim=2)
        error = self.calibration_.error.flatten(start_dim=2)
        self.held_out_ = HeldOutRollouts(
            bound=bound,
            error=error,
            supported=n_leading(safe.reshape(features.alive.shape)),
            start=self.calibration_.start,
            quantile=self.scheme_.quantile,
            excess=excess_of(error, bound),
        )
        probes.check_unchanged()

    def assess(
        self,
        x0: Array,
        n_steps: int,
        tolerance: float | Array | Relative | None = None,
        *,
        forcing: Array | None = None,
    ) -> RolloutAssessment:
        """Roll out from each initial state and bound the error of every step.

        Args:
            x0: initial states, one per row; their error is taken as zero.
            n_steps: the number of steps to forecast. It can exceed the calibration horizon; the trusted horizon cannot.
            tolerance: the largest acceptable error, one number, one per coordinate of the output, or ``Relative(0.1)`` for 10 %
                of the standard deviation of each coordinate. Without a tolerance there is a supported horizon and no trusted
                horizon.
            forcing: the inputs of each step if ``fit`` received a forcing: an array of shape (n, n_steps, *forcing), or
                (n_steps, *forcing) for all rollouts. From the first step whose forcing is outside its
                range in the data, no step is safe.
        """
        check_fitted(self, "held_out_")
        check_callable(self.surrogate_, "surrogate")
        if self.representation is not None:
            check_callable(self.representation, "representation")
        output = self.reference_states_.output
        check_count(n_steps, "n_steps")
        shape = self.forcing_.state
        check_rows(x0, "x0", shape, "RolloutGeoQ was fitted on states", "state")
        along = self.forcing_.along(forcing, x0, n_steps)
        if isinstance(tolerance, Relative):
            data = self.reference_states_, self.normalization_
            tolerance = tolerance.numbers(*data, x0)
        largest = check_tolerance(tolerance, output.shape)
        trust = None
        if largest is not None:
            n_stored = self.held_out_.bound.shape[2]
            check_all_stored(largest, n_stored, len(output.places))
            trust = self.held_out_.trust(largest)
        arrays: dict[str, Tensor] = {}
        x0 = self.forcing_.join(x0, None if along is None else along[:, 0])
        unsafe = self._unsafe(x0, along)
        # The arrays are filled chunk by chunk; joining a list of chunks would need twice the memory.
        parts = self._answers(x0, n_steps, along, unsafe[0], largest, trust)
        for rows, answers in parts:
            for name, part in answers.items():
                if name not in arrays:
                    arrays[name] = part.new_empty((len(x0), *part.shape[1:]))
                arrays[name][rows] = part
        lost, first = arrays.pop("lost"), arrays.pop("first_step", None)
        nu = self.normalization_
        return RolloutAssessment(
            **{name: restore(array, x0) for name, array in arrays.items()},
            threshold=self.safe_region_.threshold,
            meaning=self.safe_region_.meaning,
            n_calibrated=self.n_calibrated_,
            tolerance=tolerance,
            joint=JointBand(self.held_out_.excess, self.held_out_.start),
            trust=trust,
            gaps=Gaps.of(lost, x0, nu, "coordinate") if lost.any() else None,
            changed=unsafe[1],
            initial=InitialStates.of(self.safe_region_, first),
        )

    def bound(self, x0: Array, n_steps: int, *, forcing: Array | None = None) -> Array:
        """The error bound of every step of the rollouts from these initial states, ``assess(x0, n_steps).error_hat``."""
        return self.assess(x0, n_steps, forcing=forcing).error_hat

    def _answers(
        self,
        x0: Array,
        n_steps: int,
        along: Tensor | None,
        unsafe: Tensor,
        largest: Tensor | None,
        trust: Trust | None,
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Answers to chunks of initial states, as tensors by the names of ``RolloutAssessment``."""
        dtype = to_tensor(x0[:1], "x0").dtype
        for rows in chunks(len(x0), n_steps * self.limit_.numel()):
            start = to_tensor(x0[rows], "x0")
            lost = unusable_rows(self.normalization_(start.to(self.limit_)), start)
            usable = with_stand_in(x0[rows], lost, self.probes_[:1])
            forcing = None if along is None else along[rows, [*range(n_steps), -1]]
            states = roll_out(self._step, usable, n_steps, self.limit_, forcing)
            inside = self.data_range_.cut(states)
            embed = Embed(self.normalization_, self._phi, x0)
            features = self.reference_states_.features(inside, embed)
            diverged = ~features.alive
            score = blank(score_along(self.safe_region_, features), lost)
            bound = blank(bound_of(self.scheme_, features), lost)
            score = score.masked_fill(unsafe[rows].to(score.device), torch.inf)
            safe = self.safe_region_.contains(score.flatten()).reshape(diverged.shape)
            answers = {
                "prediction": blank(self.reference_states_.output(states[:, 1:]), lost),
                "error_hat": bound.to(dtype),
                "safe": safe,
                "support_score": score.to(dtype),
                "supported_horizon": n_leading(safe),
                "diverged_at": torch.where(
                    diverged.any(dim=1), diverged.long().argmax(dim=1) + 1, 0
                ),
                "lost": torch.zeros_like(safe[:, 0]) if lost is None else lost,
            }
            if (first := first_steps(self.safe_region_, features)) is not None:
                answers["first_step"] = first
            if largest is not None and trust is not None:
                ratio = over_tolerance(bound, largest)
                # No error was measured past the calibration horizon, so no step there is trusted.
                trusted = (safe & trust.within(ratio))[:, : self.n_calibrated_]
                answers["trusted_horizon"] = n_leading(trusted)
                answers["bound_over_tolerance"] = ratio.to(dtype)
            yield rows, answers

    def _unsafe(self, x0: Array, along: Tensor | None) -> tuple[Tensor, dict[int, str]]:
        """The steps that are not safe whatever their distance is, and the reason for each such rollout."""
        reference, nu = self.reference_states_, self.normalization_
        texts = reference.changes(x0, nu, self.forcing_.n_values)
        unsafe = torch.zeros(len(x0), 1, dtype=torch.bool)
        unsafe[[*texts]] = True
        if along is None:
            return unsafe, texts
        points = reference.geometry.points.normalized
        outside, reasons = self.forcing_.outside(along, points, nu)
        return unsafe.to(outside.device) | outside, reasons | texts

    @property
    def _step(self) -> Surrogate:
        """The deployed surrogate as a step of states that contain the forcing."""
        return self.forcing_.step(self.surrogate_)

    @property
    def _phi(self) -> Representation | None:
        """The representation of states that contain the forcing."""
        phi: Representation | None = self.forcing_.representation(self.representation)
        return phi

    def save(self, path: str | Path) -> None:
        """Write what ``assess`` needs to one file of arrays and numbers.

        The file does not contain the user's callables. It contains their answers at a few stored states, so that ``load``
        can refuse other callables.

        Raises:
            TypeError: the scheme or the safe region is one of the user, which a file cannot contain.
        """
        files.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Representation | None = None,
    ) -> "RolloutGeoQ":
        """Read a calibrated estimator; it gives the same answers as the saved one.

        Args:
            path: a file that ``save`` wrote.
            surrogate: the model that the file was calibrated with.
            representation: the representation that it was calibrated with, if any.

        Raises:
            ValueError: the file is truncated, altered or foreign, or a callable differs from the original one.
        """
        return files.load(cls, path, surrogate=surrogate, representation=representation)

    def __repr__(self) -> str:
        return represent(self, fitted=hasattr(self, "held_out_"))

    get_params = parameters.get_params
    set_params = parameters.set_params

    def _check_arguments(self) -> None:
        for name in ("n_calibration", "n_starts", "n_anchors", "n_support"):
            check_count(getattr(self, name), name)
        example = "SaturatingGrowth(quantile=0.9)"
        check_object(self.scheme, RolloutScheme, "scheme", example)
        example = "DistanceRegion(quantile=0.95)"
        check_object(self.safe_region, Region, "safe_region", example)
        check_models(self)
