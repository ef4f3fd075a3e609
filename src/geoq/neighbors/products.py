"""Proposals in many dimensions: matrix products with bounded rounding errors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.block import Block
from geoq.neighbors.centred import WIDTH, Centred
from geoq.neighbors.rows import Rows, as_slice, work_size


@final
class Products:
    r"""Squared distances from matrix products, bounded from below.

    .. math:: \lVert q - p \rVert^2 \ge (1 - 2 \epsilon) \lVert p \rVert^2
        - 2 q \cdot p + (1 - \epsilon) \lVert q \rVert^2

    holds for rounded products, up to underflow. All but the last term is the value of
    a pair: one product of rows with a column appended. The k least values stand in the
    k groups of consecutive points with the least minima, so few values are computed
    twice or sorted. Points are consecutive in position, and known by their rank in it,
    where some are left out.

    Written here for its speed: on one CPU thread, with exact distances included, it
    takes a third of the time of FAISS and of scikit-learn at 1e6 points in 16
    dimensions, and as long as FAISS, half of scikit-learn, at 1e5 points in 64.
    """

    def __init__(self, centred: Centred, dtype: torch.dtype) -> None:
        self.centred, self.dtype = centred, dtype
        n_dims, unit = len(centred.origin), torch.finfo(dtype).eps / 2
        # A sum of n rounded products is off by n units at worst, and by more than
        # 8 sqrt(n) with a probability below 2 exp(-32) (Higham and Mary, 2019).
        likely = 8 * (math.sqrt(min(n_dims, WIDTH)) + math.sqrt(n_dims / WIDTH))
        self.error = (min(n_dims, likely) + 8) * unit
        self.underflow = 8 * (n_dims + 8) * torch.finfo(dtype).tiny
        self.block_size = 512 if n_dims < 256 else 1024
        if centred.points.device.type == "cuda":
            self.block_size = 4096

    def propose(
        self, block: Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_candidates"], Float[Tensor, " n_block"]]:
        n_points = len(self.centred.points)
        square, scale = self._scale(block)
        group_size = self._group_size(block.size, n_proposed)
        value, rank = _least(self._minima(block, scale, group_size), n_proposed + 1)
        bound, rank = value[:, -1], rank[:, :-1]
        if group_size > 1:
            rank = _members(rank, group_size)
            value = self._values(block, scale, rank)
            value, at = value.topk(n_proposed + 1, largest=False)
            bound = torch.minimum(bound, value[:, -1])
            rank = rank.gather(1, at[:, :-1]).clamp(max=n_points - 1)
        bound = (bound.double() - self.underflow) / scale**2
        candidates = rank if block.left_out is None else block.left_out.order[rank]
        return candidates, bound + square * (1 - self.error)

    def within(
        self, block: Block, radius: Float[Tensor, " n_block"]
    ) -> tuple[Int[Tensor, " n_pairs"], Int[Tensor, " n_pairs"]]:
        """Pairs (place in the block, point) that may lie within the radius."""
        square, scale = self._scale(block)
        limit = (radius.square() - square * (1 - self.error)) * scale**2
        found = []
        for start, tile in self._tiles(block, scale, 1, None):
            hit = (tile <= limit + self.underflow).nonzero()
            hit[:, 0] += start
            found.append(hit)
        rank, which = torch.cat(found).unbind(dim=1)
        return which, rank if block.left_out is None else block.left_out.order[rank]

    def _scale(self, block: Block) -> tuple[Float[Tensor, " n_block"], float]:
        """Squared norms of the queries; a power of two that tames extreme norms."""
        square = self.centred.squares(block)
        largest = float(torch.maximum(square.max(), self.centred.square.max()))
        exponent = math.ceil(math.log2(largest) / 2) if largest > 0 else 0
        limit = 120 if block.queries.dtype == torch.float32 else 500
        if abs(exponent) < 30:
            return square, 1.0
        return square, 2.0 ** -max(-limit, min(limit, exponent))

    def _group_size(self, n_block: int, n_proposed: int) -> int:
        """Points in a group: as few as the memory for all minima allows."""
        n_points = len(self.centred.points)
        size = n_points * n_block / (8 * work_size(self.centred.points))
        size = min(2 ** math.ceil(math.log2(size)), n_points // (n_proposed + 1))
        return int(max(1, size))

    def _minima(
        self, block: Block, scale: float, group_size: int
    ) -> Float[Tensor, " n_groups n_block"]:
        """Least value of each group of consecutive points, for each query."""
        n_points = len(self.centred.points)
        least = self._empty(-(-n_points // group_size), block.size)
        keep = least if group_size == 1 else None
        for start, tile in self._tiles(block, scale, group_size, keep):
            if keep is not None:
                continue
            whole = len(tile) // group_size
            groups = tile[: whole * group_size].view(whole, group_size, block.size)
            torch.amin(groups, dim=1, out=least[start // group_size :][:whole])
            if whole * group_size < len(tile):
                least[-1] = tile[whole * group_size :].amin(dim=0)
        return least

    def _tiles(
        self, block: Block, scale: float, multiple: int, keep: Tensor | None
    ) -> Iterator[tuple[int, Float[Tensor, " n_rows n_block"]]]:
        """Values of consecutive points, infinite where left out.

        Each tile is written over the last, or into its part of the array to keep.
        """
        centred, points, left_out = self.centred, self.centred.points, block.left_out
        n_points, n_dims = points.shape
        work, n_columns = work_size(points), min(n_dims, WIDTH)
        size = min(work // block.size, 4 * work // n_columns, n_points)
        size = max(1, size // multiple) * multiple
        tile = self._empty(size, block.size) if keep is None else keep
        right = None
        hidden = range(0)
        if left_out is not None:
            begin, end = left_out.start[block.rows], left_out.stop[block.rows]
            hidden = range(int(begin.min()), int(end.max()))
        for start in range(0, n_points, size):
            rows: Rows = slice(start, min(start + size, n_points))
            if left_out is not None:
                rows = as_slice(left_out.order[rows])
            weight = self._weight(rows, scale)
            out = tile[0 if keep is None else start :][: len(weight)]
            for at in range(0, n_dims + 1, WIDTH):
                if right is None or n_dims >= WIDTH:
                    right = self._right(block, at, scale)
                left = centred.columns(points, rows, at, scale, weight, self.dtype)
                with _full_precision(points.device):
                    torch.addmm(out, left, right.T, beta=int(at > 0), out=out)
            if left_out and start < hidden.stop and start + size > hidden.start:
                rank = start + torch.arange(len(out), device=out.device)[:, None]
                out.masked_fill_((rank >= begin) & (rank < end), math.inf)
            yield start, out

    def _values(
        self, block: Block, scale: float, rank: Int[Tensor, " n_block n_candidates"]
    ) -> Float[Tensor, " n_block n_candidates"]:
        """Values at chosen points, infinite past the last and where left out."""
        centred, points, left_out = self.centred, self.centred.points, block.left_out
        n_points, n_dims = points.shape
        value = torch.zeros_like(rank, dtype=self.dtype)
        done, n_candidates = 0, rank.shape[1]
        for part in block.split(
            work_size(points) // 4 // (n_candidates * min(n_dims, WIDTH))
        ):
            at = slice(done, done := done + part.size)
            rows = rank[at].clamp(max=n_points - 1).flatten()
            rows = left_out.order[rows] if left_out else rows
            weight = self._weight(rows, scale)
            for start in range(0, n_dims + 1, WIDTH):
                left = centred.columns(points, rows, start, scale, weight, self.dtype)
                left = left.view(part.size, n_candidates, left.shape[1])
                with _full_precision(points.device):
                    product = left @ self._right(part, start, scale)[:, :, None]
                value[at] += product[:, :, 0]
        value.masked_fill_(rank >= n_points, math.inf)
        if left_out is not None:
            value.masked_fill_(left_out.hides(block.rows, rank), math.inf)
        return value

    def _right(
        self, block: Block, start: int, scale: float
    ) -> Float[Tensor, " n_block n_columns"]:
        x, rows = block.queries, block.rows
        return self.centred.columns(x, rows, start, -2 * scale, 1, self.dtype)

    def _weight(self, rows: Rows, scale: float) -> Float[Tensor, " n_rows"]:
        return self.centred.square[rows] * (scale**2 * (1 - 2 * self.error))

    def _empty(self, *shape: int) -> Float[Tensor, " n_rows n_block"]:
        return torch.empty(shape, dtype=self.dtype, device=self.centred.origin.device)


def _least(
    values: Float[Tensor, " n_values n_block"], n_least: int
) -> tuple[Float[Tensor, " n_block n_least"], Int[Tensor, " n_block n_least"]]:
    """The least values of each column, ascending, and where they stand."""
    n_values, n_block = values.shape
    n_groups = n_values // 8
    if n_groups < 4 * n_least:
        return values.T.contiguous().topk(n_least, largest=False)
    # The least of groups first: minima take less time than sorting all values.
    groups = values[: 8 * n_groups].view(n_groups, 8, n_block)
    rows = _members(_least(groups.amin(dim=1), n_least)[1], 8)
    rest = torch.arange(8 * n_groups, n_values, device=rows.device)
    rows = torch.cat([rows, rest.expand(n_block, -1)], dim=1)
    value, at = values.T.gather(1, rows).topk(n_least, largest=False)
    return value, rows.gather(1, at)


def _members(
    groups: Int[Tensor, " n_block n_groups"], group_size: int
) -> Int[Tensor, " n_block n_members"]:
    """The consecutive rows that groups of equal size consist of."""
    member = torch.arange(group_size, device=groups.device)
    return (groups[:, :, None] * group_size + member).flatten(start_dim=1)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products without TF32 or bfloat16, whose errors are outside the bounds."""
    cuda = device.type == "cuda"
    backend: Any = torch.backends.cuda if cuda else torch.backends.mkldnn
    flags = backend.matmul
    before, flags.fp32_precision = flags.fp32_precision, "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before
