"""What the scores of a safe region see of points and queries: rows of a table, or fields with their channels first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

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


@dataclass(frozen=True)
class TableView:
    """Rows of a table, in the coordinates that vary in the data.

    Attributes:
        t: coordinates T, one row per point or query.
        support_distance: mean distance of queries to the nearest points; None for the points of the data.
        coordinates: T itself.
        metric: the metric; None for a representation of the user.
    """

    t: Float[np.ndarray, " n m"]
    support_distance: Float[np.ndarray, " n"] | None
    coordinates: Coordinates
    metric: FittedMetric | None

    @staticmethod
    def of(points: Points) -> "TableView":
        """The points of the data."""
        bare = TableView(np.zeros((0, 0)), None, points.coordinates, points.metric)
        return replace(bare, t=bare._varying(points.inputs))

    @property
    def bare(self) -> "TableView":
        """The view without points, for queries."""
        return replace(self, t=self.t[:0])

    def of_queries(self, features: Features) -> "TableView":
        """Queries in the same coordinates."""
        return replace(
            self, t=self._varying(features.inputs), support_distance=features.support_distance
        )

    def _varying(self, inputs: np.ndarray) -> np.ndarray:
        return flat(inputs)[:, self.coordinates.varies].astype(float)

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, rows: slice | np.ndarray) -> "TableView":
        distance = self.support_distance
        return replace(
            self, t=self.t[rows], support_distance=None if distance is None else distance[rows]
        )

    @property
    def row_numbers(self) -> int:
        """How many numbers the scores of one query need."""
        return CHUNK_NUMBERS // CHUNK_ROWS

    def known_to(self, points: "TableView") -> Bool[np.ndarray, " n"]:
        """Which queries have no category that the points lack: such queries are never safe."""
        levels = self.coordinates.is_part(Part.LEVEL, Part.MISSING)
        levels = levels[self.coordinates.varies]
        present = points.t[:, levels].max(axis=0, initial=-np.inf)
        return ~(self.t[:, levels] > present).any(axis=1)

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

    def check_names(self, names: Names | None) -> None:
        """Raise unless there is one name per input."""
        n_inputs = math.prod(self.coordinates.input_shape)
        if names is not None and len(names) != n_inputs:
            raise ValueError(
                f"names has {len(names)} entries, but there are {n_inputs} inputs; pass one name per input."
            )

    def explain_inside(self, scores: Sequence[Any], query: "TableView", names: Names | None) -> str:
        """Why a query is safe."""
        ranges = next((s for s in scores if hasattr(s, "why_inside")), None)
        text = "" if ranges is None else ranges.why_inside(query, names)
        return text or "all inputs are within the region of the held-out points"

    # Words for the coordinates that vary, in the units of the user.

    def number(self, j: int) -> int:
        """The number of coordinate j among all coordinates."""
        return int(np.flatnonzero(self.coordinates.varies)[j])

    def units(self, j: int, at: float) -> float:
        """A value of coordinate j in the units of the user."""
        filled = np.zeros(self.coordinates.mean.size)
        filled[self.number(j)] = at
        raw = self.coordinates.inverse(filled.reshape(1, *self.coordinates.mean.shape))
        return float(raw.reshape(-1)[self.number(j)])

    def label(self, j: int, names: Names | None) -> str:
        """The name of the input that coordinate j comes from."""
        column = int(self.column[j])
        return f"input {column if names is None else names[column]}"

    def text(self, j: int, at: float, names: Names | None) -> str:
        """A value of coordinate j in words."""
        value = self.units(j, at)
        if isinstance(names, Schema):
            return names.columns[int(self.column[j])].text(value)
        return f"{value:.4g}"

    def is_number(self, j: int) -> bool:
        """Whether coordinate j is a number or its logarithm."""
        return bool(self.coordinates.is_part(Part.VALUE)[self.number(j)])


@dataclass(frozen=True)
class Channels:
    """The typical size of each channel over all cells and fields, which is the measure of moments and patterns."""

    mean: Float[np.ndarray, " channels"]
    deviation: Float[np.ndarray, " channels"]

    @property
    def scale(self) -> Float[np.ndarray, " channels"]:
        """The deviation; 1 for a channel that is constant in the data."""
        return np.where(self.deviation > 0, self.deviation, 1.0)

    def moment(self, number: int, value: float) -> tuple[int, str, float]:
        """The channel, the name and the value in the units of the user of one of the moments."""
        channel = number % len(self.mean)
        scale = float(self.scale[channel])
        if number < len(self.mean):
            return channel, "mean", value * scale
        variance = max(0.0, math.exp(2 * value) - VARIANCE_FLOOR)
        return channel, "standard deviation", math.sqrt(variance) * scale


@dataclass(frozen=True)
class FieldView:
    """Fields in the units of the user, with their channels first, and the outputs as fields.

    Attributes:
        inputs: coordinates T of the inputs.
        outputs: reference outputs of points, or predictions of queries.
        coordinates: T itself.
        layout: where the cells are.
        changes: whether the answer is the change from the input to the output, as in a step in time.
        channels: the typical size of each channel in the data.
        n_patterns: the number of large-scale patterns, few enough for the fold with the fewest points.
        found: moments and blocks of the rows, if they were computed before.
        support_distance: mean distance of queries to the nearest points; None for the points of the data.
    """

    inputs: Float[np.ndarray, " n *coordinates"]
    outputs: Float[np.ndarray, " n *output"]
    coordinates: Coordinates
    layout: Layout
    changes: bool = False
    channels: Channels | None = None
    n_patterns: int = 1
    found: tuple[np.ndarray, np.ndarray] | None = None
    support_distance: Float[np.ndarray, " n"] | None = None

    @staticmethod
    def of(points: Points) -> "FieldView":
        """The fields of the data; a few of them show whether outputs are later states."""
        fewest = min(len(left_in) for left_in, _ in points.splits)
        view = FieldView(
            points.inputs,
            points.outputs,
            points.coordinates,
            points.layout,
            n_patterns=max(1, min(N_PATTERNS, fewest // FIELDS_PER_PATTERN)),
        )
        n = min(N_COMPARED, max(8, CHUNK_NUMBERS // points.inputs[:1].size))
        view = replace(view, changes=view[:n]._is_step())
        parts = [
            view[rows].fields.reshape(rows.stop - rows.start, -1, view.n_cells)
            for rows in chunks(len(view), 8 * view.inputs[:1].size)
        ]
        mean = np.concatenate([f.mean(axis=2) for f in parts]).mean(axis=0)
        square = np.concatenate([(f * f).mean(axis=2) for f in parts]).mean(axis=0)
        deviation = np.sqrt((square - mean**2).clip(min=0))
        varies = deviation > CHANGED * np.sqrt(square)
        view = replace(view, channels=Channels(mean, np.where(varies, deviation, 0.0)))
        found = [view[part].summaries for part in chunks(len(view), 8 * view.row_numbers)]
        moments, blocks = (np.concatenate(part) for part in zip(*found, strict=True))
        return replace(view, found=(moments, blocks))

    def _is_step(self) -> bool:
        if self.answer is None or self.inputs.size != self.outputs.size:
            return False
        answer = self.answer.reshape(len(self), -1)
        step = ((answer - flat(self.fields)) ** 2).mean()
        return bool(step < ((answer - answer.mean(axis=0)) ** 2).mean())

    @property
    def bare(self) -> "FieldView":
        """The view without points, for queries."""
        return replace(self[:0], found=None)

    def of_queries(self, features: Features) -> "FieldView":
        """Queries as fields, with their predictions."""
        return replace(
            self,
            inputs=features.inputs,
            outputs=features.prediction,
            found=None,
            support_distance=features.support_distance,
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | np.ndarray) -> "FieldView":
        found, distance = self.found, self.support_distance
        return replace(
            self,
            inputs=self.inputs[rows],
            outputs=self.outputs[rows],
            found=None if found is None else (found[0][rows], found[1][rows]),
            support_distance=None if distance is None else distance[rows],
        )

    @property
    def row_numbers(self) -> int:
        """About how many numbers the scores of one field need."""
        from geoq.regions.field_scores import N_POSITIONS, window_sizes

        window = math.prod(window_sizes(self.grid))
        n_channels = self.inputs[:1].size // max(1, self.n_cells * len(self.inputs[:1]))
        n_more = n_channels if self.has_answer else 0
        return 2 * (n_channels + n_more) * (self.n_cells + N_POSITIONS * window)

    def known_to(self, points: "FieldView") -> Bool[np.ndarray, " n"]:
        """Fields have no categories."""
        del points
        return np.ones(len(self), dtype=bool)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the cells."""
        return self.layout.cells

    @property
    def n_cells(self) -> int:
        """The number of cells."""
        return math.prod(self.grid)

    @cached_property
    def fields(self) -> Grids:
        """The inputs in the units of the user."""
        raw = self.coordinates.inverse(self.inputs).astype(float)
        return self._ordered(raw.reshape(len(raw), -1, *self.grid))

    @property
    def has_answer(self) -> bool:
        """Whether the output lives on the cells of the input."""
        return self.layout.holds(self.outputs.shape[1:])

    @cached_property
    def answer(self) -> Grids | None:
        """The output or its change from the input; None if the output lives on other cells."""
        if not self.has_answer:
            return None
        outputs = np.nan_to_num(self.outputs.astype(float))
        answer = self._ordered(outputs.reshape(len(outputs), -1, *self.grid))
        return answer - self.fields if self.changes else answer

    @property
    def joined(self) -> Grids:
        """Input and answer as channels of one field."""
        assert self.answer is not None
        return np.concatenate([self.fields, self.answer], axis=1)

    def _ordered(self, fields: Grids) -> Grids:
        order = self.layout.order
        return fields if order is None else fields[..., order]

    @property
    def moments(self) -> Float[np.ndarray, " n n_moments"]:
        r"""Mean and logarithm of the deviation of each channel.

        .. math:: m_c / \sigma_c, \qquad \tfrac12 \ln(v_c / \sigma_c^2 + 10^{-4})
        """
        return self.summaries[0]

    @property
    def blocks(self) -> Float[np.ndarray, " n n_blocks"]:
        """Means over blocks of cells in deviations of the channel; the cells themselves if there are few."""
        return self.summaries[1]

    @cached_property
    def summaries(self) -> tuple[np.ndarray, np.ndarray]:
        """Moments and blocks."""
        if self.found is not None:
            return self.found
        assert self.channels is not None
        mean, scale = self.channels.mean, self.channels.scale
        cells = self.fields.reshape(len(self), len(mean), -1) / scale[:, None]
        size = 0.5 * np.log(cells.var(axis=2) + VARIANCE_FLOOR)
        moments = np.concatenate([cells.mean(axis=2), size], axis=1)
        standard = cells - (mean / scale)[:, None]
        standard = standard.reshape(self.fields.shape)
        coarser = (math.prod(self.fields.shape[1:]) / N_BLOCKS) ** (1 / len(self.grid))
        if coarser > 1:
            for axis, n in enumerate(self.grid, start=2):
                standard = _block_means(standard, axis, max(1, int(n / coarser)))
        return moments, flat(standard)

    def cell(self, place: tuple[int, ...]) -> str:
        """A cell or a node of the user in words."""
        if self.layout.order is not None:
            return f"node {self.layout.order[place[0]]}"
        return f"cell {place[0] if len(place) == 1 else place}"

    def check_names(self, names: Names | None) -> None:
        """Raise unless there is one name per channel."""
        n_channels = len(self.channels.mean) if self.channels else 0
        if names is not None and len(names) != n_channels:
            raise ValueError(
                f"names has {len(names)} entries, but the inputs have {n_channels} channels; pass one name per channel."
            )

    def label(self, channel: int, names: Names | None) -> str:
        """The name of a channel."""
        return f"channel {channel if names is None else names[channel]}"

    def explain_inside(self, scores: Sequence[Any], query: "FieldView", names: Names | None) -> str:
        """Why a query is safe."""
        del scores, query, names
        return "windows, moments and patterns of the field are within the region of the held-out fields"


View: TypeAlias = TableView | FieldView


def _block_means(fields: Grids, axis: int, n_blocks: int) -> Grids:
    """Means over blocks along an axis; blocks of an axis that is no multiple of them overlap by a cell."""
    n = fields.shape[axis]
    starts = np.arange(n_blocks) * n // n_blocks
    stops = -(-(np.arange(1, n_blocks + 1) * n) // n_blocks)
    total = np.concatenate(
        [np.zeros_like(fields.take([0], axis)), fields.cumsum(axis=axis)], axis=axis
    )
    length = (stops - starts).reshape(-1, *(1,) * (fields.ndim - axis - 1))
    means: np.ndarray = (total.take(stops, axis) - total.take(starts, axis)) / length
    return means
