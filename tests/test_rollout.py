import io
import os
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from joblib import parallel_config
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.testing import assert_close

from geoq import (
    ClusterFolds,
    GeoQ,
    GroupFolds,
    RandomFolds,
    RolloutGeoQ,
    SafeRegion,
    TemporalFolds,
    TrainedFolds,
    Training,
    TrainNetwork,
    archive,
)
from geoq.increments.climatology import Climatology
from geoq.metrics import coverage_by_lead
from geoq.nets.mlp import MLP
from geoq.quantiles import conformal_factor
from geoq.rollout import AdditiveRecursion, SaturatingGrowth, TrainRollout
from geoq.rollout.horizon import HeldOutRollouts, count_apart, over_tolerance
from geoq.rollout.recipe import Windows
from geoq.rollout.trajectories import Trajectories, roll_out

QUICK = Training(n_steps=30, check_every=10)


def henon(n_states, seed=0):
    """A trajectory on the attractor of Henon's map, in the order of time."""
    x, y = 0.1 * np.random.default_rng(seed).random(2)
    states = []
    for step in range(n_states + 100):
        x, y = 1 - 1.4 * x**2 + y, 0.3 * x
        if step >= 100:
            states.append((x, y))
    return np.array(states)


def analogue(segments):
    """Forecast by the nearest state seen and what became of it: instant, bounded, wrong as rollouts are."""
    is_tensor = isinstance(segments[0], torch.Tensor)
    join = torch.cat if is_tensor else np.concatenate
    before = join([segment[:-1] for segment in segments])
    after = join([segment[1:] for segment in segments])

    def step(x):
        flat, known = x.reshape(len(x), 1, -1), before.reshape(1, len(before), -1)
        return after[((flat - known) ** 2).sum(2).argmin(1)]

    return step


STATES = henon(900)
STEP = analogue([STATES[:700]])
small = partial(RolloutGeoQ, n_calibration=40, n_starts=20, n_support=5)


@pytest.fixture(scope="module")
def fitted():
    return small(None, analogue).fit(STATES[:700])


def test_index_n_minus_1_of_the_answer_is_step_n(fitted):
    a = fitted.assess(STATES[700:703], 5)
    step = analogue([STATES[:700]])
    np.testing.assert_array_equal(a.prediction[:, 0], step(STATES[700:703]))
    np.testing.assert_array_equal(a.prediction[:, 1], step(a.prediction[:, 0]))
    assert a.prediction.shape == a.error_hat.shape == (3, 5, 2)
    assert a.safe.shape == a.support_score.shape == (3, 5)


def test_the_features_of_a_step_are_those_of_the_state_it_starts_from(fitted):
    """So the first step's score is the initial state's distance to the data, whose error is zero."""
    x0 = STATES[700:705]
    a = fitted.assess(x0, 3)
    scale = STATES[:700].std(axis=0)
    distance = np.linalg.norm((x0[:, None] - STATES[None, :700]) / scale, axis=2)
    nearest = np.sort(distance, axis=1)[:, :5].mean(axis=1)
    np.testing.assert_allclose(a.support_score[:, 0], nearest, rtol=1e-9)


def test_calibration_errors_start_one_step_after_the_held_out_state(fitted):
    calibration = fitted.calibration_
    truth = torch.from_numpy(STATES)[calibration.start + 1]
    first = calibration.features.prediction[:, 0]
    assert_close(calibration.error[:, 0], (truth - first).abs())


def test_coverage_is_near_its_level_in_every_quarter():
    states = henon(2600)
    geoq = small(None, analogue).fit(states[:2000])
    a = geoq.assess(states[2000:2540], 60)
    truth = np.stack([states[2000 + n : 2540 + n] for n in range(1, 61)], axis=1)
    by_step = coverage_by_lead(abs(truth - a.prediction), a.error_hat)
    assert abs(by_step.mean() - 0.95) < 0.02
    for quarter in by_step.reshape(4, -1).mean(axis=1):
        assert abs(quarter - 0.95) < 0.04


def test_the_bound_saturates_and_the_sum_does_not(fitted):
    additive = small(None, analogue, scheme=AdditiveRecursion(training=QUICK)).fit(
        STATES[:700]
    )
    x0 = STATES[700:720]
    bound, total = (g.assess(x0, 400).error_hat for g in (fitted, additive))
    largest = fitted.scheme_.level_[-1] * fitted.surroundings_.climatology.table.max()
    assert bound.max() <= float(largest) * 1.5
    assert bound[:, 300:].mean() < 1.2 * bound[:, 30:60].mean()
    assert (np.diff(total, axis=1) >= 0).all()
    assert total[:, -1].mean() > 5 * total[:, 39].mean()


def test_without_geometry_a_saturated_rollout_is_bounded_by_its_climatology(fitted):
    scheme = SaturatingGrowth(exponents=(0.0,)).fit(fitted.calibration_)
    features = fitted.calibration_.features
    relative = scheme(features) / features.climatology
    assert scheme.exponent_ == 0
    assert float(scheme.saturation_[-1]) == 1
    expected = scheme.level_[-1] * scheme.scale_ / scheme.unit_
    assert_close(relative[:, -1], expected.expand_as(relative[:, -1]))


def test_coordinates_of_different_kinds_have_scales_of_their_own():
    kinds = np.array([1.0, 1000.0])
    ours = small(None, analogue).fit(STATES[:700] * kinds)
    assert_close(ours.scheme_.scale_, ours.scheme_.unit_)
    bound = ours.assess(STATES[700:720] * kinds, 30).error_hat.mean(axis=(0, 1))
    spread = (STATES * kinds).std(axis=0)
    assert 0.2 < (bound / spread)[0] / (bound / spread)[1] < 5


def test_geometry_sharpens_the_bound_before_saturation(fitted):
    """Initial states far from the data have larger bounds at the first steps, and not at the last ones."""
    near, far = STATES[:20], STATES[:20] + np.array([0.3, -0.3])
    bounds = [fitted.assess(x0, 40).error_hat.mean(axis=(0, 2)) for x0 in (near, far)]
    assert fitted.scheme_.exponent_ > 0
    assert bounds[1][0] > 1.5 * bounds[0][0]
    assert abs(bounds[1][-1] / bounds[0][-1] - 1) < 0.3


def test_folds_train_on_no_held_out_state_and_on_contiguous_pieces():
    seen = []

    def recorded(segments):
        seen.append(segments)
        return analogue(segments)

    trajectories = [henon(200, seed) for seed in range(3)]
    geoq = small(analogue(trajectories), recorded, folds=ClusterFolds(4))
    geoq.fit(trajectories)
    everything = np.concatenate(trajectories)
    successor = {
        tuple(before): tuple(after)
        for trajectory in trajectories
        for before, after in pairwise(trajectory)
    }
    assert len(seen) == 4
    for fold, segments in enumerate(seen):
        states = {tuple(state) for segment in segments for state in segment}
        starts = geoq.calibration_.start[geoq.calibration_.fold == fold]
        assert not states & {tuple(everything[row]) for row in starts}
        for segment in segments:
            for before, after in pairwise(segment):
                assert successor[tuple(before)] == tuple(after)


def test_rollouts_start_where_the_whole_truth_is_held_out_if_there_are_enough():
    trajectories = Trajectories.gather(STATES[:700])
    block = np.arange(100, 240)
    starts = trajectories.starts(block, 40, 20)
    assert starts.min() >= 100
    assert (starts + 40 <= 239).all()
    scattered = trajectories.starts(np.arange(0, 700, 7), 40, 20)
    assert len(scattered) == 20
    assert scattered.max() + 40 < 700


def test_a_rollout_of_truth_never_crosses_into_another_trajectory():
    trajectories = Trajectories.gather([STATES[:100], STATES[100:300]])
    starts = trajectories.starts(np.arange(300), 60, 300)
    assert (trajectories.number[starts] == trajectories.number[starts + 60]).all()


def test_tensors_come_back_as_tensors_and_say_the_same(fitted, device):
    states = torch.from_numpy(STATES).to(device)
    geoq = small(None, analogue).fit(states[:700])
    ours = geoq.assess(states[700:710], 50, 0.5)
    theirs = fitted.assess(STATES[700:710], 50, 0.5)
    assert ours.error_hat.device == states.device
    np.testing.assert_allclose(ours.error_hat.cpu(), theirs.error_hat)
    np.testing.assert_array_equal(ours.trusted_horizon.cpu(), theirs.trusted_horizon)


def test_single_precision_stays_single(fitted):
    a = small(None, analogue).fit(STATES[:700].astype(np.float32))
    assert a.assess(STATES[700:702].astype(np.float32), 3).error_hat.dtype == np.float32


def test_states_may_be_fields_and_trajectories_many():
    grids = [henon(301, seed)[:, :, None] * np.ones((1, 1, 3)) for seed in range(3)]
    geoq = small(None, analogue, folds=GroupFolds()).fit(grids)
    a = geoq.assess(grids[0][:2], 4)
    assert a.error_hat.shape == (2, 4, 2, 3)
    assert torch.equal(geoq.calibration_.fold.unique(), torch.arange(3))


def test_chunks_do_not_change_the_answer(fitted, monkeypatch):
    x0 = STATES[700:740]
    whole = fitted.assess(x0, 10)
    monkeypatch.setattr("geoq.surrogate.CHUNK_NUMBERS", 60)
    parts = fitted.assess(x0, 10)
    np.testing.assert_allclose(parts.error_hat, whole.error_hat, rtol=1e-12)
    np.testing.assert_array_equal(parts.safe, whole.safe)


# The trusted horizon.


def held_for(error, tolerance):
    """Steps for which the largest error of each rollout stayed within the tolerance."""
    exceeds = (np.asarray(error) > tolerance).any(axis=2)
    return np.where(exceeds.any(axis=1), exceeds.argmax(axis=1), exceeds.shape[1])


def test_the_trusted_horizon_ends_before_the_first_step_that_is_unsafe_or_too_wide(
    fitted,
):
    x0 = np.concatenate([STATES[700:720], [[40.0, 40.0]]])
    a = fitted.assess(x0, 40, tolerance=0.5)
    ratio = (a.error_hat / 0.5).max(axis=2)
    np.testing.assert_allclose(a.bound_over_tolerance, ratio)
    trusted = a.safe & (ratio <= 1) & (ratio < a.trust.limit)
    expected = [np.flatnonzero(~row)[0] if not row.all() else 40 for row in trusted]
    np.testing.assert_array_equal(a.trusted_horizon, expected)
    assert a.trusted_horizon[-1] == 0
    assert "not trusted" in a.reason(20)
    assert "NOT safe" in a.reason(20)
    per_coordinate = fitted.assess(x0, 40, tolerance=np.array([0.5, 0.5]))
    np.testing.assert_array_equal(per_coordinate.trusted_horizon, a.trusted_horizon)


def test_the_reason_of_a_rollout_that_was_not_asked_is_refused(fitted):
    a = fitted.assess(STATES[700:703], 5)
    with pytest.raises(IndexError, match="rollout=3, but 3 were assessed; choose 0 to"):
        a.reason(3)


def test_the_reason_says_what_the_bound_is_compared_with(fitted):
    a = fitted.assess(STATES[700:720], 40, tolerance=1.2)
    assert a.trust.limit < 1
    ends = [a.reason(i).splitlines()[1] for i in range(20)]
    over, under = (
        [
            end
            for end, row, at in zip(
                ends, a.bound_over_tolerance, a.trusted_horizon, strict=True
            )
            if (row[at] > 1) == is_over
        ]
        for is_over in (True, False)
    )
    assert over
    assert under
    assert all("of its tolerance" in end for end in over)
    assert all(f"trusted above {a.trust.limit:.3g} of it" in end for end in under)
    assert str(a.trust) in a.reason(0)


def test_trust_ends_at_the_calibration_horizon(fitted):
    """No error was measured past it, however large the tolerance."""
    a = fitted.assess(STATES[700:720], 60, tolerance=1e6)
    lasting = a.supported_horizon >= 40
    assert lasting.any()
    assert (a.trusted_horizon[lasting] == 40).all()
    told = a.reason(int(np.flatnonzero(lasting)[0]))
    assert "step 41: past the calibration horizon" in told


def test_asking_for_fewer_steps_only_cuts_the_trusted_horizon(fitted):
    few, many = (fitted.assess(STATES[700:720], n, 1.0) for n in (6, 40))
    assert few.trust == many.trust
    np.testing.assert_array_equal(few.trusted_horizon, many.trusted_horizon.clip(max=6))
    assert many.trusted_horizon.max() > 6


def test_without_a_tolerance_nothing_is_called_trusted(fitted):
    a = fitted.assess(np.concatenate([STATES[700:720], [[40.0, 40.0]]]), 60)
    assert a.trusted_horizon is None
    assert a.trust is None
    assert a.bound_over_tolerance is None
    safe = a.safe.cumprod(axis=1).sum(axis=1)
    np.testing.assert_array_equal(a.supported_horizon, safe)
    for told in (repr(a), a.reason(0), a.reason(20)):
        assert "trust" not in told
        assert "no tolerance was given, so only the support was judged" in told
    assert "not supported" in a.reason(20)
    assert "calibration horizon" in a.reason(0)


def drawn(generator, n, n_steps=30, spacing=1000):
    """Held-out rollouts whose errors grow at rates of their own, with bounds that do not know these; starts far apart."""
    size = torch.randn(n, 1, 1, generator=generator).mul(0.5).exp()
    noise = torch.rand(n, n_steps, 2, generator=generator)
    step = torch.arange(1, n_steps + 1)[:, None] / n_steps
    bound = step * torch.rand(n, 1, 1, generator=generator).add(1).expand_as(noise)
    return HeldOutRollouts(
        bound=bound,
        error=size * noise * step,
        supported=torch.randint(5, n_steps + 1, (n,), generator=generator),
        start=spacing * torch.arange(n),
        quantile=0.9,
    )


def trusted_steps(rollouts, trust, tolerance):
    within = trust.within(over_tolerance(rollouts.bound, tolerance))
    return torch.minimum(within.long().cumprod(dim=1).sum(dim=1), rollouts.supported)


def test_the_promise_holds_for_exchangeable_rollouts_whatever_the_bound():
    """Split conformal prediction: the mean over draws lies within 1 / (n + 1) below the promised share."""
    generator, shares = torch.Generator().manual_seed(0), []
    tolerance = torch.tensor(0.6)
    for _ in range(300):
        calibration, fresh = drawn(generator, 59), drawn(generator, 50)
        trust = calibration.trust(tolerance)
        assert trust.n_apart == 59
        steps = trusted_steps(fresh, trust, tolerance)
        shares.append(float((held_for(fresh.error, 0.6) < steps.numpy()).mean()))
    assert 0.08 < np.mean(shares) < 0.105


@pytest.mark.parametrize("spacing", [1, 3, 1000])
def test_a_larger_tolerance_never_has_a_shorter_horizon(spacing):
    """Though longer horizons overlap more, so that fewer held-out rollouts count."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        rollouts = drawn(generator, 60, spacing=spacing)
        before = torch.zeros(60)
        for tolerance in torch.logspace(-1.5, 0.7, 40):
            steps = trusted_steps(rollouts, rollouts.trust(tolerance), tolerance)
            assert (steps >= before).all()
            before = steps


@pytest.mark.parametrize("spacing", [1, 3, 10, 1000])
def test_the_limit_keeps_the_count_and_no_larger_one_does(spacing):
    """G / (G + 1) a / n + 1 / (G + 1) <= 1 - tau, where G rollouts are apart while trusted, or none is broken."""
    rollouts = drawn(torch.Generator().manual_seed(3), 60, spacing=spacing)
    counts = set()
    for tolerance in torch.linspace(0.1, 1.5, 20):
        held = torch.from_numpy(held_for(rollouts.error, float(tolerance)))

        def kept(trust, held=held, tolerance=tolerance):
            steps = trusted_steps(rollouts, trust, tolerance)
            apart = count_apart(rollouts.start, max(1, int(steps.max())))
            broken = int((held < steps).sum())
            share = apart / (apart + 1) * broken / 60 + 1 / (apart + 1)
            return broken, broken == 0 or share <= 0.1 + 1e-9

        trust = rollouts.trust(tolerance)
        broken, is_kept = kept(trust)
        assert is_kept
        counts.add(broken)
        ratios = over_tolerance(rollouts.bound, tolerance).flatten()
        larger = ratios[(ratios >= trust.limit) & (ratios <= 1)]
        if len(larger):
            beyond = float(larger.min()) * (1 + 1e-6)
            assert not kept(replace(trust, limit=beyond))[1]
    assert max(counts) > 0


def test_the_horizons_of_an_estimator_grow_with_the_tolerance(fitted):
    horizons = [
        fitted.assess(STATES[700:740], 40, float(tolerance)).trusted_horizon
        for tolerance in np.geomspace(0.01, 10, 30)
    ]
    assert all((a <= b).all() for a, b in pairwise(horizons))
    assert horizons[0].max() < horizons[-1].max()


def test_the_limit_is_the_largest_that_breaks_few_enough():
    """Nineteen rollouts of two steps at level 0.9: of the largest bounds up to the first excess one may lie below."""
    critical = torch.arange(1.0, 20.0) / 20
    rollouts = HeldOutRollouts(
        bound=torch.stack([critical / 2, critical], dim=1)[..., None],
        error=torch.tensor([0.0, 2.0]).expand(19, 2)[..., None],
        supported=torch.full((19,), 2),
        start=10 * torch.arange(19),
        quantile=0.9,
    )
    trust = rollouts.trust(torch.tensor(1.0))
    assert trust.limit == pytest.approx(critical[1])
    assert int((trusted_steps(rollouts, trust, torch.tensor(1.0)) == 2).sum()) == 1
    # An unsafe step ends the trust before the tolerance is exceeded: these two are broken by no limit.
    some_unsafe = replace(rollouts, supported=torch.tensor([1, 1, *[2] * 17]))
    assert some_unsafe.trust(torch.tensor(1.0)).limit == pytest.approx(critical[3])
    never = rollouts.trust(torch.tensor(3.0))
    assert never.limit == np.inf


def test_rollouts_that_overlap_while_trusted_count_once():
    assert count_apart(torch.tensor([0, 4, 5, 9, 11, 30]), 5) == 4
    assert count_apart(torch.arange(7), 1) == 7
    rollouts = drawn(torch.Generator().manual_seed(2), 60)
    overlapping = replace(rollouts, start=torch.arange(60))
    tolerance = torch.tensor(3.0)
    apart, together = (r.trust(tolerance) for r in (rollouts, overlapping))
    assert together.limit <= apart.limit
    steps = trusted_steps(overlapping, together, tolerance)
    assert (held_for(overlapping.error, 3.0) >= steps.numpy()).all()
    assert together.n_apart == count_apart(overlapping.start, int(steps.max()))
    assert together.broken == pytest.approx(1 / (together.n_apart + 1))
    assert f"only {together.n_apart} of them do not overlap" in str(together)
    assert "9 are needed" in str(together)
    assert "overlap" not in str(apart)


def test_an_infinite_bound_is_within_no_tolerance():
    bound = torch.tensor([[[1.0, 2.0], [torch.inf, 1.0]]])
    ratio = over_tolerance(bound, torch.tensor([2.0, torch.inf]))
    assert_close(ratio, torch.tensor([[0.5, torch.inf]]))


def explodes_from(threshold):
    """Next states by the map itself, except where the first coordinate passes a threshold."""

    def step(x):
        good = np.stack([1 - 1.4 * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], axis=1)
        return np.where(x[:, :1] > threshold, np.inf, good * 1.001)

    return step


def test_a_surrogate_that_diverges_is_bounded_by_infinity_from_that_step_on():
    step = explodes_from(1.27)
    a = small(step, None).fit(STATES[:700]).assess(STATES[700:760], 80, 1e3)
    lost = ~np.isfinite(a.prediction).all(axis=2)
    assert lost.any()
    assert not lost.all()
    assert np.isinf(a.error_hat[lost]).all()
    assert not a.safe[lost].any()
    for i in range(60):
        first = np.flatnonzero(lost[i])
        assert a.diverged_at[i] == (first[0] + 1 if len(first) else 0)
        assert lost[i, first[0] :].all() if len(first) else True
        if a.diverged_at[i] == a.trusted_horizon[i] + 1:
            assert "diverged" in a.reason(i)


def test_bounds_are_infinite_where_too_many_calibration_rollouts_diverged():
    step = explodes_from(np.quantile(STATES[:, 0], 0.99))
    a = small(step, None).fit(STATES[:700]).assess(STATES[700:760], 80)
    assert np.isinf(a.error_hat[:, -1]).all()
    assert np.isfinite(a.error_hat[a.diverged_at != 1][:, 0]).all()


def test_a_trajectory_that_repeats_itself_has_finite_bounds():
    """Every state of a cycle is in the data many times, at distance zero."""
    cycle = np.tile([[0.2, 0.1], [0.7, 0.4]], (200, 1))
    geoq = small(lambda x: x[:, ::-1] * 0.9, None).fit(cycle)
    answer = geoq.assess(cycle[:3], 20)
    assert np.isfinite(answer.error_hat).all()


def test_a_surrogate_that_always_diverges_crashes_nothing():
    geoq = small(lambda x: 100 * x + 1, None).fit(STATES[:700])
    a = geoq.assess(STATES[700:703], 50, 1e9)
    assert (a.diverged_at > 0).all()
    assert np.isinf(a.error_hat[:, -1]).all()
    assert (a.trusted_horizon < a.diverged_at).all()


def test_a_diverged_state_is_not_passed_to_the_surrogate():
    def picky(x):
        assert np.isfinite(x).all()
        return np.where(x > 0, 1e40, x)

    states = roll_out(picky, np.array([[1.0], [-1.0]]), 3, torch.tensor([1e9]))
    assert_close(states[1], -torch.ones(4, 1, dtype=torch.float64))
    assert states[0, 1:].isnan().all()


def test_the_scheme_is_copied_before_it_is_fitted():
    scheme = SaturatingGrowth(0.8)
    geoq = small(None, analogue, scheme=scheme).fit(STATES[:700])
    assert not hasattr(scheme, "level_")
    assert geoq.scheme_.quantile == 0.8


def test_a_lower_quantile_gives_a_lower_bound(fitted):
    lower = small(None, analogue, scheme=SaturatingGrowth(0.5)).fit(STATES[:700])
    x0 = STATES[700:720]
    assert (
        lower.assess(x0, 40).error_hat.mean() < fitted.assess(x0, 40).error_hat.mean()
    )


def test_the_asked_share_of_held_out_rollouts_is_safe_throughout(fitted):
    farthest = fitted.calibration_.features.support_distance.amax(dim=1)
    threshold = fitted.safe_region_.threshold
    assert float((farthest <= threshold).double().mean()) >= 0.95
    assert float((farthest < threshold).double().mean()) < 0.95


def test_the_papers_region_serves_rollouts_too():
    geoq = small(None, analogue, safe_region=SafeRegion, n_anchors=3)
    a = geoq.fit(STATES[:700]).assess(STATES[700:740], 30)
    assert 0.5 < a.safe.mean() <= 1


def test_a_refused_fit_leaves_the_estimator_as_it_was(fitted):
    before = dict(vars(fitted))
    with pytest.raises(ValueError, match=r"shape \(0, 2\)"):
        fitted.fit(np.empty((0, 2)))
    assert vars(fitted) == before


# The climatology and the finish.


@pytest.mark.parametrize("n_states", [50, 5000])
def test_the_climatology_is_the_quantile_of_distances_to_the_states(n_states):
    states = torch.from_numpy(np.random.default_rng(0).gamma(2.0, size=(n_states, 3)))
    climatology = Climatology.fit(states, 0.95)
    queries = torch.linspace(-1, 12, 40, dtype=torch.float64)[:, None].expand(-1, 3)
    distance = (queries[:, None] - states).abs().sort(dim=1).values
    exact = distance[:, int(np.ceil(0.95 * n_states - 1e-9)) - 1]
    spacing = float((states.amax(dim=0) - states.amin(dim=0)).max()) / 255
    assert_close(climatology(queries), exact, rtol=0, atol=3 * spacing)


def test_the_climatology_of_a_constant_coordinate_is_the_distance_to_it():
    climatology = Climatology.fit(torch.full((30, 1), 2.0), 0.95)
    assert_close(
        climatology(torch.tensor([[2.0], [5.0]])), torch.tensor([[0.0], [3.0]])
    )


def test_a_coordinate_that_never_moves_has_a_bound_of_its_own():
    states = np.concatenate([STATES, np.full((900, 1), 3.0)], axis=1)
    a = small(None, analogue).fit(states[:700]).assess(states[700:720], 20)
    assert np.isfinite(a.error_hat).all()
    assert (a.error_hat[..., 2] > 0).all()


def test_a_fold_that_runs_off_does_not_set_the_scale_for_all(fitted):
    """Its rollouts stay finite, so they count; but the bound of the others is that of the others."""
    calibration = fitted.calibration_
    off = torch.zeros(len(calibration), dtype=torch.bool)
    off[:3] = True
    wild = torch.where(off[:, None, None], 1e4, 1.0)
    features = replace(
        calibration.features, climatology=calibration.features.climatology * wild
    )
    rough = replace(calibration, features=features, error=calibration.error * wild)
    scheme = SaturatingGrowth().fit(rough)
    bound, usual = scheme(calibration.features), fitted.scheme_(calibration.features)
    assert float(bound.mean() / usual.mean()) < 1.5


def test_risk_control_covers_a_fresh_rollout_at_its_level():
    """The mean over fresh rollouts of the share covered, with few and strongly dependent calibration rollouts."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(400):
        size = torch.randn(21, 1, generator=generator).exp()
        ratio = size * torch.rand(21, 8, generator=generator)
        level = conformal_factor(ratio[:20], 0.9)
        shares.append(float((ratio[20] <= level).double().mean()))
    assert 0.9 - 0.02 < np.mean(shares) < 0.97


def test_the_law_is_told_in_words(fitted):
    assert re.match(
        r"error grows like distance to the power [\d.]+", fitted.scheme_.describe()
    )


# Files.


@pytest.mark.parametrize(
    "scheme",
    [SaturatingGrowth(0.9), AdditiveRecursion(training=QUICK)],
    ids=lambda scheme: type(scheme).__name__,
)
def test_a_loaded_estimator_answers_as_the_saved_one(tmp_path, scheme):
    surrogate = analogue([STATES[:300]])
    geoq = small(surrogate, None, scheme=scheme, representation=np.tanh)
    geoq.fit(STATES[300:800]).save(tmp_path / "rollout.geoq")
    loaded = RolloutGeoQ.load(
        tmp_path / "rollout.geoq", surrogate=surrogate, representation=np.tanh
    )
    ours, theirs = (g.assess(STATES[800:820], 50, 0.5) for g in (geoq, loaded))
    np.testing.assert_array_equal(ours.error_hat, theirs.error_hat)
    np.testing.assert_array_equal(ours.trusted_horizon, theirs.trusted_horizon)
    assert ours.reason(0) == theirs.reason(0)
    assert ours.trust == theirs.trust
    each = np.array([0.2, 0.7])
    ours, theirs = (g.assess(STATES[800:820], 50, each) for g in (geoq, loaded))
    np.testing.assert_array_equal(ours.trusted_horizon, theirs.trusted_horizon)
    assert ours.trust == theirs.trust
    with pytest.raises(ValueError, match="surrogate is not the one"):
        RolloutGeoQ.load(
            tmp_path / "rollout.geoq",
            surrogate=analogue([STATES[:250]]),
            representation=np.tanh,
        )
    with pytest.raises(ValueError, match="saved with a representation"):
        RolloutGeoQ.load(tmp_path / "rollout.geoq", surrogate=surrogate)
    with pytest.raises(ValueError, match=r"load it with RolloutGeoQ\.load"):
        GeoQ.load(tmp_path / "rollout.geoq", surrogate=surrogate)


def test_files_of_large_states_keep_what_one_tolerance_for_all_needs(
    tmp_path, monkeypatch
):
    surrogate = analogue([STATES[:300]])
    geoq = small(surrogate, None).fit(STATES[300:800])
    monkeypatch.setattr("geoq.rollout.horizon.MOST_STORED", 100)
    geoq.save(tmp_path / "large.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "large.geoq", surrogate=surrogate)
    assert loaded.held_out_.bound.shape == (100, 40, 1)
    for tolerance in (0.1, 0.5, 1.0):
        ours, theirs = (
            g.assess(STATES[800:820], 50, tolerance) for g in (geoq, loaded)
        )
        assert ours.trust == theirs.trust
        np.testing.assert_array_equal(ours.trusted_horizon, theirs.trusted_horizon)
    geoq.assess(STATES[800:820], 50, np.array([0.2, 0.7]))
    with pytest.raises(ValueError, match=r"shape \(2,\).*largest error.*pass a number"):
        loaded.assess(STATES[800:820], 50, np.array([0.2, 0.7]))


def test_files_without_held_out_rollouts_are_refused(tmp_path):
    surrogate = analogue([STATES[:300]])
    small(surrogate, None).fit(STATES[300:800]).save(tmp_path / "new.geoq")
    numbers, arrays = archive.read(tmp_path / "new.geoq")
    kept = {n: a for n, a in arrays.items() if not n.startswith("held_out")}
    archive.write(tmp_path / "old.geoq", numbers, kept)
    with pytest.raises(ValueError, match="holds no held-out rollouts"):
        RolloutGeoQ.load(tmp_path / "old.geoq", surrogate=surrogate)


def test_files_of_other_estimators_and_schemes_of_the_users_own_are_refused(tmp_path):
    one_shot = GeoQ(analogue([STATES]), None).fit(STATES[:-1], STATES[1:])
    one_shot.save(tmp_path / "one.geoq")
    with pytest.raises(ValueError, match="does not hold a RolloutGeoQ"):
        RolloutGeoQ.load(tmp_path / "one.geoq", surrogate=analogue([STATES]))
    geoq = small(analogue([STATES]), None, safe_region=SafeRegion).fit(STATES[:700])
    with pytest.raises(ValueError, match="cannot be saved"):
        geoq.save(tmp_path / "two.geoq")


# Our recipe.


def test_the_recipe_learns_one_step_and_then_rollouts():
    recipe = TrainRollout(
        partial(MLP, 2, 2, hidden=(32, 32)),
        training=Training(n_steps=400, learning_rate=3e-3),
        n_rollout=3,
        fine_tuning=Training(n_steps=100, check_every=20),
    )
    pieces = [STATES[:300], STATES[310:600]]
    surrogate, again = recipe(pieces), recipe(pieces)
    error = abs(surrogate(STATES[600:899]) - STATES[601:900]).mean()
    assert error < 0.1
    np.testing.assert_array_equal(surrogate(STATES[:5]), again(STATES[:5]))
    other = recipe.with_seed(1)(pieces)
    assert not np.array_equal(surrogate(STATES[:5]), other(STATES[:5]))


STEPPER = TrainRollout(
    partial(MLP, 2, 2, hidden=(16, 16)),
    training=Training(n_steps=120, batch_size=16, learning_rate=3e-3, check_every=20),
    n_rollout=3,
    fine_tuning=Training(n_steps=60, batch_size=16, check_every=20),
)
RUNS = [
    [np.arange(300), np.arange(310, 600)],
    [np.arange(100, 500)],
    [np.arange(40), np.arange(80, 90), np.arange(300, 400)],
]


@pytest.mark.parametrize(
    "recipe",
    [
        STEPPER,
        replace(
            STEPPER,
            make_network=lambda: nn.Sequential(
                nn.Linear(2, 8), nn.Dropout(0.1), nn.Linear(8, 2)
            ),
        ),
        replace(STEPPER, fine_tuning=replace(QUICK, n_decays=1)),
        replace(STEPPER, training=replace(QUICK, n_decays=1)),
    ],
    ids=["stacked", "dropout", "rates cut late", "rates cut early"],
)
def test_steppers_trained_together_are_what_they_would_be_alone(recipe, device):
    states = torch.from_numpy(STATES).to(device)
    for runs, member in zip(RUNS, recipe.train_many(states, RUNS), strict=True):
        alone = recipe([states[run] for run in runs])
        x = states[600:640]
        assert_close(member(x), alone(x), rtol=1e-4, atol=1e-5)
        assert not member.network.training


def test_a_few_large_steppers_are_trained_together():
    assert STEPPER.n_together(STATES) > 5
    assert replace(STEPPER, n_rollout=2**14).n_together(STATES) == 1
    assert STEPPER.n_together(np.zeros((3, 2**12))) == 1
    large = replace(STEPPER.training, batch_size=2**17)
    assert replace(STEPPER, training=large).n_together(STATES) == 1
    cut = replace(STEPPER, fine_tuning=replace(QUICK, n_decays=1))
    assert cut.n_together(STATES) == 1


def test_the_loss_of_a_window_is_that_of_the_networks_own_states():
    """u = 0, 1, 4, 9 and a network that adds 2: from 0 it reaches 2 and 4, from 1 3 and 5."""
    states = torch.tensor([[0.0], [1.0], [4.0], [9.0]])
    windows = Windows(states, torch.tensor([0, 1]), 2, nn.functional.mse_loss)
    told = [
        windows.mean_loss(lambda x: x + 2, windows.loss, torch.tensor([row]))
        for row in (0, 1)
    ]
    assert torch.stack(told).tolist() == [(1 + 0) / 2, (1 + 16) / 2]


def test_networks_are_tuned_with_the_seed_of_their_training():
    seeds = [replace(STEPPER.fine_tuning, random_state=seed) for seed in (0, 5)]
    one, other = (replace(STEPPER, fine_tuning=s)([STATES[:300]]) for s in seeds)
    np.testing.assert_array_equal(one(STATES[:9]), other(STATES[:9]))


def test_folds_of_rollouts_are_trained_together(caplog):
    caplog.set_level("INFO")
    together = small(None, STEPPER).fit(STATES[:700])
    stacked = [r for r in caplog.records if r.name == "geoq.stacked"]
    assert len(stacked) == 2 * 5  # one step, then rollouts
    alone = small(None, lambda segments: STEPPER(segments)).fit(STATES[:700])
    assert_close(
        together.calibration_.error[:, :3],
        alone.calibration_.error[:, :3],
        rtol=1e-3,
        atol=1e-4,
    )


def test_errors_of_folds_trained_together_name_all_of_them():
    broken = replace(STEPPER, loss=lambda y, y_hat: (y - y_hat).mean() * torch.nan)
    with pytest.raises(FloatingPointError) as caught:
        small(STEP, broken).fit(STATES[:700])
    assert "surrogates of fold 1 of 5 to fold 5 of 5" in caught.value.__notes__[0]


def test_windows_that_no_fold_leaves_are_refused_before_anything_is_trained():
    def untouched():
        raise AssertionError("a network was made")

    recipe = replace(STEPPER, make_network=untouched, n_rollout=290)
    with pytest.raises(ValueError, match="n_rollout=290, but the longest") as caught:
        small(None, recipe).fit([STATES[:300], STATES[300:600]])
    assert "those of fold 3" in caught.value.__notes__[0]


def test_no_segments_are_refused():
    with pytest.raises(ValueError, match="segments is an empty list"):
        STEPPER([])


def test_fine_tuning_windows_stay_inside_a_segment():
    recipe = TrainRollout(partial(MLP, 2, 2, hidden=(4,)), n_rollout=5, training=QUICK)
    with pytest.raises(
        ValueError, match=r"n_rollout=5, but the longest of the 2 .* 5 states"
    ):
        recipe([STATES[:5], STATES[5:9]])


# Refusals: what is wrong, what it collides with, the way out.


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        (STATES[:30], r"n_calibration=40, but the longest trajectory has 30 states"),
        ([STATES, STATES[:, :1]], r"trajectories\[1\] has states of shape \(1,\)"),
        ([STATES, torch.from_numpy(STATES)], r"trajectories\[1\] is a Tensor"),
        ([], "empty list"),
        (STATES[:, 0], r"shape \(900,\).*needs shape \(n, 1\)"),
        (np.where(STATES > 1.2, np.nan, STATES), "cut the trajectory there"),
        (STATES.astype(object), "dtype object"),
        ([[1.0, 2.0]], r"trajectories\[0\] must be a NumPy array"),
        (np.stack([STATES[:100]] * 5), "several are passed as a list"),
    ],
)
def test_unusable_trajectories_are_refused_before_any_training(trajectories, message):
    def untouched(segments):
        raise AssertionError

    with pytest.raises((ValueError, TypeError), match=message):
        small(None, untouched).fit(trajectories)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_calibration": 0}, "n_calibration=0"),
        ({"n_starts": 2.5}, "n_starts=2.5"),
        ({"n_starts": 1}, "needs at least 19 calibration rollouts"),
        ({"n_support": 800}, "n_support=800"),
        ({"safe_quantile": 1.0}, "safe_quantile=1.0"),
        ({"scheme": SaturatingGrowth}, "cannot be fitted"),
        ({"scheme": "additive"}, "cannot be fitted"),
        ({"folds": 5}, "a fold scheme has a method split"),
        ({"surrogate": 3}, "surrogate must be callable"),
        ({"train_surrogate": 3}, r"train_surrogate\(segments\)"),
        ({"surrogate": None, "train_surrogate": None}, "no model"),
        ({"surrogate": lambda x: x[:, :1]}, "must return the next state of each"),
        ({"surrogate": torch.nn.Linear(2, 2)}, "training mode"),
    ],
)
def test_unusable_settings_are_refused_before_any_training(settings, message):
    def untouched(segments):
        raise AssertionError

    arguments = {"surrogate": analogue([STATES]), "train_surrogate": untouched}
    with pytest.raises((ValueError, TypeError), match=message):
        small(**{**arguments, **settings}).fit(STATES[:700])


def test_folds_that_cut_every_step_are_refused():
    class EverySecond:
        def split(self, points, y=None, groups=None):
            rows = np.arange(len(points))
            yield rows[::2], rows[1::2]

    with pytest.raises(ValueError, match="no two consecutive states"):
        small(None, analogue, folds=EverySecond()).fit(STATES)


def test_a_random_surrogate_is_refused():
    noise = np.random.default_rng(0)
    with pytest.raises(ValueError, match="two answers"):
        small(lambda x: x + noise.random(x.shape), None).fit(STATES[:700])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STATES[:3], 0), "n_steps=0"),
        ((STATES[:3], 2.0), "n_steps=2.0"),
        ((STATES[0], 3), "first dimension of 1"),
        ((STATES[:0], 3), "at least one state"),
        ((STATES[:3, :1], 3), r"shape \(3, 1\)"),
        ((STATES[:3] * np.nan, 3), "nan"),
        ((STATES[:3], 3, 0.0), "tolerance=0.0"),
        ((STATES[:3], 3, np.ones(3)), r"tolerance has shape \(3,\)"),
    ],
)
def test_unusable_questions_are_refused(fitted, arguments, message):
    with pytest.raises(ValueError, match=message):
        fitted.assess(*arguments)


def test_asking_before_fitting_is_refused():
    with pytest.raises(NotFittedError):
        small(None, analogue).assess(STATES[:2], 3)


def test_errors_of_user_code_say_where_they_happened():
    def fails(segments):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        small(analogue([STATES]), fails).fit(STATES[:700])
    assert "fold 1 of 5" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "folds", [TemporalFolds(4, gap=10), RandomFolds(3), ClusterFolds(3)], ids=repr
)
def test_every_scheme_of_folds_serves(folds):
    a = small(None, analogue, folds=folds).fit(STATES[:700]).assess(STATES[700:702], 5)
    assert (a.error_hat > 0).all()


class Counting:
    """A recipe that counts its trainings, and dies at one of them if told to."""

    def __init__(self, dies_at=None):
        self.dies_at, self.n_calls = dies_at, 0

    def __repr__(self):
        return "Counting()"

    def __call__(self, segments):
        self.n_calls += 1
        if self.n_calls == self.dies_at:
            raise KeyboardInterrupt
        return analogue(segments)


def same_answers(one, other):
    a, b = (geoq.assess(STATES[700:704], 6, tolerance=0.5) for geoq in (one, other))
    np.testing.assert_array_equal(a.error_hat, b.error_hat)
    np.testing.assert_array_equal(a.trusted_horizon, b.trusted_horizon)


def test_a_killed_fit_trains_only_what_was_not_finished_and_ends_the_same(tmp_path):
    train = Counting(dies_at=3)
    geoq = small(STEP, train)
    with pytest.raises(KeyboardInterrupt):
        geoq.fit(STATES[:700], checkpoint=tmp_path)
    assert not hasattr(geoq, "calibration_")
    geoq.fit(STATES[:700], checkpoint=tmp_path)
    assert train.n_calls == 3 + 3  # two were finished, the third is trained again
    same_answers(geoq, small(STEP, analogue).fit(STATES[:700]))
    again = small(STEP, train).fit(STATES[:700], checkpoint=tmp_path)
    assert train.n_calls == 6
    same_answers(geoq, again)


def test_rollouts_that_diverged_are_kept_as_such(tmp_path):
    def explodes(segments):
        del segments
        return lambda x: 1e3 * x + 1

    first, second = (
        small(STEP, explodes).fit(STATES[:700], checkpoint=tmp_path) for _ in range(2)
    )
    assert first.calibration_.error.isinf().any()
    assert torch.equal(first.calibration_.error, second.calibration_.error)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"n_calibration": 30}, "n_calibration was 40, now 30"),
        ({"n_starts": 10}, "starts was"),
        ({"folds": TemporalFolds(4)}, "folds was TemporalFolds"),
        ({"train_surrogate": Counting()}, r"train_surrogate was .* now Counting\(\)"),
    ],
)
def test_a_checkpoint_of_other_rollouts_is_refused(tmp_path, change, difference):
    small(STEP, analogue).fit(STATES[:700], checkpoint=tmp_path)
    other = replace(small(STEP, analogue), **change)
    with pytest.raises(ValueError, match=difference) as refused:
        other.fit(STATES[:700], checkpoint=tmp_path)
    assert "use another folder, or delete this folder" in str(refused.value)


def test_a_checkpoint_knows_where_a_trajectory_ends(tmp_path):
    small(STEP, analogue).fit([STATES[:350], STATES[350:700]], checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"lengths was \[350, 350\], now \[700\]"):
        small(STEP, analogue).fit(STATES[:700], checkpoint=tmp_path)


def test_folds_may_be_trained_by_other_processes(tmp_path):
    def mean_change(segments):  # inside, so that it travels by value
        (tmp_path / str(os.getpid())).touch()
        change = np.concatenate([np.diff(s, axis=0) for s in segments]).mean(axis=0)
        return lambda x: 0.9 * x + change

    def fit():
        return small(STEP, mean_change).fit(STATES[:700]).calibration_

    here = fit()
    with parallel_config(backend="loky", n_jobs=2):
        there = fit()
    assert torch.equal(here.error, there.error)
    assert torch.equal(here.fold, there.fold)
    assert len([*tmp_path.iterdir()]) > 1


def test_fold_surrogates_may_be_brought_along(tmp_path):
    trained = []

    def remember(segments):
        trained.append(analogue(segments))
        return trained[-1]

    fresh = small(STEP, remember).fit(STATES[:700])
    brought = small(STEP, TrainedFolds(trained)).fit(STATES[:700], checkpoint=tmp_path)
    same_answers(fresh, brought)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(
        ValueError, match="TrainedFolds has 4 entries, but there are 5 folds"
    ):
        small(STEP, TrainedFolds(trained[:4])).fit(STATES[:700])
    with pytest.raises(ValueError, match="a TrainedFolds, which trains nothing"):
        small(None, TrainedFolds(trained)).fit(STATES[:700])
    random = nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"surrogates\[0\] is in training mode"):
        small(STEP, TrainedFolds([random] * 5)).fit(STATES[:700])


def test_a_recipe_for_pairs_is_refused():
    recipe = TrainNetwork(partial(MLP, 2, 2, hidden=(4,)))
    with pytest.raises(TypeError, match="pass a TrainRollout with the same"):
        small(STEP, recipe).fit(STATES[:700])


def test_a_fold_without_a_rollout_is_not_trained_and_keeps_its_number(monkeypatch):
    """The second of three trajectories is too short for a rollout."""
    parts = [henon(300), henon(20, seed=1), henon(300, seed=2)]
    seen = []

    def train(segments):
        seen.append(sum(map(len, segments)))
        return analogue(segments)

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    grouped = {"folds": GroupFolds(3), "n_starts": 40}
    geoq = small(STEP, train, **grouped).fit(parts)
    assert "100%" in screen.getvalue()
    assert len(seen) == 2
    by_start = np.repeat([0, 1, 2], [300, 20, 300])[geoq.calibration_.start]
    held_out = {f: set(by_start[geoq.calibration_.fold == f]) for f in range(3)}
    (empty,) = [fold for fold, numbers in held_out.items() if not numbers]
    assert sorted(map(len, held_out.values())) == [0, 1, 1]
    # Surrogates are found by the number of their fold.
    brought = [lambda x, n=n: x + n for n in range(3)]
    told = small(STEP, TrainedFolds(brought), **grouped).fit(parts).calibration_
    for fold in {0, 1, 2} - {empty}:
        first = told.features.prediction[told.fold == fold][:, 0]
        x0 = torch.from_numpy(np.concatenate(parts))[told.start[told.fold == fold]]
        assert_close(first, x0 + fold)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_bar_runs_over_the_rollouts_of_all_folds(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    small(None, analogue).fit(STATES[:700])
    shown = screen.getvalue()
    assert "100%" in shown
    for stage in ("deployed surrogate", "fold 1 of 5", "fold 5 of 5", "safe region"):
        assert stage in shown
    assert shown.count("\n") == 1
