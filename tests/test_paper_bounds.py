"""The bounds of the paper, and its form of the estimator."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made import made_tuples
from numpy.testing import assert_allclose, assert_array_equal

from geoq import ClusterFolds, GeoQ, Grid, Mesh, Training
from geoq.bounds.paper import NormScaledBound, NormScaledFieldBound
from geoq.core.geometry import Features
from geoq.data.domain import Layout, Shapes
from geoq.regions.region import PaperRegion

QUICK = Training(n_steps=400, batch_size=128, learning_rate=3e-3, check_every=50)
BRIEF = Training(n_steps=30, batch_size=16, check_every=10)


def made(error, displacement, distance=None, **parts):
    """Tuples whose anchor errors are zero, so that the increment is the error."""
    norm = np.linalg.norm(displacement.reshape(len(error), -1), axis=1)
    known = norm if distance is None else distance
    return made_tuples(error, displacement, distance=known, **parts)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def scalar_set(n=2000):
    displacement = noise(n, 2)
    length = np.linalg.norm(displacement, axis=1)
    return made((length * abs(noise(n, seed=1)))[:, None], displacement)


def vector_set(n=600):
    return made(abs(noise(n, 3) * noise(n, 3, seed=1)), noise(n, 3))


def field_set(z, error, n=60, **parts):
    return made(abs(noise(n, *error, seed=1)), noise(n, *z), **parts)


FIELDS = NormScaledFieldBound(widths=(4, 8), training=BRIEF)
MEMBERS = [
    pytest.param(NormScaledBound(training=QUICK), scalar_set(), id="scalar"),
    pytest.param(NormScaledBound(training=QUICK), vector_set(), id="vector"),
    pytest.param(FIELDS, field_set((2, 16), (3, 16)), id="line"),
    pytest.param(FIELDS, field_set((1, 6, 5), (4, 6, 5), domain=Grid(2)), id="plane"),
]


@pytest.mark.parametrize(("model", "tuples"), MEMBERS)
def test_the_bound_is_the_anchor_error_plus_a_nonnegative_increment(model, tuples):
    bound, features = model.fit(tuples, 0.95), tuples.features
    increment = bound(features)
    assert increment.shape == tuples.error.shape
    assert (increment >= 0).all()
    with_anchor = replace(features, anchor_error=tuples.error)
    assert_allclose(bound(with_anchor), tuples.error + increment)
    zero = (np.zeros_like(features.displacement), np.zeros(len(features)))
    rest = tuples.error, features.prediction, features.inputs
    assert_array_equal(bound(Features(*zero, *rest)), tuples.error)


@pytest.mark.parametrize(("model", "tuples"), MEMBERS)
def test_a_fit_repeats_bit_for_bit_and_units_of_the_error_change_nothing_else(model, tuples):
    once, twice = (model.fit(tuples, 0.95)(tuples.features) for _ in range(2))
    assert_array_equal(once, twice)
    for unit in (1e-6, 1e6):
        scaled = replace(tuples, errors=tuples.errors * unit)
        bound = model.fit(scaled, 0.95)(tuples.features)
        assert_allclose(bound / unit, once, rtol=1e-2, atol=1e-3)


def test_increments_have_the_coverage_of_their_level_in_any_unit_and_grow_with_the_displacement():
    # The 0.9 quantile of |psi| |N(0, 1)| is 1.645 |psi| for every psi.
    tuples = scalar_set()
    bound = NormScaledBound(training=QUICK).fit(tuples, 0.9)(tuples.features)
    assert abs((tuples.increment <= bound).mean() - 0.9) < 0.02
    assert abs(np.median(bound[:, 0] / tuples.features.distance) - 1.645) < 0.15
    # Two outputs with the same errors, one of them in other units, and without half of its errors.
    one = scalar_set(1000)
    error = np.concatenate([one.error, 1000 * one.error], axis=1)
    error[noise(1000, seed=3) > 0, 1] = np.nan
    tuples = made(error, noise(1000, 2))
    bound = NormScaledBound(training=QUICK).fit(tuples, 0.95)(tuples.features)
    present = ~np.isnan(error)
    covered = ((error <= bound) & present).sum(axis=0) / present.sum(axis=0)
    assert (abs(covered - 0.95) < 0.03).all()


@pytest.mark.parametrize(
    ("error", "displacement"),
    [(0 * noise(50, 1), noise(50, 2)), (noise(50, 1) ** 2, np.zeros((50, 2)))],
)
def test_without_errors_or_without_features_the_increment_is_zero(error, displacement):
    tuples = made(error, displacement)
    assert not NormScaledBound(training=QUICK).fit(tuples, 0.95)(tuples.features).any()


def test_an_output_that_is_zero_after_training_raises():
    """With a learning rate this large the softplus becomes zero after one step, and the held-out rows prefer zero."""
    training = Training(n_steps=20, learning_rate=1e4, check_every=1, batch_size=100)
    rows = training.hold_out(torch.arange(100))[0].numpy()
    error = np.zeros((100, 1))
    error[rows] = 1e-30
    error[rows[:50]] = 1.0
    with pytest.raises(RuntimeError, match="anchor error everywhere in 1 of 1 output coordinates"):
        NormScaledBound(training=training).fit(made(error, np.ones((100, 1))), 0.2)


def test_shapes_that_do_not_fit_raise():
    def check(z, error, domain, model=FIELDS, **on):
        layout = Layout(domain, error[-domain.n_axes :], **{"on_cells": True, **on})
        model.check_shapes(Shapes(z, error, z, error), layout)

    check((2, 8), (3, 8), Grid(1))
    with pytest.raises(ValueError, match=r"shape \(2, 8\) and an error has shape \(2, 9\)"):
        check((2, 8), (2, 9), Grid(1))
    with pytest.raises(ValueError, match=r"on one grid, .* or use NormScaledBound"):
        check((2, 8), (2, 8), Mesh(noise(8, 2)))
    weighted = replace(FIELDS, weights=(1.0, 1.0, 1.0, 2.0))
    check((3, 8, 8), (4, 8, 8), Grid(2), weighted)
    with pytest.raises(ValueError, match=r"has 4 weights, but .* shape \(2, 8, 8\); pass 2"):
        check((3, 8, 8), (2, 8, 8), Grid(2), weighted)
    with pytest.raises(ValueError, match="NormScaledFieldBound is for fields"):
        FIELDS.check_shapes(Shapes((3,), (3,), (3,), (3,)), Layout())


def test_a_lead_time_of_weight_0_is_not_trained_and_equal_weights_have_no_effect():
    error = np.random.default_rng(0).uniform(size=(40, 2, 4, 4))
    tuples = made(error, error[:, :1] - 0.5, domain=Grid(2))

    def last_layer(weights, n_steps):
        training = Training(n_steps=n_steps, batch_size=16, learning_rate=1e-2)
        model = NormScaledFieldBound(widths=(4,), training=training, weights=weights)
        return model.fit(tuples, 0.95).rate.network.output.weight.detach()

    short, long = (last_layer((1.0, 0.0), n_steps) for n_steps in (5, 10))
    assert torch.equal(short[1], long[1])
    assert not torch.equal(short[0], long[0])
    assert torch.equal(last_layer((1.0, 1.0), 5), last_layer((), 5))


# The form of the paper


@pytest.mark.parametrize(("shape", "model"), [
    ((2,), NormScaledBound(training=BRIEF)),
    ((), NormScaledBound(training=BRIEF)),
    ((1, 6, 7), FIELDS),
], ids=["table", "numbers", "fields"])  # fmt: skip
def test_the_form_of_the_paper_and_its_file(shape, model, tmp_path):
    x = noise(60, *shape)
    estimator = GeoQ.paper(np.tanh, None, bound_model=model, n_anchors=3)
    assert estimator.folds == ClusterFolds(5)
    assert estimator.safe_region == PaperRegion()
    answer = estimator.fit(x, x).assess(2 * x)
    # phi is the identity, and each step of line 14 is measured in the units of x.
    anchors = x[answer.anchors].mean(axis=1)
    assert_allclose(answer.displacement, 2 * x - anchors)
    assert_allclose(answer.anchor_error, abs(x - np.tanh(x))[answer.anchors].mean(axis=1))
    assert (answer.increment >= 0).all()
    estimator.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=np.tanh)
    assert_array_equal(loaded.bound(2 * x), answer.error_hat)
    assert loaded.bound_model == model
