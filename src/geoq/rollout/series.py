"""The trajectories of the user as rows, the segments that a fold leaves in, and rollouts of a surrogate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import flat, restore, to_numbers
from geoq.checks import check_finite, check_unit
from geoq.data.coordinates import Coordinates
from geoq.rollout.layout import CONVENTION, RowLayout
from geoq.surrogate import answers_of

# Rows along rollouts, the initial one first; one value for each rollout, step and coordinate; one for each rollout and step.
Rollouts: TypeAlias = Float[np.ndarray, " n n_times *row"]
Values: TypeAlias = Float[np.ndarray, " n n_steps n_coordinates"]
PerStep: TypeAlias = Float[np.ndarray, " n n_steps"]
# A rollout is stopped if a coordinate exceeds the absolute mean of the data by this many standard deviations: squares overflow.
DIVERGED = 1e6
# The values of a coordinate differ only by rounding if their range is at most this many times the precision of the largest.
N_ROUNDINGS = 1000


@dataclass(frozen=True)
class Series:
    """The rows of all trajectories.

    Attributes:
        rows: the states, each with its forcing; within a trajectory they are in the order of time.
        number: for each row, the number of its trajectory.
        like: a state in the user's kind of array.
    """

    rows: Float[np.ndarray, " n_rows *row"]
    number: Int[np.ndarray, " n_rows"]
    like: Any

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def of(trajectories: Any, name: str = "trajectories") -> "Series":
        """Join one trajectory, an array with time as the first axis, or a list of them; raises for unusable ones."""
        several = isinstance(trajectories, Sequence | Iterator)
        listed = list(trajectories) if several else [trajectories]
        if not listed:
            raise ValueError(f"{name} is an empty list; pass at least one trajectory.")
        names = [f"{name}[{place}]" if several else name for place in range(len(listed))]
        arrays = [to_numbers(*pair) for pair in zip(listed, names, strict=True)]
        for array, own in zip(arrays, names, strict=True):
            usable = array.ndim > 1 and len(array) > 1 and array.size
            if not usable or array.shape[1:] != arrays[0].shape[1:]:
                raise ValueError(
                    f"{own} has shape {array.shape}, but trajectories have shape (n_times, *state) with at least two times and "
                    "the same states in all of them; pass scalars with shape (n_times, 1)."
                )
            check_finite(array, own, "cut the trajectory there")
            check_unit(array, own, by_column=True)
            check_unit(array, own, by_column=False)
        number = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
        return Series(np.concatenate(arrays), number, listed[0][:1])

    @staticmethod
    def forced(trajectories: Any, forcing: Any, output: Any) -> tuple["Series", RowLayout]:
        """The trajectories with their forcing, one row per state; raises for unusable ones."""
        series = Series.of(trajectories)
        if forcing is None:
            return series, RowLayout.of(series.rows.shape[1:], None, output)
        given = Series.of(forcing, "forcing")
        lengths, own = series.lengths.tolist(), given.lengths.tolist()
        if lengths != own:
            raise ValueError(
                f"forcing has {own} rows, but the trajectories have {lengths} states; {CONVENTION}, so pass one array per "
                "trajectory with one row per state (the last row drives no step of the data: repeat the row before)."
            )
        layout = RowLayout.of(series.rows.shape[1:], given.rows.shape[1:], output)
        return Series(layout.join(series.rows, given.rows), series.number, series.like), layout

    @property
    def lengths(self) -> Int[np.ndarray, " n_trajectories"]:
        """The number of states of each trajectory."""
        return np.bincount(self.number)

    def native(self, rows: Any) -> Any:
        """Some of the rows in the user's kind of array."""
        return restore(self.rows[rows], self.like)

    def runs(self, rows: Int[np.ndarray, " n"]) -> list[np.ndarray]:
        """These rows as runs of at least two consecutive rows of one trajectory."""
        rows = np.sort(rows)
        apart = (np.diff(rows) > 1) | (np.diff(self.number[rows]) != 0)
        runs = np.split(rows, np.flatnonzero(apart) + 1)
        return [run for run in runs if len(run) > 1]

    def pairs(self, rows: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are followed by another one of them, and the rows that follow."""
        among = np.zeros(len(self), dtype=bool)
        among[rows] = True
        first = np.flatnonzero(among[:-1] & among[1:] & (np.diff(self.number) == 0))
        return self.rows[first], self.rows[first + 1]

    def starts(self, held_out: np.ndarray, n_steps: int, n_starts: int) -> np.ndarray:
        """Rows that calibration rollouts start from, evenly spread over the usable held-out rows.

        A held-out row is usable if its trajectory continues for ``n_steps`` states. If there are ``n_starts`` rows for which
        these are all held out, only these rows are used: the surrogate of the fold has seen no state of the true trajectory.
        """
        last = np.minimum(held_out + n_steps, len(self) - 1)
        same = self.number[last] == self.number[held_out]
        candidates = held_out[(last - held_out == n_steps) & same]
        is_held_out = np.zeros(len(self) + 1, dtype=int)
        is_held_out[held_out + 1] = 1
        count = is_held_out.cumsum()
        unseen = count[candidates + n_steps + 1] - count[candidates] == n_steps + 1
        if unseen.sum() >= n_starts:
            candidates = candidates[unseen]
        chosen = np.linspace(0, len(candidates) - 1, min(n_starts, len(candidates)))
        return np.asarray(candidates[chosen.round().astype(int)])


def roll_out(
    step: Any,
    start: Any,
    n_steps: int,
    limit: Float[np.ndarray, " *row"] | float,
    forcing: Float[np.ndarray, " n n_times n_forcing"] | None = None,
) -> Rollouts:
    r"""Apply a step to its own output, ``n_steps`` times, from rows in the user's kind of array.

    .. math:: \widehat u_0 = u, \quad \widehat u_{n+1} = \widehat F(\widehat u_n)

    A rollout stops when it becomes nan, infinite or larger than ``limit`` in a coordinate. From that step its rows are nan, and
    the surrogate is not called on it any more. The ``forcing`` replaces the last values of the rows that the step returns.
    """
    first = to_numbers(start, "x0")
    rows = np.full((len(first), n_steps + 1, *first.shape[1:]), np.nan, first.dtype)
    rows[:, 0] = first
    alive = np.arange(len(first))
    for n in range(1, n_steps + 1):
        if not len(alive):
            break
        after = answers_of(step, restore(rows[alive, n - 1], start), "surrogate")
        if after.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"surrogate returned rows of shape {after.shape[1:]} for rows of shape {first.shape[1:]}; it must return the "
                "next state of each of them."
            )
        # The comparison is false for nan, so nan stops a rollout.
        kept = flat(abs(after) <= limit).all(axis=1)
        alive = alive[kept]
        rows[alive, n] = after[kept]
        if forcing is not None:
            rows[alive, n, -forcing.shape[2] :] = forcing[alive, n]
    return rows


def next_states(layout: RowLayout, surrogate: Any, rows: Any) -> np.ndarray:
    """The states after these rows; nan where they are infinite."""
    return layout.states(roll_out(layout.step(surrogate), rows, 1, np.inf)[:, 1])


def step_errors(series: Series, layout: RowLayout, surrogate: Any, start: np.ndarray) -> np.ndarray:
    """The errors of one step from these rows."""
    after = roll_out(layout.step(surrogate), series.native(start), 1, np.inf)[:, 1:]
    return abs(layout.outputs(series.rows[start[:, None] + 1]) - layout.outputs(after))[:, 0]


@dataclass(frozen=True)
class DataRange:
    r"""The range of each coordinate in the data, extended on both sides by its own width.

    .. math:: \min_i u_{ij} - \ell_j \le u_j \le \max_i u_{ij} + \ell_j, \qquad \ell_j = \max_i u_{ij} - \min_i u_{ij}

    A rollout diverges at the first step that ends outside this range, or at nan. The data contain no information about errors so
    far outside. A coordinate that is constant in the data has an infinite width, and so has the forcing, which is given. A
    rollout is stopped when a coordinate is larger than ``largest``.
    """

    least: Float[np.ndarray, " *row"]
    most: Float[np.ndarray, " *row"]
    width: Float[np.ndarray, " *row"]
    largest: Float[np.ndarray, " *row"]

    @staticmethod
    def of(rows: np.ndarray, coordinates: Coordinates, n_forcing: int) -> "DataRange":
        """The range of the rows of the data."""
        least, most = rows.min(axis=0).astype(float), rows.max(axis=0).astype(float)
        precision = np.finfo(rows.dtype).eps * np.maximum(abs(least), abs(most))
        width = np.where(most - least > N_ROUNDINGS * precision, most - least, np.inf)
        largest = abs(coordinates.mean) + DIVERGED * coordinates.scale
        if n_forcing:
            width[-n_forcing:] = largest[-n_forcing:] = np.inf
        return DataRange(least, most, width, largest)

    def cut(self, rows: Rollouts) -> Rollouts:
        """The rows of rollouts, with nan from the step at which a rollout diverges; the initial row always stays."""
        # The comparisons are false for nan, so nan counts as diverged.
        inside = (rows >= self.least - self.width) & (rows <= self.most + self.width)
        kept = inside.reshape(*rows.shape[:2], -1).all(axis=2)
        kept[:, 0] = True
        kept = np.logical_and.accumulate(kept, axis=1)
        kept = kept.reshape(*kept.shape, *(1,) * (rows.ndim - 2))
        return np.where(kept, rows, rows.dtype.type(np.nan))
