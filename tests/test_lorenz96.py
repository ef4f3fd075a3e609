"""A second chaotic system through the same class: 40 variables, nothing chosen for it, all settings as they come."""

import numpy as np
import pytest

from geoq import RolloutGeoQ
from geoq.metrics import coverage_by_lead, pinball


def lorenz96(n_states, dt=0.05, forcing=8.0, seed=0):
    def slope(x):
        return (np.roll(x, -1) - np.roll(x, 2)) * np.roll(x, 1) - x + forcing

    x = forcing + np.random.default_rng(seed).standard_normal(40)
    states = []
    for step in range(n_states + 400):
        k1 = slope(x)
        k2 = slope(x + dt / 2 * k1)
        k3 = slope(x + dt / 2 * k2)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + slope(x + dt * k3))
        if step >= 400:
            states.append(x)
    return np.array(states)


def random_features(segments):
    """Least squares on bounded random features of each variable's neighbours, the same weights for all variables."""
    rng = np.random.default_rng(0)
    mixing, offset = 0.1 * rng.standard_normal((5, 40)), rng.standard_normal(40)

    def design(x):
        shifts = (2, 1, 0, -1, -2)
        near = np.stack([np.roll(x, shift, axis=1) for shift in shifts], axis=2)
        return np.tanh(near @ mixing + offset)

    before = np.concatenate([segment[:-1] for segment in segments])
    after = np.concatenate([segment[1:] for segment in segments])
    features = design(before).reshape(-1, 40)
    gram = features.T @ features + 1e-3 * np.eye(40)
    weights = np.linalg.solve(gram, features.T @ after.ravel())
    return lambda x: design(x) @ weights


@pytest.fixture(scope="module")
def forecast():
    states, n_train, n_steps = lorenz96(2600), 1600, 400
    geoq = RolloutGeoQ(None, random_features).fit(states[:n_train])
    starts = n_train + 10 * np.arange(60)
    assessment = geoq.assess(states[starts], n_steps)
    truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
    return geoq, assessment, abs(truth - assessment.prediction)


def test_coverage_is_sane_in_every_quarter_and_past_the_calibration_horizon(forecast):
    _, a, error = forecast
    quarters = coverage_by_lead(error, a.error_hat).reshape(4, -1).mean(axis=1)
    assert (abs(quarters - 0.95) < 0.04).all()


@pytest.mark.parametrize("tolerance", [3.0, 6.0])
def test_few_trusted_horizons_are_broken_and_many_of_the_bound_alone(
    forecast, tolerance
):
    """A bound that holds value by value is exceeded somewhere among 40 variables and several steps."""
    geoq, _, _ = forecast
    fresh, n_steps = lorenz96(1100, seed=1), 40
    starts = 5 * np.arange(200)
    a = geoq.assess(fresh[starts], n_steps, tolerance)
    truth = fresh[starts[:, None] + np.arange(1, n_steps + 1)]
    kept = (abs(truth - a.prediction) <= tolerance).all(axis=2)
    small = a.safe & (a.error_hat <= tolerance).all(axis=2)
    held, alone = (part.cumprod(axis=1).sum(axis=1) for part in (kept, small))
    assert (held < alone).mean() > 0.3
    # One calibration of 200 rollouts and 200 fresh ones: a standard deviation of 0.02 about the guaranteed 0.05.
    assert (held < a.trusted_horizon).mean() < 0.1
    assert a.trust.broken == pytest.approx(0.05, abs=0.001)
    assert a.trusted_horizon.mean() > 0.4 * held.mean()


def test_the_bound_grows_with_the_error_and_saturates_with_it(forecast):
    _, a, error = forecast
    bound, true = a.error_hat.mean(axis=(0, 2)), error.mean(axis=(0, 2))
    assert true[0] < true[-100:].mean() / 10
    assert bound[0] < bound[-100:].mean() / 10
    assert bound[-100:].max() < 1.1 * bound[200:300].mean()


def test_the_bound_is_sharper_than_one_number_per_step(forecast):
    geoq, a, error = forecast
    per_step = np.quantile(geoq.calibration_.error.numpy(), 0.95, axis=(0, 2))
    error, bound = error[:, : len(per_step)], a.error_hat[:, : len(per_step)]
    others = np.broadcast_to(per_step[:, None], error.shape)
    assert pinball(error, bound, 0.95) < 0.9 * pinball(error, others, 0.95)


@pytest.mark.parametrize(
    ("changed", "least", "most"),
    [
        (lambda x: x, 0.88, 1.0),
        (lambda x: np.roll(x, 7, axis=1), 0.88, 1.0),
        (lambda x: 1.5 * x, 0.0, 0.05),
        (lambda x: 3 * x, 0.0, 0.0),
        (lambda x: x + 2.0, 0.0, 0.1),
        (lambda x: np.random.default_rng(0).permuted(x, axis=1), 0.0, 0.1),
    ],
)
def test_initial_states_unlike_the_data_are_not_safe(forecast, changed, least, most):
    geoq, _, _ = forecast
    x0 = changed(lorenz96(1000, seed=1)[::10])
    assert least <= geoq.assess(x0, 1).safe.mean() <= most


def test_the_reason_names_what_is_unlike_the_data(forecast):
    geoq, _, _ = forecast
    x0 = lorenz96(3, seed=1)
    x0[1] *= 1.4
    x0[2, 17] += 6 * (-1) ** (x0[2, 17] > 0)
    a = geoq.assess(x0, 2, tolerance=3.0)
    assert "step 1: NOT safe, the standard deviation of channel 0 is" in a.reason(1)
    assert a.trusted_horizon[1] == a.supported_horizon[1] == 0
    assert not a.safe[2, 0]
    assert "around cell" in a.reason(2)


def test_a_file_contains_the_region_of_initial_states(forecast, tmp_path):
    geoq, _, _ = forecast
    geoq.save(tmp_path / "l96.geoq")
    x0 = lorenz96(20, seed=1)
    x0[10:] *= 1.2
    loaded = RolloutGeoQ.load(tmp_path / "l96.geoq", surrogate=geoq.surrogate_)
    ours, theirs = (g.assess(x0, 2, tolerance=3.0) for g in (geoq, loaded))
    np.testing.assert_array_equal(ours.support_score, theirs.support_score)
    assert [ours.reason(i) for i in range(20)] == [theirs.reason(i) for i in range(20)]
    assert 0 < ours.safe[:, 0].sum() < 20
