"""Steps with a forcing, the output of a state, and models with memory, such as an echo state network."""

from functools import partial

import numpy as np
import pytest
from henon import STATES as HENON
from henon import STEP as HENON_STEP
from henon import TRAINING, analogue, driven, henon, pendulum, truth_of
from henon import fitted as fitted_henon
from henon import small as small_henon
from henon import train_forced as train
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GroupFolds, RolloutGeoQ, TrainedFolds
from geoq.parts import PaperRegion, WithMemory

small = partial(RolloutGeoQ, n_calibration=20, n_starts=20, n_support=5)


STATES, FORCING = driven(12, 100, seed=0)
DATA = {"trajectories": [*STATES], "forcing": [*FORCING]}
# After the transient, where most states of the data are.
QUERIES, FUTURE = (part[:, 40:] for part in driven(200, 61, seed=1))
STEP = train([*zip(STATES, FORCING, strict=True)])


@pytest.fixture(scope="module")
def fitted():
    return small(None, train).fit(**DATA)


def test_forcing_t_drives_the_step_from_state_t_to_the_next(fitted):
    a = fitted.assess(QUERIES[:3, 0], 20, forcing=FUTURE[:3, :20])
    state = QUERIES[:3, 0]
    for n in range(20):
        state = STEP(state, FUTURE[:3, n])
        assert_allclose(a.prediction[:, n], state, atol=1e-12)
    assert a.error_hat.shape == (3, 20, 2)
    common = fitted.bound(QUERIES[:5, 0], 20, forcing=FUTURE[0, :20])
    each = fitted.bound(QUERIES[:5, 0], 20, forcing=np.stack([FUTURE[0, :20]] * 5))
    assert_array_equal(common, each)


def test_every_coordinate_is_covered_and_few_horizons_are_broken(fitted):
    a = fitted.assess(QUERIES[:, 0], 20, 0.3, forcing=FUTURE[:, :20])
    error = abs(QUERIES[:, 1:] - a.prediction)
    covered = (error <= a.error_hat).mean(axis=(0, 1))
    assert (covered > 0.92).all()  # a companion that is nearly exact covers more than the quantile
    exceeded = np.maximum.accumulate((error > 0.3).any(axis=2), axis=1)
    assert (a.trusted_horizon > (~exceeded).sum(axis=1)).mean() <= 0.05
    assert 3 < a.trusted_horizon.mean() < 20


@pytest.mark.parametrize(("place", "value"), [(0, 2.0), (1, 0.9)])
def test_steps_from_a_forcing_outside_its_range_are_not_safe(fitted, place, value):
    forcing = FUTURE[:2, :20].copy()
    forcing[0, 4:6, place] = value
    inside = fitted.assess(QUERIES[:2, 0], 20, forcing=FUTURE[:2, :20])
    a = fitted.assess(QUERIES[:2, 0], 20, forcing=forcing)
    assert not a.safe[0, 4:].any()
    assert_array_equal(a.safe[0, :4], inside.safe[0, :4])
    assert_array_equal(a.safe[1], inside.safe[1])
    assert inside.safe[0].all()
    assert f"forcing {place} of step 5 is {value:g}, but it lies between" in a.reason(0)


def test_the_support_score_contains_the_forcing(fitted):
    states, forcing = driven(50, 21, seed=2, size=2.0)
    a = fitted.assess(states[:, 0], 20, forcing=forcing[:, :20])
    assert a.supported_horizon.mean() < 3
    assert not a.safe[:, -1].any()
    one, other = FUTURE[:1, :1].copy(), FUTURE[:1, :1].copy()
    one[..., 0], other[..., 0] = 0.0, 1.0
    near, far = (fitted.assess(QUERIES[:1, 0], 1, forcing=f).support_score for f in (one, other))
    assert far > near


def test_a_file_a_checkpoint_and_folds_trained_elsewhere_give_the_same_answers(fitted, tmp_path):
    path, grouped = tmp_path / "a.geoq", {"folds": GroupFolds()}
    fitted.save(path)
    loaded = RolloutGeoQ.load(path, surrogate=STEP)
    for _ in range(2):
        resumed = small(None, train).fit(**DATA, checkpoint=tmp_path / "folds")
    pairs = [*zip(STATES, FORCING, strict=True)]
    folds = [train(pairs[:i] + pairs[i + 1 :]) for i in range(12)]
    given = small(STEP, TrainedFolds(folds), **grouped).fit(**DATA)
    trained = small(STEP, train, **grouped).fit(**DATA)
    for one, other in ((fitted, loaded), (fitted, resumed), (given, trained)):
        a, b = (e.assess(QUERIES[:9, 0], 20, 0.3, forcing=FUTURE[:9, :20]) for e in (one, other))
        assert_array_equal(a.error_hat, b.error_hat)
        assert_array_equal(a.trusted_horizon, b.trusted_horizon)
    with pytest.raises(ValueError, match="surrogate differs"):
        RolloutGeoQ.load(path, surrogate=lambda u, f: STEP(u, f) + 0.1 * f)


def test_a_representation_receives_states_and_forcing():
    def phi(states, forcing):
        assert states.shape[1:] == forcing.shape[1:] == (2,)
        return np.hstack([np.sin(states), forcing])

    estimator = small(STEP, None, representation=phi, safe_region=PaperRegion()).fit(**DATA)
    assert estimator.bound(QUERIES[:2, 0], 5, forcing=FUTURE[:2, :5]).shape == (2, 5, 2)
    assert estimator.fitted_.calibration.features.displacement.shape[2:] == (4,)


def test_a_network_is_trained_on_rollouts_with_their_forcing():
    from geoq import MLP, Training, TrainRollout

    recipe = TrainRollout(
        partial(MLP, 4, 2, hidden=(16,)),
        training=Training(n_steps=100, learning_rate=1e-2),
        n_rollout=3,
        fine_tuning=Training(n_steps=50),
    )
    surrogate = recipe([*zip(STATES, FORCING, strict=True)])
    states, forcing = QUERIES[:, 0], FUTURE[:, 0]
    error = abs(surrogate(states, forcing) - QUERIES[:, 1]).mean()
    ignorant = abs(surrogate(states, 0 * forcing) - QUERIES[:, 1]).mean()
    assert error < 0.05
    assert error < ignorant / 2


WITH_NAN = [FORCING[0].copy(), *FORCING[1:]]
WITH_NAN[0][3, 1] = np.nan


@pytest.mark.parametrize(("forcing", "message"), [
    (FORCING, r"can be 12 trajectories or one of 12 times; pass list\(forcing\) or \[forcing\]"),
    ([*FORCING[:3]], r"forcing has \[100, 100, 100\] rows, but the trajectories have \[100, "),
    ([f[:-1] for f in FORCING], r"forcing has \[99, .* one row per state"),
    ([*FORCING[..., 0]], r"forcing\[0\] has shape \(100,\)"),
    (WITH_NAN, r"forcing\[0\]\[3, 1\] is nan"),
    (None, "missing 1 required positional argument: 'forcing'"),
])  # fmt: skip
def test_an_unusable_forcing_is_refused_before_any_training(forcing, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small(STEP, lambda _: pytest.fail("trained")).fit([*STATES], forcing=forcing)


@pytest.mark.parametrize(("forcing", "message"), [
    (None, r"forcing=None, but 2 rollouts of n_steps=20 need \(2, 20, 2\), or \(20, 2\)"),
    (FUTURE[:2, :19], r"shape \(2, 19, 2\), but 2 rollouts of n_steps=20"),
    (FUTURE[:3, :20], r"shape \(3, 20, 2\)"),
    (np.full((20, 2), np.nan), "is nan"),
])  # fmt: skip
def test_an_unusable_forcing_of_queries_is_refused(fitted, forcing, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fitted.assess(QUERIES[:2, 0], 20, forcing=forcing)
    with pytest.raises(ValueError, match="fit received no forcing"):
        fitted_henon().assess(HENON[:2], 20, forcing=FUTURE[:2, :20])


# The output of a state


@pytest.mark.parametrize(("output", "columns"), [
    (-1, [1]),
    (slice(0, 1), [0]),
    ([1, 0], [1, 0]),
    (np.array([True, False]), [0]),
    (slice(None), [0, 1]),
], ids=str)  # fmt: skip
def test_the_output_has_the_prediction_and_the_bound_of_its_coordinates(output, columns):
    whole = fitted_henon().assess(HENON[700:720], 50)
    part = small_henon(None, analogue, output=output).fit(TRAINING)
    a = part.assess(HENON[700:720], 50, tolerance=np.ones(len(columns)))
    assert_array_equal(a.prediction, whole.prediction[..., columns])
    assert a.error_hat.shape == a.prediction.shape
    assert_array_equal(a.support_score, whole.support_score)
    truth = truth_of(HENON, 700, 20, 50)
    assert (abs(truth[..., columns] - a.prediction) <= a.error_hat).mean() > 0.9


def test_a_file_keeps_the_output(tmp_path):
    grids, path = TRAINING[:, :, None] * np.ones((1, 1, 3)), tmp_path / "part.geoq"
    step = analogue([grids[:300]])
    estimator = small_henon(step, None, output=(slice(None), [0, 2])).fit([grids[300:]])
    estimator.save(path)
    loaded = RolloutGeoQ.load(path, surrogate=step)
    assert estimator.bound(grids[:3], 4).shape == (3, 4, 2, 2)
    assert_array_equal(estimator.bound(grids[:3], 4), loaded.bound(grids[:3], 4))
    assert repr(loaded) == repr(estimator)


@pytest.mark.parametrize(
    "output", [2, [], lambda s: s[:, -1:], "x", (0, 0)], ids=["2", "[]", "function", "x", "pair"]
)
def test_unusable_outputs_are_refused(output):
    with pytest.raises(ValueError, match=r"output=.* states have shape \(2,\); pass an index"):
        small_henon(HENON_STEP, None, output=output).fit(TRAINING)


# Models with memory

SERIES = henon(1400)[:, :1]


def test_the_memory_of_a_state_is_the_memory_after_the_values_before_it():
    """Here it is the sum of these values, for arrays and for tensors."""
    import torch

    model = WithMemory(lambda u, m: (u, u + m), n_values=1, n_memory=1)
    for values in (SERIES[:9], torch.from_numpy(SERIES[:9])):
        states = model.states(values)
        assert type(states) is type(values)
        assert_allclose(states, np.hstack([SERIES[:9], SERIES[:9].cumsum(0) - SERIES[:9]]))


def test_a_step_with_memory_can_be_forced():
    def step(values, memory, forcing):
        state = pendulum(np.hstack([values, memory]), forcing)
        return state[:, :1], 0.99 * state[:, 1:]

    model = WithMemory(step, n_values=1, n_memory=1)
    states = model.states(STATES[0, :, :1], FORCING[0])
    assert states.shape == (100, 2)
    estimator = small(model, None, output=model.output, n_calibration=10)
    estimator.fit(states, forcing=FORCING[0])
    assert estimator.bound(states[:4], 5, forcing=FORCING[0, :5]).shape == (4, 5, 1)


def reservoir(n=30):
    """The fixed weights of an echo state network."""
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((n, n))
    inner *= 0.5 / abs(np.linalg.eigvals(inner)).max()
    return inner, rng.uniform(-1, 1, (1, n))


INNER, OUTER = reservoir()


def echo(readout):
    """The step of an echo state network with this readout."""

    def step(values, memory):
        memory = np.tanh(memory @ INNER + values @ OUTER)
        # Without the limits, rollouts of the map run off.
        return np.clip(memory @ readout, -1.5, 1.5), memory

    return WithMemory(step, n_values=1, n_memory=30)


def train_readout(segments):
    """Fit the readout: the reservoir is the same in all folds."""
    memory = np.concatenate([segment[1:, 1:] for segment in segments])
    values = np.concatenate([segment[1:, :1] for segment in segments])
    gram = memory.T @ memory + 1e-8 * np.eye(30)
    return echo(np.linalg.solve(gram, memory.T @ values))


def test_the_readout_of_an_echo_state_network_can_be_trained_for_each_fold():
    model = echo(np.zeros((30, 1)))
    states = model.states(SERIES)[50:]
    estimator = small_henon(None, train_readout, output=model.output, n_starts=60)
    a = estimator.fit(states[:1000]).assess(states[1000:1300], 40, tolerance=0.3)
    truth = truth_of(states[:, :1], 1000, 300, 40)
    assert (abs(truth - a.prediction) <= a.error_hat).mean(axis=0).min() > 0.88
    assert (a.trusted_horizon > 0).mean() > 0.9


class Echo:
    """An echo state network in the usual form: a batch is a sequence, and the memory stays after the call."""

    def __init__(self):
        self.memory = np.zeros((1, 30))

    def __call__(self, values):
        rows = []
        for row in values:
            self.memory = np.tanh(self.memory @ INNER + row[None] @ OUTER)
            rows.append(self.memory[0, :1])
        return np.array(rows)


@pytest.mark.parametrize(
    "models",
    [(Echo(), None), (None, lambda segments: Echo()), (np.cos, lambda segments: Echo())],
    ids=["given", "deployed", "fold"],
)
def test_a_step_that_remembers_is_refused_with_the_way_out(models):
    with pytest.raises(ValueError, match=r"answers to the same.*WithMemory\(step"):
        small_henon(*models).fit(SERIES)


@pytest.mark.parametrize(("step", "message"), [
    (lambda u, m: u, "step returned ndarray, but WithMemory needs two arrays"),
    (lambda u, m: (u, m[:, :1]), r"memory of shape \(1, 1\).*n_memory=2"),
    (lambda u, m: (m, m), r"values of shape \(1, 2\).*n_values=1"),
])  # fmt: skip
def test_unusable_steps_with_memory_are_refused(step, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WithMemory(step, n_values=1, n_memory=2).states(SERIES)
    with pytest.raises(ValueError, match="pass one trajectory at a time"):
        WithMemory(step, n_values=1, n_memory=2).states(HENON)
