import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from geoq import GeoQ, NormScaledIncrement, RandomFolds, TemporalFolds, Training
from geoq.geometry import Embedding, Geometry, anchor_error

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))


class Recorder:
    """A recipe that records what it was trained on."""

    def __init__(self, train):
        self.train, self.seen = train, []

    def __call__(self, x, y):
        self.seen.append(x)
        return self.train(x, y)


def rows_of(subset, x):
    return {int((x == row).all(dim=1).nonzero()) for row in subset}


def fit(problem, train, **settings):
    surrogate = problem.train(problem.x, problem.y)
    settings = {"folds": RandomFolds(4), "increment_model": QUICK, **settings}
    return GeoQ(surrogate, train, **settings).fit(problem.x, problem.y)


def test_each_fold_is_trained_once_on_what_it_does_not_hold_out(problem):
    recorder = Recorder(problem.train)
    calibration = fit(problem, recorder).calibration_
    assert len(recorder.seen) == 4
    for fold, seen in enumerate(recorder.seen):
        held_out = set(calibration.point[calibration.fold == fold].tolist())
        assert rows_of(seen, problem.x) == set(range(120)) - held_out


def test_no_fold_is_trained_on_its_gap(problem):
    recorder = Recorder(problem.train)
    fit(problem, recorder, folds=TemporalFolds(3, gap=5))
    assert rows_of(recorder.seen[1], problem.x) == {*range(35), *range(85, 120)}


def test_tuples_are_those_of_a_loop_over_folds(problem):
    geoq = fit(problem, problem.train, n_anchors=3, n_support=4)
    calibration = geoq.calibration_
    nu = geoq.metric_(geoq.coordinates_(problem.x))
    for fold in range(4):
        mine = calibration.fold == fold
        held_out = calibration.point[mine]
        kept = torch.tensor([i for i in range(120) if i not in set(held_out.tolist())])
        kept = kept.to(held_out.device)
        model = problem.train(problem.x[kept], problem.y[kept])
        error = (problem.y - model(problem.x)).abs()
        relation = Geometry(
            Embedding(nu[kept], nu[kept]), n_anchors=3, n_support=4
        ).relate(Embedding(nu[held_out], nu[held_out]))
        assert_close(calibration.error[mine], error[held_out])
        assert_close(
            calibration.features.anchor_error[mine],
            anchor_error(relation.anchors, error[kept]),
        )
        assert_close(calibration.features.displacement[mine], relation.displacement)
        assert_close(
            calibration.features.support_distance[mine], relation.support_distance
        )
        assert_close(calibration.features.prediction[mine], model(problem.x[held_out]))


def test_without_retraining_all_errors_are_the_surrogates_own(problem):
    geoq = fit(problem, None)
    surrogate = problem.train(problem.x, problem.y)
    error = (problem.y - surrogate(problem.x)).abs()
    assert_close(geoq.calibration_.error, error[geoq.calibration_.point])


def test_an_exception_in_training_keeps_its_type_and_gains_the_fold(problem):
    calls = []

    def fails_at_the_third(x, y):
        calls.append(len(x))
        if len(calls) == 3:
            raise ZeroDivisionError("inside the user's code")
        return problem.train(x, y)

    with pytest.raises(ZeroDivisionError, match="inside the user's code") as caught:
        fit(problem, fails_at_the_third)
    assert caught.value.__notes__ == ["while training the surrogate of fold 3 of 4"]


def test_a_fold_surrogate_that_returns_nan_is_refused_with_its_fold(problem):
    with pytest.raises(ValueError, match=r"surrogate\(x\)\[0, 0\] is nan") as caught:
        fit(problem, lambda _x, _y: lambda x: x[:, :1] * torch.nan)
    assert "while evaluating the surrogate of fold 1 of 4" in caught.value.__notes__


def test_a_fold_surrogate_in_training_mode_is_refused(problem):
    with pytest.raises(
        ValueError, match="the trained surrogate is in training mode"
    ) as caught:
        fit(problem, lambda _x, _y: nn.Identity())
    assert caught.value.__notes__ == ["while training the surrogate of fold 1 of 4"]


def test_a_failed_training_is_reported(problem):
    calls = []

    def second_dies(x, y):
        calls.append(len(x))
        return (
            (lambda x: 0 * x[:, :1] - 100) if len(calls) == 2 else problem.train(x, y)
        )

    with pytest.warns(
        UserWarning,
        match=r"mean errors of fold 2 \(\d+ held out, \d+ in sample\) of 4 are more than 5",
    ):
        fit(problem, second_dies)


def test_honest_folds_are_not_reported(problem, recwarn):
    fit(problem, problem.train)
    assert not recwarn.list


def test_progress_is_logged_and_no_bar_is_drawn_without_a_terminal(
    problem, caplog, capsys
):
    with caplog.at_level(logging.INFO, logger="geoq"):
        fit(problem, problem.train)
    assert sum("held out, " in message for message in caplog.messages) == 4
    assert capsys.readouterr() == ("", "")


def test_numpy_recipes_receive_numpy(problem):
    kinds = []

    def train(x, y):
        kinds.append((type(x), type(y)))
        return problem.train(x, y)

    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy()
    GeoQ(None, train, folds=RandomFolds(2), increment_model=QUICK).fit(x, y)
    assert kinds == [(np.ndarray, np.ndarray)] * 3
