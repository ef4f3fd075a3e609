"""Baselines and simple rivals that bound the errors of rollouts."""

import copy
import hashlib
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from benchmarks.record import QUANTILE, Memo
from benchmarks.rollouts.data import Settings
from geoq.baselines import GaussianProcess
from geoq.baselines.bound import GAUSSIAN_95, Bound, spread
from geoq.baselines.conformal import conformal_quantile
from geoq.rollout import TrainRollout
from geoq.rollout.levels import step_factors


@dataclass
class Remembered:
    """A recipe that trains once on the same segments; ``seconds_saved`` counts the trainings that were not repeated."""

    recipe: TrainRollout
    memo: Memo = field(default_factory=Memo)

    @property
    def seconds_saved(self):
        return self.memo.seconds_saved

    def __call__(self, segments):
        joined = b"|".join(np.ascontiguousarray(s).tobytes() for s in segments)
        key = hashlib.sha256(joined).hexdigest()
        return self.memo(key, partial(self.recipe, segments))


@dataclass(frozen=True)
class RolledOut:
    """A surrogate that maps an initial state to the whole rollout, steps 1 to n_steps."""

    surrogate: object
    n_steps: int

    @property
    def network(self):
        return self.surrogate.network

    def __call__(self, x0):
        states = [self.surrogate(x0)]
        while len(states) < self.n_steps:
            states.append(self.surrogate(states[-1]))
        return np.stack(states, axis=1)


@dataclass(frozen=True)
class WholeRollout:
    """A recipe that maps pairs to a surrogate of whole rollouts, as the baselines need it."""

    recipe: TrainRollout
    n_steps: int

    def __call__(self, x, y):
        return RolledOut(self.recipe([np.concatenate([x, y[-1:]])]), self.n_steps)

    def with_seed(self, random_state):
        return replace(self, recipe=self.recipe.with_seed(random_state))


@dataclass
class SampledProcess:
    """A Gaussian process of one step, propagated by Monte Carlo: mean and spread of the samples.

    Samples are clipped to the range of the data. Outside of it the process is so uncertain that rollouts would diverge.
    """

    n_points: int
    n_samples: int
    n_steps: int
    device: str
    random_state: int

    def fit(self, x, y):
        rows = np.linspace(0, len(x) - 1, min(self.n_points, len(x))).astype(int)
        pairs = (torch.from_numpy(part[rows]).to(self.device) for part in (x, y))
        self.process_ = GaussianProcess().fit(*pairs)
        self.range_ = [
            torch.from_numpy(limit).to(self.device)
            for limit in (x.min(axis=0), x.max(axis=0))
        ]
        return self

    def predict(self, x0):
        generator = torch.Generator(self.device).manual_seed(self.random_state)
        state = torch.from_numpy(x0).to(self.device).repeat(self.n_samples, 1)
        states = []
        for _ in range(self.n_steps):
            answer = self.process_.predict(state)
            noise = torch.randn(
                state.shape, generator=generator, dtype=state.dtype, device=self.device
            )
            state = answer.prediction + answer.error_hat / GAUSSIAN_95 * noise
            state = state.clamp(*self.range_)
            states.append(state.cpu())
        sampled = torch.stack(states, dim=1).unflatten(0, (self.n_samples, len(x0)))
        mean, deviation = spread(iter(sampled))
        return Bound(mean.numpy(), GAUSSIAN_95 * deviation.numpy())


@dataclass
class RolloutConformal:
    """Split conformal prediction on the last fifth: one bound per coordinate, or one per step and coordinate."""

    recipe: TrainRollout
    settings: Settings
    per_step: bool

    def fit(self, x, y):
        states, n_steps = np.concatenate([x, y[-1:]]), self.settings.n_calibration
        n_proper = round(0.8 * len(states))
        self.surrogate_ = self.recipe([states[:n_proper]])
        n_starts = 5 * self.settings.n_starts
        last = len(states) - 1 - n_steps
        starts = np.unique(np.linspace(n_proper, last, n_starts).astype(int))
        truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
        prediction = RolledOut(self.surrogate_, n_steps)(states[starts])
        error = torch.from_numpy(abs(truth - prediction))
        scores = error if self.per_step else error.flatten(0, 1)[:, None]
        self.bound_ = conformal_quantile(scores, QUANTILE).numpy()
        return self

    def predict(self, x0):
        n_steps = self.settings.n_test
        step = np.arange(n_steps).clip(max=len(self.bound_) - 1)
        prediction = RolledOut(self.surrogate_, n_steps)(x0)
        return Bound(prediction, np.broadcast_to(self.bound_[step], prediction.shape))


# Two simple rollout schemes, fitted to the same calibration rollouts as the default.


@dataclass
class OneNumberPerHorizon:
    """The quantile of the held-out errors at each step, for all states."""

    quantile: float = QUANTILE

    def fit(self, calibration):
        error = calibration.error
        self.quantiles_ = step_factors(error, torch.ones_like(error), self.quantile)
        return self

    def __call__(self, features):
        step = torch.arange(features.n_steps).clamp(max=len(self.quantiles_) - 1)
        return self.quantiles_[step].expand_as(features.climatology).clone()


@dataclass
class HorizonTimesClimatology:
    """A number per step times the climatology of the predicted value."""

    quantile: float = QUANTILE

    def fit(self, calibration):
        self.quantiles_ = step_factors(
            calibration.error, calibration.features.climatology, self.quantile
        )
        return self

    def __call__(self, features):
        step = torch.arange(features.n_steps).clamp(max=len(self.quantiles_) - 1)
        return self.quantiles_[step] * features.climatology


def with_scheme(fitted, scheme):
    """A copy of a fitted RolloutGeoQ with another scheme, fitted to the same calibration rollouts."""
    other = copy.copy(fitted)
    other.scheme_ = scheme.fit(fitted.calibration_)
    return other


def capped(assessment, fitted):
    """The sum of increments, at most the climatology of the predicted state."""
    states = torch.from_numpy(assessment.prediction)
    most = fitted.reference_states_.climatology(states).numpy()
    return Bound(assessment.prediction, np.minimum(assessment.error_hat, most))
