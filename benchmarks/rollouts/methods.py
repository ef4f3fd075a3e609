"""Baselines and simple rivals that bound the errors of rollouts."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from joblib import Parallel, delayed

from benchmarks.record import QUANTILE
from benchmarks.rivals.cross_fitted import Bound, conformal_factor
from benchmarks.rivals.remembered import fingerprint
from benchmarks.rollouts.data import Settings
from benchmarks.rollouts.gaussian_process import SampledProcess
from benchmarks.timing import Memo
from geoq import TemporalFolds, TrainRollout
from geoq.core.plan import FoldPlan
from geoq.metrics import pinball
from geoq.rollout.additive import AdditiveRecursion
from geoq.rollout.growth import step_factors
from geoq.rollout.series import Series

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
        return self.memo(fingerprint(*segments), partial(self.recipe, segments))


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
        training = replace(self.recipe.training, random_state=random_state)
        return replace(self, recipe=replace(self.recipe, training=training))


def held_out_rollouts(states, settings):
    """For each of five blocks of time: the runs of rows outside, the first rows of rollouts inside, and their true states."""
    whole, n_steps = Series.of(states), settings.n_calibration
    for kept, held_out in FoldPlan.draw(TemporalFolds(5), states, whole.number).splits:
        starts = whole.starts(held_out, n_steps, settings.n_starts)
        truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
        yield whole.runs(kept), starts, truth


@dataclass
class ChosenProcess:
    """The candidate with the smallest pinball loss on some rollouts of the last held-out block, fitted to the training states.

    The final fit keeps the tested hyper-parameters: a new search sometimes finds another maximum of the likelihood.
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
            answer, name = fitted.predict(states[starts]), candidate.process.setting
            error = abs(truth - answer.prediction)
            self.losses_[name] = pinball(error, answer.error_hat, QUANTILE)
            process = replace(candidate.process, known=fitted.process_.found_)
            found[name] = replace(candidate, process=process)
        self.chosen_ = found[min(self.losses_, key=self.losses_.get)]
        self.fitted_ = replace(self.chosen_).fit(x, y)
        return self

    def predict(self, x0):
        return self.fitted_.predict(x0)


@dataclass
class ScaledPerStep:
    """A baseline whose bound is multiplied by a factor per step, calibrated on the held-out rollouts of the default."""

    fitted: object  # to all states
    fit_folds: Callable  # from the states and the runs of rows that each fold leaves in to the baselines fitted to them
    settings: Settings

    def fit(self, x, y):
        states = np.concatenate([x, y[-1:]])
        folds = [*held_out_rollouts(states, self.settings)]
        baselines = self.fit_folds(states, [runs for runs, _, _ in folds])
        ratios = []
        for baseline, (_, starts, truth) in zip(baselines, folds, strict=True):
            answer, n_steps = baseline.predict(states[starts]), truth.shape[1]
            error = abs(truth - answer.prediction[:, :n_steps])
            ratios.append(error / answer.error_hat[:, :n_steps].clip(min=LEAST_SPREAD))
        ratio = np.nan_to_num(np.concatenate(ratios), nan=np.inf)
        self.factor_ = conformal_factor(ratio.swapaxes(1, 2).reshape(-1, ratio.shape[1]))
        return self

    def predict(self, x0):
        raw = self.fitted.predict(x0)
        step = np.arange(raw.error_hat.shape[1]).clip(max=len(self.factor_) - 1)
        spread = raw.error_hat.clip(min=LEAST_SPREAD)
        return Bound(raw.prediction, spread * self.factor_[step][:, None])


def folds_of_pairs(baseline, states, runs):
    """Copies of a baseline of pairs, fitted to the pairs of each fold."""
    copies = []
    for own in runs:
        pairs = (np.concatenate([states[run[part]] for run in own]) for part in (FIRST, LAST))
        copies.append(copy.copy(baseline).fit(*pairs))
    return copies


def folds_of_dropout(dropout, states, runs):
    """Copies of MC dropout with one network per fold."""
    whole = dropout.train_surrogate
    copies = [copy.copy(dropout) for _ in runs]
    for one, network in zip(copies, whole.recipe.train_many(states, runs), strict=True):
        one.surrogate_ = RolledOut(network, whole.n_steps)
    return copies


def folds_of_ensembles(ensemble, n_jobs, states, runs):
    """Copies of an ensemble with the same number of members per fold; the members are trained in ``n_jobs`` processes."""
    whole, first = ensemble.train_surrogate, ensemble.random_state + 1
    seeds = range(first, first + ensemble.n_members)
    # The backend is named, because a process of joblib would use threads otherwise.
    members = Parallel(n_jobs=n_jobs, backend="loky")(
        delayed(whole.with_seed(seed).recipe.train_many)(states, runs) for seed in seeds
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
        n_proper, n_starts = round(0.8 * len(states)), 5 * self.settings.n_starts
        self.surrogate_ = self.recipe([states[:n_proper]])
        last = len(states) - 1 - n_steps
        starts = np.unique(np.linspace(n_proper, last, n_starts).astype(int))
        truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
        error = abs(truth - RolledOut(self.surrogate_, n_steps)(states[starts]))
        scores = error if self.per_step else error.reshape(-1, *error.shape[2:])[:, None]
        self.bound_ = conformal_factor(scores)
        return self

    def predict(self, x0):
        n_steps = self.settings.n_test
        step = np.arange(n_steps).clip(max=len(self.bound_) - 1)
        prediction = RolledOut(self.surrogate_, n_steps)(x0)
        return Bound(prediction, np.broadcast_to(self.bound_[step], prediction.shape))


# Simple schemes, fitted to the same calibration rollouts as the default


@dataclass
class Factors:
    """The factors of each step times a shape of the bound: ones, or the climatology of the predicted value."""

    of_climatology: bool
    factors: np.ndarray | None = None

    def fit(self, calibration, quantile):
        shape = self._shape(calibration.features)
        return replace(self, factors=step_factors(calibration.error, shape, quantile))

    def _shape(self, features):
        return features.climatology if self.of_climatology else np.ones_like(features.climatology)

    def __call__(self, features):
        step = np.arange(features.n_steps).clip(max=len(self.factors) - 1)
        return self.factors[step] * self._shape(features)


SIMPLE = {
    "One number per horizon": Factors(of_climatology=False),
    "Horizon x climatology": Factors(of_climatology=True),
}


@dataclass(frozen=True)
class RecordedSum(AdditiveRecursion):
    """The paper's sum, which keeps the courses of its trainings in a list."""

    courses: list = field(default_factory=list, compare=False)

    def _train(self, *arguments):
        fitted, result = super()._train(*arguments)
        if result is not None:
            self.courses.append(result)
        return fitted, result

    def fit(self, calibration, quantile):
        fitted = super().fit(calibration, quantile)
        if fitted.n_steps:  # the final training, on all folds
            self.courses.pop()
        return fitted


def with_scheme(fitted, scheme):
    """A fitted calibration of rollouts with another scheme, fitted to the same rollouts."""
    return replace(fitted, bound=scheme.fit(fitted.calibration, fitted.quantile))


def capped(answer, fitted):
    """The sum of increments, at most the climatology of the predicted state."""
    most = fitted.reference.climatology(answer.prediction)
    return Bound(answer.prediction, np.minimum(answer.error_hat, most))
