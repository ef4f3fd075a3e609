"""The picture of the weather benchmark: maps of one forecast and of its bounds."""

import numpy as np
from matplotlib.figure import Figure

from benchmarks.weather.data import HOURS, label
from benchmarks.weather.methods import DEFAULT, PAPER

# Percentiles of the values between which the colours of a map vary.
PERCENTILES = (0.5, 99.5)


def draw(case, weather, answers, folder):
    """Draw the maps of one task from the answers of some methods."""
    folder.mkdir(parents=True, exist_ok=True)
    days = case.origin * HOURS / 24
    title = f"{label(weather.names)}, {case.form}, origin after {days:g} days"
    name = f"{case.form}-{case.origin}-{case.seed}"
    error = abs(case.truth - answers[DEFAULT].prediction)
    figure = maps(case, weather, answers, error, title)
    figure.savefig(folder / f"weather-maps-{name}.png", dpi=110)


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
