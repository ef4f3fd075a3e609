"""Queries that are answered together, and the points excluded from the answer of each query."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

# Rows of a tensor: a slice, which copies nothing, or indices.
Rows = slice | Tensor


def work_size(x: Tensor) -> int:
    """Number of elements of a temporary array: fits the cache of a CPU, fills a GPU."""
    return 2**24 if x.device.type == "cuda" else 2**20


def split(rows: Rows, size: int) -> Iterator[Rows]:
    """Split rows into parts of at most ``size`` rows, and of at least one row."""
    size = max(1, size)
    if isinstance(rows, Tensor):
        yield from rows.split(size) if len(rows) else ()
        return
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def as_slice(rows: Int[Tensor, " n_rows"]) -> Rows:
    """Return the same rows as a slice if they are consecutive."""
    if not bool((rows.diff() == 1).all()):
        return rows
    return slice(int(rows[0]), int(rows[0]) + len(rows))


class Excluded(NamedTuple):
    r"""Points that are too close in position to a query: a range of ranks for each query.

    .. math:: |t_q - t_j| \le \text{reach} \iff \text{start}_q \le \text{rank}_j < \text{stop}_q

    Attributes:
        position: Position :math:`t_j` of each point, in float64 or int64.
        queried: Position :math:`t_q` of each query.
        reach: Largest difference in position that excludes a point.
        order: Points sorted by position.
        rank: Place of each point in that order.
        start: First excluded rank of each query.
        stop: First rank behind the excluded ones of each query.
        most: Largest number of excluded points of a query.
    """

    position: Num[Tensor, " n_points"]
    queried: Num[Tensor, " n_queries"]
    reach: float
    order: Int[Tensor, " n_points"]
    rank: Int[Tensor, " n_points"]
    start: Int[Tensor, " n_queries"]
    stop: Int[Tensor, " n_queries"]
    most: int

    def mask(
        self, queries: Rows, rank: Int[Tensor, " n_block n_candidates"]
    ) -> Bool[Tensor, " n_block n_candidates"]:
        """Mask of the candidates, given by rank, that are excluded for their query."""
        start, stop = self.start[queries], self.stop[queries]
        return (rank >= start[:, None]) & (rank < stop[:, None])

    def among(self, kept: Int[Tensor, " n_kept"]) -> "Excluded":
        """Apply the same rule to a subset of the points."""
        return exclude_within(self.position[kept], self.queried, self.reach)


def exclude_within(
    position: Num[Tensor, " n_points"], queried: Num[Tensor, " n_queries"], reach: float
) -> Excluded:
    """Exclude, for each query, the points within ``reach`` of its position."""
    # Integers stay integers: float64 would round times in nanoseconds.
    kind = torch.float64 if position.is_floating_point() else torch.int64
    position, queried = position.to(kind), queried.to(kind)
    reach = reach if kind is torch.float64 else math.floor(reach)
    order = position.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    ascending = position[order]
    start, stop = torch.zeros((2, len(queried)), dtype=torch.int64, device=order.device)
    # Bisection on the rounded difference of the formula; torch.searchsorted would
    # compare with the rounded limits t - reach and t + reach.
    for step in reversed(range(len(order).bit_length())):
        for count, before in ((start, True), (stop, False)):
            at = count + 2**step
            gap = queried - ascending[at.clamp(max=len(order)) - 1]
            passed = gap > reach if before else gap >= -reach
            count += 2**step * (passed & (at <= len(order)))
    most = int((stop - start).max())
    return Excluded(position, queried, reach, order, rank, start, stop, most)


class Block(NamedTuple):
    """Queries that are answered together.

    Attributes:
        queries: All queries.
        rows: Rows of the queries in this block.
        excluded: Points excluded from the answer of each query; None excludes nothing.
    """

    queries: Float[Tensor, " n_queries n_dims"]
    rows: Rows
    excluded: Excluded | None

    @property
    def indices(self) -> Int[Tensor, " n_block"]:
        """The rows of the block as indices."""
        if isinstance(self.rows, Tensor):
            return self.rows
        device = self.queries.device
        return torch.arange(self.rows.start, self.rows.stop, device=device)

    @property
    def size(self) -> int:
        """Number of queries in the block."""
        if isinstance(self.rows, Tensor):
            return len(self.rows)
        return len(range(self.rows.start, self.rows.stop))

    @property
    def n_excluded(self) -> int:
        """Largest number of points excluded for a query."""
        return self.excluded.most if self.excluded else 0

    def split(self, size: int) -> "Iterator[Block]":
        """Split the block into blocks of at most ``size`` queries."""
        for part in split(self.rows, size):
            rows = as_slice(part) if isinstance(part, Tensor) else part
            yield self._replace(rows=rows)
