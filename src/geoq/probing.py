"""Checks of the user's callables by a few questions: an answer depends on the query alone, and the data stay as they were."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from geoq.arrays import Array, Rows, chunks, take
from geoq.checks import add_note_on_error

# Rows at which the user's callables are called again.
N_PROBES = 8
# A network rounds differently in batches of different sizes. Answers count as equal if they differ by less than this
# fraction of the spread of the answers, plus this fraction of the largest answer.
SPREAD_FRACTION, LARGEST_FRACTION = 1e-3, 1e-5

Ask: TypeAlias = Callable[[Any], Tensor]

_CONSEQUENCE = {
    "surrogate": "its error",
    "representation": "the distance between two inputs",
}


def probe_rows(n: int) -> Int[Tensor, " n_probes"]:
    """At most ``N_PROBES`` rows, evenly spread over n rows."""
    return torch.arange(min(N_PROBES, n)) * (n - 1) // N_PROBES


def check_answers(
    ask: Ask, inputs: Rows, answers: Tensor, name: str = "surrogate"
) -> None:
    """Refuse a callable whose answers to some inputs differ in another batch, in another order or at another call.

    Args:
        ask: returns the answers of the callable to a batch.
        inputs: a few inputs.
        answers: the answers to these inputs, given in any larger batch.
        name: the name of the callable in messages.
    """
    half = torch.arange(len(inputs)).flip(0)[: max(1, len(inputs) // 2)]
    some = take(inputs, half)
    difference = _difference(ask(some), answers[half.to(answers.device)], answers)
    if not difference:
        with add_note_on_error(f"while calling {name} on a batch of one row"):
            alone = ask(inputs[:1])
        difference = _difference(alone, answers[:1], answers)
    if not difference:
        return
    again = _difference(ask(some), ask(some), answers)
    if again:
        raise ValueError(
            f"{name} gave two answers to the same inputs, up to {again:.3g} apart, so {_CONSEQUENCE[name]} would be "
            "random; switch dropout and sampling off, or fix their seed."
        )
    raise ValueError(
        f"{name} gave other answers to the same inputs in another batch, up to {difference:.3g} apart, so an answer depends on "
        "the other rows or on their order; normalise with fixed numbers and not with statistics of the batch (BatchNorm needs "
        "running statistics), and return the answers in the order of the inputs."
    )


def check_same_answers(ask: Ask, inputs: Rows, answers: Tensor, what: str) -> None:
    """Refuse a surrogate whose answers at some inputs changed while other surrogates were trained.

    Args:
        ask: returns the answers of the surrogate to a batch.
        inputs: a few inputs.
        answers: the earlier answers to these inputs.
        what: what changed, and when, in words.
    """
    difference = _difference(ask(inputs), answers, answers)
    if difference:
        raise ValueError(
            f"{what}: its predictions differ by up to {difference:.3g} from the earlier ones. Probably train_surrogate fits the "
            "same model object again; build the model inside the function, for example "
            "lambda x, y: Ridge().fit(x, y).predict, or clone it."
        )


def _difference(new: Tensor, old: Tensor, answers: Tensor) -> float:
    """The largest difference, or 0 if all differences are as small as rounding errors."""
    new, old, answers = (part.nan_to_num() for part in (new, old.to(new), answers))
    spread = answers.amax(dim=0) - answers.amin(dim=0)
    if answers.ndim > 2:
        # A field: a cell that hardly varies is compared with the other cells.
        spread = spread.max()
    allowed = SPREAD_FRACTION * spread + LARGEST_FRACTION * answers.abs().max()
    difference = (new - old).abs()
    return float(difference.max()) if (difference > allowed.to(new)).any() else 0.0


class FirstFold:
    """Checks that the surrogate of the first fold does not change when the next one is trained.

    A recipe that trains the same model object again would continue from weights that have seen the held-out points. A worker
    process has its own copies of the recipe, so an object of this class is empty there.
    """

    def __init__(self) -> None:
        self._kept: tuple[Ask, Rows, Tensor] | None = None
        self._checked = False

    def __reduce__(self) -> tuple[type["FirstFold"], tuple[()]]:
        return FirstFold, ()

    def keep(self, ask: Ask, inputs: Rows, answers: Tensor) -> None:
        """Keep the first surrogate until the next training is finished."""
        if self._kept is None and not self._checked:
            few = probe_rows(len(inputs))
            some, expected = take(inputs, few), answers[few.to(answers.device)]
            check_answers(ask, some, expected)
            self._kept = ask, some, expected

    def check(self) -> None:
        """Compare the answers of the first surrogate with its earlier answers; then release it."""
        if self._kept is not None:
            ask, inputs, answers = self._kept
            self._kept, self._checked = None, True
            what = "a fold surrogate changed when the next one was trained"
            check_same_answers(ask, inputs, answers, what)


@contextmanager
def unchanged(**arrays: object) -> Iterator[None]:
    """Refuse code that changes the user's arrays: callables receive copies, but can refer to the arrays themselves."""
    before = {name: _checksum(array) for name, array in arrays.items()}
    yield
    for name, array in arrays.items():
        if _checksum(array) != before[name]:
            raise ValueError(
                f"{name} was changed during fit, so its values no longer belong to the calibration. Probably the surrogate, "
                f"train_surrogate or the error functional works on the array {name} in place; let it work on a copy."
            )


def _checksum(array: object) -> int:
    """A checksum of the values of an array; 0 for anything else."""
    value = 0
    if isinstance(array, np.ndarray | Tensor) and array.ndim and not _is_odd(array):
        for rows in chunks(len(array), int(np.prod(array.shape[1:]))):
            value = zlib.crc32(_bytes(array[rows]).data, value)
    return value


def _is_odd(array: Array) -> bool:
    """Whether the values are not plain numbers in memory; fit refuses such arrays."""
    if isinstance(array, np.ndarray):
        return array.dtype == object
    return array.layout != torch.strided or array.is_quantized


def _bytes(part: Array) -> np.ndarray:
    if isinstance(part, Tensor):
        part = part.detach().contiguous().cpu().view(torch.uint8).numpy()
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
