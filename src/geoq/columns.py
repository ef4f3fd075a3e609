r"""What the columns of a table are, and their coordinates: numbers, logarithms, periodic numbers, categories.

==========  =========================================  ======================================================================
kind        coordinates                                distance between two values
==========  =========================================  ======================================================================
number      standardised value                         difference in standard deviations
logarithm   standardised logarithm                     ratio, in standard deviations of the logarithm
periodic    sine and cosine of the phase               chord of a circle of radius 1
category    one indicator per level                    the same for all pairs of different levels, as in Gower's coefficient
==========  =========================================  ======================================================================

Different categories are as far apart as the two ends of a uniformly distributed number, :math:`\sqrt{12}` standard deviations.
A missing value of a number is an indicator at the same distance; a missing category is a level of its own. A level that the data
do not contain changes a coordinate that is constant in the data, and such a query is never safe. A missing value in a column
without missing values in the data gives no answer.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.arrays import Rows
from geoq.checks import warn
from geoq.coordinates import Coordinates, changed, log_where
from geoq.table import LevelColumn, Names, Schema, cell, first_few, listed

logger = logging.getLogger(__name__)

# The values of a column in the data, without missing ones.
Values: TypeAlias = Float[Tensor, " n"]

# The distance between two categories, and between a missing value and the mean: the range of a uniform number.
UNEQUAL = math.sqrt(12)
# A category is an identifier if more than this fraction of its levels occur once, and there are more levels than ``MAX_LEVELS``.
MAX_ONCE, MAX_LEVELS = 0.5, 20
# Coordinates are clipped to this, so that their squares are finite.
FARTHEST = 1e15


class Part(IntEnum):
    """What a coordinate of a column is."""

    VALUE = 0
    LEVEL = 1
    SINE = 2
    COSINE = 3
    MISSING = 4
    UNSEEN = 5


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

    def coordinates(self, values: Tensor, missing: float, /) -> list[Coordinate]: ...


@dataclass(frozen=True)
class Number:
    """A number, standardised by its mean and standard deviation."""

    def coordinates(self, values: Values, missing: float) -> list[Coordinate]:
        return [_value(values, log=False), *_missing(missing)]


@dataclass(frozen=True)
class Log:
    """A positive number, of which the logarithm is standardised."""

    def coordinates(self, values: Values, missing: float) -> list[Coordinate]:
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
            raise ValueError(
                f"Periodic(period={self.period}): period must be a positive number."
            )

    def coordinates(self, values: Values, missing: float) -> list[Coordinate]:
        constant = len(values.remainder(self.period).unique()) <= 1
        phase = 2 * math.pi * values[:1] / self.period
        circle = [
            Coordinate(part, self.period, mean if constant else 0.0, constant=constant)
            for part, mean in (
                (Part.SINE, float(phase.sin().sum())),
                (Part.COSINE, float(phase.cos().sum())),
            )
        ]
        return [*circle, *_missing(missing)]


@dataclass(frozen=True)
class Category:
    """Levels that are equal or not; all different levels are equally far apart."""

    def coordinates(self, values: Values, missing: float) -> list[Coordinate]:
        levels, counts = values.unique(return_counts=True)
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

    def coordinates(self, values: Values, missing: float) -> list[Coordinate]:
        del values, missing
        return []


def _value(values: Tensor, *, log: bool) -> Coordinate:
    own = values.log() if log else values
    constant = len(own) == 0 or bool(own.min() == own.max())
    mean = float(own.mean()) if len(own) else 0.0
    scale = abs(mean) if constant else float(own.std(correction=0))
    return Coordinate(Part.VALUE, 0.0, mean, scale or 1.0, log, constant)


def _missing(fraction: float, scale: float = 1 / UNEQUAL) -> list[Coordinate]:
    """The indicator of missing values; none if the data have none, because such a query has no answer."""
    if not fraction:
        return []
    constant = fraction == 1
    return [Coordinate(Part.MISSING, mean=fraction, scale=scale, constant=constant)]


@dataclass(frozen=True)
class ColumnCoordinates:
    """T of a table: the coordinates of all columns, one after the other.

    Attributes:
        mean: subtracted from each coordinate, after the logarithm.
        scale: divides each coordinate.
        log: which coordinates are logarithms.
        constant: which coordinates have a single value in the data.
        column: the number of the column that each coordinate comes from.
        part: what each coordinate is, a ``Part``.
        level: the level of an indicator, or the period of a sine.
        n_columns: the number of columns.
    """

    mean: Float[Tensor, " m"]
    scale: Float[Tensor, " m"]
    log: Bool[Tensor, " m"]
    constant: Bool[Tensor, " m"]
    column: Int[Tensor, " m"]
    part: Int[Tensor, " m"]
    level: Float[Tensor, " m"]
    n_columns: Int[Tensor, ""]

    @staticmethod
    def of(
        coordinates: list[list[Coordinate]], like: Float[Tensor, " n c"]
    ) -> "ColumnCoordinates":
        """The coordinates of all columns, on the device and in the precision of the points."""
        flat = [part for column in coordinates for part in column]
        number = [j for j, column in enumerate(coordinates) for _ in column]

        def numbers(name: str) -> Tensor:
            return like.new_tensor([float(getattr(part, name)) for part in flat])

        return ColumnCoordinates(
            mean=numbers("mean"),
            scale=numbers("scale"),
            log=numbers("log").bool(),
            constant=numbers("constant").bool(),
            column=torch.tensor(number, device=like.device),
            part=numbers("part").long(),
            level=numbers("level"),
            n_columns=torch.tensor(len(coordinates), device=like.device),
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: the number of columns."""
        return (int(self.n_columns),)

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        return dict(vars(self))

    def __call__(self, points: Float[Tensor, " n c"]) -> Float[Tensor, " n m"]:
        own = points[:, self.column]
        absent = own.isnan()
        found = log_where(own, self.log)
        period = self.level.where(self._is(Part.SINE, Part.COSINE), 1)
        phase = 2 * math.pi * own / period
        for part, values in {
            Part.LEVEL: own == self.level,
            Part.SINE: phase.sin(),
            Part.COSINE: phase.cos(),
            Part.MISSING: absent,
            Part.UNSEEN: self._unseen(own),
        }.items():
            found = torch.where(self._is(part), values.to(own), found)
        # A missing number has the coordinate of the mean, beside its indicator.
        missing = absent & self._is(Part.VALUE, Part.SINE, Part.COSINE)
        standardised = ((found - self.mean) / self.scale).masked_fill(missing, 0.0)
        return standardised.clamp(-FARTHEST, FARTHEST)

    def _is(self, *parts: Part) -> Bool[Tensor, " m"]:
        kinds = self.part.new_tensor([int(part) for part in parts])
        return torch.isin(self.part, kinds)

    def _unseen(self, own: Float[Tensor, " n m"]) -> Bool[Tensor, " n m"]:
        """Whether the category of each coordinate's column has a level that the data do not contain."""
        unseen = torch.zeros_like(own, dtype=torch.bool)
        levels = self._is(Part.LEVEL)
        for place in self._is(Part.UNSEEN).nonzero()[:, 0].tolist():
            of_column = self.level[levels & (self.column == self.column[place])]
            value = own[:, place]
            unseen[:, place] = ~(torch.isin(value, of_column) | value.isnan())
        return unseen

    def inverse(self, coordinates: Float[Tensor, " n m"]) -> Float[Tensor, " n m"]:
        """The values that have these coordinates, one per coordinate."""
        values = self.mean + self.scale * coordinates
        return torch.where(self.log, values.exp(), values)

    def changed(self, coordinates: Float[Tensor, " n m"]) -> Bool[Tensor, " n m"]:
        """Which coordinates that are constant in the data differ from their value there."""
        return changed(self.constant, self.mean, coordinates)

    def changed_rows(self, coordinates: Float[Tensor, " n m"]) -> Bool[Tensor, " n"]:
        """Which queries change a coordinate that is constant in the data."""
        return self.changed(coordinates).any(dim=1)

    def newly_missing(self, points: Float[Tensor, " n c"]) -> Bool[Tensor, " n c"]:
        """Which values are missing, in columns that are never missing in the data."""
        number = torch.arange(points.shape[1], device=points.device)
        allowed = torch.isin(number, self.column[self._is(Part.MISSING)])
        return points.isnan() & torch.isin(number, self.column) & ~allowed

    def explain(
        self, coordinates: Float[Tensor, " 1 m"], names: Names | None = None
    ) -> str:
        """Empty, because ``explain_new`` also needs the query itself."""
        del coordinates, names
        return ""

    def explain_new(
        self,
        coordinates: Float[Tensor, " 1 m"],
        queries: Rows,
        query: int,
        schema: Schema,
    ) -> str:
        """What in one of the queries does not occur in the data; empty if there is nothing."""
        found = self.changed(coordinates)[0].nonzero()[:, 0].tolist()
        # An indicator of a level changes together with ``UNSEEN``, which is the more specific one.
        found.sort(key=lambda j: self.part[j] != Part.UNSEEN)
        if not found:
            return ""
        j = found[0]
        number = int(self.column[j])
        column, value = schema.columns[number], cell(queries, query, number)
        if self.part[j] == Part.MISSING:
            return (
                f"input {column.name} is {value}, but it is always missing in the data"
            )
        if self.part[j] in (Part.LEVEL, Part.UNSEEN):
            levels = [column.text(level) for level in self.levels(number)]
            return f"input {column.name} is {value}, which does not occur in the data; they contain {first_few(levels)}"
        constant = column.text(float(self.inverse(coordinates * 0)[0, j]))
        return f"input {column.name} is {value}, but it is {constant} in all the data, so its effect is unknown"

    def is_number(self, j: int) -> bool:
        """Whether coordinate j is a number or its logarithm."""
        return bool(self.part[j] == Part.VALUE)

    @property
    def is_level(self) -> Bool[Tensor, " m"]:
        """Which coordinates are indicators of a level or of a missing value."""
        return self._is(Part.LEVEL, Part.MISSING)

    def levels(self, column: int) -> list[float]:
        """The levels of a category in the data; empty for other columns."""
        own = self._is(Part.LEVEL) & (self.column == column)
        return [float(level) for level in self.level[own]]


def fit_columns(
    points: Float[Tensor, " n c"],
    kinds: Mapping[Any, Kind],
    schema: Schema | None,
    *,
    logarithms: bool,
) -> ColumnCoordinates:
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
        present = column[~column.isnan()]
        level = schema is not None and isinstance(schema.columns[j], LevelColumn)
        kind = chosen.get(j)
        if kind is None:
            kind = (
                _automatic_category(present, name, points.shape[0])
                if level
                else _automatic_number(present, name, logarithms=logarithms)
            )
        elif level and not isinstance(kind, Category | Ignored):
            raise TypeError(
                f"{name} holds categories, but its kind is {kind!r}; convert the column to numbers, or pass Category()."
            )
        if isinstance(kind, Log) and len(present) and float(present.min()) <= 0:
            raise ValueError(
                f"{name} has the value {float(present.min()):.4g}, but Log() needs positive values; pass Number() for it."
            )
        missing = 1 - len(present) / len(column)
        found.append(kind.coordinates(present, missing))
    if not any(found):
        raise ValueError(
            "all columns are ignored; leave at least one to measure distances."
        )
    return ColumnCoordinates.of(found, points)


def _by_number(
    kinds: Mapping[Any, Kind], n_columns: int, schema: Schema | None
) -> dict[int, Kind]:
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


def _automatic_number(values: Tensor, name: str, *, logarithms: bool) -> Kind:
    own = values[:, None]
    if not (len(values) and Coordinates.fit(own, logarithms=logarithms).log.item()):
        return Number()
    decades = math.log10(float(values.max() / values.min()))
    logger.info(
        "%s spans %.1f decades and is used as a logarithm; pass representation=Columns({...: Number()}) to use it as it is",
        name,
        decades,
    )
    return Log()


def _automatic_category(values: Tensor, name: str, n_rows: int) -> Kind:
    _, counts = values.unique(return_counts=True)
    once = int((counts == 1).sum())
    if len(counts) > MAX_LEVELS and once > MAX_ONCE * len(counts):
        warn(
            f"{name} has {len(counts)} different values in {n_rows} rows, most of them once, so it looks like an identifier and "
            "distances ignore it; drop it, or pass representation=Columns({...: Category()}) to use it."
        )
        return Ignored()
    return Category()
