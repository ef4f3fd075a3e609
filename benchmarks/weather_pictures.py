"""Pictures of the weather benchmark, from the arrays and rows that a run has kept."""

import json
import statistics

import numpy as np
from matplotlib.figure import Figure
from weather_data import HOURS, label
from weather_tables import STATIC, WHOLE_FIELD

# Light and dark, each with its own dash, so that the lines differ in grey as well.
STYLES = (
    ("#c1440e", "--"),
    ("#4c78a8", "-."),
    ("#8a8a8a", ":"),
    ("#e0a030", (0, (5, 1))),
    ("#2e7d4f", (0, (3, 1, 1, 1))),
    ("#7b4fa3", (0, (1, 1))),
)


def draw(results, parts, folder):
    """All pictures of the tasks that kept their arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    record = json.loads(results.read_text())
    name = label(record["variables"])
    for file in sorted(parts.glob("*.npz")):
        arrays = np.load(file)
        for picture, draws in (("maps", maps), ("growth", growth), ("safe", safe)):
            figure = draws(arrays, name)
            figure.savefig(folder / f"weather-{picture}-{file.stem}.png", dpi=110)
    for form in dict.fromkeys(row["form"] for row in record["rows"]):
        figure = quarters(record["rows"], form, name)
        figure.savefig(folder / f"weather-quarters-{form}.png", dpi=110)


def maps(arrays, name):
    """The paper's figure: the last lead of one forecast, a row per variable."""
    variables, days = arrays["names"], len(arrays["mean_error"]) * HOURS / 24
    figure = Figure(figsize=(15, 0.7 + 2.3 * len(variables)), layout="constrained")
    rows = figure.subplots(len(variables), 4, squeeze=False, sharex=True, sharey=True)
    method = arrays["methods"][-1]
    bound = arrays["bound"][-1]
    for channel, (variable, axes) in enumerate(zip(variables, rows, strict=True)):
        fields = [arrays[n][channel] for n in ("truth", "prediction", "error")]
        fields.append(bound[channel])
        for pair, colours in (((0, 1), "viridis"), ((2, 3), "magma")):
            shown = [fields[i] for i in pair]
            limits = min(f.min() for f in shown), max(f.max() for f in shown)
            limits = (0, limits[1]) if pair[0] else limits
            for i in pair:
                image = axes[i].pcolormesh(
                    arrays["lon"],
                    arrays["lat"],
                    fields[i],
                    cmap=colours,
                    vmin=limits[0],
                    vmax=limits[1],
                )
            figure.colorbar(image, ax=axes[pair[1]], shrink=0.9)
        axes[0].set_ylabel(f"{variable}\nlatitude")
    for axes, title in zip(
        rows[0], ("truth", "prediction", "true error", "estimated error"), strict=True
    ):
        axes.set_title(title, fontsize=10)
    for axes in rows[-1]:
        axes.set_xlabel("longitude")
    figure.suptitle(f"{name}, day {days:g}, scaled to [0, 1]; estimate by {method}")
    return figure


def growth(arrays, name):
    """Error growth by lead time, with the estimates of several methods."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    days = HOURS / 24 * np.arange(1, len(arrays["mean_error"]) + 1)
    axes.plot(days, arrays["mean_error"], color="#1b1b1b", lw=1, label="mean error")
    axes.plot(
        days, arrays["high_error"], color="#1b1b1b", lw=2.4, label="95 % of the errors"
    )
    for method, bound, (colour, dash) in zip(
        arrays["methods"], arrays["mean_bound"], STYLES, strict=False
    ):
        axes.plot(days, bound, color=colour, ls=dash, lw=1.6, label=f"bound: {method}")
    axes.set(xlabel="lead time, days", ylabel="error", ylim=(0, None))
    axes.set_title(f"{name}: means over cells, variables and test windows", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def safe(arrays, name):
    """Over the test windows: the support score, safe below 1, and the share of the field that the bound covers."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for number, (method, (colour, dash)) in enumerate(
        zip(arrays["methods"], STYLES, strict=False)
    ):
        if f"score_{number}" not in arrays:
            continue
        score, covered = arrays[f"score_{number}"], arrays[f"covered_{number}"]
        days = HOURS / 24 * np.arange(len(score))
        share = (score <= 1).mean()
        text = f"{method}: {share:.0%} safe"
        upper.plot(days, score, color=colour, ls=dash, lw=1.6, label=text)
        lower.plot(days, covered, color=colour, ls=dash, lw=1.6)
    upper.axhline(1, color="#1b1b1b", lw=0.8)
    lower.axhline(0.95, color="#1b1b1b", lw=0.8)
    upper.set_ylabel("support score\n/ threshold")
    lower.set(xlabel="start of the forecast, days after the origin")
    lower.set_ylabel("share of the\nfield covered")
    upper.set_title(f"{name}: test windows; safe below the line", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def quarters(rows, form, name):
    """Pinball by quarter of the lead times, over that of the best static bound; blocks where there are folds."""
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
    best = min((m for m in STATIC if m in means), key=lambda m: sum(means[m]))
    ratios = {m: np.divide(v, means[best]) for m, v in means.items()}
    order = sorted(ratios, key=lambda m: -ratios[m].mean())
    figure = Figure(figsize=(9, 1 + 0.27 * len(order)), layout="constrained")
    axes = figure.subplots()
    for quarter, (marker, shade) in enumerate(
        zip("o^sD", ("#c6c6c6", "#909090", "#555555", "#111111"), strict=True)
    ):
        values = [min(ratios[m][quarter], 2.0) for m in order]
        axes.scatter(
            values,
            range(len(order)),
            marker=marker,
            color=shade,
            s=26,
            zorder=3,
            label=f"quarter {quarter + 1}",
        )
    axes.axvline(1, color="#1b1b1b", lw=0.8)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.grid(axis="y", lw=0.3)
    axes.set_xlabel(f"pinball over that of: {best} (2 means 2 or more)")
    axes.set_title(f"{name}, {form}: by quarter of the lead times", fontsize=10)
    axes.legend(fontsize=8)
    return figure
