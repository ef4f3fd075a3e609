from functools import partial

import pytest
import torch
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
from geoq.training import SharedTraining
from geoq.training.fold_surrogates import Fold
from geoq.training.shared import shared_folds

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
NETWORK = TrainNetwork(
    partial(MLP, 2, 1, hidden=(16,)),
    training=Training(n_steps=200, check_every=50, learning_rate=1e-2),
)


class Recorder:
    """A recipe that records the points of its trainings."""

    def __init__(self, train):
        self.train, self.points = train, []

    def __call__(self, x, y):
        self.points.append({tuple(row) for row in x.tolist()})
        return self.train(x, y)


def fit(problem, train, folds):
    surrogate = problem.train(problem.x, problem.y)
    geoq = GeoQ(surrogate, train, folds=folds, increment_model=QUICK, n_support=5)
    return geoq.fit(problem.x, problem.y)


@pytest.mark.parametrize(
    ("folds", "n_trainings"), [(RandomFolds(6), 2), (NestedFolds(10), 3)], ids=repr
)
def test_every_fold_has_a_training_without_its_held_out_points(
    problem, folds, n_trainings
):
    recorder = Recorder(problem.train)
    calibration = fit(problem, SharedTraining(recorder), folds).calibration_
    assert len(recorder.points) == n_trainings
    for fold in calibration.fold.unique():
        held_out = problem.x[calibration.point[calibration.fold == fold]]
        held_out = {tuple(row) for row in held_out.tolist()}
        assert any(held_out.isdisjoint(points) for points in recorder.points)


def test_the_errors_of_a_fold_come_from_a_training_without_its_points(problem):
    """Six random folds share two trainings: one on the last half of the folds, one on the first half."""
    splits = [*RandomFolds(6).split(problem.x.cpu().numpy())]
    calibration = fit(problem, SharedTraining(problem.train), RandomFolds(6))
    calibration = calibration.calibration_
    for fold, (_, held_out) in enumerate(splits):
        others = range(3, 6) if fold < 3 else range(3)
        rows = torch.cat([torch.as_tensor(splits[other][1]) for other in others])
        rows = rows.sort().values.to(problem.x.device)
        surrogate = problem.train(problem.x[rows], problem.y[rows])
        error = (surrogate(problem.x[held_out]) - problem.y[held_out]).abs()
        assert_close(calibration.error[calibration.fold == fold], error)


def test_folds_share_a_training_only_while_enough_rows_are_common():
    def folds(*training_rows):
        return [
            Fold(number, len(training_rows), torch.tensor(rows), torch.tensor([0]))
            for number, rows in enumerate(training_rows)
        ]

    some = folds([1, 2, 3, 4], [1, 2, 3, 5], [5, 6, 7, 8], [1, 2, 6, 7])
    assert shared_folds(some, 0.5) == [[0, 1, 3], [2]]
    assert shared_folds(some, 0.75) == [[0, 1], [2], [3]]
    assert shared_folds(some, 1.0) == [[0], [1], [2], [3]]


def test_the_deployed_surrogate_is_trained_with_the_recipe(problem):
    recipe = SharedTraining(NETWORK)
    geoq = GeoQ(None, recipe, folds=RandomFolds(3), increment_model=QUICK)
    assert_close(
        geoq.fit(problem.x, problem.y).surrogate_(problem.x),
        NETWORK(problem.x, problem.y)(problem.x),
    )


def test_an_exception_in_a_shared_training_names_the_folds(problem):
    def fails(x, y):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fit(problem, SharedTraining(fails), RandomFolds(4))
    assert "the surrogates of fold 1 of 4 to fold 4 of 4" in caught.value.__notes__[0]


@pytest.mark.parametrize("smallest", [0.0, 1.5])
def test_a_smallest_fraction_outside_its_range_is_refused(smallest):
    with pytest.raises(ValueError, match=f"smallest={smallest}"):
        SharedTraining(NETWORK, smallest=smallest)
