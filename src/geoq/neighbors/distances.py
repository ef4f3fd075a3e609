r"""Distances between queries and points in float64, by differences or by products.

.. math:: \lVert q - p \rVert^2 = \sum_i (q_i - p_i)^2
    = \lVert q \rVert^2 - 2 q \cdot p + \lVert p \rVert^2
"""

import math
import warnings
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.blocks import Block, Excluded, Rows, split, work_size

# Two ways to sum a squared distance in float64 differ by less than this fraction.
ROUNDING = 1e-12
# Number of columns multiplied at once; partial sums keep rounding errors small.
WIDTH = 4096


@final
class Centred:
    """Points relative to an origin near their mean, where products lose few digits.

    Attributes:
        points: The points themselves, not shifted.
        origin: The mean of some points, rounded to a coarse grid.
        square: Squared distance of each point to the origin, in float64.
    """

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        n_points, n_dims = points.shape
        n_sample = max(1, min(256, work_size(points) // n_dims))
        sample = points[:: -(-n_points // n_sample)].double()
        mean = sample.mean(dim=0)
        spread = float((sample - mean).square().mean().sqrt())
        if spread > 0:  # Differences from a coarse origin are often exact.
            grid = 2.0 ** (math.floor(math.log2(spread)) - 2)
            mean = (mean / grid).round() * grid
        self.points, self.origin = points, mean.to(points.dtype)
        self.square = self.squares(Block(points, slice(0, n_points), None))

    def squares(self, block: Block) -> Float[Tensor, " n_block"]:
        """Squared distance of each query to the origin."""
        parts = block.split(work_size(self.points) // 8 // len(self.origin))
        x, origin = block.queries, self.origin.double()
        # In one place: small results between large temporary arrays would prevent that their memory is freed.
        squares = origin.new_empty(block.size)
        done = 0
        for part in parts:
            gaps = (x[part.rows].double() - origin).square_()
            torch.sum(gaps, dim=1, out=squares[done : done + len(gaps)])
            done += len(gaps)
        return squares

    def columns(
        self,
        x: Float[Tensor, " n_x n_dims"],
        rows: Rows,
        start: int,
        factor: float,
        last: Tensor | float,
        dtype: torch.dtype,
    ) -> Float[Tensor, " n_rows n_columns"]:
        """Columns ``start`` to ``start + WIDTH`` of ``factor * (x - origin)`` with ``last`` as an additional column."""
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


def distances_by_differences(
    block: Block,
    points: Float[Tensor, " n_points n_dims"],
    candidates: Int[Tensor, " n_block n_candidates"],
) -> Float[Tensor, " n_block n_candidates"]:
    """Distances of each query to its candidates; the same bits for every batch size."""
    work, n_dims = work_size(points) // 2, points.shape[1]
    n_columns = max(1, min(candidates.shape[1], work // n_dims))
    distance = candidates.new_empty(candidates.shape, dtype=torch.float64)
    done = 0
    for part in block.split(work // (n_columns * n_dims)):
        query = block.queries[part.rows, None].double()
        at = slice(done, done := done + part.size)
        for some in split(slice(0, candidates.shape[1]), n_columns):
            point = points[candidates[at, some]].double()
            mode = "donot_use_mm_for_euclid_dist"
            distance[at, some] = torch.cdist(query, point, compute_mode=mode)[:, 0]
    return distance


def distances_by_products(
    block: Block, centred: Centred, candidates: Int[Tensor, " n_block n_candidates"]
) -> Float[Tensor, " n_block n_candidates"]:
    """Distances of each query to its candidates; by differences where the products cancel.

    Products of chosen pairs do not copy the points, which saves time in many dimensions on a CPU.
    """
    points, n_points, shape = centred.points, len(centred.points), candidates.shape
    size = (block.size, n_points)
    begin = torch.arange(0, candidates.numel() + 1, shape[1])
    product = torch.zeros(candidates.numel(), dtype=torch.float64)
    total = centred.square[candidates]
    # The number of columns does not depend on the number of queries, nor do the sums.
    n_columns = max(64, min(1024, work_size(points) // n_points))
    for at in split(slice(0, len(centred.origin)), n_columns):
        origin = centred.origin[at].double()
        left = block.queries[:, at][block.rows].double() - origin
        right = points[:, at].double() - origin
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            pairs = torch.sparse_csr_tensor(
                begin, candidates.flatten(), product, size, check_invariants=False
            )
        product = torch.sparse.sampled_addmm(pairs, left, right.T).values()
        total += left.square_().sum(dim=1, keepdim=True)
    return _from_products(block, points, candidates, product.view(shape), total)


def distances_to_all(
    block: Block, centred: Centred
) -> Float[Tensor, " n_block n_points"]:
    """Distances of each query to all points by matrix products; by differences where the products cancel.

    On a GPU, and for few points in many dimensions, this takes less time than measuring a few candidates one by one.
    """
    points, device = centred.points, centred.points.device
    size = (block.size, len(points))
    product = torch.zeros(size, dtype=torch.float64, device=device)
    for at in split(slice(0, len(centred.origin)), work_size(points) // len(points)):
        origin = centred.origin[at].double()
        left = block.queries[:, at][block.rows].double() - origin
        product.addmm_(left, (points[:, at].double() - origin).T)
    total = centred.squares(block)[:, None] + centred.square
    everything = torch.arange(len(points), device=device).expand(size)
    return _from_products(block, points, everything, product, total)


def _from_products(
    block: Block,
    points: Float[Tensor, " n_points n_dims"],
    candidates: Int[Tensor, " n_block n_candidates"],
    product: Float[Tensor, " n_block n_candidates"],
    total: Float[Tensor, " n_block n_candidates"],
) -> Float[Tensor, " n_block n_candidates"]:
    """Distances from products and sums of squared norms; by differences where they cancel."""
    square = total - 2 * product
    distance = square.clamp(min=0).sqrt()
    one, two = (square < total / 1024).nonzero(as_tuple=True)
    near = block._replace(rows=block.indices[one])
    candidate = candidates[one, two][:, None]
    distance[one, two] = distances_by_differences(near, points, candidate)[:, 0]
    return distance


def first_copies(
    points: Float[Tensor, " n_points n_dims"], k: int, excluded: Excluded | None
) -> Int[Tensor, " n_kept"]:
    """Indices of the points that the k nearest neighbours of a query may contain.

    Of equal points, only the first few can be neighbours: ties go to the lower index.
    """
    n_points, n_dims = points.shape
    enough = k + (excluded.most if excluded else 0)
    group = torch.zeros(n_points, dtype=torch.int64, device=points.device)
    if excluded is not None and excluded.most > k and excluded.reach == 0:
        # A query excludes a whole group or nothing of it: k copies per group suffice.
        enough, group = k, excluded.position.unique(return_inverse=True)[1]
    key = _keys(points, group)
    order = key.argsort(stable=True)
    same = torch.cat([order[:1] < 0, key[order[1:]] == key[order[:-1]]])
    for at in same.nonzero()[:, 0].split(max(1, work_size(points) // n_dims)):
        one, two = order[at], order[at - 1]
        same[at] = (points[one] == points[two]).all(dim=1) & (group[one] == group[two])
    place = torch.arange(n_points, device=points.device)
    n_before = place - torch.where(same, 0, place).cummax(dim=0).values
    return order[n_before < enough].sort().values


def _keys(
    points: Float[Tensor, " n_points n_dims"], group: Int[Tensor, " n_points"]
) -> Int[Tensor, " n_points"]:
    """Hash of each point and its group: a random linear combination of their bits, modulo 2^64."""
    n_points, n_dims = points.shape
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(2**61, (n_dims + 1,), generator=generator)
    odd = (2 * odd + 1).to(points.device)
    bits = torch.int32 if points.dtype == torch.float32 else torch.int64
    key = group * odd[-1]
    for some in split(slice(0, n_points), work_size(points) // n_dims):
        # Adding zero turns -0.0, which equals 0.0 but has other bits, into 0.0.
        key[some] += ((points[some] + 0.0).view(bits).long() * odd[:-1]).sum(dim=1)
    return key
