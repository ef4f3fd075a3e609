"""What RolloutGeoQ answers: a bound at every step, until when to trust it, and the reason."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int

from geoq.arrays import Array
from geoq.checks import check_index
from geoq.rollout.horizon import Trust

ONLY_SUPPORT = (
    "no tolerance was given, so only the support was judged, not the size of the error"
)


@dataclass(frozen=True, repr=False)
class RolloutAssessment:
    """What is said of each rollout, in the user's kind of array; index n - 1 along the steps is step n.

    Attributes:
        prediction: the surrogate's states at steps 1, 2, ...; nan from the step on at which a rollout diverged.
        error_hat: upper estimate of their errors; infinite from that step on.
        safe: whether the calibration supports the bound of this step; ``meaning`` says in which sense.
        support_score: how far the state that the step starts from is from that support; safe means at most ``threshold``.
        supported_horizon: last step up to which every step was safe; 0 if the first step already was not.
        diverged_at: step at which a rollout diverged, 0 if it did not.
        threshold: largest support score that counts as safe.
        meaning: what it means to be safe, and not to be.
        n_calibrated: the calibration horizon; past it the bound rests on the last step calibrated.
        tolerance: what the bounds were compared with, as it was given.
        trust: what the trusted horizons rest on. None, like the next two, if no tolerance was given.
        trusted_horizon: last step up to which every step was safe and every coordinate's bound small enough for the
            tolerance, within the calibration horizon; at most the share ``trust.broken`` of such rollouts exceeds the
            tolerance before.
        bound_over_tolerance: the largest bound of each step in units of the tolerance; small enough means below
            ``trust.limit`` and not above 1.
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
    tolerance: float | Array | None = None
    trust: Trust | None = None
    trusted_horizon: Int[Array, " n"] | None = None
    bound_over_tolerance: Float[Array, " n n_steps"] | None = None

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        n_steps = self.safe.shape[1]
        horizon, what = self.horizon
        note = "" if self.trust else f" ({ONLY_SUPPORT})"
        return (
            f"RolloutAssessment of {len(self)} rollouts of {n_steps} steps, "
            f"{int((horizon == n_steps).sum())} of them {what} to the end{note}; reason(i) says why"
        )

    @property
    def horizon(self) -> tuple[Int[Array, " n"], str]:
        """The trusted horizon if a tolerance was given, otherwise the supported one, and its name."""
        if self.trusted_horizon is None:
            return self.supported_horizon, "supported"
        return self.trusted_horizon, "trusted"

    def outcome(self, rollout: int) -> list[str]:
        """How long one rollout is trusted or supported and, if this ends before its last step, why."""
        check_index(rollout, "rollout", len(self))
        horizons, what = self.horizon
        n_steps, horizon = self.safe.shape[1], int(horizons[rollout])
        length = (
            f"{what} for {horizon} of {n_steps} steps" if horizon else f"not {what}"
        )
        if horizon == n_steps:
            return [f"rollout {rollout}: {length}"]
        end = f"step {horizon + 1}: {self._end(rollout, horizon)}"
        return [f"rollout {rollout}: {length}", end]

    def reason(self, rollout: int) -> str:
        """Until when this rollout is trusted, and what ends the trust, in words and numbers."""
        headline, *end = self.outcome(rollout)
        n_steps, horizon = self.safe.shape[1], int(self.horizon[0][rollout])
        lines = [headline, *(f"  {why}" for why in end)]
        lines.append(f"  {self.trust or ONLY_SUPPORT}")
        steps = dict.fromkeys((1, horizon, n_steps))
        lines += [self._step_line(rollout, step) for step in steps if step]
        if n_steps > self.n_calibrated:
            lines.append(
                f"  past step {self.n_calibrated}, the calibration horizon, the bound rests on the last step calibrated"
            )
        return "\n".join(lines)

    def _end(self, rollout: int, index: int) -> str:
        """Why the horizon ends before the step with this index."""
        score = float(self.support_score[rollout, index])
        if int(self.diverged_at[rollout]) == index + 1:
            return "the surrogate diverged, so the bound is infinite from here on"
        if not bool(self.safe[rollout, index]):
            return f"NOT safe, {self.meaning[1]} (score {score:.3g}, threshold {self.threshold:.3g})"
        assert self.trust is not None
        assert self.bound_over_tolerance is not None
        ratio = float(self.bound_over_tolerance[rollout, index])
        told = f"a bound is {ratio:.3g} of its tolerance"
        if ratio > 1:
            return told
        if ratio >= self.trust.limit:
            return f"{told}; held-out rollouts that were trusted above {self.trust.limit:.3g} of it exceeded it too often"
        return "past the calibration horizon, where no error was measured; raise n_calibration"

    def _step_line(self, rollout: int, step: int) -> str:
        bound = self.error_hat[rollout, step - 1]
        return (
            f"  step {step}: mean error bound {float(bound.mean()):.3g}, largest {float(bound.max()):.3g}, "
            f"support score {float(self.support_score[rollout, step - 1]):.3g} against {self.threshold:.3g}"
        )
