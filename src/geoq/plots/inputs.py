"""A picture of the prediction and its bound while one input moves and the others stay at a query."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from geoq.arrays import Rows, to_tensor
from geoq.assessment import Assessment
from geoq.columns import Part
from geoq.estimator import GeoQ
from geoq.frames import frame_state, values_of
from geoq.metric import AnyCoordinates
from geoq.plots.checks import check_figure, numbers_of, row_index
from geoq.plots.style import (
    ESTIMATE,
    REFERENCE,
    SHADE,
    TRUE,
    label_logarithms,
    legend_below,
    set_layout,
    wrapped,
)
from geoq.queries import query_rows
from geoq.table import LevelColumn, NumberColumn, Table, TimeColumn, schema_of

N_STEPS = 81
# How far an input moves beyond its range in the data, as a fraction of the range.
BEYOND = 0.2
MOST_PANELS = 12
MOST_TICKS = 2000


def inputs(
    figure: Figure,
    geoq: GeoQ,
    x0: Any,
    *,
    names: Sequence[str] | None = None,
    output: SupportsIndex = 0,
) -> list[Axes]:
    """Draw the prediction and its bound along each input, while the other inputs stay at the query ``x0``.

    The shaded stretch is safe. Ticks at the lower edge are the values of the input in the data. A category has an error bar for each
    of its levels. Inputs that are constant in the data have no panel. Of more than 12 inputs the most influential ones are drawn.

    Args:
        figure: an empty figure; 4 inches of width and 2.5 inches of height per panel are suitable.
        geoq: a fitted estimator for tables or for arrays of shape (n, n_inputs).
        x0: one query: a row of a data frame, or an array.
        names: names of the inputs; the columns of the table or their numbers if None.
        output: the number of the output, if there are several.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from geoq import GeoQ, RandomFolds, plots
        >>> x = np.random.default_rng(0).uniform(size=(60, 2))
        >>> geoq = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, x[:, 0] ** 2)
        >>> axes = plots.inputs(Figure(figsize=(8, 3)), geoq, x[0])
        >>> [panel.get_xlabel() for panel in axes]
        ['input 0', 'input 1']
    """
    check_figure(figure)
    query = _one_row(geoq, x0)
    sweeps = _sweeps(geoq, query)
    if not sweeps:
        raise ValueError(
            "all inputs are constant in the data of fit, so there is nothing to draw; fit on data in which an input varies."
        )
    answer = geoq.assess(_queries(query, sweeps))
    shown = _Shown.of(answer, output)
    set_layout(figure)
    n_columns = min(len(sweeps), max(1, int(figure.get_figwidth() / 3)))
    grid = figure.subplots(
        -(-len(sweeps) // n_columns), n_columns, squeeze=False, sharey=True
    )
    panels: list[Axes] = grid.flat[: len(sweeps)].tolist()
    for empty in grid.flat[len(sweeps) :]:
        empty.remove()
    for axes, sweep, rows in zip(panels, sweeps, _rows_of(sweeps), strict=True):
        _panel(axes, sweep, shown[rows])
        axes.set_xlabel(sweep.label(names))
    for first in grid[:, 0]:
        first.set_ylabel(shown.name)
    axes.set_ylim(*_limits(sweeps, shown))
    level = geoq.increment_model_.quantile
    title = (
        f"One input moves and the others stay at x0; bounds of quantile level {level:g}"
    )
    figure.suptitle(wrapped(figure, title), fontsize=10)
    legend_below(figure, panels)
    return panels


@dataclass(frozen=True)
class _Sweep:
    """The values of one input along a panel.

    Attributes:
        number: the number of the input.
        column: what the input is.
        steps: its values, as numbers.
        at: its value in the query.
        data: its values in the data; empty for categories.
        log: whether the axis is logarithmic.
    """

    number: int
    column: Any
    steps: np.ndarray
    at: float
    data: np.ndarray
    log: bool = False

    @property
    def is_category(self) -> bool:
        return isinstance(self.column, LevelColumn)

    def label(self, names: Sequence[str] | None) -> str:
        """The name of the input."""
        if names is not None:
            return names[self.number]
        name = str(self.column.name)
        return f"input {name}" if name == str(self.number) else name

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Places on the axis: dates for dates, numbers otherwise."""
        if isinstance(self.column, TimeColumn):
            return np.asarray(numbers * 1e6).astype("datetime64[us]")
        return numbers


@dataclass(frozen=True)
class _Shown:
    """The numbers of the answer that are drawn, one per query."""

    name: str
    prediction: np.ndarray | None
    bound: np.ndarray
    safe: np.ndarray

    @staticmethod
    def of(answer: Assessment, output: SupportsIndex) -> "_Shown":
        bound = numbers_of(answer.error_hat).reshape(len(answer), -1)
        prediction = numbers_of(answer.prediction).reshape(len(answer), -1)
        which = row_index(output, bound.shape[1], "output", "the outputs")
        safe = numbers_of(answer.safe) > 0
        if prediction.shape != bound.shape:
            # An error functional that joins outputs, such as a norm, has no band around a prediction.
            return _Shown("error bound", None, bound[:, which], safe)
        known = answer.output_names
        several = bound.shape[1] > 1
        name = known[which] if known else f"output {which}" if several else ""
        named = f"prediction of {name}" if name else "prediction"
        return _Shown(named, prediction[:, which], bound[:, which], safe)

    def __getitem__(self, rows: slice) -> "_Shown":
        prediction = None if self.prediction is None else self.prediction[rows]
        return _Shown(self.name, prediction, self.bound[rows], self.safe[rows])

    @property
    def ends(self) -> np.ndarray:
        """The lower and the upper end of what is drawn, one row per query."""
        if self.prediction is None:
            return np.stack([0 * self.bound, self.bound], axis=1)
        low, high = self.prediction - self.bound, self.prediction + self.bound
        return np.stack([low, high], axis=1)


def _one_row(geoq: GeoQ, x0: Any) -> Rows:
    """The query as a row; refused unless there is exactly one."""
    if isinstance(x0, np.ndarray | torch.Tensor | list | tuple) and np.ndim(x0) == 1:
        x0 = np.asarray(x0)[None] if isinstance(x0, list | tuple) else x0[None]
    rows: Rows = query_rows(geoq, x0)
    shape = tuple(geoq.coordinates_.input_shape)
    if len(shape) != 1:
        raise ValueError(
            f"GeoQ was fitted on rows of shape {shape}, but plots.inputs draws tables; draw a field with plots.fields."
        )
    if len(rows) != 1 or tuple(rows.shape[1:]) != shape:
        raise ValueError(
            f"x0 has shape {tuple(rows.shape)}, but one query of {shape[0]} inputs is needed; pass one row, x0=x[:1]."
        )
    return rows


def _sweeps(geoq: GeoQ, query: Rows) -> list[_Sweep]:
    """The sweeps of all inputs that vary, the most influential ones if there are many."""
    coordinates = geoq.coordinates_
    schema = geoq.schema_ or schema_of(query)
    points = geoq.geometry_.points.coordinates
    raw = coordinates.inverse(points).reshape(len(points), -1).cpu().numpy()
    at = to_tensor(query, "x0").cpu().numpy()[0]
    found = [
        sweep
        for number, column in enumerate(schema.columns)
        for sweep in _sweep(coordinates, raw, number, column, float(at[number]))
    ]
    if len(found) > MOST_PANELS and geoq.metric_ is not None:
        weight = np.zeros(len(schema))
        weight_of = geoq.metric_.importance.reshape(-1).cpu().numpy()
        np.maximum.at(weight, coordinates.column.cpu().numpy(), weight_of)
        found.sort(key=lambda sweep: -weight[sweep.number])
    return sorted(found[:MOST_PANELS], key=lambda sweep: sweep.number)


def _sweep(
    coordinates: AnyCoordinates, raw: np.ndarray, number: int, column: Any, at: float
) -> Iterator[_Sweep]:
    """The sweep of one input; none if it is constant or ignored."""
    own = np.flatnonzero(coordinates.column.cpu().numpy() == number).tolist()
    constant = coordinates.constant.reshape(-1)
    own = [j for j in own if not constant[j]]
    if not own:
        return
    none = np.empty(0)
    if isinstance(column, LevelColumn):
        yield _Sweep(number, column, np.arange(float(len(column.levels))), at, none)
        return
    j = own[0]
    if not coordinates.is_number(j):
        # The sine and the cosine of a periodic number have its period as their level.
        is_sine = int(getattr(coordinates, "part")[j]) == Part.SINE  # noqa: B009
        period = float(getattr(coordinates, "level")[j]) if is_sine else 0.0  # noqa: B009
        if period:
            yield _Sweep(number, column, np.linspace(0, period, N_STEPS), at, none)
        return
    log = bool(coordinates.log.reshape(-1)[j])
    data = raw[:, j]
    low, high = data.min(), data.max()
    if log:
        low, high = np.log(low), np.log(high)
    beyond = BEYOND * (high - low)
    steps = np.linspace(low - beyond, high + beyond, N_STEPS)
    steps = np.exp(steps) if log else steps
    # Up to rounding, because the data were standardised before.
    whole = np.ptp(data) >= 1 and abs(data - np.round(data)).max() < 1e-6
    if isinstance(column, NumberColumn) and whole:
        steps = np.unique(np.round(steps))
    yield _Sweep(number, column, steps, at, data, log)


def _rows_of(sweeps: list[_Sweep]) -> list[slice]:
    """The queries of each sweep, which follow each other."""
    ends = np.cumsum([0, *(len(sweep.steps) for sweep in sweeps)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def _queries(query: Rows, sweeps: list[_Sweep]) -> Any:
    """The queries of all sweeps, in the user's kind of rows."""
    rows_of = _rows_of(sweeps)
    n = rows_of[-1].stop
    moved = np.repeat(to_tensor(query, "x0").cpu().numpy(), n, axis=0)
    for sweep, rows in zip(sweeps, rows_of, strict=True):
        moved[rows, sweep.number] = sweep.steps
    if isinstance(query, torch.Tensor):
        return torch.as_tensor(moved).to(query)
    if not isinstance(query, Table):
        return moved
    import narwhals as nw

    state = frame_state(query)
    frame = nw.from_native(query[np.zeros(n, dtype=int)].native, eager_only=True)
    columns = {name: frame.get_column(name).to_list() for name in frame.columns}
    for sweep, rows in zip(sweeps, rows_of, strict=True):
        # The value of the query need not occur in the data, so only the rows of the sweep are replaced.
        dtype = state["dtypes"][sweep.number]
        columns[sweep.column.name][rows] = values_of(sweep.column, sweep.steps, dtype)
    series = {
        name: nw.new_series(name, columns[name], dtype, backend=state["library"])
        for name, dtype in frame.schema.items()
    }
    return nw.from_dict(series).to_native()


def _panel(axes: Axes, sweep: _Sweep, shown: _Shown) -> None:
    """Draw one input."""
    if sweep.is_category:
        _levels(axes, sweep, shown)
        return
    at = sweep.places(sweep.steps)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], shown.safe.astype(int), [0]])))
    for number, (start, stop) in enumerate(edges.reshape(-1, 2)):
        label = "safe" if number == 0 else None
        axes.axvspan(at[start], at[stop - 1], color=SHADE, lw=0, label=label)
    low, high = shown.ends.T
    if shown.prediction is None:
        axes.plot(at, high, color=ESTIMATE, lw=1.6, ls="--", label="error bound")
    else:
        band: dict[str, Any] = {"color": ESTIMATE, "alpha": 0.3, "lw": 0}
        label = "prediction \N{PLUS-MINUS SIGN} bound"
        axes.fill_between(at, low, high, label=label, **band)
        axes.plot(at, shown.prediction, color=TRUE, lw=1.6, label="prediction")
    if sweep.log:
        axes.set_xscale("log")
    data = np.unique(sweep.data)
    ticks = sweep.places(data)[:: max(1, len(sweep.data) // MOST_TICKS)]
    style: dict[str, Any] = {"color": REFERENCE, "ms": 7, "mew": 0.6, "alpha": 0.6}
    style |= {"transform": axes.get_xaxis_transform(), "label": "calibration points"}
    if len(ticks):
        axes.plot(ticks, np.full(len(ticks), 0.02), "|", **style)
    here = sweep.places(np.array([sweep.at]))[0]
    axes.axvline(here, color=TRUE, lw=1.0, ls=":", label="x0")
    axes.set_xlim(at[0], at[-1])
    if sweep.log:
        label_logarithms(axes.xaxis)
    if isinstance(sweep.column, TimeColumn):
        dates = AutoDateLocator(maxticks=5)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(dates)
        short = ConciseDateFormatter(dates)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(short)


def _levels(axes: Axes, sweep: _Sweep, shown: _Shown) -> None:
    """Draw the levels of a category side by side."""
    places = np.arange(len(sweep.steps))
    low, high = shown.ends.T
    for number, place in enumerate(places[shown.safe]):
        label = "safe" if number == 0 else None
        axes.axvspan(place - 0.4, place + 0.4, color=SHADE, lw=0, label=label)
    middle = high if shown.prediction is None else shown.prediction
    bars: dict[str, Any] = {"ecolor": ESTIMATE, "elinewidth": 6, "alpha": 0.3}
    axes.errorbar(places, middle, [middle - low, high - middle], fmt="none", **bars)
    axes.plot(places, middle, "_", color=TRUE, ms=12, mew=1.6)
    if sweep.at >= 0:
        axes.axvline(sweep.at, color=TRUE, lw=1.0, ls=":")
    axes.set_xticks(places, sweep.column.levels)
    axes.set_xlim(-0.6, len(places) - 0.4)


def _limits(sweeps: list[_Sweep], shown: _Shown) -> tuple[float, float]:
    """The range of values within the ranges of the data; bounds far outside would hide all others."""
    # Categories and periodic numbers have no range.
    ranges = [s.data if len(s.data) else s.steps for s in sweeps]
    inside = np.concatenate(
        [
            (s.steps >= own.min()) & (s.steps <= own.max())
            for s, own in zip(sweeps, ranges, strict=True)
        ]
    )
    ends = shown.ends[inside]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    margin = 0.15 * (high - low) or 1.0
    return low - margin, high + margin
