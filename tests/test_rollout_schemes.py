"""MemberGrowth and AdditiveRecursion on the held-out rollouts of the Henon map."""

from dataclasses import replace

import numpy as np
import pytest
from henon import QUERIES, STATES, TRAINING, analogue, fitted, henon, small, truth_of
from numpy.testing import assert_allclose, assert_array_equal

from geoq import RolloutGeoQ
from geoq.parts import AdditiveRecursion, MemberGrowth
from geoq.quantiles import pinball_loss
from geoq.rollout.additive import _turns
from geoq.rollout.growth import step_factors


def calibration():
    return fitted().fitted_.calibration


def training(n_steps=30, **settings):
    from geoq import Training

    return Training(n_steps=n_steps, check_every=10, **settings)


# The default


def test_the_default_bound_saturates_at_a_multiple_of_the_climatology_and_the_sum_of_the_paper_does_not():
    additive = small(None, analogue, scheme=AdditiveRecursion(training=training())).fit(TRAINING)
    bound, total = (estimator.bound(QUERIES, 400) for estimator in (fitted(), additive))
    climatology = fitted().fitted_.reference.climatology.table
    assert bound.max() <= fitted().fitted_.bound.factor[-1].max() * climatology.max() * 1.5
    assert bound[:, 300:].mean() < 1.2 * bound[:, 30:60].mean()
    assert (np.diff(total, axis=1) >= 0).all()
    assert total[:, -1].mean() > 5 * total[:, 39].mean()
    bound = MemberGrowth(n_members=0).fit(calibration(), 0.95)
    features = calibration().features
    use, n = bound.climatological, features.n_steps
    assert use[-1]  # past the calibration horizon
    shape = np.where(use[:n, None], features.climatology, 1.0)
    assert_allclose(bound(features), bound.factor[:n] * shape)


def test_the_distance_to_the_data_matters_before_saturation_and_not_after_it():
    near, far = STATES[:20], STATES[:20] + np.array([0.3, -0.3])
    near, far = (fitted().bound(x0, 40).mean(axis=(0, 2)) for x0 in (near, far))
    assert far[0] > 1.5 * near[0]
    assert abs(far[-1] / near[-1] - 1) < 0.3


def test_coordinates_have_their_own_scale_and_exact_ones_no_bound():
    kinds = np.array([1.0, 1000.0])
    bound = small(None, analogue).fit(TRAINING * kinds).bound(QUERIES * kinds, 30)
    first, second = bound.mean(axis=(0, 1)) / (STATES * kinds).std(axis=0)
    assert 0.55 < first / second < 1.8
    states = np.concatenate([STATES, np.full((900, 1), 3.0)], axis=1)
    bound = small(None, analogue).fit(states[:700]).bound(states[700:720], 20)
    assert (bound[..., 2] == 0).all()
    assert_allclose(
        bound[..., :2], fitted().bound(QUERIES, 20), rtol=1e-3
    )  # chaos enlarges rounding


@pytest.mark.parametrize("n_lags", [2, 40])
def test_the_newest_value_of_a_window_of_lags_is_covered_at_every_step(n_lags):
    """Copied lags have no error; if they counted, they would fill the covered fraction alone."""

    def lagged(segments):
        step = analogue(segments)
        return lambda x: np.concatenate([x[:, 1:], step(x)[:, -1:]], axis=1)

    windows = np.lib.stride_tricks.sliding_window_view(henon(1800)[:, 0], n_lags)
    estimator = small(
        None, lagged, n_starts=100, n_calibration=20, scheme=MemberGrowth(companion=None)
    ).fit(windows[:1200])
    a = estimator.assess(windows[1200:1700], 20)
    covered = abs(truth_of(windows, 1200, 500, 20) - a.prediction) <= a.error_hat
    assert covered.mean(axis=0).min() >= 0.9
    assert covered.mean(axis=0)[:, -1].mean() < 0.98
    assert (a.error_hat[:, 0, :-1] == 0).all()


def test_factors_of_steps_are_conformal_quantiles_of_the_rollouts_that_do_not_diverge():
    error = np.random.default_rng(0).random((100, 3, 2))
    some, shape = error.copy(), np.ones_like(error)
    some[40:, 1:] = np.nan
    some[10:, 2:] = np.nan
    factor = step_factors(some, shape, 0.95)
    assert_array_equal(factor[0], step_factors(error, shape, 0.95)[0])
    assert_array_equal(factor[1], step_factors(error[:40, 1:2], shape[:40, 1:2], 0.95)[0])
    assert np.isinf(factor[2]).all()
    # Of 39 ratios, the 38th is the smallest that has 0.95 * 40 of them below it or at it.
    error = np.random.default_rng(0).permutation(np.arange(1.0, 40.0)).reshape(39, 1, 1)
    assert_allclose(step_factors(error, np.full_like(error, 2.0), 0.95), [[19.0]])


def test_factors_of_steps_that_differ_from_their_neighbours_are_near_their_own_quantile():
    rng, size = np.random.default_rng(0), np.where(np.arange(40) % 2, 10.0, 1.0)[:, None]
    error, fresh = (size * abs(rng.standard_normal((n, 40, 1))) for n in (200, 5000))
    factor = step_factors(error, np.ones_like(error), 0.95)
    losses = [pinball_loss(fresh, k, 0.95).mean() for k in (factor, np.sort(error, axis=0)[190])]
    assert losses[0] < 1.03 * losses[1]


def test_a_scheme_of_the_user_is_used_and_checked(tmp_path):
    class Constant:
        def __init__(self, value):
            self.value = value

        def fit(self, calibration, quantile):
            self.quantile = quantile
            return lambda features: self.value + 0 * features.climatology

    scheme = Constant(0.5)
    estimator = small(None, analogue, scheme=scheme, quantile=0.8).fit(TRAINING)
    assert scheme.quantile == 0.8
    assert (estimator.bound(QUERIES, 10) == 0.5).all()
    with pytest.raises(TypeError, match="an object of the user, which a file cannot hold"):
        estimator.save(tmp_path / "rollout.geoq")
    with pytest.raises(ValueError, match="nonnegative numbers"):
        small(None, analogue, scheme=Constant(-1.0)).fit(TRAINING)


# The paper's


def test_the_sum_of_the_paper_is_trained_only_on_rollouts_that_do_not_diverge():
    features, error = calibration().features, calibration().error
    alive = np.ones_like(features.alive)
    alive[:3, 20:] = False
    features = replace(features, alive=alive)
    some = replace(
        calibration(), features=features, error=np.where(alive[..., None], error, np.nan)
    )
    scheme = AdditiveRecursion(training=training())
    assert np.isfinite(scheme.fit(some, 0.95)(calibration().features)).all()
    none = replace(some, features=replace(features, alive=np.zeros_like(alive)))
    with pytest.raises(ValueError, match="n_calibration=40, but all 100 calibration"):
        scheme.fit(none, 0.95)


@pytest.mark.parametrize(("n_folds", "sizes"), [(1, [12]), (3, [4] * 3), (12, [3, 3, 2, 2, 2])])
def test_every_fold_stops_one_training_of_the_sum(n_folds, sizes):
    fold = np.arange(12) % n_folds
    turns = list(_turns(fold))
    assert [len(held_out) for _, held_out in turns] == sizes
    assert sorted(np.concatenate([own for _, own in turns]).tolist()) == [*range(12)]
    for rows, held_out in turns[1:]:
        assert not set(fold[rows]) & set(fold[held_out])


def test_a_file_keeps_the_sum_of_the_paper(tmp_path):
    scheme, path = AdditiveRecursion(hidden=(8,), training=training()), tmp_path / "sum.geoq"
    estimator = small(None, analogue, scheme=scheme, representation=np.tanh).fit(TRAINING)
    estimator.save(path)
    own = {"surrogate": estimator.surrogate_, "representation": np.tanh}
    loaded = RolloutGeoQ.load(path, **own)
    assert loaded.scheme == scheme
    assert "30 steps" not in loaded.describe() or estimator.fitted_.bound.n_steps == 30
    assert_array_equal(loaded.bound(QUERIES, 50), estimator.bound(QUERIES, 50))
    other = replace(scheme, psi=lambda features: features.displacement)
    with pytest.raises(TypeError, match="psi is a function, an object of the user"):
        small(None, analogue, scheme=other).fit(TRAINING).save(path)
