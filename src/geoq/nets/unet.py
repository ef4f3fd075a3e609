"""A U-Net for fields on a line or in the plane, conditioned on one number per field by FiLM."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

# GELU of a standard normal has the root mean square 1 / 1.534.
GELU_GAIN = 1.534
# Up to so many levels networks are heard as torch starts them, and to be quiet at first serves them where data are few.
SHALLOW = 3


class FiLMBlock(nn.Module):
    """Two convolutions with GELU, modulated between them by ``scale * features + shift``.

    ``keeps_loudness``: whether fresh weights return fields about as large as those they are given.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_condition: int,
        n_spatial: int,
        dropout: float,
        keeps_loudness: bool,
    ) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d)[n_spatial - 1]
        self.first = convolution(n_in, n_out, kernel_size=3, padding=1)
        self.second = convolution(n_out, n_out, kernel_size=3, padding=1)
        self.modulation = nn.Linear(n_condition, 2 * n_out)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        if keeps_loudness:
            for convolved in (self.first, self.second):
                n_summed = convolved.weight[0].numel()
                nn.init.normal_(convolved.weight, std=GELU_GAIN / math.sqrt(n_summed))
                nn.init.zeros_(convolved.get_parameter("bias"))

    def forward(self, field: Tensor, condition: Tensor) -> Tensor:
        """The field after both convolutions; ``condition`` has one row per field."""
        scale, shift = self.modulation(condition).chunk(2, dim=1)
        singleton = (*scale.shape, *(1,) * (field.ndim - 2))
        features = self.first(field)
        features = self.activation(
            features * (1 + scale.view(singleton)) + shift.view(singleton)
        )
        result: Tensor = self.dropout(self.activation(self.second(features)))
        return result


class UNet(nn.Module):
    """Encoder and decoder with skips; ``widths`` are the channels per level, the last one the bottleneck's.

    Any spatial size works: the way up follows the sizes of the way down. ``n_spatial`` is 1 or 2. ``gpu_dtype`` is what the
    convolutions compute in on a GPU, where float32 takes about twice as long.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_spatial: int,
        widths: Sequence[int] = (32, 64, 128, 256),
        n_condition: int = 32,
        dropout: float = 0.0,
        gpu_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gpu_dtype = gpu_dtype
        block = partial(
            FiLMBlock,
            n_condition=n_condition,
            n_spatial=n_spatial,
            dropout=dropout,
            # By torch's own start each convolution and GELU return about a third of what they are given. Of a fifth level
            # nothing would be heard at first, and a training would spend thousands of steps on that.
            keeps_loudness=len(widths) > SHALLOW,
        )
        self.embedding = nn.Sequential(
            nn.Linear(1, n_condition), nn.GELU(), nn.Linear(n_condition, n_condition)
        )
        channels = [n_in, *widths]
        self.down = nn.ModuleList(
            block(a, b) for a, b in zip(channels, widths, strict=False)
        )
        self.up = nn.ModuleList(
            block(below + skip, skip)
            for below, skip in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.pool = (nn.AvgPool1d, nn.AvgPool2d)[n_spatial - 1](
            kernel_size=2, ceil_mode=True
        )
        self.output = (nn.Conv1d, nn.Conv2d)[n_spatial - 1](
            widths[0], n_out, kernel_size=1
        )

    def forward(
        self, field: Float[Tensor, " n n_in *space"], number: Float[Tensor, " n"]
    ) -> Float[Tensor, " n n_out *space"]:
        if not field.is_cuda:
            return self._forward(field, number)
        if field.ndim == 4:
            field = field.contiguous(memory_format=torch.channels_last)
        with torch.autocast(
            "cuda", self.gpu_dtype, enabled=self.gpu_dtype != torch.float32
        ):
            return self._forward(field, number).to(field.dtype).contiguous()

    def _forward(self, field: Tensor, number: Tensor) -> Tensor:
        condition = self.embedding(number[:, None])
        skips: list[Tensor] = []
        for block in self.down:
            field = block(self.pool(skips[-1]) if skips else field, condition)
            skips.append(field)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            upsampled = nn.functional.interpolate(
                field, size=skip.shape[2:], mode="nearest"
            )
            field = block(torch.cat([upsampled, skip], dim=1), condition)
        result: Tensor = self.output(field)
        return result
