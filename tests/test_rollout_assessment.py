import numpy as np
import pytest
from henon import QUERIES, TRAINING, analogue, fitted, small

from geoq.rollout import Relative

FAR = np.array([[40.0, 40.0]])


def test_the_trusted_horizon_ends_before_the_first_step_that_is_unsafe_or_too_uncertain():
    x0 = np.concatenate([QUERIES, FAR])
    a = fitted().assess(x0, 40, tolerance=0.5)
    ratio = (a.error_hat / 0.5).max(axis=2)
    np.testing.assert_allclose(a.bound_over_tolerance, ratio)
    trusted = a.safe & (ratio <= 1) & (ratio < np.array(a.trust.largest_ratio))
    expected = [np.flatnonzero(~row)[0] if not row.all() else 40 for row in trusted]
    np.testing.assert_array_equal(a.trusted_horizon, expected)
    assert a.trusted_horizon[-1] == 0
    assert "not trusted" in a.reason(20)
    assert "NOT safe" in a.reason(20)
    per_coordinate = fitted().assess(x0, 40, tolerance=np.array([0.5, 0.5]))
    np.testing.assert_array_equal(per_coordinate.trusted_horizon, a.trusted_horizon)


def test_the_reason_compares_the_bound_with_the_tolerance_and_with_the_limit():
    a = fitted().assess(QUERIES, 40, tolerance=1.7)
    seen = set()
    for i, horizon in enumerate(a.trusted_horizon):
        ratio = a.bound_over_tolerance[i, horizon]
        _, end = a.outcome(i)
        assert f"step {horizon + 1}: the largest bound is {ratio:.3g} times" in end
        limit = a.trust.largest_ratio[horizon]
        assert (f"only below {limit:.3g} times" in end) == (ratio <= 1)
        seen.add(bool(ratio > 1))
    assert seen == {True, False}
    assert str(a.trust) in a.reason(0)


def test_the_trusted_horizon_ends_at_the_calibration_horizon():
    """No error was measured past it, however large the tolerance."""
    a = fitted().assess(QUERIES, 60, tolerance=1e6)
    lasting = np.flatnonzero(a.supported_horizon >= 40)
    assert len(lasting)
    assert (a.trusted_horizon[lasting] == 40).all()
    assert "step 41: past the calibration horizon" in a.reason(int(lasting[0]))


def test_fewer_steps_only_cut_the_trusted_horizon():
    few, many = (fitted().assess(QUERIES, n, 1.0) for n in (6, 40))
    assert few.trust == many.trust
    np.testing.assert_array_equal(few.trusted_horizon, many.trusted_horizon.clip(max=6))
    assert many.trusted_horizon.max() > 6


def test_trusted_horizons_grow_with_the_tolerance():
    horizons = np.array(
        [
            fitted().assess(QUERIES, 40, float(tolerance)).trusted_horizon
            for tolerance in np.geomspace(0.01, 10, 30)
        ]
    )
    assert (np.diff(horizons, axis=0) >= 0).all()
    assert horizons[0].max() < horizons[-1].max()


def test_a_relative_tolerance_is_a_fraction_of_the_deviation_of_each_coordinate():
    relative = fitted().assess(QUERIES, 20, Relative(0.3))
    numbers = 0.3 * TRAINING.std(axis=0)
    np.testing.assert_allclose(relative.tolerance, numbers)
    given = fitted().assess(QUERIES, 20, numbers)
    np.testing.assert_array_equal(relative.trusted_horizon, given.trusted_horizon)
    assert relative.trusted_horizon.max() > 0


def test_a_relative_tolerance_does_not_limit_a_coordinate_without_spread():
    padded = np.hstack([TRAINING, np.full((len(TRAINING), 1), 7.0)])
    geoq = small(None, analogue, output=[0, 2]).fit(padded)
    a = geoq.assess(padded[:3], 5, Relative(0.3))
    np.testing.assert_allclose(a.tolerance, [0.3 * TRAINING[:, 0].std(), np.inf])


@pytest.mark.parametrize("fraction", [0, -0.1, np.nan])
def test_a_relative_tolerance_that_is_no_fraction_is_refused(fraction):
    with pytest.raises(ValueError, match=r"Relative.*but a fraction of the spread"):
        Relative(fraction)


def test_the_joint_band_is_the_bound_times_one_factor():
    a = fitted().assess(QUERIES, 10)
    band = a.joint_band(5, confidence=0.8)
    factor = fitted().assess(QUERIES[:1], 40).joint.factor(5, 0.8)
    np.testing.assert_allclose(band, factor * a.error_hat[:, :5])
    assert a.joint_band(confidence=0.5).shape == a.error_hat.shape
    assert a.joint_band(3, confidence=0.8).max() <= band[:, :3].max()
    with pytest.raises(ValueError, match="n_steps=11, but the rollouts were assessed"):
        a.joint_band(11, confidence=0.5)


def test_without_a_tolerance_there_is_only_a_supported_horizon():
    a = fitted().assess(np.concatenate([QUERIES, FAR]), 60)
    assert a.trusted_horizon is a.trust is a.bound_over_tolerance is None
    safe = a.safe.cumprod(axis=1).sum(axis=1)
    np.testing.assert_array_equal(a.supported_horizon, safe)
    for text in (repr(a), a.reason(0), a.reason(20)):
        assert "trust" not in text
        assert "no tolerance was given" in text
    assert "not supported" in a.reason(20)


def test_the_reason_of_a_rollout_that_was_not_assessed_is_refused():
    a = fitted().assess(QUERIES[:3], 5)
    with pytest.raises(IndexError, match="rollout=3, but 3 were assessed; choose 0 to"):
        a.reason(3)
