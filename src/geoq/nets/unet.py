"""A U-Net for fields on grids of one, two or three axes, conditioned on one number per field by FiLM."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

# GELU of a standard normal has the root mean square 1 / 1.534.
GELU_GAIN = 1.534
# PyTorch's default initialization shrinks activations to about a third per convolution and GELU. Up to this depth that does no
# harm, and with few data it is a useful prior; in a deeper network the coarse resolutions would have no effect during the first
# thousands of training steps.
MAX_DEPTH_WITH_DEFAULT_INIT = 3
# The default length of the vector that a network computes from the number of each field.
N_CONDITION = 32

# Convolutions, averages over cells, and periodic continuations, on grids of one, two and three axes.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
PADDINGS: tuple[Any, ...] = (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)


def convolution(n_in: int, n_out: int, *, n_spatial: int, periodic: Sequence[bool]) -> nn.Module:
    """A new convolution over three cells along each axis. Beyond an axis that is not periodic the field is 0."""
    layer = CONVOLUTIONS[n_spatial - 1]
    if not any(periodic):
        return layer(n_in, n_out, kernel_size=3, padding=1)
    # One cell at both ends of each periodic axis; PyTorch starts with the last axis.
    ends = tuple(int(axis) for axis in reversed(periodic) for _ in range(2))
    zeros: Any = tuple(int(not axis) for axis in periodic)
    return nn.Sequential(
        PADDINGS[n_spatial - 1](ends), layer(n_in, n_out, kernel_size=3, padding=zeros)
    )


def embedding(n: int = N_CONDITION) -> nn.Module:
    """A new network from the number of each field to a vector of length n, which conditions the blocks."""
    return nn.Sequential(nn.Linear(1, n), nn.GELU(), nn.Linear(n, n))


class FiLMBlock(nn.Module):
    """Two convolutions with GELU; FiLM modulates the first one by ``(1 + scale) * features + shift``.

    ``convolution`` makes a convolution with numbers of input and output channels. With ``variance_preserving_init`` the initial
    weights keep the variance of the activations; otherwise they have PyTorch's default initialization.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_condition: int = N_CONDITION,
        convolution: Callable[[int, int], nn.Module],
        dropout: float,
        variance_preserving_init: bool = False,
    ) -> None:
        super().__init__()
        self.first = convolution(n_in, n_out)
        self.second = convolution(n_out, n_out)
        self.modulation = nn.Linear(n_condition, 2 * n_out)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        if variance_preserving_init:
            for layer in (self.first, self.second):
                weight, bias = layer.parameters()
                n_summed = weight[0].numel()
                nn.init.normal_(weight, std=GELU_GAIN / math.sqrt(n_summed))
                nn.init.zeros_(bias)

    def forward(self, field: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition).chunk(2, dim=1)
        singleton = (*scale.shape, *(1,) * (field.ndim - 2))
        features = self.first(field)
        features = self.activation(features * (1 + scale.view(singleton)) + shift.view(singleton))
        result: Tensor = self.dropout(self.activation(self.second(features)))
        return result


class UNet(nn.Module):
    """Encoder and decoder with skip connections, for grids of any size.

    Each resolution of the encoder has half as many grid points per dimension as the one before it, rounded up. The decoder
    returns to the same grids. Every block is conditioned on one number per field, for example a lead time.

    ``widths`` are the numbers of channels from the finest to the coarsest resolution, and ``periodic`` states for each of the
    ``n_spatial`` axes whether it is periodic; it is empty if none is. On a GPU the convolutions have the precision ``gpu_dtype``:
    bfloat16 takes about half the time of float32. On a CPU they have the precision of the field.

    Example:
        >>> import torch
        >>> network = UNet(3, 2, n_spatial=2, widths=(4, 8))
        >>> fields, lead_times = torch.zeros(5, 3, 20, 17), torch.ones(5)
        >>> network(fields, lead_times).shape
        torch.Size([5, 2, 20, 17])
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_spatial: int,
        periodic: Sequence[bool] = (),
        widths: Sequence[int] = (32, 64, 128, 256),
        n_condition: int = N_CONDITION,
        dropout: float = 0.0,
        gpu_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gpu_dtype = gpu_dtype
        block = partial(
            FiLMBlock,
            n_condition=n_condition,
            convolution=partial(convolution, n_spatial=n_spatial, periodic=periodic),
            dropout=dropout,
            variance_preserving_init=len(widths) > MAX_DEPTH_WITH_DEFAULT_INIT,
        )
        self.embedding = embedding(n_condition)
        channels = [n_in, *widths]
        self.down = nn.ModuleList(block(a, b) for a, b in zip(channels, widths, strict=False))
        self.up = nn.ModuleList(
            block(below + skip, skip)
            for below, skip in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.pool = AVERAGES[n_spatial - 1](kernel_size=2, ceil_mode=True)
        self.output = CONVOLUTIONS[n_spatial - 1](widths[0], n_out, kernel_size=1)

    def forward(
        self, field: Float[Tensor, " n n_in *space"], number: Float[Tensor, " n"]
    ) -> Float[Tensor, " n n_out *space"]:
        """The output fields in the precision of the input fields, conditioned on one number per field."""
        dtype, lower = field.dtype, field.is_cuda and self.gpu_dtype != torch.float32
        if field.is_cuda and field.ndim == 4:
            field = field.contiguous(memory_format=torch.channels_last)
        with torch.autocast(field.device.type, self.gpu_dtype, enabled=lower):
            condition = self.embedding(number[:, None])
            skips: list[Tensor] = []
            for block in self.down:
                field = block(self.pool(skips[-1]) if skips else field, condition)
                skips.append(field)
            for block, skip in zip(self.up, skips[-2::-1], strict=True):
                upsampled = nn.functional.interpolate(field, size=skip.shape[2:], mode="nearest")
                field = block(torch.cat([upsampled, skip], dim=1), condition)
            result: Tensor = self.output(field)
        return result.to(dtype).contiguous()
