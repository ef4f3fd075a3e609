r"""The scores of a field: what it is compared by.

=========  =================================================================================  =================================
score      definition                                                                         what it detects
=========  =================================================================================  =================================
Windows    mean over positions of the distance from a small window of the input to the        roughness, noise, steps, bumps
           nearest window of the data
Moments    max over channels of the distance from the mean, and from the logarithm of the     offsets, new amplitudes
           standard deviation, to the nearest value in the data
Patterns   max over the leading principal axes of the distance to the nearest value in the    new large patterns
           data
Answers    windows of the input together with the prediction; the windows of the data         predictions that do not fit the
           contain the reference output                                                       input, states off an attractor
=========  =================================================================================  =================================

Distances between whole fields are nearly equal and hardly change when a field becomes rougher. Windows have few cells, so that
distances between them differ, and there are many of them, so that the data fill their space.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, permutation
from geoq.data.table import Names
from geoq.neighbors import Neighbors
from geoq.regions.views import Channels, FieldView, Grids

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
# Below this size a deviation is rounding.
TINY = 1e-12


def window_sizes(grid: Sequence[int]) -> list[int]:
    """The number of cells of a window along each axis."""
    size = WINDOW_ON_LINE if len(grid) == 1 else WINDOW
    return [min(size, n) for n in grid]


def positions(grid: Sequence[int]) -> list[np.ndarray]:
    """The first cells of the windows along each axis, evenly spread."""
    per_axis = max(1, round(N_POSITIONS ** (1 / len(grid))))
    return [
        np.unique(np.linspace(0, n - size, per_axis).round().astype(int))
        for n, size in zip(grid, window_sizes(grid), strict=True)
    ]


def middle_of(window: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The cell in the middle of the window with this number."""
    at = positions(grid)
    index = np.unravel_index(window, [len(axis) for axis in at])
    return tuple(
        int(axis[i]) + size // 2
        for axis, i, size in zip(at, index, window_sizes(grid), strict=True)
    )


def windows_of(fields: Grids) -> Float[np.ndarray, " n n_positions entries"]:
    """The windows of each field at evenly spread positions, each with all channels."""
    grid = fields.shape[2:]
    axes = tuple(range(2, fields.ndim))
    cut = np.lib.stride_tricks.sliding_window_view(fields, window_sizes(grid), axes)
    for axis, at in enumerate(positions(grid), start=2):
        cut = cut.take(at, axis)
    n_positions = math.prod(cut.shape[2 : 2 + len(grid)])
    return np.moveaxis(cut, 1, 1 + len(grid)).reshape(len(fields), n_positions, -1)


@dataclass(frozen=True)
class WindowCloud:
    r"""Windows of the data, and the distance from the windows of a field to the nearest of them.

    .. math:: z = (V^T w / \sigma, \; \|w - V V^T w\| / (0.01 \sigma_1))

    Distances are Euclidean in z: w is a standardised window, V are the principal axes with deviations of at least 1 % of the
    first one, and the last coordinate is the length off their span.
    """

    mean: Float[np.ndarray, " entries"]
    scale: Float[np.ndarray, " entries"]
    axes: Float[np.ndarray, " entries n_axes"]
    deviation: Float[np.ndarray, " n_axes"]
    cloud: Float[np.ndarray, " n_windows n_coordinates"]

    @staticmethod
    def fit(drawn: Float[np.ndarray, " n_windows entries"]) -> "WindowCloud":
        """Find the principal axes of windows of the data, and keep the windows in these axes."""
        mean, scale = drawn.mean(axis=0), drawn.std(axis=0)
        scale = np.where(scale > TINY * abs(mean).clip(min=1), scale, 1.0)
        _, size, directions = np.linalg.svd((drawn - mean) / scale, full_matrices=False)
        size = (size / math.sqrt(len(drawn))).clip(min=TINY)
        kept = size > MIN_DEVIATION * size[0]
        kept[0] = True
        axes, deviation = np.ascontiguousarray(directions[kept].T), size[kept]
        bare = WindowCloud(mean, scale, axes, deviation, drawn[:0, :1])
        return WindowCloud(mean, scale, axes, deviation, bare._coordinates(drawn))

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.cloud)

    def _coordinates(self, windows: np.ndarray) -> np.ndarray:
        standard = (windows - self.mean) / self.scale
        along = standard @ self.axes
        off = np.linalg.norm(standard - along @ self.axes.T, axis=1)
        off = off / (MIN_DEVIATION * self.deviation[0])
        return np.concatenate([along / self.deviation, off[:, None]], axis=1)

    def distances(self, fields: Grids) -> Float[np.ndarray, " n n_positions"]:
        """Distance from the window at each position to the nearest window of the data."""
        windows = windows_of(fields)
        rows = self._coordinates(windows.reshape(-1, windows.shape[2]))
        return self._neighbors.nearest(rows, 1)[0].reshape(windows.shape[:2])


def _drawn(points: FieldView, *, with_answers: bool) -> np.ndarray:
    """Windows at random positions of the points."""
    n_positions = math.prod(len(axis) for axis in positions(points.grid))
    chosen = np.sort(permutation(len(points) * n_positions)[:N_WINDOWS])
    field, at = chosen // n_positions, chosen % n_positions
    drawn = []
    for part in chunks(len(points), points.row_numbers):
        here = (field >= part.start) & (field < part.stop)
        view = points[part]
        fields = view.joined if with_answers else view.fields
        drawn.append(windows_of(fields)[field[here] - part.start, at[here]])
    return np.concatenate(drawn)


@dataclass(frozen=True)
class Windows:
    """Small windows of the input, compared with the windows of the data."""

    def fit(self, points: FieldView) -> "FittedWindows":
        return FittedWindows(WindowCloud.fit(_drawn(points, with_answers=False)))


@dataclass(frozen=True)
class FittedWindows:
    """The mean distance from the windows of the input to the nearest windows of the data."""

    cloud: WindowCloud
    least: ClassVar[float] = 0.0

    def __call__(self, queries: FieldView, at_least: np.ndarray) -> np.ndarray:
        return np.asarray(self.cloud.distances(queries.fields).mean(axis=1))

    def explain(self, query: FieldView, limit: float, names: Names | None) -> str:
        del names
        distance = self.cloud.distances(query.fields)[0]
        what = "the input differs from the data within a few cells"
        return _explain_windows(what, distance, query, limit)


@dataclass(frozen=True)
class Answers:
    """Windows of the input together with the prediction; nothing is compared if the output lives on other cells."""

    def fit(self, points: FieldView) -> "FittedAnswers":
        if not points.has_answer:
            return FittedAnswers(None)
        return FittedAnswers(WindowCloud.fit(_drawn(points, with_answers=True)))


@dataclass(frozen=True)
class FittedAnswers:
    """The mean distance from the windows of input and prediction to the nearest windows of the data."""

    cloud: WindowCloud | None
    least: ClassVar[float] = 0.0

    def __call__(self, queries: FieldView, at_least: np.ndarray) -> np.ndarray:
        if self.cloud is None:
            return np.zeros(len(queries))
        return np.asarray(self.cloud.distances(queries.joined).mean(axis=1))

    def explain(self, query: FieldView, limit: float, names: Names | None) -> str:
        del names
        assert self.cloud is not None
        distance = self.cloud.distances(query.joined)[0]
        what = "the prediction and the input do not occur together in the data"
        return _explain_windows(what, distance, query, limit)


def _explain_windows(what: str, distance: np.ndarray, query: FieldView, limit: float) -> str:
    cell = query.cell(middle_of(int(distance.argmax()), query.grid))
    return (
        f"{what}, most of all around {cell}: its windows are {distance.mean():.2g} from the nearest windows of the data on average "
        f"(held-out fields: at most {limit:.2g})"
    )


@dataclass(frozen=True)
class Values:
    """Sorted values of some numbers in the data; ``gaps`` returns the distance to the nearest one in standard deviations."""

    deviation: Float[np.ndarray, " k"]
    taken: Float[np.ndarray, " k n_points"]

    @staticmethod
    def fit(values: Float[np.ndarray, " n k"], smallest: float) -> "Values":
        """Sort the values of each number; ``smallest`` is the smallest deviation."""
        deviation = values.std(axis=0).clip(min=smallest)
        return Values(deviation, np.sort(values.T, axis=1))

    def gaps(self, values: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n k"]:
        """Distance of each number to the nearest value in the data, in deviations."""
        last, found = self.taken.shape[1] - 1, np.empty_like(values)
        for j, (taken, own) in enumerate(zip(self.taken, values.T, strict=True)):
            above = np.searchsorted(taken, own)
            upper = abs(taken[above.clip(max=last)] - own)
            lower = abs(taken[(above - 1).clip(min=0)] - own)
            found[:, j] = np.minimum(upper, lower)
        gaps: np.ndarray = found / self.deviation
        return gaps

    def around(self, number: int, value: float) -> tuple[float, float]:
        """The neighbouring values of a number in the data; the ends of its range if it lies outside."""
        taken = self.taken[number]
        if not taken[0] < value < taken[-1]:
            return float(taken[0]), float(taken[-1])
        above = int(np.searchsorted(taken, value))
        return float(taken[above - 1]), float(taken[above])


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of each channel, compared with the values in the data."""

    def fit(self, points: FieldView) -> "FittedMoments":
        assert points.channels is not None
        known = Values.fit(points.moments, MIN_MOMENT_DEVIATION)
        return FittedMoments(known, points.channels)


@dataclass(frozen=True)
class FittedMoments:
    """The largest gap between a moment and its values in the data."""

    known: Values
    channels: Channels
    least: ClassVar[float] = 0.0

    def __call__(self, queries: FieldView, at_least: np.ndarray) -> np.ndarray:
        return np.asarray(self.known.gaps(queries.moments).max(axis=1))

    def explain(self, query: FieldView, limit: float, names: Names | None) -> str:
        del limit
        number = int(self.known.gaps(query.moments)[0].argmax())
        value = float(query.moments[0, number])
        taken = self.known.taken[number]
        channel, name, raw = self.channels.moment(number, value)
        low, high = (self.channels.moment(number, at)[2] for at in self.known.around(number, value))
        text = f"the {name} of {query.label(channel, names)} is {raw:.4g}"
        if taken[0] < value < taken[-1]:
            return f"{text}; its nearest values in the data are {low:.4g} and {high:.4g}"
        return f"{text}; it ranges from {low:.4g} to {high:.4g} in the data"


@dataclass(frozen=True)
class Patterns:
    """The leading principal axes of the blocks of a field, compared with the values in the data."""

    def fit(self, points: FieldView) -> "FittedPatterns":
        """Find the leading axes from at most 512 fields, evenly spread over the rows."""
        blocks = points.blocks
        few = blocks[:: max(1, math.ceil(len(blocks) / N_PATTERN_FIELDS))]
        mean = few.mean(axis=0)
        _, size, directions = np.linalg.svd(few - mean, full_matrices=False)
        kept = size > 1e-3 * max(float(size[0]), TINY)
        kept[0] = True
        kept[points.n_patterns :] = False
        axes = np.ascontiguousarray(directions[kept].T)
        known = Values.fit((blocks - mean) @ axes, TINY)
        return FittedPatterns(mean, axes, known)


@dataclass(frozen=True)
class FittedPatterns:
    """The largest gap between a coordinate along an axis and its values in the data."""

    mean: Float[np.ndarray, " n_blocks"]
    axes: Float[np.ndarray, " n_blocks k"]
    known: Values
    least: ClassVar[float] = 0.0

    def _gaps(self, queries: FieldView) -> np.ndarray:
        return self.known.gaps((queries.blocks - self.mean) @ self.axes)

    def __call__(self, queries: FieldView, at_least: np.ndarray) -> np.ndarray:
        return np.asarray(self._gaps(queries).max(axis=1))

    def explain(self, query: FieldView, limit: float, names: Names | None) -> str:
        del names
        gaps = self._gaps(query)[0]
        return (
            f"the large-scale pattern of principal axis {int(gaps.argmax())} is {gaps.max():.2g} deviations from the nearest value in "
            f"the data (held-out fields: at most {limit:.2g})"
        )
