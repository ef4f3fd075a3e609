import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq import FieldIncrement, NormScaledIncrement, Training
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes
from geoq.quantiles import inverse_cdf_quantile, pinball_loss

QUICK = Training(n_steps=400, batch_size=128, learning_rate=3e-3, check_every=50)
QUICK_FIELD = Training(n_steps=30, batch_size=16, check_every=10)


def calibration(error, displacement, support_distance=None):
    """Tuples whose anchor errors are zero, so that the increment is the error."""
    n = len(error)
    support = (
        displacement.reshape(n, -1).norm(dim=1)
        if support_distance is None
        else support_distance
    )
    features = GeometricFeatures(
        displacement,
        support,
        torch.zeros_like(error),
        torch.zeros_like(error),
        inputs=displacement,
    )
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scalar_set(n=2000):
    displacement = noise(n, 2)
    error = displacement.norm(dim=1, keepdim=True) * noise(n, 1, seed=1).abs()
    return calibration(error, displacement)


def vector_set(n=600):
    displacement = noise(n, 3)
    return calibration(displacement.abs() * noise(n, 3, seed=1).abs(), displacement)


def line_set(n=60):
    displacement = noise(n, 2, 8)
    return calibration(noise(n, 3, 8, seed=1).abs(), displacement)


def plane_set(n=40):
    displacement = noise(n, 1, 6, 5)
    return calibration(noise(n, 4, 6, 5, seed=1).abs(), displacement)


MEMBERS = [
    pytest.param(NormScaledIncrement(training=QUICK), scalar_set(), id="scalar"),
    pytest.param(NormScaledIncrement(training=QUICK), vector_set(), id="vector"),
    pytest.param(
        FieldIncrement(n_spatial=1, widths=(4, 8), training=QUICK_FIELD),
        line_set(),
        id="line",
    ),
    pytest.param(
        FieldIncrement(n_spatial=2, widths=(4, 8), training=QUICK_FIELD),
        plane_set(),
        id="plane",
    ),
]


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=30),
    st.sampled_from([0.05, 0.25, 0.5, 0.9, 0.95]),
    st.floats(0, 10),
)
def test_pinball_loss_is_least_at_the_inverse_cdf_quantile(values, level, other):
    values = torch.tensor(values, dtype=torch.float64)
    best = inverse_cdf_quantile(values, level)

    def loss(estimate):
        return pinball_loss(
            values, torch.full_like(values, float(estimate)), level
        ).mean()

    assert loss(best) <= loss(other) + 1e-12


def test_the_interpolating_quantile_is_not_the_minimiser():
    values = torch.tensor([0.0, 1.0, 1.0])
    assert inverse_cdf_quantile(values, 0.25) == 0.0
    assert torch.quantile(values, 0.25) == 0.5


@pytest.mark.parametrize(
    ("n", "level", "rank"), [(20, 0.95, 19), (100, 0.95, 95), (3, 0.5, 2), (1, 0.95, 1)]
)
def test_the_rank_of_a_quantile_is_not_changed_by_rounding(n, level, rank):
    assert inverse_cdf_quantile(torch.arange(1.0, n + 1), level) == rank


def test_the_pinball_loss_weighs_errors_above_the_bound_by_the_quantile_level():
    loss = pinball_loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0]), 0.75)
    assert loss.tolist() == [1.5, 0.5]


@pytest.mark.parametrize(("model", "calibration"), MEMBERS)
def test_increments_are_nonnegative_and_shaped_like_the_error(model, calibration):
    increment = model.fit(calibration)(calibration.features)
    assert increment.shape == calibration.error.shape
    assert (increment >= 0).all()


@pytest.mark.parametrize(("model", "calibration"), MEMBERS)
def test_the_increment_is_zero_where_psi_is_zero(model, calibration):
    zero = GeometricFeatures(
        *(torch.zeros_like(part[:1]) for part in calibration.features.parts)
    )
    assert not model.fit(calibration)(zero).any()


@pytest.mark.parametrize(("model", "calibration"), MEMBERS)
def test_a_fit_repeats_bit_for_bit(model, calibration):
    once = model.fit(calibration)(calibration.features)
    twice = model.fit(calibration)(calibration.features)
    assert torch.equal(once, twice)


@pytest.mark.parametrize(("model", "calibration"), MEMBERS)
def test_the_state_of_a_model_restores_it(model, calibration):
    settings, weights = model.fit(calibration).state()
    again = type(model).from_state(settings, weights)
    assert torch.equal(again(calibration.features), model(calibration.features))


@pytest.mark.parametrize(("model", "calibration"), MEMBERS)
@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_bounds_change_with_the_units_of_the_error(model, calibration, unit):
    """Errors in micrometres and in kilometres give the same bounds in their units."""
    scaled = replace(calibration, error=calibration.error * unit)
    plain = model.fit(calibration)(calibration.features)
    assert_close(
        model.fit(scaled)(calibration.features) / unit, plain, rtol=1e-2, atol=1e-3
    )


def test_the_increment_has_the_coverage_of_its_level_and_grows_with_the_displacement():
    """The 0.9 quantile of |psi| |N(0, 1)| is 1.645 |psi| for every psi."""
    data = scalar_set()
    model = NormScaledIncrement(quantile=0.9, training=QUICK).fit(data)
    bound = model(data.features)
    covered = (data.increment <= bound).float().mean().item()
    assert abs(covered - 0.9) < 0.02
    slope = bound[:, 0] / data.features.distance
    assert abs(slope.median().item() - 1.645) < 0.15


def test_outputs_of_different_size_are_covered_equally():
    """Two outputs with the same errors, one of them in other units."""
    displacement = noise(1000, 2)
    error = displacement.norm(dim=1, keepdim=True) * noise(1000, 1, seed=1).abs()
    data = calibration(torch.cat([error, 1000 * error], dim=1), displacement)
    bound = NormScaledIncrement(training=QUICK).fit(data)(data.features)
    covered = (data.increment <= bound).float().mean(dim=0)
    assert (abs(covered - 0.95) < 0.03).all()


def test_without_any_error_the_increment_is_zero():
    data = calibration(torch.zeros(50, 1), noise(50, 2))
    assert not NormScaledIncrement(training=QUICK).fit(data)(data.features).any()


def test_if_all_features_are_zero_the_increment_is_zero():
    data = calibration(torch.ones(50, 1), torch.zeros(50, 2))
    assert not NormScaledIncrement(training=QUICK).fit(data)(data.features).any()


def test_rare_errors_have_a_bound_where_they_occur():
    """Only large displacements have an error, in three percent of all tuples."""
    displacement = noise(4000, 1)
    error = (displacement > 1.9).float()
    data = calibration(error, displacement)
    bound = NormScaledIncrement(training=QUICK).fit(data)(data.features)
    assert bound[displacement > 2.2].mean() > 10 * bound[displacement < 1.0].mean()


def test_the_rate_of_rare_errors_starts_at_their_mean():
    """A field of 2 x 2 cells with ||psi|| = 1. The errors are 3 in all rows; 2 in one of 40 rows; 0; 4 in one of 40 rows."""
    error = torch.zeros(40, 1, 2, 2)
    error[:, 0, 0, 0], error[0, 0, 0, 1], error[1, 0, 1, 1] = 3.0, 2.0, 4.0
    displacement = torch.full((40, 2, 2), 0.5)
    data = calibration(error, displacement, support_distance=torch.zeros(40))
    model = FieldIncrement(widths=(4,), training=Training(n_steps=1, learning_rate=0.1))
    model._build((2, 2), (1, 2, 2))
    model.module_.fit_normalization(data, 0.95)
    with torch.no_grad():
        for parameter in model.module_.network.parameters():
            parameter.zero_()
    # The mean of the channel is 126 / 160; a cell without errors starts at a hundredth of it.
    first = torch.tensor([[3.0, 2 / 40], [1.26 / 160, 4 / 40]])
    assert_close(model(data.features)[0, 0], first)
    # The 42 nonzero errors of 160 have the sum 126.
    assert_close(model.module_.typical_rate[0], torch.full((2, 2), 3.0))


def test_an_output_that_is_zero_after_training_is_refused():
    """With a learning rate this large the softplus becomes zero after one step, and the held-out rows prefer zero."""
    displacement = torch.ones(100, 1)
    error = torch.zeros(100, 1)
    training = Training(n_steps=20, learning_rate=1e4, check_every=1, batch_size=100)
    rows, _ = training.hold_out(torch.arange(100))
    error[rows] = 1e-30
    error[rows[:50]] = 1.0
    with pytest.raises(
        RuntimeError, match="returns zero everywhere in 1 of 1 output coordinates"
    ):
        NormScaledIncrement(quantile=0.2, training=training).fit(
            calibration(error, displacement)
        )


@pytest.mark.parametrize("model", [NormScaledIncrement, FieldIncrement])
@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.1, math.nan])
def test_impossible_quantiles_are_refused(model, level):
    with pytest.raises(ValueError, match=r"quantile=.* strictly between 0 and 1"):
        model(quantile=level)


def test_fields_on_two_grids_are_refused():
    with pytest.raises(
        ValueError, match=r"shape \(2, 8\) and a row of the error has shape \(2, 9\)"
    ):
        FieldIncrement(n_spatial=1).check_shapes(Shapes((2, 8), (2, 9), (2, 8), (2, 9)))
    with pytest.raises(ValueError, match="do not end in the same grid"):
        FieldIncrement(n_spatial=2).check_shapes(Shapes((8,), (8,), (8,), (8,)))
    with pytest.raises(ValueError, match="choose 1 or 2"):
        FieldIncrement(n_spatial=3)


def test_weights_that_do_not_fit_the_error_are_refused():
    shapes = Shapes(z=(3, 8, 8), error=(4, 8, 8), inputs=(3, 8, 8), outputs=(4, 8, 8))
    FieldIncrement(weights=(1.0, 1.0, 1.0, 2.0)).check_shapes(shapes)
    with pytest.raises(
        ValueError, match=r"has 2 weights, but .* shape \(4, 8, 8\); pass 4"
    ):
        FieldIncrement(weights=(1.0, 2.0)).check_shapes(shapes)


def last_layer(weights, n_steps):
    error = torch.rand(
        40, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    training = Training(n_steps=n_steps, batch_size=16, learning_rate=1e-2)
    model = FieldIncrement(widths=(4,), training=training, weights=weights)
    fitted = model.fit(calibration(error, error[:, :1] - 0.5))
    return fitted.module_.network.unet.output.weight


def test_a_lead_time_of_weight_0_is_not_trained():
    short, long = (last_layer((1.0, 0.0), n_steps) for n_steps in (5, 10))
    assert torch.equal(short[1], long[1])
    assert not torch.equal(short[0], long[0])


def test_equal_weights_have_no_effect():
    assert torch.equal(last_layer((1.0, 1.0), 5), last_layer((), 5))


def test_a_trained_increment_ends_below_its_start():
    """The errors depend on the direction of the displacement, which the start does not use."""
    displacement = noise(1000, 2)
    error = displacement[:, :1].exp() * displacement.norm(dim=1, keepdim=True)
    model = NormScaledIncrement(training=QUICK).fit(calibration(error, displacement))
    (result,) = model.trainings_
    assert result.best_step > 0
    assert result.best_loss < 0.7 * result.first_loss
    assert result.best_loss <= result.last_loss


def test_a_trained_field_increment_ends_below_its_start():
    displacement = noise(60, 1, 8)
    error = displacement.exp() * displacement.flatten(1).norm(dim=1)[:, None, None]
    training = Training(n_steps=80, batch_size=16, check_every=20, learning_rate=3e-3)
    model = FieldIncrement(n_spatial=1, widths=(4, 8), training=training)
    (result,) = model.fit(calibration(error, displacement)).trainings_
    assert result.best_loss < 0.9 * result.first_loss


def test_an_increment_that_keeps_its_initial_weights_is_reported():
    model = NormScaledIncrement(training=replace(QUICK, n_steps=1, learning_rate=1e-30))
    with pytest.warns(
        UserWarning, match="has its initial weights.*Lower learning_rate"
    ):
        model.fit(scalar_set(100))
    assert model.trainings_[0].best_step == 0
