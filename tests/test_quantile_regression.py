"""Quantile regression, against scikit-learn's linear programme and by hand."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import QuantileRegressor
from torch.testing import assert_close

from geoq.increments.quantile_regression import _Problem, fit_line
from geoq.quantiles import pinball_loss


def data(n=400, seed=0):
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(n, 3))
    target = phi @ [1.0, -0.5, 0.0] + rng.normal(size=n) * 0.5
    return torch.from_numpy(phi), torch.from_numpy(target)


def loss(phi, target, slopes, intercept, quantile):
    return pinball_loss(target, phi @ slopes + intercept, quantile).mean().item()


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_the_loss_is_nearly_that_of_the_linear_programme(quantile):
    phi, target = data()
    line = fit_line(phi, target, torch.ones(400).double(), (quantile,), ridge=0.0)
    exact = QuantileRegressor(quantile=quantile, alpha=0.0).fit(phi, target)
    ours = loss(phi, target, line.slopes, line.intercepts[0], quantile)
    best = loss(phi, target, torch.from_numpy(exact.coef_), exact.intercept_, quantile)
    assert best <= ours <= 1.01 * best


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_minimum_does_not_depend_on_the_start(ridge):
    """The problem is convex: all starts lead to the same loss, and no nearby line has a smaller one."""
    phi, target = data()
    levels = torch.tensor([0.5, 0.95]).double()
    weight, penalty = torch.full((400,), 1 / 400).double(), torch.zeros(5).double()
    penalty[:3] = ridge
    problem = _Problem(phi, target, weight, levels, penalty, 0.03)
    generator = torch.Generator().manual_seed(0)

    def loss_at(theta):
        return problem.loss(theta, problem.residuals(theta))

    starts = 10 * torch.randn(5, 5, generator=generator, dtype=torch.float64)
    found = [problem.solve(start) for start in starts]
    losses = [loss_at(theta) for theta in found]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    for step in 0.1 * torch.eye(5).double():
        assert min(loss_at(found[0] + step), loss_at(found[0] - step)) > losses[0]


def test_without_columns_that_matter_the_intercept_is_the_quantile():
    target = torch.arange(1.0, 101.0, dtype=torch.float64)
    phi = torch.zeros(100, 1, dtype=torch.float64)
    line = fit_line(phi, target, torch.ones(100).double(), (0.25, 0.9), ridge=1.0)
    assert_close(line.slopes, torch.zeros(1, dtype=torch.float64))
    assert abs(line.intercepts[0] - 25.5) < 2
    assert abs(line.intercepts[1] - 90.5) < 2


def test_levels_with_common_slopes_do_not_cross():
    phi, target = data()
    line = fit_line(phi, target, torch.ones(400).double(), (0.5, 0.9, 0.99), ridge=0.01)
    assert (line.intercepts.diff() > 0).all()


def test_a_strong_ridge_leaves_no_slope():
    phi, target = data()
    line = fit_line(phi, target, torch.ones(400).double(), (0.5,), ridge=1e6)
    assert line.slopes.abs().max() < 1e-3


def test_rows_without_weight_do_not_count():
    phi, target = data()
    weight = (torch.arange(400) < 200).double()
    some = fit_line(phi[:200], target[:200], weight[:200], (0.9,), ridge=0.0)
    spoiled = torch.where(weight > 0, target, target + 0.01)
    line = fit_line(phi, spoiled, weight, (0.9,), ridge=0.0)
    assert_close(line.slopes, some.slopes, rtol=0.0, atol=0.05)
