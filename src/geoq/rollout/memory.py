"""Steps that remember: a model with memory becomes a step of states that contain the memory."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from geoq.arrays import no_grad
from geoq.checks import check_function, check_integer

# Hint for steps that depend on earlier calls or on the other rows of the batch.
REMEDY = (
    " If it remembers earlier states (a recurrent network, a reservoir, a multi-step scheme), its memory must be a part of the "
    "state: pass geoq.parts.WithMemory(step, n_values, n_memory) with step(values, memory) -> (values, memory)."
)


@dataclass(frozen=True)
class WithMemory:
    """A model with memory as a step of states: a state is the values followed by the memory.

    The bound and the tolerance refer to the values: pass ``output`` to ``RolloutGeoQ``. The memory must mean the same in all
    surrogates, as without retraining, or in a reservoir of which only the readout is trained. Recurrent networks that are
    trained anew for each fold need a window of the last values as the state instead.

    Attributes:
        step: a function ``step(values, memory)`` of two batches, which returns the next values and the next memory. With forcing
            it is ``step(values, memory, forcing)``.
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
        >>> estimator = RolloutGeoQ(model, None, output=model.output, n_calibration=30)
        >>> estimator.fit(states[1:]).bound(states[200:202], n_steps=20).shape
        (2, 20, 1)
    """

    step: Callable[..., tuple[Any, Any]]
    n_values: int
    n_memory: int

    def __post_init__(self) -> None:
        check_function(self.step, "step", "step(values, memory)")
        check_integer(self.n_values, "n_values", 1)
        check_integer(self.n_memory, "n_memory", 1)

    @property
    def output(self) -> slice:
        """The index of the values in a state, for ``RolloutGeoQ(..., output=model.output)``."""
        return slice(0, self.n_values)

    def __call__(self, states: Any, *forcing: Any) -> Any:
        """The next states."""
        values, memory = states[:, : self.n_values], states[:, self.n_values :]
        with no_grad():
            answer: Any = self.step(values, memory, *forcing)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(
                f"step returned {type(answer).__name__}, but WithMemory needs two arrays; return (values, memory)."
            )
        sizes = {"values": self.n_values, "memory": self.n_memory}
        for part, (name, n) in zip(answer, sizes.items(), strict=True):
            if tuple(part.shape) != (len(states), n):
                raise ValueError(
                    f"step returned {name} of shape {tuple(part.shape)} for a batch of {len(states)} states, but n_{name}={n}; "
                    f"return shape {(len(states), n)}."
                )
        return _joined(list(answer), axis=1)

    def states(self, values: Any, *forcing: Any) -> Any:
        """The states along a true trajectory of shape (n_times, n_values), and its forcing of shape (n_times, *forcing), if any.

        The memory of a state is the one after the model has received the values before it one by one. It starts at zero; leave
        out the first states, until it no longer depends on this start.
        """
        if values.ndim != 2 or values.shape[1] != self.n_values:
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but a trajectory of n_values={self.n_values} has shape "
                f"(n_times, {self.n_values}); pass one trajectory at a time."
            )
        memory, rows = 0 * _joined([values[:1, :1]] * self.n_memory, axis=1), []
        for n in range(len(values)):
            rows.append(_joined([values[n : n + 1], memory], axis=1))
            memory = self(rows[-1], *(part[n : n + 1] for part in forcing))[:, self.n_values :]
        return _joined(rows, axis=0)


def _joined(parts: list[Any], axis: int) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=axis)
    return sys.modules["torch"].cat(parts, dim=axis)
