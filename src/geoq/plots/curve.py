"""A picture of one input: the surrogate with its bound, and the bound beside the true error."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoq.core.assessment import Assessment, numbers_of
from geoq.plots import style

# Not safe: hatched, so that it can be read in grey.
HATCHED: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.8", "hatch": "///", "lw": 0}


def curve(
    figure: Figure, assessment: Assessment, x: Any, *, truth: Any = None, data: Any = None
) -> list[Axes]:
    """Draw answers with one output over one input: blue where they are safe, hatched elsewhere. Returns the axes.

    Args:
        figure: an empty figure; 9 x 5.5 inches are suitable.
        assessment: the answer of ``assess``.
        x: the values of the input, in increasing order.
        truth: the reference outputs, for the true errors in the lower panel.
        data: a pair, the inputs and the outputs of the data.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> upper, lower = plots.curve(Figure(), estimator.assess(x), x[:, 0])
        >>> lower.get_ylabel()
        'error'
    """
    style.prepare(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at, safe = np.asarray(x, dtype=float), numbers_of(assessment.safe) > 0
    prediction, bound = (
        numbers_of(part).reshape(len(at)) for part in (assessment.prediction, assessment.error_hat)
    )
    for axes in (upper, lower):
        style.shade(axes, at, safe, "safe")
        style.shade(axes, at, ~safe, "not safe", **HATCHED)
    band = prediction - bound, prediction + bound
    upper.fill_between(at, *band, color="0.4", alpha=0.35, lw=0, label="surrogate ± bound")
    shown, errors = prediction, bound
    if truth is not None:
        shown, errors = np.asarray(truth), abs(np.asarray(truth) - prediction)
        upper.plot(at, shown, color=style.TRUE, lw=1.6, label="simulator")
        lower.plot(at, errors, color=style.TRUE, lw=1.2, label="true error")
    upper.plot(at, prediction, color=style.ESTIMATE, lw=1.6, ls="--", label="surrogate")
    lower.plot(at, bound, color=style.ESTIMATE, lw=1.6, ls="--", label="error bound")
    if data is not None:
        upper.plot(*data, ".", color=style.TRUE, ms=5, label="data")
    margin = 0.2 * np.ptp(shown)
    upper.set(ylabel="output", xlim=(at[0], at[-1]))
    upper.set_ylim(shown.min() - margin, shown.max() + margin)
    least = max(style.floor_of(np.quantile(errors, [0.01])), 1e-6 * bound.max())
    lower.set(xlabel="input", ylabel="error", yscale="log", ylim=(least, 3 * bound.max()))
    style.label_logarithms(lower.yaxis)
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return [upper, lower]
