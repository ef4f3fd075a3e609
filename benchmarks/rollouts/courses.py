"""Picture of the held-out losses while the paper's sum is trained.

python -m benchmarks.rollouts.courses --pictures docs
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.pictures import save
from benchmarks.record import RESULTS
from geoq.plots.style import ESTIMATE, REFERENCE, TRUE

COLORS = (TRUE, ESTIMATE, REFERENCE)


def draw(rows, folder):
    """Draw the held-out loss of each part of the folds over the training steps, relative to the loss of the initial weights."""
    rows = [row for row in rows if row["method"] == "GeoQ (paper)"]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        of_setting = [row for row in rows if row["setting"] == setting]
        for row, color in zip(of_setting, COLORS, strict=False):
            for training in row["trainings"]:
                steps, losses = zip(*training["checks"], strict=True)
                first = training["first_loss"]
                axes.plot(steps, [v / first for v in losses], color=color, lw=0.8)
                best = training["best_step"], training["best_loss"] / first
                axes.plot(*best, "o", color=color, ms=4)
            chosen = fmean(t["best_step"] for t in row["trainings"])
            label = f"seed {row['seed']}: {chosen:.0f} steps chosen"
            axes.axvline(chosen, color=color, lw=1.2, ls="--", label=label)
        axes.axhline(1, color="0.6", lw=0.8)
        axes.set(xlabel="training steps", title=setting, ylim=(0.1, 1.8))
        axes.legend(
            loc="lower right", facecolor="white", framealpha=1, edgecolor="none"
        )
    panels[0].set_ylabel("held-out loss / loss of the initial weights")
    path = folder / "kuramoto-sivashinsky-training.png"
    save(figure, path, rows)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, required=True, help="a folder")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS / "kuramoto_sivashinsky.json",
        help="the results file",
    )
    arguments = parser.parse_args()
    print(draw(json.loads(arguments.results.read_text())["rows"], arguments.pictures))


if __name__ == "__main__":
    main()
