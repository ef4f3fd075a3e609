r"""The scores of a row of a table: from which sides it is compared with the data.

===============  ==========================================================================  ====================================
score            definition                                                                  what it detects
===============  ==========================================================================  ====================================
Nearest          mean distance to the 3 nearest distinct points                              far queries, holes in all inputs
EachInput        max over inputs of w_j times the distance of T_j to the nearest value of    one input out of range, gaps
                 input j
PrincipalAxes    max over principal axes of the distance to the nearest value, in            broken correlations, new modes
                 deviations
EachPair         max over pairs of inputs of the distance to the nearest point in their      holes, ridges, new combinations
                 plane
SupportDistance  mean distance to the k nearest points in the metric                         far queries among many inputs
===============  ==========================================================================  ====================================

A mean distance hardly changes when one influential input leaves its range and all others stay inside, so several scores are combined.
All of them but the last are measured in the coordinates T.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from geoq.checks import check_fraction, check_integer
from geoq.data.metric import input_weights
from geoq.data.table import Names
from geoq.neighbors import Neighbors
from geoq.regions.planes import Planes
from geoq.regions.views import TableView, View

# The coordinates of the paired inputs are at most this many; a category has one coordinate per level.
MAX_PAIRED = 30
# Principal axes with a smaller deviation are directions in which the data do not vary.
MIN_DEVIATION = 1e-3
# Distances off the span of the axes below this many ``MIN_DEVIATION`` are rounding.
ROUNDING = 0.01
# Up to this many differences, the nearest values are found without sorted columns.
MAX_DIFFERENCES = 2**16


class SortedColumns:
    """Distances to the nearest value of each column."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @cached_property
    def columns(self) -> list[np.ndarray]:
        """The distinct values of each column."""
        return [np.unique(column) for column in self.values.T]

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        if len(queries) * self.values.size <= MAX_DIFFERENCES:
            return np.asarray(abs(queries[:, None] - self.values).min(axis=1))
        gap = np.empty_like(queries)
        for j, (taken, query) in enumerate(zip(self.columns, queries.T, strict=True)):
            above = np.searchsorted(taken, query)
            upper = abs(taken[np.minimum(above, len(taken) - 1)] - query)
            lower = abs(query - taken[np.maximum(above - 1, 0)])
            gap[:, j] = np.minimum(upper, lower)
        return gap

    def neighbours(self, j: int, value: float) -> tuple[float, float]:
        """The values of column j on either side of a value; infinite if there is none."""
        taken = self.columns[j]
        above = int(np.searchsorted(taken, value))
        return (
            float(taken[above - 1]) if above > 0 else -math.inf,
            float(taken[above]) if above < len(taken) else math.inf,
        )


@dataclass(frozen=True)
class SupportDistance:
    """The mean distance to the nearest points in the metric, which the geometry has computed; for fields as well."""

    def fit(self, points: View) -> "FittedSupportDistance":
        del points
        return FittedSupportDistance()


@dataclass(frozen=True)
class FittedSupportDistance:
    """The support distance of the queries."""

    least: ClassVar[float] = 0.0

    def __call__(self, queries: View, at_least: np.ndarray) -> np.ndarray:
        assert queries.support_distance is not None
        return queries.support_distance

    def explain(self, query: View, limit: float, names: Names | None) -> str:
        del names
        assert query.support_distance is not None
        return f"the mean distance to the nearest points is {query.support_distance[0]:.2g} (held-out points: at most {limit:.2g})"


@dataclass(frozen=True)
class Nearest:
    """The mean distance to the nearest distinct points.

    Attributes:
        n_nearest: the number of points.
    """

    n_nearest: int = 3

    def __post_init__(self) -> None:
        check_integer(self.n_nearest, "Nearest.n_nearest", 1)

    def fit(self, points: TableView) -> "FittedNearest":
        distinct = np.unique(points.t, axis=0)
        n_nearest = min(self.n_nearest, len(distinct))
        return FittedNearest(distinct, n_nearest)


@dataclass(frozen=True)
class FittedNearest:
    """The distinct points of the data."""

    points: Float[np.ndarray, " n m"]
    n_nearest: int
    least: ClassVar[float] = 0.0

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.points)

    def __call__(self, queries: TableView, at_least: np.ndarray) -> np.ndarray:
        distance = self._neighbors.nearest(queries.t, self.n_nearest)[0]
        return np.asarray(distance.mean(axis=1))

    def explain(self, query: TableView, limit: float, names: Names | None) -> str:
        gaps = _Ranges.of(self.points, query, 1.0).weighted_gaps(query)[0]
        unusual = _Ranges.of(self.points, query, 1.0).described(query, int(gaps.argmax()), names)
        return (
            f"the {self.n_nearest} nearest points are {self(query, np.zeros(1))[0]:.2g} standard deviations away on average "
            f"(held-out points: at most {limit:.2g}); the most unusual input is {unusual}"
        )


@dataclass(frozen=True)
class _Ranges:
    """The values of each coordinate in the data, with the weight of each coordinate."""

    points: Float[np.ndarray, " n m"]
    weight: Float[np.ndarray, " m"]
    low: Float[np.ndarray, " m"]
    high: Float[np.ndarray, " m"]

    @staticmethod
    def of(points: Float[np.ndarray, " n m"], view: TableView, min_weight: float) -> "_Ranges":
        varying = np.ones(len(view.importance), dtype=bool)
        weight = input_weights(view.importance, varying, min_weight)
        return _Ranges(points, weight, points.min(axis=0), points.max(axis=0))

    @cached_property
    def values(self) -> SortedColumns:
        """The sorted values."""
        return SortedColumns(self.points)

    def weighted_gaps(self, queries: TableView) -> np.ndarray:
        """The weighted distance of each coordinate to the nearest value in the data."""
        return np.asarray(self.weight * self.values(queries.t))

    def described(self, query: TableView, j: int, names: Names | None) -> str:
        """Input j with its value and its range in the data."""
        if not query.is_number(j):
            return query.label(j, names)
        value, low, high = (
            query.text(j, at, names) for at in (query.t[0, j], self.low[j], self.high[j])
        )
        return f"{query.label(j, names)} ({value}, range {low} to {high})"


@dataclass(frozen=True)
class EachInput:
    """The distance of each input to its nearest value in the data.

    Attributes:
        min_weight: smallest weight of an input, w_j = max(sqrt(g_j / rms(g)), min_weight). A smaller value accepts more queries
            in which only an input without much influence is out of range. Most of them are harmless, but some are not: a
            surrogate can underestimate the influence of an input.
    """

    min_weight: float = 1.0

    def __post_init__(self) -> None:
        check_fraction(self.min_weight, "EachInput.min_weight")

    def fit(self, points: TableView) -> "FittedEachInput":
        return FittedEachInput(_Ranges.of(points.t, points, self.min_weight))


@dataclass(frozen=True)
class FittedEachInput:
    """The values of each input in the data."""

    ranges: _Ranges
    least: ClassVar[float] = 0.05
    # It names an input, so it explains a flag even if another score exceeds its threshold by more.
    is_specific: ClassVar[bool] = True

    def __call__(self, queries: TableView, at_least: np.ndarray) -> np.ndarray:
        return np.asarray(self.ranges.weighted_gaps(queries).max(axis=1))

    def explain(self, query: TableView, limit: float, names: Names | None) -> str:
        score = self.ranges.weighted_gaps(query)[0]
        found = [int(j) for j in np.argsort(-score) if score[j] > limit]
        found = found or [int(score.argmax())]
        others = [self.ranges.described(query, j, names) for j in found[1:6]]
        more = f"; also unusual: {', '.join(others)}" if others else ""
        return self._one(query, found[0], names) + more + ", ..." * (len(found) > 6)

    def _one(self, query: TableView, j: int, names: Names | None) -> str:
        ranges, here = self.ranges, query.t[0, j]
        if not query.is_number(j):
            return f"{ranges.described(query, j, names)} lies in a gap of the data"
        label, value = query.label(j, names), query.text(j, here, names)
        low, high = ranges.low[j], ranges.high[j]
        if low <= here <= high:
            below, above = (query.text(j, at, names) for at in ranges.values.neighbours(j, here))
            return f"{label} is {value}; its nearest values in the data are {below} and {above}"
        end = high if here > high else low
        gap = float(ranges.values(query.t)[0, j])
        far = f"{gap:.2g} standard deviations"
        if query.coordinates.log.reshape(-1)[query.number(j)]:
            ratio = max(query.units(j, here), 1e-300) / query.units(j, end)
            far = f"{abs(math.log10(ratio)):.2g} decades"
        side = "above" if here > high else "below"
        text = f"{label} is {value}, {far} {side} its range in the data, {query.text(j, low, names)} to {query.text(j, high, names)}"
        metric = query.metric
        if metric is None or metric.sensitivity is None:
            return text
        of_input = metric.sensitivity[query.number(j)]
        change = gap * float(np.sqrt((of_input**2).mean()))
        return f"{text} (the prediction would change by {change:.2g} if it kept changing as inside)"

    def why_inside(self, query: TableView, names: Names | None) -> str:
        """Why a query is safe although an input is out of its range; empty if none is."""
        beyond = np.maximum(query.t - self.ranges.high, self.ranges.low - query.t)[0]
        if beyond.max() <= 0:
            return ""
        j = int(beyond.argmax())
        return (
            f"{self.ranges.described(query, j, names)} is {beyond[j]:.2g} standard deviations out of its range, which is less than "
            "its influence on the prediction allows"
        )


@dataclass(frozen=True)
class PrincipalAxes:
    """The distance to the nearest value along each principal axis, and the distance off their span."""

    def fit(self, points: TableView) -> "FittedPrincipalAxes":
        mean = points.t.mean(axis=0)
        _, size, directions = np.linalg.svd(points.t - mean, full_matrices=False)
        size = size / math.sqrt(len(points))
        kept = size > MIN_DEVIATION
        return FittedPrincipalAxes(points.t, mean, directions[kept].T.copy(), size[kept])


@dataclass(frozen=True)
class FittedPrincipalAxes:
    """The principal axes as columns, and their deviations."""

    points: Float[np.ndarray, " n m"]
    mean: Float[np.ndarray, " m"]
    axes: Float[np.ndarray, " m k"]
    deviation: Float[np.ndarray, " k"]
    least: ClassVar[float] = 0.1

    @cached_property
    def _along(self) -> SortedColumns:
        return SortedColumns((self.points - self.mean) @ self.axes)

    def _gaps(self, t: np.ndarray) -> np.ndarray:
        """One column per principal axis, and one for the distance off their span."""
        centred = t - self.mean
        along = centred @ self.axes
        off = np.linalg.norm(centred - along @ self.axes.T, axis=1) / MIN_DEVIATION
        off = np.where(off > ROUNDING, off, 0.0)
        return np.column_stack([self._along(along) / self.deviation, off])

    def __call__(self, queries: TableView, at_least: np.ndarray) -> np.ndarray:
        return np.asarray(self._gaps(queries.t).max(axis=1))

    def explain(self, query: TableView, limit: float, names: Names | None) -> str:
        score = self._gaps(query.t)[0]
        place, centred = int(score.argmax()), (query.t - self.mean)[0]
        loading = (
            centred - self.axes @ (centred @ self.axes)
            if place == len(self.deviation)
            else self.axes[:, place]
        )
        ranges = _Ranges.of(self.points, query, 1.0)
        labels = [ranges.described(query, int(j), names) for j in np.argsort(-abs(loading))]
        named = " and ".join([*dict.fromkeys(labels)][:2])
        return (
            f"the correlation of {named} differs from the data, by {score.max():.2g} deviations of a principal axis "
            f"(held-out points: at most {limit:.2g})"
        )


@dataclass(frozen=True)
class EachPair:
    """The distance to the nearest point in the plane of each pair of the most influential inputs.

    Attributes:
        n_inputs: the number of inputs that form pairs.
    """

    n_inputs: int = 10

    def __post_init__(self) -> None:
        check_integer(self.n_inputs, "EachPair.n_inputs", 2)

    def fit(self, points: TableView) -> "FittedEachPair":
        column, importance = points.column, points.importance
        _, first, size = np.unique(column, return_index=True, return_counts=True)
        top = np.argsort(-importance[first], kind="stable")[: self.n_inputs]
        top = top[(np.cumsum(size[top]) <= MAX_PAIRED) | (np.arange(len(top)) < 2)]
        chosen = np.flatnonzero(np.isin(column, column[first[top]])).tolist()
        pairs = [(j, k) for j, k in combinations(chosen, 2) if column[j] != column[k]]
        return FittedEachPair(points.t, tuple(pairs))


@dataclass(frozen=True)
class FittedEachPair:
    """The points in the planes of the pairs. ``EachInput`` covers queries outside the ranges."""

    points: Float[np.ndarray, " n m"]
    pairs: tuple[tuple[int, int], ...]
    least: ClassVar[float] = 0.1

    @cached_property
    def _planes(self) -> Planes:
        return Planes(self.points, self.pairs)

    def __call__(self, queries: TableView, at_least: np.ndarray) -> np.ndarray:
        return self._planes.largest(queries.t, at_least)

    def explain(self, query: TableView, limit: float, names: Names | None) -> str:
        score = self._planes.distances(query.t)[0]
        ranges = _Ranges.of(self.points, query, 1.0)
        j, k = (ranges.described(query, i, names) for i in self.pairs[int(score.argmax())])
        return (
            f"{j} and {k} are each in range, but not together: the nearest point in their plane is {score.max():.2g} standard "
            f"deviations away (held-out points: at most {limit:.2g})"
        )
