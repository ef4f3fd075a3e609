"""What the scores of a safe region see and measure: rows of a table, or fields with their channels first, and distances."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import CHUNK_NUMBERS, chunks, flat
from geoq.core.geometry import Features
from geoq.core.tuples import Points
from geoq.data.coordinates import CHANGED, Coordinates, Part
from geoq.data.domain import Layout
from geoq.data.metric import FittedMetric
from geoq.data.table import Names, in_words

# Fields with their channels first.
Grids: TypeAlias = Float[np.ndarray, " n channels *grid"]
# Below this size a deviation or a threshold is rounding.
TINY = 1e-12
# Between levels of the data, a process that leaves this part of its deviation unexplained cannot replace a nearer point.
UNKNOWN = 0.5
# Beyond the range of an input nothing happens if prediction and process change by at most this part of the expected error.
LITTLE = 0.15
# Rows of a table are scored in chunks of this many.
CHUNK_ROWS = 20_000
# The outputs of at most this many points are compared with the inputs, to recognise steps in time.
N_COMPARED = 100
# The fraction of the variance of a channel that counts as none.
VARIANCE_FLOOR = 1e-4
# The leading principal axes; with more axes per field their deviations would be too small by chance.
N_PATTERNS, FIELDS_PER_PATTERN = 64, 4
# Patterns are linear functions of at most this many blocks of cells.
N_BLOCKS = 2048
# All windows of one channel have about this many cells.
WINDOW_CELLS = 64 * 27


@dataclass(frozen=True)
class TableView:
    """Rows of a table, in the coordinates that vary in the data.

    Attributes:
        t: coordinates T, one row per point or query.
        at_levels: the same; queries between levels are moved to the nearer level.
        support_distance: mean distance of queries to the nearest points; 0 for the points of the data.
        left: the fraction of the deviation of queries that a Gaussian process leaves unexplained; 0 without one.
        calm: which queries are beyond the range of an input where hardly anything changes.
    """

    t: Float[np.ndarray, " n m"]
    at_levels: Float[np.ndarray, " n m"]
    support_distance: Float[np.ndarray, " n"]
    left: Float[np.ndarray, " n"]
    calm: Bool[np.ndarray, " n"]
    coordinates: Coordinates
    metric: FittedMetric | None
    names: Names | None = None
    inside: ClassVar[str] = "all inputs are within the region of the held-out points"
    # How many numbers the scores of one query need.
    row_numbers: ClassVar[int] = CHUNK_NUMBERS // CHUNK_ROWS

    @staticmethod
    def of(points: Points) -> "TableView":
        t = flat(points.inputs)[:, points.coordinates.varies].astype(float)
        none = np.zeros(len(t))
        return TableView(t, t, none, none, none > 0, points.coordinates, points.metric)

    def of_queries(self, features: Features, names: Names | None = None) -> "TableView":
        """Queries in the same coordinates; raises unless there is one name per input."""
        n_inputs = math.prod(self.coordinates.input_shape)
        if names is not None and len(names) != n_inputs:
            raise ValueError(
                f"names has {len(names)} entries, but there are {n_inputs} inputs; pass one name per input."
            )
        varies = self.coordinates.varies
        t = at_levels = flat(features.inputs)[:, varies].astype(float)
        left = np.zeros(len(t))
        if features.opinion is not None:
            left = features.opinion.left
            moved = self.coordinates.at_levels(features.inputs)[:, varies]
            at_levels = np.where(left[:, None] < UNKNOWN, moved, t)
        calm = (
            np.zeros(len(t), dtype=bool) if features.change is None else features.change <= LITTLE
        )
        parts: Any = {"t": t, "at_levels": at_levels, "left": left, "calm": calm, "names": names}
        return replace(self, **parts, support_distance=features.support_distance)

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, rows: slice | np.ndarray) -> "TableView":
        names = ("t", "at_levels", "support_distance", "left", "calm")
        own: Any = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **own)

    def known_to(self, points: "TableView") -> Bool[np.ndarray, " n"]:
        """Which queries have no category that the points lack: such queries are never safe."""
        varies = self.coordinates.varies
        levels = self.coordinates.is_part(Part.LEVEL, Part.MISSING)[varies]
        present = points.t[:, levels].max(axis=0, initial=-np.inf)
        return ~(self.t[:, levels] > present).any(axis=1)

    def as_new(self, queries: "TableView") -> "tuple[TableView, TableView]":
        """These points and held-out queries, standardised by these points alone, as the data are not by new queries.

        With many more inputs than points, a point whose own value counts in mean and deviation is clearly nearer to the others.
        """
        scale = self.t.std(axis=0)
        points, new = (
            (t - self.t.mean(axis=0)) / np.where(scale > 0, scale, 1) for t in (self.t, queries.t)
        )
        both = (self.t, queries.t), (points, new)
        before, after = ((a**2).sum(axis=1).mean() + (b**2).sum(axis=1) for a, b in both)
        distance = queries.support_distance * np.sqrt(after / before)
        moved = replace(queries, t=new, at_levels=new, support_distance=distance)
        return replace(self, t=points, at_levels=points), moved

    @cached_property
    def column(self) -> np.ndarray:
        """The input of each coordinate that varies."""
        return self.coordinates.input_of[self.coordinates.varies]

    @cached_property
    def importance(self) -> np.ndarray:
        """The sensitivity of each coordinate that varies; 1 without a metric."""
        if self.metric is None:
            return np.ones(len(self.column))
        return self.metric.importance[self.coordinates.varies].astype(float)

    # Words for the coordinates that vary, in the units of the user.

    def number(self, j: int) -> int:
        """The number of coordinate j among all coordinates."""
        return int(np.flatnonzero(self.coordinates.varies)[j])

    def is_number(self, j: int) -> bool:
        return bool(self.coordinates.is_part(Part.VALUE)[self.number(j)])

    def units(self, j: int, at: float) -> float:
        filled = np.zeros(self.coordinates.mean.shape)
        filled.flat[self.number(j)] = at
        return float(self.coordinates.inverse(filled[None]).flat[self.number(j)])

    def label(self, j: int) -> str:
        column = int(self.column[j])
        return f"input {column if self.names is None else self.names[column]}"

    def text(self, j: int, at: float) -> str:
        return in_words(self.names, int(self.column[j]), self.units(j, at))

    def described(self, j: int, points: Float[np.ndarray, " n m"]) -> str:
        """The input of coordinate j with its value in the first row and its range in the points."""
        if not self.is_number(j):
            return self.label(j)
        ends = self.t[0, j], points[:, j].min(), points[:, j].max()
        value, low, high = (self.text(j, at) for at in ends)
        return f"{self.label(j)} ({value}, range {low} to {high})"


@dataclass(frozen=True)
class FieldView:
    """Fields in the units of the user, with their channels first, and the outputs, or the predictions of queries, as fields.

    Attributes:
        changes: whether the answer is the change from the input to the output, as in a step in time.
        mean: the mean of each channel over all cells and fields of the data.
        scale: the standard deviation of each channel, the measure of moments and patterns; 1 for a constant channel.
        n_patterns: the number of large-scale patterns, few enough for the fold with the fewest points.
    """

    inputs: Float[np.ndarray, " n *coordinates"]
    outputs: Float[np.ndarray, " n *output"]
    support_distance: Float[np.ndarray, " n"]
    coordinates: Coordinates
    layout: Layout
    changes: bool = False
    mean: Float[np.ndarray, " channels"] = field(default_factory=partial(np.zeros, 1))
    scale: Float[np.ndarray, " channels"] = field(default_factory=partial(np.ones, 1))
    n_patterns: int = 1
    names: Names | None = None
    inside: ClassVar[str] = (
        "windows, moments and patterns of the field are within the region of the held-out fields"
    )

    @staticmethod
    def of(points: Points) -> "FieldView":
        """The fields of the data; a few of them show whether outputs are later states."""
        fewest = min(len(left_in) for left_in, _ in points.splits)
        n_patterns = max(1, min(N_PATTERNS, fewest // FIELDS_PER_PATTERN))
        rows = points.inputs, points.outputs, np.zeros(len(points.inputs))
        view = FieldView(*rows, points.coordinates, points.layout, n_patterns=n_patterns)

        def sizes(part: FieldView) -> np.ndarray:
            cells = part.by_channel
            return np.stack([cells.mean(axis=2), (cells * cells).mean(axis=2)], axis=1)

        mean, square = view.each(sizes).mean(axis=0)
        deviation = np.sqrt((square - mean**2).clip(min=0))
        scale = np.where(deviation > CHANGED * np.sqrt(square), deviation, 1.0)
        few = view[: min(N_COMPARED, max(8, CHUNK_NUMBERS // points.inputs[:1].size))]
        changes = False
        if few.answer is not None and few.inputs.size == few.outputs.size:
            step = ((few.answer - few.fields) ** 2).mean()
            changes = bool(step < ((few.answer - few.answer.mean(axis=0)) ** 2).mean())
        return replace(view, changes=changes, mean=mean, scale=scale)

    def of_queries(self, features: Features, names: Names | None = None) -> "FieldView":
        """Queries as fields, with their predictions; raises unless there is one name per channel."""
        if names is not None and len(names) != len(self.mean):
            raise ValueError(
                f"names has {len(names)} entries, but the inputs have {len(self.mean)} channels; pass one name per channel."
            )
        parts: Any = {"inputs": features.inputs, "outputs": features.prediction, "names": names}
        return replace(self, **parts, support_distance=features.support_distance)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | np.ndarray) -> "FieldView":
        names = ("inputs", "outputs", "support_distance")
        own: Any = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **own)

    def each(self, numbers: Callable[["FieldView"], np.ndarray]) -> np.ndarray:
        """Some numbers of all rows, computed in chunks."""
        parts = [numbers(self[rows]) for rows in chunks(len(self), self.row_numbers)]
        return np.concatenate(parts)

    @property
    def row_numbers(self) -> int:
        """About how many numbers the scores of one field need."""
        n_numbers = math.prod(self.inputs.shape[1:]) + math.prod(self.outputs.shape[1:])
        return 2 * n_numbers * (1 + WINDOW_CELLS // math.prod(self.layout.cells))

    def _on_cells(self, values: np.ndarray) -> Grids:
        """Values with their channels first; nodes of a mesh follow the curve through it."""
        values = values.astype(float).reshape(len(values), -1, *self.layout.cells)
        return values if self.layout.order is None else values[..., self.layout.order]

    @cached_property
    def fields(self) -> Grids:
        """The inputs in the units of the user."""
        return self._on_cells(self.coordinates.inverse(self.inputs))

    @property
    def by_channel(self) -> Float[np.ndarray, " n channels n_cells"]:
        return self.fields.reshape(*self.fields.shape[:2], -1)

    @cached_property
    def answer(self) -> Grids | None:
        """The output or its change from the input; None if the output lives on other cells."""
        if not self.layout.holds(self.outputs.shape[1:]):
            return None
        answer = self._on_cells(np.nan_to_num(self.outputs.astype(float)))
        return answer - self.fields if self.changes else answer

    @property
    def moments(self) -> Float[np.ndarray, " n n_moments"]:
        r"""Mean and logarithm of the deviation of each channel.

        .. math:: m_c / \sigma_c, \qquad \tfrac12 \ln(v_c / \sigma_c^2 + 10^{-4})
        """
        cells = self.by_channel / self.scale[:, None]
        size = 0.5 * np.log(cells.var(axis=2) + VARIANCE_FLOOR)
        return np.concatenate([cells.mean(axis=2), size], axis=1)

    @property
    def blocks(self) -> Float[np.ndarray, " n n_blocks"]:
        """Means over blocks of cells in deviations of the channel; the cells themselves if there are few.

        Blocks of an axis that is no multiple of them overlap by a cell.
        """
        cells = (self.by_channel - self.mean[:, None]) / self.scale[:, None]
        blocks = cells.reshape(self.fields.shape)
        coarser = (blocks[0].size / N_BLOCKS) ** (1 / len(self.layout.cells))
        if coarser > 1:
            for axis, n in enumerate(self.layout.cells, start=2):
                n_blocks = max(1, int(n / coarser))
                places = np.arange(n_blocks + 1) * n
                starts, stops = places[:-1] // n_blocks, -(-places[1:] // n_blocks)
                ends = np.column_stack([starts, stops]).reshape(-1)[:-1]
                total = np.add.reduceat(np.moveaxis(blocks, axis, -1), ends, axis=-1)[..., ::2]
                blocks = np.moveaxis(total / (stops - starts), -1, axis)
        return flat(blocks)


View: TypeAlias = TableView | FieldView


class Score:
    """What a query is compared by, such as ``EachInput()``; a user can write another one.

    ``fit(points)`` returns the score with what it needs of the points, in fields that are None before. Then ``score(queries)``
    returns one number per query, by default the largest of its ``gaps``, and ``explain(query, limit)`` states why the number of one
    query exceeds its threshold: the inputs or the cells behind it.

    Attributes:
        least: the smallest threshold, so that many points do not turn the region into a bounding box.
        is_specific: whether the score names an input, so that it explains a flag even if others exceed their thresholds by more.
    """

    least: ClassVar[float] = 0.0
    is_specific: ClassVar[bool] = False

    def fit(self, points: Any) -> Any:
        """The score itself, if it needs nothing of the points."""
        del points
        return self

    def gaps(self, queries: Any) -> Float[np.ndarray, " n k"]:
        """How far each query is from the points, in several numbers."""
        raise NotImplementedError

    def __call__(self, queries: Any) -> Float[np.ndarray, " n"]:
        return np.asarray(self.gaps(queries).max(axis=1))


@dataclass(frozen=True)
class Values:
    """Sorted values of some numbers in the data; ``gaps`` returns the distance to the nearest one in standard deviations.

    Attributes:
        deviation: the unit in which the gaps of each number are measured.
        taken: the sorted values of each number.
    """

    deviation: Float[np.ndarray, " k"]
    taken: Float[np.ndarray, " k n_points"]

    @staticmethod
    def fit(values: Float[np.ndarray, " n k"], smallest: float) -> "Values":
        """Sort the values of each number; ``smallest`` is the smallest deviation."""
        return Values(values.std(axis=0).clip(min=smallest), np.sort(values.T, axis=1))

    def gaps(self, values: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n k"]:
        """Distance of each number to the nearest value in the data, in deviations."""
        last, found = self.taken.shape[1] - 1, np.empty_like(values)
        for j, (taken, own) in enumerate(zip(self.taken, values.T, strict=True)):
            above = np.searchsorted(taken, own)
            upper = abs(taken[above.clip(max=last)] - own)
            lower = abs(taken[(above - 1).clip(min=0)] - own)
            found[:, j] = np.minimum(upper, lower)
        return np.asarray(found / self.deviation)

    def around(self, number: int, value: float) -> tuple[float, float]:
        """The neighbouring values of a number in the data; the ends of its range if it lies outside."""
        taken = self.taken[number]
        if not taken[0] < value < taken[-1]:
            return float(taken[0]), float(taken[-1])
        above = int(np.searchsorted(taken, value))
        return float(taken[above - 1]), float(taken[above])


@dataclass(frozen=True)
class Axes:
    """Principal axes of some rows as columns, the longest first, with the deviations along them."""

    mean: Float[np.ndarray, " m"]
    directions: Float[np.ndarray, " m k"]
    deviation: Float[np.ndarray, " k"]

    @staticmethod
    def fit(rows: np.ndarray, least: float, ratio: float, most: int | None = None) -> "Axes":
        """The axes, ``most`` of them, with a deviation larger than ``least`` and than ``ratio`` times the largest one."""
        mean = rows.mean(axis=0)
        _, size, directions = np.linalg.svd(rows - mean, full_matrices=False)
        size = (size / math.sqrt(len(rows))).clip(min=TINY)
        kept = np.flatnonzero((size > least) & (size > ratio * size[0]))[:most]
        return Axes(mean, np.ascontiguousarray(directions[kept].T), size[kept])

    def __call__(self, rows: Float[np.ndarray, " n m"]) -> tuple[np.ndarray, np.ndarray]:
        """The coordinates along the axes, and the rest of each row, which is off their span."""
        centred = rows - self.mean
        along = centred @ self.directions
        return along, centred - along @ self.directions.T
