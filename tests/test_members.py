"""MemberGrowth: members, the companion, and the choice between them."""

from dataclasses import replace

import numpy as np
import pytest
from henon import QUERIES, STATES, TRAINING, analogue, fitted, henon, same_answers, small, truth_of
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GroupFolds, RolloutGeoQ
from geoq.parts import MemberGrowth, RandomFeatures, WithMemory
from geoq.quantiles import pinball_loss
from geoq.rollout.growth import COURSE, SOURCES, STATIC
from geoq.rollout.members import Noise, simulate
from geoq.rollout.series import DataRange

ALONE = MemberGrowth(companion=None)
WIDE = DataRange(np.full(2, -9e9), np.full(2, 9e9), np.ones(2), np.full(2, 9e9))
ROTATION = 1.1 * np.array([[0.8, -0.6], [0.6, 0.8]])


def linear(rows):
    return rows @ ROTATION.T


def rolled(step, first, n_steps):
    rows = [first]
    for _ in range(n_steps):
        rows.append(step(rows[-1]))
    return np.stack(rows, axis=1)


def layers_of(estimator):
    return [layer.place for layer in estimator.fitted_.bound.layers]


# Members


def test_members_of_a_linear_step_are_apart_by_the_sum_of_the_rotated_errors():
    """u_n - base_n = sum_m A^(n-m) e_m, and two members in a row have opposite signs."""
    rows = rolled(linear, np.array([[1.0, 0.0], [0.0, 2.0]]), 4)
    unit = np.random.default_rng(0).standard_normal((1, 4, 2))
    noise, distance = Noise(np.concatenate([unit, -unit]), 2.0), np.array([[1.0], [3.0]])
    gap, spread = simulate(linear, rows, noise, distance, WIDE, rows, own=False)
    moved = np.zeros(2)
    for n in range(4):
        moved = ROTATION @ moved + unit[0, n]
        assert_allclose(spread[:, n], distance**2 * abs(moved), rtol=1e-9)
    assert_allclose(gap, 0, atol=1e-12)
    same = simulate(linear, rows, noise, distance, WIDE, rows, own=True)
    assert_allclose(same[1], spread, rtol=1e-9)


def test_the_gap_is_the_distance_of_another_model_from_the_forecast():
    rows = rolled(linear, np.ones((3, 2)), 5)
    none = Noise(np.zeros((4, 5, 2)), 1.0)
    gap, spread = simulate(
        lambda u: 0.9 * linear(u), rows, none, np.ones((3, 1)), WIDE, rows, own=False
    )
    other = rolled(lambda u: 0.9 * linear(u), np.ones((3, 2)), 5)
    assert_allclose(gap, abs(other - rows)[:, 1:])
    assert_allclose(spread, 0, atol=1e-12)


def test_noise_consists_of_runs_of_errors_scaled_by_their_distance():
    errors, distance = np.arange(1.0, 41.0).reshape(2, 20, 1), np.full((2, 20), 2.0)
    distance[1] = 4.0
    exact = Noise.of(3.0 * distance[..., None] ** 1.5, distance, 4, 12)
    assert exact.exponent == pytest.approx(1.5)
    assert_allclose(abs(exact.unit), 3.0)
    noise = Noise.of(errors, np.ones((2, 20)), 4, 12)
    assert noise.unit.shape == (4, 12, 1)
    assert_array_equal(noise.unit[0], -noise.unit[1])
    assert (abs(np.diff(abs(noise.unit[0, :5, 0]))) == 1).all()


def test_a_forecast_that_diverges_stops_its_members_and_others_do_not_change():
    rows = rolled(linear, np.ones((2, 2)), 6)
    rows[0, 3:] = np.nan
    noise = Noise(np.random.default_rng(0).standard_normal((4, 6, 2)), 0.0)
    both = simulate(linear, rows, noise, np.ones((2, 2)), WIDE, rows, own=True)
    alone = simulate(linear, rows[1:], noise, np.ones((1, 2)), WIDE, rows, own=True)
    assert (both[:, 0, 2:] == 0).all()
    assert_array_equal(both[:, 1:], alone)


# The choice


def test_the_companion_is_used_where_it_is_better_and_only_there():
    bound = fitted().fitted_.bound
    assert layers_of(fitted()) == [0, 1]
    errors = bound.step_errors
    assert errors[1] < 0.1 * errors[0]
    text = fitted().describe()
    assert all(f"{error:.2g}" in text for error in errors)
    assert all(name in text for name in (*STATIC, *SOURCES))

    def nearly_exact(segments):
        del segments
        return lambda u: np.stack([1 - 1.4 * u[:, 0] ** 2 + u[:, 1], 0.3 * u[:, 0]], axis=1) + 1e-9

    poor = MemberGrowth(companion=RandomFeatures(2))
    with pytest.warns(UserWarning, match="give the same answers"):
        assert 1 not in layers_of(small(None, nearly_exact, scheme=poor).fit(TRAINING))


def test_a_refinement_lowers_the_loss_of_new_rollouts():
    states, losses = henon(1500, seed=3), {}
    truth = truth_of(states, 0, 400, 40)
    for name, scheme in {
        "static": MemberGrowth(0),
        "members": ALONE,
        "both": MemberGrowth(),
    }.items():
        a = small(None, analogue, scheme=scheme).fit(TRAINING).assess(states[:400], 40)
        losses[name] = pinball_loss(abs(truth - a.prediction), a.error_hat, 0.95)[:, :12].mean()
    assert losses["members"] < 0.97 * losses["static"]
    assert losses["both"] < 0.5 * losses["static"]


def test_without_members_the_bound_is_static_and_past_the_horizon_always():
    estimator = small(None, analogue, scheme=MemberGrowth(0)).fit(TRAINING)
    assert estimator.fitted_.bound.layers == ()
    static, ours = (own.bound(QUERIES, 60)[:, 40:] for own in (estimator, fitted()))
    assert_allclose(ours, static)


# The course of the forecast


def circles(n, seed, n_times=21):
    """Rotations on the unit circle, every second one ten times as fast, and their speeds."""
    speed = np.where(np.arange(n) % 2, 0.7, 0.07)[:, None]
    angle = np.random.default_rng(seed).uniform(0, 7, (n, 1)) + speed * np.arange(n_times)
    return np.stack([np.cos(angle), np.sin(angle), speed + 0 * angle], axis=2)


def bounded(size):
    """The bound of a rotation whose errors have the size ``size(speed)`` and look random."""

    def step(u):
        x, y, speed = u.T
        cos, sin, error = np.cos(speed), np.sin(speed), size(speed) * np.sin(1e4 * u[:, :2].T)
        return np.stack([cos * x - sin * y + error[0], sin * x + cos * y + error[1], speed], axis=1)

    settings = {"scheme": ALONE, "folds": GroupFolds(5), "n_calibration": 10}
    return RolloutGeoQ(step, None, **settings).fit(list(circles(80, 0)))


def test_the_bound_follows_initial_states_with_larger_errors(tmp_path):
    """Errors are proportional to the speed, which the change of a step shows and distances do not."""
    estimator, truth = bounded(lambda speed: 0.1 * speed), circles(400, 1, 11)
    answer = estimator.assess(truth[:, 0], 10)
    covered = (abs(answer.prediction - truth[:, 1:]) <= answer.error_hat)[..., :2]
    slow, fast = (slice(k, None, 2) for k in (0, 1))
    assert all(0.92 < covered[own].mean() < 0.98 for own in (slow, fast))
    assert 8 < answer.error_hat[fast].mean() / answer.error_hat[slow].mean() < 12
    assert "members of the surrogate and " + COURSE in estimator.describe()
    estimator.save(tmp_path / "course.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "course.geoq", surrogate=estimator.surrogate_)
    assert_array_equal(loaded.bound(truth[:9, 0], 10), estimator.bound(truth[:9, 0], 10))
    assert_allclose(loaded.bound(truth[:9, 0], 1), answer.error_hat[:9, :1])


def test_the_course_is_not_used_where_errors_do_not_depend_on_it():
    estimator = bounded(lambda speed: 0.01)
    assert estimator.fitted_.bound.course is None
    assert "and " + COURSE not in estimator.describe()


# Everything else of rollouts


def test_a_file_and_one_query_give_the_same_answers(tmp_path):
    fitted().save(tmp_path / "members.geoq")
    same_answers(
        RolloutGeoQ.load(tmp_path / "members.geoq", surrogate=fitted().surrogate_), fitted()
    )
    whole = fitted().bound(QUERIES, 30)
    assert_allclose(fitted().bound(QUERIES[3:4], 30), whole[3:4], rtol=1e-9)


def test_members_of_a_step_that_depends_on_its_batch_are_refused():
    with pytest.raises(ValueError, match="in another batch"):
        small(lambda u: u - u.mean(axis=0), None).fit(TRAINING)


def test_members_receive_the_forcing_and_keep_the_memory():
    push = 0.1 * np.sin(np.arange(700))[:, None]

    def forced(u, forcing):
        return np.stack([np.sin(2 * u[:, 0]) + 0.3 * u[:, 1] + forcing[:, 0], u[:, 0]], axis=1)

    states = [np.zeros((1, 2))]
    for n in range(699):
        states.append(forced(states[-1], push[n : n + 1]))
    estimator = small(lambda u, f: 0.99 * forced(u, f), None, output=0).fit(
        np.concatenate(states), forcing=push
    )
    answer = estimator.assess(states[5], 5, forcing=push[5:10])
    assert answer.error_hat.shape == (1, 5, 1)
    assert estimator.fitted_.bound.layers

    series = np.sin(0.1 * np.arange(400))[:, None]
    model = WithMemory(lambda values, memory: (1.97 * values - memory, values), 1, 1)
    remembered = RolloutGeoQ(model, None, output=model.output, n_calibration=30)
    bound = remembered.fit(model.states(series)[1:]).bound(model.states(series)[200:202], 20)
    assert bound.shape == (2, 20, 1)
    assert np.isfinite(bound).all()


def test_large_states_have_members_and_no_companion():
    grids = np.repeat(STATES[:700], 101, axis=1)
    estimator = small(None, analogue, scheme=MemberGrowth(n_members=2)).fit(grids)
    assert len(estimator.fitted_.bound.step_errors) == 1
    assert replace(ALONE, n_members=2).companion is None
