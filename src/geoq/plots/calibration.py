"""A picture of a calibration: held-out errors and bounds over distance, coverage, and the folds."""

from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from geoq.answer_table import N_OUTPUTS_SHOWN
from geoq.checks import check_fitted
from geoq.crossfit import CalibrationSet
from geoq.estimator import GeoQ
from geoq.folds import CombinedFolds
from geoq.increments import TwoLawIncrement
from geoq.masks import outside
from geoq.plots.checks import check_figure, numbers_of, row_index
from geoq.plots.style import (
    ESTIMATE,
    OPAQUE,
    REFERENCE,
    TRUE,
    floor_of,
    label_logarithms,
    set_layout,
    wrapped,
)

# Of more calibration tuples than this a random subset is drawn.
MOST_TUPLES = 5_000
N_BINS = 10
# One colour and one marker for each family of folds.
FAMILIES = ((REFERENCE, "o"), (ESTIMATE, "x"), ("#59803b", "^"), ("#8a5a9e", "s"))


def calibration(figure: Figure, geoq: GeoQ, *, output: SupportsIndex = 0) -> list[Axes]:
    """Draw the held-out errors of a fitted estimator, and the bounds that were fitted to them.

    The four panels show errors and the median bound over the support distance, the coverage in ten bins of the support distance,
    the coverage of each family of folds, and the mean error of each fold. The increment model was fitted to these errors, so this
    coverage is not a test; use ``metrics.coverage`` with new pairs for a test. Conformal factors are not included.

    Args:
        figure: an empty figure; 10 x 7 inches are suitable.
        geoq: a fitted estimator. A file that was saved with ``calibration=False`` does not contain what is drawn here.
        output: the number of the output, if there are several; a field is described by its mean.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, plots
        >>> x = np.random.default_rng(0).uniform(size=(80, 2))
        >>> geoq = GeoQ(lambda x: x[:, 0], None).fit(x, x[:, 0] ** 2)
        >>> axes = plots.calibration(Figure(figsize=(10, 7)), geoq)
        >>> [label.get_text() for label in axes[2].get_xticklabels()]
        ['RandomFolds', 'ClusterFolds', 'NestedFolds']
    """
    check_figure(figure)
    check_fitted(geoq, "probes_")
    tuples = _Tuples.of(geoq, output)
    set_layout(figure)
    panels: list[Axes] = figure.subplots(2, 2).flat
    first, second, third, fourth = panels
    _errors_over_distance(first, tuples)
    _coverage_over_distance(second, tuples)
    _coverage_of_families(third, tuples)
    _errors_of_folds(fourth, tuples)
    n, n_folds = len(tuples.error), len(np.unique(tuples.fold))
    title = (
        f"{n} held-out errors{tuples.of_output} from {n_folds} folds, and the bounds of quantile level {tuples.level:g} that were "
        "fitted to them"
    )
    figure.suptitle(wrapped(figure, title), fontsize=11)
    return [first, second, third, fourth]


def _increments(geoq: GeoQ, tuples: CalibrationSet) -> Tensor:
    """The increments at calibration tuples."""
    model = geoq.increment_model_
    if not isinstance(model, TwoLawIncrement):
        return model(tuples.features)
    if tuples.data is None:
        raise ValueError(
            "plots.calibration needs the folds of the calibration, which a file does not contain; draw it before save."
        )
    return model.at_tuples(tuples)


@dataclass(frozen=True)
class _Tuples:
    """The calibration tuples as numbers."""

    distance: Float[np.ndarray, " n"]
    error: Float[np.ndarray, " n"]
    bound: Float[np.ndarray, " n"]
    covered: Float[np.ndarray, " n"]
    fold: Int[np.ndarray, " n"]
    family: Int[np.ndarray, " n"]
    names: tuple[str, ...]
    level: float
    of_output: str
    is_number: bool

    @staticmethod
    def of(geoq: GeoQ, output: SupportsIndex) -> "_Tuples":
        found = geoq.calibration_.subsample(MOST_TUPLES)
        features = found.features
        bounds = features.anchor_error + _increments(geoq, found)
        error, bound = (
            numbers_of(outside(geoq.mask_, part)).reshape(len(found), -1)
            for part in (found.error, bounds)
        )
        n_values = error.shape[1]
        is_list = found.error.ndim == 2 and n_values <= N_OUTPUTS_SHOWN
        which = row_index(output, n_values if is_list else 1, "output", "the outputs")
        if is_list:
            error, bound = error[:, [which]], bound[:, [which]]
        known = geoq.output_names_
        name = known[which] if known else f"output {which}" if is_list else "a field"
        return _Tuples(
            numbers_of(features.support_distance),
            error.mean(axis=1),
            bound.mean(axis=1),
            (error <= bound).mean(axis=1),
            found.fold.cpu().numpy(),
            found.family.cpu().numpy(),
            _family_names(geoq.folds, int(found.family.max()) + 1),
            geoq.increment_model_.quantile,
            f" of {name}" if n_values > 1 or known else "",
            is_list or n_values == 1,
        )

    def of_family(self, number: int) -> Bool[np.ndarray, " n"]:
        return np.asarray(self.family == number)

    @property
    def bins(self) -> list[np.ndarray]:
        """The rows of the bins of support distance, with equal numbers of rows."""
        return np.array_split(np.argsort(self.distance, kind="stable"), N_BINS)


def _family_names(folds: Any, n: int) -> tuple[str, ...]:
    schemes = folds.schemes if isinstance(folds, CombinedFolds) else (folds,)
    names = [type(scheme).__name__ for scheme in schemes]
    if len(names) != n:
        return tuple(f"family {i}" for i in range(n))
    return tuple(
        name if names.count(name) == 1 else f"{name} {i}"
        for i, name in enumerate(names)
    )


def _style(number: int) -> tuple[str, str]:
    return FAMILIES[number % len(FAMILIES)]


def _errors_over_distance(axes: Axes, tuples: _Tuples) -> None:
    """Draw each error, and the median bound of each bin."""
    least = floor_of(np.quantile(tuples.error, [0.01]), tuples.bound.clip(0))
    distance, error = tuples.distance, tuples.error.clip(least)
    points: dict[str, Any] = {"s": 9, "lw": 0.7, "alpha": 0.4}
    for number, name in enumerate(tuples.names):
        own = tuples.of_family(number)
        color, marker = _style(number)
        axes.scatter(
            distance[own], error[own], c=color, marker=marker, label=name, **points
        )
    missed = tuples.covered < 1
    if missed.any():
        label = "above its bound" if tuples.is_number else "partly above its bound"
        circles: dict[str, Any] = {"s": 40, "facecolors": "none", "edgecolors": TRUE}
        axes.scatter(distance[missed], error[missed], lw=1.2, label=label, **circles)
    middle = [np.median(distance[rows]) for rows in tuples.bins]
    bound = [np.median(tuples.bound[rows]).clip(least) for rows in tuples.bins]
    axes.plot(middle, bound, color=TRUE, lw=1.8, ls="--", label="median bound")
    axes.set(xlabel="support distance", ylabel="held-out error", yscale="log")
    if tuples.distance.min() > 0:
        axes.set_xscale("log")
        label_logarithms(axes.xaxis)
    label_logarithms(axes.yaxis)
    axes.legend(fontsize=8, loc="lower right", **OPAQUE)


def _coverage_over_distance(axes: Axes, tuples: _Tuples) -> None:
    """Draw the coverage of each bin."""
    rows_of = tuples.bins
    middle = [np.median(tuples.distance[rows]) for rows in rows_of]
    covered = [tuples.covered[rows].mean() for rows in rows_of]
    axes.plot(middle, covered, "o-", color=REFERENCE, lw=1.4, ms=5)
    if tuples.distance.min() > 0:
        axes.set_xscale("log")
        label_logarithms(axes.xaxis)
    axes.set(xlabel="support distance", ylabel="coverage")
    _mark_level(axes, tuples.level, min(covered))


def _coverage_of_families(axes: Axes, tuples: _Tuples) -> None:
    """Draw the coverage of each family of folds, with the number of its errors."""
    covered = [
        tuples.covered[tuples.of_family(number)].mean()
        for number in range(len(tuples.names))
    ]
    places = range(len(covered))
    text: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 9}
    text |= {"bbox": {"color": "white", "pad": 1}}
    text |= {"xytext": (0, -9), "textcoords": "offset points"}
    for place, value in zip(places, covered, strict=True):
        color, marker = _style(place)
        axes.plot([place], [value], marker, color=color, ms=9, mew=2)
        note = f"{value:.1%} of {tuples.of_family(place).sum()}"
        axes.annotate(note, (place, value), **text)
    axes.set_xticks(places, tuples.names)
    axes.set(xlabel="family of folds", ylabel="coverage")
    axes.set_xlim(-0.6, len(places) - 0.4)
    _mark_level(axes, tuples.level, min(covered))


def _mark_level(axes: Axes, level: float, lowest: float) -> None:
    axes.axhline(level, color=TRUE, lw=1.2, ls="--", label="quantile level")
    axes.set_ylim(min(lowest, level) - 0.1, 1.01)
    axes.legend(loc="lower right", fontsize=8, **OPAQUE)


def _errors_of_folds(axes: Axes, tuples: _Tuples) -> None:
    """Draw the mean error of each fold; a fold far above the others was not trained well."""
    for number, name in enumerate(tuples.names):
        folds = np.unique(tuples.fold[tuples.of_family(number)])
        mean = [tuples.error[tuples.fold == fold].mean() for fold in folds]
        color, marker = _style(number)
        axes.plot(folds + 1, mean, marker, color=color, ms=6, label=name)
    axes.set(xlabel="fold", ylabel="mean held-out error", yscale="log")
    label_logarithms(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, **OPAQUE)
