"""Colours, layouts, legends and checks that all pictures share."""

from textwrap import fill
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from geoq.core.assessment import numbers_of

Numbers: TypeAlias = Float[np.ndarray, " *shape"]
TRUE, ESTIMATE, REFERENCE = "#1b1b1b", "#c1440e", "#4c78a8"
SHADE = "#cfdbe8"
OPAQUE: dict[str, Any] = {"facecolor": "white", "framealpha": 1, "edgecolor": "none"}


def scatter_by_flag(axes: Axes, x: Numbers, y: Numbers, safe: Bool[np.ndarray, " *shape"]) -> None:
    """Draw the points of safe queries and the other points in different colours and markers."""
    style: dict[str, Any] = {"s": 9, "lw": 0.7, "alpha": 0.5}
    flags = ((safe, REFERENCE, "o", "safe"), (~safe, ESTIMATE, "x", "not safe"))
    for mask, color, marker, name in flags:
        if mask.any():
            axes.scatter(x[mask], y[mask], c=color, marker=marker, label=name, **style)


def shade(
    axes: Axes, at: np.ndarray, where: Bool[np.ndarray, " n"], label: str, **look: Any
) -> None:
    """Shade the stretches between successive places where the condition holds."""
    look = look or {"color": SHADE, "lw": 0}
    edges = np.flatnonzero(np.diff(np.concatenate([[0], where.astype(int), [0]])))
    for start, stop in edges.reshape(-1, 2):
        name = label if start == edges[0] else None
        axes.axvspan(at[start], at[stop - 1], label=name, **look)


def prepare(figure: object, engine: Literal["constrained", "compressed"] = "constrained") -> None:
    """Reserve space for titles and colour bars, unless the caller has chosen a layout engine."""
    if not isinstance(figure, FigureBase):
        raise TypeError(
            f"figure is a {type(figure).__name__}, but an empty figure is needed; pass figure=matplotlib.figure.Figure() or "
            "matplotlib.pyplot.figure() first."
        )
    if isinstance(figure, Figure) and figure.get_layout_engine() is None:
        figure.set_layout_engine(engine)


def panels_of(figure: Figure, n: int, n_columns: int, **sharing: Any) -> list[Axes]:
    """Axes in rows of ``n_columns``; places that stay empty are removed."""
    grid = figure.subplots(-(-n // n_columns), n_columns, squeeze=False, **sharing)
    for empty in grid.flat[n:]:
        empty.remove()
    return list(grid.flat[:n])


def wrapped(figure: Figure, text: str) -> str:
    """Break a title into lines that fit the figure: at size 10 an inch holds about 13 letters."""
    return fill(text, max(20, int(13 * figure.get_figwidth())))


def legend_below(figure: Figure, panels: list[Axes]) -> None:
    """Draw one legend for all panels, with each label once."""
    handle_of: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    n_columns = max(1, min(len(handle_of), int(figure.get_figwidth() / 1.6)))
    figure.legend([*handle_of.values()], [*handle_of], ncols=n_columns, **place)


def floor_of(*arrays: np.ndarray) -> float:
    """The least positive value; a logarithmic axis shows zeros there."""
    values = np.concatenate([array.reshape(-1) for array in arrays])
    least = float(values[values > 0].min(initial=np.inf))
    return max(least, 1e-12) if np.isfinite(least) else 1e-12


def label_logarithms(*axes: Axis) -> None:
    """Label the ticks of logarithmic axes with a few plain numbers: 2 and not 2 x 10^0."""
    for axis in axes:
        low, high = axis.get_view_interval()
        subs, numticks = ((1, 2, 5), 9) if high < 30 * low else ((1,), 6)
        axis.set_major_locator(LogLocator(subs=subs, numticks=numticks))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def check_shape(values: Any, name: str, like: Any, what: str) -> None:
    """Raise for values of another shape than the values of the answer that they belong to."""
    own, shape = tuple(values.shape), tuple(like.shape)
    if own != shape:
        raise ValueError(
            f"{name} has shape {own}, but the {what} have shape {shape}; pass one value for each of them, of all queries."
        )


def true_errors(values: Any, name: str, error_hat: Any) -> np.ndarray:
    """The errors of all queries as numbers; raises if they cannot be the errors of these bounds."""
    check_shape(values, name, error_hat, "bounds")
    numbers = numbers_of(values)
    if (numbers < 0).any():
        raise ValueError(
            f"{name} contains {np.nanmin(numbers):.3g}, but an error is never negative; pass errors and not outputs: "
            "abs(y - assessment.prediction)."
        )
    return numbers
