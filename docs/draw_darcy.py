"""Draw darcy.png: a Fourier neural operator for the flow through porous rock, its true errors and its bounds, safe and not safe.

python -m docs.draw_darcy
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure, SubFigure

from benchmarks.fields.operator import train
from benchmarks.fields.problems import darcy, darcy_fields
from geoq import GeoQ, RandomFolds

N_CELLS, N_DATA = 32, 400
# The decay of the spectrum of the logarithm of the permeability.
DATA, ROUGHER = 3.5, 2.0
TRAINING = {"seed": 0, "n_steps": 400, "n_modes": 6, "width": 12, "in_time": False}
RED = "#b3261e"
# The maps of a query with their colours.
MAPS = {"log permeability (input)": "viridis", "predicted pressure": "viridis"}
MAPS |= {"true error": "magma", "bound": "magma"}


def rocks(n: int, seed: int, decay: float) -> np.ndarray:
    """Return logarithms of permeabilities, (n, 1, N_CELLS, N_CELLS)."""
    return darcy_fields(decay, size=N_CELLS)(np.random.default_rng(seed), n)


def pressure(x: np.ndarray) -> np.ndarray:
    """Return the pressures of the reference solver, in thousandths."""
    return 1000 * darcy(x)


def draw_row(
    figure: SubFigure, fields: Sequence[np.ndarray], tops: Sequence[float], *, safe: bool
) -> None:
    """Draw input, prediction, error and bound of one query; the last two have one colour scale."""
    panels = figure.subplots(1, len(MAPS))
    for axes, (name, colours), field, top in zip(panels, MAPS.items(), fields, tops, strict=True):
        low = -top if "input" in name else 0
        shown = axes.imshow(field[0], vmin=low, vmax=top, cmap=colours, origin="lower")
        axes.set(title=name, xticks=[], yticks=[])
        axes.spines[:].set(color="black" if safe else RED, linewidth=0.8 if safe else 3)
        if name != "true error":
            of = panels[2:] if name == "bound" else axes
            figure.colorbar(shown, ax=of, shrink=0.85, pad=0.02 if name == "bound" else 0.04)
    text = "safe: the input is like the data"
    if not safe:
        text = "NOT safe: windows of the input are rougher than in the data"
    figure.suptitle(text, color="black" if safe else RED, fontsize=12, weight="bold")


def draw(fields: Sequence[np.ndarray], safe: Sequence[bool]) -> Figure:
    """Return the figure: a row per query with its input, prediction, error and bound."""
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    tops = [np.abs(field).max() for field in fields]
    tops[2] = tops[3] = max(tops[2:])
    for i, row in enumerate(figure.subfigures(len(safe), 1)):
        draw_row(row, [field[i] for field in fields], tops, safe=bool(safe[i]))
    return figure


def main() -> None:
    """Train, calibrate and write the picture of the first new input of each kind; three minutes on one core."""
    x = rocks(N_DATA, 0, DATA)
    estimator = GeoQ(None, partial(train, **TRAINING), folds=RandomFolds(4)).fit(x, pressure(x))
    new = np.concatenate([rocks(1, 1, DATA), rocks(1, 2, ROUGHER)])
    answer = estimator.assess(new)
    error = abs(pressure(new) - answer.prediction)
    figure = draw((new, answer.prediction, error, answer.error_hat), answer.safe)
    figure.savefig(Path(__file__).parent / "darcy.png", dpi=100)


if __name__ == "__main__":
    main()
