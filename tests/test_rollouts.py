"""RolloutGeoQ: the answer, the folds, files and refusals."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import fresh
from henon import (
    QUERIES,
    STATES,
    STEP,
    TRAINING,
    analogue,
    fitted,
    henon,
    same_answers,
    small,
    truth_of,
)
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.exceptions import NotFittedError

from geoq import (
    ClusterFolds,
    GeoQ,
    GroupFolds,
    PredictedFolds,
    Region,
    RolloutGeoQ,
    TemporalFolds,
    TrainedFolds,
)
from geoq.parts import MemberGrowth, Norm, PaperRegion, Relative, RolloutRegion
from geoq.rollout.series import Series, roll_out

FAR = np.array([[40.0, 40.0]])


# The answer


def test_the_answer_at_index_n_minus_1_is_step_n_which_starts_from_state_n_minus_1():
    a = fitted().assess(QUERIES[:3], 5)
    assert_array_equal(a.prediction[:, 0], STEP(QUERIES[:3]))
    assert_array_equal(a.prediction[:, 1], STEP(a.prediction[:, 0]))
    assert a.prediction.shape == a.error_hat.shape == (3, 5, 2)
    assert a.safe.shape == a.support_score.shape == (3, 5)
    assert_array_equal(fitted().bound(QUERIES[:3], 5), a.error_hat)
    a = fitted().assess(QUERIES, 3)
    scaled = (a.prediction[:, :1] - TRAINING) / TRAINING.std(axis=0)
    # The nearest 5 of 560 states in a fold correspond to the nearest 6 of all 700 states.
    nearest = np.sort(np.linalg.norm(scaled, axis=2), axis=1)[:, :6].mean(axis=1)
    threshold = fitted().fitted_.region.threshold
    # The score of a step is the largest one so far.
    assert_allclose(a.support_score[:, 1], np.maximum(a.support_score[:, 0], nearest / threshold))
    assert (nearest / threshold > a.support_score[:, 0]).any()


def test_coverage_is_near_the_quantile_level_in_every_quarter():
    states = henon(2600)
    a = small(None, analogue).fit(states[:2000]).assess(states[2000:2540], 60)
    covered = abs(truth_of(states, 2000, 540, 60) - a.prediction) <= a.error_hat
    by_step = covered.mean(axis=(0, 2))
    assert abs(by_step.mean() - 0.95) < 0.02
    # The companion is exact for this map, so the first errors are nearly equal to their bounds.
    assert (abs(by_step.reshape(4, -1).mean(axis=1) - 0.95) < 0.06).all()


def test_tensors_networks_and_fields_are_answered_in_their_kind():
    import torch

    states = torch.from_numpy(STATES)
    ours = small(None, analogue).fit(states[:700]).assess(states[700:720], 50, 0.5)
    theirs = fitted().assess(QUERIES, 50, 0.5)
    assert isinstance(ours.error_hat, torch.Tensor)
    assert_allclose(ours.error_hat, theirs.error_hat)
    assert_array_equal(ours.trusted_horizon, theirs.trusted_horizon)
    from torch import nn

    network, states = fresh(nn.Linear, 2, 2), TRAINING.astype(np.float32)
    a = small(network, None).fit(states).assess(states[:3], 1)
    expected = states[:3] @ network.weight.detach().numpy().T + network.bias.detach().numpy()
    assert_allclose(a.prediction[:, 0], expected, rtol=1e-6)
    assert a.error_hat.dtype == a.support_score.dtype == np.float32
    grids = [henon(301, seed)[:, :, None] * np.ones((1, 1, 3)) for seed in range(3)]
    estimator = small(None, analogue, folds=GroupFolds()).fit(grids)
    assert estimator.bound(grids[0][:2], 4).shape == (2, 4, 2, 3)
    assert {*estimator.fitted_.calibration.fold.tolist()} == {0, 1, 2}


def test_chunks_and_other_rollouts_do_not_change_the_answer(monkeypatch):
    whole = fitted().assess(QUERIES, 10)
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 60)
    parts = fitted().assess(QUERIES, 10)
    assert_allclose(parts.error_hat, whole.error_hat, rtol=1e-12)
    assert_array_equal(parts.safe, whole.safe)


def test_a_rollout_without_an_answer_leaves_the_others_as_they_are():
    x0 = QUERIES[:4].copy()
    x0[1, 0], x0[3, 1] = np.nan, np.inf
    a, whole = fitted().assess(x0, 5, 0.5), fitted().assess(QUERIES[:4], 5, 0.5)
    assert a.lost.tolist() == [False, True, False, True]
    for name in ("prediction", "error_hat", "support_score"):
        assert np.isnan(getattr(a, name)[1]).all()
        assert_array_equal(getattr(a, name)[::2], getattr(whole, name)[::2])
    assert not a.safe[1].any()
    assert a.trusted_horizon[1] == a.supported_horizon[1] == 0
    text = "no error bound, not trusted\n  initial state: coordinate 0 is nan; replace"
    assert text in a.reason(1)
    none = fitted().assess(np.full((2, 2), np.nan), 5)
    assert none.lost.all()
    assert none.error_hat.shape == (2, 5, 2)


def test_an_initial_state_that_changes_a_constant_coordinate_is_never_safe():
    padded = np.hstack([STATES, np.full((900, 1), 7.0)])
    estimator = small(None, analogue).fit(padded[:700])
    changed = padded[700:702].copy()
    changed[0, 2] = 7.1
    a = estimator.assess(changed, 3)
    assert not a.safe[0].any()
    assert a.safe[1, 0]
    assert "coordinate 2 is 7.1, but it is 7 in all the data" in a.reason(0)


# Horizons


def test_the_trusted_horizon_ends_before_the_first_unsafe_or_uncertain_step_or_at_the_calibration_horizon():
    x0 = np.concatenate([QUERIES, FAR])
    a = fitted().assess(x0, 40, tolerance=0.5)
    ratio = (a.error_hat / 0.5).max(axis=2)
    assert_allclose(a.bound_over_tolerance, ratio)
    trusted = a.safe & (ratio <= 1) & (ratio < np.array(a.trust.largest_ratio))
    expected = [np.flatnonzero(~row)[0] if not row.all() else 40 for row in trusted]
    assert_array_equal(a.trusted_horizon, expected)
    assert a.trusted_horizon[-1] == 0
    assert "not trusted" in a.reason(20)
    assert "NOT safe, the initial state is off the surface" in a.reason(20)
    each = fitted().assess(x0, 40, tolerance=np.array([0.5, 0.5]))
    assert_array_equal(each.trusted_horizon, a.trusted_horizon)
    # No error was measured past it, however large the tolerance.
    a = fitted().assess(QUERIES, 60, tolerance=1e6)
    lasting = np.flatnonzero(a.supported_horizon >= 40)
    assert len(lasting)
    assert (a.trusted_horizon[lasting] == 40).all()
    assert "step 41: past the calibration horizon" in a.reason(int(lasting[0]))


def test_horizons_grow_with_steps_and_tolerances_which_can_be_relative():
    few, many = (fitted().assess(QUERIES, n, 1.0) for n in (6, 40))
    assert few.trust == many.trust
    assert_array_equal(few.trusted_horizon, many.trusted_horizon.clip(max=6))
    assert many.trusted_horizon.max() > 6
    assert fitted().assess(QUERIES, 40, 0.01).trusted_horizon.max() < many.trusted_horizon.max()
    relative = fitted().assess(QUERIES, 20, Relative(0.3))
    numbers = 0.3 * TRAINING.std(axis=0)
    assert_allclose(relative.tolerance, numbers)
    given = fitted().assess(QUERIES, 20, numbers)
    assert_array_equal(relative.trusted_horizon, given.trusted_horizon)
    assert relative.trusted_horizon.max() > 0
    # A coordinate without spread has no tolerance.
    padded = np.hstack([TRAINING, np.full((len(TRAINING), 1), 7.0)])
    a = small(None, analogue, output=[0, 2]).fit(padded).assess(padded[:3], 5, Relative(0.3))
    assert_allclose(a.tolerance, [0.3 * TRAINING[:, 0].std(), np.inf])


def test_a_tolerance_of_the_root_mean_square_has_its_own_bound_and_words():
    numbers, a = 0.2 * TRAINING.std(axis=0), fitted().assess(QUERIES, 45, Norm(Relative(0.2)))
    factor = np.append(a.trust.factor, [a.trust.factor[-1]] * 5)
    ratio = np.sqrt(((a.error_hat / numbers) ** 2).mean(axis=2)) * factor
    assert_allclose(a.bound_over_tolerance, ratio)
    trusted = a.safe[:, :40] & (ratio[:, :40] <= np.array(a.trust.largest_ratio))
    assert_array_equal(a.trusted_horizon, trusted.cumprod(axis=1).sum(axis=1))
    assert "trusted to the end (tolerance of the root mean square error)" in repr(a)
    early = int((a.trusted_horizon < a.supported_horizon.clip(max=40)).argmax())
    for text in ("tolerance of the root mean square error within", "the bound of the root"):
        assert text in a.reason(early)


def test_the_joint_band_is_the_bound_times_one_factor():
    a = fitted().assess(QUERIES, 10)
    band = a.joint_band(5, confidence=0.8)
    factor = fitted().fitted_.held_out.joint_factor(5, 0.8)
    assert_allclose(band, factor * a.error_hat[:, :5])
    assert a.joint_band(confidence=0.5).shape == a.error_hat.shape
    with pytest.raises(ValueError, match="n_steps=11, but the rollouts were assessed"):
        a.joint_band(11, confidence=0.5)


def test_without_a_tolerance_there_is_only_a_supported_horizon():
    a = fitted().assess(np.concatenate([QUERIES, FAR]), 60)
    assert a.trusted_horizon is a.trust is a.bound_over_tolerance is None
    assert_array_equal(a.supported_horizon, a.safe.cumprod(axis=1).sum(axis=1))
    for text in (repr(a), a.reason(0), a.reason(20)):
        assert "trust" not in text
        assert "no tolerance was given" in text
    assert "not supported" in a.reason(20)


# Rollouts that diverge


def explodes_from(threshold):
    """The map itself with a small error, and infinity where the first coordinate exceeds a threshold."""

    def step(x):
        good = np.stack([1 - 1.4 * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], axis=1)
        return np.where(x[:, :1] > threshold, np.inf, good * 1.001)

    return step


def test_the_bound_is_infinite_from_the_step_at_which_the_surrogate_diverges():
    with pytest.warns(UserWarning, match=r"30 of 100 \(30 %\) calibration rollouts"):
        estimator = small(explodes_from(1.27), None).fit(TRAINING)
    a = estimator.assess(STATES[700:760], 80, 1e3)
    diverged = ~np.isfinite(a.prediction).all(axis=2)
    assert diverged.any()
    assert not diverged.all()
    first = np.where(diverged.any(axis=1), diverged.argmax(axis=1) + 1, 0)
    assert_array_equal(a.diverged_at, first)
    assert np.isinf(a.error_hat[diverged]).all()
    assert not a.safe[diverged].any()
    ended = [i for i in range(60) if first[i] == a.trusted_horizon[i] + 1]
    assert ended
    assert all("diverged" in a.reason(i) for i in ended)
    error = estimator.fitted_.calibration.error
    assert_array_equal(np.isnan(error[..., 0]), ~estimator.fitted_.calibration.features.alive)


def test_a_surrogate_that_diverges_is_neither_asked_nor_trusted_again():
    with pytest.warns(UserWarning, match=r"100 of 100 \(100 %\) calibration rollouts"):
        estimator = small(lambda x: 1.5 * x + 1, None).fit(TRAINING)
    a = estimator.assess(QUERIES, 50, 1e9)
    assert (a.diverged_at > 0).all()
    assert np.isinf(a.error_hat[:, -1]).all()
    assert (a.trusted_horizon < a.diverged_at).all()
    with pytest.raises(ValueError, match="all 100 calibration rollouts diverge at their first"):
        small(lambda x: 1e3 * x + 1e3, None).fit(TRAINING)

    def step(x):
        assert np.isfinite(x).all()
        return np.where(x > 0, 1e40, x)

    states = roll_out(step, np.array([[1.0], [-1.0]]), 3, 1e9)
    assert_array_equal(states[1], -np.ones((4, 1)))
    assert np.isnan(states[0, 1:]).all()


def test_rollouts_that_run_off_do_not_enlarge_the_safe_region():
    def drifts(speed):
        """A drift away from the data after the first coordinate has exceeded 1.27."""
        good = explodes_from(np.inf)
        return lambda x: np.where(x[:, :1] > 1.27, x + speed, good(x))

    calm = small(drifts(0.0), None).fit(TRAINING)
    with pytest.warns(UserWarning, match=r"30 of 100 \(30 %\).*\(up to 50 % in a fold"):
        wild = small(drifts(0.7), None).fit(TRAINING)
    assert wild.fitted_.region.threshold <= calm.fitted_.region.threshold
    assert wild.assess(3 * STATES[700:760], 5).safe[:, 0].mean() < 0.1
    a = wild.assess(STATES[700:760], 40)
    assert np.isfinite(a.error_hat[a.diverged_at == 0]).all()


# The estimator


# Folds


def test_rollouts_start_where_their_true_states_are_held_out_and_never_continue_elsewhere():
    series = Series.of(TRAINING)
    starts = series.starts(np.arange(100, 240), 40, 20)
    assert starts.min() >= 100
    assert (starts + 40 <= 239).all()
    scattered = series.starts(np.arange(0, 700, 7), 40, 20)
    assert len(scattered) == 20
    assert scattered.max() + 40 < 700
    series = Series.of([STATES[:100], STATES[100:300]])
    starts = series.starts(np.arange(300), 60, 300)
    assert (series.number[starts] == series.number[starts + 60]).all()
    runs = Series.of([STATES[:5], STATES[5:9]]).runs(np.array([8, 0, 1, 3, 4, 5, 6, 2]))
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3, 4], [5, 6]]


def test_folds_train_on_contiguous_segments_without_the_held_out_starts():
    trainings = []

    def recorded(segments):
        trainings.append(segments)
        return analogue(segments)

    trajectories = [henon(200, seed) for seed in range(3)]
    estimator = small(analogue(trajectories), recorded, folds=ClusterFolds(4)).fit(trajectories)
    calibration, states = estimator.fitted_.calibration, np.concatenate(trajectories)
    steps = {(tuple(a), tuple(b)) for one in trajectories for a, b in pairwise(one)}
    assert len(trainings) == 4
    for fold, segments in enumerate(trainings):
        seen = {tuple(state) for segment in segments for state in segment}
        assert not seen & set(map(tuple, states[calibration.start[calibration.fold == fold]]))
        for segment in segments:
            assert {(tuple(a), tuple(b)) for a, b in pairwise(segment)} <= steps


def test_the_steps_are_tuples_that_start_from_rows_of_the_data():
    trajectories = [henon(300, seed) for seed in range(3)]
    estimator = small(None, analogue, folds=GroupFolds(3)).fit(trajectories)
    tuples, states = estimator.fitted_.calibration.steps, np.concatenate(trajectories)
    points, first = tuples.points, np.arange(0, len(tuples), 40)
    assert_array_equal(tuples.features.inputs[first], points.inputs[tuples.point[first]])
    ends = np.array([299, 599, 899])
    assert np.isnan(points.outputs[ends]).all()
    assert_array_equal(np.delete(points.outputs, ends, 0), np.delete(states, [0, 300, 600], 0))
    for fold, (left_in, _) in enumerate(points.splits):
        own = tuples.fold == fold
        assert not set(left_in) & set(tuples.point[own].tolist())
        assert set(tuples.relation.anchors[own].reshape(-1)) <= set(left_in)


class Counting:
    """A recipe that counts its trainings, and is interrupted in one of them."""

    def __init__(self, interrupted_at=None):
        self.interrupted_at, self.n_calls = interrupted_at, 0

    def __getstate__(self):
        return {}

    def __call__(self, segments):
        self.n_calls += 1
        if self.n_calls == self.interrupted_at:
            raise KeyboardInterrupt
        return analogue(segments)


def test_an_interrupted_fit_continues_with_the_same_result(tmp_path):
    train = Counting(interrupted_at=3)
    estimator = small(STEP, train)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(TRAINING, checkpoint=tmp_path)
    assert not hasattr(estimator, "fitted_")
    estimator.fit(TRAINING, checkpoint=tmp_path)
    assert train.n_calls == 3 + 3  # two folds were complete, the third is trained again
    same_answers(estimator, small(STEP, analogue).fit(TRAINING))
    same_answers(estimator, small(STEP, train).fit(TRAINING, checkpoint=tmp_path))
    assert train.n_calls == 6


@pytest.mark.parametrize(("change", "difference"), [
    ({"n_calibration": 30}, "n_calibration was 40, now 30"),
    ({"folds": TemporalFolds(4)}, "folds was TemporalFolds"),
    ({}, r"lengths was \[700\], now \[350, 350\]"),
])  # fmt: skip
def test_the_checkpoint_of_another_calibration_is_refused(tmp_path, change, difference):
    small(STEP, analogue).fit(TRAINING, checkpoint=tmp_path)
    data = TRAINING if change else [TRAINING[:350], TRAINING[350:]]
    with pytest.raises(ValueError, match=difference):
        replace(small(STEP, analogue), **change).fit(data, checkpoint=tmp_path)


def test_a_fold_without_a_rollout_is_not_trained_and_keeps_its_number():
    """The second of three trajectories is too short for a rollout."""
    parts, seen = [henon(300), henon(20, seed=1), henon(300, seed=2)], []
    grouped = {"folds": GroupFolds(3), "n_starts": 40}
    small(STEP, analogue, **grouped).fit(parts, progress=seen.append)
    assert [progress.stage for progress in seen] == ["start", "fold 1 of 3", "fold 2 of 3"]
    assert seen[-1].n_done == seen[-1].n_trainings == 2
    # The surrogate with number n adds n / 1000, so the first step gives the number of the surrogate that was used.
    numbered = TrainedFolds([lambda x, n=n: x + n / 1000 for n in range(3)])
    calibration = small(STEP, numbered, **grouped).fit(parts).fitted_.calibration
    states = np.concatenate(parts)
    change = calibration.features.prediction[:, 0] - states[calibration.start]
    assert_allclose(1000 * change[:, 0], calibration.fold, atol=1e-9)


# Files

SURROGATE = analogue([STATES[:300]])


@pytest.mark.parametrize(("settings", "states"), [
    ({"quantile": 0.9, "scheme": MemberGrowth(n_members=4)}, STATES[300:800]),
    ({"representation": np.tanh, "safe_region": PaperRegion(3)}, STATES[300:800]),
    ({"safe_region": Region(quantile=0.8)}, STATES[300:800]),
    ({"output": 0, "folds": TemporalFolds(4)}, STATES[300:800].astype(np.float32)),
], ids=["MemberGrowth", "PaperRegion", "Region", "output"])  # fmt: skip
def test_a_loaded_estimator_gives_the_answers_of_the_saved_one(tmp_path, settings, states):
    path, phi = tmp_path / "rollout.geoq", settings.get("representation")
    estimator = small(SURROGATE, None, **settings).fit(states)
    estimator.save(path)
    loaded = RolloutGeoQ.load(path, surrogate=SURROGATE, representation=phi)
    same_answers(estimator, loaded)
    assert repr(loaded) == repr(estimator)
    assert loaded.describe() == estimator.describe()
    same_answers(estimator, loaded.fit(states))


def test_other_callables_and_other_classes_are_refused(tmp_path):
    path, region = tmp_path / "rollout.geoq", PaperRegion()
    estimator = small(SURROGATE, None, representation=np.tanh, safe_region=region)
    estimator.fit(STATES[300:800]).save(path)
    with pytest.raises(ValueError, match="surrogate differs from the surrogate of the file"):
        RolloutGeoQ.load(path, surrogate=analogue([STATES[:250]]), representation=np.tanh)
    with pytest.raises(
        ValueError, match="of your own as representation, which it does not contain"
    ):
        RolloutGeoQ.load(path, surrogate=SURROGATE)
    with pytest.raises(ValueError, match=r"load it with RolloutGeoQ\.load"):
        GeoQ.load(path, surrogate=SURROGATE)


def ridge_step(states):
    """A step that is linear in the monomials of the state, with an error of about 1e-3."""

    def monomials(x):
        return np.stack([np.ones(len(x)), x[:, 0], x[:, 1], x[:, 0] ** 2], axis=1)

    noise = 1e-3 * np.random.default_rng(0).normal(size=(len(states) - 1, 2))
    weights = np.linalg.lstsq(monomials(states[:-1]), states[1:] + noise)[0]
    return lambda x: monomials(x) @ weights


@pytest.mark.parametrize("large", [False, True])
def test_another_step_is_refused_if_it_differs_by_a_part_of_its_error(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr("geoq.rollout.horizon.MOST_STORED", 100)
    step, path = ridge_step(STATES[:300]), tmp_path / "rollout.geoq"
    estimator = small(step, None).fit(STATES[300:800])
    estimator.save(path)
    for same in (step, lambda x: step(x) * (1 + 1e-12)):
        loaded = RolloutGeoQ.load(path, surrogate=same)
    if large:  # a file of large states supports only one tolerance for all coordinates
        same_answers(estimator, RolloutGeoQ.load(path, surrogate=step))
        for tolerance in (np.array([0.2, 0.7]), Relative(0.1), Norm(0.5)):
            with pytest.raises(ValueError, match=r"the largest of the 2 errors.*lower n_starts"):
                loaded.assess(QUERIES, 50, tolerance)
    else:
        own, read = (e.assess(QUERIES, 9, Norm(Relative(0.3))) for e in (estimator, loaded))
        assert own.trust == read.trust
    for other in (ridge_step(STATES[:200]), lambda x: step(x) * (1 + 1e-4)):
        with pytest.raises(ValueError, match=r"which is \S+ % of the typical error"):
            RolloutGeoQ.load(path, surrogate=other)


# Refusals: the argument and its value, the fact that it conflicts with, what to do


def untouched(segments):
    raise AssertionError("a surrogate was trained")


class EverySecond:
    def split(self, points, y=None, groups=None):
        rows = np.arange(len(points))
        yield rows[::2], rows[1::2]


@pytest.mark.parametrize(("trajectories", "message"), [
    (STATES[:30], r"n_calibration=40, but the longest trajectory has 30 states"),
    ([STATES, STATES[:, :1]], r"trajectories\[1\] has shape \(900, 1\), but trajectories have"),
    ([], "empty list"),
    (STATES[:, 0], r"shape \(900,\).*with shape \(n_times, 1\)"),
    (np.where(STATES > 1.2, np.nan, STATES), "cut the trajectory there"),
    (STATES.astype(object), "dtype object"),
    ("states.npy", "must be a NumPy array, a torch tensor or another array, got str"),
    (np.stack([STATES[:100]] * 5), "pass several trajectories as a list"),
])  # fmt: skip
def test_unusable_trajectories_are_refused_before_any_training(trajectories, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small(None, untouched).fit(trajectories)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("settings", "message"), [
    ({"n_calibration": 0}, "n_calibration=0"),
    ({"n_starts": 2.5}, "n_starts=2.5"),
    ({"n_starts": 1}, "needs at least 19 calibration rollouts, but there are only 5"),
    ({"n_support": 800}, "n_support=800"),
    ({"safe_region": RolloutRegion}, "safe_region is the class RolloutRegion, but an object"),
    ({"safe_region": PaperRegion(701)}, "n_neighbors=701"),
    ({"scheme": MemberGrowth}, "pass for example scheme="),
    ({"folds": EverySecond()}, "no pair of consecutive states"),
    ({"surrogate": None, "train_surrogate": TrainedFolds([STEP])}, "does not train"),
    ({"train_surrogate": TrainedFolds([STEP] * 4)}, "TrainedFolds has 4 entries"),
    ({"train_surrogate": PredictedFolds([TRAINING])}, "pass TrainedFolds"),
    ({"surrogate": lambda x: x[:, :1]}, "must return the next state of each"),
    ({"surrogate": lambda x: x + np.random.default_rng().random(x.shape)}, "two answers"),
])  # fmt: skip
def test_unusable_settings_are_refused_before_any_training(settings, message):
    arguments = {"surrogate": STEP, "train_surrogate": untouched}
    with pytest.raises((ValueError, TypeError), match=message):
        small(**{**arguments, **settings}).fit(TRAINING)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("arguments", "message"), [
    ((QUERIES, 0), "n_steps=0"),
    ((QUERIES, 2.0), "n_steps=2.0"),
    ((QUERIES[0], 3), "first dimension of 1"),
    ((QUERIES[:0], 3), "at least one state"),
    ((QUERIES[:3, :1], 3), r"shape \(3, 1\)"),
    ((QUERIES, 3, 0.0), "tolerance=0.0, but a tolerance must be positive"),
    ((QUERIES, 3, Norm(np.nan)), r"tolerance=Norm\(tolerance=nan\), but a tolerance must be"),
    ((QUERIES, 3, Norm(Relative(-1))), r"Relative\(fraction=-1\)\), but .* must be positive"),
    ((QUERIES, 3, "10%"), r"tolerance='10%', but .*Relative\(0.1\) for 10 %"),
    ((QUERIES, 3, True), "tolerance=True, but"),
    ((QUERIES, 3, np.ones(3)), r"tolerance has shape \(3,\)"),
    ((QUERIES, 3, Norm(np.ones(3))), r"tolerance has shape \(3,\)"),
])  # fmt: skip
def test_unusable_arguments_of_assess_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fitted().assess(*arguments)


def test_assess_and_save_before_fit_recipes_of_pairs_and_other_rollouts_are_refused(tmp_path):
    for call in (lambda e: e.assess(QUERIES, 3), lambda e: e.save(tmp_path / "empty.geoq")):
        with pytest.raises(NotFittedError):
            call(small(None, untouched))
    with pytest.raises(TypeError) as caught:
        small(STEP, lambda x, y: STEP).fit(TRAINING)
    assert caught.value.__notes__[0].startswith("train_surrogate(segments) receives one list")
    with pytest.raises(IndexError, match="rollout=3, but 3 were assessed; choose 0 to"):
        fitted().assess(QUERIES[:3], 5).reason(3)


def test_steps_past_the_calibration_horizon_are_reported():
    estimator, starts = fitted(), QUERIES[:2]
    with pytest.warns(UserWarning, match="but errors were measured for .* steps, the calibration"):
        estimator.assess(starts, estimator.n_calibration + 1)
