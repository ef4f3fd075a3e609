"""Pictures of results files, and the diagnostics that the pictures of the paper's problems share.

    python -m benchmarks.pictures results docs/results.png

Lines differ in shade and in dash, so that the pictures can be read in grey. ``save`` writes a picture of results with a digest of the
rows that it shows, and a test compares the digest with the results file.
"""

import argparse
import hashlib

import numpy as np
from matplotlib.figure import Figure

from benchmarks.fields.table import HAZARD, kind_of
from benchmarks.markdown import select, values
from benchmarks.record import as_text, load
from benchmarks.suite import SHIFTS
from benchmarks.suite.table import PUBLIC, versus
from geoq.plots.style import ESTIMATE, REFERENCE, TRUE

# The name of the digest in the metadata of a PNG file.
DIGEST = "Rows"
DOTTED = {"color": "black", "lw": 0.8, "ls": ":"}
BELOW = {"loc": "outside lower center", "frameon": False}


def digest(rows):
    """A hash of rows, as a results file contains them."""
    return hashlib.sha256(as_text({"rows of": "a picture", "rows": rows}).encode()).hexdigest()


def save(figure, path, rows, dpi=120):
    """Write a picture of rows of a results file, with their digest."""
    figure.savefig(path, dpi=dpi, metadata={DIGEST: digest(rows)})


def stored_digest(path):
    """The digest of the rows that a picture shows; None for pictures that were not written by ``save``."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.info.get(DIGEST)


# Diagnostics: each draws arrays into axes.


def error_over_time(axes, error, bound, n_calibrated):
    """True errors and bounds averaged over the state, for each rollout and for the mean of the rollouts."""
    step = np.arange(1, error.shape[1] + 1)
    curves = ((error, TRUE, "-", "true error"), (bound, ESTIMATE, "--", "bound"))
    for numbers, color, dashes, name in curves:
        each = numbers.reshape(*numbers.shape[:2], -1).mean(axis=2)
        axes.plot(step, each.T, color=color, lw=0.5, ls=dashes, alpha=0.25)
        axes.plot(step, each.mean(axis=0), color=color, lw=1.8, ls=dashes, label=name)
    if n_calibrated <= len(step):
        line = {"color": REFERENCE, "ls": ":", "label": "calibration horizon"}
        axes.axvline(n_calibrated, lw=1.2, **line)
    axes.set(xlabel="step", ylabel="mean over the state", xlim=(1, step[-1]))
    axes.set_ylim(0, None)
    axes.legend(facecolor="white", framealpha=1, edgecolor="none")


def space_time(axes, field, most, name):
    """A field on a line over time, with the first step at the bottom; values above ``most`` have one colour."""
    extent = (0, field.shape[1], 0.5, len(field) + 0.5)
    colours = {"cmap": "cividis", "vmin": 0, "vmax": most}
    shown = axes.imshow(field, origin="lower", aspect="auto", extent=extent, **colours)
    axes.figure.colorbar(shown, ax=axes, shrink=0.8)
    axes.set(xlabel="x", ylabel="step", title=name)


# Pictures of results files: each returns the figure and the rows that it shows.


def results():
    """Losses relative to GeoQ and coverage of named methods, on the problems that were run once."""
    rows = load("fourth_fresh")["rows"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.4, 1))
    colors, names = ("#3a7ca5", "#e0a030", "#c1440e"), list(PUBLIC.values())
    kinds = ("inside the data", "just outside", "far outside")
    places = (-0.2, 0, 0.2)
    for shift, kind, color, marker, move in zip(SHIFTS, kinds, colors, "oDs", places, strict=True):
        of = [versus(rows, method, shift) for method in PUBLIC]
        place = np.arange(len(of)) + move
        style = {"color": color, "fmt": marker, "ms": 6, "lw": 1.4, "label": kind}
        mean = np.array([ratio.mean for ratio, _ in of])
        reach = np.array([[r.mean - r.low, r.high - r.mean] for r, _ in of]).T
        left.errorbar(mean, place, xerr=reach, **style)
        right.plot([covered for _, covered in of], place, marker, color=color, ms=6)
    left.axvline(1, color="black", lw=0.8)
    left.set(xscale="log", xlabel="pinball loss / loss of geoq (smaller is better)")
    left.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    left.minorticks_off()
    left.set_yticks(range(len(names)), [name.replace("*", "") for name in names])
    left.set_title("loss, with 95 % intervals", fontsize=10)
    right.axvline(0.95, color="black", lw=0.8)
    right.set(xlabel="coverage (line: the level, 0.95)", xlim=(0, 1.02))
    right.set_title("coverage", fontsize=10)
    left.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), **BELOW, ncols=3)
    figure.suptitle("Eight problems that were run once", fontsize=11)
    return figure, rows


def cost():
    """Seconds of a calibration without training and of 1,000 assessments over the number of points."""
    rows = select(load("cost")["rows"], kind="growth")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, n = figure.subplots(), np.array([row["n"] for row in rows])
    curves = [("fit_seconds", "calibration without training", "o-", TRUE)]
    curves += [("assess_1000_seconds", "1,000 queries", "s--", ESTIMATE)]
    for name, label, style, color in curves:
        seconds, large = np.array([row[name] for row in rows]), n >= 10_000
        slope = np.polyfit(np.log(n[large]), np.log(seconds[large]), 1)[0]
        axes.loglog(n, seconds, style, color=color, label=f"{label}, slope {slope:.2f}")
    axes.set(xlabel="calibration points", ylabel="seconds")
    axes.secondary_yaxis("right").set_yticks([0.1, 1, 60], ["0.1 s", "1 s", "1 min"])
    figure.legend(**BELOW, ncols=2)
    return figure, rows


def fields():
    """Fraction of safe queries over the coverage of a set: a threshold on the distance, and the default."""
    rows = load("fields")["rows"]
    n = max(row["n"] for row in rows)
    figure = Figure(figsize=(9, 4), layout="constrained")
    # By the kind of a set: its name on the page, a colour and a marker.
    styles = {"hazard": ("dangerous", "#c1440e", "X"), "harmless": ("harmless", "#3a7ca5", "o")}
    styles |= {"inside": ("inside the data", "black", "s"), "other": ("other", "#b0b0b0", "o")}
    titles = {"DistanceRegion": "threshold on the distance", "FieldRegion": "default"}
    plots = figure.subplots(1, len(titles), sharey=True)
    for axes, (region, title) in zip(plots, titles.items(), strict=True):
        own = [r | {"kind": kind_of(r)} for r in select(rows, n=n, method=region)]
        for kind, (label, color, marker) in styles.items():
            sets = select(own, kind=kind)
            points = values(sets, "coverage"), values(sets, "safe_fraction")
            axes.scatter(*points, c=color, marker=marker, s=28, label=label, alpha=0.8)
        axes.axvline(HAZARD, **DOTTED)
        axes.set(title=title, xlabel="coverage of the bound in a set of queries")
    for row in (r for r in own if r["kind"] == "hazard" and r["safe_fraction"] > 0.1):
        place = row["coverage"] + 0.03, row["safe_fraction"]
        axes.annotate(f"KS {row['shift']}", place, va="center", fontsize=8)
    plots[0].set_ylabel("fraction called safe")
    figure.legend(*plots[0].get_legend_handles_labels(), **BELOW, ncols=4)
    return figure, rows


# The pictures of the pages, by the name of their file.
PICTURES = {"results": results, "cost": cost, "fields-shifted": fields}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("file", help="where to draw, such as docs/results.png")
    asked = parser.parse_args(words)
    figure, rows = PICTURES[asked.picture]()
    save(figure, asked.file, rows)


if __name__ == "__main__":
    main()
