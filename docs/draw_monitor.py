"""Draw monitor.png: a stable stream of queries, then a simulator that changes, then queries that leave the data.

python docs/draw_monitor.py
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.neighbors import KNeighborsRegressor

from geoq import GeoQ, RandomFolds
from geoq.monitor import Monitor, Status

N, BATCH = 1000, 20
COLOURS = {"unsafe": "#b3261e", "distance": "#d98200", "coverage": "#1f6fb2"}
DASHES = {"unsafe": "--", "distance": ":", "coverage": "-"}
NAMES = {"unsafe": "not safe", "distance": "distances", "coverage": "coverage"}


def truth(x: np.ndarray) -> np.ndarray:
    """Return the reference outputs."""
    return np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]


def train(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a surrogate."""
    return KNeighborsRegressor(4, weights="distance").fit(x, y).predict


def watched() -> Iterator[tuple[int, Status]]:
    """Yield the numbers of the monitor after each batch."""
    rng = np.random.default_rng(0)
    x, aside = rng.uniform(-1, 1, (2, 300, 3))
    estimator = GeoQ(train(x, truth(x)), train, folds=RandomFolds(5)).fit(x, truth(x))
    monitor = Monitor(estimator.conformalize(aside, truth(aside)), verify=0.2)
    for start in range(0, 3 * N, BATCH):
        x = rng.uniform(-1, 1, (BATCH, 3)) * (1.25 if start >= 2 * N else 1)
        rows = monitor.observe(x)[1]
        if len(rows):
            monitor.verified(x[rows], truth(x[rows]) + (0.25 if start >= N else 0))
        yield start + BATCH, monitor.status()


def main() -> None:
    """Draw the picture."""
    found = [*watched()]
    at = np.array([n for n, _ in found])
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for test, colour in COLOURS.items():
        values = np.array([status.numbers["evidence"][test] for _, status in found])
        style = {"color": colour, "ls": DASHES[test], "lw": 1.8}
        upper.plot(at, values.clip(1e-6, 1e4), label=NAMES[test], **style)
    upper.axhline(1, color="0.3", lw=1, ls="--")
    upper.annotate("alarm", (60, 1.3), color="0.3")
    upper.set(yscale="log", ylabel="evidence / limit of an alarm", ylim=(1e-6, 1e4))
    ends = np.array([status.numbers["coverage_interval"] for _, status in found])
    middle = [status.numbers["coverage"] or np.nan for _, status in found]
    lower.fill_between(
        at,
        *ends.T,
        color=COLOURS["coverage"],
        alpha=0.2,
        lw=0,
        label="interval, valid at all times",
    )
    lower.plot(at, middle, color=COLOURS["coverage"], label="coverage of verified safe queries")
    lower.axhline(0.95, color="0.3", lw=1, ls="--", label="quantile level, 0.95")
    lower.set(xlabel="queries", ylabel="coverage", ylim=(0.5, 1.01), xlim=(0, 3 * N))
    for axes in (upper, lower):
        for change in (N, 2 * N):
            axes.axvline(change, color="0.6", lw=1)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for start, text in (
        (0, "stable"),
        (N, "the simulator changes"),
        (2 * N, "queries leave the data"),
    ):
        upper.text(start, 1.4e4, text, color="0.3")
    figure.savefig(Path(__file__).parent / "monitor.png", dpi=110)


if __name__ == "__main__":
    main()
