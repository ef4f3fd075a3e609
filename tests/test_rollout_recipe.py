"""TrainRollout: networks that are trained on single steps and then on their own rollouts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from henon import STATES, STEP, TRAINING, small
from torch import nn
from torch.testing import assert_close

from geoq import MLP, Training, TrainRollout
from geoq.rollout.recipe import rollout_task

QUICK = Training(n_steps=30, check_every=10)
STEPPER = TrainRollout(
    partial(MLP, 2, 2, hidden=(16, 16)),
    training=Training(n_steps=120, batch_size=16, learning_rate=3e-3, check_every=20),
    n_rollout=3,
    fine_tuning=Training(n_steps=60, batch_size=16, check_every=20),
)
RUNS = [
    [np.arange(300), np.arange(310, 600)],
    [np.arange(100, 500)],
    [np.arange(40), np.arange(80, 90), np.arange(300, 400)],
]


def with_dropout():
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Linear(8, 2))


def test_the_recipe_learns_the_map_and_depends_only_on_its_seed():
    training = Training(n_steps=400, learning_rate=3e-3)
    recipe = replace(STEPPER, training=training)
    segments = [STATES[:300], STATES[310:600]]
    surrogate, again = recipe(segments), recipe(segments)
    assert abs(surrogate(STATES[600:899]) - STATES[601:900]).mean() < 0.15
    np.testing.assert_array_equal(surrogate(STATES[:5]), again(STATES[:5]))
    other = replace(recipe, training=replace(training, random_state=1))(segments)
    assert not np.array_equal(surrogate(STATES[:5]), other(STATES[:5]))
    seeded = replace(STEPPER.fine_tuning, random_state=5)
    one, two = STEPPER(segments), replace(STEPPER, fine_tuning=seeded)(segments)
    np.testing.assert_array_equal(one(STATES[:9]), two(STATES[:9]))


@pytest.mark.parametrize("recipe", [
    STEPPER,
    replace(STEPPER, make_network=with_dropout),
    replace(STEPPER, fine_tuning=replace(QUICK, n_decays=1)),
    replace(STEPPER, training=replace(QUICK, n_decays=1)),
], ids=["stacked", "dropout", "rates cut late", "rates cut early"])  # fmt: skip
def test_networks_trained_together_equal_networks_trained_alone(recipe):
    states = torch.from_numpy(STATES)
    for runs, member in zip(RUNS, recipe.train_many(states, RUNS), strict=True):
        alone = recipe([states[run] for run in runs])
        assert_close(member(states[600:640]), alone(states[600:640]), rtol=1e-4, atol=1e-5)
        assert not member.network.training


def test_the_loss_of_a_rollout_compares_the_networks_own_states_with_the_truth():
    """u = 0, 1, 4, 9 and a network that adds 2: from 0 it reaches 2 and 4, from 1 it reaches 3 and 5."""
    states = torch.tensor([[0.0], [1.0], [4.0], [9.0]])
    task = rollout_task(states, 2, nn.functional.mse_loss)
    losses = [
        float(task.mean_loss(lambda x: x + 2, task.loss, torch.tensor([row]))) for row in (0, 1)
    ]
    assert losses == [(1 + 0) / 2, (1 + 16) / 2]


def test_the_surrogates_of_all_folds_are_trained_together(caplog):
    caplog.set_level("INFO")
    together = small(STEP, STEPPER).fit(TRAINING)
    lengths = [r.args[-1] for r in caplog.records if r.msg.startswith("trained")]
    assert max(lengths[5:]) <= 60 < min(lengths[:5])  # all pairs, then all rollouts
    alone = small(STEP, lambda segments: STEPPER(segments)).fit(TRAINING)
    ours, theirs = (e.fitted_.calibration.error[:, :3] for e in (together, alone))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_segments_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="segments is an empty list"):
        STEPPER([])
    recipe = replace(STEPPER, n_rollout=5)
    with pytest.raises(ValueError, match=r"n_rollout=5, but the .* 2 .* only 5 states"):
        recipe([STATES[:5], STATES[5:9]])
    # Before any training, if all segments of a fold are too short.
    recipe = replace(STEPPER, make_network=lambda: pytest.fail("made"), n_rollout=290)
    with pytest.raises(ValueError, match="n_rollout=290, but the longest") as caught:
        small(None, recipe).fit([STATES[:300], STATES[300:600]])
    assert "the segments of fold 3" in caught.value.__notes__[0]
