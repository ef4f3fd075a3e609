"""Features of the user inform the bound, and neither distances nor the safe region."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, Grid, PredictedFolds, RandomFolds
from geoq.parts import FieldBound, NoFactor
from geoq.quantiles import pinball_loss

RNG = np.random.default_rng(0)
X, NEW = RNG.uniform(-1, 1, size=(2, 600, 2))
HOW = {"folds": RandomFolds(5)}


def model(x):
    return x[:, 0]


def size(x, prediction):
    return np.exp(2 * np.sin(9 * x[:, 0] + 9 * x[:, 1]))


Y, ERROR = model(X) + size(X, 0) * RNG.normal(size=600), abs(size(NEW, 0) * RNG.normal(size=600))


@pytest.fixture(scope="module")
def both():
    return [GeoQ(model, None, features=f, **HOW).fit(X, Y) for f in (size, None)]


def test_the_bound_sees_a_feature_and_the_flag_does_not(both):
    losses = [pinball_loss(ERROR, estimator.bound(NEW), 0.95).mean() for estimator in both]
    assert losses[0] < 0.7 * losses[1]
    assert (both[0].bound(NEW) >= ERROR).mean() == pytest.approx(0.95, abs=0.03)
    one, other = (estimator.assess(2 * NEW) for estimator in both)
    for part in ("safe", "support_score", "anchors", "anchor_distance", "support_distance"):
        assert_array_equal(getattr(one, part), getattr(other, part))
    assert "held-out loss with the features of the user is 0." in both[0].describe()


def asked(estimator, features):
    """The answers of the same calibration with another function."""
    estimator = copy(estimator)
    estimator.fitted_ = replace(estimator.fitted_, features=features)
    return estimator.assess(NEW)


def assert_limited(estimator):
    for end, beyond in ((size(X, 0).max(), 1e9), (size(X, 0).min(), -1.0)):
        known, far = (
            asked(estimator, lambda x, _, at=at: np.full(len(x), at)) for at in (end, beyond)
        )
        assert_allclose(far.bound, known.bound)


def test_a_feature_beyond_its_range_counts_as_the_end_and_nan_is_no_answer(both):
    assert_limited(both[0])
    some = asked(both[0], lambda x, p: np.where(x[:, 0] > 0, 1.0, np.nan))
    assert_array_equal(some.lost, NEW[:, 0] <= 0)
    assert "features did not return finite numbers" in some.reason(int(some.lost.argmax()))


def test_a_feature_receives_the_prediction_of_its_fold():
    y, folds = size(X, 0), [size(X, 0) * RNG.uniform(0.5, 2, size=600) for _ in range(5)]
    how = {"features": lambda x, p: abs(size(x, 0) - p), **HOW}
    tuples = GeoQ(lambda x: size(x, 0) + 0.1, PredictedFolds(folds), **how).fit(X, y).fitted_.tuples
    assert_allclose(tuples.points.user.inverse(tuples.user)[:, 0], tuples.error)


def test_a_useless_feature_changes_nothing(both, tmp_path):
    useless = GeoQ(model, None, features=lambda x, p: np.sin(1e5 * x[:, 0]), **HOW).fit(X, Y)
    assert_array_equal(useless.bound(NEW), both[1].bound(NEW))
    assert "so the bound does not use them" in useless.describe()
    useless.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=model)
    assert_array_equal(loaded.bound(NEW), both[1].bound(NEW))


def test_a_file_recognises_the_function_and_an_update_keeps_it(both, tmp_path):
    both[0].save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=model, features=size)
    assert_array_equal(loaded.bound(NEW), both[0].bound(NEW))
    with pytest.raises(ValueError, match="features differs from the features of the file"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=model, features=lambda x, p: 1.01 * size(x, p))
    with pytest.raises(ValueError, match="pass features= to load"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=model)
    y = model(NEW) + ERROR
    loaded.update(NEW[:40], y[:40]).update(NEW[40:80], y[40:80])
    assert loaded.fitted_.verified_user.shape == (80, 1)
    assert (loaded.bound(NEW[80:]) >= ERROR[80:]).mean() > 0.92


def test_fields_use_a_feature():
    how = HOW | {"domain": Grid(1), "bound_model": FieldBound(factor=NoFactor())}
    y, error = (size(x, 0)[:, None, None] * RNG.normal(size=(600, 1, 12)) for x in (X, NEW))
    fitted = []
    for features in (size, None):
        estimator = GeoQ(lambda x: np.zeros((len(x), 1, 12)), None, features=features, **how)
        fitted.append(estimator.fit(X, y))
    losses = [pinball_loss(abs(error), own.bound(NEW), 0.95).mean() for own in fitted]
    assert losses[0] < 0.7 * losses[1]
    assert_limited(fitted[0])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (3, "features=3, but it is called as features"),
        (lambda x, p: p[:5], "features returned shape"),
        (lambda x, p: p - p.mean(), "features gave other answers .* in another batch"),
        (lambda x, p: p + np.nan, r"features\(x, prediction\)\[0, 0\] is nan"),
    ],
)
def test_unusable_functions_are_refused_before_any_fold_is_trained(features, message):
    def never(x, y):
        raise AssertionError

    with pytest.raises((TypeError, ValueError), match=message):
        GeoQ(model, never, features=features, **HOW).fit(X, Y)


def test_features_that_differ_by_the_rounding_of_the_predictions_are_accepted():
    """The spread of trees that reproduce their rows is 0 up to rounding, which depends on the batch."""

    def spread(x, prediction):
        return 1e-16 * prediction * (len(x) == 600)

    ratios = GeoQ(model, None, features=spread, **HOW).fit(X, Y).fitted_.tuples.points.user_loss
    assert min(ratios) > 0.9
