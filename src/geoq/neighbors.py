"""Exact nearest points, by the k-d tree of SciPy or the matrix products of scikit-learn; ties go to the lower index."""

from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import cKDTree

from geoq.arrays import chunks, flat

# Largest dimension in which a tree is faster than matrix products.
MAX_TREE_DIMS = 8
# More points than asked for, so that ties at the last one are seen; for products also because of their rounding.
N_MORE = 4
# Rounding error of a squared distance from matrix products, in units of the squared length of a point: for each dimension, and of
# points in single precision, whose products are summed in double precision.
ROUNDING, SINGLE = 1e-15, 1e-6
# Squared distances of up to this many rounding errors have few digits.
SMALL = 1e9
# Rows are equal up to rounding if they differ by at most this fraction of what differs from the neighbour of the second number, because
# a row can have several copies. The differences are measured in this many coordinates.
ROUNDED, N_NEAR, N_SKETCH = 1e-2, 8, 4
# Rows of a run are copies if they are equal to this many consecutive rows of another run, up to this many times as much.
LONG, LOOSE = 10, 5.0


class Neighbors:
    r"""The k nearest points of queries; ties go to the lower index.

    .. math:: \mathcal N_k(q) = \text{first } k \text{ of the pairs }
        (\lVert q - p_j \rVert_2, j) \text{ in lexicographic order}

    Args:
        points: the points to search, one per row.

    Example:
        >>> points = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
        >>> distance, index = Neighbors(points).nearest(np.array([[0.0, 0.0]]), k=4)
        >>> distance.tolist(), index.tolist()
        ([[0.0, 0.0, 1.0, 5.0]], [[0, 3, 1, 2]])
    """

    def __init__(self, points: Float[np.ndarray, " n_points n_dims"]) -> None:
        self.points = points

    @cached_property
    def _engine(self) -> Any:
        if self.points.shape[1] <= MAX_TREE_DIMS:
            return cKDTree(self.points)
        from sklearn.neighbors import NearestNeighbors  # here: a slow import

        return NearestNeighbors(algorithm="brute").fit(self.points)

    @cached_property
    def _slack(self) -> float:
        """The largest rounding error of a squared distance."""
        if self.points.shape[1] <= MAX_TREE_DIMS:
            return 0.0
        largest = max(
            float((self.points[part] ** 2).sum(axis=1).max())
            for part in chunks(len(self.points), self.points.shape[1])
        )
        single = SINGLE * (self.points.dtype == np.float32)
        return (ROUNDING * self.points.shape[1] + single) * largest

    def nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Distances (ascending) and indices of the k points nearest to each query, one row per query."""
        n = len(self.points)
        if not 1 <= k <= n:
            raise ValueError(f"k={k}, but there are {n} points; choose k from 1 to {n}.")
        distance = np.empty((len(queries), k))
        index = np.empty((len(queries), k), dtype=np.int64)
        left, m = np.arange(len(queries)), min(n, k + N_MORE)
        while len(left):
            found = self._proposed(queries[left], m)
            distance[left], index[left] = found[0][:, :k], found[1][:, :k]
            # Final unless the last of the k is as near as the last proposed one.
            gap = found[0][:, m - 1] ** 2 - found[0][:, k - 1] ** 2
            left = left[(gap <= self._slack) & (m < n)]
            m = min(n, 4 * m)
            if len(left) and self._copies is not None:
                for part in chunks(len(left), 16 * k):
                    own = left[part]
                    distance[own], index[own] = self._among_copies(queries[own], k)
                break
        return distance, index

    @cached_property
    def _copies(self) -> tuple["Neighbors", np.ndarray, np.ndarray] | None:
        """The distinct points in the order of their first rows, the rows of each, and where these start; None without copies."""
        # Rows as bytes, which are sorted more quickly than rows of numbers; -0 becomes 0.
        values = np.ascontiguousarray(self.points + 0.0)
        as_bytes = values.view(f"V{values[0].nbytes}")[:, 0]
        _, first, place = np.unique(as_bytes, return_index=True, return_inverse=True)
        if len(first) == len(values):
            return None
        number = first.argsort().argsort()[place]
        start = np.cumsum([0, *np.bincount(number)])
        return Neighbors(self.points[np.sort(first)]), np.argsort(number, kind="stable"), start

    def _among_copies(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest points of queries by a search of the distinct points: copies would all be proposed together."""
        assert self._copies is not None
        distinct, rows, start = self._copies
        near, which = distinct.nearest(queries, min(k, len(distinct.points)))
        count = np.minimum(np.diff(start)[which], k)
        # Copies of the points up to the k-th row, and of those at its distance.
        place = (count.cumsum(axis=1) - count < k).sum(axis=1, keepdims=True) - 1
        count = np.where(near <= np.take_along_axis(near, place, 1), count, 0)
        each, size = count.reshape(-1), count.sum(axis=1)
        copy = np.arange(len(each)).repeat(each)
        within = np.arange(len(copy)) - (each.cumsum() - each)[copy]
        index, distance = rows[start[which.reshape(-1)[copy]] + within], near.reshape(-1)[copy]
        order = np.lexsort((index, distance, np.arange(len(size)).repeat(size)))
        chosen = order[(size.cumsum() - size)[:, None] + np.arange(k)]
        return distance[chosen], index[chosen]

    def _proposed(self, queries: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        """The m nearest points up to rounding, sorted by their distances and then by their indices."""
        if self.points.shape[1] <= MAX_TREE_DIMS:
            found = self._engine.query(queries, m)
            distance, index = (part.reshape(len(queries), m) for part in found)
        else:
            distance, index = self._engine.kneighbors(queries, m)
            distance = distance.astype(float)
            self._refine(queries, distance, index)
        order = np.lexsort((index, distance), axis=1)
        return np.take_along_axis(distance, order, 1), np.take_along_axis(index, order, 1)

    def _refine(self, queries: np.ndarray, distance: np.ndarray, index: np.ndarray) -> None:
        """Compute distances from differences where products lose digits: near 0, and where two of them are nearly equal."""
        squared = distance**2
        close = np.diff(squared, axis=1).min(axis=1, initial=np.inf) <= self._slack
        rows = np.flatnonzero(close | (squared[:, 0] <= SMALL * self._slack))
        for part in chunks(len(rows), distance.shape[1] * queries.shape[1]):
            own = rows[part]
            gap = self.points[index[own]] - queries[own, None].astype(float)
            distance[own] = np.sqrt((gap * gap).sum(axis=2))

    def nearest_other(
        self, k: int, group: Int[np.ndarray, " n_points"] | None = None, reach: int = 0
    ) -> Float[np.ndarray, " n_points k"]:
        r"""Distances (ascending) to the k nearest other points, for each point.

        A copy of a point counts as another point, at distance zero. With groups, such as times or the numbers of groups, points
        whose groups differ by at most ``reach`` do not count.
        """
        n, own = len(self.points), np.arange(len(self.points))
        groups = own if group is None else group
        distance, left, m = np.full((n, k), np.nan), own, min(n, k + N_MORE)
        while len(left):
            near, index = self.nearest(self.points[left], m)
            counts = abs(groups[index] - groups[left, None]) > reach
            # Stable, so that the points that count come first in the order of their distances.
            order = np.argsort(~counts, axis=1, kind="stable")[:, :k]
            enough = counts.sum(axis=1) >= k
            distance[left[enough]] = np.take_along_axis(near, order, axis=1)[enough]
            if m == n and not enough.all():
                raise ValueError(f"k={k}, but a point has fewer independent others.")
            left, m = left[~enough], min(n, 4 * m)
        return distance


def sketch(values: np.ndarray, n: int = N_SKETCH) -> Float[np.ndarray, " n_rows n"]:
    """At most n numbers that stand for each row: random combinations of its numbers; nan counts as 0."""
    size = int(np.prod(values.shape[1:]))
    rng, shape = np.random.default_rng(0), (min(n, size), size)
    # A single number must also show a common offset.
    mixed = rng.uniform(0.5, 1.5, shape) if n == 1 else rng.normal(size=shape)
    found = np.empty((len(values), len(mixed)))
    for part in chunks(len(values), size):
        rows = np.nan_to_num(flat(values[part]).astype(float))
        # No product of matrices, whose rounding depends on the number of rows.
        found[part] = rows if size <= n else np.stack([(rows * m).sum(axis=1) for m in mixed], 1)
    return found


def near_copies(x: np.ndarray, y: np.ndarray, times: float = 1.0) -> Int[np.ndarray, " n"]:
    """The first row that each row equals up to rounding, in x and in y; otherwise its own number."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n, k = len(x), min(len(x) - 1, N_NEAR)
    own = np.arange(n)
    if k < 2:
        return own
    a, b = sketch(x), sketch(y)
    distance, index = cKDTree(a).query(a, k + 1)
    gap = abs(b[index] - b[:, None]).max(axis=2)
    # On a line the neighbour of number k is k times as far as the first one.
    limits = (times * ROUNDED * np.median(part[:, k]) / k for part in (distance, gap))
    near = [part <= limit for part, limit in zip((distance, gap), limits, strict=True)]
    rows, place = np.nonzero(near[0] & near[1] & (index != own[:, None]))
    pairs = coo_array((np.ones(len(rows)), (rows, index[rows, place])), (n, n))
    _, first, group = np.unique(
        connected_components(pairs, directed=False)[1], return_index=True, return_inverse=True
    )
    return own[first][group]


def copied_runs(points: np.ndarray, number: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """As ``near_copies`` for rows that consecutive rows of an earlier run equal; otherwise the own number of each row."""
    first = near_copies(points, points, LOOSE)
    copied = number[first] != number
    goes_on = copied[1:] & copied[:-1] & (np.diff(first) == 1) & (np.diff(number) == 0)
    stretch = np.cumsum(np.r_[True, ~goes_on])
    copied &= np.bincount(stretch)[stretch] >= LONG
    return np.where(copied, first, np.arange(len(first)))
