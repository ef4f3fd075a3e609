"""Verified queries: new points of the bound, the tracked factors, and what is refused."""

import math
import warnings

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor

from geoq import GeoQ, RandomFolds
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.core.conformal import ConformalFactors
from geoq.core.update import extended, tracked

# The ranges and numbers of the data, of verified queries and of later ones.
RANGES = (-1, 1, 100), (0.3, 1.4, 20), (0.3, 1.4, 300)


def truth(x):
    return np.tanh(8 * (x[:, 0] + 0.5 * x[:, 1] - 0.4)) + x[:, 0] * x[:, 1]


def cubic(x, y):
    """A least-squares polynomial, which is wrong outside its data."""

    def terms(x):
        a, b = x.T
        return np.stack([np.ones_like(a), a, b, a * a, a * b, b * b, a**3, a * a * b], 1)

    solution = np.linalg.lstsq(terms(x), y, rcond=None)[0]
    return lambda x: terms(x) @ solution


def drawn(n, low, high, seed):
    return np.random.default_rng(seed).uniform(low, high, size=(n, 2))


def calibrated(n=80):
    x = drawn(n, -1, 1, 0)
    return GeoQ(cubic(x, truth(x)), cubic, folds=RandomFolds(5)).fit(x, truth(x))


def pinball(estimator, x):
    answer = estimator.assess(x)
    excess = abs(answer.prediction - truth(x)) - answer.error_hat
    return np.where(excess > 0, 19 * excess, -excess).mean(), answer


def test_verified_queries_sharpen_the_bounds_of_a_new_region_and_stay_above_the_errors():
    """Twelve queries outside the data; the next 300 lie in the same region."""
    estimator, plan = calibrated(), drawn(300, 0.6, 1.4, 2)
    before, answer = pinball(estimator, plan)
    verified = drawn(12, 0.6, 1.4, 1)
    estimator.update(verified, truth(verified))
    after, updated = pinball(estimator, plan)
    assert after < 0.5 * before
    assert updated.safe.mean() > answer.safe.mean() + 0.2
    covered = abs(updated.prediction - truth(plan)) <= updated.error_hat
    assert covered[updated.safe].mean() >= 0.9
    assert np.array_equal(updated.prediction, answer.prediction)  # nothing was trained
    assert "12 of the points are verified queries" in estimator.describe()


def test_the_lift_is_needed():
    """Without it the laws take points that the surrogate has not seen for points that it has."""

    def five(x):
        wave = np.sin(np.pi * (x[:, 0] + 1) * (x[:, 1] + 1) / 4)
        return 10 * wave + 5 * x[:, 2] ** 2 + 5 * x[:, 3] + 2.5 * x[:, 4]

    def train(x, y):
        return ExtraTreesRegressor(20, random_state=0).fit(x, y).predict

    rng = np.random.default_rng(0)
    x, new, plan = (rng.uniform(low, high, (n, 5)) for low, high, n in RANGES)
    estimator = GeoQ(train(x, five(x)), train).fit(x, five(x))
    error = abs(estimator.surrogate_(new) - five(new))
    bare = extended(estimator.fitted_, new, five(new), error).assess(plan)
    lifted = estimator.update(new, five(new)).assess(plan)
    wrong = abs(lifted.prediction - five(plan))
    assert (wrong <= bare.error_hat).mean() < 0.85
    assert (wrong <= lifted.error_hat).mean() > 0.9


def test_repeated_rows_change_nothing():
    estimator, x = calibrated(), drawn(4, 0.6, 1.4, 1)
    once = estimator.update(x, truth(x)).fitted_
    assert estimator.update(x[:3], truth(x[:3])).fitted_ is once
    both = calibrated().update(np.tile(x, (2, 1)), np.tile(truth(x), 2)).fitted_
    assert np.array_equal(both.error, once.error)
    assert both.conformal == once.conformal


def test_the_steps_of_the_factors_by_hand():
    """A safe query at twice its bound and one at half of it; an unsafe one within its bound; a field of which half is missed."""
    ratio, safe = np.array([[2.0], [0.5], [0.9]]), np.array([True, True, False])
    found = tracked(ConformalFactors(), ratio, safe, 0.9)
    assert found.safe == pytest.approx(math.exp(0.2 * 0.9 - 0.2 * 2**-0.6 * 0.1))
    assert found.unsafe == pytest.approx(math.exp(-0.2 * 0.1))
    assert (found.n_safe, found.n_unsafe) == (2, 1)
    field = tracked(ConformalFactors(), np.array([[2.0, 0.5, np.nan]]), np.array([True]), 0.9)
    assert field.safe == pytest.approx(math.exp(0.2 * (0.5 - 0.1)))


def test_the_share_of_misses_tends_to_its_level():
    """10,000 errors, of which 0.32 would be beyond the first bounds."""
    factors, missed = ConformalFactors(), []
    for ratio in np.random.default_rng(0).exponential(0.87, size=10_000):
        missed.append(ratio > factors.safe)
        one = np.array([[ratio / factors.safe]])
        factors = tracked(factors, one, np.array([True]), 0.9)
    assert np.mean(missed[:50]) > 0.2
    assert abs(np.mean(missed) - 0.1) < 0.02
    assert factors.safe == pytest.approx(0.87 * math.log(10), rel=0.05)


def test_a_file_keeps_verified_queries(tmp_path):
    estimator, x, later = calibrated(), drawn(5, 0.6, 1.4, 1), drawn(3, 0.6, 1.4, 3)
    estimator.update(x, truth(x)).save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=estimator.surrogate_)
    for each in (estimator, loaded):
        each.update(later, truth(later))
    assert loaded.fitted_.n_verified == 8
    assert np.array_equal(loaded.bound(later), estimator.bound(later))


def test_what_an_update_refuses(tmp_path):
    estimator, x = calibrated(), drawn(3, -1, 1, 0)
    with pytest.raises(ValueError, match=r"3 of 3 pairs equal pairs of fit"):
        estimator.update(drawn(80, -1, 1, 0)[:3], truth(drawn(80, -1, 1, 0)[:3]))
    with pytest.raises(ValueError, match="x has 3 rows and y has 2"):
        estimator.update(x + 0.01, truth(x)[:2])
    estimator.save(tmp_path / "a.geoq", calibration=False)
    bare = GeoQ.load(tmp_path / "a.geoq", surrogate=estimator.surrogate_)
    with pytest.raises(ValueError, match="update needs the data of fit"):
        bare.update(x + 0.01, truth(x))


def test_a_new_fit_is_recommended_once():
    estimator, x = calibrated(), drawn(20, 0.6, 1.4, 1)
    estimator.update(x[:5], truth(x[:5]))
    with pytest.warns(UserWarning, match="17 verified queries are more than 20% of the 80 points"):
        estimator.update(x[5:17], truth(x[5:17]))
    with warnings.catch_warnings(action="error"):
        estimator.update(x[17:], truth(x[17:]))
    assert "a new fit is due" in estimator.describe()


def test_fields_and_masked_outputs_are_updated():
    """A field has one factor, and a cell without a value does not count."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6, 6))
    plain = FieldBound(factor=NoFactor())
    y = np.ma.masked_array(x**2, rng.uniform(size=x.shape) < 0.1)
    estimator = GeoQ(lambda x: x**2 + 0.1 * x, None, folds=RandomFolds(4), bound_model=plain)
    estimator.fit(x[:30], y[:30])
    before = estimator.assess(x[35:])
    estimator.update(x[30:35], y[30:35])
    after = estimator.assess(x[35:])
    assert estimator.fitted_.n_verified == 5
    assert after.error_hat.shape == before.error_hat.shape
    assert (after.support_distance <= before.support_distance + 1e-12).all()


def test_a_single_query_very_near_the_data_is_new():
    estimator, x = calibrated(), drawn(80, -1, 1, 0)[:1] + 1e-5
    assert estimator.update(x, truth(x)).fitted_.n_verified == 1
