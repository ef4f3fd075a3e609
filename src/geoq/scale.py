"""How large the errors of each coordinate are beside those of the others."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.surrogate import chunks

# scale(error, weight, quantile): one number per value of the field, of any common unit.
Scale = Callable[[Tensor, Tensor, float], Tensor]

# A cell that was never wrong is taken to be this share of its channel's mean, or of the least channel's that was.
LEAST_SHARE = 1e-3
# A channel's level is read off so many values at most.
MOST_OF_CHANNEL = 2**17


def weighted_quantile(
    values: Float[Tensor, " n *shape"],
    weights: Float[Tensor, " n *shape"],
    quantile: float,
) -> Float[Tensor, " *shape"]:
    """Smallest value that values of at least the share ``quantile`` of the weight do not exceed, per coordinate."""
    ordered, order = values.sort(dim=0)
    passed = weights.gather(0, order).cumsum(dim=0)
    rank = (
        (passed < passed[-1:] * quantile * (1 - 1e-12))
        .sum(dim=0, keepdim=True)
        .clamp(max=len(values) - 1)
    )
    return ordered.gather(0, rank)[0]


def coordinate_scale(
    error: Float[Tensor, " n *field"], weight: Float[Tensor, " n"], quantile: float
) -> Float[Tensor, " *field"]:
    """Each coordinate for itself: the quantile of its errors."""
    flat, weights = error.reshape(len(error), -1), weight.double()[:, None]
    parts = [
        weighted_quantile(
            flat[:, part].double(), weights.expand(-1, flat[:, part].shape[1]), quantile
        )
        for part in chunks(flat.shape[1], 4 * len(flat))
    ]
    return torch.cat(parts).reshape(error.shape[1:])


@dataclass(frozen=True)
class LowRankScale:
    r"""Cells and channels of a field apart, so that few tuples tell the scale of many values.

    .. math:: s_{cj} = q_c \exp \sum_{p \le r} a_{cp} m_{pj}

    The maps are the best approximation of the logarithm of the mean errors: a mean of tens of dependent tuples is a noisy
    number, and maps that all channels (lead times, variables) share are not. Each channel then has its own level. A field
    of no more channels than maps keeps the mean of each cell.

    Attributes:
        n_spatial: last dimensions of the error that are the grid; all before them are channels.
        rank: number of maps; 0 gives one number per channel.
    """

    n_spatial: int = 2
    rank: int = 3

    def check_shape(self, field_shape: tuple[int, ...]) -> None:
        """Refuse errors without a grid."""
        if len(field_shape) < self.n_spatial:
            raise ValueError(
                f"LowRankScale(n_spatial={self.n_spatial}), but an error has shape {field_shape}; put the grid last, or "
                "use coordinate_scale."
            )

    def __call__(
        self,
        error: Float[Tensor, " n *field"],
        weight: Float[Tensor, " n"],
        quantile: float,
    ) -> Float[Tensor, " *field"]:
        n_cells = math.prod(error.shape[error.ndim - self.n_spatial :])
        fields = error.reshape(len(error), -1, n_cells)
        maps = self.maps(torch.tensordot((weight / weight.sum()).to(error), fields, 1))
        some = torch.randperm(n_cells, generator=torch.Generator().manual_seed(0))
        some = some[: max(100, MOST_OF_CHANNEL // len(error))].to(error.device)
        level = torch.stack(
            [
                _level(fields[:, channel, some], maps[channel, some], weight, quantile)
                for channel in range(len(maps))
            ]
        )
        scale: Tensor = level[:, None] * maps
        return scale.reshape(error.shape[1:])

    def maps(
        self, mean: Float[Tensor, " n_channels n_cells"]
    ) -> Float[Tensor, " n_channels n_cells"]:
        """Mean errors without their noise."""
        channel = mean.double().mean(dim=1, keepdim=True)
        wrong = channel[channel > 0]
        # In the errors' own unit: a channel that was never wrong must not outweigh small errors of the others.
        least = wrong.min() if len(wrong) else channel.new_tensor(1.0)
        channel = torch.where(channel > 0, channel, least)
        log = torch.maximum(mean.double(), LEAST_SHARE * channel).log()
        centre = log.mean(dim=1, keepdim=True)
        u, s, v = torch.linalg.svd(log - centre, full_matrices=False)
        maps: Tensor = (centre + (u * s)[:, : self.rank] @ v[: self.rank]).exp()
        return maps


def _level(
    error: Float[Tensor, " n n_cells"],
    shape: Float[Tensor, " n_cells"],
    weight: Float[Tensor, " n"],
    quantile: float,
) -> Float[Tensor, ""]:
    """The multiple of the shape with the least pinball loss: the quantile of e / shape, weighted by the shape."""
    weights = weight.double()[:, None] * shape
    level = weighted_quantile(
        (error / shape).reshape(-1), weights.reshape(-1), quantile
    )
    # Where nearly all errors are zero so is their quantile, and the shape alone is left to scale by.
    return torch.where(level > 0, level, 1.0)
