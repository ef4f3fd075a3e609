"""Quantile regression, against scikit-learn's linear programme and by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import QuantileRegressor

from geoq.bounds.law import _Problem, fit_line
from geoq.quantiles import pinball_loss


def data(n=400, seed=0):
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(n, 3))
    target = phi @ [1.0, -0.5, 0.0] + rng.normal(size=n) * 0.5
    return phi, target


def loss(phi, target, slopes, intercept, quantile):
    return pinball_loss(target, phi @ slopes + intercept, quantile).mean()


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_the_loss_is_nearly_that_of_the_linear_programme(quantile):
    phi, target = data()
    slopes, intercepts = fit_line(phi, target, np.ones(400), (quantile,), ridge=0.0)
    exact = QuantileRegressor(quantile=quantile, alpha=0.0).fit(phi, target)
    ours = loss(phi, target, slopes, intercepts[0], quantile)
    best = loss(phi, target, exact.coef_, exact.intercept_, quantile)
    assert best <= ours <= 1.01 * best


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_minimum_does_not_depend_on_the_start(ridge):
    """The problem is convex: all starts lead to the same loss, and no nearby line has a smaller one."""
    phi, target = data()
    penalty = np.array([ridge] * 3 + [0.0] * 2)
    weight, levels = np.full(400, 1 / 400), np.array([0.5, 0.95])
    problem = _Problem(phi, target, weight, levels, penalty, 0.03)

    def loss_at(theta):
        return problem.loss(theta)[0]

    starts = 10 * np.random.default_rng(0).normal(size=(5, 5))
    found = [problem.solve(start) for start in starts]
    losses = [loss_at(theta) for theta in found]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    for step in 0.1 * np.eye(5):
        assert min(loss_at(found[0] + step), loss_at(found[0] - step)) > losses[0]


def test_intercepts_are_quantiles_and_do_not_cross():
    target, phi = np.arange(1.0, 101.0), np.zeros((100, 1))
    slopes, intercepts = fit_line(phi, target, np.ones(100), (0.25, 0.9), ridge=1.0)
    assert_allclose(slopes, 0, atol=1e-9)
    assert abs(intercepts[0] - 25.5) < 2
    assert abs(intercepts[1] - 90.5) < 2
    phi, target = data()
    _, intercepts = fit_line(phi, target, np.ones(400), (0.5, 0.9, 0.99), ridge=0.01)
    assert (np.diff(intercepts) > 0).all()


def test_rows_without_weight_do_not_count():
    phi, target = data()
    weight = (np.arange(400) < 200).astype(float)
    some, _ = fit_line(phi[:200], target[:200], weight[:200], (0.9,), ridge=0.0)
    spoiled = np.where(weight > 0, target, target + 0.01)
    slopes, _ = fit_line(phi, spoiled, weight, (0.9,), ridge=0.0)
    assert_allclose(slopes, some, rtol=0.0, atol=0.05)
