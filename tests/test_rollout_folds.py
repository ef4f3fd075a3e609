"""Rollouts of the fold surrogates: checkpoints, other processes, and surrogates that were trained elsewhere."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from henon import STATES, STEP, TRAINING, analogue, henon, same_answers, small
from joblib import parallel_config
from torch.testing import assert_close

from geoq import GroupFolds, TemporalFolds, TrainedFolds


class Counting:
    """A recipe that counts its trainings, and is interrupted in one of them."""

    def __init__(self, interrupted_at=None):
        self.interrupted_at, self.n_calls = interrupted_at, 0

    def __repr__(self):
        return "Counting()"

    def __call__(self, segments):
        self.n_calls += 1
        if self.n_calls == self.interrupted_at:
            raise KeyboardInterrupt
        return analogue(segments)


def test_an_interrupted_fit_continues_with_the_same_result(tmp_path):
    train = Counting(interrupted_at=3)
    geoq = small(STEP, train)
    with pytest.raises(KeyboardInterrupt):
        geoq.fit(TRAINING, checkpoint=tmp_path)
    assert not hasattr(geoq, "calibration_")
    geoq.fit(TRAINING, checkpoint=tmp_path)
    assert train.n_calls == 3 + 3  # two folds were complete, the third is trained again
    same_answers(geoq, small(STEP, analogue).fit(TRAINING))
    again = small(STEP, train).fit(TRAINING, checkpoint=tmp_path)
    assert train.n_calls == 6
    same_answers(geoq, again)


def test_a_checkpoint_keeps_diverged_rollouts(tmp_path):
    def explodes(segments):
        return lambda x: 1.5 * x + 1

    with pytest.warns(UserWarning, match=r"100 of 100 \(100 %\).*0 of 100 \(0 %\)"):
        first, second = (
            small(STEP, explodes).fit(TRAINING, checkpoint=tmp_path) for _ in range(2)
        )
    assert first.calibration_.error.isinf().any()
    assert torch.equal(first.calibration_.error, second.calibration_.error)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"n_calibration": 30}, "n_calibration was 40, now 30"),
        ({"n_starts": 10}, "starts was"),
        ({"folds": TemporalFolds(4)}, "folds was TemporalFolds"),
        ({"train_surrogate": Counting()}, r"train_surrogate was .* now Counting\(\)"),
    ],
)
def test_the_checkpoint_of_another_calibration_is_refused(tmp_path, change, difference):
    small(STEP, analogue).fit(TRAINING, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=difference):
        replace(small(STEP, analogue), **change).fit(TRAINING, checkpoint=tmp_path)


def test_the_checkpoint_of_other_trajectory_lengths_is_refused(tmp_path):
    small(STEP, analogue).fit([STATES[:350], STATES[350:700]], checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"lengths was \[350, 350\], now \[700\]"):
        small(STEP, analogue).fit(TRAINING, checkpoint=tmp_path)


def test_folds_can_be_trained_by_other_processes(tmp_path):
    def mean_change(segments):  # a local function, so that it is sent by value
        (tmp_path / str(os.getpid())).touch()
        change = np.concatenate([np.diff(s, axis=0) for s in segments]).mean(axis=0)
        return lambda x: 0.9 * x + change

    here = small(STEP, mean_change).fit(TRAINING).calibration_
    with parallel_config(backend="loky", n_jobs=2):
        there = small(STEP, mean_change).fit(TRAINING).calibration_
    assert torch.equal(here.error, there.error)
    assert torch.equal(here.fold, there.fold)
    assert len([*tmp_path.iterdir()]) > 1


def test_fold_surrogates_can_be_trained_elsewhere(tmp_path):
    surrogates = []

    def recorded(segments):
        surrogates.append(analogue(segments))
        return surrogates[-1]

    fresh = small(STEP, recorded).fit(TRAINING)
    pretrained = small(STEP, TrainedFolds(surrogates))
    same_answers(fresh, pretrained.fit(TRAINING, checkpoint=tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_fold_without_a_rollout_is_not_trained_and_keeps_its_number():
    """The second of three trajectories is too short for a rollout."""
    parts = [henon(300), henon(20, seed=1), henon(300, seed=2)]
    states = torch.from_numpy(np.concatenate(parts))
    train, grouped = Counting(), {"folds": GroupFolds(3), "n_starts": 40}
    calibration = small(STEP, train, **grouped).fit(parts).calibration_
    assert train.n_calls == 2
    assert len(calibration.fold.unique()) == 2
    # The surrogate with number n adds n / 1000, so the first step gives the number of the surrogate that was used.
    numbered = TrainedFolds([lambda x, n=n: x + n / 1000 for n in range(3)])
    calibration = small(STEP, numbered, **grouped).fit(parts).calibration_
    change = calibration.features.prediction[:, 0] - states[calibration.start]
    assert_close(1000 * change, calibration.fold[:, None].expand(-1, 2).to(change))


def test_errors_of_user_code_name_the_fold():
    def fails(segments):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        small(STEP, fails).fit(TRAINING)
    assert "fold 1 of 5" in caught.value.__notes__[0]


def test_the_tuples_of_a_safe_region_start_from_rows_of_its_data():
    """The last state of a trajectory has no next state, so it is left out of these data."""
    geoq = small(None, analogue, folds=GroupFolds(3)).fit(
        [henon(300, seed) for seed in range(3)]
    )
    tuples = geoq.calibration_.tuples
    data, first = tuples.data, torch.arange(0, len(tuples), 40)
    assert len(data.inputs) == len(data.outputs) == 3 * 299
    assert_close(tuples.features.inputs[first], data.inputs[tuples.point[first]])
    raw = data.coordinates.inverse(data.inputs)
    assert_close(1 - 1.4 * raw[:, 0] ** 2 + raw[:, 1], data.outputs[:, 0])
    for fold, (left_in, _) in enumerate(data.splits):
        assert len(left_in) == 2 * 299
        assert not set(left_in) & set(tuples.point[tuples.fold == fold].tolist())
