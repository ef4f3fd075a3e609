"""The progress of a calibration: a bar, lines in the log, or calls of a function of the user."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from geoq.checks import shortened

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The state of a calibration. ``str(progress)`` is a line for a log.

    Attributes:
        stage: the stage that has just ended, for example ``"fold 3 of 15"``.
        n_done: the number of finished trainings.
        n_trainings: the number of all trainings, without folds that come from a checkpoint.
        elapsed: seconds since the start.
        remaining: the estimated seconds of the remaining trainings; None before the first training has ended.
    """

    stage: str
    n_done: int
    n_trainings: int
    elapsed: float = 0.0
    remaining: float | None = None

    def __str__(self) -> str:
        counted = f"{self.n_done} of {plural(self.n_trainings, 'training')} done"
        if not self.n_done:
            return f"{self.stage}: {counted}"
        left = f", about {duration(self.remaining)} left" if self.remaining else ""
        return f"{self.stage}: {counted} after {duration(self.elapsed)}{left}"


ShowProgress: TypeAlias = Callable[[Progress], object] | None


def progress_bar(progress: Progress) -> None:
    """Show the progress as a bar on terminals and in notebooks: the default of ``fit(x, y, progress=...)``."""
    del progress  # drawn by ``Trainings``, which closes the bar


class Trainings:
    """The trainings of one calibration: counts them, and shows and logs the progress."""

    def __init__(self, show: ShowProgress, n: int) -> None:
        from tqdm.auto import tqdm  # here, because it looks for a notebook

        self.show, self.n_done, self.n = show, 0, n
        self.began = time.monotonic()
        hidden = None if show is progress_bar else True
        # With disable=None tqdm shows the bar on a terminal or in a notebook only.
        self.bar: Any = tqdm(total=n, disable=hidden, leave=False, unit="training")

    def done(self, stage: str, n: int = 1) -> None:
        """Report the end of n trainings."""
        self.n_done += n
        self.bar.update(n)
        self.bar.set_description_str(stage)
        self._report(stage)

    def skip(self, n: int) -> None:
        """Report n folds that come from a checkpoint and need no training."""
        self.n -= n
        self.bar.total = self.n
        self.bar.refresh()
        self._report(f"{plural(n, 'fold')} from the checkpoint")

    def _report(self, stage: str) -> None:
        elapsed = time.monotonic() - self.began
        left = max(0, self.n - self.n_done)
        remaining = elapsed / self.n_done * left if self.n_done else None
        state = Progress(stage, self.n_done, self.n, elapsed, remaining)
        logger.info("%s", state)
        if self.show is not None:
            self.show(state)


@contextmanager
def trainings(show: ShowProgress, n: int) -> Iterator[Trainings]:
    """Show the progress of n trainings in this context."""
    counter = Trainings(show, n)
    try:
        if n:
            counter.done("start", 0)
        yield counter
    finally:
        counter.bar.close()


def check_progress(show: object) -> None:
    """Raise for anything that cannot show the progress."""
    if isinstance(show, type) or not (show is None or callable(show)):
        raise TypeError(
            f"progress={shortened(show)}, but progress must be a function that receives a Progress, or None; pass progress=print for "
            "a line after each training, or progress=None for no output."
        )


def plural(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def duration(seconds: float | None) -> str:
    """Seconds in words."""
    if seconds is None or seconds < 99.5:
        return f"{seconds or 0.0:.2g} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:.3g} h"
