import io
import sys

import numpy as np
import pytest
import torch
from henon import QUERIES, STATES, STEP, TRAINING, analogue, fitted, henon, small
from sklearn.base import clone

from geoq import ClusterFolds, GroupFolds, RandomFolds, SafeRegion, TemporalFolds
from geoq.metrics import coverage_by_lead
from geoq.rollout import SaturatingGrowth


def test_index_n_minus_1_of_the_answer_is_step_n():
    a = fitted().assess(QUERIES[:3], 5)
    np.testing.assert_array_equal(a.prediction[:, 0], STEP(QUERIES[:3]))
    np.testing.assert_array_equal(a.prediction[:, 1], STEP(a.prediction[:, 0]))
    assert a.prediction.shape == a.error_hat.shape == (3, 5, 2)
    assert a.safe.shape == a.support_score.shape == (3, 5)


def test_the_score_of_a_step_belongs_to_the_state_that_the_step_starts_from():
    a = fitted().assess(QUERIES, 3)
    scaled = (QUERIES[:, None] - TRAINING) / TRAINING.std(axis=0)
    # The nearest 5 of 560 states in a fold correspond to the nearest 6 of all 700 states.
    nearest = np.sort(np.linalg.norm(scaled, axis=2), axis=1)[:, :6].mean(axis=1)
    unlike = a.threshold * a.initial.ratio(torch.arange(len(QUERIES))).numpy()
    np.testing.assert_allclose(
        a.support_score[:, 0], np.maximum(nearest, unlike), rtol=1e-9
    )


def test_bound_returns_the_bound_of_assess():
    bound = fitted().bound(QUERIES, 60)
    np.testing.assert_array_equal(bound, fitted().assess(QUERIES, 60).error_hat)


def test_coverage_is_near_the_quantile_level_in_every_quarter():
    states = henon(2600)
    a = small(None, analogue).fit(states[:2000]).assess(states[2000:2540], 60)
    truth = np.stack([states[2000 + n : 2540 + n] for n in range(1, 61)], axis=1)
    by_step = coverage_by_lead(abs(truth - a.prediction), a.error_hat)
    assert abs(by_step.mean() - 0.95) < 0.02
    assert (abs(by_step.reshape(4, -1).mean(axis=1) - 0.95) < 0.04).all()


def test_tensors_and_numpy_arrays_give_the_same_answers(device):
    states = torch.from_numpy(STATES).to(device)
    ours = small(None, analogue).fit(states[:700]).assess(states[700:720], 50, 0.5)
    theirs = fitted().assess(QUERIES, 50, 0.5)
    assert ours.error_hat.device == states.device
    np.testing.assert_allclose(ours.error_hat.cpu(), theirs.error_hat)
    np.testing.assert_array_equal(ours.trusted_horizon.cpu(), theirs.trusted_horizon)


def test_single_precision_states_have_single_precision_bounds():
    single = STATES.astype(np.float32)
    assert small(None, analogue).fit(single[:700]).bound(single[700:], 3).dtype == (
        np.float32
    )


def test_states_can_be_fields_on_several_trajectories():
    grids = [henon(301, seed)[:, :, None] * np.ones((1, 1, 3)) for seed in range(3)]
    geoq = small(None, analogue, folds=GroupFolds()).fit(grids)
    assert geoq.bound(grids[0][:2], 4).shape == (2, 4, 2, 3)
    assert torch.equal(geoq.calibration_.fold.unique(), torch.arange(3))


def test_chunks_do_not_change_the_answer(monkeypatch):
    whole = fitted().assess(QUERIES, 10)
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 60)
    parts = fitted().assess(QUERIES, 10)
    np.testing.assert_allclose(parts.error_hat, whole.error_hat, rtol=1e-12)
    np.testing.assert_array_equal(parts.safe, whole.safe)


def explodes_from(threshold):
    """The map itself with a small error, and infinity where the first coordinate exceeds a threshold."""

    def step(x):
        good = np.stack([1 - 1.4 * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], axis=1)
        return np.where(x[:, :1] > threshold, np.inf, good * 1.001)

    return step


def test_the_bound_is_infinite_from_the_step_at_which_the_surrogate_diverges():
    with pytest.warns(UserWarning, match=r"30 of 100 \(30 %\) calibration rollouts"):
        geoq = small(explodes_from(1.27), None).fit(TRAINING)
    a = geoq.assess(STATES[700:760], 80, 1e3)
    diverged = ~np.isfinite(a.prediction).all(axis=2)
    assert diverged.any()
    assert not diverged.all()
    first = np.where(diverged.any(axis=1), diverged.argmax(axis=1) + 1, 0)
    np.testing.assert_array_equal(a.diverged_at, first)
    assert np.isinf(a.error_hat[diverged]).all()
    assert not a.safe[diverged].any()
    ended = [i for i in range(60) if first[i] == a.trusted_horizon[i] + 1]
    assert ended
    assert all("diverged" in a.reason(i) for i in ended)


def test_bounds_are_infinite_after_too_many_calibration_rollouts_have_diverged():
    step = explodes_from(np.quantile(STATES[:, 0], 0.99))
    with pytest.warns(UserWarning, match="leave the range of the data"):
        a = small(step, None).fit(TRAINING).assess(STATES[700:760], 80)
    assert np.isinf(a.error_hat[a.diverged_at > 0][:, -1]).all()
    assert np.isfinite(a.error_hat[a.diverged_at != 1][:, 0]).all()


def test_a_surrogate_that_always_diverges_is_never_trusted_past_its_divergence():
    with pytest.warns(UserWarning, match=r"100 of 100 \(100 %\) calibration rollouts"):
        geoq = small(lambda x: 1.5 * x + 1, None).fit(TRAINING)
    a = geoq.assess(QUERIES, 50, 1e9)
    assert (a.diverged_at > 0).all()
    assert np.isinf(a.error_hat[:, -1]).all()
    assert (a.trusted_horizon < a.diverged_at).all()


def drifts(speed):
    """The map itself, and a steady drift away from the data after the first coordinate has exceeded 1.27."""

    def step(x):
        good = np.stack([1 - 1.4 * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], axis=1)
        return np.where(x[:, :1] > 1.27, x + speed, good * 1.001)

    return step


def test_rollouts_that_run_off_do_not_enlarge_the_safe_region():
    calm = small(drifts(0.0), None).fit(TRAINING)
    with pytest.warns(UserWarning, match=r"30 of 100 \(30 %\).*\(up to 50 % in a fold"):
        wild = small(drifts(0.7), None).fit(TRAINING)
    assert wild.safe_region_.threshold <= calm.safe_region_.threshold
    far = wild.assess(3 * STATES[700:760], 5)
    assert far.safe[:, 0].mean() < 0.1
    a = wild.assess(STATES[700:760], 40)
    assert np.isfinite(a.error_hat[a.diverged_at == 0]).all()


def test_the_scheme_is_copied_before_it_is_fitted():
    scheme = SaturatingGrowth(0.8)
    assert small(None, analogue, scheme=scheme).fit(TRAINING).scheme_.quantile == 0.8
    assert not hasattr(scheme, "factor_")


def test_a_refused_fit_leaves_the_estimator_unchanged():
    before = dict(vars(fitted()))
    with pytest.raises(ValueError, match=r"shape \(0, 2\)"):
        fitted().fit(np.empty((0, 2)))
    assert vars(fitted()) == before


def test_parameters_can_be_read_changed_and_cloned():
    geoq = small(STEP, None, n_anchors=3)
    assert clone(geoq).get_params() == geoq.get_params()
    assert geoq.set_params(n_starts=7).n_starts == 7
    assert "n_starts=7" in repr(geoq)
    assert repr(geoq).endswith(", not fitted")
    assert repr(fitted()).endswith(", fitted")
    with pytest.raises(ValueError, match="no parameter 'n_safe'"):
        geoq.set_params(n_safe=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"folds": TemporalFolds(4, gap=10)},
        {"folds": RandomFolds(3)},
        {"folds": ClusterFolds(3)},
        {"safe_region": SafeRegion(), "n_anchors": 3},
    ],
    ids=str,
)
def test_other_folds_and_the_safe_region_of_the_paper_can_be_used(settings):
    a = small(None, analogue, **settings).fit(TRAINING).assess(STATES[700:740], 30)
    assert (a.error_hat > 0).all()
    assert 0.5 < a.safe.mean() <= 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_progress_bar_covers_all_trainings(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    small(None, analogue).fit(TRAINING)
    shown = screen.getvalue()
    for text in ("100%", "deployed surrogate", "fold 1 of 5", "fold 5 of 5", "scheme"):
        assert text in shown
    assert shown.count("\n") == 1


def test_a_fold_without_a_rollout_does_not_stop_the_progress_bar(monkeypatch):
    """The second of three trajectories is too short for a rollout."""
    parts = [henon(300), henon(20, seed=1), henon(300, seed=2)]
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    small(STEP, analogue, folds=GroupFolds(3), n_starts=40).fit(parts)
    assert "100%" in screen.getvalue()
