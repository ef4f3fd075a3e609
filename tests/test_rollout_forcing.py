from functools import partial

import numpy as np
import pytest
import torch
from henon import analogue

from benchmarks.rollouts import forced
from geoq import MLP, GroupFolds, RolloutGeoQ, TrainedFolds, Training
from geoq.rollout import TrainRollout, WithMemory

small = partial(RolloutGeoQ, n_calibration=20, n_starts=20, n_support=5)


def pendulum(state, forcing):
    """One step of a damped pendulum; the second value of the forcing is a constant parameter, the damping."""
    angle, speed = state[..., 0], state[..., 1]
    force, damping = forcing[..., 0], forcing[..., 1]
    speed = speed + 0.2 * (force - np.sin(angle) - damping * speed)
    return np.stack([angle + 0.2 * speed, speed], axis=-1)


def driven(n_trajectories, n_times, seed, *, size=1.0):
    """Trajectories with a random force and their own damping, and the forcing."""
    rng = np.random.default_rng(seed)
    states = rng.uniform(-1, 1, (n_trajectories, n_times, 2))
    forcing = size * rng.uniform(-1, 1, (n_trajectories, n_times, 2))
    forcing[..., 1] = rng.uniform(0.2, 0.6, (n_trajectories, 1))
    for t in range(n_times - 1):
        states[:, t + 1] = pendulum(states[:, t], forcing[:, t])
    return states, forcing


def train(segments):
    """A linear step of the state and the forcing, which errs by the nonlinearity of the sine."""
    before = np.concatenate([np.hstack([s[:-1], f[:-1]]) for s, f in segments])
    after = np.concatenate([s[1:] for s, _ in segments])
    matrix = np.linalg.lstsq(before, after)[0]
    return lambda state, forcing: np.hstack([state, forcing]) @ matrix


STATES, FORCING = driven(12, 100, seed=0)
# After the transient, where most states of the data are.
QUERIES, FUTURE = (part[:, 40:] for part in driven(200, 61, seed=1))
STEP = train([*zip(STATES, FORCING, strict=True)])


@pytest.fixture(scope="module")
def fitted():
    return small(None, train).fit([*STATES], forcing=[*FORCING])


def test_forcing_t_drives_the_step_from_state_t_to_the_next(fitted):
    a = fitted.assess(QUERIES[:3, 0], 20, forcing=FUTURE[:3, :20])
    state = QUERIES[:3, 0]
    for n in range(20):
        state = STEP(state, FUTURE[:3, n])
        np.testing.assert_allclose(a.prediction[:, n], state, atol=1e-12)
    assert a.error_hat.shape == (3, 20, 2)


def test_every_coordinate_is_covered_and_few_horizons_are_broken(fitted):
    a = fitted.assess(QUERIES[:, 0], 20, 0.3, forcing=FUTURE[:, :20])
    error = abs(QUERIES[:, 1:] - a.prediction)
    covered = (error <= a.error_hat).mean(axis=(0, 1))
    assert (abs(covered - 0.95) < 0.03).all()
    exceeded = np.maximum.accumulate((error > 0.3).any(axis=2), axis=1)
    kept = (~exceeded).sum(axis=1)
    assert (a.trusted_horizon > kept).mean() <= 0.05
    assert 3 < a.trusted_horizon.mean() < 20


@pytest.mark.parametrize(("place", "value"), [(0, 2.0), (1, 0.9)])
def test_steps_from_a_forcing_outside_its_range_are_not_safe(fitted, place, value):
    forcing = FUTURE[:2, :20].copy()
    forcing[0, 4:6, place] = value
    inside = fitted.assess(QUERIES[:2, 0], 20, forcing=FUTURE[:2, :20])
    a = fitted.assess(QUERIES[:2, 0], 20, forcing=forcing)
    assert not a.safe[0, 4:].any()
    np.testing.assert_array_equal(a.safe[0, :4], inside.safe[0, :4])
    np.testing.assert_array_equal(a.safe[1], inside.safe[1])
    assert inside.safe[0].all()
    assert f"forcing {place} of step 5 is {value:g}, but it lies between" in a.reason(0)


def test_a_forcing_that_is_twice_as_large_is_not_supported(fitted):
    states, forcing = driven(50, 21, seed=2, size=2.0)
    a = fitted.assess(states[:, 0], 20, forcing=forcing[:, :20])
    assert a.supported_horizon.mean() < 3
    assert not a.safe[:, -1].any()


def test_the_support_score_contains_the_forcing(fitted):
    one, other = FUTURE[:1, :1].copy(), FUTURE[:1, :1].copy()
    one[..., 0], other[..., 0] = 0.0, 1.0
    scores = [
        fitted.assess(QUERIES[:1, 0], 1, forcing=f).support_score for f in (one, other)
    ]
    assert scores[1] > scores[0]


def test_a_common_forcing_equals_the_same_forcing_for_every_rollout(fitted):
    common = fitted.bound(QUERIES[:5, 0], 20, forcing=FUTURE[0, :20])
    each = fitted.bound(QUERIES[:5, 0], 20, forcing=np.stack([FUTURE[0, :20]] * 5))
    np.testing.assert_array_equal(common, each)


def test_forced_steps_have_the_answers_of_states_that_contain_the_parameter():
    """A parameter that stays constant can be a part of the state; then it is bounded unless ``output`` leaves it out."""
    states, forcing = STATES.copy(), FORCING.copy()
    forcing[..., 0] = 0.0
    for t in range(99):
        states[:, t + 1] = pendulum(states[:, t], forcing[:, t])
    joined = [*np.concatenate([states, forcing], axis=2)]

    def step(rows):
        return np.hstack([STEP(rows[:, :2], rows[:, 2:]), rows[:, 2:]])

    one = small(STEP, None).fit([*states], forcing=[*forcing])
    other = small(step, None, output=slice(0, 2)).fit(joined)
    a = one.assess(states[:3, 0], 20, 0.3, forcing=forcing[:3, :20])
    b = other.assess(np.stack(joined)[:3, 0], 20, 0.3)
    np.testing.assert_array_equal(a.error_hat, b.error_hat)
    np.testing.assert_array_equal(a.trusted_horizon, b.trusted_horizon)


def test_nan_in_an_initial_state_has_no_answer_and_the_others_have(fitted):
    x0 = QUERIES[:3, 0].copy()
    x0[1, 0] = np.nan
    a = fitted.assess(x0, 20, forcing=FUTURE[:3, :20])
    assert np.isnan(a.error_hat[1]).all()
    assert "coordinate 0 is nan" in a.reason(1)
    whole = fitted.bound(QUERIES[:3, 0], 20, forcing=FUTURE[:3, :20])
    np.testing.assert_array_equal(a.error_hat[[0, 2]], whole[[0, 2]])


def test_a_file_a_checkpoint_and_folds_trained_elsewhere_give_the_same_answers(
    fitted, tmp_path
):
    fitted.save(tmp_path / "a.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "a.geoq", surrogate=STEP)
    data = {"trajectories": [*STATES], "forcing": [*FORCING]}
    for _ in range(2):
        resumed = small(None, train).fit(**data, checkpoint=tmp_path / "folds")
    pairs = [*zip(STATES, FORCING, strict=True)]
    folds = [train(pairs[:i] + pairs[i + 1 :]) for i in range(12)]
    given = small(STEP, TrainedFolds(folds), folds=GroupFolds()).fit(**data)
    trained = small(STEP, train, folds=GroupFolds()).fit(**data)
    for one, other in ((fitted, loaded), (fitted, resumed), (given, trained)):
        a, b = (
            geoq.assess(QUERIES[:9, 0], 20, 0.3, forcing=FUTURE[:9, :20])
            for geoq in (one, other)
        )
        np.testing.assert_array_equal(a.error_hat, b.error_hat)
        np.testing.assert_array_equal(a.trusted_horizon, b.trusted_horizon)
    with pytest.raises(ValueError, match="surrogate"):
        RolloutGeoQ.load(
            tmp_path / "a.geoq", surrogate=lambda u, f: STEP(u, f) + 0.1 * f
        )


def test_fields_of_tensors_can_be_forced():
    """A state with two channels on three cells, and one scalar forcing."""
    states = torch.from_numpy(np.repeat(STATES[..., None], 3, axis=3)).float()
    forcing = torch.from_numpy(FORCING)

    def step(state, forcing):
        assert state.dtype == forcing.dtype == torch.float32
        assert state.shape[1:] == (2, 3)
        rows = torch.from_numpy(STEP(state[:, :, 0].numpy(), forcing.numpy()))
        return rows[:, :, None].expand(-1, -1, 3)

    geoq = small(step, None).fit([*states], forcing=[*forcing])
    a = geoq.assess(states[:2, 0], 20, forcing=forcing[0, :20])
    assert a.error_hat.shape == (2, 20, 2, 3)
    assert a.error_hat.dtype == torch.float32


def test_initial_states_on_a_grid_are_tested_without_their_forcing():
    rng, place = np.random.default_rng(0), np.linspace(0, 2 * np.pi, 16, endpoint=False)
    force = 0.1 * rng.standard_normal((300, 2))
    wave = np.exp(0.3j * np.arange(300)[:, None])
    both = np.concatenate([np.exp(1j * place), np.exp(2j * place)])
    states = np.real(wave * both).reshape(-1, 2, 16)
    states += 0.1 * rng.standard_normal(states.shape)

    def step(x, u):
        return np.roll(x, 1, axis=2) + u[:, :, None]

    geoq = RolloutGeoQ(step, None, n_calibration=10).fit(states, forcing=force)
    assert geoq.safe_region_.initial.coordinates.input_shape == (2, 16)
    x0 = np.concatenate([states[:40], 2 * states[:40]])
    safe = geoq.assess(x0, 3, forcing=force[:3]).safe[:, 0]
    assert safe[:40].mean() > 0.8
    assert safe[40:].mean() < 0.1


def test_a_network_is_trained_on_rollouts_with_their_forcing():
    training = Training(n_steps=100, learning_rate=1e-2)
    recipe = TrainRollout(
        partial(MLP, 4, 2, hidden=(16,)),
        training=training,
        n_rollout=3,
        fine_tuning=Training(n_steps=50),
    )
    surrogate = recipe([*zip(STATES, FORCING, strict=True)])
    states, forcing = QUERIES[:, 0], FUTURE[:, 0]
    error = abs(surrogate(states, forcing) - QUERIES[:, 1]).mean()
    ignorant = abs(surrogate(states, 0 * forcing) - QUERIES[:, 1]).mean()
    assert error < 0.05
    assert error < ignorant / 2


def test_a_step_with_memory_can_be_forced():
    def step(values, memory, forcing):
        state = pendulum(np.hstack([values, memory]), forcing)
        return state[:, :1], 0.99 * state[:, 1:]

    model = WithMemory(step, n_values=1, n_memory=1)
    states = model.states(STATES[0, :, :1], FORCING[0])
    assert states.shape == (100, 2)
    geoq = small(model, None, output=model.output, n_calibration=10)
    geoq.fit(states, forcing=FORCING[0])
    assert geoq.bound(states[:4], 5, forcing=FORCING[0, :5]).shape == (4, 5, 1)


WITH_NAN = [FORCING[0].copy(), *FORCING[1:]]
WITH_NAN[0][3, 1] = np.nan


@pytest.mark.parametrize(
    ("forcing", "message"),
    [
        (FORCING, "forcing is a ndarray, but trajectories is a list"),
        ([*FORCING[:3]], "forcing has 3 arrays, but there are 12 trajectories"),
        ([f[:-1] for f in FORCING], r"forcing\[0\] has 99 rows, but .* 100 states"),
        ([*FORCING[..., 0]], r"forcing\[0\] has shape \(100,\)"),
        (WITH_NAN, r"forcing\[0\]\[3, 1\] is nan"),
        ([*torch.from_numpy(FORCING)], "forcing is a Tensor, but the trajectories"),
        (None, "pass forcing to fit as well"),
    ],
)
def test_an_unusable_forcing_is_refused_before_any_training(forcing, message):
    def never(segments):
        raise AssertionError

    with pytest.raises((TypeError, ValueError), match=message):
        small(STEP, never).fit([*STATES], forcing=forcing)


def test_a_step_of_states_alone_is_refused_if_there_is_a_forcing():
    step = analogue([STATES[0]])
    for models in ((step, None), (None, lambda segments: step)):
        with pytest.raises(TypeError, match="let it take both"):
            small(*models).fit([*STATES], forcing=[*FORCING])


@pytest.mark.parametrize(
    ("forcing", "message"),
    [
        (None, r"fit received a forcing of shape \(2,\) per state"),
        (FUTURE[:2, :19], r"shape \(2, 19, 2\), but 2 rollouts of n_steps=20"),
        (FUTURE[:3, :20], r"shape \(3, 20, 2\)"),
        (FUTURE[:2, :20, :1], r"shape \(2, 20, 1\)"),
        (np.full((20, 2), np.nan), "is nan"),
        (torch.zeros(20, 2), "forcing is a Tensor"),
    ],
)
def test_an_unusable_forcing_of_queries_is_refused(fitted, forcing, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fitted.assess(QUERIES[:2, 0], 20, forcing=forcing)


def test_a_forcing_of_an_estimator_without_forcing_is_refused():
    geoq = small(None, analogue).fit([*STATES])
    with pytest.raises(ValueError, match="fit received no forcing"):
        geoq.assess(QUERIES[:2, 0], 20, forcing=FUTURE[:2, :20])


def test_the_benchmark_shows_that_a_parameter_outside_its_range_is_never_safe(
    monkeypatch,
):
    for name, value in {"N_RUNS": 10, "N_FRESH": 40, "N_STEPS": 20}.items():
        monkeypatch.setattr(forced, name, value)
    inside, near, far = forced.measure(forced.SYSTEMS[1], seed=0)
    assert inside["safe"] > 0.7
    assert near["safe"] == far["safe"] == 0
    assert "| rho from 38 to 40 |" in forced.summary([inside, near, far])
