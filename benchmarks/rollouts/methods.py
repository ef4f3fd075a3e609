"""Baselines and simple rivals that bound the errors of rollouts."""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from joblib import Parallel, delayed

from benchmarks.record import QUANTILE, Memo
from benchmarks.rollouts.data import Settings
from benchmarks.rollouts.gaussian_process import SampledProcess
from geoq import TemporalFolds
from geoq.baselines.bound import Bound
from geoq.baselines.conformal import conformal_quantile
from geoq.fold_plan import FoldPlan
from geoq.quantiles import pinball_loss
from geoq.rollout import AdditiveRecursion, TrainRollout
from geoq.rollout.levels import step_factors
from geoq.rollout.trajectories import Trajectories

# The states of a run that pairs start from and end at.
FIRST, LAST = slice(None, -1), slice(1, None)
# Smallest spread that is scaled: samples that are all clipped to the same value have none.
LEAST_SPREAD = 1e-6


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


def held_out_rollouts(states, settings):
    """For each of five blocks of time: the runs of rows outside, the first rows of rollouts inside, and their true states."""
    whole = Trajectories(states, np.zeros(len(states), dtype=int))
    n_steps = settings.n_calibration
    for kept, held_out in FoldPlan.draw(TemporalFolds(5), states, whole.number).splits:
        starts = whole.starts(held_out, n_steps, settings.n_starts)
        truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
        yield whole.runs(kept), starts, truth


@dataclass
class ChosenProcess:
    """The candidate with the smallest pinball loss on some rollouts of the last held-out block, fitted to the training states.

    The test rollouts follow the training states, as this block follows most of them. The fit to all training states keeps the
    hyper-parameters that were tested: a new search sometimes finds another maximum of the likelihood.
    """

    candidates: tuple[SampledProcess, ...]
    settings: Settings

    def fit(self, x, y):
        states = np.concatenate([x, y[-1:]])
        few = replace(self.settings, n_starts=self.settings.n_gp_starts)
        *_, (runs, starts, truth) = held_out_rollouts(states, few)
        self.losses_, found = {}, {}
        for candidate in self.candidates:
            short = replace(candidate, n_steps=self.settings.n_calibration)
            (fitted,) = folds_of_pairs(short, states, [runs])
            answer = fitted.predict(states[starts])
            error = torch.from_numpy(abs(truth - answer.prediction))
            bound = torch.from_numpy(answer.error_hat)
            loss = pinball_loss(error, bound, QUANTILE).mean()
            self.losses_[candidate.process.setting] = float(loss)
            tested = replace(candidate.process, known=fitted.process_.found_)
            found[candidate.process.setting] = replace(candidate, process=tested)
        self.chosen_ = found[min(self.losses_, key=self.losses_.get)]
        self.fitted_ = replace(self.chosen_).fit(x, y)
        return self

    def predict(self, x0):
        return self.fitted_.predict(x0)


@dataclass
class ScaledPerStep:
    """A baseline whose bound is multiplied by a factor per step, calibrated on the held-out rollouts of the default.

    Attributes:
        fitted: the baseline, fitted to all states.
        fit_folds: a function of the states and of the runs of rows that each fold leaves in; it returns the baselines that
            are fitted to these runs.
        settings: the sizes of the run.
    """

    fitted: object
    fit_folds: Callable
    settings: Settings

    def fit(self, x, y):
        states = np.concatenate([x, y[-1:]])
        folds = [*held_out_rollouts(states, self.settings)]
        baselines = self.fit_folds(states, [runs for runs, _, _ in folds])
        ratios = []
        for baseline, (_, starts, truth) in zip(baselines, folds, strict=True):
            answer = baseline.predict(states[starts])
            n_steps = truth.shape[1]
            error = abs(truth - answer.prediction[:, :n_steps])
            ratios.append(error / answer.error_hat[:, :n_steps].clip(min=LEAST_SPREAD))
        ratio = torch.from_numpy(np.concatenate(ratios)).nan_to_num(nan=torch.inf)
        by_step = ratio.transpose(1, 2).flatten(0, 1)
        self.factor_ = conformal_quantile(by_step, QUANTILE).numpy()
        return self

    def predict(self, x0):
        raw = self.fitted.predict(x0)
        step = np.arange(raw.error_hat.shape[1]).clip(max=len(self.factor_) - 1)
        spread = raw.error_hat.clip(min=LEAST_SPREAD)
        return Bound(raw.prediction, spread * self.factor_[step][:, None])


def folds_of_pairs(baseline, states, runs):
    """Copies of a baseline of pairs, fitted to the pairs of each fold."""
    pairs = [
        [np.concatenate([states[run[part]] for run in own]) for part in (FIRST, LAST)]
        for own in runs
    ]
    return [copy.copy(baseline).fit(*own) for own in pairs]


def folds_of_dropout(dropout, states, runs):
    """Copies of MC dropout with one network per fold."""
    whole = dropout.train_surrogate
    networks = whole.recipe.train_many(states, runs)
    copies = [copy.copy(dropout) for _ in runs]
    for one, network in zip(copies, networks, strict=True):
        one.surrogate_ = RolledOut(network, whole.n_steps)
    return copies


def folds_of_ensembles(ensemble, n_jobs, states, runs):
    """Copies of an ensemble with the same number of members per fold; the members are trained in ``n_jobs`` processes."""
    whole = ensemble.train_surrogate
    first = ensemble.random_state + 1
    # The backend is named, because a process of joblib would use threads otherwise.
    members = Parallel(n_jobs=n_jobs, backend="loky")(
        delayed(whole.recipe.with_seed(seed).train_many)(states, runs)
        for seed in range(first, first + ensemble.n_members)
    )
    copies = [copy.copy(ensemble) for _ in runs]
    for one, networks in zip(copies, zip(*members, strict=True), strict=True):
        one.members_ = [RolledOut(network, whole.n_steps) for network in networks]
    return copies


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


@dataclass
class FixedSteps(AdditiveRecursion):
    """The paper's sum, trained on all folds with a number of steps that is given."""

    n_fixed: int = 0

    def fit(self, calibration):
        return self.train_for(self.n_fixed, calibration)


@dataclass
class StoppedByRollouts(AdditiveRecursion):
    """The paper's sum, stopped by rollouts that are drawn from all folds: their surrogates are trained on as well."""

    def fit(self, calibration):
        rollouts = self._rollouts(calibration)
        rows = self.training.hold_out(torch.arange(len(rollouts.psi)))
        self.trainings_ = (self._train(rollouts, self.training, *rows),)
        self.n_steps_ = self.trainings_[0].best_step
        return self


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
