"""The scale of the errors: how large the errors of each coordinate are relative to the other coordinates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import chunks
from geoq.quantiles import weighted_quantile

# scale(error, weight, quantile): one number per value of the field, in any common unit.
Scale = Callable[[Tensor, Tensor, float], Tensor]

# A cell without any error gets this fraction of the mean of its channel, or of the smallest positive channel mean.
MIN_FRACTION = 1e-3
# The quantile of a channel is computed from at most this many values.
MAX_CHANNEL_VALUES = 2**17


def coordinate_scale(
    error: Float[Tensor, " n *field"], weight: Float[Tensor, " n"], quantile: float
) -> Float[Tensor, " *field"]:
    """The quantile of the errors of each coordinate, independently of the others."""
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
    r"""The scale of a field as a product of few maps, so that it can be estimated from few tuples.

    .. math:: s_{cj} = q_c \exp \sum_{p \le r} a_{cp} m_{pj}

    The maps m are the best low-rank approximation of the logarithm of the mean errors. The mean of tens of dependent tuples
    is noisy in each cell; maps that all channels (lead times, variables) share average the noise out. Each channel has its
    own coefficient q_c. If a field has at most ``rank`` channels, the mean of each cell is kept.

    Attributes:
        n_spatial: the last ``n_spatial`` dimensions of the error are the grid; all dimensions before it are channels.
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
        some = some[: max(100, MAX_CHANNEL_VALUES // len(error))].to(error.device)
        coefficient = torch.stack(
            [
                _coefficient(
                    fields[:, channel, some], maps[channel, some], weight, quantile
                )
                for channel in range(len(maps))
            ]
        )
        scale: Tensor = coefficient[:, None] * maps
        return scale.reshape(error.shape[1:])

    def maps(
        self, mean: Float[Tensor, " n_channels n_cells"]
    ) -> Float[Tensor, " n_channels n_cells"]:
        """The low-rank approximation of the mean errors."""
        channel = mean.double().mean(dim=1, keepdim=True)
        wrong = channel[channel > 0]
        # A channel without errors gets the smallest positive mean, so that it does not outweigh the other channels.
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
    weight: Float[Tensor, " n"],
    quantile: float,
) -> Float[Tensor, ""]:
    """The multiple of the shape with the least pinball loss: the quantile of e / shape, weighted by the shape."""
    weights = weight.double()[:, None] * shape
    multiple = weighted_quantile(
        (error / shape).reshape(-1), weights.reshape(-1), quantile
    )
    # If nearly all errors are zero, their quantile is zero too; the shape alone then is the scale.
    return torch.where(multiple > 0, multiple, 1.0)
