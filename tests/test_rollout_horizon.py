"""Trusted horizons and joint bands: their guarantees by simulation, and cases by hand."""

from dataclasses import replace

import numpy as np
import pytest

from geoq.rollout.horizon import EveryValue, HeldOutRollouts, Norm, count_apart


def drawn(rng, n, n_steps=30, spacing=1000):
    """Held-out rollouts whose errors grow at random rates, with bounds that do not depend on these rates."""
    size = np.exp(0.5 * rng.standard_normal((n, 1, 1)))
    noise = rng.random((n, n_steps, 2))
    step = np.arange(1, n_steps + 1)[:, None] / n_steps
    bound = step * np.broadcast_to(1 + rng.random((n, 1, 1)), noise.shape)
    supported = rng.integers(5, n_steps + 1, n)
    return HeldOutRollouts.of(bound, size * noise * step, supported, spacing * np.arange(n), 0.9)


def trusted_steps(rollouts, trust):
    within = trust.within(trust.ratio(rollouts.bound))
    return np.minimum(within.cumprod(axis=1).sum(axis=1), rollouts.supported)


def is_broken(rollouts, trust):
    """Whether the error of each rollout exceeds the tolerance at a trusted step."""
    exceeds = trust.tolerance.over(rollouts.error) > 1
    step = np.arange(exceeds.shape[1])
    return (exceeds & (step < trusted_steps(rollouts, trust)[:, None])).any(axis=1)


@pytest.mark.parametrize("limit", [EveryValue(0.6), Norm(0.4), Norm(np.array([0.3, 0.6]))])
def test_the_expected_fraction_of_broken_rollouts_is_that_of_split_conformal_prediction(limit):
    rng, fractions = np.random.default_rng(0), []
    for _ in range(300):
        calibration, fresh = drawn(rng, 59), drawn(rng, 50)
        trust = calibration.trust(limit)
        assert trust.n_apart == 59
        fractions.append(is_broken(fresh, trust).mean())
    assert 0.08 < np.mean(fractions) < 0.105


@pytest.mark.parametrize("kind", [EveryValue, Norm])
@pytest.mark.parametrize("spacing", [1, 3, 1000])
def test_a_larger_tolerance_never_has_a_shorter_horizon(spacing, kind):
    """Although longer horizons overlap more, so that fewer held-out rollouts count."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        rollouts, before = drawn(rng, 60, spacing=spacing), np.zeros(60)
        for tolerance in np.logspace(-1.5, 0.7, 40):
            steps = trusted_steps(rollouts, rollouts.trust(kind(tolerance)))
            assert (steps >= before).all()
            before = steps


@pytest.mark.parametrize("spacing", [1, 1000])
def test_the_limit_is_the_largest_one_that_breaks_few_enough_rollouts(spacing):
    """With 60 rollouts and level 0.9 these are 5, because (5 + 1) / (60 + 1) < 0.1."""
    rollouts = drawn(np.random.default_rng(3), 60, spacing=spacing)
    for tolerance in map(EveryValue, np.linspace(0.1, 0.6, 6)):
        trust = rollouts.trust(tolerance)
        uncapped = replace(rollouts, bound=rollouts.bound / 1e6)
        wide = replace(trust, typical=tuple(m / 1e6 for m in trust.typical))
        for factor, holds in ((1 - 1e-6, True), (1 + 1e-6, False)):
            scaled = replace(wide, limit=trust.limit * factor / 1e6)
            assert (is_broken(uncapped, scaled).sum() <= 5) == holds
        assert is_broken(rollouts, trust).sum() <= 5


def test_the_limit_of_nineteen_rollouts_is_the_second_smallest_critical_value():
    """Level 0.9 allows one broken rollout of 19."""
    critical = np.arange(1.0, 20.0) / 20
    rollouts = HeldOutRollouts.of(
        bound=np.stack([critical / 2, critical], axis=1)[..., None],
        error=np.broadcast_to([[0.0], [2.0]], (19, 2, 1)),
        supported=np.full(19, 2),
        start=10 * np.arange(19),
        quantile=0.9,
    )
    one, typical = EveryValue(1.0), critical[9]

    def score(i):
        return pytest.approx(critical[i] ** (2 / 3) * typical ** (1 / 3))

    trust = rollouts.trust(one)
    assert trust.typical == pytest.approx((typical / 2, typical))
    assert trust.limit == score(1)
    assert is_broken(rollouts, trust).sum() == 1
    # Two rollouts are unsafe before their error exceeds the tolerance, so that no limit breaks them.
    some_unsafe = replace(rollouts, supported=np.array([1, 1, *[2] * 17]))
    assert some_unsafe.trust(one).limit == score(3)
    assert rollouts.trust(EveryValue(3.0)).limit == np.inf


def test_rollouts_that_overlap_count_once_in_the_fraction_that_is_stated():
    assert count_apart(np.array([0, 4, 5, 9, 11, 30]), 5) == 4
    assert count_apart(np.arange(7), 1) == 7
    rollouts, tolerance = drawn(np.random.default_rng(2), 60), EveryValue(0.6)
    overlapping = replace(rollouts, start=np.arange(60))
    apart, together = (r.trust(tolerance) for r in (rollouts, overlapping))
    assert apart.broken == pytest.approx(0.1)
    assert "overlap" not in str(apart)
    longest = int(trusted_steps(overlapping, together).max())
    g = count_apart(overlapping.start, longest)
    assert together.n_apart == g < 9
    assert together.broken == pytest.approx((g * 5 / 60 + 1) / (g + 1))
    assert f"but only {g} of them do not: give longer" in str(together)


@pytest.mark.parametrize(("n_apart", "n_copies", "seed"), [(49, 1, 5), (19, 5, 6)])
def test_the_joint_band_contains_all_errors_with_the_nominal_probability(n_apart, n_copies, seed):
    """A new rollout is within the band of level 0.9 with the probability 45 / 50, or 18 / 20 for 19 groups.

    Groups of five overlapping rollouts with the same errors are no more than one rollout each.
    """
    rng, contained = np.random.default_rng(seed), []
    for _ in range(1000):
        few, fresh = drawn(rng, n_apart), drawn(rng, 20)
        rows, copies = np.arange(n_apart).repeat(n_copies), np.tile(np.arange(n_copies), n_apart)
        parts = few.bound, few.error, few.supported, few.start
        bound, error, supported, start = (part[rows] for part in parts)
        held = HeldOutRollouts.of(bound, error, supported, start + copies, 0.9)
        factor = held.joint_factor(30, 0.9)
        assert factor == few.joint_factor(30, 0.9)
        within = (fresh.error <= factor * fresh.bound).all(axis=(1, 2))
        contained.append(within.mean())
    standard_error = np.std(contained, ddof=1) / 1000**0.5
    assert abs(np.mean(contained) - 0.9) <= 3 * standard_error < 0.01


def test_infinite_bounds_exceed_every_tolerance_and_no_joint_band():
    """A diverged rollout has infinite bounds and no errors; exact values have neither."""
    error = np.array([[[1.0, 0.0], [np.nan, np.nan]]])
    bound = np.array([[[2.0, 0.0], [np.inf, 1.0]]])
    zero = np.zeros(1, dtype=int)
    rollouts = HeldOutRollouts.of(bound, error, zero, zero, 0.9)
    assert rollouts.excess.tolist() == [[0.5, 0.0]]
    for kind in (EveryValue, Norm):
        assert kind(np.array([2.0, np.inf])).over(bound).tolist() == [[1.0, np.inf]]


def test_a_norm_of_bounds_has_the_conformal_factor_of_the_norms_of_errors():
    """Of 19 rollouts at level 0.9 the second largest ratio counts; the norm of 3 and 4 is the root of (9 + 16) / 2."""
    norm = (25 / 2) ** 0.5
    values = np.array([[[3.0, 4.0], [np.nan, np.nan]]])
    assert Norm(0.5).over(values)[0] == pytest.approx([norm / 0.5, np.nan], nan_ok=True)
    bound, number = np.broadcast_to([[3.0, 4.0]], (19, 1, 2)), np.arange(1, 20)
    error = bound * number[:, None, None] / 20
    trust = HeldOutRollouts.of(bound, error, number, 9 * number, 0.9).trust(Norm(2.0))
    assert trust.factor == (pytest.approx(0.9),)
    assert trust.ratio(bound[:1].repeat(3, axis=1))[0] == pytest.approx([0.9 * norm / 2] * 3)
    assert trust.limit == pytest.approx(0.9 * norm / 2)  # 8 of the errors exceed the tolerance


@pytest.mark.parametrize(("arguments", "message"), [
    ((31, 0.9), "n_steps=31, but errors were measured for 30 steps"),
    ((0, 0.9), "n_steps=0"),
    ((30, 1.0), "confidence=1.0, but a quantile level lies strictly between"),
    ((30, 0.99), "confidence=0.99 needs 99 held-out rollouts.*there are 60; lower"),
])  # fmt: skip
def test_joint_bands_without_enough_rollouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        drawn(np.random.default_rng(0), 60).joint_factor(*arguments)
