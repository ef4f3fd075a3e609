"""A calibrated estimator of rollouts, and its answers: a bound at every step, the trusted horizon, and the reason (lines 13 to 17)."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from geoq.arrays import chunks, flat, joined, restore, to_numbers
from geoq.checks import check_index, check_integer, warn
from geoq.data.coordinates import CHANGED
from geoq.regions.region import SAFE
from geoq.rollout.features import Reference, RolloutCalibration, bounds_along, scores_along
from geoq.rollout.horizon import HeldOutRollouts, Trust, n_leading, tolerance_of
from geoq.rollout.series import next_states, roll_out
from geoq.surrogate import answers_of, check_callable

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
        safe: whether the calibration supports the bound of a step; with the default region, also of all steps before it.
        support_score: a measure of the distance to the calibration of the states up to the one that a step starts from; safe up to 1.
        supported_horizon: the last step up to which every step is safe; 0 if the first step is not safe.
        diverged_at: the step at which a rollout leaves the range of the data by more than its width; 0 if it does not.
        tolerance: the tolerance in numbers; None without one, like ``trust`` and the last two attributes.
        trust: the rule that sets the trusted horizons; ``trust.tolerance.over(error)`` compares true errors with the tolerance.
        lost: the rollouts without an answer, for example from a state with nan: not safe, with numbers nan and horizons 0.
        asked: the initial states, each with the forcing of the first step.
        forcing: the forcing of each step; None without forcing.
        fitted: the calibration that gave the answer.
        trusted_horizon: the last step up to which every step is safe, lies within the calibration horizon, and has small enough
            bounds for the tolerance. At most the fraction ``trust.broken`` of the rollouts is expected to exceed the tolerance
            within it.
        bound_over_tolerance: the largest ratio of bound and tolerance over the coordinates of a step, or the bound of their norm;
            small enough if it is less than ``trust.largest_ratio`` of the step.
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
        norm = self.trust.tolerance.norm if self.trust else ""
        note = norm and f" (tolerance of the {norm})" if self.trust else f" ({WITHOUT_TOLERANCE})"
        return (
            f"RolloutAssessment of {len(self)} rollouts of {n_steps} steps, {int((horizon == n_steps).sum())} of them {what} to "
            f"the end{note}; reason(i) explains rollout i"
        )

    @property
    def bound(self) -> Float[Any, " n n_steps *output"]:
        """The bound, another name of ``error_hat``."""
        return self.error_hat

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
        end = [f"step {horizon + 1}: {self._end(rollout, horizon)}"] if horizon < n_steps else []
        return [f"rollout {rollout}: {length}", *end]

    def reason(self, rollout: int) -> str:
        """Explain the horizon and the bounds of one rollout in words and numbers."""
        headline, *end = self.outcome(rollout)
        lines = [headline, *(f"  {why}" for why in end)]
        if self.lost[rollout]:
            return "\n".join(lines)
        n_steps, n_calibrated = self.safe.shape[1], self.n_calibrated
        lines.append(f"  {self.trust or WITHOUT_TOLERANCE}")
        for step in filter(None, dict.fromkeys((1, int(self.horizon[0][rollout]), n_steps))):
            bound = self.error_hat[rollout, step - 1]
            lines.append(
                f"  step {step}: mean error bound {float(bound.mean()):.3g}, largest {float(bound.max()):.3g}, "
                f"support score {float(self.support_score[rollout, step - 1]):.3g}, safe up to 1"
            )
        if n_steps > n_calibrated:
            text = "the calibration horizon, the bound uses the calibration of this step"
            lines.append(f"  past step {n_calibrated}, {text}")
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
        ratio, norm = float(self.bound_over_tolerance[rollout, index]), self.trust.tolerance.norm
        size = f"the {f'bound of the {norm}' if norm else 'largest bound'} is {ratio:.3g} times its tolerance"
        if ratio > 1:
            return size
        if index >= self.n_calibrated:
            return "past the calibration horizon, where no error was measured; raise n_calibration"
        limit = self.trust.largest_ratio[index]
        return f"{size}, but bounds of this step are trusted only below {limit:.3g} times the tolerance"


@dataclass(frozen=True)
class FittedRollouts:
    """Everything that the calibration has found. ``state.save`` stores it, except for the callables.

    Features of queries are relative to ``reference``, all states. ``held_out`` has the bounds and errors along the held-out
    rollouts, and ``calibration`` these rollouts with their features; it is None in a file. At the rows ``probes`` a file has the
    answers of the callables.
    """

    quantile: float
    reference: Reference
    bound: Any
    region: Any
    held_out: HeldOutRollouts
    calibration: RolloutCalibration | None
    probes: Any
    surrogate: Any = field(repr=False)
    representation: Any = field(repr=False)

    def assess(self, x0: Any, n_steps: int, tolerance: Any, forcing: Any) -> RolloutAssessment:
        """Roll out from each initial state and bound the error of every step (lines 13 to 17)."""
        check_callable(self.surrogate, "surrogate")
        check_integer(n_steps, "n_steps", 1)
        start, layout = to_numbers(x0, "x0"), self.reference.layout
        if start.shape[1:] != layout.state or not len(start):
            single = "; a single state needs a first dimension of 1" * (start.shape == layout.state)
            raise ValueError(
                f"x0 has shape {start.shape}, but RolloutGeoQ was fitted on states of shape {layout.state}; pass at least one "
                f"state of that shape{single}."
            )
        along = layout.along(forcing, len(start), n_steps)
        asked = tolerance_of(tolerance, self.reference, self.held_out.bound.shape[2])
        trust = None if asked is None else self.held_out.trust(asked)
        if n_steps > (n_measured := self.held_out.bound.shape[1]):
            warn(
                f"n_steps={n_steps}, but errors were measured for {n_measured} steps, the calibration horizon. The bounds of later "
                "steps have the calibration of this step and can be too small, also where they are safe; raise n_calibration."
            )
        rows = layout.join(start, None if along is None else along[:, 0])
        lost = self.reference.coordinates.unusable(rows).any(axis=1)
        # A row of the data stands in for a row without an answer.
        usable = rows.copy()
        usable[lost] = to_numbers(self.probes, "probes")[0]
        parts = []
        for part in chunks(len(rows), n_steps * rows[:1].size):
            given = None if along is None else along[part]
            answers = self._answers(usable[part], n_steps, given, x0)
            if trust is not None:
                ratio = trust.ratio(answers["error_hat"])
                trusted = n_leading(answers["safe"] & trust.within(ratio))
                answers |= {"bound_over_tolerance": ratio, "trusted_horizon": trusted}
            floats = {n: v.astype(rows.dtype) for n, v in answers.items() if v.dtype.kind == "f"}
            parts.append(answers | floats)
        found: Any = {"lost": lost, "asked": rows.copy(), "forcing": along, "fitted": self}
        for name in parts[0]:
            values = joined([answers[name] for answers in parts])
            values[lost] = np.nan if values.dtype.kind == "f" else 0
            if values.ndim == 3:
                values = values.reshape(len(rows), n_steps, *layout.output)
            found[name] = restore(values, x0)
        return RolloutAssessment(**found, tolerance=getattr(asked, "tolerance", None), trust=trust)

    def _answers(
        self, rows: np.ndarray, n_steps: int, along: np.ndarray | None, like: Any
    ) -> dict[str, np.ndarray]:
        """The answers to rows in the kind of array of ``like``, by the names of ``RolloutAssessment``."""
        # The last step needs no forcing.
        forcing = None if along is None else along[:, [*range(n_steps), -1]]
        reference, layout = self.reference, self.reference.layout
        step = layout.step(self.surrogate)
        rolled = roll_out(step, restore(rows, like), n_steps, reference.range.largest, forcing)
        features = reference.features(rolled, self.representation, like)
        if hasattr(self.bound, "with_members"):
            inside = reference.range.cut(rolled)
            features = self.bound.with_members(features, step, inside, reference, like)
        score = scores_along(self.region, features)
        score[self._changed(rows)] = np.inf
        if along is not None:
            outside = self._outside(along).any(axis=2)
            score[np.logical_or.accumulate(outside, axis=1)] = np.inf
        safe, diverged = score <= SAFE, ~features.alive
        return {
            "prediction": layout.outputs(rolled[:, 1:]),
            "error_hat": bounds_along(self.bound, features),
            "safe": safe,
            "support_score": score,
            "supported_horizon": n_leading(safe),
            "diverged_at": np.where(diverged.any(axis=1), diverged.argmax(axis=1) + 1, 0),
        }

    def _changed(self, rows: np.ndarray) -> np.ndarray:
        """Which initial states change a coordinate that is constant in the data: its effect is unknown."""
        coordinates, n_values = self.reference.coordinates, self.reference.layout.n_values
        return np.asarray(coordinates.changed(coordinates(rows))[:, :n_values].any(axis=1))

    def _outside(self, along: np.ndarray) -> np.ndarray:
        """Where the forcing is outside its range in the data."""
        own, around = slice(self.reference.layout.n_values, None), self.reference.range
        slack = CHANGED * self.reference.coordinates.scale[own]
        low, high = around.least[own] - slack, around.most[own] + slack
        return np.asarray((along < low) | (along > high))

    def why_unsafe(self, rows: np.ndarray, forcing: np.ndarray | None, step: int, like: Any) -> str:
        """Why a step, counted from 0, of the rollout from one row is not safe."""
        coordinates, layout = self.reference.coordinates, self.reference.layout
        if self._changed(rows).any():
            why = coordinates.why_changed(coordinates(rows), rows, None, "coordinate")
            return f"initial state: {why}"
        if forcing is not None and self._outside(forcing[:, : step + 1]).any():
            _, n, place = np.argwhere(self._outside(forcing))[0]
            around, at = self.reference.range, layout.n_values + place
            name = f"forcing {place}" if layout.n_forcing > 1 else "forcing"
            return (
                f"{name} of step {n + 1} is {forcing[0, n, place]:.4g}, but it lies between {around.least[at]:.4g} and "
                f"{around.most[at]:.4g} in the data"
            )
        if step:
            return "farther from the data than held-out rollouts were; the bound is a guess"
        rolled = roll_out(layout.step(self.surrogate), restore(rows, like), 1, np.inf)
        first = self.reference.features(rolled, self.representation, like).at(np.zeros(1, int))
        return f"{self.region.explain(first, None)}; the bound is a guess"

    def describe(self) -> str:
        """The calibration, the fitted bound and the safe region, in a few sentences."""
        error, n, bound = self.held_out.error, len(self.reference.geometry.points), self.bound
        ends = [step[~np.isnan(step)] for step in (error[:, 0], error[:, -1])]
        first, last = (float(end.mean()) if end.size else math.inf for end in ends)
        name = f"the bound is a {type(bound).__name__}"
        text = bound.describe() if hasattr(bound, "describe") else name
        return (
            f"{n} states; {len(error)} held-out rollouts of {error.shape[1]} steps, whose mean error is {first:.3g} at the first "
            f"step and {last:.3g} at the last one. {text[:1].upper()}{text[1:]}. Safe means at most as far from the data as "
            "held-out rollouts were."
        )

    def without_tuples(self) -> "FittedRollouts":
        return replace(self, calibration=None, held_out=self.held_out.largest())

    def answers(self) -> dict[str, np.ndarray]:
        """The answers of the user's callables at the stored rows."""
        layout = self.reference.layout
        answers = {"surrogate": np.nan_to_num(next_states(layout, self.surrogate, self.probes))}
        if not self.reference.geometry.points.shared:
            check_callable(self.representation, "representation")
            phi = layout.representation(self.representation)
            answers["representation"] = answers_of(phi, self.probes, "representation")
        return answers

    def relative_difference(self, answer: np.ndarray, expected: np.ndarray) -> float:
        """The largest difference of two answers, relative to the median error of a step, or the deviation where that is unknown."""
        layout = self.reference.layout
        typical = self.reference.coordinates.scale.reshape(-1)[: layout.n_values].astype(float)
        typical[layout.places] = np.nanmedian(self.held_out.error[:, 0], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = flat(abs(answer - expected)) / typical
        return float(np.nan_to_num(ratio, posinf=np.inf).max())
