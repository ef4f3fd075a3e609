"""What a row of numbers along a rollout consists of: a state, of which some coordinates are bounded, and its forcing."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from geoq.arrays import flat, restore, to_numbers
from geoq.checks import check_finite
from geoq.data.domain import Grid, Layout

CONVENTION = "forcing[t] drives the step from state t to state t + 1"
# Initial states with a grid of at least this many cells are compared as fields. The first of two axes counts channels if it is
# short and has at most this many entries.
MIN_CELLS, MAX_CHANNELS = 16, 16


@dataclass(frozen=True)
class RowLayout:
    """A row of numbers: the state, then the forcing of the step that starts from it.

    The forcing is given, so it has no error: it counts in distances and in the safe region, and not in bounds, tolerances and
    divergence. Without forcing a row has the shape of a state, and with forcing it is flat.

    Attributes:
        state: the shape of a state.
        forcing: the shape of the forcing of one step; None without forcing.
        places: the positions of the bounded coordinates in the flat state.
        output: the shape of the bounded part of a state.
    """

    state: tuple[int, ...]
    forcing: tuple[int, ...] | None
    places: Int[np.ndarray, " n_outputs"]
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
        """The number of values of a state."""
        return math.prod(self.state)

    @property
    def n_forcing(self) -> int:
        """The number of values of the forcing of one step; 0 without forcing."""
        return 0 if self.forcing is None else math.prod(self.forcing)

    def join(self, states: np.ndarray, forcing: np.ndarray | None) -> np.ndarray:
        """States and their forcing as rows."""
        if forcing is None:
            return states
        return np.concatenate([flat(states), flat(forcing).astype(states.dtype)], axis=1)

    def split(self, rows: Any) -> Any:
        """The states, or a pair of states and forcing, in the user's kind of array."""
        if self.forcing is None:
            return rows
        states, forcing = rows[:, : self.n_values], rows[:, self.n_values :]
        return states.reshape(-1, *self.state), forcing.reshape(-1, *self.forcing)

    def states(self, rows: Shaped[np.ndarray, " n *row"]) -> Shaped[np.ndarray, " n *state"]:
        """The states of rows, without their forcing."""
        if self.forcing is None:
            return rows
        return flat(rows)[:, : self.n_values].reshape(len(rows), *self.state)

    def outputs(
        self, rows: Shaped[np.ndarray, " n n_times *row"]
    ) -> Shaped[np.ndarray, " n n_times n_outputs"]:
        """The bounded coordinates along rollouts."""
        values = rows.reshape(*rows.shape[:2], -1)
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

    def compared(self, rows: Shaped[np.ndarray, " n *row"]) -> Shaped[np.ndarray, " n *compared"]:
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

    def along(
        self, forcing: Any, n: int, n_steps: int
    ) -> Float[np.ndarray, " n n_steps n_forcing"] | None:
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
