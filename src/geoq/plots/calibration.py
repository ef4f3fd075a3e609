"""A picture of a calibration: held-out errors and bounds over distance, coverage, and the folds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geoq.arrays import flat
from geoq.bounds.protocol import bounds_of
from geoq.checks import check_index
from geoq.core.assessment import N_OUTPUTS_SHOWN
from geoq.core.fitted import Fitted
from geoq.plots import style

# Of more calibration tuples than this a random subset is drawn.
MOST_TUPLES = 5_000
N_BINS = 10
# One colour and one marker for each family of folds.
FAMILIES = ((style.REFERENCE, "o"), (style.ESTIMATE, "x"), ("#59803b", "^"), ("#8a5a9e", "s"))


def calibration(figure: Figure, estimator: Any, *, output: int = 0) -> list[Axes]:
    """Draw the held-out errors of a fitted estimator, and the bounds that were fitted to them.

    The four panels show errors and the median bound over the support distance, the coverage in ten bins of the support distance,
    the coverage of each family of folds, and the mean error of each fold. The bound was fitted to these errors, so this coverage
    is not a test; use ``metrics.coverage`` with new pairs for a test. Conformal factors are not included.

    Args:
        figure: an empty figure; 10 x 7 inches are suitable.
        estimator: a fitted ``GeoQ`` or ``GeoQRegressor``. A file that was saved with ``calibration=False`` does not contain what
            is drawn here.
        output: the number of the output, if there are several; a field is described by its mean.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, plots
        >>> x = np.random.default_rng(0).uniform(size=(80, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None).fit(x, x[:, 0] ** 2)
        >>> axes = plots.calibration(Figure(figsize=(10, 7)), estimator)
        >>> [label.get_text() for label in axes[2].get_xticklabels()]
        ['RandomFolds', 'ClusterFolds', 'NestedFolds']
    """
    style.prepare(figure)
    fitted = style.fitted_of(estimator)
    tuples = _Tuples.of(fitted, output)
    panels = style.panels_of(figure, 4, 2)
    _over_distance(panels[0], panels[1], tuples)
    _coverage_of_families(panels[2], tuples)
    _errors_of_folds(panels[3], tuples)
    for axes in panels[1:3]:
        axes.axhline(fitted.quantile, color=style.TRUE, lw=1.2, ls="--", label="quantile level")
        axes.set(ylabel="coverage", ylim=(min(axes.get_ylim()[0], fitted.quantile) - 0.1, 1.01))
        axes.legend(loc="lower right", fontsize=8, **style.OPAQUE)
    title = (
        f"{len(tuples.error)} held-out errors{tuples.of_output} from {len(np.unique(tuples.fold))} folds, and the bounds of "
        f"quantile level {fitted.quantile:g} that were fitted to them"
    )
    figure.suptitle(style.wrapped(figure, title), fontsize=11)
    return panels


@dataclass(frozen=True)
class _Tuples:
    """The calibration tuples as numbers; fields as their means over the cells that count."""

    distance: Float[np.ndarray, " n"]
    error: Float[np.ndarray, " n"]
    bound: Float[np.ndarray, " n"]
    covered: Float[np.ndarray, " n"]
    fold: Int[np.ndarray, " n"]
    family: Int[np.ndarray, " n"]
    names: tuple[str, ...]
    of_output: str

    @staticmethod
    def of(fitted: Fitted, output: int) -> "_Tuples":
        if fitted.tuples is None:
            raise ValueError(
                "plots.calibration draws calibration tuples, but the file was saved with calibration=False; save it with them."
            )
        found, known = fitted.tuples.subsample(MOST_TUPLES), fitted.output_names
        bounds = bounds_of(fitted.bound, found.features)
        error, bound, name = flat(found.error), flat(bounds), "a field"
        if found.error.ndim < 3 and error.shape[1] <= N_OUTPUTS_SHOWN:
            which = check_index(output, "output", error.shape[1])
            name = known[which] if known else f"output {which}" if error.shape[1] > 1 else ""
            error, bound = error[:, [which]], bound[:, [which]]
        # A tuple without any error that counts is not drawn.
        absent = np.isnan(error)
        some = ~absent.all(axis=1)
        fields = (np.where(absent, np.nan, part) for part in (error, bound, error <= bound))
        means = [np.nanmean(part[some], axis=1) for part in fields]
        distance, fold, family = found.relation.support_distance, found.fold, found.family
        of_output = f" of {name}" if name else ""
        drawn: Any = (distance[some], *means, fold[some], family[some], fitted.families, of_output)
        return _Tuples(*drawn)


def _over_distance(axes: Axes, lower: Axes, tuples: _Tuples) -> None:
    """Draw each error, and the median bound and the coverage of bins with equal numbers of errors."""
    least = style.floor_of(np.quantile(tuples.error, [0.01]), tuples.bound.clip(0))
    distance, error = tuples.distance, tuples.error.clip(least)
    points: dict[str, Any] = {"s": 9, "lw": 0.7, "alpha": 0.4}
    for number, name in enumerate(tuples.names):
        own = tuples.family == number
        color, marker = FAMILIES[number % len(FAMILIES)]
        axes.scatter(distance[own], error[own], c=color, marker=marker, label=name, **points)
    missed = tuples.covered < 1
    circles: dict[str, Any] = {"s": 40, "facecolors": "none", "edgecolors": style.TRUE, "lw": 1.2}
    axes.scatter(distance[missed], error[missed], label="above its bound", **circles)
    bins = np.array_split(np.argsort(distance, kind="stable"), N_BINS)
    middle = [np.median(distance[rows]) for rows in bins]
    bound = [np.median(tuples.bound[rows]).clip(least) for rows in bins]
    axes.plot(middle, bound, color=style.TRUE, lw=1.8, ls="--", label="median bound")
    covered = [tuples.covered[rows].mean() for rows in bins]
    lower.plot(middle, covered, "o-", color=style.REFERENCE, lw=1.4, ms=5)
    for panel in (axes, lower):
        panel.set(xlabel="support distance", xscale="log" if distance.min() > 0 else "linear")
        if distance.min() > 0:
            style.label_logarithms(panel.xaxis)
    axes.set(ylabel="held-out error", yscale="log")
    style.label_logarithms(axes.yaxis)
    axes.legend(fontsize=8, loc="lower right", **style.OPAQUE)


def _coverage_of_families(axes: Axes, tuples: _Tuples) -> None:
    """Draw the coverage of each family of folds, with the number of its errors."""
    text: dict[str, Any] = {"ha": "center", "va": "top", "bbox": {"color": "white", "pad": 1}}
    text |= {"xytext": (0, -9), "textcoords": "offset points", "fontsize": 9}
    for place in range(len(tuples.names)):
        own = tuples.covered[tuples.family == place]
        color, marker = FAMILIES[place % len(FAMILIES)]
        axes.plot([place], [own.mean()], marker, color=color, ms=9, mew=2)
        axes.annotate(f"{own.mean():.1%} of {len(own)}", (place, own.mean()), **text)
    axes.set_xticks(range(len(tuples.names)), tuples.names)
    axes.set(xlabel="family of folds", xlim=(-0.6, len(tuples.names) - 0.4))


def _errors_of_folds(axes: Axes, tuples: _Tuples) -> None:
    """Draw the mean error of each fold; a fold far above the others was not trained well."""
    for number, name in enumerate(tuples.names):
        folds = np.unique(tuples.fold[tuples.family == number])
        mean = [tuples.error[tuples.fold == fold].mean() for fold in folds]
        color, marker = FAMILIES[number % len(FAMILIES)]
        axes.plot(folds + 1, mean, marker, color=color, ms=6, label=name)
    axes.set(xlabel="fold", ylabel="mean held-out error", yscale="log")
    style.label_logarithms(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, **style.OPAQUE)
