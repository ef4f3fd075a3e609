"""Pictures of the weather benchmark, from the arrays and rows that a run has stored.

python -m benchmarks.weather.pictures benchmarks/results/weather_era5.json PARTS docs --task anomalies-300-0
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.weather.data import HOURS, label
from benchmarks.weather.methods import PAPER
from benchmarks.weather.tables import REFERENCE, WHOLE_FIELD

# Lines differ in colour and in dash.
STYLES = (
    ("#c1440e", "-"),
    ("#4c78a8", "-."),
    ("#8a8a8a", ":"),
    ("#e0a030", (0, (5, 1))),
    ("#2e7d4f", (0, (3, 1, 1, 1))),
)
# Percentiles of the values between which the colours of a map vary.
PERCENTILES = (0.5, 99.5)
# Methods with a larger ratio to the loss of the reference are left out.
MOST_SHOWN = 1.4


def draw(results, parts, folder, task="*"):
    """Draw the pictures of all tasks with stored arrays, or of one task."""
    folder.mkdir(parents=True, exist_ok=True)
    record = json.loads(results.read_text())
    name = label(record["variables"])
    for file in sorted(parts.glob(f"{task}.npz")):
        form, origin, _ = file.stem.split("-")
        title = f"{name}, {form}, origin after {int(origin) * HOURS / 24:g} days"
        arrays = np.load(file)
        for picture, draws in (("maps", maps), ("growth", growth), ("safe", safe)):
            figure = draws(arrays, title)
            figure.savefig(folder / f"weather-{picture}-{file.stem}.png", dpi=110)
    for form in dict.fromkeys(row["form"] for row in record["rows"]):
        figure = quarters(record["rows"], form, name)
        figure.savefig(folder / f"weather-quarters-{form}.png", dpi=110)


def maps(arrays, title):
    """The paper's figure: the last lead of the first forecast, a row per variable; the bounds of the default and of the paper's form."""
    variables, days = arrays["names"], len(arrays["mean_error"]) * HOURS / 24
    figure = Figure(figsize=(18, 0.9 + 2.3 * len(variables)), layout="constrained")
    rows = figure.subplots(len(variables), 5, squeeze=False, sharex=True, sharey=True)
    bounds = dict(zip(arrays["methods"], arrays["bound"], strict=True))
    for channel, (variable, axes) in enumerate(zip(variables, rows, strict=True)):
        states = [arrays[n][channel] for n in ("truth", "prediction")]
        errors = [arrays["error"][channel]]
        errors += [bounds[method][channel] for method in (REFERENCE, PAPER)]
        low, high = np.percentile(states[0], PERCENTILES)
        alike(figure, arrays, axes[:2], states, cmap="viridis", vmin=low, vmax=high)
        high = max(np.percentile(field, PERCENTILES[1]) for field in errors)
        alike(figure, arrays, axes[2:], errors, cmap="magma", vmin=0, vmax=high)
        axes[0].set_ylabel(f"{variable}\nlatitude, degrees")
    titles = (
        "truth",
        "prediction",
        "true error",
        f"bound: {REFERENCE}",
        f"bound: {PAPER}",
    )
    for axes, heading in zip(rows[0], titles, strict=True):
        axes.set_title(heading, fontsize=10)
    for axes in rows[-1]:
        axes.set(xlabel="longitude, degrees", xticks=range(0, 360, 90))
        axes.set_yticks(range(-60, 90, 30))
    figure.suptitle(
        f"{title}: first forecast, day {days:g}, in units of the range before the origin",
        fontsize=11,
    )
    return figure


def alike(figure, arrays, axes, fields, **colours):
    """Maps with one colour scale."""
    for one, field in zip(axes, fields, strict=True):
        image = one.pcolormesh(arrays["lon"], arrays["lat"], field, **colours)
    figure.colorbar(
        image,
        ax=axes,
        shrink=0.9,
        extend="max" if colours["vmin"] == 0 else "both",
        pad=0.01,
        aspect=25,
    )


def growth(arrays, title):
    """Error and mean bounds of several methods over lead time."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    days = HOURS / 24 * np.arange(1, len(arrays["mean_error"]) + 1)
    dark = {"color": "#1b1b1b"}
    axes.plot(days, arrays["mean_error"], lw=1, label="error, mean", **dark)
    pooled = "error, 95 % quantile of all cells together"
    axes.plot(days, arrays["high_error"], lw=2.4, label=pooled, **dark)
    for method, bound, (colour, dash) in zip(
        arrays["methods"], arrays["mean_bound"], STYLES, strict=True
    ):
        text = f"mean bound: {method}"
        axes.plot(days, bound, color=colour, ls=dash, lw=1.6, label=text)
    axes.set(xlabel="lead time, days", ylim=(0, None))
    axes.set_ylabel("error, in units of the range before the origin")
    axes.set_title(f"{title}: all variables and test windows", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def safe(arrays, title):
    """Support score over threshold, and the fraction of the field that is covered, over the test windows."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for number, (method, (colour, dash)) in enumerate(
        zip(arrays["methods"], STYLES, strict=True)
    ):
        if f"score_{number}" not in arrays:
            continue
        score, covered = arrays[f"score_{number}"], arrays[f"covered_{number}"]
        days = HOURS / 24 * np.arange(len(score))
        text = f"{method}: {(score <= 1).mean():.0%} safe"
        upper.plot(days, score, color=colour, ls=dash, lw=1.6, label=text)
        lower.plot(days, covered, color=colour, ls=dash, lw=1.6)
    upper.axhline(1, color="#1b1b1b", lw=0.8)
    lower.axhline(0.95, color="#1b1b1b", lw=0.8)
    upper.set_ylabel("support score / threshold\n(safe up to 1)")
    lower.set(xlabel="start of the forecast, days after the origin")
    lower.set_ylabel("fraction of the\nfield covered")
    upper.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def quarters(rows, form, name):
    """Pinball loss relative to the default, by quarter of the lead times; with the block folds."""
    mine = [
        row
        for row in rows
        if row["form"] == form
        and row["folds"] != "clusters"
        and WHOLE_FIELD not in row["method"]
    ]
    columns = [f"pinball_q{q}" for q in range(1, 5)]
    means = {
        method: [
            statistics.fmean(r[c] for r in mine if r["method"] == method)
            for c in columns
        ]
        for method in dict.fromkeys(row["method"] for row in mine)
    }
    ratios = {m: np.divide(v, means[REFERENCE]) for m, v in means.items()}
    order = [m for m in ratios if ratios[m].max() <= MOST_SHOWN]
    order.sort(key=lambda m: -ratios[m].mean())
    figure = Figure(figsize=(9, 1.3 + 0.27 * len(order)), layout="constrained")
    axes = figure.subplots()
    for quarter, (marker, colour) in enumerate(
        zip("o^sD", ("#fde725", "#35b779", "#31688e", "#440154"), strict=True)
    ):
        axes.scatter(
            [ratios[m][quarter] for m in order],
            range(len(order)),
            marker=marker,
            color=colour,
            edgecolor="#1b1b1b",
            linewidth=0.4,
            s=34,
            zorder=3,
            label=f"quarter {quarter + 1}",
        )
    axes.axvline(1, color="#1b1b1b", lw=0.8)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.grid(axis="y", lw=0.3)
    axes.set_xlabel(
        f"pinball loss relative to {REFERENCE}; methods up to {MOST_SHOWN:g}"
    )
    axes.set_title(f"{name}, {form}: by quarter of the lead times", fontsize=10)
    axes.legend(fontsize=8, loc="upper right")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the results file")
    parser.add_argument("parts", type=Path, help="the folder of the tasks' files")
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument("--task", default="*", help="draw this task only")
    arguments = parser.parse_args()
    draw(arguments.results, arguments.parts, arguments.folder, arguments.task)


if __name__ == "__main__":
    main()
