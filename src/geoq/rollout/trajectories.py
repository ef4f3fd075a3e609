"""The trajectories of the user, the segments that a fold leaves in, and rollouts of a surrogate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.arrays import Array, restore, take, to_tensor
from geoq.checks import check_finite, check_inputs_unit, check_outputs_unit
from geoq.surrogate import Surrogate

# States along rollouts, the initial state first; one value for each rollout, step and coordinate; one for each rollout and step.
States: TypeAlias = Float[Tensor, " n n_times *state"]
Values: TypeAlias = Float[Tensor, " n n_steps n_coordinates"]
PerStep: TypeAlias = Float[Tensor, " n n_steps"]
# A rollout is stopped if a coordinate exceeds the absolute mean of the data by this many standard deviations. Squares of such
# states overflow.
DIVERGED = 1e6


@runtime_checkable
class TrainStepper(Protocol):
    """Train a new surrogate of one time step; called once per fold with the contiguous segments that the fold leaves in."""

    def __call__(self, segments: list[Array], /) -> Surrogate: ...


@runtime_checkable
class TrainSteppersTogether(Protocol):
    """A recipe that can train several surrogates of one time step together, faster than one by one, like ``TrainRollout``.

    ``n_together`` returns how many surrogates should be trained together on such states. ``train_many`` receives all states
    and, for each surrogate, the runs of consecutive rows that it is trained on.
    """

    def __call__(self, segments: list[Array], /) -> Surrogate: ...

    def n_together(self, states: Array, /) -> int: ...

    def train_many(
        self, states: Array, runs: Sequence[Sequence[np.ndarray]], /
    ) -> Sequence[Surrogate]: ...


@dataclass(frozen=True)
class Trajectories:
    """The states of all trajectories, one row per state, in the user's kind of array.

    Attributes:
        states: the states; within a trajectory they are in the order of time.
        number: for each state, the number of its trajectory.
    """

    states: Array
    number: Int[np.ndarray, " n_states"]

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def gather(
        trajectories: Array | Sequence[Array], argument: str = "trajectories"
    ) -> "Trajectories":
        """Join one trajectory, an array with time as the first axis, or a list of them; unusable ones are refused."""
        several = isinstance(trajectories, Sequence | Iterator)
        if not several or isinstance(trajectories, str):
            # Anything else is refused by its own kind: a data frame, a dictionary, a file name.
            to_tensor(trajectories, argument)  # type: ignore[arg-type]
        listed: list[Array] = list(trajectories) if several else [trajectories]  # type: ignore[list-item]
        if not listed:
            raise ValueError(
                f"{argument} is an empty list; pass at least one trajectory."
            )
        for place, trajectory in enumerate(listed):
            name = f"{argument}[{place}]" if several else argument
            tensor = to_tensor(trajectory, name)
            if tensor.ndim < 2 or len(tensor) < 2 or not tensor.numel():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but a trajectory has shape (n_times, *state) with at least "
                    "two times and at least one axis of the state; pass scalars with shape (n_times, 1)."
                )
            first = listed[0]
            if tensor.shape[1:] != to_tensor(first, argument).shape[1:]:
                raise ValueError(
                    f"{name} has rows of shape {tuple(tensor.shape[1:])}, but {argument}[0] has rows of shape "
                    f"{tuple(first.shape[1:])}; pass trajectories that differ only in their lengths."
                )
            if isinstance(trajectory, np.ndarray) != isinstance(first, np.ndarray):
                raise TypeError(
                    f"{name} is a {type(trajectory).__name__}, but {argument}[0] is a {type(first).__name__}; "
                    "pass all of them as NumPy arrays or all as tensors."
                )
            check_finite(tensor, name, "cut the trajectory there")
            check_inputs_unit(tensor, name)
            check_outputs_unit(tensor, name)
        number = np.repeat(np.arange(len(listed)), [len(t) for t in listed])
        return Trajectories(_joined(listed), number)

    @property
    def longest(self) -> int:
        """The number of states of the longest trajectory."""
        return int(np.bincount(self.number).max())

    def segments(self, rows: Int[np.ndarray, " n_rows"]) -> list[Array]:
        """The states of these rows as contiguous segments of at least two states."""
        return [take(self.states, torch.from_numpy(run)) for run in self.runs(rows)]

    def runs(self, rows: Int[np.ndarray, " n_rows"]) -> list[np.ndarray]:
        """These rows as runs of at least two consecutive rows of one trajectory."""
        rows = np.sort(rows)
        apart = (np.diff(rows) > 1) | (np.diff(self.number[rows]) != 0)
        runs = np.split(rows, np.flatnonzero(apart) + 1)
        return [run for run in runs if len(run) > 1]

    def starts(
        self, held_out: Int[np.ndarray, " n_rows"], n_steps: int, n_starts: int
    ) -> Int[np.ndarray, " n"]:
        """Rows that calibration rollouts start from, evenly spread over the usable held-out rows.

        A held-out row is usable if its trajectory continues for ``n_steps`` states after it. If there are ``n_starts`` rows whose
        next ``n_steps`` states are all held out, only these are used: the surrogate of the fold has then seen no state of
        the true trajectory.
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
    forcing: Float[Tensor, " n n_times n_forcing"] | None = None,
) -> States:
    r"""Apply the surrogate to its own output, ``n_steps`` times.

    .. math:: \widehat u_0 = u, \quad \widehat u_{n+1} = \widehat F(\widehat u_n)

    A rollout stops when it becomes nan, infinite or larger than ``limit`` in a coordinate. From that step its states are nan, and the
    surrogate is not called on it any more. The ``forcing`` replaces the last values of the states that the surrogate returns.
    The first of the returned states is the initial one.
    """
    check_kind(surrogate, x0)
    start = to_tensor(x0, "x0")
    states = start.new_full((len(start), n_steps + 1, *start.shape[1:]), torch.nan)
    states[:, 0] = start
    alive = torch.arange(len(start), device=start.device)
    for step in range(1, n_steps + 1):
        if not len(alive):
            break
        before = states[alive, step - 1]
        after = to_tensor(surrogate(restore(before, x0)), "the output of surrogate")
        if after.shape != before.shape:
            raise ValueError(
                f"surrogate returned shape {tuple(after.shape)} for states of shape {tuple(before.shape)}; it must "
                "return the next state of each of them."
            )
        after = after.to(states)
        # The comparison is false for nan, so nan stops a rollout.
        kept = (after.abs() <= limit.to(after)).flatten(start_dim=1).all(dim=1)
        alive = alive[kept]
        states[alive, step] = after[kept]
        if forcing is not None:
            states[alive, step, -forcing.shape[2] :] = forcing[alive, step].to(states)
    return states


def forcing_from(
    states: Array, rows: Tensor, n_steps: int, n_forcing: int
) -> Float[Tensor, " n n_times n_forcing"] | None:
    """The forcing in the data along the rollouts that start from these rows; None without forcing."""
    if not n_forcing:
        return None
    steps = rows[:, None] + torch.arange(n_steps + 1, device=rows.device)
    along = to_tensor(take(states, steps.flatten()), "states")[:, -n_forcing:]
    return along.reshape(*steps.shape, n_forcing)


def without_forcing(
    rows: Float[Tensor, " n *row"], state: tuple[int, ...]
) -> Float[Tensor, " n *state"]:
    """The states of this shape in rows of states with their forcing, which comes last."""
    flat = rows.flatten(start_dim=1)[:, : math.prod(state)]
    return flat.reshape(len(rows), *state)


def check_kind(surrogate: object, states: Array) -> None:
    """Refuse NumPy arrays for a torch module."""
    if isinstance(surrogate, nn.Module) and isinstance(states, np.ndarray):
        raise TypeError(
            "surrogate is a torch module, but the states are NumPy arrays; pass them as tensors, torch.from_numpy(states)."
        )
