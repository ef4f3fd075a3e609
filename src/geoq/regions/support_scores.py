"""Scores of queries against a cloud of points, from different sides; ``regions.support_region.py`` defines them and sets thresholds."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from scipy.spatial import cKDTree

from geoq.metric import input_weights
from geoq.neighbors import Neighbors
from geoq.neighbors.engines import MAX_TREE_DIMS
from geoq.neighbors.planes import Planes

SCORES = ("distance", "input", "pair", "axis")
N_NEAREST = 3
# Pairs are formed from this many inputs, the most influential ones.
N_PAIRED = 10
# The coordinates of these inputs are at most this many; a category has one coordinate per level.
MAX_PAIRED = 30
# Principal axes with a smaller deviation are directions in which the data do not vary.
MIN_DEVIATION = 1e-3
# Distances off the span of the axes below this many ``MIN_DEVIATION`` are rounding.
ROUNDING = 0.01
CHUNK_ROWS = 20_000
# Up to this many differences, the nearest values are found without sorted columns.
MAX_DIFFERENCES = 2**16


class SortedColumns:
    """Distances to the nearest value of each column."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.columns = [np.unique(column) for column in values.T]

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
class Cloud:
    """The points that queries are scored against, in the coordinates of the inputs that vary."""

    points: np.ndarray
    importance: np.ndarray
    column: np.ndarray
    min_weight: float

    @cached_property
    def weight(self) -> np.ndarray:
        importance = torch.from_numpy(self.importance)
        varying = torch.ones_like(importance, dtype=torch.bool)
        weights = input_weights(importance, varying, self.min_weight)
        return np.asarray(weights.double().numpy())

    @cached_property
    def low(self) -> np.ndarray:
        return np.asarray(self.points.min(axis=0))

    @cached_property
    def high(self) -> np.ndarray:
        return np.asarray(self.points.max(axis=0))

    @cached_property
    def tree(self) -> cKDTree:
        return cKDTree(np.unique(self.points, axis=0))

    @cached_property
    def neighbors(self) -> Neighbors:
        return Neighbors(torch.tensor(self.tree.data))

    @cached_property
    def values(self) -> SortedColumns:
        return SortedColumns(self.points)

    @cached_property
    def planes(self) -> Planes:
        """The planes of pairs of coordinates of different inputs. ``by_input`` covers queries outside the ranges."""
        return Planes(self.points, self._pairs())

    def _pairs(self) -> list[tuple[int, int]]:
        _, first, size = np.unique(self.column, return_index=True, return_counts=True)
        top = np.argsort(-self.importance[first], kind="stable")[:N_PAIRED]
        top = top[(np.cumsum(size[top]) <= MAX_PAIRED) | (np.arange(len(top)) < 2)]
        chosen = np.flatnonzero(np.isin(self.column, self.column[first[top]])).tolist()
        column = self.column.tolist()
        return [(j, k) for j, k in combinations(chosen, 2) if column[j] != column[k]]

    @cached_property
    def mean(self) -> np.ndarray:
        return np.asarray(self.points.mean(axis=0))

    @cached_property
    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        """Directions of the principal axes as columns, and their deviations."""
        centred = self.points - self.mean
        _, size, directions = np.linalg.svd(centred, full_matrices=False)
        size = size / math.sqrt(len(self.points))
        return directions[size > MIN_DEVIATION].T, size[size > MIN_DEVIATION]

    @cached_property
    def along(self) -> SortedColumns:
        return SortedColumns((self.points - self.mean) @ self.axes[0])

    def by_distance(self, t: np.ndarray) -> np.ndarray:
        k = min(N_NEAREST, self.tree.n)
        if t.shape[1] <= MAX_TREE_DIMS:
            distances: np.ndarray = self.tree.query(t, k)[0].reshape(len(t), k)
        else:
            distances = self.neighbors.nearest(torch.from_numpy(t), k)[0].numpy()
        return np.asarray(distances.mean(axis=1))

    def by_input(self, t: np.ndarray) -> np.ndarray:
        """One column per input."""
        return np.asarray(self.weight * self.values(t))

    def by_axis(self, t: np.ndarray) -> np.ndarray:
        """One column per principal axis, and one for the distance off their span."""
        directions, deviation = self.axes
        centred = t - self.mean
        p = centred @ directions
        off = np.linalg.norm(centred - p @ directions.T, axis=1) / MIN_DEVIATION
        off = np.where(off > ROUNDING, off, 0.0)
        return np.column_stack([self.along(p) / deviation, off])

    def scores(self, t: np.ndarray) -> np.ndarray:
        """The four scores, one column each."""
        parts = []
        for part in _parts(t):
            by_input, by_axis = self.by_input(part), self.by_axis(part)
            pair, distance = self.planes.largest(part), self.by_distance(part)
            scores = [distance, by_input.max(axis=1), pair, by_axis.max(axis=1)]
            parts.append(np.column_stack(scores))
        return np.concatenate(parts)

    def largest_ratio(self, t: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        """The largest ratio of a score to its threshold, ``(scores(t) / thresholds).max(axis=1)``.

        Distances in planes, which take most of the time, are computed only if they can be the largest score.
        """
        ratios = []
        for part in _parts(t):
            others = [
                self.by_distance(part) / thresholds[0],
                self.by_input(part).max(axis=1) / thresholds[1],
                self.by_axis(part).max(axis=1) / thresholds[3],
            ]
            ratio = np.max(others, axis=0)
            enough = ratio * thresholds[2]
            pair = self.planes.largest(part, enough)
            ratios.append(np.where(pair > enough, pair / thresholds[2], ratio))
        return np.concatenate(ratios)


def _parts(t: np.ndarray) -> list[np.ndarray]:
    if len(t) <= CHUNK_ROWS:
        return [t]
    return np.array_split(t, math.ceil(len(t) / CHUNK_ROWS))
