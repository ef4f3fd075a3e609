from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq.rollout.horizon import (
    HeldOutRollouts,
    count_apart,
    over_tolerance,
    scores,
)
from geoq.rollout.joint_band import JointBand, excess_of


def held_out(bound, error, **others):
    return HeldOutRollouts(bound, error, excess=excess_of(error, bound), **others)


def drawn(generator, n, n_steps=30, spacing=1000):
    """Held-out rollouts whose errors grow at random rates, with bounds that do not depend on these rates."""
    size = torch.randn(n, 1, 1, generator=generator).mul(0.5).exp()
    noise = torch.rand(n, n_steps, 2, generator=generator)
    step = torch.arange(1, n_steps + 1)[:, None] / n_steps
    bound = step * torch.rand(n, 1, 1, generator=generator).add(1).expand_as(noise)
    return held_out(
        bound=bound,
        error=size * noise * step,
        supported=torch.randint(5, n_steps + 1, (n,), generator=generator),
        start=spacing * torch.arange(n),
        quantile=0.9,
    )


def trusted_steps(rollouts, trust, tolerance):
    within = trust.within(over_tolerance(rollouts.bound, tolerance))
    return torch.minimum(within.long().cumprod(dim=1).sum(dim=1), rollouts.supported)


def is_broken(rollouts, trust, tolerance):
    """Whether the error of each rollout exceeds the tolerance at a trusted step."""
    exceeds = (rollouts.error > tolerance).any(dim=2)
    step = torch.arange(exceeds.shape[1])
    return (exceeds & (step < trusted_steps(rollouts, trust, tolerance)[:, None])).any(
        dim=1
    )


def test_the_expected_fraction_of_broken_rollouts_is_the_one_of_split_conformal_prediction():
    generator, fractions = torch.Generator().manual_seed(0), []
    tolerance = torch.tensor(0.6)
    for _ in range(300):
        calibration, fresh = drawn(generator, 59), drawn(generator, 50)
        trust = calibration.trust(tolerance)
        assert trust.n_apart == 59
        fractions.append(float(is_broken(fresh, trust, tolerance).double().mean()))
    assert 0.08 < np.mean(fractions) < 0.105


@pytest.mark.parametrize("spacing", [1, 3, 1000])
def test_a_larger_tolerance_never_has_a_shorter_horizon(spacing):
    """Although longer horizons overlap more, so that fewer held-out rollouts count."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        rollouts = drawn(generator, 60, spacing=spacing)
        before = torch.zeros(60)
        for tolerance in torch.logspace(-1.5, 0.7, 40):
            steps = trusted_steps(rollouts, rollouts.trust(tolerance), tolerance)
            assert (steps >= before).all()
            before = steps


@pytest.mark.parametrize("spacing", [1, 1000])
def test_the_limit_is_the_largest_one_that_breaks_few_enough_rollouts(spacing):
    """With 60 rollouts and level 0.9 these are 5, because (5 + 1) / (60 + 1) < 0.1."""
    rollouts = drawn(torch.Generator().manual_seed(3), 60, spacing=spacing)
    for tolerance in torch.linspace(0.1, 0.6, 6):
        trust = rollouts.trust(tolerance)
        ratio = over_tolerance(rollouts.bound, tolerance)
        uncapped = replace(rollouts, bound=rollouts.bound / 1e6)
        wide = replace(trust, typical=tuple(m / 1e6 for m in trust.typical))

        def n_broken(limit, wide=wide, uncapped=uncapped, tolerance=tolerance):
            scaled = replace(wide, limit=limit / 1e6)
            return int(is_broken(uncapped, scaled, tolerance).sum())

        assert n_broken(trust.limit * (1 - 1e-6)) <= 5
        assert n_broken(trust.limit * (1 + 1e-6)) > 5
        assert int(is_broken(rollouts, trust, tolerance).sum()) <= 5
        assert_close(
            torch.tensor(trust.typical),
            ratio.cummax(dim=1).values.median(dim=0).values,
            check_dtype=False,
        )


def test_the_ratio_that_ends_the_trust_has_the_score_of_the_limit():
    rollouts = drawn(torch.Generator().manual_seed(4), 60)
    trust = rollouts.trust(torch.tensor(0.6))
    largest = torch.tensor(trust.largest_ratio, dtype=torch.float64)
    typical = torch.tensor(trust.typical, dtype=torch.float64)
    below = largest < 1
    assert below.any()
    assert_close(
        scores(largest[None], typical)[0, below],
        torch.full((int(below.sum()),), trust.limit, dtype=torch.float64),
    )
    for factor, holds in ((1 - 1e-6, True), (1 + 1e-6, False)):
        within = trust.within((largest * factor)[None])[0]
        assert (within[below] == holds).all()


def test_the_limit_of_nineteen_rollouts_is_the_second_smallest_critical_value():
    """Level 0.9 allows one broken rollout of 19."""
    critical = torch.arange(1.0, 20.0) / 20
    rollouts = held_out(
        bound=torch.stack([critical / 2, critical], dim=1)[..., None],
        error=torch.tensor([0.0, 2.0]).expand(19, 2)[..., None],
        supported=torch.full((19,), 2),
        start=10 * torch.arange(19),
        quantile=0.9,
    )
    one, typical = torch.tensor(1.0), float(critical[9])

    def score(i):
        return float(critical[i]) ** (2 / 3) * typical ** (1 / 3)

    trust = rollouts.trust(one)
    assert trust.typical == pytest.approx((typical / 2, typical))
    assert trust.limit == pytest.approx(score(1))
    assert int(is_broken(rollouts, trust, one).sum()) == 1
    # Two rollouts are unsafe before their error exceeds the tolerance, so that no limit breaks them.
    some_unsafe = replace(rollouts, supported=torch.tensor([1, 1, *[2] * 17]))
    assert some_unsafe.trust(one).limit == pytest.approx(score(3))
    assert rollouts.trust(torch.tensor(3.0)).limit == np.inf


def test_bounds_without_information_give_the_same_horizon_as_exceedance_times():
    """If all rollouts have the same bounds, the horizon is a quantile of the steps at which the error exceeds."""
    n, n_steps = 99, 40
    exceeds_at = torch.randperm(n, generator=torch.Generator().manual_seed(0)) % n_steps
    step = torch.arange(n_steps)
    rollouts = held_out(
        bound=((step + 1.0) / 100).expand(n, n_steps)[..., None],
        error=(step >= exceeds_at[:, None]).float()[..., None],
        supported=torch.full((n,), n_steps),
        start=1000 * torch.arange(n),
        quantile=0.95,
    )
    tolerance = torch.tensor(0.5)
    steps = trusted_steps(rollouts, rollouts.trust(tolerance), tolerance)
    assert steps.tolist() == [int(exceeds_at.sort().values[4])] * n


def test_rollouts_that_overlap_count_once_in_the_fraction_that_is_stated():
    assert count_apart(torch.tensor([0, 4, 5, 9, 11, 30]), 5) == 4
    assert count_apart(torch.arange(7), 1) == 7
    rollouts = drawn(torch.Generator().manual_seed(2), 60)
    overlapping = replace(rollouts, start=torch.arange(60))
    tolerance = torch.tensor(0.6)
    apart, together = (r.trust(tolerance) for r in (rollouts, overlapping))
    assert apart.broken == pytest.approx(0.1)
    assert "overlap" not in str(apart)
    longest = int(trusted_steps(overlapping, together, tolerance).max())
    g = count_apart(overlapping.start, longest)
    assert together.n_apart == g < 9
    assert together.broken == pytest.approx((g * 5 / 60 + 1) / (g + 1))
    assert f"but only {g} of them do not: give longer" in str(together)


N_REPETITIONS = 2000


def repetitions(seed, n_held_out, n_fresh=20):
    """Held-out rollouts and new rollouts that are exchangeable with them, for each of many repetitions."""
    generator = torch.Generator().manual_seed(seed)
    held, fresh = (drawn(generator, N_REPETITIONS * n) for n in (n_held_out, n_fresh))
    return zip(
        held.excess.split(n_held_out),
        held.start.split(n_held_out),
        fresh.error.split(n_fresh),
        fresh.bound.split(n_fresh),
        strict=True,
    )


def fraction_within(error, bound):
    """Fraction of the rollouts with all errors, at all steps and coordinates, within the bound."""
    return float((error <= bound).flatten(start_dim=1).all(dim=1).double().mean())


def assert_mean_is(expected, fractions):
    """The mean over the repetitions differs from its exact value by at most three standard errors."""
    assert len(fractions) == N_REPETITIONS
    standard_error = np.std(fractions, ddof=1) / N_REPETITIONS**0.5
    assert abs(np.mean(fractions) - expected) <= 3 * standard_error < 0.01


def test_the_joint_band_contains_all_errors_with_the_nominal_probability():
    """Of 49 rollouts, 4 exceed the band of level 0.9: a new one is within it with the probability 45 / 50."""
    contained = []
    for excess, start, error, bound in repetitions(5, 49):
        band = JointBand(excess, start)
        contained.append(fraction_within(error, band.factor(30, 0.9) * bound))
        assert int((excess.amax(dim=1) > band.factor(30, 0.9)).sum()) == 4
        assert int((excess[:, 0] > band.factor(1, 0.9)).sum()) == 4
    assert_mean_is(0.9, contained)


def test_the_joint_band_counts_groups_of_overlapping_rollouts():
    """Groups of five rollouts with the same errors are no more than one rollout each: 18 / 20 for 19 groups."""
    contained = []
    for few, few_starts, error, bound in repetitions(6, 19):
        excess = few.repeat_interleave(5, dim=0)
        start = few_starts.repeat_interleave(5) + torch.arange(5).repeat(19)
        factor = JointBand(excess, start).factor(30, 0.9)
        assert factor == JointBand(few, few_starts).factor(30, 0.9)
        contained.append(fraction_within(error, factor * bound))
    assert_mean_is(0.9, contained)


def test_a_joint_band_is_infinite_nowhere_because_of_an_infinite_bound():
    """A diverged rollout has infinite errors and bounds; exact values have neither."""
    error = torch.tensor([[[1.0, 0.0], [torch.inf, torch.inf]]])
    bound = torch.tensor([[[2.0, 0.0], [torch.inf, torch.inf]]])
    assert excess_of(error, bound).tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((31, 0.9), "n_steps=31, but errors were measured for 30 steps"),
        ((0, 0.9), "n_steps=0"),
        ((30, 1.0), "confidence=1.0, but a quantile level lies strictly between"),
        ((30, 0.99), "confidence=0.99 needs 99 held-out rollouts.*there are 60; lower"),
    ],
)
def test_joint_bands_without_enough_rollouts_are_refused(arguments, message):
    rollouts = drawn(torch.Generator().manual_seed(0), 60)
    with pytest.raises(ValueError, match=message):
        JointBand(rollouts.excess, rollouts.start).factor(*arguments)


def test_an_infinite_bound_exceeds_every_tolerance():
    bound = torch.tensor([[[1.0, 2.0], [torch.inf, 1.0]]])
    ratio = over_tolerance(bound, torch.tensor([2.0, torch.inf]))
    assert_close(ratio, torch.tensor([[0.5, torch.inf]]))
