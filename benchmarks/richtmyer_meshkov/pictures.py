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
    """Truth, prediction, wrong cells and the probability of an error at two times."""
    rows = figure.subplots(len(SHOWN_TIMES), 4)
    for row, time in zip(rows, SHOWN_TIMES, strict=True):
        truth, prediction = fields.truth[time - 1], fields.prediction[time - 1]
        show(row[0], truth, f"truth, t = {time}", colours="Greys")
        show(row[1], prediction, "prediction", colours="Greys")
        show(row[2], truth != prediction, "wrong cells")
        show(row[3], fields.at(time, SHOWN[0], "expected"), "probability of an error")


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

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    median_case(figure, fields)
    figure.savefig(folder / "richtmyer-meshkov-median.png", dpi=110)
    animate(folder / "richtmyer-meshkov.gif", fields, ours)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
