r"""How often an error takes the greater of its two values, before any network is trained: by prediction, and by cell.

.. math:: \operatorname{logit} P_{cj}(x) = a_c \, s_c(\widehat F_{cj}(x)) + b_c \, m_{cj} + d_c + h_{cj}(x)

A surrogate that answers probabilities or logits says itself where it is unsure: s is what that was worth on held-out
points. m is where errors usually are. With few fields a network h that starts from both ends better than one that starts
from m alone.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from geoq.arrays import chunks, nonzero_counts
from geoq.increments.scale import LowRankScale

# Shares nearer to 0 or 1 are not believed.
LEAST = 1e-6
N_BINS = 64
FEWEST = 8
# Edges of the bins and the weights a, b and d are read off so many values of a channel.
MOST_OF_CHANNEL = 2**19
N_NEWTON, SETTLED = 20, 1e-3
# Keeps the weights finite where predictions or cells say nothing.
RIDGE = 1.0


class CellPrior(nn.Module):
    """Logits of the shares in each cell, the same at all queries: few maps, shared by the channels."""

    def __init__(self, offset: Float[Tensor, " n_channels n_cells"]) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.offset: Tensor

    @staticmethod
    def fit(greater: Bool[Tensor, " n n_channels n_cells"]) -> "CellPrior":
        """From which held-out errors took the greater value."""
        share = nonzero_counts(greater) / len(greater)
        maps = LowRankScale().maps(share).float()
        return CellPrior(maps.clamp(LEAST, 0.5).logit())

    def forward(
        self, prediction: Float[Tensor, " n *output"]
    ) -> Float[Tensor, " n_channels n_cells"]:
        del prediction
        return self.offset


class PredictionPrior(nn.Module):
    """Logits of the shares given channel, cell and prediction: linear between the means of bins of predictions."""

    def __init__(
        self,
        offset: Float[Tensor, " n_channels n_cells"],
        value: Float[Tensor, " n_channels n_bins"],
        logit: Float[Tensor, " n_channels n_bins"],
    ) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.register_buffer("value", value)
        self.register_buffer("logit", logit)
        self.offset: Tensor
        self.value: Tensor
        self.logit: Tensor

    @staticmethod
    def fit(
        greater: Bool[Tensor, " n n_channels n_cells"],
        prediction: Float[Tensor, " n n_channels n_cells"],
        unit: Int[Tensor, " n"],
    ) -> "PredictionPrior":
        """From which held-out errors took the greater value, and what was predicted there; rows of a unit are no two facts."""
        offset, value, logit = [], [], []
        some = _cells_read(greater)
        # A cell is judged by rows that its share does not come from: on its own it looks better than it is.
        halves = _halves(unit)
        others = [CellPrior.fit(greater[half]).offset for half in halves[::-1]]
        for channel, cell in enumerate(CellPrior.fit(greater).offset):
            own, predicted = greater[:, channel], prediction[:, channel]
            few, told = own.gather(1, some), predicted.gather(1, some).float()
            known = torch.empty_like(told)
            for half, other in zip(halves, others, strict=True):
                known[half] = other[channel][some[half]]
            table = _table(own, predicted, _edges(few, told))
            a, b, d = _weights(few, _read(*table, told), known)
            offset.append(b * cell + d)
            value.append(table[0])
            logit.append(a * table[1])
        return PredictionPrior(*map(torch.stack, (offset, value, logit)))

    def forward(
        self, prediction: Float[Tensor, " n *output"]
    ) -> Float[Tensor, " n n_channels n_cells"]:
        channels = prediction.reshape(len(prediction), *self.offset.shape)
        values = channels.to(self.value).transpose(0, 1)
        return _read(self.value, self.logit, values).transpose(0, 1) + self.offset


def _cells_read(greater: Tensor) -> Int[Tensor, " n n_read"]:
    """Of all rows, since cells of one row depend on each other, and other cells in each: errors may lie in few of them."""
    n, _, n_cells = greater.shape
    n_read = max(1, MOST_OF_CHANNEL // n)
    generator = torch.Generator().manual_seed(0)
    cells = (
        torch.randint(n_cells, (n, n_read), generator=generator)
        if n_read < n_cells
        else torch.arange(n_cells).expand(n, -1)
    )
    return cells.to(greater.device)


def _halves(unit: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Rows of one half of the units, and of the other; all rows twice where there is but one unit."""
    distinct, number = unit.unique(return_inverse=True)
    if len(distinct) < 2:
        rows = torch.arange(len(unit), device=unit.device)
        return rows, rows
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0))
    is_first = (order < len(distinct) // 2).to(unit.device)[number]
    return is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]


def _read(
    value: Float[Tensor, " *channel n_bins"],
    logit: Float[Tensor, " *channel n_bins"],
    asked: Float[Tensor, " *channel n n_cells"],
) -> Float[Tensor, " *channel n n_cells"]:
    """Linear between the bins' means; beyond them the last shares go on."""
    flat = asked.flatten(-2).contiguous()
    above = torch.searchsorted(value, flat).clamp(1, value.shape[-1] - 1)
    (low, high), (left, right) = (
        (table.gather(-1, above - 1), table.gather(-1, above))
        for table in (value, logit)
    )
    width = high - low
    part = ((flat - low) / torch.where(width > 0, width, 1)).clamp(0, 1)
    return (left + part * (right - left)).view_as(asked)


def _table(
    greater: Bool[Tensor, " n n_cells"],
    prediction: Float[Tensor, " n n_cells"],
    edges: Float[Tensor, " n_edges"],
) -> tuple[Float[Tensor, " n_bins"], Float[Tensor, " n_bins"]]:
    """Mean prediction and logit of the share in each bin; where predictions fill fewer bins the last is repeated."""
    sums = edges.new_zeros(3, len(edges) + 1, dtype=torch.float64)
    for rows in chunks(len(greater), 8 * greater.shape[1]):
        values = prediction[rows].float().flatten().contiguous()
        bins = torch.bucketize(values, edges)
        parts = (torch.ones_like(values), greater[rows].flatten(), values)
        for total, part in zip(sums, parts, strict=True):
            total += torch.bincount(bins, part.double(), minlength=len(total))
    n, n_greater, total = _merged(sums)
    share = (n_greater + 0.5) / (n + 1)
    table = torch.stack([total / n, share.clamp(LEAST, 1 - LEAST).logit()]).float()
    padded = torch.cat([table, table[:, -1:].expand(2, N_BINS - len(n))], dim=1)
    value, logit = padded
    return value, logit


def _edges(
    greater: Bool[Tensor, " n n_cells"], prediction: Float[Tensor, " n n_cells"]
) -> Float[Tensor, " n_edges"]:
    """Between bins that hold equally many of the greater errors, and equally many of the others.

    Greater errors may be few, and are where the shares matter. A value that fills two bins or more has one of its own.
    """
    both = (prediction[greater].sort().values, prediction[~greater].sort().values)
    places = torch.cat([_between(part) for part in both])
    edges, count = places.unique(return_counts=True)
    below = edges[count > 1].nextafter(edges.new_tensor(-torch.inf))
    every_edge: Tensor = torch.cat([edges, below]).unique()
    return every_edge


def _weights(
    greater: Bool[Tensor, " n n_cells"],
    seen: Float[Tensor, " n n_cells"],
    cell: Float[Tensor, " n n_cells"],
) -> Float[Tensor, " 3"]:
    """a, b and d: logistic regression on what the prediction says and on the cell, by Newton's method from (1, 0, 0)."""
    target = greater.flatten().double()
    columns = (seen, cell, torch.ones_like(seen))
    x = torch.stack([column.flatten().double() for column in columns], dim=1)
    first = x.new_tensor([1.0, 0.0, 0.0])

    def loss(weights: Tensor) -> Tensor:
        logit = x @ weights
        fit = nn.functional.softplus(logit).sum() - logit @ target
        return fit + RIDGE / 2 * (weights - first).square().sum()

    weights, least = first, loss(first)
    for _ in range(N_NEWTON):
        p = (x @ weights).sigmoid()
        slope = x.T @ (p - target) + RIDGE * (weights - first)
        curvature = (x.T * (p * (1 - p))) @ x + RIDGE * torch.eye(3).to(x)
        step = torch.linalg.solve(curvature, slope)
        # From far away a whole step may lead farther.
        while (lower := loss(weights - step)) > least and step.norm() > SETTLED:
            step = step / 2
        if step.norm() <= SETTLED:
            break
        weights, least = weights - step, lower
    return weights.float()


def _between(ordered: Float[Tensor, " n"]) -> Float[Tensor, " n_places"]:
    """Places between bins of equally many values, and of enough to read a share off them."""
    n_bins = min(N_BINS // 2, len(ordered) // FEWEST)
    ranks = torch.linspace(0, 1, n_bins + 1, device=ordered.device)[1:-1]
    return ordered[(ranks * len(ordered)).long()]


def _merged(sums: Float[Tensor, " 3 n_bins"]) -> Float[Tensor, " 3 n_left"]:
    """Bins that hold little of either kind joined to the one before: edges of the two kinds may lie side by side."""

    def is_little(column: Tensor) -> bool:
        kinds = torch.stack([column[1], column[0] - column[1]])
        return bool((kinds <= enough).all())

    enough = torch.stack([sums[1].sum(), (sums[0] - sums[1]).sum()]) / N_BINS
    left: list[Tensor] = []
    for column in sums.T:
        if left and (is_little(column) or is_little(left[-1])):
            left[-1] = left[-1] + column
        else:
            left.append(column)
    return torch.stack(left, dim=1)
