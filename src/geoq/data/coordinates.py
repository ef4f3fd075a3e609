r"""The coordinates T of the inputs, in which distances are measured.

An input of an array is a number. A column of a table is a number, a logarithm, a periodic number or a category:

==========  =========================================  ======================================================================
kind        coordinates                                distance between two values
==========  =========================================  ======================================================================
number      standardised value                         difference in standard deviations
logarithm   standardised logarithm                     ratio, in standard deviations of the logarithm
periodic    sine and cosine of the phase               chord of a circle of radius 1
category    one indicator per level                    the same for all pairs of different levels, as in Gower's coefficient
==========  =========================================  ======================================================================

Positive numbers that span several orders of magnitude are used as logarithms. Different categories are as far apart as the two ends
of a uniformly distributed number, :math:`\sqrt{12}` standard deviations. A missing value of a number is an indicator at the same
distance; a missing category is a level of its own. A level that the data do not contain changes a coordinate that is constant in the
data, and such a query is never safe. A missing value in a column without missing values in the data gives no answer.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from geoq.arrays import flat
from geoq.checks import warn
from geoq.data.table import Names, Schema, cell, first_few, in_words, listed
from geoq.quantiles import inverse_cdf_quantile

logger = logging.getLogger(__name__)

# An input is used as a logarithm if it is positive, has at least this many distinct values, its middle nine tenths span this factor, and
# all of it this power of the factor. A uniform input from 0 on spans 19 there, whatever its smallest value is.
MIN_DISTINCT, MIN_MIDDLE_SPAN, WHOLE = 10, 1e2, 1.5
# A constant input has changed if it differs by more than this fraction of its value; a constant 0 has no such fraction.
CHANGED = 1e-6
# The distance between two categories, and between a missing value and the mean: the range of a uniform number.
UNEQUAL = math.sqrt(12)
# A category is an identifier if more than this fraction of its levels occur once, and there are more levels than ``MAX_LEVELS``.
MAX_ONCE, MAX_LEVELS = 0.5, 20
# A gap between two levels is regular if it is at most this many times the larger gap beside it, and at least ``MIN_GAPS`` of them exist.
REGULAR, MIN_GAPS = 1.5, 3
# Up to this fraction of single runs beside a lattice leave it a lattice.
FEW = 0.1
# Farther from the data than this many standard deviations, the square of a distance overflows.
FARTHEST = 1e15

# Inputs of the user, and coordinates T.
Inputs: TypeAlias = Float[np.ndarray, " n *inputs"]
Rows: TypeAlias = Float[np.ndarray, " n *coordinates"]


class Part(IntEnum):
    """What a coordinate of a column is."""

    VALUE = 0
    LEVEL = 1
    SINE = 2
    COSINE = 3
    MISSING = 4
    UNSEEN = 5
    BELOW = 6
    ABOVE = 7


@dataclass(frozen=True)
class Number:
    """A number, standardised by its mean and standard deviation."""


@dataclass(frozen=True)
class Log:
    """A positive number, of which the logarithm is standardised."""


@dataclass(frozen=True)
class Periodic:
    """A number on a circle, such as an hour of the day or an angle.

    Attributes:
        period: the length of the period, in the units of the column.
    """

    period: float

    def __post_init__(self) -> None:
        if not 0 < self.period < math.inf:
            raise ValueError(f"Periodic(period={self.period}): period must be a positive number.")


@dataclass(frozen=True)
class Category:
    """Levels that are equal or not; all different levels are equally far apart."""


@dataclass(frozen=True)
class Ignored:
    """A column that the geometry does not use; the model receives it."""


Kind: TypeAlias = Number | Log | Periodic | Category | Ignored


def _rows_of(kind: Kind, values: np.ndarray, missing: float) -> list[tuple[Any, ...]]:
    """Part, level, mean and scale of each coordinate of a column, and whether it is a logarithm or constant."""
    scale, unseen = 1 / UNEQUAL, []
    if isinstance(kind, Ignored):
        return []
    if isinstance(kind, Category):
        levels, counts = np.unique(values, return_counts=True)
        scale = math.sqrt(2) / UNEQUAL
        unseen = [(Part.UNSEEN, 0, 0, scale, False, True)]
        frequency = (1 - missing) * counts / max(1, len(values))
        found: Any = [
            (Part.LEVEL, level, mean, scale if mean < 1 else 1, False, mean == 1)
            for level, mean in zip(levels, frequency, strict=True)
        ]
    elif isinstance(kind, Periodic):
        constant = len(np.unique(np.mod(values, kind.period))) <= 1
        phase = 2 * math.pi * values[:1] / kind.period
        found = [
            (Part.SINE, kind.period, constant * np.sin(phase).sum(), 1, False, constant),
            (Part.COSINE, kind.period, constant * np.cos(phase).sum(), 1, False, constant),
            (Part.BELOW, values.min(initial=np.inf), 0, 1, False, True),
            (Part.ABOVE, values.max(initial=-np.inf), 0, 1, False, True),
        ]
    else:
        log = isinstance(kind, Log)
        own = (np.log(values) if log else values) if len(values) else np.zeros(1)
        found = [(Part.VALUE, 0, *spread(own), log, own.min() == own.max())]
    # Without missing values in the data, a query with one has no answer.
    absent = [(Part.MISSING, 0, missing, scale, False, missing == 1)] if missing else []
    return [*found, *absent, *unseen]


def spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column: the population deviation, or the absolute value (1 for 0) of a constant column."""
    mean, scale = np.asarray(values.mean(axis=0)), values.std(axis=0)
    # Exact equality is tested, because rounding gives a constant column a deviation of 1e-17.
    constant = values.min(axis=0) == values.max(axis=0)
    scale = np.where(constant | (scale == 0), abs(mean), scale)
    return mean, np.where(scale == 0, 1.0, scale).astype(values.dtype)


@dataclass(frozen=True)
class Coordinates:
    r"""T: each coordinate standardised by its mean and standard deviation, after a logarithm where ``log`` is true.

    .. math:: T_j(x) = (x_j - \mu_j) / \sigma_j \quad \text{or} \quad (\ln x_j - \mu_j) / \sigma_j

    The scale of a constant input is its absolute value, or 1 if it is 0. Without logarithms and columns this is the paper's nu.
    Each coordinate of a table has the number of its ``column``, a ``part``, and the ``level`` of an indicator or the period of a sine.
    The ``gaps`` are the ``regular_gaps`` of a lattice; None for other data.
    """

    mean: Float[np.ndarray, " *coordinates"]
    scale: Float[np.ndarray, " *coordinates"]
    log: Bool[np.ndarray, " *coordinates"]
    constant: Bool[np.ndarray, " *coordinates"]
    column: Int[np.ndarray, " m"] | None = None
    part: Int[np.ndarray, " m"] | None = None
    level: Float[np.ndarray, " m"] | None = None
    n_columns: int = 0
    gaps: Float[np.ndarray, " n_gaps 3"] | None = None

    @staticmethod
    def fit(points: Inputs, *, logarithms: bool, middle: float = MIN_MIDDLE_SPAN) -> "Coordinates":
        """Mean and scale of each input of an array; a logarithm needs positive values whose middle nine tenths span ``middle``."""
        constant = np.asarray(points.min(axis=0) == points.max(axis=0))
        log = np.zeros_like(constant)
        if logarithms:
            found = [_spans_decades(values, middle) for values in flat(points).T]
            log = np.array(found).reshape(constant.shape)
        return Coordinates(*spread(_log_where(points, log)), log, constant)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: the number of columns of a table."""
        return self.mean.shape if self.column is None else (self.n_columns,)

    @property
    def input_of(self) -> Int[np.ndarray, " m"]:
        """The number of the input that each coordinate comes from."""
        return np.arange(self.mean.size) if self.column is None else self.column

    def is_part(self, *parts: Part) -> Bool[np.ndarray, " m"]:
        """Which coordinates are of these kinds."""
        if self.part is None:
            return np.full(self.mean.size, Part.VALUE in parts)
        return np.isin(self.part, parts)

    @property
    def varies(self) -> Bool[np.ndarray, " m"]:
        """Which coordinates vary in the data."""
        return ~self.constant.reshape(-1)

    @property
    def inputs_that_vary(self) -> Bool[np.ndarray, " n_inputs"]:
        """Which inputs have a coordinate that varies in the data."""
        return np.isin(np.arange(math.prod(self.input_shape)), self.input_of[self.varies])

    def __call__(self, points: Inputs) -> Rows:
        """T of these inputs."""
        if self.column is None:
            values: np.ndarray = (_log_where(points, self.log) - self.mean) / self.scale
            return values
        assert self.level is not None
        own = points[:, self.column]
        absent, circle = np.isnan(own), self.is_part(Part.SINE, Part.COSINE)
        phase = 2 * math.pi * own / np.where(circle, self.level, 1)
        found = _log_where(own, self.log)
        for part, values in (
            (Part.LEVEL, own == self.level),
            (Part.SINE, np.sin(phase)),
            (Part.COSINE, np.cos(phase)),
            (Part.MISSING, absent),
            (Part.BELOW, own < self.level),
            (Part.ABOVE, own > self.level),
        ):
            found = np.where(self.is_part(part), values, found)
        for j in np.flatnonzero(self.is_part(Part.UNSEEN)):
            found[:, j] = ~(np.isin(own[:, j], self._levels(int(self.column[j]))) | absent[:, j])
        # A missing number has the coordinate of the mean, beside its indicator.
        missing = absent & (self.is_part(Part.VALUE) | circle)
        standardised = np.where(missing, 0.0, (found - self.mean) / self.scale)
        return standardised.clip(-FARTHEST, FARTHEST)

    def within_periods(self, points: Inputs) -> Inputs:
        """The inputs, of which periodic ones beyond their range in the data are moved into it by whole periods."""
        moved = points.copy()
        for j in np.flatnonzero(self.is_part(Part.SINE)):
            assert self.level is not None
            own, low, high = points[:, self.input_of[j]], self.level[j + 2], self.level[j + 3]
            inside = low + np.mod(own - low, self.level[j])
            moved[:, self.input_of[j]] = np.where((own < low) | (own > high), inside, own)
        return moved

    def at_levels(self, coordinates: Rows) -> Float[np.ndarray, " n m"]:
        """One row of coordinates per query, of which those between levels of a lattice are moved to the nearer level."""
        rows = flat(coordinates).astype(float)
        gaps = np.zeros((0, 3)) if self.gaps is None else self.gaps
        for j in np.unique(gaps[:, 0]).astype(int):
            own = rows[:, j]
            below, above = gaps[gaps[:, 0] == j, 1:].T
            place = (np.searchsorted(below, own) - 1).clip(min=0)
            below, above = below[place], above[place]
            nearer = np.where(own - below < above - own, below, above)
            rows[:, j] = np.where((below < own) & (own < above), nearer, own)
        return rows

    def inverse(self, coordinates: Rows) -> Rows:
        """The inputs that have these coordinates, one per coordinate."""
        values = self.mean + self.scale * coordinates
        if not self.log.any():
            return values
        return np.where(self.log, np.exp(np.where(self.log, values, 0.0)), values)

    def unusable(self, points: Inputs) -> Bool[np.ndarray, " n k"]:
        """Which values have no distance to the data: infinite ones, newly missing ones, and those too far away."""
        if self.column is None:
            # The inputs themselves count too: the logarithm of a negative infinite number is finite here.
            return ~flat((abs(self(points)) <= FARTHEST) & (points > -math.inf))
        columns = np.arange(self.n_columns)
        sometimes_missing = np.isin(columns, self.column[self.is_part(Part.MISSING)])
        never_missing = np.isin(columns, self.column) & ~sometimes_missing
        return np.isinf(points) | (np.isnan(points) & never_missing)

    def why_unusable(self, point: np.ndarray, names: Names | None, noun: str) -> str:
        """Which input of a query has no distance to the data, and what to do; empty if all have one."""
        found = np.flatnonzero(self.unusable(point[None])).tolist()
        if not found:
            return ""
        place = ", ".join(map(str, np.unravel_index(found[0], point.shape)))
        fits = names is not None and len(names) == point.size  # names of channels do not name cells
        name = names[found[0]] if place and names is not None and fits else place
        label, value = f"{noun} {name}".rstrip(), point.flat[found[0]]
        if np.isfinite(value):
            return f"{label} is {value:g}, which is too far from the data for a distance; check its unit"
        if np.isnan(value) and self.column is not None:
            return f"{label} is missing, but it is never missing in the data; fill it in, or leave this row out"
        return f"{label} is {value:g}; replace it by a number, or leave this row out"

    def changed(self, coordinates: Rows) -> Bool[np.ndarray, " n m"]:
        """Which coordinates that are constant in the data differ from their value there, beyond rounding."""
        allowed = np.where(self.mean == 0, 0.0, CHANGED)
        return flat(self.constant & (abs(coordinates) > allowed))

    def why_changed(
        self, coordinates: Rows, query: Any, names: Names | None, noun: str = "input"
    ) -> str:
        """What in a query does not occur in the data; empty if it changes no constant coordinate.

        ``query`` has the one row, and ``names`` the names of the inputs or the schema of a table.
        """
        found = np.flatnonzero(self.changed(coordinates))
        if not len(found):
            return ""
        j = int(found[0])
        number = int(self.input_of[j])
        label = f"{noun} {number if names is None else names[number]} is {cell(query, number)}"
        if self.is_part(Part.MISSING)[j]:
            return f"{label}, but it is always missing in the data"
        if self.is_part(Part.BELOW, Part.ABOVE)[j]:
            return f"{label}, outside its range in the data, and the model answers otherwise at the same phase inside it"
        if self.is_part(Part.LEVEL, Part.UNSEEN)[j]:
            levels = [in_words(names, number, level) for level in self._levels(number)]
            return f"{label}, which does not occur in the data; they contain {first_few(levels)}"
        constant = in_words(names, number, float(self.inverse(0 * coordinates).flat[j]))
        return f"{label}, but it is {constant} in all the data, so its effect is unknown"

    def _levels(self, column: int) -> np.ndarray:
        """The levels of a category in the data."""
        assert self.level is not None
        return self.level[self.is_part(Part.LEVEL) & (self.column == column)]


def regular_gaps(values: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n_gaps 3"]:
    """Gaps of lattices, such as in factorial designs: the number of the column, the level below and the level above.

    Both levels occur in several distinct rows, and a gap beside them is about as wide, so the gap is the design and no hole in it. Fewer than
    three such gaps are too few to know what happens between levels.
    """
    found = [np.zeros((0, 3))]
    for j, column in enumerate(np.unique(values.round(9), axis=0).T):
        levels, count = np.unique(column, return_counts=True)
        if (count == 1).sum() <= FEW * len(column):
            levels, count = levels[count > 1], count[count > 1]
        gap = np.diff(levels)
        beside = np.pad(gap, 1)
        regular = np.flatnonzero(
            (np.minimum(count[:-1], count[1:]) > 1)
            & (gap <= REGULAR * np.maximum(beside[:-2], beside[2:]))
        )
        if len(regular) >= MIN_GAPS:
            found.append(np.column_stack([0 * regular + j, levels[regular], levels[regular + 1]]))
    return np.concatenate(found)


def _log_where(points: np.ndarray, log: np.ndarray) -> np.ndarray:
    """The points, with logarithms where ``log`` is true."""
    if not log.any():
        return points
    tiny = np.finfo(points.dtype).tiny
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(log, np.log(np.maximum(points, tiny)), points)


def _spans_decades(values: np.ndarray, middle: float = MIN_MIDDLE_SPAN) -> bool:
    """Whether an input is used as a logarithm."""
    low, high = values.min(initial=np.inf), values.max(initial=0)
    if low <= 0 or high < middle**WHOLE * low or len(np.unique(values)) < MIN_DISTINCT:
        return False
    ends = [inverse_cdf_quantile(values, q) for q in (0.05, 0.95)]
    return bool(ends[1] >= middle * ends[0])


def fit_columns(
    points: Float[np.ndarray, " n c"],
    kinds: Mapping[Any, Kind],
    schema: Schema | None,
    *,
    logarithms: bool,
) -> Coordinates:
    """The coordinates of a table, whose missing values are nan; ``schema`` is None for arrays.

    Columns that are not in ``kinds`` are found from the data, with or without logarithms of positive columns that span three
    decades.
    """
    if points.ndim != 2:
        raise ValueError(
            f"Columns describes tables, but x has shape {tuple(points.shape)}; flatten x, or pass SensitivityMetric()."
        )
    chosen = _by_number(kinds, points.shape[1], schema)
    rows: list[tuple[Any, ...]] = []
    for j, values in enumerate(points.T):
        name = f"input {j}" if schema is None else f"column {schema[j]!r}"
        present = values[~np.isnan(values)]
        level = schema is not None and schema.columns[j].kind == "level"
        kind = chosen.get(j)
        if kind is None and level:
            kind = _category(present, name, len(points))
        elif kind is None and logarithms and _spans_decades(present):
            kind, decades = Log(), math.log10(float(present.max() / present.min()))
            logger.info(
                "%s spans %.1f decades and is used as a logarithm; pass representation=Columns({...: Number()}) to use it as it is",
                name,
                decades,
            )
        elif kind is None:
            kind = Number()
        if level and not isinstance(kind, Category | Ignored):
            raise TypeError(
                f"{name} holds categories, but its kind is {kind!r}; convert the column to numbers, or pass Category()."
            )
        if isinstance(kind, Log) and len(present) and present.min() <= 0:
            raise ValueError(
                f"{name} has the value {present.min():.4g}, but Log() needs positive values; pass Number() for it."
            )
        missing = 1 - len(present) / len(values)
        rows += [(j, *row) for row in _rows_of(kind, present, missing)]
    if not rows:
        raise ValueError("all columns are ignored; leave at least one to measure distances.")
    column, part, level, mean, scale, log, constant = np.array(rows, dtype=float).T.copy()
    parts = column.astype(int), part.astype(int), level
    return Coordinates(mean, scale, log > 0, constant > 0, *parts, n_columns=points.shape[1])


def _by_number(kinds: Mapping[Any, Kind], n_columns: int, schema: Schema | None) -> dict[int, Kind]:
    """The kinds by the numbers of their columns."""
    numbers: dict[Any, int] = {j: j % n_columns for j in range(-n_columns, n_columns)}
    if schema is not None:
        numbers |= {name: j for j, name in enumerate(schema.names)}
    for key in kinds:
        if key not in numbers:
            has = f"0 to {n_columns - 1}" if schema is None else listed(schema.names)
            raise ValueError(
                f"Columns describes {key!r}, but x has the columns {has}; correct the key."
            )
    return {numbers[key]: kind for key, kind in kinds.items()}


def _category(values: np.ndarray, name: str, n_rows: int) -> Kind:
    """The kind of a column of levels."""
    _, counts = np.unique(values, return_counts=True)
    once = int((counts == 1).sum())
    if len(counts) <= MAX_LEVELS or once <= MAX_ONCE * len(counts):
        return Category()
    warn(
        f"{name} has {len(counts)} different values in {n_rows} rows, most of them once, so it looks like an identifier and "
        "distances ignore it; drop it, or pass representation=Columns({...: Category()}) to use it."
    )
    return Ignored()
