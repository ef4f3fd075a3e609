"""Conformal factors and guarantees."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoq import GeoQ, RandomFolds, WholeField
from geoq.core.conformal import ConformalFactors, level_factors
from geoq.quantiles import conformal_factor, error_ratios, inverse_cdf_quantile, n_required

POINTWISE, EVERY = None, np.ones(40, dtype=bool)
both = pytest.mark.parametrize("guarantee", [POINTWISE, WholeField(0.8)])


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape)


def factors_of(ratio, safe, guarantee=POINTWISE):
    return ConformalFactors.fit(ratio, safe, 0.95, guarantee)


@pytest.mark.parametrize(("quantile", "fewest"), [(0.5, 1), (0.9, 9), (0.95, 19)])
def test_a_level_needs_a_minimum_number_of_errors(quantile, fewest):
    assert n_required(quantile) == fewest
    assert math.isinf(conformal_factor(uniform(fewest - 1, 1), quantile))
    ratio = uniform(fewest, 1)
    assert conformal_factor(ratio, quantile) == ratio.max()


def test_factors_of_one_number_and_of_whole_fields_by_hand():
    ratio = np.arange(1.0, 40.0)[:, None]  # 39 rows: the 38th smallest is the factor
    assert conformal_factor(ratio, 0.95) == 38.0
    assert WholeField(0.9).factor(ratio, 0.5) == conformal_factor(ratio, 0.9) == 36.0
    # Three of four values of each field are within 3, 1 and 7 times the bound.
    ratio = np.array([[1.0, 2, 3, 4], [10, 1, 1, 1], [5, 6, 8, 7]])
    assert WholeField(0.5).factor(ratio, 0.75) == 3.0
    assert WholeField(0.75).factor(ratio, 0.75) == 7.0


@pytest.mark.parametrize("n_values", [1, 5])
def test_a_new_row_has_the_guaranteed_fraction_of_its_values_covered(n_values):
    """Risk control: over 2,000 draws of 19 rows of dependent values and a new one, the mean coverage is 0.9 to 0.95."""
    rows = uniform(2000, 20, 1) + uniform(2000, 20, n_values, seed=1)
    factors = np.array([conformal_factor(draw[:-1], 0.9) for draw in rows])
    coverage = (rows[:, -1] <= factors[:, None]).mean(axis=1)
    error = coverage.std() / math.sqrt(len(rows))
    assert 0.9 - 3 * error <= coverage.mean() <= 0.9 + 1 / 20 + 3 * error


@pytest.mark.parametrize("factor", [conformal_factor, WholeField(0.8).factor])
@pytest.mark.parametrize("n_values", [1, 7])
def test_absent_values_change_no_factor(factor, n_values):
    ratio, absent = uniform(40, n_values), np.full((40, 3), np.nan)
    with_absent = np.concatenate([absent[:, :1], ratio, absent], axis=1)
    for quantile in (0.5, 0.9, 0.95):
        assert factor(ratio, quantile) == factor(with_absent, quantile)


def test_rows_with_few_values_count_as_much_as_others():
    """The first of six values is the largest, and most rows have only this one."""
    ratio = uniform(2000, 40, 6)
    ratio[..., 0] += 1
    ratio[..., 1:][uniform(2000, 40, seed=1) < 0.75] = np.nan
    factor = np.array([conformal_factor(part[:-1], 0.9) for part in ratio])
    new = ratio[:, -1]
    covered = (new <= factor[:, None]).sum(axis=1) / (~np.isnan(new)).sum(axis=1)
    assert 0.885 <= covered.mean() <= 0.945  # the standard deviation of the mean is 0.006


def test_safe_queries_are_covered_at_the_level_over_2000_sets_of_pairs():
    """The bound of a fitted estimator is far too small; each set has 59 pairs, safe or not, and one query."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(60, 2))
    estimator = GeoQ(lambda x: x.sum(axis=1), None, folds=RandomFolds(3))
    estimator.fit(x, x.sum(axis=1) + 0.1 * rng.normal(size=60))
    new = rng.uniform(-1.1, 1.1, size=(2000 * 60, 2))
    answer = estimator.assess(new)
    noise = abs(rng.normal(size=len(new))) * (1 + abs(new[:, 0]))
    ratio = (noise / answer.error_hat).reshape(2000, 60)
    safe = answer.safe.reshape(2000, 60)
    covered = [
        r[-1] <= factors_of(r[:-1, None], s[:-1]).safe
        for r, s in zip(ratio, safe, strict=True)
        if s[-1]
    ]
    assert 300 < len(covered) < 1950
    assert (ratio[:, -1][safe[:, -1]] <= 1).mean() < 0.5
    slack = 3 * math.sqrt(0.95 * 0.05 / len(covered))
    assert 0.95 - slack <= np.mean(covered) <= 0.95 + 2 / safe.sum(axis=1).mean() + slack


def test_factors_by_hand():
    error, bound = np.array([0.0, 1.0, 2.0, np.nan]), np.array([0.0, 0.0, 4.0, 1.0])
    np.testing.assert_array_equal(error_ratios(error, bound)[:, 0], [0.0, math.inf, 0.5, np.nan])
    ratio, safe = np.repeat([2.0, 5.0], 30)[:, None], np.arange(60) < 30
    factors = factors_of(ratio, safe)
    assert (factors.safe, factors.unsafe, factors.n_pairs) == (2.0, 5.0, 60)
    bound = factors(np.ones((60, 3)), safe)
    assert bound[[0, -1]].tolist() == [[2.0] * 3, [5.0] * 3]


@pytest.mark.parametrize(("ratio", "unsafe"), [(2.0, 2.0), (0.5, 1.0)])
def test_too_few_unsafe_pairs_give_the_factor_of_the_safe_ones_but_at_least_1(ratio, unsafe):
    assert factors_of(np.full((40, 1), ratio), np.arange(40) < 38).unsafe == unsafe


@pytest.mark.parametrize(
    ("ratio", "safe", "guarantee", "message"),
    [
        (np.ones((40, 1)), np.arange(40) < 10, POINTWISE, "19 safe pairs are needed, and there are 10 among the 40 given;"),
        (np.full((40, 1), math.inf), EVERY, POINTWISE, "positive where the bound is zero"),
        (uniform(8, 5), EVERY[:8], WholeField(0.9), "9 safe pairs are needed, and there are 8; give more"),
    ],
)  # fmt: skip
def test_an_infinite_factor_raises(ratio, safe, guarantee, message):
    with pytest.raises(ValueError, match=message):
        factors_of(ratio, safe, guarantee)


def test_the_factor_of_the_own_level_is_1_and_bounds_of_zero_are_not_scaled():
    ratio = uniform(100, 1)
    assert level_factors(ratio, ratio[:, 0] < 0.5, [0.9], 0.9) == [ConformalFactors()]
    assert level_factors(np.full((40, 1), math.inf), EVERY, [0.5], 0.95) == [ConformalFactors()]


@both
def test_a_guarantee_is_finite_from_its_required_number_of_rows_on(guarantee):
    needed = n_required(0.95 if guarantee is None else guarantee.confidence)
    assert math.isfinite(factors_of(uniform(needed, 5), EVERY[:needed], guarantee).safe)
    with pytest.raises(ValueError, match=f"{needed} safe pairs are needed"):
        factors_of(uniform(needed - 1, 5), EVERY[: needed - 1], guarantee)


def test_a_whole_field_guarantee_holds_where_a_pointwise_one_does_not():
    """One field in five has errors four times as large, so pointwise coverage of 95 % leaves it below 95 %."""
    kept = np.zeros((2000, 2))
    size = 1 + 3 * (uniform(2000, 40, 1) > 0.8)
    for n, ratio in enumerate(size * uniform(2000, 40, 20, seed=1)):
        for number, factor in enumerate((WholeField(0.9).factor, conformal_factor)):
            within = ratio[-1] <= factor(ratio[:-1], 0.95)
            kept[n, number] = within.mean() >= 0.95
    of_fields, pointwise = kept.mean(axis=0)
    slack = 3 * math.sqrt(0.9 * 0.1 / 2000)
    assert 0.9 - slack <= of_fields <= 0.9 + 1 / 40 + slack
    assert pointwise < 0.85


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.sampled_from([0.1, 0.5, 0.95]))
def test_the_quantile_is_the_smallest_value_with_this_fraction_below(values, quantile):
    """The same with gaps: a value of nan does not count."""
    values = np.array(values, dtype=float)
    reached = [v for v in np.sort(values) if (values <= v).mean() >= quantile - 1e-12]
    column = np.stack([values, np.roll(values, 3)], axis=1)
    with_gaps = np.insert(values, [0, len(values)], np.nan)
    assert inverse_cdf_quantile(column, quantile).tolist() == [reached[0]] * 2
    assert inverse_cdf_quantile(with_gaps, quantile) == reached[0]
