"""Calibration tuples (lines 6 to 10): what each fold is trained on, and its errors, anchors and features."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoq import CombinedFolds, GeoQ, GroupFolds, NestedFolds, RandomFolds, TemporalFolds
from geoq.core.geometry import Geometry, Space, anchor_mean, displacement


class Recorder:
    """A recipe that records what it was trained on."""

    def __init__(self, train):
        self.train, self.seen = train, []

    def __call__(self, x, y):
        assert type(x) is type(y) is np.ndarray
        self.seen.append(x)
        return self.train(x, y)


def rows_of(subset, x):
    return {int(np.flatnonzero((x == row).all(axis=1))[0]) for row in subset}


def fit(problem, train, **settings):
    surrogate = problem.train(problem.x, problem.y)
    settings = {"folds": RandomFolds(4), **settings}
    return GeoQ(surrogate, train, **settings).fit(problem.x, problem.y).fitted_


def test_each_fold_is_trained_once_on_what_it_neither_holds_out_nor_leaves_as_a_gap(problem):
    recorder = Recorder(problem.train)
    tuples = fit(problem, recorder).tuples
    assert len(recorder.seen) == 4
    for fold, seen in enumerate(recorder.seen):
        held_out = set(tuples.point[tuples.fold == fold].tolist())
        assert rows_of(seen, problem.x) == set(range(120)) - held_out
    recorder = Recorder(problem.train)
    fit(problem, recorder, folds=TemporalFolds(3, gap=5))
    assert rows_of(recorder.seen[1], problem.x) == {*range(35), *range(85, 120)}


def test_tuples_are_those_of_a_loop_over_folds(problem):
    fitted = fit(problem, problem.train, n_anchors=3, n_support=4)
    tuples, features = fitted.tuples, fitted.tuples.features
    z = fitted.metric(fitted.coordinates(problem.x))
    for fold in range(4):
        mine = tuples.fold == fold
        held_out = tuples.point[mine]
        kept = np.setdiff1d(np.arange(120), held_out)
        model = problem.train(problem.x[kept], problem.y[kept])
        error = abs(problem.y - model(problem.x))
        inside, outside = (Space(z[rows], z[rows], z[rows]) for rows in (kept, held_out))
        relation = Geometry(inside, n_anchors=3, n_support=4).relate(outside)
        assert_allclose(tuples.error[mine], error[held_out])
        assert_array_equal(tuples.relation.anchors[mine], kept[relation.anchors])
        assert_array_equal(tuples.relation.near[mine], kept[relation.near])
        for found, expected in (
            (features.anchor_error, anchor_mean(relation.anchors, error[kept])),
            (features.displacement, displacement(z[held_out], relation.anchors, z[kept])),
            (features.support_distance, relation.support_distance),
            (features.prediction, model(problem.x[held_out])),
        ):
            assert_allclose(found[mine], expected)


@pytest.mark.parametrize("folds", [RandomFolds(4), CombinedFolds(RandomFolds(3), NestedFolds(3))])
def test_without_retraining_all_errors_are_the_surrogates_own(problem, folds):
    """They are stored once, however many folds hold a point out."""
    fitted = fit(problem, None, folds=folds)
    tuples, error = fitted.tuples, abs(problem.y - problem.train(problem.x, problem.y)(problem.x))
    assert_allclose(tuples.error, error[tuples.point])
    assert_allclose(tuples.features.anchor_error[:, 0], error[tuples.relation.anchors[:, 0], 0])
    assert tuples.errors.shape == tuples.predictions.shape == (120, 1)
    assert tuples.anchor_errors is None
    assert fitted.error is tuples.points.error


def test_each_family_has_the_same_weight_and_the_nearest_one_interpolates(problem):
    folds = CombinedFolds(NestedFolds(6), RandomFolds(4))
    tuples = fit(problem, None, folds=folds).tuples
    assert_allclose([tuples.weight[tuples.family == f].sum() for f in (0, 1)], 0.5)
    assert_array_equal(tuples.interpolating, tuples.family == 1)
    assert tuples.interpolating_folds == [6, 7, 8, 9]
    some = tuples.subsample(50)
    assert len(some) == 50
    assert set(some.point) < set(range(120))
    assert tuples.subsample(10**6) is tuples


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_groups_and_gaps_make_tuples_dependent(problem):
    groups = np.repeat(np.arange(6), 20)
    estimator = GeoQ(None, problem.train, folds=GroupFolds(), n_support=5)
    tuples = estimator.fit(problem.x, problem.y, groups=groups).fitted_.tuples
    assert_array_equal(tuples.position, groups[tuples.point])
    assert (tuples.reach, tuples.n_independent) == (0, 100)
    assert_array_equal(tuples.independent_of(tuples.point < 20), groups[tuples.point] > 0)
    in_time = replace(tuples, position=tuples.point, reach=5)
    point, held_out = tuples.point, (tuples.point >= 40) & (tuples.point < 60)
    assert_array_equal(in_time.independent_of(held_out), (point < 35) | (point > 64))
    assert_array_equal(in_time.group, tuples.point // 6)


def test_an_exception_in_a_fold_keeps_its_type_and_gains_the_fold(problem):
    calls = []

    def fails_at_the_third(x, y):
        calls.append(len(x))
        if len(calls) == 3:
            raise ZeroDivisionError("inside the user's code")
        return problem.train(x, y)

    with pytest.raises(ZeroDivisionError, match="inside the user's code") as caught:
        fit(problem, fails_at_the_third)
    assert caught.value.__notes__ == ["while training the surrogate of fold 3 of 4"]
    with pytest.raises(ValueError, match=r"surrogate\(x\)\[0, 0\] is nan") as caught:
        fit(problem, lambda x, y: lambda x: x[:, :1] * np.nan)
    assert "while evaluating the surrogate of fold 1 of 4" in caught.value.__notes__


def test_a_failed_training_is_reported_and_honest_folds_are_not(problem, recwarn):
    calls = []

    def second_dies(x, y):
        calls.append(len(x))
        return (lambda x: 0 * x[:, :1] - 100) if len(calls) == 2 else problem.train(x, y)

    fit(problem, problem.train)
    assert not [w for w in recwarn.list if "mean errors of" in str(w.message)]
    message = r"mean errors of fold 2 \(\d+ held out, \d+ in sample\) of 4 are more than 5"
    with pytest.warns(UserWarning, match=message):
        fit(problem, second_dies)
