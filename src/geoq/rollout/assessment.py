"""The answer of RolloutGeoQ: a bound at every step, the trusted horizon, and the reason."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from geoq.checks import check_index
from geoq.rollout.horizon import Trust

if TYPE_CHECKING:
    from geoq.rollout.fitted import FittedRollouts

WITHOUT_TOLERANCE = (
    "no tolerance was given, so the horizon depends on the support alone and not on the bound"
)


@dataclass(frozen=True, repr=False)
class RolloutAssessment:
    """Error bounds, safe flags and horizons, one row per rollout, in the user's kind of array.

    Along the axis of the steps, index n - 1 is step n. ``RolloutGeoQ.assess`` returns this record; its class has an example.

    Attributes:
        prediction: the output of the predicted states; nan from the step at which they are nan, infinite or too large.
        error_hat: upper estimate of their errors; infinite from the step at which a rollout diverges.
        safe: whether the calibration supports the bound of a step.
        support_score: a measure of the distance to the calibration of the state that a step starts from; safe up to 1.
        supported_horizon: the last step up to which every step is safe; 0 if the first step is not safe.
        diverged_at: the step at which a rollout leaves the range of the data by more than its width; 0 if it does not.
        tolerance: the tolerance in numbers; None without one, like ``trust`` and the last two attributes.
        trust: the rule that sets the trusted horizons.
        lost: the rollouts without an answer, for example from a state with nan: not safe, with numbers nan and horizons 0.
        asked: the initial states, each with the forcing of the first step.
        forcing: the forcing of each step; None without forcing.
        fitted: the calibration that gave the answer.
        trusted_horizon: the last step up to which every step is safe, lies within the calibration horizon, and has small enough
            bounds for the tolerance. At most the fraction ``trust.broken`` of the rollouts is expected to exceed the tolerance
            within it.
        bound_over_tolerance: the largest ratio of bound and tolerance over the coordinates of a step; small enough if it is
            less than ``trust.largest_ratio`` of the step.
    """

    prediction: Float[Any, " n n_steps *output"]
    error_hat: Float[Any, " n n_steps *output"]
    safe: Bool[Any, " n n_steps"]
    support_score: Float[Any, " n n_steps"]
    supported_horizon: Int[Any, " n"]
    diverged_at: Int[Any, " n"]
    tolerance: Shaped[np.ndarray, " *per_coordinate"] | None
    trust: Trust | None
    lost: Bool[np.ndarray, " n"]
    asked: Float[np.ndarray, " n *row"]
    forcing: Float[np.ndarray, " n n_steps n_forcing"] | None
    fitted: "FittedRollouts" = field(compare=False)
    trusted_horizon: Int[Any, " n"] | None = None
    bound_over_tolerance: Float[Any, " n n_steps"] | None = None

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        n_steps = self.safe.shape[1]
        horizon, what = self.horizon
        note = "" if self.trust else f" ({WITHOUT_TOLERANCE})"
        return (
            f"RolloutAssessment of {len(self)} rollouts of {n_steps} steps, {int((horizon == n_steps).sum())} of them {what} to "
            f"the end{note}; reason(i) explains rollout i"
        )

    @property
    def n_calibrated(self) -> int:
        """The calibration horizon. Past it, the bound uses the calibration of its last step."""
        return int(self.fitted.held_out.bound.shape[1])

    @property
    def horizon(self) -> tuple[Int[Any, " n"], str]:
        """The trusted horizon and the word "trusted" if a tolerance was given; otherwise the supported horizon."""
        if self.trusted_horizon is None:
            return self.supported_horizon, "supported"
        return self.trusted_horizon, "trusted"

    def joint_band(
        self, n_steps: int | None = None, *, confidence: float = 0.9
    ) -> Float[Any, " n n_steps *output"]:
        r"""A band around the prediction for all steps and all coordinates of a rollout at once.

        .. math:: P(E_{m,j} \le K \widehat E_{m,j} \text{ for all } m \le n \text{ and all } j) \ge \text{confidence}

        This holds for rollouts that are exchangeable with the held-out ones; see docs/guarantees.md. ``error_hat`` holds for
        each value alone and is smaller. The band is the bound of the first ``n_steps`` steps times one factor; None means all
        steps up to the calibration horizon.
        """
        assessed = self.safe.shape[1]
        if n_steps is None:
            n_steps = min(assessed, self.n_calibrated)
        factor = self.fitted.held_out.joint_factor(n_steps, confidence)
        if n_steps > assessed:
            raise ValueError(
                f"n_steps={n_steps}, but the rollouts were assessed for {assessed} steps; lower n_steps, or assess more steps."
            )
        return self.error_hat[:, :n_steps] * factor

    def outcome(self, rollout: int) -> list[str]:
        """The horizon of one rollout and, if the horizon ends before the last step, why it does: one or two phrases."""
        rollout = check_index(rollout, "rollout", len(self))
        horizons, what = self.horizon
        if self.lost[rollout]:
            coordinates = self.fitted.reference.coordinates
            why = coordinates.why_unusable(self.asked[rollout], None, "coordinate")
            return [f"rollout {rollout}: no error bound, not {what}", f"initial state: {why}"]
        n_steps, horizon = self.safe.shape[1], int(horizons[rollout])
        length = f"{what} for {horizon} of {n_steps} steps" if horizon else f"not {what}"
        if horizon == n_steps:
            return [f"rollout {rollout}: {length}"]
        return [
            f"rollout {rollout}: {length}",
            f"step {horizon + 1}: {self._end(rollout, horizon)}",
        ]

    def reason(self, rollout: int) -> str:
        """Explain the horizon and the bounds of one rollout in words and numbers."""
        headline, *end = self.outcome(rollout)
        lines = [headline, *(f"  {why}" for why in end)]
        if self.lost[rollout]:
            return "\n".join(lines)
        n_steps, horizon = self.safe.shape[1], int(self.horizon[0][rollout])
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
        if int(self.diverged_at[rollout]) == index + 1:
            return "the surrogate diverged: it left the range of the data by more than its width, so the bound is infinite"
        if not bool(self.safe[rollout, index]):
            own = slice(rollout, rollout + 1)
            forcing = None if self.forcing is None else self.forcing[own]
            why = self.fitted.why_unsafe(self.asked[own], forcing, index, self.prediction)
            score = float(self.support_score[rollout, index])
            return f"NOT safe, {why} (support score {score:.3g}, safe up to 1)"
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
            f"support score {float(self.support_score[rollout, step - 1]):.3g}, safe up to 1"
        )
