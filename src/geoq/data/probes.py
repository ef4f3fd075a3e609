"""Checks of the user's callables by a few questions: an answer depends on the query alone, and does not change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from geoq.arrays import take
from geoq.checks import add_note_on_error

# Rows at which the user's callables are called again; files store the answers at these rows.
N_PROBES = 8
# A network rounds differently in batches of different sizes. Answers count as equal if they differ by less than this
# fraction of the spread of the answers, plus this fraction of the largest answer. The first fraction is twice the rounding
# error of bfloat16, in which networks may compute on a GPU. The last fraction is the rounding error of sums of doubles.
SPREAD_FRACTION, LARGEST_FRACTION = 2**-7, 1e-5
SAME_BATCH_FRACTION, SUM_FRACTION = 1e-6, 1e-13

Ask: TypeAlias = Callable[[Any], np.ndarray]

_CONSEQUENCE = {"surrogate": "its error", "representation": "the distance between two inputs"}


@dataclass(frozen=True)
class Probes:
    """A few inputs and the answers of a callable to them, which it must repeat at any time.

    Attributes:
        ask: returns the answers of the callable to a batch.
        inputs: the inputs.
        answers: the answers to the inputs in reverse order.
    """

    ask: Ask
    inputs: Any
    answers: np.ndarray

    @staticmethod
    def of(
        ask: Ask, x: Any, answers: Any, name: str = "surrogate", remedy: str = "", behind: Any = 0.0
    ) -> "Probes":
        """Some rows of x; raises if the answers differ in another batch, in another order or at another call.

        ``answers`` are the answers to all of x in a few batches; ``behind`` are numbers of which they are differences; ``remedy`` ends the message.
        """
        rows = np.arange(min(N_PROBES, len(x))) * max(N_PROBES, len(x)) // N_PROBES
        inputs, known = take(x, rows), answers[rows]
        probes = Probes(ask, inputs, ask(take(x, rows[::-1].copy())))
        allowed = _rounding(known) + SUM_FRACTION * np.nan_to_num(abs(behind), posinf=0).max()
        difference = _difference(probes.answers[::-1], known, allowed)
        if not difference:
            with add_note_on_error(f"while calling {name} on a batch of one row"):
                alone = ask(inputs[:1])
            difference = _difference(alone, known[:1], allowed)
        if not difference:
            return probes
        # The cause is either random numbers, or the other rows of the batch.
        first, second = ask(inputs), ask(inputs)
        if again := _difference(second, first, allowed):
            raise ValueError(
                f"{name} gave two answers to the same inputs, up to {again:.3g} apart, so {_CONSEQUENCE.get(name, 'the bound')} would be "
                f"random; switch dropout and sampling off, or fix their seed.{remedy}"
            )
        raise ValueError(
            f"{name} gave other answers to the same inputs in another batch, up to {difference:.3g} apart, so an answer depends "
            "on the other rows or on their order; normalise with fixed numbers and not with statistics of the batch (BatchNorm "
            f"needs running statistics), and return the answers in the order of the inputs.{remedy}"
        )

    def check_unchanged(self, what: str = "the deployed surrogate changed during fit") -> None:
        """Raise if the answers changed while other surrogates were trained; ``what`` starts the message."""
        # The same batch, so the answers are equal except on a GPU that adds in a random order.
        allowed = SAME_BATCH_FRACTION * abs(np.nan_to_num(self.answers)).max()
        answers = self.ask(take(self.inputs, np.arange(len(self.inputs))[::-1].copy()))
        if difference := _difference(answers, self.answers, allowed):
            raise ValueError(
                f"{what}: its predictions differ by up to {difference:.3g} from the earlier ones. Probably train_surrogate fits "
                "the same model object again; build the model inside the function, for example "
                "lambda x, y: Ridge().fit(x, y).predict, or clone it."
            )


def _rounding(answers: np.ndarray) -> Any:
    """The largest difference that rounding can cause between batches of different sizes."""
    answers = np.nan_to_num(answers)
    spread = np.ptp(answers, axis=0)
    if answers.ndim > 2:
        # A field: a cell that hardly varies is compared with the other cells.
        spread = spread.max()
    return SPREAD_FRACTION * spread + LARGEST_FRACTION * abs(answers).max()


def _difference(new: np.ndarray, old: np.ndarray, allowed: Any) -> float:
    """The largest difference, or 0 if all differences are allowed."""
    difference = abs(np.nan_to_num(new) - np.nan_to_num(old))
    return float(difference.max()) if (difference > allowed).any() else 0.0


# The probes of the surrogate of the first fold: no entry before its training, and None after the comparison.
First: TypeAlias = list[Probes | None]


def keep_first(first: First, ask: Ask, inputs: Any, answers: np.ndarray, remedy: str = "") -> None:
    """Keep the surrogate of the first fold until the next training is finished."""
    if not first:
        first.append(Probes.of(ask, inputs, answers, remedy=remedy))


def check_first(first: First) -> None:
    """Raise if the surrogate of the first fold changed when the next one was trained; then release it.

    A recipe that trains the same model object again would continue from weights that have seen the held-out points.
    """
    if first and first[0] is not None:
        first[0].check_unchanged("a fold surrogate changed when the next one was trained")
        first[0] = None
