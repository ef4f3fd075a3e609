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
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from geoq.arrays import flat
from geoq.checks import warn
from geoq.data.table import Names, Schema, cell, first_few, listed
from geoq.quantiles import inverse_cdf_quantile

logger = logging.getLogger(__name__)

# An input is used as a logarithm if it is positive, has at least this many distinct values, spans this factor, and its middle
# nine tenths span the second factor. A uniform input from 0 on spans 19 there, whatever its smallest value is.
MIN_DISTINCT, MIN_SPAN, MIN_MIDDLE_SPAN = 10, 1e3, 1e2
# A constant input has changed if it differs by more than this fraction of its value; a constant 0 has no such fraction.
CHANGED = 1e-6
# The distance between two categories, and between a missing value and the mean: the range of a uniform number.
UNEQUAL = math.sqrt(12)
# A category is an identifier if more than this fraction of its levels occur once, and there are more levels than ``MAX_LEVELS``.
MAX_ONCE, MAX_LEVELS = 0.5, 20
# A gap between two levels is regular if it is at most this many times the larger gap beside it, and at least ``MIN_GAPS`` of them exist.
REGULAR, MIN_GAPS = 1.5, 3
# Farther from the data than this many standard deviations, the square of a distance overflows.
FARTHEST = 1e15


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


class Coordinate(NamedTuple):
    """One coordinate of a column: what it is, the level or the period, and its standardisation."""

    part: Part
    level: float = 0.0
    mean: float = 0.0
    scale: float = 1.0
    log: bool = False
    constant: bool = False


@runtime_checkable
class Kind(Protocol):
    """What a column is: it turns the values of the data, without missing ones, into coordinates."""

    def coordinates(self, values: np.ndarray, missing: float, /) -> list[Coordinate]: ...


@dataclass(frozen=True)
class Number:
    """A number, standardised by its mean and standard deviation."""

    def coordinates(self, values: np.ndarray, missing: float) -> list[Coordinate]:
        return [_value(values, log=False), *_missing(missing)]


@dataclass(frozen=True)
class Log:
    """A positive number, of which the logarithm is standardised."""

    def coordinates(self, values: np.ndarray, missing: float) -> list[Coordinate]:
        return [_value(values, log=True), *_missing(missing)]


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

    def coordinates(self, values: np.ndarray, missing: float) -> list[Coordinate]:
        constant = len(np.unique(np.mod(values, self.period))) <= 1
        phase = 2 * math.pi * values[:1] / self.period
        circle = [
            Coordinate(part, self.period, mean if constant else 0.0, constant=constant)
            for part, mean in (
                (Part.SINE, float(np.sin(phase).sum())),
                (Part.COSINE, float(np.cos(phase).sum())),
            )
        ]
        ends = (Part.BELOW, values.min(initial=np.inf)), (Part.ABOVE, values.max(initial=-np.inf))
        limits = [Coordinate(part, float(end), constant=True) for part, end in ends]
        return [*circle, *limits, *_missing(missing)]


@dataclass(frozen=True)
class Category:
    """Levels that are equal or not; all different levels are equally far apart."""

    def coordinates(self, values: np.ndarray, missing: float) -> list[Coordinate]:
        levels, counts = np.unique(values, return_counts=True)
        scale = math.sqrt(2) / UNEQUAL
        frequency = (1 - missing) * counts / max(1, len(values))
        present = [
            Coordinate(Part.LEVEL, float(level), float(mean), scale)
            if mean < 1
            else Coordinate(Part.LEVEL, float(level), 1.0, constant=True)
            for level, mean in zip(levels, frequency, strict=True)
        ]
        unseen = Coordinate(Part.UNSEEN, scale=scale, constant=True)
        return [*present, *_missing(missing, scale), unseen]


@dataclass(frozen=True)
class Ignored:
    """A column that the geometry does not use; the model receives it."""

    def coordinates(self, values: np.ndarray, missing: float) -> list[Coordinate]:
        del values, missing
        return []


def _value(values: np.ndarray, *, log: bool) -> Coordinate:
    own = np.log(values) if log else values
    constant = len(own) == 0 or bool(own.min() == own.max())
    mean = float(own.mean()) if len(own) else 0.0
    scale = abs(mean) if constant else float(own.std())
    return Coordinate(Part.VALUE, 0.0, mean, scale or 1.0, log, constant)


def _missing(fraction: float, scale: float = 1 / UNEQUAL) -> list[Coordinate]:
    """The indicator of missing values; none if the data have none, because such a query has no answer."""
    if not fraction:
        return []
    constant = fraction == 1
    return [Coordinate(Part.MISSING, mean=fraction, scale=scale, constant=constant)]


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

    Attributes:
        mean: mean of each coordinate, after the logarithm.
        scale: standard deviation of each coordinate, after the logarithm.
        log: which coordinates are logarithms.
        constant: which coordinates have a single value in the data.
        column: the number of the column that each coordinate comes from; None for an array whose inputs are numbers.
        part: what each coordinate of a column is, a ``Part``.
        level: the level of an indicator, or the period of a sine.
        n_columns: the number of columns.
        gaps: the gaps between the levels of a lattice, ``regular_gaps``; None for other data.
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
    def fit(points: Float[np.ndarray, " n *coordinates"], *, logarithms: bool) -> "Coordinates":
        """Mean and scale of each input of an array."""
        low, high = points.min(axis=0), points.max(axis=0)
        constant = np.asarray(low == high)
        log = np.zeros_like(constant)
        if logarithms:
            log = np.asarray((low > 0) & (high >= MIN_SPAN * low) & ~constant)
            for place in np.argwhere(log):
                column = points[(slice(None), *place)]
                ends = [inverse_cdf_quantile(column, q) for q in (0.05, 0.95)]
                distinct = len(np.unique(column)) >= MIN_DISTINCT
                log[tuple(place)] = distinct and ends[1] >= MIN_MIDDLE_SPAN * ends[0]
        return Coordinates(*spread(_log_where(points, log)), log, constant)

    @staticmethod
    def of_columns(columns: list[list[Coordinate]]) -> "Coordinates":
        """The coordinates of all columns, one after the other."""
        each = [part for column in columns for part in column]

        def numbers(name: str) -> np.ndarray:
            return np.array([float(getattr(part, name)) for part in each])

        return Coordinates(
            mean=numbers("mean"),
            scale=numbers("scale"),
            log=numbers("log") > 0,
            constant=numbers("constant") > 0,
            column=np.array([j for j, own in enumerate(columns) for _ in own]),
            part=numbers("part").astype(int),
            level=numbers("level"),
            n_columns=len(columns),
        )

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
        return np.isin(self.part, [int(part) for part in parts])

    @property
    def varies(self) -> Bool[np.ndarray, " m"]:
        """Which coordinates vary in the data."""
        return ~self.constant.reshape(-1)

    @property
    def inputs_that_vary(self) -> Bool[np.ndarray, " n_inputs"]:
        """Which inputs have a coordinate that varies in the data."""
        found = np.zeros(math.prod(self.input_shape), dtype=bool)
        found[self.input_of[self.varies]] = True
        return found

    def __call__(
        self, points: Float[np.ndarray, " n *inputs"]
    ) -> Float[np.ndarray, " n *coordinates"]:
        if self.column is None:
            values: np.ndarray = (_log_where(points, self.log) - self.mean) / self.scale
            return values
        return self._of_table(points)

    def _of_table(self, points: Float[np.ndarray, " n c"]) -> Float[np.ndarray, " n m"]:
        assert self.level is not None
        own = points[:, self.column]
        absent = np.isnan(own)
        found = _log_where(own, self.log)
        circle = self.is_part(Part.SINE, Part.COSINE)
        phase = 2 * math.pi * own / np.where(circle, self.level, 1)
        for part, values in (
            (Part.LEVEL, own == self.level),
            (Part.SINE, np.sin(phase)),
            (Part.COSINE, np.cos(phase)),
            (Part.MISSING, absent),
            (Part.UNSEEN, self._unseen(own)),
            (Part.BELOW, own < self.level),
            (Part.ABOVE, own > self.level),
        ):
            found = np.where(self.is_part(part), values, found)
        # A missing number has the coordinate of the mean, beside its indicator.
        missing = absent & (self.is_part(Part.VALUE) | circle)
        standardised = np.where(missing, 0.0, (found - self.mean) / self.scale)
        return standardised.clip(-FARTHEST, FARTHEST)

    def within_periods(self, points: Float[np.ndarray, " n c"]) -> Float[np.ndarray, " n c"]:
        """The inputs, of which periodic ones beyond their range in the data are moved into it by whole periods."""
        moved = points.copy()
        for j in np.flatnonzero(self.is_part(Part.SINE)):
            assert self.level is not None
            own, low, high = points[:, self.input_of[j]], self.level[j + 2], self.level[j + 3]
            inside = low + np.mod(own - low, self.level[j])
            moved[:, self.input_of[j]] = np.where((own < low) | (own > high), inside, own)
        return moved

    def _unseen(self, own: Float[np.ndarray, " n m"]) -> Bool[np.ndarray, " n m"]:
        """Whether the category of each coordinate's column has a level that the data do not contain."""
        unseen = np.zeros_like(own, dtype=bool)
        for place in np.flatnonzero(self.is_part(Part.UNSEEN)):
            levels = self.levels(int(self.input_of[place]))
            value = own[:, place]
            unseen[:, place] = ~(np.isin(value, levels) | np.isnan(value))
        return unseen

    def at_levels(self, coordinates: Float[np.ndarray, " n *m"]) -> Float[np.ndarray, " n k"]:
        """One row of coordinates per query, of which those between levels of a lattice are moved to the nearer level."""
        rows = flat(coordinates).astype(float)
        return rows if self.gaps is None else _at_levels(rows, self.gaps)

    def inverse(
        self, coordinates: Float[np.ndarray, " n *coordinates"]
    ) -> Float[np.ndarray, " n *coordinates"]:
        """The inputs that have these coordinates, one per coordinate."""
        values = self.mean + self.scale * coordinates
        if self.log.any():
            values = np.where(self.log, np.exp(np.where(self.log, values, 0.0)), values)
        return values

    def unusable(self, points: Float[np.ndarray, " n *inputs"]) -> np.ndarray | None:
        """Which rows have no distance to the data: infinite or missing values, or values too far away. None if there are none."""
        if self.column is not None:
            bad = self._newly_missing(points) | np.isinf(points)
        else:
            # The inputs themselves count too: the logarithm of a negative infinite number is finite here.
            bad = ~((abs(self(points)) <= FARTHEST) & (points > -math.inf))
        rows = np.asarray(flat(bad).any(axis=1))
        return rows if rows.any() else None

    def _newly_missing(self, points: np.ndarray) -> np.ndarray:
        """Which values are missing in columns that are never missing in the data, and are used."""
        number = np.arange(points.shape[1])
        allowed = np.isin(number, self.input_of[self.is_part(Part.MISSING)])
        bad: np.ndarray = np.isnan(points) & np.isin(number, self.input_of) & ~allowed
        return bad

    def why_unusable(
        self, point: Float[np.ndarray, " *inputs"], names: Names | None, noun: str
    ) -> str:
        """Which input of a query has no distance to the data, and what to do; empty if all have one."""
        if self.column is not None:
            missing = self._newly_missing(point[None])[0] | np.isinf(point)
            if not missing.any():
                return ""
            j = int(missing.argmax())
            name = j if names is None else names[j]
            if np.isinf(point[j]):
                return (
                    f"{noun} {name} is {point[j]:g}; replace it by a number, or leave this row out"
                )
            return f"{noun} {name} is missing, but it is never missing in the data; fill it in, or leave this row out"
        far = ~(abs(self(point[None])[0]) <= FARTHEST)
        for unusable, advice in (
            (~np.isfinite(point), "; replace it by a number, or leave this row out"),
            (far, ", which is too far from the data for a distance; check its unit"),
        ):
            if unusable.any():
                place = tuple(np.argwhere(unusable)[0].tolist())
                number = int(np.ravel_multi_index(place, point.shape)) if place else 0
                known = ", ".join(map(str, place)) if names is None else names[number]
                return f"{f'{noun} {known}'.rstrip()} is {point[place]:g}{advice}"
        return ""

    def changed(
        self, coordinates: Float[np.ndarray, " n *coordinates"]
    ) -> Bool[np.ndarray, " n *coordinates"]:
        """Which coordinates that are constant in the data differ from their value there, beyond rounding."""
        allowed = np.where(self.mean == 0, 0.0, CHANGED)
        different: np.ndarray = self.constant & (abs(coordinates) > allowed)
        return different

    def changed_rows(
        self, coordinates: Float[np.ndarray, " n *coordinates"]
    ) -> Bool[np.ndarray, " n"]:
        """Which queries change a coordinate that is constant in the data."""
        if not self.constant.any():
            return np.zeros(len(coordinates), dtype=bool)
        return np.asarray(flat(self.changed(coordinates)).any(axis=1))

    def why_changed(
        self,
        coordinates: Float[np.ndarray, " 1 *coordinates"],
        query: Any,
        names: Any,
        noun: str = "input",
    ) -> str:
        """What in a query does not occur in the data; empty if it changes no constant coordinate.

        ``query`` has the one row, and ``names`` the names of the inputs or the schema of a table.
        """
        found = np.flatnonzero(self.changed(coordinates)).tolist()
        # An indicator of a level changes together with ``UNSEEN``, which is the more specific one.
        found.sort(key=lambda j: not self.is_part(Part.UNSEEN)[j])
        if not found:
            return ""
        j = found[0]
        number = int(self.input_of[j])
        constant = float(self.inverse(0 * coordinates).reshape(-1)[j])
        label = f"{noun} {number if names is None else names[number]}"
        if self.column is None:
            value = f"{float(self.inverse(coordinates).reshape(-1)[j]):.4g}"
        else:
            value = cell(query, 0, number)
        if self.is_part(Part.MISSING)[j]:
            return f"{label} is {value}, but it is always missing in the data"

        def text(at: float) -> str:
            return names.columns[number].text(at) if isinstance(names, Schema) else f"{at:.4g}"

        if self.is_part(Part.BELOW, Part.ABOVE)[j]:
            return f"{label} is {value}, outside its range in the data, and the model answers otherwise at the same phase inside it"
        if self.is_part(Part.LEVEL, Part.UNSEEN)[j]:
            levels = [text(level) for level in self.levels(number)]
            return f"{label} is {value}, which does not occur in the data; they contain {first_few(levels)}"
        return f"{label} is {value}, but it is {text(constant)} in all the data, so its effect is unknown"

    def levels(self, column: int) -> list[float]:
        """The levels of a category in the data; empty for other columns."""
        if self.level is None:
            return []
        own = self.is_part(Part.LEVEL) & (self.input_of == column)
        return [float(level) for level in self.level[own]]


def regular_gaps(values: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n_gaps 3"]:
    """Gaps of lattices, such as in factorial designs: the number of the column, the level below and the level above.

    Both levels occur in several distinct rows, and a gap beside them is about as wide, so the gap is the design and no hole in it. Fewer than
    three such gaps are too few to know what happens between levels.
    """
    found = [np.zeros((0, 3))]
    for j, column in enumerate(np.unique(values.round(9), axis=0).T):
        levels, count = np.unique(column, return_counts=True)
        gap = np.diff(levels)
        beside = np.pad(gap, 1)
        regular = np.flatnonzero(
            (np.minimum(count[:-1], count[1:]) > 1)
            & (gap <= REGULAR * np.maximum(beside[:-2], beside[2:]))
        )
        if len(regular) >= MIN_GAPS:
            found.append(np.column_stack([0 * regular + j, levels[regular], levels[regular + 1]]))
    return np.concatenate(found)


def _at_levels(
    values: Float[np.ndarray, " n k"], gaps: Float[np.ndarray, " n_gaps 3"]
) -> Float[np.ndarray, " n k"]:
    """The values, of which those in these gaps are moved to the nearer level."""
    moved = values.copy()
    for j in np.unique(gaps[:, 0]).astype(int):
        own = values[:, j]
        below, above = gaps[gaps[:, 0] == j, 1:].T
        place = (np.searchsorted(below, own) - 1).clip(min=0)
        below, above = below[place], above[place]
        nearer = np.where(own - below < above - own, below, above)
        moved[:, j] = np.where((below < own) & (own < above), nearer, own)
    return moved


def _log_where(points: np.ndarray, log: np.ndarray) -> np.ndarray:
    """The points, with logarithms where ``log`` is true."""
    if not log.any():
        return points
    tiny = np.finfo(points.dtype).tiny
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(log, np.log(np.maximum(points, tiny)), points)


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
    found = []
    for j, column in enumerate(points.T):
        name = f"input {j}" if schema is None else f"column {schema.names[j]!r}"
        present = column[~np.isnan(column)]
        level = schema is not None and schema.columns[j].kind == "level"
        kind = chosen.get(j)
        if kind is None and level:
            kind = _automatic_category(present, name, len(points))
        elif kind is None:
            kind = _automatic_number(present, name, logarithms=logarithms)
        elif level and not isinstance(kind, Category | Ignored):
            raise TypeError(
                f"{name} holds categories, but its kind is {kind!r}; convert the column to numbers, or pass Category()."
            )
        if isinstance(kind, Log) and len(present) and present.min() <= 0:
            raise ValueError(
                f"{name} has the value {present.min():.4g}, but Log() needs positive values; pass Number() for it."
            )
        missing = 1 - len(present) / len(column)
        found.append(kind.coordinates(present, missing))
    if not any(found):
        raise ValueError("all columns are ignored; leave at least one to measure distances.")
    return Coordinates.of_columns(found)


def _by_number(kinds: Mapping[Any, Kind], n_columns: int, schema: Schema | None) -> dict[int, Kind]:
    numbers = {} if schema is None else {n: j for j, n in enumerate(schema.names)}
    found = {}
    for key, kind in kinds.items():
        if key in numbers:
            found[numbers[key]] = kind
        elif isinstance(key, int) and -n_columns <= key < n_columns:
            found[key % n_columns] = kind
        else:
            has = f"0 to {n_columns - 1}" if schema is None else listed(schema.names)
            raise ValueError(
                f"Columns describes {key!r}, but x has the columns {has}; correct the key."
            )
    return found


def _automatic_number(values: np.ndarray, name: str, *, logarithms: bool) -> Kind:
    if not (len(values) and Coordinates.fit(values, logarithms=logarithms).log):
        return Number()
    decades = math.log10(float(values.max() / values.min()))
    logger.info(
        "%s spans %.1f decades and is used as a logarithm; pass representation=Columns({...: Number()}) to use it as it is",
        name,
        decades,
    )
    return Log()


def _automatic_category(values: np.ndarray, name: str, n_rows: int) -> Kind:
    _, counts = np.unique(values, return_counts=True)
    once = int((counts == 1).sum())
    if len(counts) > MAX_LEVELS and once > MAX_ONCE * len(counts):
        warn(
            f"{name} has {len(counts)} different values in {n_rows} rows, most of them once, so it looks like an identifier and "
            "distances ignore it; drop it, or pass representation=Columns({...: Category()}) to use it."
        )
        return Ignored()
    return Category()
