r"""The prior of an error with two values: the probability of the larger value, estimated without a network.

.. math:: \operatorname{logit} P_{cj}(x) = a_c \, s_c(\widehat F_{cj}(x)) + b_c \, m_{cj} + d_c + h_{cj}(x)

The first three terms are the prior. The network h corrects it, and a new network is 0. The function s_c is the logit of the
frequency of the larger value among held-out points with the same prediction in channel c; it is informative if the surrogate
predicts probabilities or logits, which are uncertain near the threshold. The map m is the logit of the frequency in each
cell. With few calibration fields, networks that start from both terms end with a lower loss than networks that start from m.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from geoq.arrays import chunks, nonzero_counts, permutation
from geoq.increments.scale import LowRankScale, Maps

# Which errors took the larger of their two values, predictions, one channel of all rows, and bins.
Flags: TypeAlias = Bool[Tensor, " n n_channels n_cells"]
Predictions: TypeAlias = Float[Tensor, " n *output"]
Channel: TypeAlias = Float[Tensor, " n n_cells"]
Bins: TypeAlias = Float[Tensor, " n_channels n_bins"]

# Frequencies are limited to [MIN_FREQUENCY, 1 - MIN_FREQUENCY], so that their logits are finite.
MIN_FREQUENCY = 1e-6
N_BINS = 64
MIN_VALUES_PER_BIN = 8
# The edges of the bins and the coefficients a, b and d are computed from at most this many values of a channel.
MAX_CHANNEL_VALUES = 2**19
# Newton's method stops after this many steps, or after a step that is shorter than the tolerance.
MAX_NEWTON_STEPS, STEP_TOLERANCE = 20, 1e-3
# The penalty on the coefficients keeps them finite where neither predictions nor cells are informative.
RIDGE = 1.0


@runtime_checkable
class Prior(Protocol):
    """How the prior is found: ``CellPrior()``, ``PredictionPrior()`` or an object with this method.

    ``fit`` returns a module from predictions to logits, whose last two dimensions are channels and cells.
    """

    def fit(
        self, is_larger: Flags, prediction: Predictions, group: Int[Tensor, " n"], /
    ) -> nn.Module: ...


@dataclass(frozen=True)
class CellPrior:
    """The prior from the frequency of the larger value in each cell, the same for all queries.

    Example:
        The larger value occurred in all rows of the first cell, and in one of four rows of the second cell.

        >>> is_larger = torch.tensor([[[1, 1]], [[1, 0]], [[1, 0]], [[1, 0]]]).bool()
        >>> prior = CellPrior().fit(is_larger, torch.zeros(4, 1, 2), torch.arange(4))
        >>> prior(torch.zeros(1, 1, 2)).sigmoid()
        tensor([[0.5000, 0.2500]])
    """

    def fit(
        self, is_larger: Flags, prediction: Predictions, group: Int[Tensor, " n"]
    ) -> "FittedCellPrior":
        """Estimate the prior from held-out errors; only ``is_larger`` is used, see ``PredictionPrior.fit``."""
        del prediction, group
        return FittedCellPrior(_cell_logit(is_larger))


class FittedCellPrior(nn.Module):
    """The logits m of all cells."""

    def __init__(self, offset: Maps) -> None:
        super().__init__()
        self.offset = nn.Buffer(offset)

    def forward(self, prediction: Predictions) -> Maps:
        del prediction
        return self.offset


@dataclass(frozen=True)
class PredictionPrior:
    """The prior from the frequency of the larger value given the prediction, and in each cell.

    Example:
        >>> from geoq import IndicatorIncrement
        >>> increment = IndicatorIncrement(prior=PredictionPrior())
    """

    def fit(
        self, is_larger: Flags, prediction: Predictions, group: Int[Tensor, " n"]
    ) -> "FittedPredictionPrior":
        """Estimate s, m and their coefficients from held-out errors.

        Args:
            is_larger: which errors took the larger of their two values.
            prediction: the predictions of the surrogate, one for each error.
            group: the group of each row; the rows of one group depend on each other.
        """
        if prediction.numel() != is_larger.numel():
            raise ValueError(
                f"PredictionPrior needs one prediction for each error, but a row has {prediction[0].numel()} predictions and "
                f"{is_larger[0].numel()} errors; use prior=CellPrior()."
            )
        prediction = prediction.reshape(is_larger.shape)
        cells = _sampled_cells(is_larger)
        # The coefficient of a cell's logit is fitted on rows that the logit was not computed from: on the same rows the
        # logit would seem more informative than it is.
        halves = _halves(group)
        other_halves = [_cell_logit(is_larger[half]) for half in halves[::-1]]
        offsets, values, logits = [], [], []
        for channel, cell_logit in enumerate(_cell_logit(is_larger)):
            larger, predicted = is_larger[:, channel], prediction[:, channel]
            sample, at = larger.gather(1, cells), predicted.gather(1, cells).float()
            held_out = torch.empty_like(at)
            for half, other_logit in zip(halves, other_halves, strict=True):
                held_out[half] = other_logit[channel][cells[half]]
            value, logit = _frequency_table(larger, predicted, _bin_edges(sample, at))
            a, b, d = _coefficients(sample, _interpolate(value, logit, at), held_out)
            offsets.append(b * cell_logit + d)
            values.append(value)
            logits.append(a * logit)
        return FittedPredictionPrior(*map(torch.stack, (offsets, values, logits)))


class FittedPredictionPrior(nn.Module):
    """The logits of queries: b m + d for each cell, plus a s, interpolated linearly between the bins of predictions."""

    def __init__(self, offset: Maps, value: Bins, logit: Bins) -> None:
        super().__init__()
        self.offset = nn.Buffer(offset)
        self.value = nn.Buffer(value)
        self.logit = nn.Buffer(logit)

    def forward(
        self, prediction: Predictions
    ) -> Float[Tensor, " n n_channels n_cells"]:
        channels = prediction.reshape(len(prediction), *self.offset.shape)
        at = channels.to(self.value).transpose(0, 1)
        return _interpolate(self.value, self.logit, at).transpose(0, 1) + self.offset


def _cell_logit(is_larger: Flags) -> Maps:
    """The map m: logits of the frequencies, approximated with few maps and at most 0."""
    frequency = nonzero_counts(is_larger) / len(is_larger)
    maps = LowRankScale().maps(frequency).float()
    return maps.clamp(MIN_FREQUENCY, 0.5).logit()


def _sampled_cells(is_larger: Tensor) -> Int[Tensor, " n n_sampled"]:
    """Cells of each row: all of them, or a random sample of each row, so that errors in a few cells are sampled too."""
    n, _, n_cells = is_larger.shape
    n_sampled = max(1, MAX_CHANNEL_VALUES // n)
    cells = torch.arange(n_cells).expand(n, -1)
    if n_sampled < n_cells:
        rng = np.random.default_rng(0)
        cells = torch.from_numpy(rng.integers(n_cells, size=(n, n_sampled)))
    return cells.to(is_larger.device)


def _halves(group: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """The rows of a random half of the groups, and the other rows; all rows twice if there is only one group."""
    distinct, number = group.unique(return_inverse=True)
    if len(distinct) < 2:
        rows = torch.arange(len(group), device=group.device)
        return rows, rows
    order = permutation(len(distinct))
    is_first = (order < len(distinct) // 2).to(group.device)[number]
    return is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]


def _interpolate(
    value: Float[Tensor, " *channel n_bins"],
    logit: Float[Tensor, " *channel n_bins"],
    at: Float[Tensor, " *channel n n_cells"],
) -> Float[Tensor, " *channel n n_cells"]:
    """The logits at given predictions: linear between the mean predictions of the bins, constant outside."""
    flat = at.flatten(-2).contiguous()
    above = torch.searchsorted(value, flat).clamp(1, value.shape[-1] - 1)
    (low, high), (left, right) = (
        (table.gather(-1, above - 1), table.gather(-1, above))
        for table in (value, logit)
    )
    width = high - low
    fraction = ((flat - low) / torch.where(width > 0, width, 1)).clamp(0, 1)
    return (left + fraction * (right - left)).view_as(at)


def _frequency_table(
    is_larger: Bool[Tensor, " n n_cells"],
    prediction: Channel,
    edges: Float[Tensor, " n_edges"],
) -> tuple[Float[Tensor, " n_bins"], Float[Tensor, " n_bins"]]:
    """The mean prediction of each bin, and the logit of its frequency; the last bin is repeated up to ``N_BINS``."""
    sums = edges.new_zeros(3, len(edges) + 1, dtype=torch.float64)
    for rows in chunks(len(is_larger), 8 * is_larger.shape[1]):
        values = prediction[rows].float().flatten().contiguous()
        bins = torch.bucketize(values, edges)
        parts = (torch.ones_like(values), is_larger[rows].flatten(), values)
        for total, part in zip(sums, parts, strict=True):
            total += torch.bincount(bins, part.double(), minlength=len(total))
    n, n_larger, total = _merge_small_bins(sums)
    frequency = ((n_larger + 0.5) / (n + 1)).clamp(MIN_FREQUENCY, 1 - MIN_FREQUENCY)
    table = torch.stack([total / n, frequency.logit()]).float()
    value, logit = torch.cat([table, table[:, -1:].expand(2, N_BINS - len(n))], dim=1)
    return value, logit


def _merge_small_bins(sums: Float[Tensor, " 3 n_bins"]) -> Float[Tensor, " 3 n_merged"]:
    """Merge a bin with the bin before it if one of them holds few errors of both values.

    The rows of ``sums`` are the number of errors, the number of larger errors, and the sum of the predictions. The edges for
    the larger errors and for the smaller errors can lie close together, which makes such bins.
    """

    def is_small(column: Tensor) -> bool:
        counts = torch.stack([column[1], column[0] - column[1]])
        return bool((counts <= enough).all())

    enough = torch.stack([sums[1].sum(), (sums[0] - sums[1]).sum()]) / N_BINS
    merged: list[Tensor] = []
    for column in sums.T:
        if merged and (is_small(column) or is_small(merged[-1])):
            merged[-1] = merged[-1] + column
        else:
            merged.append(column)
    return torch.stack(merged, dim=1)


def _bin_edges(
    is_larger: Bool[Tensor, " n n_cells"], prediction: Channel
) -> Float[Tensor, " n_edges"]:
    """Edges of bins with equal numbers of larger errors, and edges of bins with equal numbers of smaller errors.

    The larger errors can be rare, and the frequency must be resolved where they are. A prediction that is frequent enough to
    be an edge twice gets a bin of its own.
    """
    both = (prediction[is_larger].sort().values, prediction[~is_larger].sort().values)
    every = torch.cat([_equal_count_edges(ordered) for ordered in both])
    edges, count = every.unique(return_counts=True)
    below = edges[count > 1].nextafter(edges.new_tensor(-torch.inf))
    every_edge: Tensor = torch.cat([edges, below]).unique()
    return every_edge


def _equal_count_edges(ordered: Float[Tensor, " n"]) -> Float[Tensor, " n_edges"]:
    """The edges between bins with equal numbers of sorted values, at least ``MIN_VALUES_PER_BIN`` in each."""
    n_bins = min(N_BINS // 2, len(ordered) // MIN_VALUES_PER_BIN)
    ranks = torch.linspace(0, 1, n_bins + 1, device=ordered.device)[1:-1]
    return ordered[(ranks * len(ordered)).long()]


def _coefficients(
    is_larger: Bool[Tensor, " n n_cells"],
    prediction_logit: Channel,
    cell_logit: Channel,
) -> Float[Tensor, " 3"]:
    """The coefficients a, b and d of a logistic regression on both logits, by Newton's method from (1, 0, 0)."""
    target = is_larger.flatten().double()
    columns = (prediction_logit, cell_logit, torch.ones_like(cell_logit))
    x = torch.stack([column.flatten().double() for column in columns], dim=1)
    initial = x.new_tensor([1.0, 0.0, 0.0])

    def loss(weights: Tensor) -> Tensor:
        logit = x @ weights
        cross_entropy = nn.functional.softplus(logit).sum() - logit @ target
        return cross_entropy + RIDGE / 2 * (weights - initial).square().sum()

    weights, smallest = initial, loss(initial)
    for _ in range(MAX_NEWTON_STEPS):
        p = (x @ weights).sigmoid()
        gradient = x.T @ (p - target) + RIDGE * (weights - initial)
        hessian = (x.T * (p * (1 - p))) @ x + RIDGE * torch.eye(3).to(x)
        step = torch.linalg.solve(hessian, gradient)
        # Far from the minimum a full step can raise the loss.
        while step.norm() > STEP_TOLERANCE and loss(weights - step) > smallest:
            step = step / 2
        if step.norm() <= STEP_TOLERANCE:
            break
        weights = weights - step
        smallest = loss(weights)
    return weights.float()
