"""Checks of the user's callables by a few questions: an answer depends on the query alone, and the data stay as they were."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, Rows, chunks, take
from geoq.checks import add_note_on_error, warn

# Rows at which the user's callables are called again; files store the answers at these rows.
N_PROBES = 8
# A network rounds differently in batches of different sizes. Answers count as equal if they differ by less than this
# fraction of the spread of the answers, plus this fraction of the largest answer. The first fraction is twice the rounding
# error of bfloat16, in which networks may compute on a GPU.
SPREAD_FRACTION, LARGEST_FRACTION = 2**-7, 1e-5
SAME_BATCH_FRACTION = 1e-6
# The training of a fold surrogate has failed if its errors are this many times the median over the folds, both on its
# training points and on its held-out points. Extrapolation raises only the errors on held-out points.
FAILED_FOLD_RATIO = 5.0

Ask: TypeAlias = Callable[[Any], Tensor]

_CONSEQUENCE = {
    "surrogate": "its error",
    "representation": "the distance between two inputs",
}


@dataclass(frozen=True)
class Probes:
    """A few inputs and the answers of a callable to them, which it must repeat at any time.

    Attributes:
        ask: returns the answers of the callable to a batch.
        inputs: the inputs.
        answers: the answers to the inputs in reverse order.
    """

    ask: Ask
    inputs: Rows
    answers: Tensor

    @staticmethod
    def of(
        ask: Ask, x: Rows, answers: Tensor, name: str = "surrogate", remedy: str = ""
    ) -> "Probes":
        """Some rows of x; refused if the answers differ in another batch, in another order or at another call.

        ``answers`` are the answers to all of x in one batch or a few batches; ``remedy`` is the end of the message.
        """
        rows = torch.arange(min(N_PROBES, len(x))) * (len(x) - 1) // N_PROBES
        inputs, known = take(x, rows), answers[rows.to(answers.device)]
        probes = Probes(ask, inputs, ask(take(x, rows.flip(0))))
        difference = _difference(probes.answers.flip(0), known, _rounding(known))
        if not difference:
            with add_note_on_error(f"while calling {name} on a batch of one row"):
                alone = ask(inputs[:1])
            difference = _difference(alone, known[:1], _rounding(known))
        if difference:
            probes._refuse(name, difference, remedy)
        return probes

    def _refuse(self, name: str, difference: float, remedy: str) -> None:
        """Name the cause of different answers: random numbers, or the other rows of the batch."""
        first, second = self.ask(self.inputs), self.ask(self.inputs)
        again = _difference(second, first, _rounding(first))
        if again:
            raise ValueError(
                f"{name} gave two answers to the same inputs, up to {again:.3g} apart, so {_CONSEQUENCE[name]} would be "
                f"random; switch dropout and sampling off, or fix their seed.{remedy}"
            )
        raise ValueError(
            f"{name} gave other answers to the same inputs in another batch, up to {difference:.3g} apart, so an answer depends "
            "on the other rows or on their order; normalise with fixed numbers and not with statistics of the batch (BatchNorm "
            f"needs running statistics), and return the answers in the order of the inputs.{remedy}"
        )

    def check_unchanged(
        self, what: str = "the deployed surrogate changed during fit"
    ) -> None:
        """Refuse a surrogate whose answers changed while other surrogates were trained; ``what`` starts the message."""
        backwards = torch.arange(len(self.inputs)).flip(0)
        # The same batch, so the answers are equal except on a GPU that adds in a random order.
        allowed = SAME_BATCH_FRACTION * self.answers.nan_to_num().abs().max()
        difference = _difference(
            self.ask(take(self.inputs, backwards)), self.answers, allowed
        )
        if difference:
            raise ValueError(
                f"{what}: its predictions differ by up to {difference:.3g} from the earlier ones. Probably train_surrogate fits "
                "the same model object again; build the model inside the function, for example "
                "lambda x, y: Ridge().fit(x, y).predict, or clone it."
            )


def _rounding(answers: Tensor) -> Tensor:
    """The largest difference that rounding can cause between batches of different sizes."""
    answers = answers.nan_to_num()
    spread = answers.amax(dim=0) - answers.amin(dim=0)
    if answers.ndim > 2:
        # A field: a cell that hardly varies is compared with the other cells.
        spread = spread.max()
    return SPREAD_FRACTION * spread + LARGEST_FRACTION * answers.abs().max()


def _difference(new: Tensor, old: Tensor, allowed: Tensor) -> float:
    """The largest difference, or 0 if all differences are allowed."""
    difference = (new.nan_to_num() - old.to(new).nan_to_num()).abs()
    return float(difference.max()) if (difference > allowed.to(new)).any() else 0.0


class FirstFold:
    """Checks that the surrogate of the first fold does not change when the next one is trained.

    A recipe that trains the same model object again would continue from weights that have seen the held-out points. A worker
    process has its own copies of the recipe, so an object of this class is empty there.
    """

    def __init__(self) -> None:
        self._probes: Probes | None = None
        self._checked = False

    def __reduce__(self) -> tuple[type["FirstFold"], tuple[()]]:
        return FirstFold, ()

    def keep(self, ask: Ask, inputs: Rows, answers: Tensor, remedy: str = "") -> None:
        """Keep the first surrogate until the next training is finished."""
        if self._probes is None and not self._checked:
            self._probes = Probes.of(ask, inputs, answers, remedy=remedy)

    def check(self) -> None:
        """Compare the answers of the first surrogate with its earlier answers; then release it."""
        probes, self._probes = self._probes, None
        if probes is not None:
            self._checked = True
            probes.check_unchanged(
                "a fold surrogate changed when the next one was trained"
            )


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
        # A copy, because a dimension of length one can have a stride that a view as bytes does not accept.
        part = part.detach().cpu().clone(memory_format=torch.contiguous_format)
        part = part.view(torch.uint8).numpy()
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def warn_of_failed_folds(
    held_out: Float[np.ndarray, " n_folds"], in_sample: Float[np.ndarray, " n_folds"]
) -> None:
    """Warn of fold surrogates whose training failed: one of them makes all bounds too large."""
    typical_out, typical_in = np.median(held_out), np.median(in_sample)
    failed = (held_out > FAILED_FOLD_RATIO * typical_out) & (
        in_sample > FAILED_FOLD_RATIO * typical_in
    )
    # Interpolating surrogates have zero errors in sample, so every other error would exceed the ratio.
    if not typical_in or not typical_out:
        return
    if failed.any():
        listed = ", ".join(
            f"fold {fold + 1} ({held_out[fold]:.3g} held out, {in_sample[fold]:.3g} in sample)"
            for fold in np.flatnonzero(failed)
        )
        warn(
            f"the mean errors of {listed} of {len(held_out)} are more than {FAILED_FOLD_RATIO:g} times the median over the "
            f"folds ({typical_out:.3g} held out, {typical_in:.3g} in sample). The training of such a fold probably failed, "
            "which makes all bounds too large; train longer or with another seed, and fit again."
        )
