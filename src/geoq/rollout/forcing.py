"""Forced rollouts: a step of a state and a forcing is a step of a longer state that contains the forcing."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from geoq.arrays import Array, restore, to_tensor
from geoq.checks import TRAINED, check_callable, check_finite
from geoq.coordinates import CHANGED
from geoq.representation import Standardization
from geoq.rollout.runaways import DataRange
from geoq.rollout.trajectories import DIVERGED, Trajectories, check_kind
from geoq.surrogate import Surrogate
from geoq.training.fold_surrogates import TrainedFolds

_CONVENTION = "forcing[t] drives the step from state t to state t + 1"


@dataclass(frozen=True)
class Forcing:
    """How a state and its forcing are joined to one row of numbers: the state first, then the forcing.

    Without forcing, states stay as they are. The forcing is given, so it has no error: it counts in distances and in the safe
    region, and not in bounds, tolerances and divergence.

    Attributes:
        state: the shape of a state.
        shape: the shape of the forcing of one step. None if the rollouts are not forced.
    """

    state: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    @staticmethod
    def gather(
        trajectories: Array | Sequence[Array], forcing: Array | Sequence[Array] | None
    ) -> tuple[Trajectories, "Forcing"]:
        """The trajectories with their forcing as one row per state; unusable ones are refused."""
        gathered = Trajectories.gather(trajectories)
        state = tuple(gathered.states.shape[1:])
        if forcing is None:
            return gathered, Forcing(state)
        if isinstance(forcing, Sequence) != isinstance(trajectories, Sequence):
            raise TypeError(
                f"forcing is a {type(forcing).__name__}, but trajectories is a {type(trajectories).__name__}; pass a list of "
                "both, with one forcing per trajectory, or one array of both."
            )
        given = Trajectories.gather(forcing, "forcing")
        lengths, own = np.bincount(gathered.number), np.bincount(given.number)
        if len(lengths) != len(own):
            raise ValueError(
                f"forcing has {len(own)} arrays, but there are {len(lengths)} trajectories; pass one array per trajectory."
            )
        for place in np.flatnonzero(lengths != own)[:1]:
            raise ValueError(
                f"forcing[{place}] has {own[place]} rows, but trajectories[{place}] has {lengths[place]} states; "
                f"{_CONVENTION}, so pass one row per state (the last row drives no step of the data: repeat the row before)."
            )
        check_same_kind(given.states, gathered.states, "trajectories are")
        joined = Forcing(state, tuple(given.states.shape[1:]))
        states = joined.join(gathered.states, given.states)
        return Trajectories(states, gathered.number), joined

    @property
    def n_values(self) -> int:
        """The number of values of a state."""
        return math.prod(self.state)

    @property
    def n_forcing(self) -> int:
        """The number of values of the forcing of one step; 0 without forcing."""
        return 0 if self.shape is None else math.prod(self.shape)

    def join(self, states: Array, forcing: Any) -> Array:
        """States and their forcing as rows, in the precision and the kind of array of the states."""
        if self.shape is None:
            return states
        parts = [to_tensor(part, "forcing") for part in (states, forcing)]
        rows = [part.to(parts[0]).reshape(len(part), -1) for part in parts]
        return restore(torch.cat(rows, dim=1), states)

    def split(self, rows: Array) -> tuple[Array, ...]:
        """The states, and the forcing if there is one: the arguments of the user's callables."""
        if self.shape is None:
            return (rows,)
        states, forcing = rows[:, : self.n_values], rows[:, self.n_values :]
        return states.reshape(-1, *self.state), forcing.reshape(-1, *self.shape)

    def step(self, surrogate: Surrogate) -> Surrogate:
        """The user's step as a step of rows."""
        return surrogate if self.shape is None else ForcedStep(surrogate, self)

    def representation(self, phi: Any) -> Any:
        """The user's representation as a function of rows."""
        if self.shape is None or phi is None:
            return phi
        return lambda rows: phi(*self.split(rows))

    def recipe(self, train: Any) -> Any:
        """The user's recipe, or the surrogates of the folds, for rows."""
        if self.shape is None:
            return train
        if isinstance(train, TrainedFolds):
            return TrainedFolds([self.step(own) for own in train.surrogates])
        return ForcedRecipe(train, self)

    def limits(
        self, points: Float[Tensor, " n *row"], normalization: Standardization
    ) -> tuple[Tensor, DataRange]:
        """The size at which a rollout is stopped, and the range of the data; infinite for the forcing, which is given."""
        largest = normalization.mean.abs() + DIVERGED * normalization.scale
        around = DataRange.of(points, normalization)
        if self.n_forcing:
            for high in (largest, around.high):
                high[self.n_values :] = torch.inf
            around.low[self.n_values :] = -torch.inf
        return largest, around

    def along(
        self, forcing: Array | None, x0: Array, n_steps: int
    ) -> Float[Tensor, " n n_steps n_forcing"] | None:
        """The forcing of each step of the rollouts from x0; refused unless it fits the forcing of ``fit``."""
        if self.shape is None:
            if forcing is not None:
                raise ValueError(
                    "forcing is given, but fit received no forcing; leave it out, or fit with forcing."
                )
            return None
        common, each = (n_steps, *self.shape), (len(x0), n_steps, *self.shape)
        if forcing is None:
            raise ValueError(
                f"forcing=None, but fit received a forcing of shape {self.shape} per state; pass forcing with shape {common} for "
                f"all rollouts, or {each}."
            )
        values = to_tensor(forcing, "forcing")
        if tuple(values.shape) not in (common, each):
            raise ValueError(
                f"forcing has shape {tuple(values.shape)}, but {len(x0)} rollouts of n_steps={n_steps} need {each}, or {common} "
                f"if they share it; {_CONVENTION}."
            )
        check_same_kind(forcing, x0, "x0 is")
        check_finite(values, "forcing", "replace it by a number")
        return values.reshape(-1, n_steps, self.n_forcing).expand(len(x0), -1, -1)

    def outside(
        self,
        forcing: Float[Tensor, " n n_steps n_forcing"],
        points: Float[Tensor, " n_points n_row"],
        normalization: Standardization,
    ) -> tuple[Bool[Tensor, " n n_steps"], dict[int, str]]:
        """The steps from the first one whose forcing is outside its range in the data, and this step in words by rollouts."""
        own = slice(self.n_values, None)
        nu = Standardization(normalization.mean[own], normalization.scale[own])
        low, high = points[:, own].amin(dim=0), points[:, own].amax(dim=0)
        standardised = nu(forcing.to(nu.mean))
        out = (standardised < low - CHANGED) | (standardised > high + CHANGED)
        texts = {}
        for row in out.any(dim=2).any(dim=1).nonzero()[:, 0].tolist():
            step, place = out[row].nonzero()[0].tolist()
            where = np.unravel_index(place, self.shape or ())
            name = f" {', '.join(map(str, where))}" if self.n_forcing > 1 else ""
            least, most = ((nu.mean + nu.scale * end)[place] for end in (low, high))
            texts[row] = (
                f"forcing{name} of step {step + 1} is {forcing[row, step, place]:.4g}, but it lies between {least:.4g} and "
                f"{most:.4g} in the data"
            )
        return out.any(dim=2).long().cummax(dim=1).values.bool(), texts


@dataclass(frozen=True)
class ForcedStep:
    """The user's step(states, forcing) as a step of rows; the forcing stays as it is until the rollout replaces it."""

    surrogate: Any
    forcing: Forcing

    def __call__(self, rows: Array) -> Array:
        states, forcing = self.forcing.split(rows)
        check_kind(self.surrogate, states)
        after = self.surrogate(states, forcing)
        if tuple(to_tensor(after, "the output of surrogate").shape) != states.shape:
            raise ValueError(
                f"surrogate returned shape {tuple(after.shape)} for states of shape {tuple(states.shape)} and forcing of shape "
                f"{tuple(forcing.shape)}; it must return the next state of each of them."
            )
        return self.forcing.join(after, forcing)


@dataclass(frozen=True)
class ForcedRecipe:
    """The user's recipe, which receives segments (states, forcing), as a recipe for segments of rows."""

    train_surrogate: Any
    forcing: Forcing

    def __call__(self, segments: list[Array]) -> Surrogate:
        pairs = [self.forcing.split(segment) for segment in segments]
        surrogate = self.train_surrogate(pairs)
        check_callable(surrogate, TRAINED)
        check_arguments(surrogate, forced=True)
        return self.forcing.step(surrogate)


def check_same_kind(forcing: Array, other: Array, what: str) -> None:
    """Refuse a forcing that is a tensor if the states are NumPy arrays, and the opposite."""
    if isinstance(forcing, np.ndarray) != isinstance(other, np.ndarray):
        raise TypeError(
            f"forcing is a {type(forcing).__name__}, but the {what} a {type(other).__name__}; pass both as NumPy arrays or both "
            "as tensors."
        )


def check_arguments(surrogate: Surrogate | None, *, forced: bool) -> None:
    """Refuse a step of states alone if there is a forcing, and a step of states and forcing if there is none."""
    called = surrogate.forward if isinstance(surrogate, nn.Module) else surrogate
    try:
        signature = inspect.signature(called)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*([None] * (1 + forced)))
    except TypeError as exc:
        conflict = (
            "a forcing and calls surrogate(states, forcing); let it take both."
            if forced
            else "no forcing and calls surrogate(states); pass forcing to fit as well."
        )
        raise TypeError(
            f"surrogate has the arguments {signature}, but fit received {conflict}"
        ) from exc
