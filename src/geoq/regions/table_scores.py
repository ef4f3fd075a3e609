"""The scores of a row of a table: from which sides it is compared with the data, in the coordinates T.

A mean distance hardly changes when one influential input leaves its range and all others stay inside, so several scores are combined.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree

from geoq.arrays import chunks
from geoq.checks import check_fraction, check_integer
from geoq.data.coordinates import MIN_DISTINCT, Part
from geoq.data.metric import input_weights
from geoq.neighbors import Neighbors
from geoq.regions.views import Axes, Score, TableView, Values, View

# The coordinates of the paired inputs are at most this many; a category has one coordinate per level.
MAX_PAIRED = 30
# Principal axes with a smaller deviation are directions in which the data do not vary.
MIN_DEVIATION = 1e-3
# Distances off the span of the axes below this many ``MIN_DEVIATION`` are rounding.
ROUNDING = 0.01
# The number of nearest states of a surface, and a deviation from it that counts as rounding, in standard deviations.
N_NEAREST, ROUNDING_OFF_SURFACE = 20, 1e-3


@dataclass(frozen=True)
class SupportDistance(Score):
    """The mean distance to the nearest points in the metric: far queries among many inputs; for fields as well."""

    def __call__(self, queries: View) -> np.ndarray:
        return queries.support_distance

    def explain(self, query: View, limit: float) -> str:
        return f"the mean distance to the nearest points is {self(query)[0]:.2g} (held-out points: at most {limit:.2g})"


@dataclass(frozen=True)
class Unexplained(Score):
    """What the data leave unexplained to the Gaussian process of the bound: points off a manifold, and holes in all inputs.

    It is 0 for a bound that does without the process.
    """

    def __call__(self, queries: TableView) -> np.ndarray:
        # Between levels the bound contains the deviation of the process.
        return np.where((queries.at_levels == queries.t).all(axis=1), queries.left, 0.0)

    def explain(self, query: TableView, limit: float) -> str:
        return (
            f"a Gaussian process through the data leaves {self(query)[0]:.0%} of its deviation unexplained here "
            f"(held-out points: at most {limit:.0%})"
        )


@dataclass(frozen=True)
class EachInput(Score):
    """The largest distance of an input to its nearest value in the data: one input out of range, and gaps.

    Attributes:
        min_weight: smallest weight of an input, w_j = max(sqrt(g_j / rms(g)), min_weight). A smaller value accepts more queries
            in which only an input without much influence is out of range. Most of them are harmless, but some are not: a
            surrogate can underestimate the influence of an input.
    """

    min_weight: float = 1.0
    points: Any = field(default=None, repr=False, compare=False)
    weight: Any = field(default=None, repr=False, compare=False)
    least = 0.05
    is_specific = True

    def __post_init__(self) -> None:
        check_fraction(self.min_weight, "EachInput.min_weight")

    def fit(self, points: TableView) -> "EachInput":
        every = np.ones(len(points.importance), dtype=bool)
        weight = input_weights(points.importance, every, self.min_weight)
        return replace(self, points=points.t, weight=weight)

    @cached_property
    def _values(self) -> Values:
        return Values(np.ones_like(self.weight), np.sort(self.points.T, axis=1))

    def gaps(self, queries: TableView) -> np.ndarray:
        """The weighted distance of each coordinate to the nearest value in the data; 0 beyond a range where nothing happens."""
        low, high = self._values.taken[:, 0], self._values.taken[:, -1]
        calm = queries.calm[:, None] & self._many & ((queries.t < low) | (queries.t > high))
        return np.where(calm, 0.0, self.weight * self._values.gaps(queries.at_levels))

    @cached_property
    def _many(self) -> np.ndarray:
        """Which coordinates have enough values to be more than codes or levels."""
        return (np.diff(self._values.taken, axis=1) > 0).sum(axis=1) + 1 >= MIN_DISTINCT

    def explain(self, query: TableView, limit: float) -> str:
        score = self.gaps(query)[0]
        found = [int(j) for j in np.argsort(-score) if score[j] > limit]
        others = [query.described(j, self.points) for j in found[1:6]]
        more = f"; also unusual: {', '.join(others)}" if others else ""
        return self._unusual(query, found[0]) + more + ", ..." * (len(found) > 6)

    def _unusual(self, query: TableView, j: int) -> str:
        """How coordinate j differs from the data."""
        if not query.is_number(j):
            return f"{query.label(j)} lies in a gap of the data"
        here, low, high = query.t[0, j], self.points[:, j].min(), self.points[:, j].max()
        value = f"{query.label(j)} is {query.text(j, here)}"
        if low <= here <= high:
            below, above = (query.text(j, at) for at in self._values.around(j, here))
            return f"{value}; its nearest values in the data are {below} and {above}"
        side, end = ("above", high) if here > high else ("below", low)
        gap = abs(here - end)
        far = f"{gap:.2g} standard deviations"
        if query.coordinates.log.flat[query.number(j)]:
            ratio = max(query.units(j, here), 1e-300) / query.units(j, end)
            far = f"{abs(math.log10(ratio)):.2g} decades"
        text = f"{value}, {far} {side} its range in the data, {query.text(j, low)} to {query.text(j, high)}"
        if query.metric is None or query.metric.sensitivity is None:
            return text
        change = gap * math.sqrt((query.metric.sensitivity[query.number(j)] ** 2).mean())
        return f"{text} (the prediction would change by {change:.2g} if it kept changing as inside)"

    def explain_inside(self, query: TableView) -> str:
        """Why a query is safe although an input is out of its range; empty if none is."""
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        beyond = np.maximum(query.t - high, low - query.t)[0]
        j = int(beyond.argmax())
        if beyond[j] <= 0:
            return ""
        why = "which is less than its influence on the prediction allows"
        if query.calm[0]:
            why = "where prediction and Gaussian process hardly change, so the bound is only a quarter larger"
        far = f"{beyond[j]:.2g} standard deviations out of its range"
        return f"{query.described(j, self.points)} is {far}, {why}"


@dataclass(frozen=True)
class PrincipalAxes(Score):
    """The largest distance to the nearest value along a principal axis, in deviations, and the distance off the span of the axes.

    It detects broken correlations and new modes.
    """

    points: Any = field(default=None, repr=False, compare=False)
    axes: Any = field(default=None, repr=False, compare=False)
    least = 0.1

    def fit(self, points: TableView) -> "PrincipalAxes":
        axes = Axes.fit(points.t, least=MIN_DEVIATION, ratio=0.0)
        return replace(self, points=points.t, axes=axes)

    @cached_property
    def _values(self) -> Values:
        return Values(self.axes.deviation, np.sort(self.axes(self.points)[0].T, axis=1))

    def gaps(self, queries: TableView) -> np.ndarray:
        """One column per principal axis, and one for the distance off their span."""
        along, rest = self.axes(queries.at_levels)[0], self.axes(queries.t)[1]
        off = np.linalg.norm(rest, axis=1) / MIN_DEVIATION
        return np.column_stack([self._values.gaps(along), np.where(off > ROUNDING, off, 0.0)])

    def explain(self, query: TableView, limit: float) -> str:
        score = self.gaps(query)[0]
        loading = [*self.axes.directions.T, self.axes(query.t)[1][0]][int(score.argmax())]
        labels = [query.described(int(j), self.points) for j in np.argsort(-abs(loading))]
        named = " and ".join([*dict.fromkeys(labels)][:2])
        return (
            f"the correlation of {named} differs from the data, by {score.max():.2g} deviations of a principal axis "
            f"(held-out points: at most {limit:.2g})"
        )


@dataclass(frozen=True)
class EachPair(Score):
    """The largest distance to the nearest point in the plane of two influential inputs: holes, ridges, new combinations.

    ``EachInput`` covers queries outside the ranges.

    Attributes:
        n_inputs: the number of inputs that form pairs.
    """

    n_inputs: int = 10
    points: Any = field(default=None, repr=False, compare=False)
    pairs: Any = field(default=None, repr=False, compare=False)
    least = 0.1

    def __post_init__(self) -> None:
        check_integer(self.n_inputs, "EachPair.n_inputs", 2)

    def fit(self, points: TableView) -> "EachPair":
        column, importance = points.column, points.importance
        _, first, size = np.unique(column, return_index=True, return_counts=True)
        top = np.argsort(-importance[first], kind="stable")[: self.n_inputs]
        top = top[(np.cumsum(size[top]) <= MAX_PAIRED) | (np.arange(len(top)) < 2)]
        chosen = np.flatnonzero(np.isin(column, column[first[top]])).tolist()
        pairs = [(j, k) for j, k in combinations(chosen, 2) if column[j] != column[k]]
        return replace(self, points=points.t, pairs=tuple(pairs))

    @cached_property
    def _trees(self) -> list[cKDTree]:
        return [cKDTree(self.points[:, pair]) for pair in self.pairs]

    def gaps(self, queries: TableView) -> np.ndarray:
        """One column per pair; queries are clipped to the ranges of the points. A single column of 0 without pairs."""
        inside = queries.at_levels.clip(self.points.min(axis=0), self.points.max(axis=0))
        pairs = zip(self.pairs, self._trees, strict=True)
        found = [tree.query(inside[:, pair])[0] for pair, tree in pairs]
        return np.stack(found or [np.zeros(len(inside))], axis=1)

    def explain(self, query: TableView, limit: float) -> str:
        score = self.gaps(query)[0]
        j, k = (query.described(i, self.points) for i in self.pairs[int(score.argmax())])
        return (
            f"{j} and {k} are each in range, but not together: the nearest point in their plane is {score.max():.2g} standard "
            f"deviations away (held-out points: at most {limit:.2g})"
        )


@dataclass(frozen=True)
class EachCombination(Score):
    """How often two levels would occur together by chance that never occur together in the data: n_a n_b / n.

    ``EachPair`` does without categories of many levels.
    """

    points: Any = field(default=None, repr=False, compare=False)
    levels: Any = field(default=None, repr=False, compare=False)

    def fit(self, points: TableView) -> "EachCombination":
        is_level = points.coordinates.is_part(Part.LEVEL)[points.coordinates.varies]
        return replace(self, points=points.t, levels=np.flatnonzero(is_level))

    def gaps(self, queries: TableView) -> np.ndarray:
        """For each level, the expected number of its combinations that never occur."""
        both = (self.points, queries.t)
        known, own = ((t[:, self.levels] > 0).astype(np.float32) for t in both)
        together = known.T @ known
        count, column = together.diagonal(), queries.column[self.levels]
        never = (together == 0) & (column[:, None] != column)
        expected = np.where(never, np.outer(count, count) / len(known), 0)
        return np.asarray(own * (own @ expected), dtype=float)

    def explain(self, query: TableView, limit: float) -> str:
        score = self.gaps(query)[0]
        named = (query.described(int(self.levels[j]), self.points) for j in np.argsort(-score)[:2])
        return (
            f"{' and '.join(named)} never occur together in the data, where about {score.max():.2g} rows would have both "
            f"(held-out points: at most {limit:.2g})"
        )


@dataclass(frozen=True)
class Surface(Score):
    r"""How far a state of few coordinates is from the surface that the nearest states of the data form.

    .. math:: s(u) = \Bigl(\frac1d \sum_{j=1}^d \frac{(v_j^T (u - c))^2}{\lambda_j + \epsilon^2}\Bigr)^{1/2}

    Here c is the mean of the 20 nearest states of the data, and :math:`\lambda_j, v_j` are the eigenvalues and eigenvectors of
    their covariance, all in standardised coordinates. The states of a dissipative system fill a surface with few dimensions. A
    state off this surface can be near the data, compared with distances in sparse parts of the surface, and still be unlike all
    of them: there :math:`\lambda_j` is small across the surface, and the score is large.
    """

    states: Any = field(default=None, repr=False, compare=False)

    def fit(self, points: TableView) -> "Surface":
        return Surface(points.t)

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.states)

    def __call__(self, queries: TableView) -> Float[np.ndarray, " n"]:
        n_nearest = min(N_NEAREST, len(self.states))
        nearest, score = self._neighbors.nearest(queries.t, n_nearest)[1], np.empty(len(queries))
        for rows in chunks(len(queries), 2 * n_nearest * self.states.shape[1]):
            near = self.states[nearest[rows]]
            centre = near.mean(axis=1, keepdims=True)
            spread = near - centre
            size, axes = np.linalg.eigh(spread.mT @ spread / n_nearest)
            along = ((queries.t[rows, None] - centre) @ axes)[:, 0]
            squares = along**2 / (size.clip(min=0) + ROUNDING_OFF_SURFACE**2)
            score[rows] = np.sqrt(squares.mean(axis=1))
        return score

    def explain(self, query: TableView, limit: float) -> str:
        return (
            f"the initial state is off the surface that its {N_NEAREST} nearest states in the data form: it is "
            f"{float(self(query)[0]):.2g} of their standard deviations away (held-out states: at most {limit:.2g})"
        )
