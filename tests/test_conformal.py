"""Conformal factors and guarantees."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq import GeoQ, RandomFolds
from geoq.conformal import (
    ConformalFactors,
    ExpectedCoverage,
    Guarantee,
    WholeField,
    level_factors,
)
from geoq.quantiles import conformal_factor, error_ratios, n_required

EVERY = torch.ones(40, dtype=torch.bool)


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize(("quantile", "fewest"), [(0.5, 1), (0.9, 9), (0.95, 19)])
def test_a_level_needs_a_minimum_number_of_errors(quantile, fewest):
    assert n_required(quantile) == fewest
    assert math.isinf(conformal_factor(uniform(fewest - 1, 1), quantile))
    ratio = uniform(fewest, 1)
    assert conformal_factor(ratio, quantile) == ratio.max()


def test_for_one_number_per_row_it_is_split_conformal():
    ratio = torch.arange(1.0, 40.0)[:, None]  # 39 rows: the 38th smallest is the factor
    assert conformal_factor(ratio, 0.95) == 38.0


@pytest.mark.parametrize("n_coordinates", [1, 5])
def test_a_new_row_has_the_guaranteed_fraction_of_its_values_covered(n_coordinates):
    """Risk control: over 2,000 draws of 19 rows of dependent values and a new one, the mean coverage is 0.9 to 0.95."""
    rows = uniform(2000, 20, 1) + uniform(2000, 20, n_coordinates, seed=1)
    factors = torch.tensor([conformal_factor(draw[:-1], 0.9) for draw in rows])
    coverage = (rows[:, -1] <= factors[:, None]).double().mean(dim=1)
    error = coverage.std() / math.sqrt(len(rows))
    assert 0.9 - 3 * error <= coverage.mean() <= 0.9 + 1 / 20 + 3 * error


@pytest.mark.parametrize("guarantee", [ExpectedCoverage(), WholeField(0.8)])
@pytest.mark.parametrize("n_coordinates", [1, 7])
def test_absent_values_change_no_factor(guarantee, n_coordinates):
    ratio = uniform(40, n_coordinates)
    absent = torch.full((40, 3), torch.nan, dtype=torch.float64)
    with_absent = torch.cat([absent[:, :1], ratio, absent], dim=1)
    for quantile in (0.5, 0.9, 0.95):
        factors = [guarantee.factor(part, quantile) for part in (ratio, with_absent)]
        assert factors[0] == factors[1]


def test_rows_with_few_values_count_as_much_as_others():
    """The expected fraction of the values that are present, in a new row, is covered."""
    ratio = uniform(2000, 40, 6)
    # The first of six values is the largest, and most rows have only this one.
    ratio[..., 0] += 1
    ratio[..., 1:][uniform(2000, 40, seed=1) < 0.75] = torch.nan
    factor = torch.tensor([conformal_factor(part[:-1], 0.9) for part in ratio])
    new = ratio[:, -1]
    covered = (new <= factor[:, None]).sum(dim=1) / (~new.isnan()).sum(dim=1)
    # The standard deviation of the mean is 0.006.
    assert 0.885 <= float(covered.mean()) <= 0.945


def test_safe_queries_are_covered_at_the_level_over_2000_sets_of_pairs():
    """The bound of a fitted estimator is far too small; each set has 59 pairs, safe or not, and one query."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(60, 2))
    geoq = GeoQ(lambda x: x.sum(axis=1), None, folds=RandomFolds(3))
    geoq.fit(x, x.sum(axis=1) + 0.1 * rng.normal(size=60))
    new = rng.uniform(-1.1, 1.1, size=(2000 * 60, 2))
    answer = geoq.assess(new)
    noise = abs(rng.normal(size=len(new))) * (1 + abs(new[:, 0]))
    ratio = torch.from_numpy(noise / answer.error_hat).reshape(2000, 60)
    safe = torch.from_numpy(answer.safe).reshape(2000, 60)
    covered = [
        bool(r[-1] <= ConformalFactors.fit(r[:-1, None], s[:-1], 0.95).safe)
        for r, s in zip(ratio, safe, strict=True)
        if s[-1]
    ]
    before = float((ratio[:, -1][safe[:, -1]] <= 1).double().mean())
    assert 300 < len(covered) < 1950
    assert before < 0.5
    n_safe = float(safe.double().sum(dim=1).mean())
    slack = 3 * math.sqrt(0.95 * 0.05 / len(covered))
    assert 0.95 - slack <= np.mean(covered) <= 0.95 + 2 / n_safe + slack


def test_a_zero_error_has_a_zero_ratio_whatever_the_bound():
    error, bound = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 4.0])
    assert error_ratios(error, bound)[:, 0].tolist() == [0.0, math.inf, 0.5]


def test_safe_queries_and_others_have_their_own_factors():
    ratio = torch.cat([torch.full((30, 1), 2.0), torch.full((30, 1), 5.0)])
    safe = torch.arange(60) < 30
    factors = ConformalFactors.fit(ratio, safe, 0.95)
    assert factors == ConformalFactors(safe=2.0, unsafe=5.0, n_pairs=60)
    bound = factors(torch.ones(60, 3), safe)
    assert bound[0].tolist() == [2.0] * 3
    assert bound[-1].tolist() == [5.0] * 3


def test_too_few_unsafe_pairs_give_the_factor_of_the_safe_ones_but_at_least_1():
    safe = torch.arange(40) < 38
    assert ConformalFactors.fit(torch.full((40, 1), 2.0), safe, 0.95).unsafe == 2.0
    assert ConformalFactors.fit(torch.full((40, 1), 0.5), safe, 0.95).unsafe == 1.0


@pytest.mark.parametrize(
    ("ratio", "safe", "message"),
    [
        (
            torch.ones(40, 1),
            torch.arange(40) < 10,
            "19 safe pairs are needed, and there are 10 among the 40 given;",
        ),
        (torch.full((40, 1), math.inf), EVERY, "positive where the bound is zero"),
    ],
)
def test_an_infinite_factor_is_refused(ratio, safe, message):
    with pytest.raises(ValueError, match=message):
        ConformalFactors.fit(ratio, safe, 0.95)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6))
def test_levels_never_cross(levels):
    levels = sorted(levels)
    factors = level_factors(uniform(40, 2), torch.arange(40) % 3 > 0, levels, 0.95)
    assert all(a.safe <= b.safe for a, b in pairwise(factors))
    assert all(a.unsafe <= b.unsafe for a, b in pairwise(factors))


def test_the_factor_of_the_own_level_is_1():
    ratio = uniform(100, 1)
    (same,) = level_factors(ratio, ratio[:, 0] < 0.5, [0.9], 0.9)
    assert_close((same.safe, same.unsafe), (1.0, 1.0))


def test_bounds_of_zero_are_not_scaled():
    ratio = torch.full((40, 1), math.inf)
    assert level_factors(ratio, EVERY, [0.5], 0.95) == [ConformalFactors()]


def test_a_level_outside_0_and_1_is_refused():
    with pytest.raises(ValueError, match=r"levels=1.5"):
        level_factors(uniform(40, 1), EVERY, [0.5, 1.5], 0.95)


@pytest.mark.parametrize("guarantee", [ExpectedCoverage(), WholeField(0.8)])
def test_a_guarantee_is_finite_from_its_required_number_of_rows_on(guarantee):
    assert isinstance(guarantee, Guarantee)
    needed = guarantee.n_required(0.9)
    assert math.isfinite(guarantee.factor(uniform(needed, 5), 0.9))
    assert math.isinf(guarantee.factor(uniform(needed - 1, 5), 0.9))


def test_a_whole_field_by_hand():
    """Three of four values of each field are within 3, 1 and 7 times the bound."""
    ratio = torch.tensor(
        [[1.0, 2.0, 3.0, 4.0], [10.0, 1.0, 1.0, 1.0], [5.0, 6.0, 8.0, 7.0]]
    )
    assert WholeField(0.5).factor(ratio, 0.75) == 3.0
    assert WholeField(0.75).factor(ratio, 0.75) == 7.0


def test_for_one_number_per_row_a_whole_field_is_split_conformal_at_its_confidence():
    ratio = torch.arange(1.0, 40.0)[:, None]
    assert WholeField(0.9).factor(ratio, 0.5) == conformal_factor(ratio, 0.9) == 36.0


def test_a_whole_field_guarantee_holds_where_a_pointwise_one_does_not():
    """One field in five has errors four times as large, so pointwise coverage of 95 % leaves it below 95 %."""
    guarantees = WholeField(0.9), ExpectedCoverage()
    kept = torch.zeros(2000, 2, dtype=torch.float64)
    size = 1 + 3 * (uniform(2000, 40, 1) > 0.8)
    for n, ratio in enumerate(size * uniform(2000, 40, 20, seed=1)):
        for number, guarantee in enumerate(guarantees):
            within = ratio[-1] <= guarantee.factor(ratio[:-1], 0.95)
            kept[n, number] = within.double().mean() >= 0.95
    of_fields, pointwise = kept.mean(dim=0).tolist()
    slack = 3 * math.sqrt(0.9 * 0.1 / 2000)
    assert 0.9 - slack <= of_fields <= 0.9 + 1 / 40 + slack
    assert pointwise < 0.85


def test_too_few_fields_are_refused_with_the_number_that_is_needed():
    with pytest.raises(
        ValueError, match="9 safe pairs are needed, and there are 8; give more"
    ):
        ConformalFactors.fit(uniform(8, 5), EVERY[:8], 0.95, WholeField(0.9))
    enough = ConformalFactors.fit(uniform(9, 5), EVERY[:9], 0.95, WholeField(0.9))
    assert math.isfinite(enough.safe)
    assert enough.unsafe == 1.0


def test_a_confidence_outside_0_and_1_is_refused():
    with pytest.raises(ValueError, match=r"confidence=1.0"):
        WholeField(1.0)
