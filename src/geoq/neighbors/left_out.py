"""Which points a query may not see: itself, its group, its stretch of a trajectory."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Num
from torch import Tensor

from geoq.neighbors.rows import Rows


class LeftOut(NamedTuple):
    r"""Points too close in position to a query: a range of ranks for each query.

    .. math:: |t_q - t_j| \le \text{reach} \iff
        \text{start}_q \le \text{rank}_j < \text{stop}_q
    """

    position: Num[Tensor, " n_points"]
    queried: Num[Tensor, " n_queries"]
    reach: float
    order: Int[Tensor, " n_points"]  # The points by ascending position.
    rank: Int[Tensor, " n_points"]  # Where each point stands in that order.
    start: Int[Tensor, " n_queries"]
    stop: Int[Tensor, " n_queries"]
    most: int  # The largest number of points left out for one query.

    def hides(
        self, queries: Rows, rank: Int[Tensor, " n_block n_candidates"]
    ) -> Bool[Tensor, " n_block n_candidates"]:
        """Whether each query may not see its candidates, which are given by rank."""
        start, stop = self.start[queries], self.stop[queries]
        return (rank >= start[:, None]) & (rank < stop[:, None])

    def among(self, kept: Int[Tensor, " n_kept"]) -> "LeftOut":
        """The same rule for some of the points."""
        return left_out(self.position[kept], self.queried, self.reach)


def left_out(
    position: Num[Tensor, " n_points"], queried: Num[Tensor, " n_queries"], reach: float
) -> LeftOut:
    """Leave out the points within reach of each queried position."""
    # Whole positions stay whole: times in nanoseconds would be rounded in float64.
    kind = torch.float64 if position.is_floating_point() else torch.int64
    position, queried = position.to(kind), queried.to(kind)
    reach = reach if kind is torch.float64 else math.floor(reach)
    order = position.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    ascending = position[order]
    start, stop = torch.zeros((2, len(queried)), dtype=torch.int64, device=order.device)
    # Bisection by rounded differences, those of the formula, not by rounded limits
    # t - reach and t + reach as torch.searchsorted would.
    for step in reversed(range(len(order).bit_length())):
        for count, before in ((start, True), (stop, False)):
            at = count + 2**step
            gap = queried - ascending[at.clamp(max=len(order)) - 1]
            passed = gap > reach if before else gap >= -reach
            count += 2**step * (passed & (at <= len(order)))
    most = int((stop - start).max())
    return LeftOut(position, queried, reach, order, rank, start, stop, most)
