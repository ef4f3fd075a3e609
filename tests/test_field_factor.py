import warnings
from dataclasses import replace

import pytest
import torch
from conftest import fresh
from torch.testing import assert_close

from geoq import (
    FieldIncrement,
    FieldScaleIncrement,
    GeoQ,
    IndicatorIncrement,
    RandomFolds,
    Training,
)
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import (
    FieldFactor,
    Grid,
    anchor_error,
    displacement,
    inputs,
    log_bound,
    prediction,
)
from geoq.increments.domain import Layout
from geoq.increments.factor import NoFactor
from geoq.increments.field_factor import _Validation
from geoq.increments.field_network import View
from geoq.increments.shapes import Shapes
from geoq.quantiles import pinball_loss

GRID = (6, 8)
PLANE = Layout(Grid(2), GRID, on_cells=True)
QUICK = FieldFactor(
    widths=(8,),
    n_splits=3,
    training=Training(n_steps=60, batch_size=16, learning_rate=1e-2, check_every=20),
)


def normal(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def uniform(n, seed=0):
    return torch.rand(
        n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def tuples(inputs, error, position=None, reach=0):
    n = len(error)
    features = GeometricFeatures(
        inputs, 1 + uniform(n, seed=7), 0 * error, 0 * error, inputs
    )
    number, one = torch.arange(n), torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, number, one, one, position, reach)


def driven(n=120, seed=0, grid=GRID, strength=1.0, **settings):
    """In channel 0 the size of the error is exp of the first input field; in channel 1 it is random."""
    inputs = normal(n, 2, *grid, seed=seed)
    drive = (strength * inputs[:, 0]).exp()
    size = torch.stack([drive, torch.ones_like(drive)], dim=1)
    return tuples(inputs, size * normal(n, 2, *grid, seed=seed + 1).abs(), **settings)


def noise(n=120, seed=0):
    """Errors that do not depend on the inputs."""
    return tuples(
        normal(n, 2, *GRID, seed=seed), normal(n, 2, *GRID, seed=seed + 1).abs()
    )


def fit(data, factor=QUICK):
    return FieldScaleIncrement(factor=factor).fit(data)


def loss_by_channel(model, data):
    missed = pinball_loss(data.error, model(data.features), 0.95)
    return missed.flatten(2).mean(dim=(0, 2))


@pytest.fixture(scope="module")
def fitted():
    return fit(driven())


def test_the_factor_lowers_the_loss_only_in_the_channel_that_the_inputs_determine(
    fitted,
):
    queries = driven(200, seed=100)
    plain = loss_by_channel(fit(driven(), NoFactor()), queries)
    learned = loss_by_channel(fitted, queries)
    assert learned[0] < 0.6 * plain[0]
    assert learned[1] < 1.02 * plain[1]


def test_the_bound_with_a_factor_covers_new_queries(fitted):
    queries = driven(200, seed=100)
    covered = (queries.error <= fitted(queries.features)).double().mean(dim=(0, 2, 3))
    assert ((covered > 0.93) & (covered < 0.98)).all()


def test_the_factor_does_not_raise_the_loss_where_nothing_can_be_learned():
    queries = noise(200, seed=100)
    learned, plain = (
        loss_by_channel(fit(noise(), factor), queries) for factor in (QUICK, NoFactor())
    )
    assert (learned < 1.02 * plain).all()


def test_the_same_random_state_gives_the_same_bounds_and_another_gives_others(fitted):
    features = driven(20, seed=100).features
    other = replace(QUICK, training=replace(QUICK.training, random_state=1))
    assert torch.equal(fit(driven())(features), fitted(features))
    assert not torch.equal(fit(driven(), other)(features), fitted(features))


def test_bounds_change_with_the_units_of_the_errors(fitted):
    """A power of two changes no digit."""
    data = driven()
    scaled = replace(data, error=data.error * 2.0**30)
    assert_close(
        fit(scaled)(data.features) / 2.0**30, fitted(data.features), rtol=1e-4, atol=0.0
    )


def test_a_factor_is_learned_for_fields_on_a_line():
    data, queries = driven(grid=(12,)), driven(200, seed=100, grid=(12,))
    learned, plain = (
        loss_by_channel(fit(data, factor), queries) for factor in (QUICK, NoFactor())
    )
    assert learned[0] < 0.7 * plain[0]
    assert learned[1] < 1.02 * plain[1]


def test_a_field_without_channels_counts_as_one_channel():
    data = driven()
    data = tuples(data.features.inputs, data.error[:, 0])
    model = FieldScaleIncrement(factor=QUICK).fit(data)
    assert model(data.features).shape == (120, *GRID)
    assert model.factor_.exponent.shape == (1,)


def test_a_new_network_has_the_factor_1():
    features = driven().features
    log = fresh(QUICK.network, 2, 2, PLANE)(
        (features.inputs.float(), features.support_distance)
    )
    assert log.shape == (120, 96)
    assert not log.any()


def test_the_factor_is_the_geometric_mean_over_the_networks(fitted):
    learned, features = fitted.factor_, driven(5, seed=100).features
    bound = torch.ones(5, 96, dtype=torch.float64)
    logs = [learned.log_factor(net, features, bound) for net in learned.networks]
    expected = (learned.exponent[:, None] * sum(logs) / 3).exp().flatten(1)
    assert len(logs) == 3
    assert_close(learned.factor(features, bound).float(), expected)


def test_the_factor_is_constant_beyond_the_distances_of_the_calibration(fitted):
    features = driven(5, seed=100).features
    bound = torch.ones(5, 96, dtype=torch.float64)
    far, farther = (
        fitted.factor_.factor(
            replace(features, support_distance=torch.full_like(bound[:, 0], distance)),
            bound,
        )
        for distance in (10.0, 1000.0)
    )
    assert torch.equal(far, farther)


@pytest.mark.parametrize("far", [10.0, 1e3, 1e6])
def test_factors_far_from_the_data_stay_in_the_range_of_held_out_tuples(fitted, far):
    """Without limits, inputs that are a million times larger would have a factor of exp(1e6)."""
    learned, features = fitted.factor_, driven(5, seed=100).features
    one = torch.ones(120, 96, dtype=torch.float64)
    factor = learned.factor(replace(features, inputs=far * features.inputs), one[:5])
    near = learned.factor(driven().features, one)
    # The limits are the range of the single networks, which is wider than the range of their mean.
    factor, near = factor.view(5, 2, 48), near.view(120, 2, 48)
    assert (factor.amax(dim=(0, 2)) < 3 * near.amax(dim=(0, 2))).all()
    assert (factor.amin(dim=(0, 2)) > near.amin(dim=(0, 2)) / 3).all()


@pytest.mark.parametrize(("strength", "exponents"), [(-1, [0.0]), (1, [0.75, 1.0])])
def test_held_out_tuples_choose_the_exponent_of_a_channel(fitted, strength, exponents):
    """It is near 1 if they resemble the training tuples, and 0 if their errors depend on the inputs in the opposite way."""
    held_out = driven(90, seed=100, strength=strength)
    parts = list(torch.arange(90).split(30))
    chosen = replace(fitted.factor_, exponent=torch.ones(2))
    _Validation(held_out, parts, fitted._bound).choose_exponents(chosen, 0.95)
    assert chosen.exponent[0] in exponents


@pytest.mark.parametrize("reach", [0, 1, 5, 17])
@pytest.mark.parametrize("n_splits", [2, 5])
def test_training_times_are_farther_than_the_reach_from_validation_times(
    reach, n_splits
):
    """100 times in random order, with two tuples each."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    position = order % 100
    data = driven(200, position=position, reach=reach)
    splits = replace(QUICK, n_splits=n_splits)._splits(data)
    validated = torch.cat([held_out for _, held_out in splits])
    assert validated.sort().values.tolist() == list(range(200))
    for rows, held_out in splits:
        apart = (position[rows][:, None] - position[held_out]).abs()
        assert apart.min() > reach
        # All tuples beyond the reach are used for training.
        assert len(rows) + len(held_out) >= 200 - 2 * 2 * reach


@pytest.mark.parametrize("n_splits", [2, 5])
def test_tuples_of_one_point_are_in_the_same_part(n_splits):
    data = replace(driven(), point=torch.arange(120) % 40)
    splits = replace(QUICK, n_splits=n_splits)._splits(data)
    validated = torch.cat([held_out for _, held_out in splits])
    assert validated.sort().values.tolist() == list(range(120))
    for rows, held_out in splits:
        assert not set((rows % 40).tolist()) & set((held_out % 40).tolist())
        assert len(rows) + len(held_out) == 120


def test_no_factor_is_learned_if_all_times_depend_on_each_other():
    model = fit(driven(position=torch.arange(120), reach=200))
    assert model.factor_ is None
    assert "no learned factor" in model.describe()


def test_channels_of_inputs_come_first_and_the_others_in_the_order_of_sees():
    data = driven(5)
    features = replace(data.features, anchor_error=2 * data.error)
    sees, bound = (anchor_error, log_bound, inputs), data.error.flatten(1)
    channels = View(sees, PLANE)(features, bound)[0].double()
    expected = [features.inputs, 2 * data.error, data.error.log()]
    assert_close(channels, torch.cat(expected, dim=1), atol=1e-6, rtol=1e-6)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"n_splits=1\): n_splits must be at least 2"):
        FieldFactor(n_splits=1)
    with pytest.raises(ValueError, match="a network must see at least one field"):
        FieldFactor(sees=())


def test_a_function_of_the_user_can_be_seen_but_not_stored():
    def squared(features, bound):
        return features.inputs**2

    factor = replace(QUICK, sees=(inputs, squared))
    model = fit(driven(), factor)
    assert model.factor_.networks[0].mean.shape == (4,)
    with pytest.raises(ValueError, match="a function of the user, which a file cannot"):
        model.state()


def never(x, y):
    pytest.fail("a surrogate was trained before the shapes were refused")


def fit_before_training(x_shape, y_shape, sees, **settings):
    """Fit GeoQ with fold surrogates that must not be trained."""
    model = FieldScaleIncrement(factor=replace(QUICK, sees=sees))
    geoq = GeoQ(
        lambda x: torch.zeros(len(x), *y_shape, dtype=x.dtype),
        never,
        folds=RandomFolds(3),
        increment_model=model,
        **settings,
    )
    geoq.fit(normal(40, *x_shape), normal(40, *y_shape, seed=1))


@pytest.mark.parametrize("x_shape", [(2, 8, 6), (48,)])
def test_inputs_on_another_grid_are_refused_before_training(x_shape):
    with pytest.raises(
        ValueError,
        match=rf"inputs has shape \({x_shape[0]},.*error has shape \(2, 6, 8\), .*remove inputs",
    ):
        fit_before_training(x_shape, (2, 6, 8), (inputs,))


def test_displacements_on_another_grid_are_refused_before_training():
    with pytest.raises(
        ValueError, match=r"row of the representation has shape \(96,\) and an error"
    ):
        fit_before_training(
            (2, 6, 8),
            (2, 6, 8),
            (inputs, displacement),
            representation=lambda x: x.flatten(1),
        )


def test_outputs_on_another_grid_are_refused():
    shapes = Shapes(z=(2, 6, 8), error=(6, 8), inputs=(2, 6, 8), outputs=(96,))
    View((inputs,), PLANE).check(shapes)
    with pytest.raises(ValueError, match=r"row of the outputs has shape \(96,\)"):
        View((inputs, prediction), PLANE).check(shapes)


def test_errors_without_a_grid_are_refused_before_training():
    with pytest.raises(ValueError, match=r"an error has shape \(3,\) .* no grid"):
        fit_before_training((3,), (3,), (inputs,))


def test_the_networks_see_standardised_channels_and_uncorrelated_inputs():
    first = normal(40, 1, *GRID, seed=0)
    later = first + 0.1 * normal(40, 1, *GRID, seed=1)
    other = 1e5 * normal(40, 1, *GRID, seed=2) + 3e5
    channels = torch.cat([first, later, other], dim=1).float()
    with torch.random.fork_rng():
        network = FieldFactor().network(3, 1, PLANE)
    network.fit_normalization(channels, 2, torch.ones(40))
    centred = channels - network.mean.view(-1, 1, 1)
    seen = torch.einsum("cd,nchw->dnhw", network.whitening, centred).flatten(1)
    assert_close(torch.cov(seen[:2]), torch.eye(2), atol=1e-3, rtol=0)
    assert_close(seen[2].std(), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_no_factor_is_used_with_fewer_tuples_than_the_quantile_level_requires():
    assert fit(driven(18)).factor_ is None


@pytest.mark.parametrize(
    ("shape", "n_spatial", "channels_last"),
    [
        ((24, 32, 3), 2, True),
        ((5, 24, 32, 1), 2, True),
        ((100, 3), 1, True),
        ((3, 24, 32), 2, False),
        ((24, 3), 2, False),  # a thin grid without channels
        ((2, 100, 4), 2, False),  # a thin grid with two channels
        ((3, 16), 1, False),
        ((24, 32, 5), 2, False),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        lambda shapes, n: FieldFactor(domain=Grid(n)).check_shapes(shapes),
        lambda shapes, n: FieldIncrement(n_spatial=n).check_shapes(shapes),
        lambda shapes, n: IndicatorIncrement(domain=Grid(n)).check_shapes(shapes),
    ],
    ids=["factor", "paper", "indicator"],
)
def test_shapes_that_look_like_channels_last_are_warned_of(
    model, shape, n_spatial, channels_last
):
    shapes = Shapes(shape, shape, shape, shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(shapes, n_spatial)
    assert len(caught) == channels_last
    if channels_last:
        order = (0, len(shape), *range(1, len(shape)))
        assert f"x.permute{order}" in str(caught[0].message)
        assert str(shape) in str(caught[0].message)
