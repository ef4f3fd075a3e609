"""Equal points, of which no answer needs more than the first few."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.left_out import LeftOut
from geoq.neighbors.rows import split, work_size


def first_copies(
    points: Float[Tensor, " n_points n_dims"], k: int, left_out: LeftOut | None
) -> Int[Tensor, " n_kept"]:
    """All points but those with k copies of lower index that every query may see."""
    n_points, n_dims = points.shape
    enough = k + (left_out.most if left_out else 0)
    group = torch.zeros(n_points, dtype=torch.int64, device=points.device)
    if left_out is not None and left_out.most > k and left_out.reach == 0:
        # A query sees all of a group or nothing: k copies in each group will do.
        enough, group = k, left_out.position.unique(return_inverse=True)[1]
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
    """Random sums of the bits, which wrap around: equal for equal points of a group."""
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
