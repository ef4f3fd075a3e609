from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from geoq import (
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    Training,
    TrainNetwork,
)
from geoq.nets.mlp import MLP
from geoq.training.fold_surrogates import Fold
from geoq.training.shared import RefittedHead, SharedTraining, SkippedFolds, shares

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
NETWORK = TrainNetwork(
    partial(MLP, 2, 1, hidden=(16,)),
    training=Training(n_steps=200, check_every=50, learning_rate=1e-2),
)


class Recorder:
    """A recipe that remembers what it was trained on."""

    def __init__(self, train):
        self.train, self.seen = train, []

    def __call__(self, x, y):
        self.seen.append({tuple(row) for row in x.tolist()})
        return self.train(x, y)


def fit(problem, train, folds):
    surrogate = problem.train(problem.x, problem.y)
    geoq = GeoQ(surrogate, train, folds=folds, increment_model=QUICK, n_support=5)
    return geoq.fit(problem.x, problem.y)


@pytest.mark.parametrize(
    ("folds", "n_trainings"), [(RandomFolds(6), 2), (NestedFolds(10), 3)], ids=repr
)
def test_a_shared_training_has_seen_no_point_it_is_judged_on(
    problem, folds, n_trainings
):
    recorder = Recorder(problem.train)
    calibration = fit(problem, SharedTraining(recorder), folds).calibration_
    assert len(recorder.seen) == n_trainings
    for fold in calibration.fold.unique():
        held_out = problem.x[calibration.point[calibration.fold == fold]]
        apart = [
            seen.isdisjoint(tuple(row) for row in held_out.tolist())
            for seen in recorder.seen
        ]
        assert any(apart)


def test_folds_share_a_training_only_while_enough_rows_are_common():
    def folds(*kept):
        return [
            Fold(number, len(kept), torch.tensor(rows), torch.tensor([0]))
            for number, rows in enumerate(kept)
        ]

    some = folds([1, 2, 3, 4], [1, 2, 3, 5], [5, 6, 7, 8], [1, 2, 6, 7])
    assert shares(some, 0.5) == [[0, 1, 3], [2]]
    assert shares(some, 0.75) == [[0, 1], [2], [3]]
    assert shares(some, 1.0) == [[0], [1], [2], [3]]


def test_a_refitted_head_fits_all_that_its_fold_leaves_in(problem):
    """With an encoder that is the identity, the refitted network is least squares on the fold's own rows."""

    def make_network():
        encoder = nn.Linear(2, 2).requires_grad_(False)
        encoder.weight.copy_(torch.eye(2))
        encoder.bias.zero_()
        return nn.Sequential(encoder, nn.Linear(2, 1))

    recipe = TrainNetwork(make_network, training=Training(n_steps=1))
    refitted = fit(problem, RefittedHead(recipe), RandomFolds(4)).calibration_
    exact = fit(problem, problem.train, RandomFolds(4)).calibration_
    assert_close(refitted.error, exact.error, rtol=1e-3, atol=1e-4)


def test_refitted_heads_need_a_last_layer_that_is_linear(problem):
    recipe = TrainNetwork(
        lambda: nn.Sequential(nn.Linear(2, 1), nn.Softplus()),
        training=Training(n_steps=1),
    )
    with pytest.raises(TypeError, match="end in a linear one, got Sequential"):
        fit(problem, RefittedHead(recipe), RandomFolds(4))


def test_skipped_folds_are_not_trained_and_their_errors_are_those_of_trained_ones(
    problem,
):
    recorder = Recorder(problem.train)
    surrogate = problem.train(problem.x, problem.y)
    skipped = fit(problem, SkippedFolds(recorder, surrogate), RandomFolds(6))
    assert len(recorder.seen) == 3
    full = fit(problem, problem.train, RandomFolds(6)).calibration_
    calibration = skipped.calibration_
    trained = calibration.fold % 2 == 0
    assert_close(calibration.error[trained], full.error[trained])
    known = calibration.error[trained].flatten()
    for error in calibration.error[~trained].flatten():
        assert (known - error).abs().min() < 1e-4


def test_a_cheaper_recipe_also_trains_the_deployed_surrogate(problem):
    for cheaper in (SharedTraining(NETWORK), RefittedHead(NETWORK)):
        geoq = GeoQ(None, cheaper, folds=RandomFolds(3), increment_model=QUICK)
        assert_close(
            geoq.fit(problem.x, problem.y).surrogate_(problem.x),
            NETWORK(problem.x, problem.y)(problem.x),
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SharedTraining(NETWORK, smallest=0.0), "smallest=0.0"),
        (lambda: RefittedHead(NETWORK, smallest=1.5), "smallest=1.5"),
        (lambda: SkippedFolds(NETWORK, NETWORK, every=1), "every=1"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
