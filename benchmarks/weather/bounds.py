"""Bounds of forecast errors that are fitted to held-out forecasts.

A bound is an object with ``fit(tuples)``, which returns itself, and ``bound(seen)``, which returns a field per forecast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.record import QUANTILE
from benchmarks.weather.forecast import GlobeUNet
from geoq import Training
from geoq.baselines.conformal import conformal_factor, conformal_quantile
from geoq.crossfit import CalibrationSet
from geoq.folds import Dependence
from geoq.geometry import GeometricFeatures
from geoq.increments import Climatology
from geoq.increments.climatology import FittedClimatology
from geoq.increments.protocol import IncrementModel
from geoq.quantiles import error_ratios, inverse_cdf_quantile, pinball_loss
from geoq.training.loop import train

ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class KnownFolds:
    """Splits that are computed once for all methods."""

    name: str
    splits: list
    gap: int = 0

    def split(self, points, y=None, groups=None):
        del points, y, groups
        return iter(self.splits)

    def dependence(self, n_points, groups=None):
        del groups
        return Dependence(np.arange(n_points), self.gap) if self.gap else None


@dataclass(frozen=True)
class Natural:
    """Natural variability of each cell: climatology, mean and standard deviation of the given states."""

    climatology: FittedClimatology
    mean: Tensor  # (channel, lat, lon)
    spread: Tensor

    @classmethod
    def fit(cls, states):
        # On the CPU, because the table is built cell by cell.
        climatology = Climatology().fit(states.flatten(1).cpu(), QUANTILE)
        return cls(climatology, states.mean(dim=0), states.std(dim=0))

    def around(self, prediction):
        parts = [
            self.climatology(part.flatten(2)).reshape(part.shape)
            for part in prediction.split(ROWS_AT_ONCE)
        ]
        return torch.cat(parts)


@dataclass(frozen=True)
class Seen:
    """Features of forecasts that are available at forecast time."""

    features: GeometricFeatures
    climatology: Tensor  # (forecast, lead, channel, lat, lon)
    mean: Tensor  # (forecast, channel, lat, lon)
    spread: Tensor
    latitude: Tensor  # (lat,)

    def __getitem__(self, rows):
        return Seen(
            self.features[rows],
            self.climatology[rows],
            self.mean[rows],
            self.spread[rows],
            self.latitude,
        )

    def __len__(self):
        return len(self.spread)


@dataclass(frozen=True)
class Tuples:
    """Features and errors of held-out forecasts."""

    seen: Seen
    calibration: CalibrationSet

    def __getitem__(self, rows):
        return Tuples(self.seen[rows], self.calibration[rows])

    @property
    def error(self):
        return self.calibration.error


def by_lead_and_channel(values):
    """Quantile of the values at each lead and channel, over forecasts and cells."""
    pooled = values.permute(1, 2, 0, 3, 4).flatten(2).movedim(2, 0)
    return inverse_cdf_quantile(pooled, QUANTILE)[..., None, None]


def by_cell(values):
    """Conformal quantile of the values at each lead, channel and cell, over forecasts."""
    return conformal_quantile(values, QUANTILE)


@dataclass
class PerLeadAndCell:
    """One number per lead, channel and cell."""

    def fit(self, tuples):
        self.quantiles_ = by_cell(tuples.error)
        return self

    def bound(self, seen):
        return self.quantiles_.expand(len(seen), *self.quantiles_.shape)


def one(seen):
    return torch.ones_like(seen.climatology)


def climatology(seen):
    return seen.climatology


def cell_spread(seen):
    return seen.spread[:, None].expand_as(seen.climatology)


@dataclass
class LeadScale:
    """One number per lead and channel times a scale of each forecast and cell."""

    scale: Callable[[Seen], Tensor]

    def fit(self, tuples):
        self.quantiles_ = by_lead_and_channel(tuples.error / self.scale(tuples.seen))
        return self

    def bound(self, seen):
        return self.quantiles_ * self.scale(seen)


@dataclass
class Blend:
    """Weighted geometric mean of the quantile of each cell and the quantile of the lead times the cell's deviation.

    The weight minimises the pinball loss on held-out folds. With few windows the quantile of a cell is noisy. The deviation
    of a cell is less noisy, but it is the wrong map at short leads.
    """

    weights: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def fit(self, tuples):
        self.parts_ = PerLeadAndCell(), LeadScale(cell_spread)
        error = tuples.error
        held_out = torch.empty_like(error), torch.empty_like(error)
        for mine, others in by_fold(tuples.calibration):
            for part, bound in zip(self.parts_, held_out, strict=True):
                bound[mine] = part.fit(tuples[others]).bound(tuples.seen[mine])
        losses = [
            pinball_loss(error, _between(*held_out, weight), QUANTILE).mean(
                dim=(0, 3, 4)
            )
            for weight in self.weights
        ]
        best = torch.stack(losses).argmin(dim=0)
        self.weight_ = error.new_tensor(self.weights)[best][..., None, None]
        self.quantiles_ = by_lead_and_channel(error / _between(*held_out, self.weight_))
        for part in self.parts_:
            part.fit(tuples)
        return self

    def bound(self, seen):
        bounds = (part.bound(seen) for part in self.parts_)
        return self.quantiles_ * _between(*bounds, self.weight_)


def _between(first, second, weight):
    """Weighted geometric mean."""
    return first**weight * second ** (1 - weight)


def by_fold(calibration):
    """For each fold, its rows and the rows of other folds that do not depend on them."""
    for number in calibration.fold.unique():
        mine = calibration.fold == number
        yield mine.nonzero()[:, 0], calibration.independent_of(mine).nonzero()[:, 0]


@dataclass
class DistanceNormalised:
    """One number per lead, channel and cell times the mean distance to the nearest windows."""

    def fit(self, tuples):
        distance = tuples.seen.features.support_distance
        self.factor_ = conformal_factor(tuples.error, distance, QUANTILE)
        return self

    def bound(self, seen):
        return self.factor_ * seen.features.support_distance.view(-1, 1, 1, 1, 1)


@dataclass
class Increment:
    """An increment model of the library on top of the anchor error."""

    model: IncrementModel

    def fit(self, tuples):
        self.model.fit(tuples.calibration)
        return self

    def bound(self, seen):
        return seen.features.anchor_error + self.model(seen.features)


# Networks for a quantile of the held-out error.


def of_input(seen):
    return seen.features.inputs.flatten(1, 2)


def of_input_and_prediction(seen):
    return torch.cat([of_input(seen), seen.features.prediction.flatten(1, 2)], dim=1)


def of_latitude_and_spread(seen):
    latitude = (seen.latitude / 90)[:, None].expand_as(seen.spread[:, :1])
    return torch.cat([latitude, seen.spread.log()], dim=1)


class Positive(nn.Module):
    """``start softplus(network) / log 2``: positive, near ``start`` at first, and with a gradient that does not vanish."""

    def __init__(self, network, start):
        super().__init__()
        self.network = network
        self.register_buffer("start", start)

    def forward(self, x):
        emitted = self.network(x).unflatten(1, self.start.shape[:2])
        return self.start * nn.functional.softplus(emitted) / math.log(2)


@dataclass
class FieldQuantile:
    """A U-Net for a quantile of the error; it multiplies the fixed field ``start(error)``."""

    inputs: Callable[[Seen], Tensor]
    start: Callable[[Tensor], Tensor]
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = field(default_factory=Training)

    def fit(self, tuples):
        error, x = tuples.error.float(), self.inputs(tuples.seen).float()
        self.mean_ = x.mean(dim=(0, 2, 3), keepdim=True)
        self.scale_ = x.std(dim=(0, 2, 3), keepdim=True).clamp(min=1e-6)
        x = (x - self.mean_) / self.scale_
        weight = 1 / error.mean(dim=(0, 3, 4), keepdim=True)[0]
        start = self.start(error)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(self.training.random_state)
            n_out = error[0, :, :, 0, 0].numel()
            network = GlobeUNet(x.shape[1], n_out, self.widths, dropout=0.0)
            self.network_ = Positive(network, start).to(x.device)

            def loss(net, rows):
                each = pinball_loss(error[rows], net(x[rows]), QUANTILE)
                return (weight * each).mean()

            # Windows with common targets must not be split between training and early stopping.
            train(self.network_, loss, self.training, groups=tuples.calibration.group)
        return self

    @torch.no_grad()
    def bound(self, seen):
        x = (self.inputs(seen).float() - self.mean_) / self.scale_
        return torch.cat([self.network_(part) for part in x.split(ROWS_AT_ONCE)])


# Coverage of whole fields.


def held_out_ratios(model, tuples):
    """Ratios of errors to bounds fitted to the other folds: one row per held-out forecast."""
    ratio = torch.empty_like(tuples.error).flatten(1)
    for mine, others in by_fold(tuples.calibration):
        fitted = model.fit(tuples[others])
        ratio[mine] = error_ratios(tuples.error[mine], fitted.bound(tuples.seen[mine]))
    return ratio
