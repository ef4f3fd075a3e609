"""Draw regions.png: the safe region in two of six inputs for three designs, by the support distance and by four scores.

python docs/draw_regions.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from sklearn.ensemble import RandomForestRegressor

from geoq import GeoQ, RandomFolds, Region
from geoq.parts import StandardizedMetric, SupportDistance

DOCS = Path(__file__).parent
N_POINTS, N_INPUTS, N_QUERIES, N_GRID = 500, 6, 2000, 160
HOLE, WIDTH, SPREAD = 0.35, 0.06, 0.14
# A pale and a dark colour that differ in brightness as well.
SAFE, POINTS = "#9fc5e8", "#b3480b"


@dataclass(frozen=True)
class Design:
    """Where inputs 0 and 1 of the data are, and where there are no data although each input is within its range."""

    draw: Callable[[np.random.Generator, int], np.ndarray]
    empty: str
    is_empty: Callable[[np.ndarray], np.ndarray]


def with_hole(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return points of a square without a disc."""
    x = rng.uniform(-1, 1, size=(8 * n, 2))
    return x[np.linalg.norm(x, axis=1) > HOLE][:n]


def on_ridge(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return points near the diagonal: the two inputs are strongly correlated."""
    along = rng.uniform(-1, 1, size=n)
    return along[:, None] + rng.normal(0, WIDTH, size=(n, 2))


def in_clusters(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return points of two clusters."""
    centre = np.where(rng.uniform(size=(n, 1)) < 0.5, -0.6, 0.6)
    return centre + rng.normal(0, SPREAD, size=(n, 2))


def with_others(rng: np.random.Generator, two: np.ndarray) -> np.ndarray:
    """Return the two inputs and four further ones, which are uniform."""
    return np.hstack([two, rng.uniform(-1, 1, size=(len(two), N_INPUTS - 2))])


DESIGNS = (
    Design(with_hole, "in the hole", lambda x: np.linalg.norm(x, axis=1) < 0.6 * HOLE),
    Design(on_ridge, "off the ridge", lambda x: abs(x[:, 0] - x[:, 1]) > 0.4),
    Design(
        in_clusters,
        "in the gap",
        lambda x: (abs(x.sum(axis=1)) < 0.3) & (abs(x[:, 0] - x[:, 1]) < 0.3),
    ),
)
# The inputs have equal weights in both rows, so that the rows differ in the safe region alone.
RULES = {
    "support distance alone": Region((SupportDistance(),)),
    "four scores, the default": Region(),
}


def train(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a random forest."""
    return RandomForestRegressor(50, random_state=0).fit(x, y).predict


def draw(axes: Axes, design: Design, rule: Region) -> None:
    """Draw the safe region of one rule and the points; the title has the fractions of safe queries."""
    rng = np.random.default_rng(0)
    x = with_others(rng, design.draw(rng, N_POINTS))
    y = np.sin(3 * x[:, 0]) + x[:, 1] ** 2 + x[:, 2] * x[:, 3]
    settings = {"representation": StandardizedMetric(), "folds": RandomFolds(5)}
    estimator = GeoQ(None, train, safe_region=rule, **settings).fit(x, y)
    line = np.linspace(-1.4, 1.4, N_GRID)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    plane = np.pad(grid, ((0, 0), (0, N_INPUTS - 2)))
    score = estimator.assess(plane).support_score.reshape(N_GRID, N_GRID)
    axes.contourf(line, line, score, levels=[-1, 1], colors=[SAFE])
    axes.contour(line, line, score, levels=[1], colors="black", linewidths=0.8)
    axes.scatter(x[:, 0], x[:, 1], s=5, c=POINTS, marker="o", linewidths=0)
    new = with_others(rng, design.draw(rng, N_QUERIES))
    size = (20 * N_QUERIES, N_INPUTS)
    queries = rng.uniform(x.min(axis=0), x.max(axis=0), size=size)
    empty = queries[design.is_empty(queries[:, :2])]
    axes.set_title(
        f"safe: {estimator.assess(new).safe.mean():.0%} of new data,\n"
        f"{estimator.assess(empty).safe.mean():.0%} of queries {design.empty}",
        fontsize=9,
    )
    axes.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", xlabel="input 0")


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    panels = figure.subplots(len(RULES), len(DESIGNS))
    for row, (name, rule) in zip(panels, RULES.items(), strict=True):
        for axes, design in zip(row, DESIGNS, strict=True):
            draw(axes, design, rule)
        row[0].set_ylabel(f"{name}\n\ninput 1")
    marks = [
        Patch(facecolor=SAFE, edgecolor="black", label="safe, all other inputs at 0"),
        Line2D([], [], color=POINTS, marker="o", ls="", ms=4, label="data, projected"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(DOCS / "regions.png", dpi=100)


if __name__ == "__main__":
    main()
