"""Pictures of results files, and the diagnostics that the pictures of the paper's problems share.

    python -m benchmarks.pictures results docs/results.png

Lines differ in shade and in dash, so that the pictures can be read in grey. ``save`` writes a picture of results with a digest of the
rows that it shows, and a test compares the digest with the results file.
"""

import argparse
import hashlib
import statistics

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.fields.table import HAZARD, kind_of
from benchmarks.markdown import group, select, values
from benchmarks.record import as_text, load
from benchmarks.suite.table import KINDS, relative_losses
from benchmarks.third_party.table import best_simple
from geoq.plots.style import ESTIMATE, REFERENCE, SHADE, TRUE

# The name of the digest in the metadata of a PNG file.
DIGEST = "Rows"
DOTTED = {"color": "black", "lw": 0.8, "ls": ":"}


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


def calibration_curve(axes, nominal, observed, observed_safe):
    """Observed against nominal coverage over quantile levels, everywhere and inside the safe region."""
    axes.plot([0, 1], [0, 1], color=TRUE, lw=1, ls=":", label="ideal")
    every = {"color": ESTIMATE, "ls": "--", "marker": "o", "label": "all queries"}
    axes.plot(nominal, observed, lw=1.6, ms=4, **every)
    inside = {"color": REFERENCE, "marker": "s", "label": "safe queries"}
    axes.plot(nominal, observed_safe, lw=1.6, ms=4, **inside)
    axes.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower right")


def support_scores(axes, score):
    """Histogram of the queries' support scores; scores up to 1 are safe."""
    # A logarithmic axis cannot show zero.
    positive = score.clip(max(1e-12, float(score[score > 0].min(initial=1.0))))
    ends = min(positive.min(), 1.0) / 1.1, max(positive.max(), 1.0) * 1.1
    bins = np.geomspace(*ends, 40).tolist()
    axes.hist(positive, bins=bins, color=SHADE, edgecolor=REFERENCE, lw=0.7)
    label = f"threshold: {float((score <= 1).mean()):.0%} safe"
    axes.axvline(1.0, color=ESTIMATE, lw=1.6, ls="--", label=label)
    axes.set(xlabel="support score", ylabel="queries", xscale="log")
    axes.legend(frameon=False)


def coverage_by_score(axes, bins, quantile):
    """Coverage in bins of the support score; the first bin has the smallest scores."""
    place = range(1, len(bins) + 1)
    bars = {"color": SHADE, "edgecolor": REFERENCE, "label": "observed"}
    axes.bar(place, [b.coverage for b in bins], lw=0.9, **bars)
    axes.axhline(quantile, color=ESTIMATE, lw=1.6, ls="--", label=f"quantile level {quantile:g}")
    axes.set(xlabel="bin of the support score (1: best supported)", ylabel="coverage")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(place)
    axes.legend(facecolor="white", framealpha=1, loc="lower left")


def error_over_time(axes, error, bound, n_calibrated):
    """True errors and bounds averaged over the state, for each rollout and for the mean of the rollouts."""
    step = np.arange(1, error.shape[1] + 1)
    curves = ((error, TRUE, "-", "true error"), (bound, ESTIMATE, "--", "estimate"))
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
    axes.set(xlabel="coordinate", ylabel="step", title=name)


def trusted_horizons(axes, trusted, held):
    """The trusted horizon of each rollout, and the number of steps for which its error stayed within the tolerance."""
    place = np.arange(len(trusted))
    axes.bar(place, trusted, color=SHADE, edgecolor=REFERENCE, lw=0.9, label="trusted for")
    dashes = {"color": TRUE, "label": "error within the tolerance for"}
    axes.hlines(held, place - 0.4, place + 0.4, lw=2.2, **dashes)
    axes.set(xlabel="rollout", ylabel="steps", xlim=(-0.6, len(place) - 0.4))
    # Room above for the legend, which would hide rollouts.
    axes.set_ylim(0, 1.3 * max(1, trusted.max(), held.max()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.legend(frameon=False, loc="upper left")


# Pictures of results files: each returns the figure and the rows that it shows.


def results():
    """Losses of all methods on the public problems: a panel per kind of query, the best method at the top."""
    rows = load("defaults")["rows"]
    found = relative_losses(rows)
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    kinds = [kind for kind in KINDS if kind != "all"]
    largest = max(of[kind].high for of in found.values() for kind in kinds)
    for axes, kind in zip(figure.subplots(1, 3), kinds, strict=True):
        order = sorted(found, key=lambda method, kind=kind: -found[method][kind].mean)
        of = [found[method][kind] for method in order]
        reach = [[r.mean - r.low for r in of], [r.high - r.mean for r in of]]
        colors = ["#c1440e" if method == "GeoQ" else "#9db4cf" for method in order]
        labels = [method.replace("distance, prediction", "d, F") for method in order]
        axes.barh(labels, [r.mean for r in of], color=colors, xerr=reach, ecolor="#555555")
        for place, r in enumerate(of):
            axes.text(max(r.high, 1) * 1.1, place, f"{r.mean:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlim=(0.15, 2.6 * largest))
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(KINDS[kind], fontsize=10)
    text = "pinball loss over the best competing method of each problem, chosen in hindsight; 95 % intervals"
    figure.supxlabel(text, fontsize=9)
    return figure, rows


def cost():
    """Seconds of a calibration without training and of 1,000 assessments over the number of points."""
    rows = select(load("cost")["rows"], kind="growth")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes, n = figure.subplots(), np.array([row["n"] for row in rows])
    names = {"fit_seconds": "calibration without training", "assess_1000_seconds": "1,000 queries"}
    for name, label in names.items():
        seconds = np.array([row[name] for row in rows])
        large = n >= 10_000
        slope = np.polyfit(np.log(n[large]), np.log(seconds[large]), 1)[0]
        axes.loglog(n, seconds, marker="o", label=f"{label}, slope {slope:.2f}")
    axes.set(xlabel="calibration points", ylabel="seconds")
    axes.legend()
    return figure, rows


def fields():
    """Fraction of safe queries over the coverage of a set, for both regions."""
    rows = load("fields")["rows"]
    n = max(row["n"] for row in rows)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    styles = {"inside": ("black", "s"), "harmless": ("#3a7ca5", "o"), "hazard": ("#c1440e", "X")}
    by_region = group(select(rows, n=n), "method")
    plots = figure.subplots(1, len(by_region), sharey=True)
    for axes, (region, own) in zip(plots, by_region.items(), strict=True):
        for kind, sets in group([r | {"kind": kind_of(r)} for r in own], "kind").items():
            color, marker = styles.get(kind, ("#b0b0b0", "o"))
            points = values(sets, "coverage"), values(sets, "safe_fraction")
            axes.scatter(*points, c=color, marker=marker, s=28, label=kind, alpha=0.8)
        axes.axvline(HAZARD, **DOTTED)
        axes.set(title=region, xlabel="coverage of the bound in a set of queries")
    plots[0].set_ylabel("fraction called safe")
    plots[-1].legend(loc="center", fontsize=8)
    return figure, rows


def third_party():
    """Pinball losses relative to the best simple bound, coverage, horizons, and safe fractions of shifted queries."""
    rows = load("third_party")["rows"]
    bounds = [r for r in rows if r["kind"] in ("field", "rollout", "vector")]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    (losses, covered), (trust, flags) = figure.subplots(2, 2)
    ours = group(select(bounds, method="GeoQ"), "setting")
    for place, own in enumerate(ours.values()):
        best = [best_simple(select(bounds, seed=r["seed"]))[r["setting"]] for r in own]
        ratios = [r["pinball"] / b for r, b in zip(own, best, strict=True)]
        for axes, found in ((losses, ratios), (covered, values(own, "coverage"))):
            axes.plot(found, [place] * len(found), "o", color="#3a7ca5", alpha=0.7)
    losses.set_title("pinball loss of GeoQ / best simple bound", fontsize=10)
    covered.set_title("coverage of GeoQ", fontsize=10)
    for axes, labels, at in ((losses, list(ours), 1), (covered, [""] * len(ours), 0.95)):
        axes.set_yticks(range(len(ours)), labels)
        axes.invert_yaxis()
        axes.axvline(at, color="black", lw=0.8)
    losses.set_xlim(0, None)
    covered.axvspan(0.93, 0.97, color="#3a7ca5", alpha=0.15, lw=0)
    colors = ("#c1440e", "#b0b0b0", "#3a7ca5")
    horizons = group(select(rows, kind="horizon"), "method").items()
    for (method, own), color in zip(horizons, colors, strict=True):
        part = [r["trusted"] / max(r["kept"], 1e-9) for r in own]
        trust.scatter(part, values(own, "broken"), c=color, s=22, alpha=0.8, label=method)
    trust.axhline(0.05, **DOTTED)
    trust.set(xlabel="trusted steps / steps within the tolerance", ylabel="fraction broken")
    shifted = [
        r | {"of": "rollouts" if "trusted" in r else "fields"} for r in select(rows, kind="shift")
    ]
    for (label, own), color in zip(group(shifted, "of").items(), colors[::-2], strict=True):
        points = values(own, "coverage"), values(own, "safe_fraction")
        flags.scatter(*points, c=color, s=26, alpha=0.8, label=label)
    flags.axvline(0.9, **DOTTED)
    flags.set_xlabel("coverage of the bound in a set of shifted queries")
    flags.set_ylabel("fraction called safe")
    for axes in (trust, flags):
        axes.legend(fontsize=8)
    return figure, rows


def training():
    """The held-out losses while the paper's sum is trained, relative to the loss of the initial weights."""
    rows = select(load("kuramoto_sivashinsky")["rows"], method="GeoQ (paper)")
    settings = group(rows, "setting")
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, (setting, own) in zip(panels, settings.items(), strict=True):
        for row, color in zip(own, (TRUE, ESTIMATE, REFERENCE), strict=False):
            for course in row["trainings"]:
                steps, losses = zip(*course["checks"], strict=True)
                first = course["first_loss"]
                axes.plot(steps, [loss / first for loss in losses], color=color, lw=0.8)
                best = course["best_step"], course["best_loss"] / first
                axes.plot(*best, "o", color=color, ms=4)
            chosen = statistics.fmean(course["best_step"] for course in row["trainings"])
            label = f"seed {row['seed']}: {chosen:.0f} steps chosen"
            axes.axvline(chosen, color=color, lw=1.2, ls="--", label=label)
        axes.axhline(1, color="0.6", lw=0.8)
        axes.set(xlabel="training steps", title=setting, ylim=(0.1, 1.8))
        axes.legend(loc="lower right", facecolor="white", framealpha=1, edgecolor="none")
    panels[0].set_ylabel("held-out loss / loss of the initial weights")
    return figure, rows


# The pictures of the pages, by the name of their file.
PICTURES = {
    "results": results,
    "cost": cost,
    "fields-shifted": fields,
    "third_party": third_party,
    "kuramoto-sivashinsky-training": training,
}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("file", help="where to draw, such as docs/results.png")
    asked = parser.parse_args(words)
    figure, rows = PICTURES[asked.picture]()
    save(figure, asked.file, rows)


if __name__ == "__main__":
    main()
