import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import mean_pinball_loss

from geoq import metrics

METRICS = {
    "pinball": lambda e, e_hat, where=None: metrics.pinball(e, e_hat, 0.9, where=where),
    "coverage": metrics.coverage,
    "correlation": metrics.correlation,
}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=[*METRICS])


def sample(*shape):
    rng = np.random.default_rng(0)
    return rng.exponential(size=shape), rng.exponential(size=shape)


@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.95])
def test_pinball_agrees_with_scikit_learn(quantile):
    error, error_hat = sample(200)
    value = metrics.pinball(error, error_hat, quantile)
    assert value == pytest.approx(mean_pinball_loss(error, error_hat, alpha=quantile))
    with pytest.raises(ValueError, match="quantile=95"):
        metrics.pinball(error, error_hat, 95.0)


def test_metrics_by_hand_and_the_correlation_of_pearson():
    """An error of 3 with the bound 1 costs 0.9 * 2; an error of 0 with the bound 1 costs 0.1 * 1."""
    value = metrics.pinball(np.array([3.0, 0.0]), np.array([1.0, 1.0]), 0.9)
    assert value == pytest.approx((1.8 + 0.1) / 2)
    error, error_hat = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 5.0])
    assert metrics.coverage(error, error_hat) == 0.75
    error, error_hat = sample(50, 3)
    expected = pearsonr(error.ravel(), error_hat.ravel()).statistic
    assert metrics.correlation(error, error_hat) == pytest.approx(expected)
    diverged = np.where(error > 1, np.inf, error)
    for one, other in ((error, 0 * error), (error[:1, 0], error[:1, 0]), (error, diverged)):
        assert math.isnan(metrics.correlation(one, other))


@every_metric
def test_a_mask_selects_rows_rows_and_leads_or_values(metric):
    error, error_hat = sample(30, 4, 2)
    for mask in (np.arange(30) % 3 == 0, error[..., 0] > 0.5, error_hat > 0.5):
        assert metric(error, error_hat, where=mask) == metric(error[mask], error_hat[mask])
    assert math.isnan(metric(error, error_hat, where=np.zeros(30, dtype=bool)))


@every_metric
def test_nan_and_masked_values_do_not_count(metric):
    error, error_hat = sample(20, 3)
    gaps = error > 1
    expected = metric(error[~gaps], error_hat[~gaps])
    assert metric(np.where(gaps, np.nan, error), error_hat) == expected
    assert metric(error, np.ma.array(error_hat, mask=gaps)) == expected


@every_metric
def test_tensors_and_arrays_give_the_same_float(metric):
    error, error_hat = sample(20, 3)
    rows = np.arange(20) < 7
    value = metric(*map(torch.as_tensor, (error, error_hat)), where=torch.as_tensor(rows))
    assert isinstance(value, float)
    assert value == metric(error, error_hat, where=rows)


@every_metric
def test_unequal_shapes_and_other_masks_raise(metric):
    with pytest.raises(ValueError, match=r"has shape \(4, 1\) and error_hat has \(4,\)"):
        metric(np.ones((4, 1)), np.ones(4))
    error, error_hat = sample(4, 2)
    for mask in (np.ones(2, dtype=bool), np.ones(4)):
        with pytest.raises(ValueError, match="pass a boolean mask"):
            metric(error, error_hat, where=mask)
