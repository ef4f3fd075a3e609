"""What the scores of a safe region see of points and queries: rows of a table, or fields with their channels first."""

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
from geoq.data.table import Names, Schema

# Fields with their channels first.
Grids: TypeAlias = Float[np.ndarray, " n channels *grid"]
# Between levels of the data, a process that leaves this part of its deviation unexplained cannot replace a nearer point.
UNKNOWN = 0.5
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
        support_distance: mean distance of queries to the nearest points; None for the points of the data.
        coordinates: T itself.
        metric: the metric; None for a representation of the user.
        names: names of the inputs, for explanations.
        left: the fraction of the deviation of queries that a Gaussian process leaves unexplained; None without one.
    """

    t: Float[np.ndarray, " n m"]
    support_distance: Float[np.ndarray, " n"] | None
    coordinates: Coordinates
    metric: FittedMetric | None
    names: Names | None = None
    left: Float[np.ndarray, " n"] | None = None
    levels: Float[np.ndarray, " n m"] | None = None
    inside: ClassVar[str] = "all inputs are within the region of the held-out points"
    # How many numbers the scores of one query need.
    row_numbers: ClassVar[int] = CHUNK_NUMBERS // CHUNK_ROWS

    @staticmethod
    def of(points: Points) -> "TableView":
        """The points of the data."""
        varying = flat(points.inputs)[:, points.coordinates.varies].astype(float)
        return TableView(varying, None, points.coordinates, points.metric)

    def of_queries(self, features: Features, names: Names | None = None) -> "TableView":
        """Queries in the same coordinates; raises unless there is one name per input."""
        n_inputs = math.prod(self.coordinates.input_shape)
        if names is not None and len(names) != n_inputs:
            raise ValueError(
                f"names has {len(names)} entries, but there are {n_inputs} inputs; pass one name per input."
            )
        varying = flat(features.inputs)[:, self.coordinates.varies].astype(float)
        left, levels = None, None
        if features.opinion is not None:
            left = features.opinion.left
            moved = self.coordinates.at_levels(features.inputs)[:, self.coordinates.varies]
            levels = np.where(left[:, None] < UNKNOWN, moved, varying)
        parts: Any = {"t": varying, "support_distance": features.support_distance, "left": left}
        return replace(self, **parts, levels=levels, names=names)

    def __len__(self) -> int:
        return len(self.t)

    @property
    def at_levels(self) -> Float[np.ndarray, " n m"]:
        """The coordinates, with those between levels moved to the nearer level."""
        return self.t if self.levels is None else self.levels

    def __getitem__(self, rows: slice | np.ndarray) -> "TableView":
        names = ("support_distance", "left", "levels")
        own: Any = {n: None if (v := getattr(self, n)) is None else v[rows] for n in names}
        return replace(self, t=self.t[rows], **own)

    def known_to(self, points: "TableView") -> Bool[np.ndarray, " n"]:
        """Which queries have no category that the points lack: such queries are never safe."""
        levels = self.coordinates.is_part(Part.LEVEL, Part.MISSING)
        levels = levels[self.coordinates.varies]
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
        parts: Any = {"support_distance": distance, "levels": None}
        return replace(self, t=points), replace(queries, t=new, **parts)

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
        """Whether coordinate j is a number or its logarithm."""
        return bool(self.coordinates.is_part(Part.VALUE)[self.number(j)])

    def units(self, j: int, at: float) -> float:
        """A value of coordinate j in the units of the user."""
        filled = np.zeros(self.coordinates.mean.shape)
        filled.flat[self.number(j)] = at
        return float(self.coordinates.inverse(filled[None]).flat[self.number(j)])

    def label(self, j: int) -> str:
        """The name of the input that coordinate j comes from."""
        column = int(self.column[j])
        return f"input {column if self.names is None else self.names[column]}"

    def text(self, j: int, at: float) -> str:
        """A value of coordinate j in words."""
        value = self.units(j, at)
        if isinstance(self.names, Schema):
            return self.names.columns[int(self.column[j])].text(value)
        return f"{value:.4g}"

    def described(self, j: int, points: Float[np.ndarray, " n m"]) -> str:
        """The input of coordinate j with its value in the first row and its range in the points."""
        if not self.is_number(j):
            return self.label(j)
        ends = self.t[0, j], points[:, j].min(), points[:, j].max()
        value, low, high = (self.text(j, at) for at in ends)
        return f"{self.label(j)} ({value}, range {low} to {high})"


@dataclass(frozen=True)
class FieldView:
    """Fields in the units of the user, with their channels first, and the outputs as fields.

    Attributes:
        inputs: coordinates T of the inputs.
        outputs: reference outputs of points, or predictions of queries.
        coordinates: T itself.
        layout: where the cells are.
        changes: whether the answer is the change from the input to the output, as in a step in time.
        mean: the mean of each channel over all cells and fields of the data.
        scale: the standard deviation of each channel, the measure of moments and patterns; 1 for a constant channel.
        n_patterns: the number of large-scale patterns, few enough for the fold with the fewest points.
        support_distance: mean distance of queries to the nearest points; None for the points of the data.
        names: names of the channels, for explanations.
    """

    inputs: Float[np.ndarray, " n *coordinates"]
    outputs: Float[np.ndarray, " n *output"]
    coordinates: Coordinates
    layout: Layout
    changes: bool = False
    mean: Float[np.ndarray, " channels"] = field(default_factory=partial(np.zeros, 1))
    scale: Float[np.ndarray, " channels"] = field(default_factory=partial(np.ones, 1))
    n_patterns: int = 1
    support_distance: Float[np.ndarray, " n"] | None = None
    names: Names | None = None
    inside: ClassVar[str] = (
        "windows, moments and patterns of the field are within the region of the held-out fields"
    )

    @staticmethod
    def of(points: Points) -> "FieldView":
        """The fields of the data; a few of them show whether outputs are later states."""
        fewest = min(len(left_in) for left_in, _ in points.splits)
        n_patterns = max(1, min(N_PATTERNS, fewest // FIELDS_PER_PATTERN))
        arrays = points.inputs, points.outputs, points.coordinates, points.layout
        view = FieldView(*arrays, n_patterns=n_patterns)
        few = view[: min(N_COMPARED, max(8, CHUNK_NUMBERS // points.inputs[:1].size))]

        def sizes(part: FieldView) -> np.ndarray:
            cells = part.by_channel
            return np.stack([cells.mean(axis=2), (cells * cells).mean(axis=2)], axis=1)

        mean, square = view.each(sizes).mean(axis=0)
        deviation = np.sqrt((square - mean**2).clip(min=0))
        scale = np.where(deviation > CHANGED * np.sqrt(square), deviation, 1.0)
        return replace(view, changes=few._is_step(), mean=mean, scale=scale)

    def _is_step(self) -> bool:
        if self.answer is None or self.inputs.size != self.outputs.size:
            return False
        step = ((self.answer - self.fields) ** 2).mean()
        return bool(step < ((self.answer - self.answer.mean(axis=0)) ** 2).mean())

    def of_queries(self, features: Features, names: Names | None = None) -> "FieldView":
        """Queries as fields, with their predictions; raises unless there is one name per channel."""
        if names is not None and len(names) != len(self.mean):
            raise ValueError(
                f"names has {len(names)} entries, but the inputs have {len(self.mean)} channels; pass one name per channel."
            )
        parts: Any = {"inputs": features.inputs, "outputs": features.prediction}
        return replace(self, **parts, support_distance=features.support_distance, names=names)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | np.ndarray) -> "FieldView":
        distance = None if self.support_distance is None else self.support_distance[rows]
        parts: Any = {"inputs": self.inputs[rows], "outputs": self.outputs[rows]}
        return replace(self, **parts, support_distance=distance)

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
        """The inputs with their cells in a row."""
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
        """Means over blocks of cells in deviations of the channel; the cells themselves if there are few."""
        cells = (self.by_channel - self.mean[:, None]) / self.scale[:, None]
        blocks = cells.reshape(self.fields.shape)
        coarser = (blocks[0].size / N_BLOCKS) ** (1 / len(self.layout.cells))
        if coarser > 1:
            for axis, n in enumerate(self.layout.cells, start=2):
                blocks = _block_means(blocks, axis, max(1, int(n / coarser)))
        return flat(blocks)

    def cell(self, place: tuple[int, ...]) -> str:
        """A cell or a node of the user in words."""
        if self.layout.order is not None:
            return f"node {self.layout.order[place[0]]}"
        return f"cell {place[0] if len(place) == 1 else place}"

    def label(self, channel: int) -> str:
        """The name of a channel."""
        return f"channel {channel if self.names is None else self.names[channel]}"


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

    def gaps(self, queries: Any) -> Float[np.ndarray, " n k"]:
        """How far each query is from the points, in several numbers."""
        raise NotImplementedError

    def __call__(self, queries: Any) -> Float[np.ndarray, " n"]:
        return np.asarray(self.gaps(queries).max(axis=1))

    def explain_inside(self, query: Any) -> str:
        """Why a query is safe although an input is out of its range; empty if none is."""
        del query
        return ""


def _block_means(fields: Grids, axis: int, n_blocks: int) -> Grids:
    """Means over blocks along an axis; blocks of an axis that is no multiple of them overlap by a cell."""
    n = fields.shape[axis]
    starts = np.arange(n_blocks) * n // n_blocks
    stops = -(-(np.arange(1, n_blocks + 1) * n) // n_blocks)
    before = np.zeros_like(fields.take([0], axis))
    total = np.concatenate([before, fields.cumsum(axis=axis)], axis=axis)
    length = (stops - starts).reshape(-1, *(1,) * (fields.ndim - axis - 1))
    return np.asarray((total.take(stops, axis) - total.take(starts, axis)) / length)
