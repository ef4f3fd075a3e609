"""Steps that remember: a model with memory becomes a step of states that contain the memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from geoq.arrays import Array
from geoq.checks import check_count
from geoq.settings import check_function

# The way out in the message for a step whose answer depends on earlier calls or on the other rows of the batch.
REMEDY = (
    " If it remembers earlier states (a recurrent network, a reservoir, a multi-step scheme), its memory must be a part of the "
    "state: pass geoq.rollout.WithMemory(step, n_values, n_memory) with step(values, memory) -> (values, memory)."
)


@dataclass(frozen=True)
class WithMemory:
    """A model with memory as a step of states: a state is the values followed by the memory.

    The bound and the tolerance refer to the values: pass ``output`` to ``RolloutGeoQ``. The memory must mean the same in all
    surrogates. This holds without retraining, and for a reservoir with fixed weights of which only the readout is trained. It
    does not hold for recurrent networks that are trained anew for each fold; give them a window of the last values as the
    state instead.

    Attributes:
        step: a function ``step(values, memory)`` of two batches, which returns the next values and the next memory. With
            forcing it is ``step(values, memory, forcing)``.
        n_values: the number of values.
        n_memory: the number of numbers in the memory.

    Example:
        >>> import numpy as np
        >>> from geoq import RolloutGeoQ
        >>> def step(values, memory):  # an oscillator needs the value before
        ...     return 1.98 * values - memory, values
        >>> model = WithMemory(step, n_values=1, n_memory=1)
        >>> series = np.sin(0.1 * np.arange(400))[:, None]
        >>> states = model.states(series)
        >>> geoq = RolloutGeoQ(model, None, output=model.output, n_calibration=30).fit(states[1:])
        >>> geoq.bound(states[200:202], n_steps=20).shape
        (2, 20, 1)
    """

    step: Callable[..., tuple[Any, Any]]
    n_values: int
    n_memory: int

    def __post_init__(self) -> None:
        check_function(self.step, "step", "step(values, memory)")
        check_count(self.n_values, "n_values")
        check_count(self.n_memory, "n_memory")

    @property
    def output(self) -> slice:
        """The index of the values in a state, for ``RolloutGeoQ(..., output=model.output)``."""
        return slice(0, self.n_values)

    @torch.no_grad()
    def __call__(self, states: Array, *forcing: Array) -> Array:
        """The next states."""
        values, memory = states[:, : self.n_values], states[:, self.n_values :]
        answer: Any = self.step(values, memory, *forcing)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(
                f"step returned {type(answer).__name__}, but WithMemory needs two arrays; return (values, memory)."
            )
        sizes = {"values": self.n_values, "memory": self.n_memory}
        for part, (name, n) in zip(answer, sizes.items(), strict=True):
            if tuple(part.shape) != (len(states), n):
                raise ValueError(
                    f"step returned {name} of shape {tuple(part.shape)} for a batch of {len(states)} states, but "
                    f"n_{name}={n}; return shape {(len(states), n)}."
                )
        return _joined(list(answer), axis=1)

    def states(self, values: Array, *forcing: Array) -> Array:
        """The states along a true trajectory of shape (n_times, n_values), and its forcing of shape (n_times, *forcing), if any.

        The memory of a state is the memory after the model has received the values before it one by one. It starts at zero; leave
        out the first states, until it no longer depends on this start.
        """
        if values.ndim != 2 or values.shape[1] != self.n_values:
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but a trajectory of n_values={self.n_values} has shape "
                f"(n_times, {self.n_values}); pass one trajectory at a time."
            )
        memory = 0 * _joined([values[:1, :1]] * self.n_memory, axis=1)
        rows = []
        for n in range(len(values)):
            rows.append(_joined([values[n : n + 1], memory], axis=1))
            given = [part[n : n + 1] for part in forcing]
            memory = self(rows[-1], *given)[:, self.n_values :]
        return _joined(rows, axis=0)


def _joined(parts: list[Any], axis: int) -> Array:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=axis)
    return torch.cat(parts, dim=axis)
