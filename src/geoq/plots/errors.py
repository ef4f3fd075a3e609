"""Pictures of arrays of errors and bounds."""

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes

from geoq.plots.checks import check_axes
from geoq.plots.style import (
    ESTIMATE,
    OPAQUE,
    REFERENCE,
    SHADE,
    TRUE,
    floor_of,
    label_logarithms,
    scatter_by_flag,
)


def error_over_input(
    axes: Axes,
    x: Float[np.ndarray, " n"],
    error: Float[np.ndarray, " n"],
    error_hat: Float[np.ndarray, " n"],
    safe: Bool[np.ndarray, " n"],
    training_interval: tuple[float, float],
) -> Axes:
    """Draw true and estimated errors over a scalar input, with the safe region shaded.

    Args:
        axes: the axes to draw into.
        x: the inputs, in any order.
        error: the true errors.
        error_hat: the bounds.
        safe: the safe flags.
        training_interval: the ends of the interval of the training inputs, drawn as dotted lines.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import plots
        >>> x = np.linspace(0, 1, 50)
        >>> axes = Figure().subplots()
        >>> axes = plots.error_over_input(axes, x, x**2, x, x < 0.5, (0.0, 0.5))
    """
    check_axes(axes)
    order = np.argsort(x)
    x, error, error_hat, safe = x[order], error[order], error_hat[order], safe[order]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], safe.astype(int), [0]])))
    for number, (start, stop) in enumerate(edges.reshape(-1, 2)):
        label = "safe region" if number == 0 else None
        axes.axvspan(x[start], x[stop - 1], color=SHADE, lw=0, label=label)
    axes.plot(x, error, color=TRUE, lw=1.6, label="true error")
    axes.plot(x, error_hat, color=ESTIMATE, lw=1.6, ls="--", label="estimate")
    for number, end in enumerate(training_interval):
        label = "training interval" if number == 0 else None
        axes.axvline(end, color=REFERENCE, lw=1.2, ls=":", label=label)
    axes.set(xlabel="x", ylabel="error", xlim=(x[0], x[-1]), ylim=(0, None))
    axes.legend(**OPAQUE)
    return axes


def estimate_against_error(
    axes: Axes,
    error: Float[np.ndarray, " *shape"],
    error_hat: Float[np.ndarray, " *shape"],
    safe: Bool[np.ndarray, " *shape"],
) -> Axes:
    """Draw each bound against its true error; points above the diagonal are covered.

    Args:
        axes: the axes to draw into.
        error: the true errors.
        error_hat: the bounds.
        safe: the safe flag of each bound.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import plots
        >>> x = np.linspace(0, 1, 50)
        >>> axes = plots.estimate_against_error(Figure().subplots(), x**2, x, x < 0.5)
    """
    check_axes(axes)
    floor = floor_of(error, error_hat)
    top = max(float(error.max()), float(error_hat.max()), 10 * floor)
    scatter_by_flag(axes, error.clip(floor), error_hat.clip(floor), safe)
    axes.plot([floor, top], [floor, top], color=TRUE, lw=1.2, label="error = bound")
    axes.set(xlabel="true error", ylabel="error bound", xscale="log", yscale="log")
    axes.set(xlim=(floor / 1.5, 1.5 * top), ylim=(floor / 1.5, 1.5 * top))
    label_logarithms(axes.xaxis)
    label_logarithms(axes.yaxis)
    axes.legend(frameon=False)
    return axes
