"""Distances of queries to the nearest point in the planes of pairs of inputs, and the largest of them."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.ndimage import distance_transform_edt
from scipy.spatial import cKDTree

# A grid has about four cells per point, and at least and at most this many cells on each side.
MIN_CELLS, MAX_CELLS = 32, 256
# Upper bounds are raised by this fraction for rounding.
MARGIN = 1e-9


class _Grids(NamedTuple):
    """A grid of cells for each plane, to bound distances without a search.

    Each cell has a point of the nearest occupied cell. The distance of a query to this point is an upper bound.

    Attributes:
        side: length of a cell along each input.
        nearest: a point for each plane and cell.
    """

    side: Float[np.ndarray, " n_inputs"]
    nearest: Int[np.ndarray, " n_pairs n_cells"]


class Planes:
    """The planes of pairs of inputs. Queries are clipped to the ranges of the points.

    Args:
        points: the points, one row each.
        pairs: pairs of columns.

    Example:
        >>> planes = Planes(np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 3.0]]), [(0, 1), (1, 2)])
        >>> queries = np.array([[0.0, 1.0, 3.0]])
        >>> planes.distances(queries), planes.largest(queries)
        (array([[1., 0.]]), array([1.]))
        >>> planes.largest(queries, at_least=np.array([2.0]))
        array([2.])
    """

    def __init__(
        self, points: Float[np.ndarray, " n n_inputs"], pairs: Sequence[tuple[int, int]]
    ) -> None:
        self.points, self.pairs = points, list(pairs)
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._n_cells = int(2 * math.sqrt(len(points)))
        self._n_cells = max(MIN_CELLS, min(MAX_CELLS, self._n_cells))
        self._was_asked = False

    @cached_property
    def _trees(self) -> list[cKDTree]:
        return [cKDTree(self.points[:, pair]) for pair in self.pairs]

    def distances(
        self, queries: Float[np.ndarray, " n n_inputs"]
    ) -> Float[np.ndarray, " n n_pairs"]:
        """Distance to the nearest point in each plane."""
        clipped = queries.clip(self._low, self._high)
        found = [
            tree.query(clipped[:, pair])[0]
            for pair, tree in zip(self.pairs, self._trees, strict=True)
        ]
        return np.stack(found, axis=1) if found else np.zeros((len(queries), 1))

    def largest(
        self,
        queries: Float[np.ndarray, " n n_inputs"],
        at_least: Float[np.ndarray, " n"] | float = 0.0,
    ) -> Float[np.ndarray, " n"]:
        """The largest of the distances and of ``at_least``.

        A distance is computed only if its upper bound permits it to be the largest. Making the grids takes as long as the
        distances of as many queries as there are points, so the first call of fewer queries computes all distances.
        """
        bounded = self.pairs and (self._was_asked or len(queries) > len(self.points))
        self._was_asked = True
        if not bounded:
            found: np.ndarray = self.distances(queries).max(axis=1).clip(at_least)
            return found
        clipped = queries.clip(self._low, self._high)
        upper = self._upper(clipped)
        largest = np.zeros(len(queries)) + at_least
        # The likely place of the maximum first, so that fewer other distances can exceed it.
        likely = np.arange(len(queries)), upper.argmax(axis=1)
        first = np.zeros_like(upper, dtype=bool)
        first[likely] = upper[likely] > largest
        self._raise(largest, clipped, first)
        self._raise(largest, clipped, (upper > largest[:, None]) & ~first)
        return largest

    def _raise(self, largest: np.ndarray, clipped: np.ndarray, wanted: np.ndarray) -> None:
        """Raise the largest distances to the wanted distances."""
        for number in np.flatnonzero(wanted.any(axis=0)).tolist():
            rows = np.flatnonzero(wanted[:, number])
            queries = clipped[rows][:, self.pairs[number]]
            found = self._trees[number].query(queries)[0]
            largest[rows] = np.maximum(largest[rows], found)

    @cached_property
    def _grids(self) -> _Grids:
        side = (self._high - self._low) / self._n_cells
        side = np.where(side > 0, side, 1.0)
        places, n_cells = self._places(self.points, side), self._n_cells
        grids = _Grids(side, np.empty((len(self.pairs), n_cells**2), np.int32))
        for number, (j, k) in enumerate(self.pairs):
            point = np.full(n_cells**2, -1)
            point[places[:, j] * n_cells + places[:, k]] = np.arange(len(self.points))
            row, column = distance_transform_edt(
                point.reshape(n_cells, n_cells) < 0,
                sampling=(side[j], side[k]),
                return_distances=False,
                return_indices=True,
            )
            grids.nearest[number] = point[(row * n_cells + column).reshape(-1)]
        return grids

    def _places(self, points: np.ndarray, side: np.ndarray) -> np.ndarray:
        places = ((points - self._low) / side).astype(np.int64)
        inside: np.ndarray = places.clip(0, self._n_cells - 1)
        return inside

    def _upper(self, clipped: Float[np.ndarray, " n n_inputs"]) -> Float[np.ndarray, " n n_pairs"]:
        """Upper bounds of the distances."""
        grids, (one, two) = self._grids, np.array(self.pairs).T
        places = self._places(clipped, grids.side)
        cells = places[:, one] * self._n_cells + places[:, two]
        nearest = grids.nearest[np.arange(len(one)), cells]
        squared = (clipped[:, one] - self.points[nearest, one]) ** 2
        squared += (clipped[:, two] - self.points[nearest, two]) ** 2
        upper: np.ndarray = np.sqrt(squared) * (1 + MARGIN)
        return upper
