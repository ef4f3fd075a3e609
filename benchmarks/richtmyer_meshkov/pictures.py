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
    """Arrays of one seed: fields of the median test case, stored as bytes."""

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
    """Truth, prediction with its wrong cells, and the probability of a wrong cell of the median case, time by time."""
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels, (n_times, height, width) = figure.subplots(1, 3, sharey=True), fields.truth.shape
    style = {"origin": "lower", "extent": (0, width / height, 0, 1), "vmin": 0}
    gases = style | {"cmap": ListedColormap(["white", "0.55", "#c1440e"]), "vmax": 2}
    looks = (gases, gases, style | {"cmap": "magma", "vmax": 1})
    maps = [axes.imshow(fields.truth[0], **look) for axes, look in zip(panels, looks, strict=True)]
    bar = figure.colorbar(maps[1], ax=panels[:2], shrink=0.8, pad=0.02)
    bar.set_ticks([1 / 3, 1, 5 / 3], labels=["air", "heavy gas", "wrong"])
    figure.colorbar(maps[2], ax=panels[2], shrink=0.8)
    panels[0].set(ylabel="heights h of the tube")
    for axes, name in zip(panels, ("truth", "prediction", "probability of an error"), strict=True):
        axes.set_title(name)

    def frame(time):
        truth, prediction = fields.truth[time - 1], fields.prediction[time - 1]
        wrong = np.where(truth != prediction, 2, prediction)
        shown = truth, wrong, fields.at(time, method, "expected")
        for image, values in zip(maps, shown, strict=True):
            image.set_data(values)
        figure.suptitle(rf"t = {2 * time / n_times:.2f} $h \sqrt{{\rho / p}}$")

    animation = FuncAnimation(figure, frame, frames=range(1, n_times + 1))
    animation.save(path, writer=PillowWriter(fps=2), dpi=100)


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
