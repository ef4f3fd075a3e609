"""Pictures of the Richtmyer-Meshkov benchmark, from the arrays that its run stores.

python -m benchmarks.richtmyer_meshkov.pictures fields.npz docs
"""

import re
import sys
from functools import cached_property
from pathlib import Path

import numpy as np

SHOWN_TIMES = (6, 12)
# Bounds in the figure. The first one is stored at all times, for the animation.
SHOWN = ("GeoQ (default)", "GeoQ (paper, k_a=5)", "Distance x p bins, two-valued", "Deep ensemble")
# Curves of wrong cells that are flagged over the flagged area.
COMPARED = (*SHOWN, "Classifier of wrong cells (x, p)", "c p (1 - p)", "MC dropout")
COMPARED += ("Static per column",)


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Fields:
    """Arrays of one seed: fields of the median test case, stored as bytes, and numbers of all test cases."""

    def __init__(self, path):
        with np.load(path) as stored:
            self.arrays = {name: stored[name] for name in stored.files}

    def __getitem__(self, name):
        return self.arrays[name]

    @property
    def truth(self):
        return self["case/truth"][..., self.window] > 127

    @property
    def prediction(self):
        return self["case/prediction"][..., self.window] > 127

    @cached_property
    def window(self):
        """The columns that contain both gases, and a margin around them."""
        both = np.stack([self["case/truth"], self["case/prediction"]]) > 127
        mixed = (both.any(axis=2) & ~both.all(axis=2)).any(axis=(0, 1))
        first, *_, last = np.flatnonzero(mixed)
        margin = len(mixed) // 12
        return slice(max(0, first - margin), last + margin)

    def at(self, time, method, name="bound"):
        """A bound or an expected error at a time."""
        maps = self[f"{slug(method)}-binary/{name}"][..., self.window] / 255
        at_all_times = len(maps) == len(self.truth)
        return maps[time - 1 if at_all_times else SHOWN_TIMES.index(time)]

    def numbers(self, method, name):
        return self[f"{slug(method)}-binary/{name}"]

    def measured(self, methods):
        """The methods that have been measured in the binary setting."""
        return [m for m in methods if f"{slug(m)}-binary/bound" in self.arrays]


def show(axes, image, title, most=1.0, colours="magma"):
    axes.imshow(image, origin="lower", cmap=colours, vmin=0, vmax=most)
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


def median_case(figure, fields):
    """The paper's figure: truth, prediction, true error, expected error and bounds at two times."""
    shown = fields.measured(SHOWN)
    rows = figure.subplots(len(SHOWN_TIMES), 4 + len(shown))
    for row, time in zip(rows, SHOWN_TIMES, strict=True):
        truth, prediction = fields.truth[time - 1], fields.prediction[time - 1]
        show(row[0], truth, f"truth, t = {time}", colours="Greys")
        show(row[1], prediction, "prediction", colours="Greys")
        show(row[2], truth != prediction, "true error")
        show(row[3], fields.at(time, SHOWN[0], "expected"), "GeoQ, expected error")
        for axes, method in zip(row[4:], shown, strict=True):
            show(axes, fields.at(time, method), method)


def against_distance(axes, fields, method):
    """Mean error and mean bound of each test case over its distance to the training simulations."""
    distance = fields["case/support_distance"]
    axes.scatter(distance, fields.numbers(method, "case_error"), s=12, label="error")
    bound = fields.numbers(method, "case_bound")
    axes.scatter(distance, bound, s=12, marker="x", label=f"bound of {method}")
    axes.set_yscale("log")
    axes.set_xlabel("cells of u0 that differ from the 20 nearest training simulations")
    axes.set_ylabel("mean over cells and times")
    axes.legend(fontsize=8)


def flagged_cells(axes, fields, methods):
    """Fraction of the wrong cells that are flagged over that of all cells; a dot marks the threshold one half of the bound."""
    for number, method in enumerate(methods):
        flagged, recall = fields.numbers(method, "flagged_and_recall").T
        axes.plot(flagged, recall, color=f"C{number}", lw=1, label=method)
        axes.plot(*fields.numbers(method, "at_one_half").T, "o", color=f"C{number}")
    axes.set_xscale("log")
    axes.set_xlim(1e-3, 0.3)
    axes.set_xlabel("fraction of all cells that are flagged")
    axes.set_ylabel("fraction of the wrong cells that are flagged")
    axes.legend(fontsize=8)


def animate(path, fields, method):
    """Prediction, true error, expected error and bound of the median case, time by time."""
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.7), layout="constrained")
    panels = figure.subplots(1, 4)

    def frame(time):
        truth, prediction = fields.truth[time - 1], fields.prediction[time - 1]
        for axes in panels:
            axes.clear()
        show(panels[0], prediction, f"prediction, t = {time}", colours="Greys")
        show(panels[1], truth != prediction, "true error")
        show(panels[2], fields.at(time, method, "expected"), "expected error")
        show(panels[3], fields.at(time, method), f"bound: {method}")

    frames = range(1, len(fields.truth) + 1)
    animation = FuncAnimation(figure, frame, frames=frames)
    animation.save(path, writer=PillowWriter(fps=2), dpi=70)


def draw(path, folder):
    """Draw all pictures of the arrays in a file."""
    from matplotlib.figure import Figure

    fields, ours = Fields(path), SHOWN[0]
    if not fields.measured([ours]):
        raise SystemExit(f"{path} holds no arrays of {ours}; measure this method first.")
    folder.mkdir(parents=True, exist_ok=True)

    def save(figure, name):
        figure.savefig(folder / f"richtmyer-meshkov-{name}.png", dpi=110)

    figure = Figure(figsize=(15, 5), layout="constrained")
    median_case(figure, fields)
    save(figure, "median")
    figure = Figure(figsize=(6, 4), layout="constrained")
    against_distance(figure.subplots(), fields, ours)
    save(figure, "distance")
    figure = Figure(figsize=(7, 5), layout="constrained")
    flagged_cells(figure.subplots(), fields, fields.measured(COMPARED))
    save(figure, "recall")
    animate(folder / "richtmyer-meshkov.gif", fields, ours)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
