"""Trajectories as the user brings them, the pieces that a fold leaves in, and rollouts of a surrogate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.arrays import Array, restore, take, to_tensor
from geoq.checks import check_finite
from geoq.surrogate import Surrogate

# States more than this many standard deviations from the mean of the data have diverged: distances to them say nothing,
# and their squares soon overflow.
DIVERGED = 1e6


@runtime_checkable
class TrainStepper(Protocol):
    """Train a fresh surrogate of one step; called once per fold with the contiguous pieces left in."""

    def __call__(self, segments: list[Array], /) -> Surrogate: ...


@runtime_checkable
class TrainSteppersTogether(Protocol):
    """A recipe that trains several surrogates of one step at once for less than one by one; ``TrainRollout`` is one.

    ``train_many`` is given all states and, for each surrogate, the runs of consecutive rows that it may learn from;
    ``n_together`` says how many are worth training at once on such states.
    """

    def __call__(self, segments: list[Array], /) -> Surrogate: ...

    def n_together(self, states: Array, /) -> int: ...

    def train_many(
        self, states: Array, runs: Sequence[Sequence[np.ndarray]], /
    ) -> Sequence[Surrogate]: ...


@dataclass(frozen=True)
class Trajectories:
    """All states one below the other, in the user's kind of array.

    ``number`` is the trajectory that a state belongs to; within one, rows are in the order of time.
    """

    states: Array
    number: Int[np.ndarray, " n_states"]

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def gather(trajectories: Array | Sequence[Array]) -> "Trajectories":
        """One trajectory (an array, time first) or several (a list of such), refused where they do not fit together."""
        several = not isinstance(trajectories, np.ndarray | Tensor)
        listed: list[Array] = list(trajectories) if several else [trajectories]  # type: ignore[list-item]
        if not listed:
            raise ValueError("trajectories is an empty list; pass at least one.")
        for place, trajectory in enumerate(listed):
            name = f"trajectories[{place}]" if several else "trajectories"
            tensor = to_tensor(trajectory, name)
            if tensor.ndim < 2 or len(tensor) < 2 or not tensor.numel():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but a trajectory has a first axis of two or more times "
                    "and at least one more for the state; a scalar state needs shape (n, 1)."
                )
            first = listed[0]
            if tensor.shape[1:] != to_tensor(first, "trajectories[0]").shape[1:]:
                raise ValueError(
                    f"{name} has states of shape {tuple(tensor.shape[1:])}, but trajectories[0] has "
                    f"{tuple(first.shape[1:])}; all states must have one shape, only lengths may differ."
                )
            if isinstance(trajectory, np.ndarray) != isinstance(first, np.ndarray):
                raise TypeError(
                    f"{name} is a {type(trajectory).__name__} and trajectories[0] a {type(first).__name__}; "
                    "pass all of them as NumPy arrays or all as tensors."
                )
            check_finite(tensor, name, "cut the trajectory there")
        return Trajectories(
            _joined(listed), np.repeat(np.arange(len(listed)), [len(t) for t in listed])
        )

    @property
    def longest(self) -> int:
        """Number of states of the longest trajectory."""
        return int(np.bincount(self.number).max())

    def segments(self, rows: Int[np.ndarray, " n_rows"]) -> list[Array]:
        """Contiguous pieces of two or more of these rows, none of which skips a state."""
        return [take(self.states, torch.from_numpy(run)) for run in self.runs(rows)]

    def runs(self, rows: Int[np.ndarray, " n_rows"]) -> list[np.ndarray]:
        """The rows of these pieces."""
        rows = np.sort(rows)
        apart = (np.diff(rows) > 1) | (np.diff(self.number[rows]) != 0)
        runs = np.split(rows, np.flatnonzero(apart) + 1)
        return [run for run in runs if len(run) > 1]

    def starts(
        self, held_out: Int[np.ndarray, " n_rows"], n_steps: int, n_starts: int
    ) -> Int[np.ndarray, " n"]:
        """Held-out states, evenly spread over those with so many steps of truth ahead of them.

        States whose whole truth is held out come first where there are enough of them: the surrogate of the fold then
        saw nothing of what it is asked for.
        """
        last = np.minimum(held_out + n_steps, len(self) - 1)
        enough = (last - held_out == n_steps) & (
            self.number[last] == self.number[held_out]
        )
        candidates = held_out[enough]
        is_held_out = np.zeros(len(self) + 1, dtype=int)
        is_held_out[held_out + 1] = 1
        count = is_held_out.cumsum()
        unseen = count[candidates + n_steps + 1] - count[candidates] == n_steps + 1
        if unseen.sum() >= n_starts:
            candidates = candidates[unseen]
        chosen = np.linspace(0, len(candidates) - 1, min(n_starts, len(candidates)))
        starts: np.ndarray = candidates[chosen.round().astype(int)]
        return starts


def _joined(parts: list[Array]) -> Array:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return torch.cat([to_tensor(part, "trajectories") for part in parts])


@torch.no_grad()
def roll_out(
    surrogate: Surrogate,
    x0: Array,
    n_steps: int,
    limit: Float[Tensor, " *state"],
    name: str = "surrogate",
) -> Float[Tensor, " n n_times *state"]:
    r"""States of the rollout, the initial one first.

    .. math:: \widehat u_0 = u, \quad \widehat u_{n+1} = \widehat F(\widehat u_n)

    A rollout that becomes nan, infinite or larger than ``limit`` has diverged: its states are nan from there on, and
    the surrogate is not asked about it any more.
    """
    if isinstance(surrogate, nn.Module) and isinstance(x0, np.ndarray):
        raise TypeError(
            f"{name} is a torch module, but the states are NumPy arrays; pass them as tensors (torch.from_numpy)."
        )
    start = to_tensor(x0, "x0")
    states = start.new_full((len(start), n_steps + 1, *start.shape[1:]), torch.nan)
    states[:, 0] = start
    alive = torch.arange(len(start), device=start.device)
    for step in range(1, n_steps + 1):
        if not len(alive):
            break
        before = states[alive, step - 1]
        after = to_tensor(surrogate(restore(before, x0)), f"the output of {name}")
        if after.shape != before.shape:
            raise ValueError(
                f"{name} returned shape {tuple(after.shape)} for states of shape {tuple(before.shape)}; it must "
                "return the next state of each."
            )
        after = after.to(states)
        # nan compares false, so it counts as diverged too.
        kept = (after.abs() <= limit.to(after)).flatten(start_dim=1).all(dim=1)
        alive = alive[kept]
        states[alive, step] = after[kept]
    return states
