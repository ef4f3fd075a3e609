import math

import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr
from sklearn.metrics import mean_pinball_loss

from geoq import metrics
from geoq.metrics import CoverageBin

TWO_ARGUMENTS = [
    lambda e, e_hat, where=None: metrics.pinball(e, e_hat, 0.9, where=where),
    metrics.coverage,
    metrics.correlation,
    metrics.relative_l2,
]
NAMES = ["pinball", "coverage", "correlation", "relative_l2"]
every_metric = pytest.mark.parametrize("metric", TWO_ARGUMENTS, ids=NAMES)


def sample(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.exponential(size=shape), generator.exponential(size=shape)


@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.95])
def test_pinball_agrees_with_other_libraries(quantile):
    error, error_hat = sample(200)
    value = metrics.pinball(error, error_hat, quantile)
    assert value == pytest.approx(mean_pinball_loss(error, error_hat, alpha=quantile))
    elementwise = scoringrules.quantile_score(error, error_hat, quantile)
    assert value == pytest.approx(elementwise.mean())


def test_pinball_by_hand():
    """An error of 3 with the bound 1 costs 0.9 * 2; an error of 0 with the bound 1 costs 0.1 * 1."""
    value = metrics.pinball(np.array([3.0, 0.0]), np.array([1.0, 1.0]), 0.9)
    assert value == pytest.approx((1.8 + 0.1) / 2)


def test_coverage_counts_equality_as_covered():
    error, error_hat = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 5.0])
    assert metrics.coverage(error, error_hat) == 0.75


def test_correlation_is_pearsons():
    error, error_hat = sample(50, 3)
    expected = pearsonr(error.ravel(), error_hat.ravel()).statistic
    assert metrics.correlation(error, error_hat) == pytest.approx(expected)


def test_correlation_with_a_constant_or_of_one_value_is_nan():
    error, _ = sample(10)
    assert math.isnan(metrics.correlation(error, np.full(10, 0.1)))
    assert math.isnan(metrics.correlation(np.zeros(10), error))
    assert math.isnan(metrics.correlation(error[:1], error[:1]))


def test_relative_l2_pools_all_values():
    y = np.array([[3.0, 0.0], [0.0, 4.0]])
    assert metrics.relative_l2(y, y + 0.5) == pytest.approx(1 / 5)


@every_metric
def test_a_mask_selects_a_subset(metric):
    error, error_hat = sample(30, 4, 2)
    rows = np.arange(30) % 3 == 0
    assert metric(error, error_hat, where=rows) == metric(error[rows], error_hat[rows])
    leads = error[..., 0] > 0.5
    assert metric(error, error_hat, where=leads) == metric(
        error[leads], error_hat[leads]
    )
    values = error_hat > 0.5
    selected = metric(error[values], error_hat[values])
    assert metric(error, error_hat, where=values) == selected


@every_metric
def test_a_metric_of_no_values_is_nan(metric):
    error, error_hat = sample(5, 2)
    assert math.isnan(metric(error, error_hat, where=np.zeros(5, dtype=bool)))


@every_metric
def test_tensors_and_arrays_give_the_same_float(metric, device):
    error, error_hat = sample(20, 3)
    rows = np.arange(20) < 7
    moved = [torch.as_tensor(part, device=device) for part in (error, error_hat, rows)]
    value = metric(*moved[:2], where=moved[2])
    assert isinstance(value, float)
    assert value == pytest.approx(metric(error, error_hat, where=rows))


@every_metric
def test_unequal_shapes_are_refused(metric):
    with pytest.raises(ValueError, match=r"has shape \(4, 1\) and .* has \(4,\)"):
        metric(np.ones((4, 1)), np.ones(4))


@every_metric
def test_a_mask_of_another_shape_or_dtype_is_refused(metric):
    error, error_hat = sample(4, 2)
    with pytest.raises(ValueError, match=r"where has shape \(2,\)"):
        metric(error, error_hat, where=np.ones(2, dtype=bool))
    with pytest.raises(TypeError, match="boolean mask"):
        metric(error, error_hat, where=np.ones(4))


def test_a_quantile_level_of_95_is_refused():
    with pytest.raises(ValueError, match="quantile=95"):
        metrics.pinball(*sample(3), 95.0)


def test_coverage_by_bin_by_hand():
    score = np.array([4.0, 1.0, 3.0, 2.0])
    error = np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    bins = metrics.coverage_by_bin(error, np.full((4, 2), 0.5), score, 2)
    assert bins == [CoverageBin(1, 2, 2, 1.0), CoverageBin(2, 4, 2, 0.25)]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_bins_contain_each_row_once_and_average_to_the_coverage(scores, n_bins):
    score = np.array(scores, dtype=float)
    error, error_hat = sample(len(score), 2)
    bins = metrics.coverage_by_bin(error, error_hat, score, n_bins)
    assert sum(b.count for b in bins) == len(score)
    assert all(b.count > 0 for b in bins)
    assert len(bins) <= n_bins
    assert (bins[0].lower, bins[-1].upper) == (score.min(), score.max())
    pooled = sum(b.count * b.coverage for b in bins) / len(score)
    assert pooled == pytest.approx(metrics.coverage(error, error_hat))


def test_bins_of_distinct_scores_have_equal_counts():
    error, error_hat = sample(40)
    bins = metrics.coverage_by_bin(error, error_hat, error, 4)
    assert [b.count for b in bins] == [10] * 4


def test_coverage_by_lead_is_the_coverage_at_each_lead():
    error, error_hat = sample(10, 5, 3)
    by_lead = metrics.coverage_by_lead(error, error_hat)
    expected = [metrics.coverage(error[:, n], error_hat[:, n]) for n in range(5)]
    np.testing.assert_allclose(by_lead, expected)
    assert metrics.coverage_by_lead(error, error_hat, axis=-1).shape == (3,)


def test_a_missing_axis_is_refused():
    with pytest.raises(ValueError, match="axis=1, but error has 1 dimensions"):
        metrics.coverage_by_lead(*sample(4))


def test_zero_bins_are_refused():
    with pytest.raises(ValueError, match="n_bins=0: n_bins must be an integer >= 1"):
        metrics.coverage_by_bin(*sample(4), np.arange(4.0), 0)
