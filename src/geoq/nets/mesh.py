"""A network for values at the nodes of a mesh or of a point cloud, made of the blocks of the U-Net."""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import coo_matrix
from scipy.spatial import cKDTree
from torch import Tensor, nn

from geoq.data.domain import Mesh
from geoq.nets.unet import FiLMBlock, embedding

# Directions in which the neighbours of a node extend by less than this fraction have no gradient, as across a surface.
MIN_EXTENT = 1e-2
# The number of neighbours of a node for each dimension of its coordinates.
NEIGHBORS_PER_DIMENSION = 4
# The smallest positive number that is divided by.
TINY = 1e-300


@lru_cache(maxsize=8)
def stencils(mesh: Mesh, n_neighbors: int) -> Float[Tensor, " n_rows n_nodes"]:
    """The sums over the nearest nodes that a convolution combines at each node: a sparse matrix, one sum after the other.

    They are the value at the node, the mean over its neighbourhood, and the gradient along each coordinate times the mean
    distance to the neighbours. The weights of the neighbours decrease to 0 at the first node that is not a neighbour. Therefore
    they do not depend on the numbers of the nodes, also if several nodes have the same distance.
    """
    coordinates = mesh.coordinates
    n_nearest = min(n_neighbors + 2, len(coordinates))
    distance, index = cKDTree(coordinates).query(coordinates, k=n_nearest)
    radius = np.maximum(distance[:, -1:], TINY)
    distance, index = distance[:, :-1], index[:, :-1]
    mean = np.maximum(1 - (distance / radius) ** 2, TINY)
    mean /= mean.sum(axis=1, keepdims=True)
    offset = coordinates[index] - coordinates[:, None]
    spread = np.einsum("ik,ika,ikb->iab", mean, offset, offset)
    inverse = np.linalg.pinv(spread, rcond=MIN_EXTENT**2, hermitian=True)
    gradient = np.einsum("iab,ikb,ik->ika", inverse, offset, mean)
    gradient *= (mean * distance).sum(axis=1)[:, None, None]
    # The first column is the node itself, whose value is subtracted in the gradient.
    at_nearest = np.concatenate([0 * mean[..., None], mean[..., None], gradient], 2)
    at_node = -at_nearest.sum(axis=1, keepdims=True)
    at_node[..., :2] = 1, 0
    weight = np.concatenate([at_node, at_nearest], axis=1)
    own = np.arange(len(index))[:, None]
    column = np.concatenate([own, index], axis=1)[:, :, None]
    row = own[:, :, None] + len(index) * np.arange(weight.shape[2])
    place = [part.ravel() for part in np.broadcast_arrays(row, column)]
    shape = (len(index) * weight.shape[2], len(index))
    summed = coo_matrix((weight.ravel(), place), shape).tocsr().tocoo()
    return torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([summed.row, summed.col])),
        torch.from_numpy(summed.data).float(),
        shape,
        device="cpu",
        is_coalesced=True,
        check_invariants=False,
    )


class MeshConvolution(nn.Module):
    """A linear combination of the sums of all channels, the same at each node.

    The matrix of the sums depends on the nodes alone, and is no part of the state.
    """

    def __init__(self, n_in: int, n_out: int, matrix: Float[Tensor, " n_rows n_nodes"]) -> None:
        super().__init__()
        self.matrix, self.n_sums = matrix, matrix.shape[0] // matrix.shape[1]
        self.combination = nn.Conv1d(n_in * self.n_sums, n_out, 1)

    def sums(self, values: Float[Tensor, " n n_in n_nodes"]) -> Float[Tensor, " n n_all n_nodes"]:
        """All sums of all channels."""
        sums = torch.sparse.mm(self.matrix.to(values), values.flatten(0, 1).T)
        by_node = sums.view(self.n_sums, -1, *values.shape[:2])
        result: Tensor = by_node.permute(2, 3, 0, 1).flatten(1, 2)
        return result

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.combination(self.sums(values))
        return result


class MeshNet(nn.Module):
    """A sequence of blocks on the nodes of a mesh, each conditioned on one number per field.

    Each block combines twice as many neighbours as the block before it. ``widths`` are the numbers of channels of the blocks.

    Example:
        >>> mesh = Mesh(np.random.default_rng(0).uniform(size=(50, 2)))
        >>> network = MeshNet(3, 2, mesh=mesh, widths=(4,))
        >>> network(torch.zeros(5, 3, 50), torch.ones(5)).shape
        torch.Size([5, 2, 50])
    """

    def __init__(
        self, n_in: int, n_out: int, *, mesh: Mesh, widths: Sequence[int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = embedding()
        self.blocks = nn.ModuleList()
        n_near = mesh.n_neighbors or NEIGHBORS_PER_DIMENSION * mesh.coordinates.shape[1]
        for block, (before, width) in enumerate(pairwise([n_in, *widths])):
            matrix = stencils(mesh, n_near * 2**block)
            convolution = partial(MeshConvolution, matrix=matrix)
            self.blocks.append(FiLMBlock(before, width, convolution=convolution, dropout=dropout))
        self.output = nn.Conv1d(widths[-1], n_out, kernel_size=1)

    def forward(
        self, field: Float[Tensor, " n n_in n_nodes"], number: Float[Tensor, " n"]
    ) -> Float[Tensor, " n n_out n_nodes"]:
        condition = self.embedding(number[:, None])
        for block in self.blocks:
            field = block(field, condition)
        result: Tensor = self.output(field)
        return result
