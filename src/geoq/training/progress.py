"""One bar over all trainings and stages of a calibration, with the time that remains; none without a terminal.

Whoever does long work says so here. Where no bar is shown, nothing happens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


@dataclass
class _Shown:
    """The bar, and the part of it that the present stage fills."""

    bar: Any
    start: float = 0.0
    share: float = 0.0

    def move_to(self, place: float) -> None:
        self.bar.update(max(0.0, place - self.bar.n))


_shown: ContextVar[_Shown | None] = ContextVar("shown", default=None)


@contextmanager
def bar(n_units: float) -> Iterator[None]:
    """Show a bar of so many units; one unit is one training, or a stage that takes about as long."""
    # disable=None: a bar on a terminal, silence elsewhere
    with tqdm(total=n_units, disable=None, bar_format=FORMAT, smoothing=0.1) as shown:
        token = _shown.set(_Shown(shown))
        try:
            yield
        finally:
            _shown.reset(token)


@contextmanager
def stage(name: str, n_units: float = 1.0) -> Iterator[None]:
    """Work that fills so many units of the bar."""
    shown = _shown.get()
    if shown is None:
        yield
        return
    shown.start, shown.share = shown.bar.n, n_units
    shown.bar.set_description(name)
    yield
    shown.move_to(shown.start + shown.share)


def place() -> float:
    """Units done so far."""
    shown = _shown.get()
    return 0.0 if shown is None else float(shown.bar.n)


def move_to(units: float) -> None:
    """So many units are done, in this process or in others."""
    shown = _shown.get()
    if shown is not None:
        shown.move_to(units)


def reached(fraction: float) -> None:
    """The present stage is done to this fraction."""
    shown = _shown.get()
    if shown is not None:
        shown.move_to(shown.start + fraction * shown.share)
