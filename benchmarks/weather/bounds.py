"""Bounds of forecast errors that are fitted to held-out forecasts.

A bound is an object with ``fit(tuples)``, which returns itself, and ``bound(seen)``, which returns a field per forecast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.record import QUANTILE
from benchmarks.rivals import conformal_factor
from benchmarks.rivals.networks import Positive
from benchmarks.weather.forecast import GlobeUNet
from geoq import Training
from geoq.bounds.climatology import Climatology, FittedClimatology
from geoq.bounds.network import pinball
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
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
        return (np.arange(n_points), self.gap) if self.gap else None


@dataclass(frozen=True)
class Natural:
    """Natural variability of each cell: climatology, mean and standard deviation of the given states."""

    climatology: FittedClimatology
    mean: np.ndarray  # (channel, lat, lon)
    spread: np.ndarray

    @classmethod
    def fit(cls, states):
        climatology = Climatology().fit(states.reshape(len(states), -1), QUANTILE)
        return cls(climatology, states.mean(axis=0), states.std(axis=0, ddof=1))

    def around(self, prediction):
        """The climatology at forecasts, one lead after the other."""
        flat = prediction.reshape(*prediction.shape[:2], -1)
        return self.climatology(flat).reshape(prediction.shape).astype(prediction.dtype)


@dataclass(frozen=True)
class Seen:
    """What is known at forecast time; fields of the states have the shape (forecast, channel, lat, lon)."""

    features: Features
    climatology: np.ndarray  # (forecast, lead, channel, lat, lon)
    spread: np.ndarray
    latitude: np.ndarray  # (lat,)

    def __getitem__(self, rows):
        parts = (self.features[rows], self.climatology[rows], self.spread[rows])
        return Seen(*parts, self.latitude)

    def __len__(self):
        return len(self.spread)


@dataclass(frozen=True)
class HeldOut:
    """Features and errors of held-out forecasts."""

    seen: Seen
    tuples: Tuples
    error: np.ndarray

    def __getitem__(self, rows):
        return HeldOut(self.seen[rows], self.tuples[rows], self.error[rows])

    def by_fold(self):
        """For each fold, its rows and the rows of other folds that do not depend on them."""
        for number in np.unique(self.tuples.fold):
            mine = self.tuples.fold == number
            yield np.flatnonzero(mine), np.flatnonzero(self.tuples.independent_of(mine))


def by_lead_and_channel(values):
    """Quantile of the values at each lead and channel, over forecasts and cells."""
    pooled = values.transpose(0, 3, 4, 1, 2).reshape(-1, *values.shape[1:3])
    return inverse_cdf_quantile(pooled, QUANTILE)[..., None, None]


def by_cell(values):
    """Conformal quantile of the values at each lead, channel and cell, over forecasts."""
    return conformal_factor(values).astype(values.dtype)


@dataclass
class PerLeadAndCell:
    """One number per lead, channel and cell."""

    def fit(self, tuples):
        self.quantiles_ = by_cell(tuples.error)
        return self

    def bound(self, seen):
        return np.broadcast_to(self.quantiles_, (len(seen), *self.quantiles_.shape))


def one(seen):
    return np.ones_like(seen.climatology)


def climatology(seen):
    return seen.climatology


def cell_spread(seen):
    return np.broadcast_to(seen.spread[:, None], seen.climatology.shape)


@dataclass
class LeadScale:
    """One number per lead and channel times a scale of each forecast and cell."""

    scale: Callable[[Seen], np.ndarray]

    def fit(self, tuples):
        self.quantiles_ = by_lead_and_channel(tuples.error / self.scale(tuples.seen))
        return self

    def bound(self, seen):
        return self.quantiles_ * self.scale(seen)


@dataclass
class Blend:
    """Weighted geometric mean of the quantile of each cell and the quantile of the lead times the cell's deviation.

    The weight minimises the pinball loss on held-out folds.
    """

    weights: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def fit(self, tuples):
        self.parts_ = PerLeadAndCell(), LeadScale(cell_spread)
        error = tuples.error
        held_out = np.empty_like(error), np.empty_like(error)
        for mine, others in tuples.by_fold():
            for part, bound in zip(self.parts_, held_out, strict=True):
                bound[mine] = part.fit(tuples[others]).bound(tuples.seen[mine])
        blends = [_between(*held_out, weight) for weight in self.weights]
        losses = [pinball_loss(error, one, QUANTILE).mean(axis=(0, 3, 4)) for one in blends]
        best = np.stack(losses).argmin(axis=0)
        self.weight_ = np.array(self.weights, error.dtype)[best][..., None, None]
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


@dataclass
class DistanceNormalised:
    """One number per lead, channel and cell times the mean distance to the nearest windows."""

    def fit(self, tuples):
        distance = tuples.seen.features.support_distance
        self.factor_ = conformal_factor(tuples.error, distance).astype(tuples.error.dtype)
        return self

    def bound(self, seen):
        return self.factor_ * seen.features.support_distance.reshape(-1, 1, 1, 1, 1)


@dataclass
class OfLibrary:
    """A bound model of the library."""

    model: Any

    def fit(self, tuples):
        self.fitted_ = self.model.fit(tuples.tuples, QUANTILE)
        return self

    def bound(self, seen):
        return self.fitted_(seen.features)


# Networks for a quantile of the held-out error


def of_input(seen):
    inputs = seen.features.inputs
    return inputs.reshape(len(inputs), -1, *inputs.shape[3:])


def of_input_and_prediction(seen):
    prediction = seen.features.prediction
    fields = prediction.reshape(len(prediction), -1, *prediction.shape[3:])
    return np.concatenate([of_input(seen), fields], axis=1)


def of_latitude_and_spread(seen):
    latitude = np.broadcast_to((seen.latitude / 90)[:, None], seen.spread[:, :1].shape)
    return np.concatenate([latitude, np.log(seen.spread)], axis=1)


@dataclass
class FieldQuantile:
    """A U-Net for a quantile of the error; it multiplies the fixed field ``start(error)``."""

    inputs: Callable[[Seen], np.ndarray]
    start: Callable[[np.ndarray], np.ndarray]
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = field(default_factory=Training)

    def fit(self, tuples):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = self.inputs(tuples.seen).astype(np.float32)
        axes = {"axis": (0, 2, 3), "keepdims": True}
        self.mean_, self.scale_ = x.mean(**axes), x.std(**axes, ddof=1).clip(min=1e-6)
        seen, error = self._tensor(x).to(device), torch.from_numpy(tuples.error).float().to(device)
        weight = 1 / error.mean(dim=(0, 3, 4), keepdim=True)[0]
        start = torch.from_numpy(np.ascontiguousarray(self.start(tuples.error))).float()
        with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
            torch.manual_seed(self.training.random_state)
            n_out = error[0, :, :, 0, 0].numel()
            network = GlobeUNet(x.shape[1], n_out, self.widths, dropout=0.0)
            shaped = nn.Sequential(network, nn.Unflatten(1, start.shape[:2]))
            self.network_ = Positive(shaped, start).to(device)

            def loss(net, rows):
                return (weight * pinball(error[rows], net(seen[rows]), QUANTILE)).mean()

            # Windows with common targets must not be split between training and early stopping.
            groups = torch.from_numpy(tuples.tuples.group).to(device)
            train(self.network_, loss, self.training, *self.training.hold_out(groups))
        return self

    def _tensor(self, x):
        return torch.from_numpy(((x - self.mean_) / self.scale_).astype(np.float32))

    @torch.no_grad()
    def bound(self, seen):
        device = next(self.network_.parameters()).device
        parts = self._tensor(self.inputs(seen)).split(ROWS_AT_ONCE)
        return torch.cat([self.network_(part.to(device)).cpu() for part in parts]).numpy()


def held_out_ratios(model, tuples):
    """Ratios of errors to bounds fitted to the other folds: one row per held-out forecast."""
    ratio = np.empty_like(tuples.error).reshape(len(tuples.error), -1)
    for mine, others in tuples.by_fold():
        fitted = model.fit(tuples[others])
        ratio[mine] = error_ratios(tuples.error[mine], fitted.bound(tuples.seen[mine]))
    return ratio
