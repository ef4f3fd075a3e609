"""The ``geoq`` command, which shows GeoQ on a small example."""

import argparse
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq.core.assessment import Assessment
from geoq.core.estimator import GeoQ
from geoq.metrics import correlation, coverage, pinball
from geoq.surrogate import Surrogate

# The surrogate is trained on random points of these intervals and queried on [0, 1].
INTERVALS, N_POINTS = ((0.05, 0.42), (0.62, 0.9)), (72, 48)
QUERIES = (0.3, 0.52, 0.98)
PICTURE_FORMATS = (".png", ".pdf", ".svg", ".jpg")
# Inputs and outputs.
Curve: TypeAlias = tuple[np.ndarray, np.ndarray]


def forrester(x: np.ndarray) -> np.ndarray:
    """The Forrester function as the paper prints it, with (6x - 1); the usual definition has (6x - 2)."""
    value: np.ndarray = (6 * x - 1) ** 2 * np.sin(12 * x - 4)
    return value


def train_surrogate(x: np.ndarray, y: np.ndarray) -> Surrogate:
    """Fit a small network of scikit-learn."""
    settings = {"hidden_layer_sizes": (32, 32), "solver": "lbfgs", "max_iter": 1000}
    network = make_pipeline(StandardScaler(), MLPRegressor(**settings, random_state=0))
    model = TransformedTargetRegressor(network, transformer=StandardScaler())
    surrogate: Surrogate = model.fit(x, y).predict
    return surrogate


def demo(picture: Path) -> None:
    """Calibrate GeoQ for a small network that approximates the Forrester function; print and draw the bounds.

    Args:
        picture: the file of the picture.
    """
    started, rng = time.perf_counter(), np.random.default_rng(0)
    parts = [rng.uniform(*ends, n) for ends, n in zip(INTERVALS, N_POINTS, strict=True)]
    x, x_test = np.concatenate(parts)[:, None], np.linspace(0, 1, 1001)[:, None]
    y, y_test = forrester(x[:, 0]), forrester(x_test[:, 0])
    print(f"Training a network on {len(x)} points of {' and '.join(map(str, INTERVALS))} ...")
    estimator = GeoQ(train_surrogate(x, y), train_surrogate)
    print(f"Calibrating GeoQ with {estimator.folds!r} ...")
    assessment = estimator.fit(x, y).assess(x_test)
    error = abs(y_test - assessment.prediction)
    print("\nThree queries: amid the data, in a gap, outside")
    for row in np.searchsorted(x_test[:, 0], QUERIES):
        print(f"\nx = {x_test[row, 0]:.3f}, true error {error[row]:.3g}")
        print(assessment.reason(int(row)))
    _print_table(error, assessment)
    _draw(picture, (x[:, 0], y), (x_test[:, 0], y_test), assessment)
    print(f"({time.perf_counter() - started:.0f} s in all)")


def _print_table(error: np.ndarray, assessment: Assessment) -> None:
    """Print the metrics over all queries and over the safe ones."""
    bound, safe = assessment.error_hat, assessment.safe
    print(f"\n{len(error)} test points on [0, 1]:\n")
    print("| queries | pinball | correlation | coverage | fraction |")
    print("|---|---|---|---|---|")
    for name, where in (("all", np.ones_like(safe)), ("safe", safe)):
        loss = pinball(error, bound, assessment.quantile, where)
        of_bound = correlation(error, bound, where), coverage(error, bound, where)
        print(
            f"| {name} | {loss:.4f} | {of_bound[0]:.3f} | {of_bound[1]:.3f} | {where.mean():.3f} |"
        )


def _draw(picture: Path, data: Curve, truth: Curve, assessment: Assessment) -> None:
    """The surrogate with its bounds, and below the bounds beside the true errors."""
    try:
        from matplotlib.figure import Figure

        from geoq.plots import style
    except ImportError as exc:
        print(f"\nNo picture: {exc}")
        return
    (x, y), prediction, bound = truth, assessment.prediction, assessment.error_hat
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes in (upper, lower):
        style.shade(axes, x, assessment.safe, "safe")
    band = prediction - bound, prediction + bound
    upper.fill_between(x, *band, color="0.4", alpha=0.3, lw=0, label="surrogate ± bound")
    upper.plot(x, y, color=style.TRUE, lw=1.6, label="simulator")
    upper.plot(x, prediction, color=style.ESTIMATE, lw=1.6, ls="--", label="surrogate")
    upper.plot(*data, ".", color=style.TRUE, ms=5, label="data")
    margin = 0.2 * np.ptp(y)
    upper.set(ylabel="output", xlim=(0, 1), ylim=(y.min() - margin, y.max() + margin))
    lower.plot(x, abs(y - prediction), color=style.TRUE, lw=1.2, label="true error")
    lower.plot(x, bound, color=style.ESTIMATE, lw=1.6, ls="--", label="error bound")
    lower.set(
        xlabel="input", ylabel="error", yscale="log", ylim=(3e-5 * np.ptp(y), 3 * bound.max())
    )
    style.label_logarithms(lower.yaxis)
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(picture, dpi=150)
    print(f"\nPicture: {picture}")


def _picture(text: str) -> Path:
    """The path of the picture; raises if a picture cannot be written there."""
    path = Path(text)
    if path.suffix.lower() not in PICTURE_FORMATS or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a picture in an existing folder; choose a file that ends in {', '.join(PICTURE_FORMATS)}."
        )
    return path


def main() -> None:
    """Run the ``geoq`` command with the arguments of the command line."""
    about = "Error bounds for trained surrogate models."
    parser = argparse.ArgumentParser(prog="geoq", description=about)
    commands = parser.add_subparsers(required=True, metavar="command")
    about = "calibrate GeoQ for a small network, print and draw its bounds"
    command = commands.add_parser("demo", help=about)
    about = "file of the picture (default: demo.png)"
    command.add_argument("--picture", type=_picture, default="demo.png", help=about)
    demo(parser.parse_args().picture)
