r"""How often an error takes the greater of its two values, before any network is trained: in each cell, or by prediction.

.. math:: \operatorname{logit} P_{cj}(x) = s_c(\widehat F_{cj}(x)) + h_{cj}(x)

A surrogate that answers probabilities or logits says itself where it is unsure. A network h that starts from s, what that
was worth on held-out points, ends better than one that starts from where errors usually are.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from geoq.scale import LowRankScale
from geoq.surrogate import chunks

# Shares nearer to 0 or 1 are not believed.
LEAST = 1e-6
# Bins of the predictions of a channel, and values that their edges are read off.
N_BINS = 64
MOST_OF_CHANNEL = 2**22


class CellShares(nn.Module):
    """Logits of the shares in each cell, the same at all queries: few maps, shared by the channels."""

    def __init__(self, offset: Float[Tensor, " n_channels n_cells"]) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.offset: Tensor

    @staticmethod
    def fit(greater: Bool[Tensor, " n n_channels n_cells"]) -> "CellShares":
        """From which held-out errors took the greater value."""
        maps = LowRankScale().maps(greater.float().mean(dim=0)).float()
        return CellShares(maps.clamp(LEAST, 0.5).logit())

    def forward(
        self, prediction: Float[Tensor, " n *output"]
    ) -> Float[Tensor, " n_channels n_cells"]:
        del prediction
        return self.offset


class PredictedShares(nn.Module):
    """Logits of the shares given channel and prediction: linear between the means of bins."""

    def __init__(
        self,
        value: Float[Tensor, " n_channels n_bins"],
        logit: Float[Tensor, " n_channels n_bins"],
    ) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.register_buffer("logit", logit)
        self.value: Tensor
        self.logit: Tensor

    @staticmethod
    def fit(
        greater: Bool[Tensor, " n n_channels n_cells"],
        prediction: Float[Tensor, " n n_channels n_cells"],
    ) -> "PredictedShares":
        """From which held-out errors took the greater value, and what was predicted there."""
        tables = [
            _table(greater[:, channel], prediction[:, channel])
            for channel in range(greater.shape[1])
        ]
        value, logit = (torch.stack(part) for part in zip(*tables, strict=True))
        return PredictedShares(value, logit)

    def forward(
        self, prediction: Float[Tensor, " n *output"]
    ) -> Float[Tensor, " n n_channels n_cells"]:
        """Beyond the bins' means the last shares go on."""
        n_channels, n_bins = self.value.shape
        channels = prediction.reshape(len(prediction), n_channels, -1).transpose(0, 1)
        values = channels.flatten(1).to(self.value).contiguous()
        above = torch.searchsorted(self.value, values).clamp(1, n_bins - 1)
        (low, high), (from_, to) = (
            (table.gather(1, above - 1), table.gather(1, above))
            for table in (self.value, self.logit)
        )
        part = ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        logit: Tensor = (from_ + part * (to - from_)).view_as(channels).transpose(0, 1)
        return logit


def _table(
    greater: Bool[Tensor, " n n_cells"], prediction: Float[Tensor, " n n_cells"]
) -> tuple[Float[Tensor, " n_bins"], Float[Tensor, " n_bins"]]:
    """Mean prediction and logit of the share in each bin; where predictions fill fewer bins the last is repeated."""
    edges = _edges(greater, prediction)
    sums = edges.new_zeros(3, len(edges) + 1, dtype=torch.float64)
    for rows in chunks(len(greater), 8 * greater.shape[1]):
        values = prediction[rows].float().flatten()
        bins = torch.bucketize(values, edges)
        parts = (torch.ones_like(values), greater[rows].flatten(), values)
        for total, part in zip(sums, parts, strict=True):
            total += torch.bincount(bins, part.double(), minlength=len(total))
    n, n_greater, total = sums[:, sums[0] > 0]
    share = (n_greater + 0.5) / (n + 1)
    table = torch.stack([total / n, share.clamp(LEAST, 1 - LEAST).logit()]).float()
    padded = torch.cat([table, table[:, -1:].expand(2, N_BINS - len(n))], dim=1)
    value, logit = padded
    return value, logit


def _edges(
    greater: Bool[Tensor, " n n_cells"], prediction: Float[Tensor, " n n_cells"]
) -> Float[Tensor, " n_edges"]:
    """Between bins that hold equally many of the greater errors, and equally many of the others.

    Greater errors may be few, and are where the shares matter. A value that fills more than a bin has one of its own.
    """
    every = max(1, greater.numel() // MOST_OF_CHANNEL)
    some, is_greater = prediction[::every].float(), greater[::every]
    ranks = torch.linspace(0, 1, N_BINS // 2 + 1, device=some.device)[1:-1]
    both = (some[is_greater].sort().values, some[~is_greater].sort().values)
    places = torch.cat([part[(ranks * len(part)).long()] for part in both if len(part)])
    edges, count = places.unique(return_counts=True)
    below = edges[count > 1].nextafter(edges.new_tensor(-torch.inf))
    every_edge: Tensor = torch.cat([edges, below]).unique()
    return every_edge
