r"""Distances of pairs of query and point, in float64, by differences or by products.

.. math:: \lVert q - p \rVert^2 = \sum_i (q_i - p_i)^2
    = \lVert q \rVert^2 - 2 q \cdot p + \lVert p \rVert^2
"""

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.block import Block
from geoq.neighbors.centred import Centred
from geoq.neighbors.rows import split, work_size

# Two ways to add up a squared distance in float64 differ by less than this fraction.
ROUNDING = 1e-12


def distances_by_differences(
    block: Block,
    points: Float[Tensor, " n_points n_dims"],
    candidates: Int[Tensor, " n_block n_candidates"],
) -> Float[Tensor, " n_block n_candidates"]:
    """Distances of each query to its candidates; pair by pair, whatever the batch."""
    work, n_dims = work_size(points) // 2, points.shape[1]
    n_columns = max(1, min(candidates.shape[1], work // n_dims))
    distance = torch.empty(
        candidates.shape, dtype=torch.float64, device=candidates.device
    )
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
    """Distances of each query to its candidates; by differences where these cancel.

    Products at chosen pairs gather nothing: with 100,000 dimensions on CPU they take a
    fifth of the time of differences.
    """
    points, n_points, shape = centred.points, len(centred.points), candidates.shape
    begin = torch.arange(0, candidates.numel() + 1, shape[1])
    product = torch.zeros(candidates.numel(), dtype=torch.float64)
    total = centred.square[candidates]
    # As many columns for one query as for a thousand, for the same sums.
    n_columns = max(64, min(1024, work_size(points) // n_points))
    for at in split(slice(0, len(centred.origin)), n_columns):
        origin = centred.origin[at].double()
        left = block.queries[:, at][block.rows].double() - origin
        right = points[:, at].double() - origin
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            pairs = torch.sparse_csr_tensor(
                begin,
                candidates.flatten(),
                product,
                (block.size, n_points),
                check_invariants=False,
            )
        product = torch.sparse.sampled_addmm(pairs, left, right.T).values()
        total += left.square_().sum(dim=1, keepdim=True)
    square = total - 2 * product.view(shape)
    distance = square.clamp(min=0).sqrt()
    one, two = (square < total / 1024).nonzero(as_tuple=True)
    near = block._replace(rows=block.indices[one])
    near_distance = distances_by_differences(
        near, points, candidates[one, two][:, None]
    )
    distance[one, two] = near_distance[:, 0]
    return distance
