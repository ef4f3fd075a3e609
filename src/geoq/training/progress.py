"""One progress bar for all trainings and stages of a calibration, with the remaining time.

Functions that do long work report to this module. Without a terminal there is no bar, and the reports have no effect.
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
    """The bar, and the part of it that belongs to the current stage."""

    bar: Any
    start: float = 0.0
    length: float = 0.0

    def move_to(self, position: float) -> None:
        self.bar.update(max(0.0, position - self.bar.n))


_shown: ContextVar[_Shown | None] = ContextVar("shown", default=None)


@contextmanager
def bar(length: float) -> Iterator[None]:
    """Show a bar. Its length counts trainings; a stage that takes about as long as a training counts as one."""
    # With disable=None tqdm shows the bar on a terminal only.
    with tqdm(total=length, disable=None, bar_format=FORMAT, smoothing=0.1) as shown:
        token = _shown.set(_Shown(shown))
        try:
            yield
        finally:
            _shown.reset(token)


@contextmanager
def stage(name: str, length: float = 1.0) -> Iterator[None]:
    """Name the work of this context in the bar, and advance the bar by ``length`` until its end."""
    shown = _shown.get()
    if shown is None:
        yield
        return
    shown.start, shown.length = shown.bar.n, length
    shown.bar.set_description(name)
    yield
    shown.move_to(shown.start + shown.length)


def position() -> float:
    """The current position of the bar; 0 without a bar."""
    shown = _shown.get()
    return 0.0 if shown is None else float(shown.bar.n)


def move_to(position: float) -> None:
    """Advance the bar to a position. The bar never moves back."""
    shown = _shown.get()
    if shown is not None:
        shown.move_to(position)


def stage_done(fraction: float) -> None:
    """Report the fraction of the current stage that is done."""
    shown = _shown.get()
    if shown is not None:
        shown.move_to(shown.start + fraction * shown.length)
