"""Trajectories of the user as rows, the segments that a fold leaves in, and rollouts of a surrogate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import flat, restore, to_numbers
from geoq.checks import check_finite, check_unit
from geoq.data.coordinates import Coordinates
from geoq.data.domain import Grid, Layout
from geoq.surrogate import answers_of

# Numbers of rows of the data; rows along rollouts, the initial one first; one value for each rollout, step and coordinate; one for
# each rollout and step; one number for each value of a row.
Places: TypeAlias = Int[np.ndarray, " n"]
Rollouts: TypeAlias = Float[np.ndarray, " n n_times *row"]
Values: TypeAlias = Float[np.ndarray, " n n_steps n_coordinates"]
PerStep: TypeAlias = Float[np.ndarray, " n n_steps"]
Row: TypeAlias = Float[np.ndarray, " *row"]
CONVENTION = "forcing[t] drives the step from state t to state t + 1"
# Initial states with a grid of at least this many cells are compared as fields. The first of two axes counts channels if it is
# short and has at most this many entries.
MIN_CELLS, MAX_CHANNELS = 16, 16
# Successive states differ by less than this fraction of their mean deviation; independent ones by about 1.4 times.
ALIKE = 0.9
# A rollout is stopped if a coordinate exceeds the absolute mean of the data by this many standard deviations: squares overflow.
DIVERGED = 1e6
# The values of a coordinate differ only by rounding if their range is at most this many times the precision of the largest.
N_ROUNDINGS = 1000


@dataclass(frozen=True)
class RowLayout:
    """A row of numbers: the state, then the forcing of the step that starts from it.

    The forcing is given, so it has no error: it counts in distances and in the safe region, and not in bounds, tolerances and
    divergence. Without forcing a row has the shape of a state, and with forcing it is flat. ``places`` are the positions of the
    bounded coordinates in the flat state, and ``output`` is the shape of this part.
    """

    state: tuple[int, ...]
    forcing: tuple[int, ...] | None
    places: Places
    output: tuple[int, ...]

    @staticmethod
    def of(state: tuple[int, ...], forcing: tuple[int, ...] | None, index: Any) -> "RowLayout":
        """The layout of states whose coordinates ``index`` are bounded; None means all."""
        places = np.arange(math.prod(state)).reshape(state)
        try:
            chosen = places if index is None else np.atleast_1d(places[index])
        except (IndexError, TypeError, ValueError):
            chosen = places[:0]
        if not chosen.size:
            raise ValueError(
                f"output={index!r} selects no coordinate, but states have shape {state}; pass an index of one state, for example "
                "output=-1, output=slice(0, 3) or output=[0, 2]."
            )
        return RowLayout(state, forcing, chosen.reshape(-1).copy(), chosen.shape)

    @property
    def n_values(self) -> int:
        return math.prod(self.state)

    @property
    def n_forcing(self) -> int:
        """The number of values of the forcing of one step; 0 without forcing."""
        return 0 if self.forcing is None else math.prod(self.forcing)

    def join(self, states: np.ndarray, forcing: np.ndarray | None) -> np.ndarray:
        if forcing is None:
            return states
        return np.concatenate([flat(states), flat(forcing).astype(states.dtype)], axis=1)

    def split(self, rows: Any) -> Any:
        """The states, or a pair of states and forcing, in the user's kind of array."""
        if self.forcing is None:
            return rows
        states, forcing = rows[:, : self.n_values], rows[:, self.n_values :]
        return states.reshape(-1, *self.state), forcing.reshape(-1, *self.forcing)

    def states(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.forcing is None else self.split(rows)[0]

    def outputs(self, rows: Rollouts) -> Values:
        """The bounded coordinates along rollouts."""
        values = rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:]))
        same = np.array_equal(self.places, np.arange(values.shape[2]))
        return values if same else values[:, :, self.places]

    @cached_property
    def region_layout(self) -> Layout:
        """Whether the safe region compares initial states as rows of a table or as fields.

        A state with one axis is a line of cells, unless a few of its coordinates are bounded and the others are a long memory.
        """
        n_axes = min(3, max(1, len(self.state) - 1))
        if len(self.state) == 2:
            first, second = self.state
            n_axes = 2 if first > MAX_CHANNELS or 2 * first >= second else 1
        cells = self.state[len(self.state) - n_axes :]
        few = len(self.state) == 1 and 2 <= len(self.places) < MIN_CELLS
        if math.prod(cells) < MIN_CELLS or few:
            return Layout()
        return Layout(Grid(n_axes), cells, on_cells=True)

    def compared(self, rows: np.ndarray) -> np.ndarray:
        """The coordinates in which the safe region compares initial states: all, or the bounded ones beside a long memory."""
        states = self.states(rows)
        if self.region_layout.is_table and len(self.state) == 1 and self.n_values >= MIN_CELLS:
            return states[:, np.sort(self.places)]
        return states

    def step(self, surrogate: Any) -> Any:
        """The user's step as a step of rows; the forcing stays as it is until the rollout replaces it."""
        if self.forcing is None:
            return surrogate

        def forced(rows: Any) -> Any:
            states, forcing = self.split(rows)
            after = to_numbers(surrogate(states, forcing), "the output of surrogate")
            return restore(self.join(after, to_numbers(forcing, "forcing")), rows)

        return forced

    def representation(self, phi: Any) -> Any:
        """The user's representation as a function of rows."""
        return phi if self.forcing is None else lambda rows: phi(*self.split(rows))

    def along(self, forcing: Any, n: int, n_steps: int) -> Values | None:
        """The forcing of each step of n rollouts; raises unless it fits the forcing of ``fit``."""
        if self.forcing is None:
            if forcing is None:
                return None
            raise ValueError(
                "forcing is given, but fit received no forcing; leave it out, or fit with forcing."
            )
        common, each = (n_steps, *self.forcing), (n, n_steps, *self.forcing)
        values = None if forcing is None else to_numbers(forcing, "forcing")
        if values is None or values.shape not in (common, each):
            got = "forcing=None" if values is None else f"forcing has shape {values.shape}"
            raise ValueError(
                f"{got}, but {n} rollouts of n_steps={n_steps} need {each}, or {common} if they share it, because fit received a "
                f"forcing of shape {self.forcing} per state; {CONVENTION}."
            )
        check_finite(values, "forcing", "replace it by a number")
        values = values.reshape(-1, n_steps, self.n_forcing)
        return np.broadcast_to(values, (n, *values.shape[1:]))


@dataclass(frozen=True)
class Series:
    """The rows of all trajectories in the order of time, the number of their trajectories, and a state in the user's kind of array."""

    rows: Float[np.ndarray, " n *row"]
    number: Places
    like: Any

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def of(trajectories: Any, name: str = "trajectories") -> "Series":
        """Join one trajectory, an array with time as the first axis, or a list of them; raises for unusable ones."""
        several = isinstance(trajectories, Sequence | Iterator) or _are_rows(trajectories, name)
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
            check_finite(array, own, "cut the trajectory there, or fill land with 0")
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
        return np.bincount(self.number)

    def native(self, rows: Any) -> Any:
        """Some of the rows in the user's kind of array."""
        return restore(self.rows[rows], self.like)

    def runs(self, rows: Places) -> list[np.ndarray]:
        """These rows as runs of at least two consecutive rows of one trajectory."""
        rows = np.sort(rows)
        apart = (np.diff(rows) > 1) | (np.diff(self.number[rows]) != 0)
        runs = np.split(rows, np.flatnonzero(apart) + 1)
        return [run for run in runs if len(run) > 1]

    def pairs(self, rows: Places) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are followed by another one of them, and the rows that follow."""
        first = np.concatenate([run[:-1] for run in self.runs(rows)] or [rows[:0]])
        return self.rows[first], self.rows[first + 1]

    def starts(self, held_out: Places, n_steps: int, n_starts: int) -> np.ndarray:
        """Rows that calibration rollouts start from, evenly spread over the held-out rows that ``n_steps`` states follow.

        If there are ``n_starts`` rows for which these states are all held out, only these rows are used: the surrogate of the fold
        has seen no state of the true trajectory.
        """
        last = np.minimum(held_out + n_steps, len(self) - 1)
        same = self.number[last] == self.number[held_out]
        candidates = held_out[(last - held_out == n_steps) & same]
        is_held_out = np.isin(np.arange(len(self)), held_out)
        windows = np.lib.stride_tricks.sliding_window_view(is_held_out, n_steps + 1)
        unseen = windows[candidates].all(axis=1)
        if unseen.sum() >= n_starts:
            candidates = candidates[unseen]
        chosen = np.linspace(0, len(candidates) - 1, min(n_starts, len(candidates)))
        return np.asarray(candidates[chosen.round().astype(int)])


def roll_out(
    step: Any, start: Any, n_steps: int, limit: Row | float, forcing: Values | None = None
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


def _are_rows(array: Any, name: str) -> bool:
    """Whether an array with three axes holds one trajectory per row, (n, n_times, n_values), and not one of shape (n_times, *state)."""
    if len(getattr(array, "shape", ())) != 3 or min(array.shape) < 2:
        return False
    values = to_numbers(array, name).astype(float)
    spread = abs(values - values.mean(axis=(0, 1))).mean() + 1e-300
    along = [abs(np.diff(values, axis=axis)).mean() / spread < ALIKE for axis in (0, 1)]
    if not any(along):
        raise ValueError(
            f"{name} has shape {values.shape}, which can be {len(values)} trajectories or one of {len(values)} times; pass list({name}) or "
            f"[{name}]."
        )
    return not along[0]


@dataclass(frozen=True)
class DataRange:
    r"""The range of each coordinate in the data, extended on both sides by its own width.

    .. math:: \min_i u_{ij} - \ell_j \le u_j \le \max_i u_{ij} + \ell_j, \qquad \ell_j = \max_i u_{ij} - \min_i u_{ij}

    A rollout diverges at the first step that ends outside this range, or at nan. The data contain no information about errors so
    far outside. A coordinate that is constant in the data has an infinite width, and so has the forcing, which is given. A
    rollout is stopped when a coordinate is larger than ``largest``.
    """

    least: Row
    most: Row
    width: Row
    largest: Row

    @staticmethod
    def of(rows: np.ndarray, coordinates: Coordinates, n_forcing: int) -> "DataRange":
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
        kept, rows = inside.reshape(*rows.shape[:2], -1).all(axis=2), rows.copy()
        kept[:, 0] = True
        rows[~np.logical_and.accumulate(kept, axis=1)] = np.nan
        return rows
