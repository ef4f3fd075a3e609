"""Pictures of the weather benchmark: maps, growth and flags of one task, and the losses of all methods by lead time.

python -m benchmarks.weather.pictures weather_era5 docs/weather-quarters-anomalies.png
"""

import sys

import numpy as np
from matplotlib.figure import Figure

from benchmarks.markdown import average, group
from benchmarks.record import QUANTILE, load
from benchmarks.weather.data import HOURS, label
from benchmarks.weather.methods import DEFAULT, PAPER
from benchmarks.weather.table import WHOLE_FIELD

# Lines differ in colour and in dash.
COLOURS = "#c1440e", "#4c78a8", "#8a8a8a", "#e0a030", "#2e7d4f"
STYLES = tuple(zip(COLOURS, ("-", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1))), strict=True))
DARK = {"color": "#1b1b1b"}
# Percentiles of the values between which the colours of a map vary.
PERCENTILES = (0.5, 99.5)
# Methods with a larger ratio to the loss of the reference are left out.
MOST_SHOWN = 1.4


def draw(case, weather, answers, folder):
    """Draw the pictures of one task from the answers of some methods."""
    folder.mkdir(parents=True, exist_ok=True)
    days = case.origin * HOURS / 24
    title = f"{label(weather.names)}, {case.form}, origin after {days:g} days"
    name = f"{case.form}-{case.origin}-{case.seed}"
    error = abs(case.truth - answers[DEFAULT].prediction)
    figures = {"maps": maps(case, weather, answers, error, title)}
    figures |= {"growth": growth(answers, error, title), "safe": safe(case, answers, title)}
    for picture, figure in figures.items():
        figure.savefig(folder / f"weather-{picture}-{name}.png", dpi=110)


def maps(case, weather, answers, error, title):
    """The paper's figure: the last lead of the first forecast, a row per variable; the bounds of the default and of the paper's form."""
    days = error.shape[1] * HOURS / 24
    figure = Figure(figsize=(18, 0.9 + 2.3 * len(weather.names)), layout="constrained")
    rows = figure.subplots(len(weather.names), 5, squeeze=False, sharex=True, sharey=True)
    prediction = answers[DEFAULT].prediction
    for channel, (variable, axes) in enumerate(zip(weather.names, rows, strict=True)):
        at = 0, -1, channel
        states = [case.truth[at], prediction[at]]
        errors = [error[at], *(answers[method].error_hat[at] for method in (DEFAULT, PAPER))]
        low, high = np.percentile(states[0], PERCENTILES)
        alike(figure, weather, axes[:2], states, cmap="viridis", vmin=low, vmax=high)
        high = max(np.percentile(field, PERCENTILES[1]) for field in errors)
        alike(figure, weather, axes[2:], errors, cmap="magma", vmin=0, vmax=high)
        axes[0].set_ylabel(f"{variable}\nlatitude, degrees")
    titles = ("truth", "prediction", "true error", f"bound: {DEFAULT}", f"bound: {PAPER}")
    for axes, heading in zip(rows[0], titles, strict=True):
        axes.set_title(heading, fontsize=10)
    for axes in rows[-1]:
        axes.set(xlabel="longitude, degrees", xticks=range(0, 360, 90))
        axes.set_yticks(range(-60, 90, 30))
    text = f"{title}: first forecast, day {days:g}, in units of the range before the origin"
    figure.suptitle(text, fontsize=11)
    return figure


def alike(figure, weather, axes, fields, **colours):
    """Maps with one colour scale."""
    for one, field in zip(axes, fields, strict=True):
        image = one.pcolormesh(weather.lon, weather.lat, field, **colours)
    extend = "max" if colours["vmin"] == 0 else "both"
    figure.colorbar(image, ax=axes, shrink=0.9, extend=extend, pad=0.01, aspect=25)


def growth(answers, error, title):
    """Error and mean bounds of several methods over lead time."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, pooled = figure.subplots(), np.moveaxis(error, 1, 0).reshape(error.shape[1], -1)
    days = HOURS / 24 * np.arange(1, len(pooled) + 1)
    axes.plot(days, pooled.mean(axis=1), lw=1, label="error, mean", **DARK)
    high, text = np.quantile(pooled, QUANTILE, axis=1), "error, 95 % quantile of all cells together"
    axes.plot(days, high, lw=2.4, label=text, **DARK)
    for (method, answer), (colour, dash) in zip(answers.items(), STYLES, strict=True):
        bound = answer.error_hat.mean(axis=(0, 2, 3, 4))
        axes.plot(days, bound, color=colour, ls=dash, lw=1.6, label=f"mean bound: {method}")
    axes.set(xlabel="lead time, days", ylim=(0, None))
    axes.set_ylabel("error, in units of the range before the origin")
    axes.set_title(f"{title}: all variables and test windows", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def safe(case, answers, title):
    """Support score, and the fraction of the field that is covered, over the test windows."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for (method, answer), (colour, dash) in zip(answers.items(), STYLES, strict=True):
        if answer.score is None:
            continue
        within = abs(case.truth - answer.prediction) <= answer.error_hat
        days = HOURS / 24 * np.arange(len(within))
        style = {"color": colour, "ls": dash, "lw": 1.6}
        text = f"{method}: {(answer.score <= 1).mean():.0%} safe"
        upper.plot(days, answer.score, label=text, **style)
        lower.plot(days, within.reshape(len(within), -1).mean(axis=1), **style)
    upper.axhline(1, lw=0.8, **DARK)
    lower.axhline(QUANTILE, lw=0.8, **DARK)
    upper.set_ylabel("support score (safe up to 1)")
    lower.set(xlabel="start of the forecast, days after the origin")
    lower.set_ylabel("fraction of the\nfield covered")
    upper.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def quarters(rows):
    """Pinball loss relative to the default, by quarter of the lead times; with the block folds."""
    pointwise = [r for r in rows if r.get("folds") != "clusters" and "method" in r]
    methods = group([r for r in pointwise if WHOLE_FIELD not in r["method"]], "method")

    def means(own):
        return np.array([average(own, f"pinball_q{q}") for q in range(1, 5)])

    ratios = {method: means(own) / means(methods[DEFAULT]) for method, own in methods.items()}
    order = [method for method in ratios if ratios[method].max() <= MOST_SHOWN]
    order.sort(key=lambda method: -ratios[method].mean())
    figure = Figure(figsize=(9, 1.3 + 0.27 * len(order)), layout="constrained")
    axes, edge = figure.subplots(), {"edgecolor": "#1b1b1b", "linewidth": 0.4}
    colours = ("#fde725", "#35b779", "#31688e", "#440154")
    for quarter, (marker, colour) in enumerate(zip("o^sD", colours, strict=True)):
        found = [ratios[method][quarter] for method in order]
        style = {"marker": marker, "color": colour, "label": f"quarter {quarter + 1}"}
        axes.scatter(found, range(len(order)), s=34, zorder=3, **edge, **style)
    axes.axvline(1, lw=0.8, **DARK)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.grid(axis="y", lw=0.3)
    axes.set_xlabel(f"pinball loss relative to {DEFAULT}; methods up to {MOST_SHOWN:g}")
    axes.set_title("by quarter of the lead times", fontsize=10)
    axes.legend(fontsize=8, loc="upper right")
    return figure


if __name__ == "__main__":
    quarters(load(sys.argv[1])["rows"]).savefig(sys.argv[2], dpi=110)
