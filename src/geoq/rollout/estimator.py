"""RolloutGeoQ: error bounds along autoregressive forecasts, and the horizon up to which they can be trusted."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from geoq import state
from geoq.checks import check_fitted, check_quantile
from geoq.core.calibrate import calibrate
from geoq.core.estimator import GeoQ, get_params, represent, represent_html, set_params
from geoq.core.folds import Folds, TemporalFolds
from geoq.regions.region import RolloutRegion, SafeRegion
from geoq.rollout.fitted import FittedRollouts, RolloutAssessment
from geoq.rollout.growth import MemberGrowth
from geoq.rollout.trajectories import Trajectories
from geoq.surrogate import Surrogate
from geoq.training.checkpoint import Checkpoint
from geoq.training.sources import ShowProgress, TrainedFolds, TrainingTime, measure, progress_bar


@dataclass(eq=False, repr=False)
class RolloutGeoQ:
    r"""Error bounds, safe flags and a trusted horizon for forecasts of many steps by a trained model of one step.

    A rollout is a forecast whose output is the next input, :math:`\widehat u_{n+1} = \widehat F(\widehat u_n)`, or
    :math:`\widehat F(\widehat u_n, f_n)` with a given forcing. The trusted horizon is the number of steps for which it keeps a tolerance.

    There is no ``conformalize``, because conformal risk control on whole held-out rollouts already sets the bound of each step, and
    no ``bounds`` at several levels, because each level needs its own fit.

    Attributes:
        surrogate: the trained model, a function from a batch of states to the next states, or ``step(states, forcing)``. None
            trains it on all trajectories first.
        train_surrogate: a function ``train_surrogate(segments)`` that returns a new surrogate, such as ``TrainRollout``. It is
            called once per fold with a list of contiguous pieces of trajectories without held-out states; with forcing, each piece
            is a pair (states, forcing). ``TrainedFolds`` uses surrogates that were trained elsewhere. None means that no
            retraining is possible: the surrogate has never seen the trajectories given to ``fit``.
        quantile: the quantile level of the bound.
        representation: phi(states) or phi(states, forcing), fixed and shared by all folds; None means both, standardised. It
            determines the anchors and displacements, which ``AdditiveRecursion`` and ``PaperRegion`` use; the default scheme
            and region use distances of standardised states alone.
        folds: which states are held out together; the group of a state is the number of its trajectory. The default holds out
            blocks of time, because a forecast starts after the data. The paper's folds are ``ClusterFolds(5)``.
        scheme: the bound: an object with ``fit(calibration, quantile)``, which returns a function of the features along the
            rollout (``RolloutFeatures``). ``AdditiveRecursion()`` is the paper's.
        n_calibration: the calibration horizon, the number of steps of the calibration rollouts.
        n_starts: the number of calibration rollouts per fold.
        n_anchors: k_a, the number of anchors that displacements are measured from.
        n_support: k, the number of states that the support distance averages over in a fold. For queries it is larger in
            proportion to the number of states.
        safe_region: the rule of the safe region. The quantile of the default refers to whole rollouts, the quantiles of
            ``PaperRegion()`` and ``Region()`` to single steps.
        output: the part of the state that is predicted, bounded and compared with the tolerance: an index of one state, such as
            -1, ``slice(0, 3)`` or a mask. None means the whole state.
        fitted_: after ``fit``, everything that the calibration has found.

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
        >>> estimator = RolloutGeoQ(None, train, n_calibration=30).fit(states[:300])
        >>> estimator.assess(states[300:302], n_steps=20, tolerance=0.5).trusted_horizon
        array([13, 12])
    """

    surrogate: Surrogate | None
    train_surrogate: Callable[[list[Any]], Surrogate] | TrainedFolds | None
    _: KW_ONLY
    quantile: float = 0.95
    representation: Any = None
    folds: Folds = field(default_factory=lambda: TemporalFolds(5))
    scheme: Any = field(default_factory=MemberGrowth)
    n_calibration: int = 300
    n_starts: int = 40
    n_anchors: int = 1
    n_support: int = 20
    safe_region: SafeRegion = field(default_factory=RolloutRegion)
    output: Any = None

    def fit(
        self,
        trajectories: Any,
        *,
        forcing: Any = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = progress_bar,
    ) -> "RolloutGeoQ":
        """Calibrate on true trajectories (lines 1-12).

        Args:
            trajectories: one trajectory, an array of shape (n_times, *state), or a list of such arrays.
            forcing: the inputs of each step, for each trajectory an array of shape (n_times, *forcing): ``forcing[t]`` drives
                the step from state t to state t + 1. A parameter of a trajectory is a forcing that is constant in time.
            checkpoint: a folder, or a ``Checkpoint``, that keeps the rollouts of each finished fold. A run that was interrupted
                continues from there when it is started again.
            progress: how the progress is shown, see ``GeoQ.fit``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: the trajectories or a setting is unusable, or the checkpoint belongs to another calibration.
        """
        check_quantile(self.quantile, "quantile")
        task = Trajectories.of(self, trajectories, forcing)
        self.fitted_: FittedRollouts = calibrate(task, progress, task.open_checkpoint(checkpoint))
        return self

    def estimate(self, trajectories: Any, *, forcing: Any = None) -> TrainingTime:
        """Train the surrogate of one fold, and estimate the time of all trainings of ``fit``, see ``GeoQ.estimate``."""
        task = Trajectories.of(self, trajectories, forcing)
        pairs = zip(task.plan.splits, task.starts, strict=True)
        return measure(task.data, [(kept, first) for (kept, _), first in pairs], task.n_trainings)

    @property
    def _fitted(self) -> FittedRollouts:
        check_fitted(self)
        return self.fitted_

    def assess(
        self, x0: Any, n_steps: int, tolerance: Any = None, *, forcing: Any = None
    ) -> RolloutAssessment:
        """Roll out from each initial state and bound the error of every step (lines 13-17).

        Args:
            x0: initial states, one per row; their error is taken as zero.
            n_steps: the number of steps to forecast. It can exceed the calibration horizon; the trusted horizon cannot.
            tolerance: the largest acceptable error, one number, one per coordinate of the output, or ``Relative(0.1)`` for 10 %
                of their standard deviations; ``Norm(0.5)`` or ``Norm(Relative(0.1))`` for the root mean square over the output.
                Without a tolerance there is a supported horizon and no trusted horizon.
            forcing: the inputs of each step if ``fit`` received a forcing: an array of shape (n, n_steps, *forcing), or (n_steps,
                *forcing) for all rollouts. From the first step whose forcing is outside its range in the data, no step is safe.

        Returns:
            Bounds, flags and horizons, one row per rollout.
        """
        return self._fitted.assess(x0, n_steps, tolerance, forcing)

    def bound(self, x0: Any, n_steps: int, *, forcing: Any = None) -> Any:
        """The error bound of every step of the rollouts from these initial states, ``assess(x0, n_steps).error_hat``."""
        return self.assess(x0, n_steps, forcing=forcing).error_hat

    def save(self, path: str | Path) -> None:
        """Write what ``assess`` needs to one file of arrays and numbers.

        The file contains no callables, but their answers at a few stored states, to recognise them.
        """
        state.save(path, self, calibration=False)

    @classmethod
    def load(
        cls, path: str | Path, *, surrogate: Surrogate, representation: Any = None
    ) -> "RolloutGeoQ":
        """Read a calibrated estimator; it gives bit for bit the same answers as the saved one.

        Args:
            path: a file that ``save`` wrote.
            surrogate: the model that the file was calibrated with; ``surrogate_`` of an estimator that has trained it.
            representation: the representation that it was calibrated with, if any.

        Returns:
            The calibrated estimator.

        Raises:
            ValueError: the file is truncated, altered or foreign, or a callable differs from the original one.
        """
        return state.load(path, cls, surrogate=surrogate, representation=representation)

    def describe(self) -> str:
        """The calibration, the fitted bound and the safe region, in a few sentences."""
        return self._fitted.describe()

    __repr__, _repr_html_, surrogate_ = represent, represent_html, GeoQ.surrogate_
    get_params, set_params = get_params, set_params
