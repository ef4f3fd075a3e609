"""Trajectories, rollouts of a surrogate, and cross-fitted rollouts."""

from itertools import pairwise

import numpy as np
import torch
from henon import STATES, TRAINING, analogue, fitted, henon, small
from torch.testing import assert_close

from geoq import ClusterFolds
from geoq.rollout.trajectories import Trajectories, roll_out


def test_rollouts_start_where_all_their_true_states_are_held_out_if_possible():
    trajectories = Trajectories.gather(TRAINING)
    starts = trajectories.starts(np.arange(100, 240), 40, 20)
    assert starts.min() >= 100
    assert (starts + 40 <= 239).all()
    scattered = trajectories.starts(np.arange(0, 700, 7), 40, 20)
    assert len(scattered) == 20
    assert scattered.max() + 40 < 700


def test_a_true_trajectory_never_continues_in_another_trajectory():
    trajectories = Trajectories.gather([STATES[:100], STATES[100:300]])
    starts = trajectories.starts(np.arange(300), 60, 300)
    assert (trajectories.number[starts] == trajectories.number[starts + 60]).all()


def test_runs_are_consecutive_rows_of_one_trajectory():
    trajectories = Trajectories.gather([STATES[:5], STATES[5:9]])
    runs = trajectories.runs(np.array([8, 0, 1, 3, 4, 5, 6, 2]))
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3, 4], [5, 6]]


def test_the_surrogate_is_not_called_on_a_diverged_state():
    def step(x):
        assert np.isfinite(x).all()
        return np.where(x > 0, 1e40, x)

    states = roll_out(step, np.array([[1.0], [-1.0]]), 3, torch.tensor([1e9]))
    assert_close(states[1], -torch.ones(4, 1, dtype=torch.float64))
    assert states[0, 1:].isnan().all()


def test_folds_train_on_contiguous_segments_without_the_held_out_starts():
    trainings = []

    def recorded(segments):
        trainings.append(segments)
        return analogue(segments)

    trajectories = [henon(200, seed) for seed in range(3)]
    geoq = small(analogue(trajectories), recorded, folds=ClusterFolds(4))
    calibration = geoq.fit(trajectories).calibration_
    states = np.concatenate(trajectories)
    steps = {
        (tuple(before), tuple(after))
        for trajectory in trajectories
        for before, after in pairwise(trajectory)
    }
    assert len(trainings) == 4
    for fold, segments in enumerate(trainings):
        seen = {tuple(state) for segment in segments for state in segment}
        starts = states[calibration.start[calibration.fold == fold]]
        assert not seen & set(map(tuple, starts))
        for segment in segments:
            assert {(tuple(a), tuple(b)) for a, b in pairwise(segment)} <= steps


def test_the_first_calibration_error_is_one_step_after_the_held_out_state():
    calibration = fitted().calibration_
    truth = torch.from_numpy(STATES)[calibration.start + 1]
    prediction = calibration.features.prediction[:, 0]
    assert_close(calibration.error[:, 0], (truth - prediction).abs())
