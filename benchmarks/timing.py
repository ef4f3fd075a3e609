"""Seconds of work, where several methods share results that are computed once."""

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def now():
    """The time after all work on the GPU is done."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Memo:
    """Results by key; each is computed once. ``seconds_saved`` are the seconds of the repeated requests."""

    known: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    seconds_saved: float = 0.0

    def __call__(self, key, make):
        """The result of ``make()``, or the earlier result for the same key."""
        if key in self.known:
            self.seconds_saved += self.known[key][1]
        else:
            self.known[key] = self.timed(make)
        return self.known[key][0]

    def timed(self, make):
        """Result and seconds of a call; results from the memo count with the seconds that they took."""
        saved, started = self.seconds_saved, now()
        made = make()
        return made, now() - started + self.seconds_saved - saved


@dataclass
class Stopwatch:
    """Seconds spent inside ``with watch.running()`` blocks; a remembered training counts with the seconds that it took."""

    training: Any = None
    seconds: float = 0.0

    @contextmanager
    def running(self):
        saved, started = getattr(self.training, "seconds_saved", 0.0), now()
        yield
        self.seconds += now() - started
        self.seconds += getattr(self.training, "seconds_saved", 0.0) - saved
