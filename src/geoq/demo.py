"""What ``geoq demo`` shows: a small model of a small simulator, its error bounds, and the queries that the data do not support."""

import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq.core.estimator import GeoQ
from geoq.metrics import coverage
from geoq.surrogate import Surrogate

# The simulator was run at random points of these intervals; the surrogate is queried on [0, 1].
INTERVALS, N_RUNS = ((0.05, 0.42), (0.62, 0.9)), (48, 32)
QUERIES = {"amid the data": 0.3, "in the gap": 0.52, "outside": 0.98}


def forrester(x: np.ndarray) -> np.ndarray:
    """The Forrester function as the paper prints it, with (6x - 1); the usual definition has (6x - 2)."""
    return np.asarray((6 * x - 1) ** 2 * np.sin(12 * x - 4))


def train_surrogate(x: np.ndarray, y: np.ndarray) -> Surrogate:
    """Fit a small network of scikit-learn."""
    settings = {"hidden_layer_sizes": (32, 32), "solver": "lbfgs", "max_iter": 1000}
    network = make_pipeline(StandardScaler(), MLPRegressor(**settings, random_state=0))
    model = TransformedTargetRegressor(network, transformer=StandardScaler())
    return model.fit(x, y).predict


def demo(picture: Path) -> str:
    """Calibrate bounds for the small network; returns what they state and writes the picture, if Matplotlib is installed."""
    started, rng = time.perf_counter(), np.random.default_rng(0)
    runs = [rng.uniform(*ends, n) for ends, n in zip(INTERVALS, N_RUNS, strict=True)]
    x, queries = np.concatenate(runs)[:, None], np.linspace(0, 1, 1001)[:, None]
    y, truth = forrester(x[:, 0]), forrester(queries[:, 0])
    print(f"{len(x)} runs of a simulator, and 16 trainings of a small network ...", file=sys.stderr)
    answer = GeoQ(train_surrogate(x, y), train_surrogate).fit(x, y).assess(queries)
    error, safe = abs(truth - answer.prediction), answer.safe
    ends = f"{INTERVALS[0]} and {INTERVALS[1]}"
    lines = [f"{len(x)} runs of a simulator between {ends}, with a gap.\n"]
    for name, at in QUERIES.items():
        row = int(np.searchsorted(queries[:, 0], at))
        lines.append(answer.reason(row, name=f"x = {at}, {name}", names=["x"]))
        lines.append(f"  the true error, which geoq has not seen, is {error[row]:.3g}\n")
    for name, rows in (("safe", safe), ("not safe", ~safe)):
        within = coverage(error, answer.error_hat, rows)
        ratio = (error / answer.error_hat)[rows].max()
        lines.append(
            f"{rows.mean():.0%} of the queries are {name}: {within:.0%} of their errors are within the bound, and the largest is "
            f"{ratio:.3g} times its bound"
        )
    try:
        plots = import_module("geoq.plots")
    except ImportError as exc:
        lines.append(f"\nNo picture: {exc}")
    else:
        figure = import_module("matplotlib.figure").Figure(figsize=(9, 5.5))
        plots.curve(figure, answer, queries[:, 0], truth=truth, data=(x[:, 0], y))
        figure.savefig(picture, dpi=150)
        lines.append(f"\nPicture: {picture}")
    return "\n".join([*lines, f"({time.perf_counter() - started:.0f} s in all)"])
