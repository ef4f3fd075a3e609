r"""The scores of a field: what it is compared by.

Distances between whole fields are nearly equal and hardly change when a field becomes rougher. Windows have few cells, so that
distances between them differ, and there are many of them, so that the data fill their space.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, permutation
from geoq.neighbors import Neighbors
from geoq.regions.views import TINY, VARIANCE_FLOOR, Axes, FieldView, Grids, Score, Values

# Cells of a window along each axis: on a line, and on grids with more axes.
WINDOW_ON_LINE, WINDOW = 7, 3
N_POSITIONS = 64
# Windows of the data that are kept.
N_WINDOWS = 2048
# Principal axes of the windows with a smaller deviation, relative to the first one, are directions without variation.
MIN_DEVIATION = 0.01
# The smallest deviation of a moment between fields.
MIN_MOMENT_DEVIATION = 0.02
# The axes of patterns come from at most this many fields.
N_PATTERN_FIELDS = 512


def positions(grid: Sequence[int]) -> list[tuple[int, np.ndarray]]:
    """The number of cells of a window, and the first cells of the windows, evenly spread, along each axis."""
    largest = WINDOW_ON_LINE if len(grid) == 1 else WINDOW
    per_axis = max(1, round(N_POSITIONS ** (1 / len(grid))))
    ends = [(min(largest, n), np.linspace(0, n - min(largest, n), per_axis)) for n in grid]
    return [(size, np.unique(starts.round().astype(int))) for size, starts in ends]


def middles_of(grid: Sequence[int]) -> list[np.ndarray]:
    """The cells in the middle of the windows along each axis."""
    return [starts + size // 2 for size, starts in positions(grid)]


def windows_of(fields: Grids) -> Float[np.ndarray, " n n_positions entries"]:
    """The windows of each field at evenly spread positions, each with all channels."""
    at = positions(fields.shape[2:])
    axes = tuple(range(2, fields.ndim))
    cut = np.lib.stride_tricks.sliding_window_view(fields, [size for size, _ in at], axes)
    for axis, (_, starts) in zip(axes, at, strict=True):
        cut = cut.take(starts, axis)
    n_positions = math.prod(cut.shape[2 : fields.ndim])
    return np.moveaxis(cut, 1, fields.ndim - 1).reshape(len(fields), n_positions, -1)


@dataclass(frozen=True)
class Windows(Score):
    r"""The mean distance from small windows of the input to the nearest windows of the data: roughness, noise, steps, bumps.

    .. math:: z = (V^T w / \sigma, \; \|w - V V^T w\| / (0.01 \sigma_1))

    Distances are Euclidean in z: w is a standardised window, V are the principal axes with deviations of at least 1 % of the
    first one, and the last coordinate is the length off their span.
    """

    scale: Any = field(default=None, repr=False, compare=False)
    axes: Any = field(default=None, repr=False, compare=False)
    cloud: Any = field(default=None, repr=False, compare=False)
    difference: ClassVar[str] = "the input differs from the data within a few cells"

    def seen(self, view: FieldView) -> Grids | None:
        """The fields whose windows are compared; None if there is nothing to compare."""
        return view.fields

    def fit(self, points: FieldView) -> Any:
        """Keep windows at random positions of the points, in coordinates along their principal axes."""
        if self.seen(points[:1]) is None:
            return self
        n_positions = math.prod(len(starts) for _, starts in positions(points.layout.cells))
        chosen = np.sort(permutation(len(points) * n_positions)[:N_WINDOWS])
        row, at = np.divmod(chosen, n_positions)
        drawn = []
        for part in chunks(len(points), points.row_numbers):
            here = (row >= part.start) & (row < part.stop)
            windows = windows_of(cast(np.ndarray, self.seen(points[part])))
            drawn.append(windows[row[here] - part.start, at[here]])
        kept = np.concatenate(drawn)
        scale = kept.std(axis=0)
        scale = np.where(scale > TINY * abs(kept.mean(axis=0)).clip(min=1), scale, 1.0)
        axes = Axes.fit(kept / scale, least=0.0, ratio=MIN_DEVIATION)
        bare = replace(self, scale=scale, axes=axes)
        return replace(bare, cloud=bare._coordinates(kept))

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.cloud)

    def _coordinates(self, windows: np.ndarray) -> np.ndarray:
        along, rest = self.axes(windows / self.scale)
        off = np.linalg.norm(rest, axis=1) / (MIN_DEVIATION * self.axes.deviation[0])
        return np.column_stack([along / self.axes.deviation, off])

    def gaps(self, queries: FieldView) -> np.ndarray:
        """Distance from the window at each position to the nearest window of the data."""
        seen = self.seen(queries)
        if seen is None:
            return np.zeros((len(queries), math.prod(map(len, middles_of(queries.layout.cells)))))
        windows = windows_of(seen)
        rows = self._coordinates(windows.reshape(-1, windows.shape[2]))
        return self._neighbors.nearest(rows, 1)[0].reshape(windows.shape[:2])

    def __call__(self, queries: FieldView) -> np.ndarray:
        return np.asarray(self.gaps(queries).mean(axis=1))

    def on_cells(self, queries: FieldView) -> Float[np.ndarray, " n *cells"]:
        """The gap of the nearest position at each cell."""
        cells, order = queries.layout.cells, queries.layout.order
        pairs = [*zip(middles := middles_of(cells), cells, strict=True)]
        nearest = [abs(np.arange(n)[:, None] - middle).argmin(axis=1) for middle, n in pairs]
        gaps = self.gaps(queries).reshape(len(queries), *map(len, middles))
        found = gaps[:, *np.ix_(*nearest)]
        return found if order is None else found[:, np.argsort(order)]

    def explain(self, query: FieldView, limit: float) -> str:
        distance = self.gaps(query)[0]
        middles = middles_of(query.layout.cells)
        index = np.unravel_index(distance.argmax(), [*map(len, middles)])
        place = tuple(int(at[i]) for at, i in zip(middles, index, strict=True))
        where = f"cell {place[0] if len(place) == 1 else place}"
        if query.layout.order is not None:
            where = f"node {query.layout.order[place[0]]}"
        return (
            f"{self.difference}, most of all around {where}: the mean distance of its windows to the nearest "
            f"windows of the data is {distance.mean():.2g} (held-out fields: at most {limit:.2g})"
        )


@dataclass(frozen=True)
class Answers(Windows):
    """Windows of the input together with the prediction, or with the reference output in the data.

    They detect predictions that do not fit the input, and states off an attractor. Nothing is compared if the output lives on
    other cells.
    """

    difference = "the prediction and the input do not occur together in the data"

    def seen(self, view: FieldView) -> Grids | None:
        if view.answer is None:
            return None
        return np.concatenate([view.fields, view.answer], axis=1)


@dataclass(frozen=True)
class Moments(Score):
    """The largest distance of a channel's mean or deviation to its nearest value in the data: offsets, new amplitudes."""

    known: Any = field(default=None, repr=False, compare=False)

    def fit(self, points: FieldView) -> "Moments":
        moments = points.each(lambda part: part.moments)
        return replace(self, known=Values.fit(moments, MIN_MOMENT_DEVIATION))

    def gaps(self, queries: FieldView) -> np.ndarray:
        return self.known.gaps(queries.moments)

    def explain(self, query: FieldView, limit: float) -> str:
        del limit
        number = int(self.gaps(query).argmax())
        value, n_channels = float(query.moments[0, number]), len(query.scale)
        channel, is_mean = number % n_channels, number < n_channels

        def units(moment: float) -> float:
            if not is_mean:
                moment = math.sqrt(max(0.0, math.exp(2 * moment) - VARIANCE_FLOOR))
            return moment * float(query.scale[channel])

        low, high = map(units, self.known.around(number, value))
        name = "mean" if is_mean else "standard deviation"
        label = channel if query.names is None else query.names[channel]
        text = f"the {name} of channel {label} is {units(value):.4g}"
        if low < units(value) < high:
            return f"{text}; its nearest values in the data are {low:.4g} and {high:.4g}"
        return f"{text}; it ranges from {low:.4g} to {high:.4g} in the data"


@dataclass(frozen=True)
class Patterns(Score):
    """The largest distance to the nearest value in the data along a leading principal axis: new large patterns."""

    axes: Any = field(default=None, repr=False, compare=False)
    known: Any = field(default=None, repr=False, compare=False)

    def fit(self, points: FieldView) -> "Patterns":
        """Find the leading axes from at most 512 fields, evenly spread over the rows."""
        blocks = points.each(lambda part: part.blocks)
        few = blocks[:: max(1, math.ceil(len(blocks) / N_PATTERN_FIELDS))]
        axes = Axes.fit(few, least=0.0, ratio=1e-3, most=points.n_patterns)
        return replace(self, axes=axes, known=Values.fit(axes(blocks)[0], TINY))

    def gaps(self, queries: FieldView) -> np.ndarray:
        return self.known.gaps(self.axes(queries.blocks)[0])

    def explain(self, query: FieldView, limit: float) -> str:
        gaps = self.gaps(query)
        return (
            f"the large-scale pattern of principal axis {int(gaps.argmax())} is {gaps.max():.2g} deviations from the nearest value in "
            f"the data (held-out fields: at most {limit:.2g})"
        )
