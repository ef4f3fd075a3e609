"""A calibrated estimator of rollouts: answers to queries (lines 13 to 17)."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from geoq.arrays import chunks, flat, restore, to_numbers
from geoq.checks import check_integer
from geoq.data.coordinates import CHANGED
from geoq.regions.region import SAFE
from geoq.rollout.assessment import RolloutAssessment
from geoq.rollout.features import Reference, RolloutCalibration, bounds_along, scores_along
from geoq.rollout.horizon import HeldOutRollouts, n_leading, over_tolerance, tolerance_of
from geoq.rollout.series import next_states, roll_out
from geoq.surrogate import answers_of, check_callable


@dataclass(frozen=True)
class FittedRollouts:
    """Everything that the calibration has found. ``state.save`` stores it, except for the callables.

    Attributes:
        quantile: the level of the bound.
        reference: all states, which the features of queries are relative to.
        bound: the fitted scheme.
        region: the fitted safe region.
        held_out: bounds and errors along the held-out rollouts.
        calibration: the held-out rollouts with their features; None in a file.
        probes: a few rows, at which a file has the answers of the callables.
        surrogate: the deployed surrogate.
        representation: phi; None for the standardised rows.
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
        largest = tolerance_of(tolerance, self.reference, self.held_out)
        trust = None if largest is None else self.held_out.trust(largest)
        rows = layout.join(start, None if along is None else along[:, 0])
        unusable = self.reference.coordinates.unusable(rows)
        lost = np.zeros(len(rows), dtype=bool) if unusable is None else unusable
        arrays, known = self._without_answer(len(rows), n_steps, rows.dtype), np.flatnonzero(~lost)
        for part in chunks(len(known), n_steps * rows[:1].size):
            own = known[part]
            answers = self._answers(rows[own], n_steps, None if along is None else along[own], x0)
            if trust is not None:
                ratio = over_tolerance(answers["error_hat"], np.asarray(largest))
                trusted = n_leading(answers["safe"] & trust.within(ratio))
                answers |= {"bound_over_tolerance": ratio, "trusted_horizon": trusted}
            for name, values in answers.items():
                arrays[name][own] = values.reshape(len(own), *arrays[name].shape[1:])
        if trust is None:
            del arrays["bound_over_tolerance"], arrays["trusted_horizon"]
        found = {name: restore(array, x0) for name, array in arrays.items()}
        context: Any = {"lost": lost, "asked": rows, "forcing": along, "fitted": self}
        return RolloutAssessment(**found, tolerance=largest, trust=trust, **context)

    def _without_answer(self, n: int, n_steps: int, dtype: Any) -> dict[str, np.ndarray]:
        output = self.reference.layout.output
        numbers = {"prediction": output, "error_hat": output}
        numbers |= {"support_score": (), "bound_over_tolerance": ()}
        counts = ("supported_horizon", "trusted_horizon", "diverged_at")
        return {
            **{name: np.full((n, n_steps, *row), np.nan, dtype) for name, row in numbers.items()},
            **{name: np.zeros(n, dtype=int) for name in counts},
            "safe": np.zeros((n, n_steps), dtype=bool),
        }

    def _answers(
        self, rows: np.ndarray, n_steps: int, along: np.ndarray | None, like: Any
    ) -> dict[str, np.ndarray]:
        """The answers to rows in the kind of array of ``like``, by the names of ``RolloutAssessment``."""
        # The last step needs no forcing.
        forcing = None if along is None else along[:, [*range(n_steps), -1]]
        step, largest = self.reference.layout.step(self.surrogate), self.reference.range.largest
        rolled = roll_out(step, restore(rows, like), n_steps, largest, forcing)
        features = self.reference.features(rolled, self.representation, like)
        if hasattr(self.bound, "with_members"):
            inside = self.reference.range.cut(rolled)
            features = self.bound.with_members(features, step, inside, self.reference, like)
        score = scores_along(self.region, features)
        score[self._changed(rows)] = np.inf
        if along is not None:
            outside = self._outside(along).any(axis=2)
            score[np.logical_or.accumulate(outside, axis=1)] = np.inf
        safe, diverged = score <= SAFE, ~features.alive
        return {
            "prediction": self.reference.layout.outputs(rolled[:, 1:]),
            "error_hat": bounds_along(self.bound, features),
            "safe": safe,
            "support_score": score,
            "supported_horizon": n_leading(safe),
            "diverged_at": np.where(diverged.any(axis=1), diverged.argmax(axis=1) + 1, 0),
        }

    def _changed(self, rows: np.ndarray) -> np.ndarray:
        """Which initial states change a coordinate that is constant in the data: its effect is unknown."""
        coordinates, n_values = self.reference.coordinates, self.reference.layout.n_values
        changed = flat(coordinates.changed(coordinates(rows)))[:, :n_values]
        return np.asarray(changed.any(axis=1))

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
        if (
            forcing is not None
            and (places := np.argwhere(self._outside(forcing[:, : step + 1]))).size
        ):
            _, n, place = places[0]
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
        error, n = self.held_out.error, len(self.reference.geometry.points)
        ends = [step[~np.isnan(step)] for step in (error[:, 0], error[:, -1])]
        first, last = (float(end.mean()) if end.size else math.inf for end in ends)
        bound = f"the bound is a {type(self.bound).__name__}"
        bound = self.bound.describe() if hasattr(self.bound, "describe") else bound
        return (
            f"{n} states; {len(error)} held-out rollouts of {error.shape[1]} steps, whose mean error is {first:.3g} at the first "
            f"step and {last:.3g} at the last one. {bound[:1].upper()}{bound[1:]}. Safe means at most as far from the data as "
            "held-out rollouts were."
        )

    # Files

    def without_tuples(self) -> "FittedRollouts":
        """The same calibration for a file."""
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
        """The largest difference of two answers of steps, relative to the median error of one step.

        The coordinates that are not bounded have no error; they are compared with their deviation in the data.
        """
        layout = self.reference.layout
        typical = self.reference.coordinates.scale.reshape(-1)[: layout.n_values].astype(float)
        typical[layout.places] = np.nanmedian(self.held_out.error[:, 0], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = flat(abs(answer - expected)) / typical
        return float(np.nan_to_num(ratio, posinf=np.inf).max())
