"""Bounds for forecast fields that are read off held-out forecasts: what they may see, and how each makes a bound of it.

A bound is an object with ``fit(tuples)``, which returns itself, and ``bound(seen)``, a field per forecast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.record import QUANTILE
from benchmarks.weather.forecast import GlobeUNet
from geoq import Climatology, Training
from geoq.baselines.conformal import conformal_factor, conformal_quantile
from geoq.coverage import ratios
from geoq.crossfit import CalibrationSet
from geoq.folds import Dependence
from geoq.geometry import GeometricFeatures
from geoq.increment import IncrementModel, inverse_cdf_quantile, pinball_loss
from geoq.training import train

ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class KnownFolds:
    """Splits that were drawn before, so that no method clusters again."""

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
    """How each cell varies by itself, by the states known: distance quantile around a value, mean and deviation."""

    climatology: Climatology
    mean: Tensor  # (channel, lat, lon)
    spread: Tensor

    @classmethod
    def fit(cls, states):
        # On the CPU: the table is made cell by cell.
        climatology = Climatology.fit(states.flatten(1).cpu(), QUANTILE)
        return cls(climatology, states.mean(dim=0), states.std(dim=0))

    def around(self, prediction):
        parts = [
            self.climatology(part.flatten(2)).reshape(part.shape)
            for part in prediction.split(ROWS_AT_ONCE)
        ]
        return torch.cat(parts)


@dataclass(frozen=True)
class Seen:
    """What is known of forecasts when they are made."""

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
    """Held-out forecasts: what was known, and the error."""

    seen: Seen
    calibration: CalibrationSet

    def __getitem__(self, rows):
        return Tuples(self.seen[rows], self.calibration[rows])

    @property
    def error(self):
        return self.calibration.error


def by_lead_and_channel(values):
    """The level of the values at each lead and channel, over forecasts and cells."""
    pooled = values.permute(1, 2, 0, 3, 4).flatten(2).movedim(2, 0)
    return inverse_cdf_quantile(pooled, QUANTILE)[..., None, None]


def by_cell(values):
    """The level of the values at each lead, channel and cell, over forecasts."""
    return conformal_quantile(values, QUANTILE)


@dataclass
class PerLeadAndCell:
    """One number per lead, channel and cell."""

    def fit(self, tuples):
        self.level_ = by_cell(tuples.error)
        return self

    def bound(self, seen):
        return self.level_.expand(len(seen), *self.level_.shape)


def one(seen):
    return torch.ones_like(seen.climatology)


def climatology(seen):
    return seen.climatology


def cell_spread(seen):
    return seen.spread[:, None].expand_as(seen.climatology)


@dataclass
class LeadScale:
    """One number per lead and channel times a scale that is known."""

    scale: Callable[[Seen], Tensor]

    def fit(self, tuples):
        self.level_ = by_lead_and_channel(tuples.error / self.scale(tuples.seen))
        return self

    def bound(self, seen):
        return self.level_ * self.scale(seen)


@dataclass
class Blend:
    """Between each cell's own level and the lead's level times the cell's deviation, as held-out folds prefer.

    Few windows make a cell's own level noisy; its deviation is known better, but is the wrong map at short leads.
    """

    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def fit(self, tuples):
        self.parts_ = PerLeadAndCell(), LeadScale(cell_spread)
        error = tuples.error
        held_out = torch.empty_like(error), torch.empty_like(error)
        for mine, others in by_fold(tuples.calibration):
            for part, bound in zip(self.parts_, held_out, strict=True):
                bound[mine] = part.fit(tuples[others]).bound(tuples.seen[mine])
        losses = [
            pinball_loss(error, _between(*held_out, share), QUANTILE).mean(
                dim=(0, 3, 4)
            )
            for share in self.shares
        ]
        best = torch.stack(losses).argmin(dim=0)
        self.share_ = error.new_tensor(self.shares)[best][..., None, None]
        self.level_ = by_lead_and_channel(error / _between(*held_out, self.share_))
        for part in self.parts_:
            part.fit(tuples)
        return self

    def bound(self, seen):
        bounds = (part.bound(seen) for part in self.parts_)
        return self.level_ * _between(*bounds, self.share_)


def _between(first, second, share):
    """Weighted geometric mean."""
    return first**share * second ** (1 - share)


def by_fold(calibration):
    """Rows of each fold, and of the others that share no state with them, as far as the folds know."""
    for number in calibration.fold.unique():
        mine = calibration.fold == number
        yield mine.nonzero()[:, 0], calibration.apart_from(mine).nonzero()[:, 0]


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
    """``unit softplus(network) / log 2``: it starts near the unit, and cannot die."""

    def __init__(self, network, unit):
        super().__init__()
        self.network = network
        self.register_buffer("unit", unit)

    def forward(self, x):
        emitted = self.network(x).unflatten(1, self.unit.shape[:2])
        return self.unit * nn.functional.softplus(emitted) / math.log(2)


@dataclass
class FieldQuantile:
    """A U-Net from what is known to a quantile of the error, as a factor on a fixed level that it starts at."""

    inputs: Callable[[Seen], Tensor]
    level: Callable[[Tensor], Tensor]
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = field(default_factory=Training)

    def fit(self, tuples):
        error, x = tuples.error.float(), self.inputs(tuples.seen).float()
        self.mean_ = x.mean(dim=(0, 2, 3), keepdim=True)
        self.scale_ = x.std(dim=(0, 2, 3), keepdim=True).clamp(min=1e-6)
        x = (x - self.mean_) / self.scale_
        weight = 1 / error.mean(dim=(0, 3, 4), keepdim=True)[0]
        unit = self.level(error)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(self.training.random_state)
            n_out = error[0, :, :, 0, 0].numel()
            network = GlobeUNet(x.shape[1], n_out, self.widths, dropout=0.0)
            self.network_ = Positive(network, unit).to(x.device)

            def loss(net, rows):
                missed = pinball_loss(error[rows], net(x[rows]), QUANTILE)
                return (weight * missed).mean()

            # Windows that share targets must not sit on both sides of the early stopping.
            train(self.network_, loss, self.training, units=tuples.calibration.unit)
        return self

    @torch.no_grad()
    def bound(self, seen):
        x = (self.inputs(seen).float() - self.mean_) / self.scale_
        return torch.cat([self.network_(part) for part in x.split(ROWS_AT_ONCE)])


# Statements about whole fields.


def held_out_ratios(model, tuples):
    """Errors over the bounds that the other folds' forecasts give: one row per held-out forecast."""
    ratio = torch.empty_like(tuples.error).flatten(1)
    for mine, others in by_fold(tuples.calibration):
        fitted = model.fit(tuples[others])
        ratio[mine] = ratios(tuples.error[mine], fitted.bound(tuples.seen[mine]))
    return ratio
