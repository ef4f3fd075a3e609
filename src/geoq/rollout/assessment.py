"""The answer of RolloutGeoQ: a bound at every step, the trusted horizon, and the reason."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Bool, Float, Int

from geoq.arrays import Array
from geoq.checks import check_index
from geoq.rollout.horizon import Trust
from geoq.rollout.joint_band import JointBand
from geoq.rollout.region import InitialStates
from geoq.unanswered import Gaps

WITHOUT_TOLERANCE = "no tolerance was given, so the horizon depends on the support alone and not on the bound"


@dataclass(frozen=True, repr=False)
class RolloutAssessment:
    """Error bounds, safe flags and horizons, one row per rollout, in the user's kind of array.

    Along the axis of the steps, index n - 1 is step n. ``RolloutGeoQ.assess`` returns this record; its class has an example.

    Attributes:
        prediction: the output of the states that the surrogate predicts; nan from the step at which they are nan, infinite or too large.
        error_hat: upper estimate of their errors; infinite from the step at which a rollout diverges.
        safe: whether the calibration supports the bound of a step; ``meaning`` explains in which sense.
        support_score: a measure of the distance to the calibration of the state that a step starts from. The step is safe if
            the score is at most ``threshold``.
        supported_horizon: the last step up to which every step is safe; 0 if the first step is not safe.
        diverged_at: the step at which a rollout diverges, that is, leaves the range of the data by more than the width of this
            range; 0 if it does not diverge.
        threshold: the largest support score that counts as safe.
        meaning: why a step is safe, and why it is not.
        n_calibrated: the calibration horizon. Past it, the bound uses the calibration of its last step.
        joint: the factors of ``joint_band``.
        tolerance: the tolerance that was given to ``assess``; a ``Relative`` one as numbers, one per coordinate.
        trust: the rule that sets the trusted horizons. None if no tolerance was given, like the next two attributes.
        trusted_horizon: the last step up to which every step is safe, lies within the calibration horizon, and has small
            enough bounds for the tolerance. The fraction of the rollouts whose error exceeds the tolerance within their
            trusted horizon is expected to be at most ``trust.broken``.
        bound_over_tolerance: the largest ratio of bound and tolerance over the coordinates of a step. It is small enough if
            it is less than ``trust.largest_ratio`` of the step.
        gaps: the rollouts without an answer, for example because a coordinate of the initial state is nan. They are not safe,
            their numbers are nan and their horizons 0. None if all rollouts have an answer.
        initial: the initial states and their first steps, if they have more than one coordinate.
        changed: the rollouts whose initial state changes a coordinate that is constant in the data, or whose forcing is outside
            its range in the data, and the reason.
    """

    prediction: Float[Array, " n n_steps *state"]
    error_hat: Float[Array, " n n_steps *state"]
    safe: Bool[Array, " n n_steps"]
    support_score: Float[Array, " n n_steps"]
    supported_horizon: Int[Array, " n"]
    diverged_at: Int[Array, " n"]
    threshold: float
    meaning: tuple[str, str]
    n_calibrated: int
    joint: JointBand
    tolerance: float | Array | None = None
    trust: Trust | None = None
    trusted_horizon: Int[Array, " n"] | None = None
    bound_over_tolerance: Float[Array, " n n_steps"] | None = None
    gaps: Gaps | None = None
    changed: Mapping[int, str] = field(default_factory=dict)
    initial: InitialStates | None = None

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        n_steps = self.safe.shape[1]
        horizon, what = self.horizon
        note = "" if self.trust else f" ({WITHOUT_TOLERANCE})"
        return (
            f"RolloutAssessment of {len(self)} rollouts of {n_steps} steps, "
            f"{int((horizon == n_steps).sum())} of them {what} to the end{note}; reason(i) explains rollout i"
        )

    @property
    def horizon(self) -> tuple[Int[Array, " n"], str]:
        """The trusted horizon and the word "trusted" if a tolerance was given; otherwise the supported horizon."""
        if self.trusted_horizon is None:
            return self.supported_horizon, "supported"
        return self.trusted_horizon, "trusted"

    def joint_band(
        self, n_steps: int | None = None, *, confidence: float = 0.9
    ) -> Float[Array, " n n_steps *state"]:
        r"""A band around the prediction for all steps and all coordinates of a rollout at once.

        .. math:: P(E_{m,j} \le K \widehat E_{m,j} \text{ for all } m \le n \text{ and all } j) \ge \text{confidence}

        This holds for rollouts that are exchangeable with the held-out rollouts; see docs/guarantees.md. ``error_hat`` holds
        for each value alone and is smaller.

        Args:
            n_steps: the number of steps that the band covers. None means all steps up to the calibration horizon.
            confidence: the probability that the band contains the errors of a new rollout.

        Returns:
            The bounds of the first ``n_steps`` steps times one factor.

        Raises:
            ValueError: there are too few held-out rollouts that do not overlap within ``n_steps`` steps.
        """
        assessed = self.safe.shape[1]
        if n_steps is None:
            n_steps = min(assessed, self.n_calibrated)
        factor = self.joint.factor(n_steps, confidence)
        if n_steps > assessed:
            raise ValueError(
                f"n_steps={n_steps}, but the rollouts were assessed for {assessed} steps; lower n_steps, or assess more steps."
            )
        return self.error_hat[:, :n_steps] * factor

    def outcome(self, rollout: int) -> list[str]:
        """The horizon of one rollout and, if the horizon ends before the last step, why it does: one or two phrases."""
        check_index(rollout, "rollout", len(self))
        rollout %= len(self)
        horizons, what = self.horizon
        if self.gaps is not None and rollout in self.gaps:
            why = f"initial state: {self.gaps.explain(rollout)}"
            return [f"rollout {rollout}: no error bound, not {what}", why]
        n_steps, horizon = self.safe.shape[1], int(horizons[rollout])
        length = (
            f"{what} for {horizon} of {n_steps} steps" if horizon else f"not {what}"
        )
        if horizon == n_steps:
            return [f"rollout {rollout}: {length}"]
        end = f"step {horizon + 1}: {self._end(rollout, horizon)}"
        return [f"rollout {rollout}: {length}", end]

    def reason(self, rollout: int) -> str:
        """Explain the horizon and the bounds of one rollout in words and numbers."""
        headline, *end = self.outcome(rollout)
        if self.gaps is not None and rollout % len(self) in self.gaps:
            return "\n".join([headline, f"  {end[0]}"])
        n_steps, horizon = self.safe.shape[1], int(self.horizon[0][rollout])
        lines = [headline, *(f"  {why}" for why in end)]
        lines.append(f"  {self.trust or WITHOUT_TOLERANCE}")
        steps = dict.fromkeys((1, horizon, n_steps))
        lines += [self._step_line(rollout, step) for step in steps if step]
        if n_steps > self.n_calibrated:
            lines.append(
                f"  past step {self.n_calibrated}, the calibration horizon, the bound uses the calibration of this step"
            )
        return "\n".join(lines)

    def _end(self, rollout: int, index: int) -> str:
        """The reason why the horizon ends before the step with this index."""
        score = float(self.support_score[rollout, index])
        if int(self.diverged_at[rollout]) == index + 1:
            return "the surrogate diverged: it left the range of the data by more than its width, so the bound is infinite from this step"
        if rollout in self.changed and math.isinf(score):
            return f"NOT safe, {self.changed[rollout]}"
        if not bool(self.safe[rollout, index]):
            unlike = "" if index or not self.initial else self.initial.explain(rollout)
            if unlike:
                return f"NOT safe, {unlike}"
            return f"NOT safe, {self.meaning[1]} (score {score:.3g}, threshold {self.threshold:.3g})"
        assert self.trust is not None
        assert self.bound_over_tolerance is not None
        ratio = float(self.bound_over_tolerance[rollout, index])
        size = f"the largest bound is {ratio:.3g} times its tolerance"
        if ratio > 1:
            return size
        if index >= self.n_calibrated:
            return "past the calibration horizon, where no error was measured; raise n_calibration"
        limit = self.trust.largest_ratio[index]
        return f"{size}, but bounds of this step are trusted only below {limit:.3g} times the tolerance"

    def _step_line(self, rollout: int, step: int) -> str:
        bound = self.error_hat[rollout, step - 1]
        return (
            f"  step {step}: mean error bound {float(bound.mean()):.3g}, largest {float(bound.max()):.3g}, "
            f"support score {float(self.support_score[rollout, step - 1]):.3g}, threshold {self.threshold:.3g}"
        )
