"""What scores measure: distances to the nearest value of a number, along principal axes, and in planes of two columns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import cKDTree

# The grid of a plane has about two cells per point, and at least and at most this many cells on each side.
MIN_CELLS, MAX_CELLS = 16, 128
# Below this size a deviation or a threshold is rounding.
TINY = 1e-12
# Upper bounds are raised by this fraction for rounding.
MARGIN = 1e-9


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


class Planes:
    """The planes of pairs of columns. Queries are clipped to the ranges of the points.

    Args:
        points: the points, one row each.
        pairs: pairs of columns.
    """

    def __init__(self, points: Float[np.ndarray, " n k"], pairs: Sequence[tuple[int, int]]) -> None:
        self.points, self.pairs = points, list(pairs)
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._n_cells = int(np.clip(math.sqrt(2 * len(points)), MIN_CELLS, MAX_CELLS))
        side = (self._high - self._low) / self._n_cells
        self._side = np.where(side > 0, side, 1.0)
        self._was_asked = False

    @cached_property
    def _trees(self) -> list[cKDTree]:
        return [cKDTree(self.points[:, pair]) for pair in self.pairs]

    def distances(self, queries: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n n_pairs"]:
        """Distance to the nearest point in each plane."""
        everywhere = np.ones((len(queries), len(self.pairs)), dtype=bool)
        return self._where(everywhere, queries.clip(self._low, self._high))

    def _where(self, wanted: np.ndarray, clipped: np.ndarray) -> Float[np.ndarray, " n n_pairs"]:
        """The wanted distances, and 0 elsewhere."""
        found = np.zeros(wanted.shape)
        for number, (pair, tree) in enumerate(zip(self.pairs, self._trees, strict=True)):
            rows = np.flatnonzero(wanted[:, number])
            found[rows, number] = tree.query(clipped[rows][:, pair])[0]
        return found

    def largest(self, queries: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n"]:
        """The largest of the distances; 0 without pairs.

        A distance is computed only if its upper bound permits it to be the largest. Making the grids takes as long as the
        distances of as many queries as there are points, so the first call of fewer queries computes all distances.
        """
        bounded = self.pairs and (self._was_asked or len(queries) > len(self.points))
        self._was_asked = True
        if not bounded:
            return np.asarray(self.distances(queries).max(axis=1, initial=0.0))
        clipped = queries.clip(self._low, self._high)
        upper = self._upper(clipped)
        # The likely place of the maximum first, so that few other distances can exceed it.
        likely = np.zeros_like(upper, dtype=bool)
        likely[np.arange(len(upper)), upper.argmax(axis=1)] = True
        largest = self._where(likely, clipped).max(axis=1)
        others = (upper > largest[:, None]) & ~likely
        return np.maximum(largest, self._where(others, clipped).max(axis=1))

    @cached_property
    def _nearest(self) -> Int[np.ndarray, " n_pairs n_cells"]:
        """The point nearest to the middle of each cell, for each plane."""
        middle = np.indices((self._n_cells, self._n_cells)).reshape(2, -1).T + 0.5
        planes = zip(self.pairs, self._trees, strict=True)
        found = [t.query(self._low[[*p]] + middle * self._side[[*p]])[1] for p, t in planes]
        return np.stack(found).astype(np.int32)

    def _upper(self, clipped: Float[np.ndarray, " n k"]) -> Float[np.ndarray, " n n_pairs"]:
        """Upper bounds of the distances: those to the point nearest to the middle of the query's cell."""
        one, two = np.array(self.pairs).T
        places = ((clipped - self._low) / self._side).astype(int).clip(0, self._n_cells - 1)
        cells = places[:, one] * self._n_cells + places[:, two]
        nearest = self._nearest[np.arange(len(one)), cells]
        gaps = (clipped[:, columns] - self.points[nearest, columns] for columns in (one, two))
        return np.asarray(np.hypot(*gaps) * (1 + MARGIN))
