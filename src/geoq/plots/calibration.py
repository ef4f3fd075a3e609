"""Pictures of a fitted estimator: its held-out errors, and its answers while one input moves and the others stay at a query."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geoq.arrays import flat, is_tensor, native, permutation, restore, take, to_numbers
from geoq.bounds.protocol import bounds_of
from geoq.checks import check_index, core_of
from geoq.core.assessment import N_OUTPUTS_SHOWN, Assessment, numbers_of
from geoq.core.fitted import Fitted
from geoq.core.tuples import Tuples
from geoq.data.column import UNSEEN, Column
from geoq.data.coordinates import Part
from geoq.data.table import Table, schema_of
from geoq.neighbors import Neighbors
from geoq.plots import style

# Of more calibration tuples than this a random subset is drawn.
MOST_TUPLES = 5_000
N_BINS = 10
# One colour and one marker for each family of folds.
FAMILIES = ((style.REFERENCE, "o"), (style.ESTIMATE, "x"), ("#59803b", "^"), ("#8a5a9e", "s"))
# The places along an input, and how far it moves beyond its range in the data, as a fraction of the range.
N_STEPS, BEYOND = 81, 0.2
MOST_PANELS = 12


def calibration(figure: Figure, estimator: Any, *, output: int = 0) -> list[Axes]:
    """Draw the held-out errors of a fitted estimator, and the bounds that were fitted to them.

    The four panels show errors and the median bound over the support distance, the coverage in ten bins of the support distance,
    the coverage of each family of folds, and the mean error of each fold. The bound was fitted to these errors, so this coverage
    is not a test; use ``metrics.coverage`` with new pairs for a test. Conformal factors are not included.

    Args:
        figure: an empty figure; 10 x 7 inches are suitable.
        estimator: a fitted ``GeoQ``, ``GeoQRegressor`` or ``Labelled``. A file that was saved with ``calibration=False`` does not contain what
            is drawn here.
        output: the number of the output, if there are several; a field is described by its mean.

    Returns:
        The axes, one for each panel.

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
    fitted, tuples = _with_tuples(estimator, "calibration")
    drawn, of_output = _held_out(fitted, tuples.subsample(MOST_TUPLES), output)
    looks = [FAMILIES[number % len(FAMILIES)] for number in range(len(fitted.families))]
    own = [drawn["family"] == number for number in range(len(fitted.families))]
    families = [*zip(fitted.families, own, looks, strict=True)]
    panels = style.panels_of(figure, 4, 2)
    _over_distance(panels[0], panels[1], drawn, families)
    _coverage_of_families(panels[2], drawn["covered"], families)
    _errors_of_folds(panels[3], drawn, families)
    for axes in panels[1:3]:
        axes.axhline(fitted.quantile, color=style.TRUE, lw=1.2, ls="--", label="quantile level")
        axes.set(ylabel="coverage", ylim=(min(axes.get_ylim()[0], fitted.quantile) - 0.1, 1.01))
        axes.legend(loc="lower right", fontsize=8, **style.OPAQUE)
    title = (
        f"{len(drawn['error'])} held-out errors{of_output} from {len(np.unique(drawn['fold']))} folds, and the bounds of "
        f"quantile level {fitted.quantile:g} that were fitted to them"
    )
    figure.suptitle(style.wrapped(figure, title), fontsize=11)
    return panels


def _with_tuples(estimator: Any, name: str) -> tuple[Fitted, Tuples]:
    """What a fitted ``GeoQ`` has found, and its calibration tuples; raises without them."""
    fitted = core_of(estimator).fitted_
    tuples = getattr(fitted, "tuples", None)
    if tuples is None:
        raise ValueError(
            f"plots.{name} draws the calibration tuples of a GeoQ, which this estimator or its file does not have; save it with them."
        )
    return fitted, tuples


def _held_out(fitted: Fitted, found: Tuples, output: int) -> tuple[dict[str, np.ndarray], str]:
    """The calibration tuples as numbers by name, fields as their means over the cells that count; and which output they are of."""
    known, bounds = fitted.output_names, bounds_of(fitted.bound, found.features)
    error, bound, name = flat(found.error), flat(bounds), "a field"
    if found.error.ndim < 3 and error.shape[1] <= N_OUTPUTS_SHOWN:
        which = check_index(output, "output", error.shape[1])
        name = known[which] if known else f"output {which}" if error.shape[1] > 1 else ""
        error, bound = error[:, [which]], bound[:, [which]]
    # A tuple without any error that counts is not drawn.
    absent = np.isnan(error)
    some = ~absent.all(axis=1)
    fields = {"error": error, "bound": bound, "covered": error <= bound}
    drawn = {n: np.nanmean(np.where(absent, np.nan, v)[some], axis=1) for n, v in fields.items()}
    drawn["distance"] = found.relation.support_distance[some]
    drawn |= {"fold": found.fold[some], "family": found.family[some]}
    return drawn, f" of {name}" if name else ""


def _over_distance(
    axes: Axes, lower: Axes, drawn: dict[str, np.ndarray], families: Sequence[Any]
) -> None:
    """Draw each error, and the median bound and the coverage of bins with equal numbers of errors."""
    least = style.floor_of(np.quantile(drawn["error"], [0.01]), drawn["bound"].clip(0))
    distance, error = drawn["distance"], drawn["error"].clip(least)
    above = 1 - drawn["covered"]
    in_parts = bool(((above > 0) & (above < 1)).any())
    points: dict[str, Any] = {"s": 9, "lw": 0.7, "alpha": 0.4}
    if in_parts:
        points = {"s": 16, "cmap": "plasma_r", "vmin": 0, "vmax": above.max()}
    for name, own, (color, marker) in families:
        points |= {"c": above[own] if in_parts else color, "marker": marker, "label": name}
        image = axes.scatter(distance[own], error[own], **points)
    if in_parts:
        axes.figure.colorbar(image, ax=axes, label="fraction above the bound")
    else:
        circles: dict[str, Any] = {"s": 40, "facecolors": "none", "edgecolors": style.TRUE}
        x, y = distance[above > 0], error[above > 0]
        axes.scatter(x, y, label="above its bound", lw=1.2, **circles)
    bins = np.array_split(np.argsort(distance, kind="stable"), N_BINS)
    middle = [np.median(distance[rows]) for rows in bins]
    bound = [np.median(drawn["bound"][rows]).clip(least) for rows in bins]
    axes.plot(middle, bound, color=style.TRUE, lw=1.8, ls="--", label="median bound")
    covered = [drawn["covered"][rows].mean() for rows in bins]
    lower.plot(middle, covered, "o-", color=style.REFERENCE, lw=1.4, ms=5)
    for panel in (axes, lower):
        panel.set(xlabel="support distance", xscale="log" if distance.min() > 0 else "linear")
        if distance.min() > 0:
            style.label_logarithms(panel.xaxis)
    axes.set(ylabel="held-out error", yscale="log")
    style.label_logarithms(axes.yaxis)
    axes.legend(fontsize=8, loc="lower right", **style.OPAQUE)


def _coverage_of_families(axes: Axes, covered: np.ndarray, families: Sequence[Any]) -> None:
    """Draw the coverage of each family of folds, with the number of its errors."""
    text: dict[str, Any] = {"ha": "center", "va": "top", "bbox": {"color": "white", "pad": 1}}
    text |= {"xytext": (0, -9), "textcoords": "offset points", "fontsize": 9}
    for place, (_, own, (color, marker)) in enumerate(families):
        mean = covered[own].mean()
        axes.plot([place], [mean], marker, color=color, ms=9, mew=2)
        axes.annotate(f"{mean:.1%} of {own.sum()}", (place, mean), **text)
    axes.set_xticks(range(len(families)), [name for name, *_ in families])
    axes.set(xlabel="family of folds", xlim=(-0.6, len(families) - 0.4))


def _errors_of_folds(axes: Axes, drawn: dict[str, np.ndarray], families: Sequence[Any]) -> None:
    """Draw the mean error of each fold; a fold far above the others was not trained well."""
    for name, own, (color, marker) in families:
        folds = np.unique(drawn["fold"][own])
        mean = [drawn["error"][drawn["fold"] == fold].mean() for fold in folds]
        axes.plot(folds + 1, mean, marker, color=color, ms=6, label=name)
    axes.set(xlabel="fold", ylabel="mean held-out error", yscale="log")
    style.label_logarithms(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, **style.OPAQUE)


def distances(figure: Figure, estimator: Any, xq: Any) -> Axes:
    """Draw the distances of planned queries to the data, and of the held-out points to the points that their fold left in.

    Bounds rest on held-out points at the same distances, so a good family of folds follows the curve of the planned queries. The legend
    has the Wasserstein distance W of each family to this curve. The lower branch is the safe ones. Returns the axes.

    Args:
        figure: an empty figure; 7 x 4.5 inches are suitable.
        estimator: a fitted ``GeoQ`` or ``GeoQRegressor``, with its calibration tuples.
        xq: the planned queries; of more than 5,000 a random subset is drawn.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> axes = plots.distances(Figure(figsize=(7, 4.5)), estimator, 1.3 * x)
        >>> [line.get_label().split(",")[0] for line in axes.lines]
        ['data among themselves', 'held out by RandomFolds', 'planned queries', 'planned and safe']
    """
    from scipy.stats import wasserstein_distance  # here: a slow import

    style.prepare(figure)
    fitted, tuples = _with_tuples(estimator, "distances")
    planned, safe = _planned(fitted, xq)
    z = flat(fitted.geometry.points.normalized)
    among = Neighbors(z).nearest(z[permutation(len(z))[:MOST_TUPLES]], 2)[0][:, 1]
    axes = figure.subplots()
    _steps(axes, among, len(among), "data among themselves", color="#8c8c8c", ls=":")
    found = tuples.relation.nearest
    for number, name in enumerate(fitted.families):
        own = found[tuples.family == number]
        label = f"held out by {name}, W = {wasserstein_distance(own, planned):.2g}"
        color, _ = FAMILIES[number % len(FAMILIES)]
        _steps(axes, own, len(own), label, color=color, ls="-.")
    _steps(axes, planned, len(planned), "planned queries", color=style.TRUE, lw=2.2)
    label = f"planned and safe, {safe.mean():.0%}"
    _steps(axes, planned[safe], len(planned), label, color=style.TRUE, ls="--")
    ends = np.quantile(np.concatenate([planned, found]), [0.01, 1])
    if ends[0] > 0 and ends[1] > 100 * ends[0]:
        axes.set_xscale("log")
        style.label_logarithms(axes.xaxis)
    axes.set(xlabel="distance to the nearest point", ylabel="fraction", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize=8, **style.OPAQUE)
    return axes


def _planned(fitted: Fitted, xq: Any) -> tuple[np.ndarray, np.ndarray]:
    """The distances of planned queries to the nearest point of the data, and which are safe."""
    rows = fitted.rows_of(xq)
    rows = take(rows, np.sort(permutation(len(rows))[:MOST_TUPLES]))
    views: Any = [(f.relation, fitted.flags(f)[1], lost) for _, f, lost, _ in fitted.views(rows)]
    views = [(relation.nearest, *others) for relation, *others in views]
    nearest, safe, lost = (np.concatenate(parts) for parts in zip(*views, strict=True))
    if lost.all():
        raise ValueError("all planned queries have missing or infinite inputs; pass others.")
    return nearest[~lost], safe[~lost]


def _steps(axes: Axes, values: np.ndarray, n: int, label: str, **look: Any) -> None:
    """Draw how many of n values are at most as large as each place."""
    ordered = np.sort(values)
    axes.step(ordered, np.arange(1, len(values) + 1) / n, where="post", label=label, **look)


def inputs(
    figure: Figure, estimator: Any, x0: Any, *, names: Sequence[str] | None = None, output: int = 0
) -> list[Axes]:
    """Draw the prediction and its bound along each input, while the other inputs stay at the query ``x0``.

    The shaded stretch is safe. Ticks at the lower edge are the data. Returns the axes. A category has an error bar for
    each of its levels. Inputs that are constant in the data have no panel. Of more than 12 inputs the most influential are drawn.

    Args:
        figure: an empty figure; 4 inches of width and 2.5 inches of height per panel are suitable.
        estimator: a fitted ``GeoQ`` or ``GeoQRegressor`` for tables or for arrays of shape (n, n_inputs).
        x0: one query: a row of a data frame, or an array.
        names: names of the inputs; the columns of the table or their numbers if None.
        output: the number of the output, if there are several.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> axes = plots.inputs(Figure(figsize=(8, 3)), estimator, x[0])
        >>> [panel.get_xlabel() for panel in axes]
        ['input 0', 'input 1']
    """
    style.prepare(figure)
    fitted = core_of(estimator).fitted_
    query = _one_row(fitted, x0)
    sweeps = _sweeps(fitted, query)
    if not sweeps:
        raise ValueError("all inputs are constant in the data of fit, so none can be drawn.")
    n_columns = min(len(sweeps), max(1, int(figure.get_figwidth() / 2.7)))
    panels = style.panels_of(figure, len(sweeps), n_columns, sharey=True)
    inside = []
    for axes, sweep in zip(panels, sweeps, strict=True):
        name, shown = _shown(fitted.assess(_queries(query, sweep)), output)
        (_levels if sweep.column.kind == "level" else _panel)(axes, sweep, shown)
        known = sweep.in_data if len(sweep.in_data) else sweep.steps
        inside.append(shown[(sweep.steps >= known.min()) & (sweep.steps <= known.max())])
        own = sweep.column.name if fitted.schema else f"input {sweep.number}"
        axes.set_xlabel(own if names is None else names[sweep.number])
    # Bounds far outside the ranges of the data would hide all others.
    lower, upper, *_ = np.concatenate(inside).T
    ends = np.array([np.nanmin(lower), np.nanmax(upper)])
    panels[0].set_ylim(*ends + np.array([-1, 1]) * (0.15 * np.ptp(ends) or 1.0))
    title = f"One input moves and the others stay at x0; quantile level {fitted.quantile:g}"
    figure.suptitle(style.wrapped(figure, title), fontsize=10)
    figure.supylabel(name, fontsize=10)
    style.legend_below(figure, panels)
    return panels


@dataclass(frozen=True)
class _Sweep:
    """The values of one input along a panel, as numbers."""

    number: int
    column: Column
    at_query: float
    steps: np.ndarray
    in_data: np.ndarray  # empty for categories and periodic numbers
    log: bool

    def places(self, numbers: Any) -> Any:
        """Places on the axis: dates for dates, numbers otherwise."""
        is_time = self.column.kind == "time"
        return np.asarray(numbers * 1e6).astype("datetime64[us]") if is_time else numbers


def _shown(answer: Assessment, output: int) -> tuple[str, Float[np.ndarray, " n 4"]]:
    """The name of what is drawn; its lower end, its upper end, the prediction in the middle and the safe flag of each query."""
    bound, prediction = (
        numbers_of(part).reshape(len(answer), -1) for part in (answer.error_hat, answer.prediction)
    )
    which = check_index(output, "output", bound.shape[1])
    own, safe = bound[:, which], numbers_of(answer.safe)
    if prediction.shape != bound.shape:
        # An error functional that joins outputs, such as a norm, gives no band around a prediction.
        return "error bound", np.stack([0 * own, own, np.nan * own, safe], axis=1)
    known, middle = answer.output_names, prediction[:, which]
    name = known[which] if known else f"output {which}" if bound.shape[1] > 1 else ""
    shown = np.stack([middle - own, middle + own, middle, safe], axis=1)
    return f"prediction of {name}" if name else "prediction", shown


def _one_row(fitted: Fitted, x0: Any) -> Any:
    """The query as a row; raises unless there is exactly one, of a table."""
    shape = fitted.coordinates.input_shape
    if len(shape) != 1:
        raise ValueError(
            f"GeoQ was fitted on rows of shape {shape}, but plots.inputs draws tables; draw a field with plots.fields."
        )
    if fitted.schema is None:
        x0 = x0 if is_tensor(x0) else np.asarray(x0, dtype=float)
        x0 = x0[None] if x0.ndim == 1 else x0
    rows = fitted.rows_of(x0)
    if len(rows) != 1:
        raise ValueError(f"x0 has {len(rows)} rows, but one query is needed; pass x0=x[:1].")
    levels = [column.kind == "level" for column in schema_of(rows).columns]
    if (to_numbers(rows, "x0")[0, levels] == UNSEEN).any():
        raise ValueError("x0 has a category that the data do not contain; choose one of the data.")
    return rows


def _sweeps(fitted: Fitted, query: Any) -> list[_Sweep]:
    """The sweeps of all inputs that vary, the most influential ones if there are many."""
    known, points, at = fitted.coordinates, fitted.geometry.points.inputs, to_numbers(query, "x0")
    raw, columns = known.inverse(points).reshape(len(points), -1), schema_of(query).columns
    importance = np.zeros(known.mean.size) if fitted.metric is None else fitted.metric.importance
    found: dict[int, tuple[float, _Sweep]] = {}
    for j in np.flatnonzero(known.varies & ~known.is_part(Part.MISSING, Part.COSINE)):
        number, log = int(known.input_of[j]), bool(known.log.reshape(-1)[j])
        column, data = columns[number], np.zeros(0)
        if column.kind == "level":
            steps = np.arange(float(len(column.levels)))
        elif known.is_part(Part.SINE)[j]:
            # The sine of a periodic number has its period as its level.
            steps = np.linspace(0, float(known.level[j]), N_STEPS)  # type: ignore[index]
        else:
            data = raw[:, j]
            low, high = np.log([data.min(), data.max()]) if log else (data.min(), data.max())
            beyond = BEYOND * (high - low)
            steps = np.linspace(low - beyond, high + beyond, N_STEPS)
            steps = np.exp(steps) if log else steps
            # Up to rounding, because the data were standardised before.
            whole = np.ptp(data) >= 1 and abs(data - np.round(data)).max() < 1e-6
            if column.kind == "number" and whole:
                steps = np.unique(np.round(steps))
        sweep = _Sweep(number, column, float(at[0, number]), steps, data, log)
        found.setdefault(number, (float(importance[j]), sweep))
    ranked = sorted(found.values(), key=lambda pair: -pair[0])
    return sorted((sweep for _, sweep in ranked[:MOST_PANELS]), key=lambda sweep: sweep.number)


def _queries(query: Any, sweep: _Sweep) -> Any:
    """The queries of a sweep in the user's kind of rows."""
    moved = np.repeat(to_numbers(query, "x0"), len(sweep.steps), axis=0)
    moved[:, sweep.number] = sweep.steps
    is_table = isinstance(query, Table)
    return native(schema_of(query).build(moved) if is_table else restore(moved, query))


def _panel(axes: Axes, sweep: _Sweep, shown: np.ndarray) -> None:
    """Draw one number or date."""
    at, (low, high, middle, safe) = sweep.places(sweep.steps), shown.T
    style.shade(axes, at, safe > 0, "safe")
    if np.isnan(middle).all():
        axes.plot(at, high, color=style.ESTIMATE, lw=1.6, ls="--", label="error bound")
    else:
        band: dict[str, Any] = {"color": style.ESTIMATE, "alpha": 0.3, "lw": 0}
        axes.fill_between(at, low, high, label="prediction \N{PLUS-MINUS SIGN} bound", **band)
        axes.plot(at, middle, color=style.TRUE, lw=1.6, label="prediction")
    ticks = sweep.places(np.unique(sweep.in_data))[:: max(1, len(sweep.in_data) // 2000)]
    marks: dict[str, Any] = {"color": style.REFERENCE, "ms": 7, "mew": 0.8, "alpha": 0.6}
    marks |= {"transform": axes.get_xaxis_transform(), "label": "calibration points"}
    if len(ticks):
        axes.plot(ticks, np.full(len(ticks), 0.02), "|", **marks)
    axes.axvline(sweep.places(sweep.at_query), color=style.TRUE, lw=1.0, ls=":", label="x0")
    axes.set_xlim(at[0], at[-1])
    if sweep.log:
        axes.set_xscale("log")
        style.label_logarithms(axes.xaxis)
    if sweep.column.kind == "time":
        dates = AutoDateLocator(maxticks=5)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(dates)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(dates))  # type: ignore[no-untyped-call]


def _levels(axes: Axes, sweep: _Sweep, shown: np.ndarray) -> None:
    """Draw the levels of a category side by side."""
    places, (low, high, middle, safe) = np.arange(len(sweep.steps)), shown.T
    middle = np.where(np.isnan(middle), high, middle)
    for place in places[safe > 0]:
        axes.axvspan(place - 0.4, place + 0.4, color=style.SHADE, lw=0)
    bars: dict[str, Any] = {"ecolor": style.ESTIMATE, "elinewidth": 6, "alpha": 0.3}
    axes.errorbar(places, middle, [middle - low, high - middle], fmt="none", **bars)
    axes.plot(places, middle, "_", color=style.TRUE, ms=12, mew=1.6)
    axes.axvline(sweep.at_query, color=style.TRUE, lw=1.0, ls=":")
    axes.set_xticks(places, sweep.column.levels)
    axes.set_xlim(-0.6, len(places) - 0.4)
