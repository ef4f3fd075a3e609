"""Proposals in one dimension: the points on both sides of a query."""

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.block import Block


@final
class Line:
    """The points in ascending order; the nearest stand around the query's place."""

    block_size = 2**13

    def __init__(self, points: Float[Tensor, " n_points 1"]) -> None:
        self.value, self.order = points[:, 0].double().sort(stable=True)

    def propose(
        self, block: Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_candidates"], Float[Tensor, " n_block"]]:
        n_points = len(self.value)
        n_side = n_proposed + block.n_left_out
        n_candidates = min(2 * n_side, n_points)
        query = block.queries[block.rows, 0].double()
        first = torch.searchsorted(self.value, query) - n_side
        first = first.clamp(0, n_points - n_candidates)
        end = first + n_candidates
        before = query - self.value[(first - 1).clamp(min=0)]
        after = self.value[end.clamp(max=n_points - 1)] - query
        before = before.masked_fill(first == 0, math.inf)
        after = after.masked_fill(end == n_points, math.inf)
        place = first[:, None] + torch.arange(n_candidates, device=first.device)
        return self.order[place], torch.minimum(before, after).square()
