"""The part of the state that is bounded, such as the newest value of a window of lags."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """Coordinates of the state, selected by an index.

    Attributes:
        places: the positions of the coordinates in the flat state.
        shape: the shape of the output of one state.
    """

    places: Int[Tensor, " n_outputs"]
    shape: tuple[int, ...]

    @staticmethod
    def of(index: Any, state: tuple[int, ...]) -> "Output":
        """The output that an index selects from states of this shape; None selects the whole state.

        Raises:
            TypeError: ``index`` cannot be an index of an array.
            ValueError: ``index`` selects no coordinate, or one that the state does not have.
        """
        places = np.arange(math.prod(state)).reshape(state)
        if index is None:
            return Output(torch.from_numpy(places.reshape(-1)), state)
        known = f"but states have shape {state}"
        advice = "pass an index of one state, for example output=-1, output=slice(0, 3) or output=[0, 2]."
        if callable(index) or isinstance(index, str | float):
            raise TypeError(f"output={index!r} is not an index; {advice}")
        try:
            chosen = np.atleast_1d(places[index])
        except (IndexError, TypeError, ValueError) as exc:
            raise ValueError(f"output={index!r}, {known}; {advice}") from exc
        if not chosen.size:
            raise ValueError(
                f"output={index!r} selects no coordinate, {known}; {advice}"
            )
        return Output(torch.from_numpy(chosen.reshape(-1).copy()), chosen.shape)

    def __call__(
        self, states: Float[Tensor, " n n_times *state"]
    ) -> Float[Tensor, " n n_times *output"]:
        """The outputs of states along rollouts."""
        flat = states.flatten(start_dim=2)
        if flat.shape[2] != len(self.places) or not _in_order(self.places):
            flat = flat[:, :, self.places.to(states.device)]
        return flat.reshape(*states.shape[:2], *self.shape)

    def left_out(self, state: tuple[int, ...]) -> Bool[Tensor, " *state"]:
        """The coordinates of the state that are not selected."""
        others = torch.ones(math.prod(state), dtype=torch.bool)
        others[self.places.cpu()] = False
        return others.reshape(state)

    def index(self, state: tuple[int, ...]) -> tuple[np.ndarray, ...] | None:
        """An index that selects this output, for an estimator from a file; None if the output is the whole state."""
        if self.shape == state and _in_order(self.places):
            return None
        return np.unravel_index(self.places.cpu().numpy().reshape(self.shape), state)


def _in_order(places: Tensor) -> bool:
    return torch.equal(places, torch.arange(len(places), device=places.device))
