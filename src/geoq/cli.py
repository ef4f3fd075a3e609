"""The ``geoq`` command, which shows GeoQ on a small example."""

import argparse
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from geoq.assessment import Assessment
from geoq.estimator import GeoQ
from geoq.metrics import correlation, coverage, pinball
from geoq.nets.mlp import MLP
from geoq.training.loop import Training
from geoq.training.recipe import TrainNetwork

# The surrogate is trained on this interval and queried on [0, 1].
INTERVAL = (0.25, 0.75)
QUERIES = (0.5, 0.8, 0.02)
QUANTILE = 0.95
PICTURE_FORMATS = (".png", ".pdf", ".svg", ".jpg")


def forrester(x: np.ndarray) -> np.ndarray:
    """The Forrester function as the paper prints it, with (6x - 1); the usual definition has (6x - 2)."""
    value: np.ndarray = (6 * x - 1) ** 2 * np.sin(12 * x - 4)
    return value


def demo(picture: Path) -> None:
    """Calibrate GeoQ for a small network that approximates the Forrester function; print and draw the bounds.

    Args:
        picture: the file of the picture.
    """
    from geoq import plots

    started = time.perf_counter()
    x, x_test = np.linspace(*INTERVAL, 600)[:, None], np.linspace(0, 1, 1000)[:, None]
    low, high = forrester(x).min(), forrester(x).max()
    y, y_test = ((forrester(points) - low) / (high - low) for points in (x, x_test))

    train_surrogate = TrainNetwork(
        partial(MLP, 1, 1, hidden=(64, 64, 16, 32)),
        training=Training(n_steps=2500, learning_rate=5e-3, check_every=50),
    )
    print(
        f"Training a network on {len(x)} points of [{INTERVAL[0]}, {INTERVAL[1]}] ..."
    )
    surrogate = train_surrogate(x, y)
    geoq = GeoQ(surrogate, train_surrogate)
    print(f"Calibrating GeoQ with {geoq.folds!r} ...")
    geoq.fit(x, y)

    assessment, few = geoq.assess(x_test), np.searchsorted(x_test[:, 0], QUERIES)
    error = abs(y_test - assessment.prediction)
    print("\nThree queries: inside the data, just outside, far outside")
    for row in few:
        print(
            f"\nx = {x_test[row, 0]:.3f}, true error {error[row, 0]:.3g}\n{assessment.reason(int(row))}"
        )
    _print_table(error, assessment)
    _draw(plots, picture, x_test, error, assessment)
    print(f"\nPicture: {picture}   ({time.perf_counter() - started:.0f} s in all)")


def _print_table(error: np.ndarray, assessment: Assessment) -> None:
    """Print the metrics over all queries and over the safe ones."""
    bound, safe = np.asarray(assessment.error_hat), np.asarray(assessment.safe)
    print(f"\n{len(error)} test points on [0, 1]:\n")
    print("| queries | pinball | correlation | coverage | fraction |")
    print("|---|---|---|---|---|")
    for name, where in (("all", np.ones_like(safe)), ("safe", safe)):
        row = (
            pinball(error, bound, QUANTILE, where),
            correlation(error, bound, where),
            coverage(error, bound, where),
        )
        print(
            f"| {name} | {row[0]:.4f} | {row[1]:.3f} | {row[2]:.3f} | {where.mean():.3f} |"
        )


def _draw(
    plots: ModuleType,
    picture: Path,
    x: np.ndarray,
    error: np.ndarray,
    assessment: Assessment,
) -> None:
    from matplotlib.figure import Figure

    bound, safe = np.asarray(assessment.error_hat), np.asarray(assessment.safe)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = plots.error_over_input(
        figure.subplots(), x[:, 0], error[:, 0], bound[:, 0], safe, INTERVAL
    )
    axes.set_title("Forrester function: error of a network trained on [0.25, 0.75]")
    figure.savefig(picture, dpi=150)


def _picture(text: str) -> Path:
    """The path of the picture; refused before any training if a picture cannot be written there."""
    path = Path(text)
    if path.suffix.lower() not in PICTURE_FORMATS or path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not the name of a picture; choose a file that ends in {', '.join(PICTURE_FORMATS)}."
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text}, but the folder {path.parent} does not exist; create it, or choose another path."
        )
    return path


def main() -> None:
    """Run the ``geoq`` command with the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="geoq", description="Error bounds for trained surrogate models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "demo", help="calibrate GeoQ for a small network, print and draw its bounds"
    )
    command.add_argument(
        "--picture",
        type=_picture,
        default="demo.png",
        help="file of the picture (default: demo.png)",
    )
    demo(parser.parse_args().picture)
