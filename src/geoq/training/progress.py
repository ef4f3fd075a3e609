"""The progress of a calibration: a bar, lines in the log, or calls of a function of the user.

Functions that do long work report to this module. Outside a calibration the reports have no effect.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tqdm import tqdm

logger = logging.getLogger(__name__)

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


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


@dataclass(frozen=True)
class ProgressBar:
    """A bar with the remaining time, the default of ``fit(x, y, progress=...)``.

    Args:
        file: where the bar is drawn, a text file that is open for writing. None means standard error, if it is a terminal or a notebook; otherwise there is no bar.

    Example:
        >>> import io
        >>> import numpy as np
        >>> from geoq import GeoQ, RandomFolds
        >>> from geoq.training import ProgressBar
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> geoq = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(3))
        >>> log = io.StringIO()
        >>> geoq = geoq.fit(x, np.sin(3 * x[:, 0]), progress=ProgressBar(log))
        >>> "safe region: 100%" in log.getvalue()
        True
    """

    file: Any = None

    def open(self, length: float) -> Any:
        """A bar of tqdm; a disabled one where a bar cannot be redrawn."""
        # Some terminals report a size of 0, which would hide the bar; this size is then 80 x 24.
        size = shutil.get_terminal_size()
        # With disable=None tqdm shows the bar on a terminal only.
        return tqdm(
            total=length,
            file=self.file,
            disable=False if self.file is not None or _in_notebook() else None,
            ncols=min(120, size.columns),
            nrows=size.lines,
            bar_format=FORMAT,
            smoothing=0.1,
        )


ShowProgress: TypeAlias = ProgressBar | Callable[[Progress], object] | None
BAR = ProgressBar()


def check_progress(show: object) -> None:
    """Refuse anything that cannot show the progress."""
    if isinstance(show, type) or not (
        show is None or isinstance(show, ProgressBar) or callable(show)
    ):
        raise TypeError(
            f"progress={show!r}, but progress must be ProgressBar(), a function that receives a Progress, or None; pass "
            "progress=print for a line after each training, or progress=None for no output."
        )


@dataclass
class _Running:
    """A calibration that is running, its bar, and the part of the bar that belongs to the current stage."""

    show: ShowProgress
    bar: Any
    state: Progress
    began: float = field(default_factory=time.monotonic)
    start: float = 0.0
    length: float = 0.0

    def move_to(self, position: float) -> None:
        self.bar.update(max(0.0, position - self.bar.n))

    def report(self, stage: str, n_done: int = 0, n_restored: int = 0) -> None:
        """Log a line, and call the function of the user."""
        done, n = self.state.n_done + n_done, self.state.n_trainings - n_restored
        elapsed = time.monotonic() - self.began
        remaining = elapsed / done * max(0, n - done) if done else None
        self.state = replace(
            self.state,
            stage=stage,
            n_done=done,
            n_trainings=n,
            elapsed=elapsed,
            remaining=remaining,
        )
        logger.info("%s", self.state)
        if self.show is not None and not isinstance(self.show, ProgressBar):
            self.show(self.state)


_running: ContextVar[_Running | None] = ContextVar("running", default=None)


@contextmanager
def shown(show: ShowProgress, n_trainings: int, length: float) -> Iterator[None]:
    """Show the progress of the calibration in this context, with a bar whose length is in units of one training."""
    opened = (
        show.open(length)
        if isinstance(show, ProgressBar)
        else tqdm(total=length, disable=True)
    )
    with opened as bar:
        running = _Running(show, bar, Progress("start", 0, n_trainings))
        token = _running.set(running)
        try:
            if n_trainings:
                running.report("start")
            yield
        finally:
            _running.reset(token)


@contextmanager
def stage(name: str, length: float = 1.0) -> Iterator[None]:
    """Name the work of this context in the bar, and advance the bar by ``length`` until its end."""
    running = _running.get()
    if running is None:
        yield
        return
    running.start, running.length = running.bar.n, length
    running.bar.set_description_str(name)
    yield
    running.move_to(running.start + running.length)


def trained(name: str, n: int = 1) -> None:
    """Report that n surrogates have been trained."""
    running = _running.get()
    if running is not None:
        running.report(name, n_done=n)


def restored(n: int) -> None:
    """Report that n folds come from a checkpoint and need no training."""
    running = _running.get()
    if running is not None and n:
        running.report(f"{plural(n, 'fold')} from the checkpoint", n_restored=n)


def position() -> float:
    """The current position of the bar; 0 outside a calibration."""
    running = _running.get()
    return 0.0 if running is None else float(running.bar.n)


def move_to(position: float) -> None:
    """Advance the bar to a position. The bar never moves back."""
    running = _running.get()
    if running is not None:
        running.move_to(position)


def stage_done(fraction: float) -> None:
    """Report the fraction of the current stage that is done."""
    running = _running.get()
    if running is not None:
        running.move_to(running.start + fraction * running.length)


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


def _in_notebook() -> bool:
    """Whether the code runs in a kernel of Jupyter, whose output is not a terminal but can be redrawn."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
