"""Colours, layouts, legends and axes that all pictures share."""

from textwrap import fill
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

TRUE, ESTIMATE, REFERENCE = "#1b1b1b", "#c1440e", "#4c78a8"
SHADE = "#cfdbe8"
OPAQUE: dict[str, Any] = {"facecolor": "white", "framealpha": 1, "edgecolor": "none"}


def scatter_by_flag(
    axes: Axes,
    x: Float[np.ndarray, " *shape"],
    y: Float[np.ndarray, " *shape"],
    safe: Bool[np.ndarray, " *shape"],
) -> None:
    """Draw the points of safe queries and the other points in different colours and markers."""
    style: dict[str, Any] = {"s": 9, "lw": 0.7, "alpha": 0.5}
    for mask, color, marker, name in (
        (safe, REFERENCE, "o", "safe"),
        (~safe, ESTIMATE, "x", "not safe"),
    ):
        if mask.any():
            axes.scatter(x[mask], y[mask], c=color, marker=marker, label=name, **style)


def set_layout(
    figure: Figure, engine: Literal["constrained", "compressed"] = "constrained"
) -> None:
    """Reserve space for titles and colour bars, unless the caller has chosen a layout engine."""
    if figure.get_layout_engine() is None:
        figure.set_layout_engine(engine)


def wrapped(figure: Figure, text: str) -> str:
    """Break a title into lines that fit the figure: at size 10 an inch holds about 13 letters."""
    return fill(text, max(20, int(13 * figure.get_figwidth())))


def legend_below(figure: Figure, panels: list[Axes]) -> None:
    """Draw one legend for all panels, with each label once."""
    handle_of: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "outside lower center", "frameon": False}
    n_columns = max(1, min(len(handle_of), int(figure.get_figwidth() / 1.6)))
    handles = list(handle_of.values())
    figure.legend(handles, list(handle_of), ncols=n_columns, fontsize=9, **place)


def floor_of(*arrays: np.ndarray) -> float:
    """The least positive value; a logarithmic axis shows zeros there."""
    values = np.concatenate([array.reshape(-1) for array in arrays])
    least = float(values[values > 0].min(initial=np.inf))
    return max(least, 1e-12) if np.isfinite(least) else 1e-12


def label_logarithms(axis: Axis) -> None:
    """Label the ticks of a logarithmic axis with a few plain numbers: 2 and not 2 x 10^0."""
    low, high = axis.get_view_interval()
    narrow = high < 30 * low
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=9 if narrow else 6)
    )
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
