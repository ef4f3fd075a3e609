"""What RolloutGeoQ answers: a bound at every step, until when to trust it, and the reason."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int

from geoq.surrogate import Array


@dataclass(frozen=True, repr=False)
class RolloutAssessment:
    """What is said of each rollout, in the user's kind of array; index n - 1 along the steps is step n.

    Attributes:
        prediction: the surrogate's states at steps 1, 2, ...; nan from the step on at which a rollout diverged.
        error_hat: upper estimate of their errors; infinite from that step on.
        safe: whether the calibration supports the bound of this step; ``meaning`` says in which sense.
        support_score: how far the state that the step starts from is from that support; safe means at most ``threshold``.
        trusted_horizon: last step up to which every step was safe and, if a tolerance was given, every coordinate's
            bound within it; 0 if the first step already was not.
        diverged_at: step at which a rollout diverged, 0 if it did not.
        threshold: largest support score that counts as safe.
        meaning: what it means to be safe, and not to be.
        n_calibrated: the calibration horizon; past it the bound rests on the last step calibrated.
        tolerance: what the bounds were compared with, as it was given.
    """

    prediction: Float[Array, " n n_steps *state"]
    error_hat: Float[Array, " n n_steps *state"]
    safe: Bool[Array, " n n_steps"]
    support_score: Float[Array, " n n_steps"]
    trusted_horizon: Int[Array, " n"]
    diverged_at: Int[Array, " n"]
    threshold: float
    meaning: tuple[str, str]
    n_calibrated: int
    tolerance: float | Array | None

    def __len__(self) -> int:
        return len(self.safe)

    def __repr__(self) -> str:
        n_steps = self.safe.shape[1]
        return (
            f"RolloutAssessment of {len(self)} rollouts of {n_steps} steps, "
            f"{int((self.trusted_horizon == n_steps).sum())} of them trusted to the end; reason(i) says why"
        )

    def reason(self, rollout: int) -> str:
        """Until when this rollout is trusted, and what ends the trust, in words and numbers."""
        n_steps, horizon = self.safe.shape[1], int(self.trusted_horizon[rollout])
        trusted = (
            f"trusted for {horizon} of {n_steps} steps" if horizon else "not trusted"
        )
        lines = [f"rollout {rollout}: {trusted}"]
        if horizon < n_steps:
            lines.append(
                f"  step {horizon + 1}: {self._end_of_trust(rollout, horizon)}"
            )
        told = dict.fromkeys((1, horizon, n_steps))
        lines += [self._step_told(rollout, step) for step in told if step]
        if n_steps > self.n_calibrated:
            lines.append(
                f"  past step {self.n_calibrated}, the calibration horizon, the bound rests on the last step calibrated"
            )
        return "\n".join(lines)

    def _end_of_trust(self, rollout: int, index: int) -> str:
        score = float(self.support_score[rollout, index])
        if int(self.diverged_at[rollout]) == index + 1:
            return "the surrogate diverged, so the bound is infinite from here on"
        if not bool(self.safe[rollout, index]):
            return f"NOT safe, {self.meaning[1]} (score {score:.3g}, threshold {self.threshold:.3g})"
        return f"the largest bound, {float(self.error_hat[rollout, index].max()):.3g}, exceeds the tolerance"

    def _step_told(self, rollout: int, step: int) -> str:
        bound = self.error_hat[rollout, step - 1]
        return (
            f"  step {step}: mean error bound {float(bound.mean()):.3g}, largest {float(bound.max()):.3g}, "
            f"support score {float(self.support_score[rollout, step - 1]):.3g} against {self.threshold:.3g}"
        )
