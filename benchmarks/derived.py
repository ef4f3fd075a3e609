"""Numbers of the pages that are computed from the results files and stand in no table, by the name in their anchor."""

import statistics
from collections.abc import Callable

from benchmarks.record import load


def h200_seconds() -> float:
    """Seconds of fit and assess of the default for a million points on one H200."""
    (row,) = [r for r in load("speed-h200")["estimator"] if r["form"] == "default"]
    return row["fit_seconds"] + row["assess_seconds"]


def h200_search() -> float:
    """Time of the search relative to torch.cdist for 100,000 dimensions on one H200."""
    rows = load("speed-h200")["neighbour_search"]
    wide = [r["ratio"] for r in rows if r["points"] == "1e3 x 100,000"]
    return max(wide)


def broken_rollouts() -> dict[tuple[str, float], list[float]]:
    """Percentages of rollouts that exceed the tolerance within the trusted horizon, by system and tolerance, for each seed."""
    found: dict[tuple[str, float], list[float]] = {}
    for row in load("trusted_horizon")["rows"]:
        if row["method"] == "held out":
            key = row["setting"], row["tolerance"]
            found.setdefault(key, []).append(100 * row["broken"])
    return found


def mean_broken() -> list[float]:
    return [statistics.fmean(by_seed) for by_seed in broken_rollouts().values()]


NUMBERS: dict[str, Callable[[], float]] = {
    "speed.h200_seconds": h200_seconds,
    "speed.h200_search": h200_search,
    "horizon.least_broken": lambda: min(mean_broken()),
    "horizon.most_broken": lambda: max(mean_broken()),
    "horizon.worst_run": lambda: max(map(max, broken_rollouts().values())),
}
