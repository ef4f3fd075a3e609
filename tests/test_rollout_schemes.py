"""SaturatingGrowth, AdditiveRecursion and RolloutRegion on the calibration rollouts of the Henon map."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from henon import QUERIES, STATES, TRAINING, analogue, fitted, henon, small
from torch.testing import assert_close

from geoq import Training
from geoq.metrics import pinball
from geoq.rollout import AdditiveRecursion, SaturatingGrowth, signed_displacement
from geoq.rollout.additive import _turns
from geoq.rollout.levels import step_factors

QUICK = Training(n_steps=30, check_every=10)


def test_the_default_bound_saturates_and_the_sum_of_the_paper_does_not():
    scheme = AdditiveRecursion(training=QUICK)
    additive = small(None, analogue, scheme=scheme).fit(TRAINING)
    bound, total = (geoq.bound(QUERIES, 400) for geoq in (fitted(), additive))
    climatology = fitted().reference_states_.climatology.table
    largest = fitted().scheme_.factor_[-1].max() * climatology.max()
    assert bound.max() <= float(largest) * 1.5
    assert bound[:, 300:].mean() < 1.2 * bound[:, 30:60].mean()
    assert (np.diff(total, axis=1) >= 0).all()
    assert total[:, -1].mean() > 5 * total[:, 39].mean()


def test_the_sum_of_the_paper_is_trained_only_on_rollouts_that_do_not_diverge():
    calibration = fitted().calibration_
    alive = torch.ones_like(calibration.features.alive)
    alive[:3, 20:] = False
    error = torch.where(alive[..., None], calibration.error, torch.inf)
    features = replace(calibration.features, alive=alive)
    some = replace(calibration, features=features, error=error)
    bound = AdditiveRecursion(training=QUICK).fit(some)(calibration.features)
    assert bound.isfinite().all()
    none = replace(some, features=replace(features, alive=torch.zeros_like(alive)))
    with pytest.raises(ValueError, match="n_calibration=40, but all 100 calibration"):
        AdditiveRecursion(training=QUICK).fit(none)


def sums_of_increments(rollouts):
    """Errors that are sums of increments: the norm of psi times a rate that is seven times larger on one side."""
    psi = signed_displacement(rollouts.features)
    rate = torch.where(psi[..., 0] > psi[..., 0].median(), 0.7, 0.1)
    total = (psi.norm(dim=2) * rate).cumsum(dim=1)[..., None]
    random = torch.Generator().manual_seed(0)
    each = torch.rand(total.shape[0], 1, 2, generator=random, dtype=total.dtype)
    return total, replace(rollouts, error=total * each)


def test_the_sum_of_the_paper_finds_increments_that_depend_on_the_features():
    total, calibration = sums_of_increments(fitted().calibration_)
    training = Training(n_steps=120, batch_size=16, check_every=20, learning_rate=1e-2)
    scheme = AdditiveRecursion(training=training).fit(calibration)
    assert len(scheme.trainings_) == 5
    best = [result.best_step for result in scheme.trainings_]
    assert scheme.n_steps_ == round(sum(best) / 5) > 40
    first, lowest = (
        sum(getattr(result, name) for result in scheme.trainings_)
        for name in ("first_loss", "best_loss")
    )
    assert lowest < 0.85 * first
    start = AdditiveRecursion(training=training).train_for(0, calibration)
    trained, untrained, best_possible = (
        pinball(calibration.error.numpy(), bound.numpy(), 0.95)
        for bound in (
            scheme(calibration.features),
            start(calibration.features),
            0.95 * total.expand_as(calibration.error),
        )
    )
    assert trained < 1.35 * best_possible
    assert trained < 0.8 * untrained


def test_a_sum_that_no_step_improves_has_its_initial_weights_and_a_warning():
    calibration = fitted().calibration_
    start = AdditiveRecursion(training=Training(n_steps=1, learning_rate=1e-30))
    with pytest.warns(UserWarning, match="has its initial weights"):
        start.fit(calibration)
    assert start.n_steps_ == 0
    initial = AdditiveRecursion(training=QUICK).train_for(0, calibration)
    assert_close(start(calibration.features), initial(calibration.features))


@pytest.mark.parametrize(
    ("n_folds", "sizes"), [(1, [12]), (3, [4] * 3), (12, [3, 3, 2, 2, 2])]
)
def test_every_fold_stops_one_training_of_the_sum(n_folds, sizes):
    fold = torch.arange(12) % n_folds
    turns = list(_turns(fold))
    assert [len(held_out) for _, held_out in turns] == sizes
    assert sorted(torch.cat([held_out for _, held_out in turns]).tolist()) == list(
        range(12)
    )
    for rows, held_out in turns[1:]:
        assert not set(fold[rows].tolist()) & set(fold[held_out].tolist())


def test_the_features_of_the_paper_are_displacement_and_support_distance():
    features = fitted().calibration_.features
    psi = signed_displacement(features)
    assert psi.shape == (100, 40, 3)
    assert_close(psi[..., 2], features.support_distance)


def test_a_saturated_bound_without_the_distance_is_a_multiple_of_the_climatology():
    scheme = SaturatingGrowth(exponents=(0.0,)).fit(fitted().calibration_)
    features = fitted().calibration_.features
    relative = scheme(features)[:, -1] / features.climatology[:, -1]
    assert float(scheme.saturation_[-1]) == 1
    expected = scheme.factor_[-1] * scheme.scale_ / scheme.typical_
    assert_close(relative, expected.expand_as(relative))


def test_coordinates_of_different_kinds_have_different_scales():
    kinds = np.array([1.0, 1000.0])
    ours = small(None, analogue).fit(TRAINING * kinds)
    bound = ours.bound(QUERIES * kinds, 30).mean(axis=(0, 1))
    first, second = bound / (STATES * kinds).std(axis=0)
    assert 0.55 < first / second < 1.8


def test_the_distance_to_the_data_matters_before_saturation_and_not_after_it():
    near, far = STATES[:20], STATES[:20] + np.array([0.3, -0.3])
    near, far = (fitted().bound(x0, 40).mean(axis=(0, 2)) for x0 in (near, far))
    assert fitted().scheme_.exponent_ > 0
    assert far[0] > 1.5 * near[0]
    assert abs(far[-1] / near[-1] - 1) < 0.3


def test_a_lower_quantile_gives_a_lower_bound():
    lower = small(None, analogue, scheme=SaturatingGrowth(0.5)).fit(TRAINING)
    assert lower.bound(QUERIES, 40).mean() < fitted().bound(QUERIES, 40).mean()


def test_a_coordinate_without_errors_has_the_bound_zero_and_no_effect_on_the_others():
    states = np.concatenate([STATES, np.full((900, 1), 3.0)], axis=1)
    bound = small(None, analogue).fit(states[:700]).bound(states[700:720], 20)
    assert (bound[..., 2] == 0).all()
    np.testing.assert_allclose(bound[..., :2], fitted().bound(QUERIES, 20))


def lagged(segments):
    """The newest value of a window of lags by the nearest training window; the other values are copied."""
    step = analogue(segments)
    return lambda x: np.concatenate([x[:, 1:], step(x)[:, -1:]], axis=1)


@pytest.mark.parametrize("n_lags", [2, 40])
def test_the_newest_value_of_a_window_of_lags_is_covered_at_every_step(n_lags):
    """Copied lags have no error; if they counted, they would fill the covered fraction alone."""
    windows = np.lib.stride_tricks.sliding_window_view(henon(1800)[:, 0], n_lags)
    geoq = small(None, lagged, n_starts=100, n_calibration=20).fit(windows[:1200])
    a = geoq.assess(windows[1200:1700], 20)
    truth = np.stack([windows[1200 + n : 1700 + n] for n in range(1, 21)], axis=1)
    error = abs(truth - a.prediction)
    covered = (error <= a.error_hat).mean(axis=0)
    assert covered.min() >= 0.9
    assert covered[:, -1].mean() < 0.98
    copied = a.error_hat[:, 0, :-1]
    assert (copied == 0).all()


def test_factors_of_rollouts_that_diverge_do_not_count_from_that_step():
    error = torch.rand(100, 3, 2, generator=torch.Generator().manual_seed(0))
    some, shape = error.clone(), torch.ones_like(error)
    some[40:, 1:] = torch.inf
    some[10:, 2:] = torch.inf
    factor = step_factors(some, shape, 0.95)
    assert_close(factor[0], step_factors(error, shape, 0.95)[0])
    assert_close(factor[1], step_factors(error[:40, 1:2], shape[:40, 1:2], 0.95)[0])
    assert factor[2].isinf().all()


def test_decreasing_errors_are_covered_at_every_step():
    size = torch.linspace(2, 1, 30)[:, None]
    error = size * torch.rand(200, 30, 1, generator=torch.Generator().manual_seed(0))
    covered = error <= step_factors(error, torch.ones_like(error), 0.95)
    assert float(covered.double().mean(dim=0).min()) > 0.9


def test_a_periodic_trajectory_has_finite_bounds():
    """Every state is in the data many times, at distance zero."""
    cycle = np.tile([[0.2, 0.1], [0.7, 0.4]], (200, 1))
    geoq = small(lambda x: x[:, ::-1] * 0.9, None).fit(cycle)
    assert np.isfinite(geoq.bound(cycle[:3], 20)).all()


def test_a_few_rollouts_with_huge_errors_do_not_determine_the_bound():
    calibration = fitted().calibration_
    huge = torch.ones(len(calibration), 1, 1)
    huge[:3] = 1e4
    climatology = calibration.features.climatology * huge
    features = replace(calibration.features, climatology=climatology)
    rough = replace(calibration, features=features, error=calibration.error * huge)
    bound = SaturatingGrowth().fit(rough)(calibration.features)
    usual = fitted().scheme_(calibration.features)
    assert float(bound.mean() / usual.mean()) < 1.5


def test_the_description_gives_the_exponent_and_the_step_of_half_saturation():
    scheme = fitted().scheme_
    half = next(n for n, w in enumerate(scheme.saturation_, start=1) if w >= 0.5)
    assert (
        f"to the power {scheme.exponent_:g} and is half saturated at step {half};"
        in (scheme.describe())
    )


def test_the_safe_region_contains_95_percent_of_the_whole_held_out_rollouts():
    farthest = fitted().calibration_.features.support_distance.amax(dim=1)
    threshold = fitted().safe_region_.threshold
    assert float((farthest <= threshold).double().mean()) >= 0.95
    assert float((farthest < threshold).double().mean()) < 0.95
