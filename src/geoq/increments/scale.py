"""The scale of the errors: the typical size of the error in each coordinate, relative to the other coordinates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import chunks, permutation
from geoq.quantiles import weighted_quantile
from geoq.settings import check_integer

# One number for each channel and cell.
Maps: TypeAlias = Float[Tensor, " n_channels n_cells"]
# The mean error of a cell counts as at least this fraction of the mean error of its channel.
MIN_FRACTION = 1e-3
# The quantile of a channel is computed from at most this many values.
MAX_CHANNEL_VALUES = 2**17


@dataclass(frozen=True)
class LowRankScale:
    r"""The scale of a field as a product of a few maps, which can be estimated from a few tuples.

    .. math:: s_{cj} = q_c \exp \sum_{p \le r} a_{cp} m_{pj}

    The sum is the best approximation of rank r of the logarithm of the mean errors in channel c and cell j. The mean of tens of
    dependent tuples is noisy in each cell. The maps m are common to all channels (lead times, variables), which averages the
    noise. The coefficient q_c of a channel minimises its pinball loss. If a field has at most ``rank`` channels, the mean
    error of each cell is used without an approximation.

    Attributes:
        n_spatial: the last ``n_spatial`` dimensions of the error are the grid; all dimensions before it are channels.
        rank: number of maps; 0 gives one number per channel.

    Example:
        Ten fields of two channels on a grid of 3 x 4 cells; the errors of the second channel are five times as large.

        >>> error = torch.ones(10, 2, 3, 4) * torch.tensor([1.0, 5.0]).view(2, 1, 1)
        >>> scale = LowRankScale().fit(error.__getitem__, torch.ones(10), error[0], 0.95)
        >>> scale[:, 0, 0].round(decimals=3).tolist()
        [1.0, 5.0]
    """

    n_spatial: int = 2
    rank: int = 3

    def __post_init__(self) -> None:
        check_integer(self.n_spatial, "n_spatial", 0)
        check_integer(self.rank, "rank", 0)

    def fit(
        self,
        error_of: Callable[[slice], Float[Tensor, " _ *field"]],
        weight: Float[Tensor, " n"],
        like: Float[Tensor, " *field"],
        quantile: float,
    ) -> Float[Tensor, " *field"]:
        """The scale of errors that are read in chunks by ``error_of``; ``like`` is the error of one tuple."""
        n_cells = math.prod(like.shape[like.ndim - self.n_spatial :])
        fields = like.reshape(-1, n_cells)
        some = permutation(n_cells)
        some = some[: max(100, MAX_CHANNEL_VALUES // len(weight))].to(like.device)
        mean, parts = torch.zeros_like(fields), []
        fraction = (weight / weight.sum()).to(like)
        for rows in chunks(len(weight), fields.numel()):
            part = error_of(rows).reshape(-1, *fields.shape)
            mean = mean + torch.tensordot(fraction[rows], part, 1)
            parts.append(part[:, :, some])
        # A cell without errors, such as land, is left out: it gets the mean of its channel for the approximation.
        counts = (mean > 0) | (mean == 0).all(dim=1, keepdim=True)
        typical = mean.sum(dim=1, keepdim=True) / counts.sum(dim=1, keepdim=True)
        maps, sampled = self.maps(torch.where(counts, mean, typical)), torch.cat(parts)
        maps = torch.where(counts, maps, MIN_FRACTION * maps)
        channels = zip(sampled.unbind(1), maps[:, some], counts[:, some], strict=True)
        coefficient = torch.stack(
            [_coefficient(e, m, weight[:, None] * c, quantile) for e, m, c in channels]
        )
        scale: Tensor = coefficient[:, None] * maps
        return scale.reshape(like.shape)

    def maps(self, mean: Maps) -> Maps:
        """The low-rank approximation of the mean errors, on a logarithmic scale."""
        channel = mean.double().mean(dim=1, keepdim=True)
        wrong = channel[channel > 0]
        # A channel without errors gets the smallest positive channel mean, so that its scale is small in any unit.
        least = wrong.min() if len(wrong) else channel.new_tensor(1.0)
        channel = torch.where(channel > 0, channel, least)
        log = torch.maximum(mean.double(), MIN_FRACTION * channel).log()
        centre = log.mean(dim=1, keepdim=True)
        u, s, v = torch.linalg.svd(log - centre, full_matrices=False)
        maps: Tensor = (centre + (u * s)[:, : self.rank] @ v[: self.rank]).exp()
        return maps


def _coefficient(
    error: Float[Tensor, " n n_cells"],
    shape: Float[Tensor, " n_cells"],
    weight: Float[Tensor, " n n_cells"],
    quantile: float,
) -> Float[Tensor, ""]:
    """The multiple of the shape with the smallest pinball loss: the quantile of e / shape, weighted by the shape."""
    ratio, weights = (error / shape).reshape(-1), (weight.double() * shape).reshape(-1)
    multiple = weighted_quantile(ratio, weights, quantile)
    # If nearly all errors are zero, their quantile is zero too. Then the scale is the shape.
    return torch.where(multiple > 0, multiple, 1.0)
