"""Points about an origin amid them, where products lose little to rounding."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.neighbors.block import Block
from geoq.neighbors.rows import Rows, work_size

# Columns multiplied at once; sums in parts keep rounding errors small.
WIDTH = 4096


@final
class Centred:
    """The points, the origin, and the squared distance of each point to it."""

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        n_points, n_dims = points.shape
        n_sample = max(1, min(256, work_size(points) // n_dims))
        sample = points[:: -(-n_points // n_sample)].double()
        mean = sample.mean(dim=0)
        spread = float((sample - mean).square().mean().sqrt())
        if spread > 0:  # On a coarse grid, differences of short numbers are exact.
            grid = 2.0 ** (math.floor(math.log2(spread)) - 2)
            mean = (mean / grid).round() * grid
        self.points, self.origin = points, mean.to(points.dtype)
        self.square = self.squares(Block(points, slice(0, n_points), None))

    def squares(self, block: Block) -> Float[Tensor, " n_block"]:
        """Squared distances of queries to the origin."""
        parts = block.split(work_size(self.points) // 8 // len(self.origin))
        x, origin = block.queries, self.origin.double()
        squares = [(x[p.rows].double() - origin).square_().sum(dim=1) for p in parts]
        return torch.cat(squares)

    def columns(
        self,
        x: Float[Tensor, " n_x n_dims"],
        rows: Rows,
        start: int,
        factor: float,
        last: Tensor | float,
        dtype: torch.dtype,
    ) -> Float[Tensor, " n_rows n_columns"]:
        """WIDTH columns from start on of factor * (x - origin) with last appended."""
        n_dims = len(self.origin)
        stop = min(start + WIDTH, n_dims)
        kind = torch.promote_types(x.dtype, dtype)
        part, origin = x[:, start:stop][rows].to(kind), self.origin[start:stop].to(kind)
        if factor != 1:
            part, origin = part * factor, origin * factor
        width = stop - start + (start + WIDTH > n_dims)
        out = torch.empty((len(part), width), dtype=dtype, device=x.device)
        torch.sub(part, origin, out=out[:, : stop - start])
        if width > stop - start:
            out[:, -1] = last
        return out
