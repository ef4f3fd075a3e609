"""The ``geoq`` command, which shows GeoQ on a small example."""

import argparse
import time
from pathlib import Path

import numpy as np
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq.core.assessment import Assessment
from geoq.core.estimator import GeoQ
from geoq.metrics import correlation, coverage, pinball
from geoq.surrogate import Surrogate

# The surrogate is trained on this interval and queried on [0, 1].
INTERVAL = (0.25, 0.75)
QUERIES = (0.5, 0.8, 0.02)
PICTURE_FORMATS = (".png", ".pdf", ".svg", ".jpg")


def forrester(x: np.ndarray) -> np.ndarray:
    """The Forrester function as the paper prints it, with (6x - 1); the usual definition has (6x - 2)."""
    value: np.ndarray = (6 * x - 1) ** 2 * np.sin(12 * x - 4)
    return value


def train_surrogate(x: np.ndarray, y: np.ndarray) -> Surrogate:
    """Fit a small network of scikit-learn."""
    settings = {"hidden_layer_sizes": (32, 32), "solver": "lbfgs", "max_iter": 1000}
    network = MLPRegressor(**settings, random_state=0)
    model: Surrogate = make_pipeline(StandardScaler(), network).fit(x, y).predict
    return model


def demo(picture: Path) -> None:
    """Calibrate GeoQ for a small network that approximates the Forrester function; print and draw the bounds.

    Args:
        picture: the file of the picture.
    """
    started = time.perf_counter()
    x, x_test = np.linspace(*INTERVAL, 300)[:, None], np.linspace(0, 1, 1000)[:, None]
    low, high = forrester(x).min(), forrester(x).max()
    y, y_test = ((forrester(points[:, 0]) - low) / (high - low) for points in (x, x_test))
    print(f"Training a network on {len(x)} points of [{INTERVAL[0]}, {INTERVAL[1]}] ...")
    estimator = GeoQ(train_surrogate(x, y), train_surrogate)
    print(f"Calibrating GeoQ with {estimator.folds!r} ...")
    assessment = estimator.fit(x, y).assess(x_test)
    error = abs(y_test - assessment.prediction)
    print("\nThree queries: inside the data, just outside, far outside")
    for row in np.searchsorted(x_test[:, 0], QUERIES):
        print(f"\nx = {x_test[row, 0]:.3f}, true error {error[row]:.3g}")
        print(assessment.reason(int(row)))
    _print_table(error, assessment)
    _draw(picture, x_test[:, 0], error, assessment)
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


def _draw(picture: Path, x: np.ndarray, error: np.ndarray, assessment: Assessment) -> None:
    try:
        from matplotlib.figure import Figure

        from geoq import plots
    except ImportError as exc:
        print(f"\nNo picture: {exc}")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    answer = assessment.error_hat, assessment.safe
    axes = plots.error_over_input(figure.subplots(), x, error, *answer, INTERVAL)
    axes.set_title("Forrester function: error of a network trained on [0.25, 0.75]")
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
