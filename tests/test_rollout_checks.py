"""Refusals: the argument and its value, the fact that it conflicts with, what to do."""

from functools import partial

import numpy as np
import pytest
import torch
from henon import QUERIES, STATES, STEP, TRAINING, fitted, small
from sklearn.exceptions import NotFittedError
from torch import nn

from geoq import MLP, SafeRegion, TrainedFolds, TrainNetwork
from geoq.rollout import RolloutRegion, SaturatingGrowth


def untouched(segments):
    raise AssertionError("a surrogate was trained")


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        (STATES[:30], r"n_calibration=40, but the longest trajectory has 30 states"),
        ([STATES, STATES[:, :1]], r"trajectories\[1\] has rows of shape \(1,\)"),
        ([STATES, torch.from_numpy(STATES)], r"trajectories\[1\] is a Tensor"),
        ([], "empty list"),
        (STATES[:, 0], r"shape \(900,\).*with shape \(n_times, 1\)"),
        (np.where(STATES > 1.2, np.nan, STATES), "cut the trajectory there"),
        (STATES.astype(object), "dtype object"),
        (np.stack([STATES[:100]] * 5), "pass several trajectories as a list"),
    ],
)
def test_unusable_trajectories_are_refused_before_any_training(trajectories, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small(None, untouched).fit(trajectories)


class EverySecond:
    def split(self, points, y=None, groups=None):
        rows = np.arange(len(points))
        yield rows[::2], rows[1::2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_calibration": 0}, "n_calibration=0"),
        ({"n_starts": 2.5}, "n_starts=2.5"),
        (
            {"n_starts": 1},
            "needs at least 19 calibration rollouts, but there are only 5",
        ),
        ({"n_support": 800}, "n_support=800"),
        (
            {"safe_region": RolloutRegion},
            "safe_region is the class RolloutRegion, but an object",
        ),
        ({"safe_region": SafeRegion(701)}, "n_neighbors=701"),
        (
            {"representation": np.tanh},
            "use neither anchors nor displacements, so it has no effect",
        ),
        ({"scheme": SaturatingGrowth}, "pass for example scheme="),
        ({"scheme": "additive"}, "scheme='additive' has no quantile and no fit"),
        ({"folds": 5}, "folds=5 has no split"),
        ({"folds": EverySecond()}, "no pair of consecutive states"),
        ({"surrogate": 3}, "surrogate must be callable"),
        ({"train_surrogate": 3}, r"train_surrogate\(segments\)"),
        ({"surrogate": None, "train_surrogate": None}, "no model"),
        (
            {"surrogate": None, "train_surrogate": TrainedFolds([STEP])},
            "does not train",
        ),
        ({"train_surrogate": TrainedFolds([STEP] * 4)}, "TrainedFolds has 4 entries"),
        (
            {"train_surrogate": TrainedFolds([nn.Dropout(0.5)] * 5)},
            r"surrogates\[0\] is in training mode",
        ),
        (
            {"train_surrogate": TrainNetwork(partial(MLP, 2, 2, hidden=(4,)))},
            "pass a TrainRollout with the same",
        ),
        ({"surrogate": lambda x: x[:, :1]}, "must return the next state of each"),
        ({"surrogate": nn.Linear(2, 2)}, "training mode"),
        ({"surrogate": nn.Linear(2, 2).eval()}, "states are NumPy arrays"),
    ],
)
def test_unusable_settings_are_refused_before_any_training(settings, message):
    arguments = {"surrogate": STEP, "train_surrogate": untouched}
    with pytest.raises((ValueError, TypeError), match=message):
        small(**{**arguments, **settings}).fit(TRAINING)


def test_a_quantile_outside_0_and_1_is_refused():
    for scheme in (RolloutRegion, SaturatingGrowth):
        with pytest.raises(ValueError, match=r"quantile=1\.0"):
            scheme(quantile=1.0)


def test_a_random_surrogate_is_refused():
    noise = np.random.default_rng(0)
    with pytest.raises(ValueError, match="two answers"):
        small(lambda x: x + noise.random(x.shape), None).fit(TRAINING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QUERIES, 0), "n_steps=0"),
        ((QUERIES, 2.0), "n_steps=2.0"),
        ((QUERIES[0], 3), "first dimension of 1"),
        ((QUERIES[:0], 3), "at least one state"),
        ((QUERIES[:3, :1], 3), r"shape \(3, 1\)"),
        ((QUERIES, 3, 0.0), "tolerance=0.0, but a tolerance must be positive"),
        ((QUERIES, 3, np.ones(3)), r"tolerance has shape \(3,\)"),
    ],
)
def test_unusable_arguments_of_assess_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fitted().assess(*arguments)


def test_assess_and_save_before_fit_are_refused(tmp_path):
    with pytest.raises(NotFittedError):
        small(None, untouched).assess(QUERIES, 3)
    with pytest.raises(NotFittedError):
        small(None, untouched).save(tmp_path / "empty.geoq")
