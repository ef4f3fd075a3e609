"""Rollouts of fold surrogates from states that they have not seen, and single steps from states that they have seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from geoq.arrays import flat
from geoq.checks import add_note_on_error
from geoq.data.coordinates import Coordinates
from geoq.data.probes import First
from geoq.neighbors import Neighbors
from geoq.rollout.members import BLOCK, N_MEASURED, Noise, simulate
from geoq.rollout.memory import REMEDY
from geoq.rollout.series import DataRange, Rollouts, RowLayout, Series, next_states, roll_out
from geoq.surrogate import TRAINED, check_callable
from geoq.training import sources
from geoq.training.sources import Fold

SEGMENTS = (
    "train_surrogate(segments) receives one list of trajectories, or of pairs (states, forcing)"
)


@dataclass(frozen=True)
class FoldRollouts:
    """The data, and the rollouts of fold surrogates, which a recipe trains on the segments that each fold leaves in, or are given.

    A recipe that trains together receives all rows and, for each surrogate, the runs of consecutive rows that it is trained on.
    """

    series: Series
    layout: RowLayout
    coordinates: Coordinates
    range: DataRange
    n_steps: int
    n_support: int
    n_members: int
    recipe: Any
    starts: np.ndarray
    first: First = field(default_factory=list, repr=False, compare=False)

    @property
    def _together(self) -> bool:
        return hasattr(self.recipe, "train_many") and self.layout.forcing is None

    def n_together(self, n_folds: int) -> int:
        sources.check_count(self.recipe, n_folds)
        return self.recipe.n_together(self.series.native(slice(None))) if self._together else 1

    def probe(self, surrogate: Any, fold: Fold, answers: Rollouts) -> tuple[Any, ...]:
        """The step of a surrogate, the states from which its rollouts start, and the next states."""
        ask, starts = partial(next_states, self.layout, surrogate), fold.evaluated_rows
        return ask, self.series.native(starts), self.layout.states(answers[:, 1]), REMEDY

    def train(self, subsets: Sequence[np.ndarray]) -> list[Any]:
        """Train a surrogate on the segments of each subset of the rows, together if the recipe supports it."""
        series, split = self.series, self.layout.split
        runs = [series.runs(rows) for rows in subsets]
        if len(runs) > 1 and self._together:
            surrogates = list(self.recipe.train_many(series.native(slice(None)), runs))
        else:
            with add_note_on_error(SEGMENTS):
                surrogates = [self.recipe([split(series.native(r)) for r in own]) for own in runs]
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
        return surrogates

    def roll_out(self, surrogate: Any, start: np.ndarray) -> Rollouts:
        """Rollouts from these rows of the data, with the forcing of the data along them."""
        along, n_forcing = start[:, None] + np.arange(self.n_steps + 1), self.layout.n_forcing
        forcing = self.series.rows[along, -n_forcing:] if n_forcing else None
        step, rows = self.layout.step(surrogate), self.series.native(start)
        return roll_out(step, rows, self.n_steps, self.range.largest, forcing)

    def answers(self, surrogate: Any, fold: Fold) -> Rollouts:
        """The rollouts of a fold and, as further times, single steps in sample, errors of single steps, and the distances of members."""
        start, step = fold.evaluated_rows, self.layout.step(surrogate)
        with add_note_on_error(f"while rolling out the surrogate of {fold}"):
            rolled = self.roll_out(surrogate, start)
            parts = [rolled, self.next_rows(step, self.in_sample(fold.training_rows, start))]
            if self.n_members:
                distance = self.distance_to(fold.training_rows)
                errors, (_, spread) = self.members(step, start, rolled, distance, own=True)
                parts += [errors, spread]
        return np.concatenate(parts, axis=1, dtype=rolled.dtype)

    def in_sample(self, seen: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Starts of other folds from which a fold is trained to step, in as many rows as it has starts."""
        rows = self.starts[np.isin(self.starts, seen) & np.isin(self.starts + 1, seen)]
        return np.resize(rows, (len(start), -(-len(rows) // len(start))))

    def members(
        self, step: Any, start: np.ndarray, rolled: Rollouts, distance: Any, *, own: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Signed errors of single steps of a model that has not seen these states, and what members with these errors say."""
        places, inside = self.measured(start), self.range.cut(rolled)
        errors = self.step_errors(step, places)
        noise = self.noise(errors, distance(self.series.rows[places]))
        at = distance(inside[:, : self.n_steps : BLOCK])
        return errors, simulate(step, inside, noise, at, self.range, self.series.like, own=own)

    def step_errors(self, step: Any, places: np.ndarray) -> np.ndarray:
        """Signed errors of single steps from these rows of the data."""
        return self.series.rows[places + 1] - self.next_rows(step, places)

    def next_rows(self, step: Any, places: np.ndarray) -> np.ndarray:
        """The rows to which a model steps from these rows of the data."""
        shape = *places.shape, *self.series.rows.shape[1:]
        if not places.size:
            return np.zeros(shape)
        after = roll_out(step, self.series.native(places.reshape(-1)), 1, np.inf)[:, 1]
        return after.reshape(shape)

    def distance_to(self, seen: np.ndarray) -> Callable[[Rollouts], np.ndarray]:
        """The support distance from these rows of the data; infinite for rows that are nan."""
        nu, k = self.coordinates, self.n_support
        known = Neighbors(flat(nu(self.series.rows[seen])))

        def distance(rows: Rollouts) -> np.ndarray:
            each = rows.reshape(-1, *rows.shape[2:])
            found, usable = np.full(len(each), np.inf), np.isfinite(flat(each)).all(axis=1)
            found[usable] = known.nearest(flat(nu(each[usable])), k)[0].mean(axis=1)
            return found.reshape(rows.shape[:2])

        return distance

    def measured(self, start: np.ndarray) -> np.ndarray:
        """The rows after each start at which errors of single steps are measured."""
        return start[:, None] + np.arange(min(self.n_steps, N_MEASURED))

    def finite(self, errors: Rollouts) -> np.ndarray:
        """The errors of the values of the states; an error that is not finite counts as none."""
        errors = errors.reshape(*errors.shape[:2], -1)[..., : self.layout.n_values]
        return np.where(np.isfinite(errors), errors, 0.0)

    def noise(self, errors: Rollouts, distance: np.ndarray) -> Noise:
        """The noise of members, from errors of single steps at these support distances."""
        return Noise.of(self.finite(errors), distance, self.n_members, self.n_steps)
