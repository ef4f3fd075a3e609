import warnings
from dataclasses import replace

import pytest
import torch
from conftest import fresh
from torch.testing import assert_close

from geoq import (
    FieldIncrement,
    GeoQ,
    IndicatorIncrement,
    PowerLawIncrement,
    RandomFolds,
    Training,
)
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import FieldFactor, View
from geoq.increments.field_factor import _Judged
from geoq.increments.shapes import Shapes
from geoq.quantiles import pinball_loss

GRID = (6, 8)
QUICK = FieldFactor(
    widths=(8,),
    n_groups=3,
    training=Training(n_steps=60, batch_size=16, learning_rate=1e-2, check_every=20),
)
LINE = replace(QUICK, n_spatial=1)


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
    """In channel 0 the error is as large as exp of the first input field there; in channel 1 nothing can be known."""
    inputs = normal(n, 2, *grid, seed=seed)
    drive = (strength * inputs[:, 0]).exp()
    size = torch.stack([drive, torch.ones_like(drive)], dim=1)
    return tuples(inputs, size * normal(n, 2, *grid, seed=seed + 1).abs(), **settings)


def noise(n=120, seed=0):
    """Nothing can be known at all."""
    return tuples(
        normal(n, 2, *GRID, seed=seed), normal(n, 2, *GRID, seed=seed + 1).abs()
    )


def fit(data, factor=QUICK):
    n_spatial = data.error.ndim - 2
    model = PowerLawIncrement.for_fields(n_spatial=n_spatial)
    return replace(model, factor=factor).fit(data)


def loss_by_channel(model, data):
    missed = pinball_loss(data.error, model(data.features), 0.95)
    return missed.flatten(2).mean(dim=(0, 2))


@pytest.fixture(scope="module")
def fitted():
    return fit(driven())


def test_what_the_query_says_of_its_errors_is_learned_where_it_says_something(fitted):
    queries = driven(200, seed=100)
    told, plain = (loss_by_channel(m, queries) for m in (fitted, fit(driven(), None)))
    assert told[0] < 0.6 * plain[0]
    assert told[1] < 1.02 * plain[1]


def test_the_bound_with_a_factor_covers_fresh_queries(fitted):
    queries = driven(200, seed=100)
    covered = (queries.error <= fitted(queries.features)).double().mean(dim=(0, 2, 3))
    assert ((covered > 0.93) & (covered < 0.98)).all()


def test_where_nothing_can_be_known_the_bound_stays_as_it_is():
    queries = noise(200, seed=100)
    told, plain = (loss_by_channel(fit(noise(), f), queries) for f in (QUICK, None))
    assert (told < 1.02 * plain).all()


def test_the_same_seed_gives_the_same_numbers_and_another_others(fitted):
    features = driven(20, seed=100).features
    other = replace(QUICK, training=replace(QUICK.training, random_state=1))
    assert torch.equal(fit(driven())(features), fitted(features))
    assert not torch.equal(fit(driven(), other)(features), fitted(features))


def test_the_unit_of_the_errors_does_not_matter(fitted):
    """A power of two, which changes no digit."""
    data = driven()
    scaled = replace(data, error=data.error * 2.0**30)
    assert_close(
        fit(scaled)(data.features) / 2.0**30, fitted(data.features), rtol=1e-4, atol=0.0
    )


def test_fields_on_a_line_have_a_factor_too():
    data, queries = driven(grid=(12,)), driven(200, seed=100, grid=(12,))
    told, plain = (loss_by_channel(fit(data, f), queries) for f in (LINE, None))
    assert told[0] < 0.7 * plain[0]
    assert told[1] < 1.02 * plain[1]


def test_a_field_without_channels_is_one_channel():
    data = driven()
    data = tuples(data.features.inputs, data.error[:, 0])
    model = PowerLawIncrement.for_fields(factor=QUICK).fit(data)
    assert model(data.features).shape == (120, *GRID)
    assert model.factor_.exponent.shape == (1,)


def test_a_fresh_network_leaves_the_bound_alone():
    features = driven().features
    log = fresh(QUICK.network, 2, 2)(
        (features.inputs.float(), features.support_distance)
    )
    assert log.shape == (120, 96)
    assert not log.any()


def test_the_factor_is_the_geometric_mean_of_the_networks_answers(fitted):
    learned, features = fitted.factor_, driven(5, seed=100).features
    bound = torch.ones(5, 96, dtype=torch.float64)
    logs = [learned.log_factor(net, features, bound) for net in learned.networks]
    expected = (learned.exponent[:, None] * sum(logs) / 3).exp().flatten(1)
    assert len(logs) == 3
    assert_close(learned.factor(features, bound).float(), expected)


def test_beyond_the_distances_it_has_seen_the_factor_stays(fitted):
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
def test_factors_of_queries_far_away_stay_in_the_range_of_held_out_tuples(fitted, far):
    """Inputs a million times those of the data would have a factor of exp(1e6)."""
    learned, features = fitted.factor_, driven(5, seed=100).features
    one = torch.ones(120, 96, dtype=torch.float64)
    factor = learned.factor(replace(features, inputs=far * features.inputs), one[:5])
    near = learned.factor(driven().features, one)
    # By channel; the range is that of each network, and the mean of all three has less.
    factor, near = factor.view(5, 2, 48), near.view(120, 2, 48)
    assert (factor.amax(dim=(0, 2)) < 3 * near.amax(dim=(0, 2))).all()
    assert (factor.amin(dim=(0, 2)) > near.amin(dim=(0, 2)) / 3).all()


@pytest.mark.parametrize(("strength", "exponents"), [(-1, [0.0]), (1, [0.75, 1.0])])
def test_held_out_tuples_choose_how_much_of_the_answer_a_channel_takes(
    fitted, strength, exponents
):
    """All of it where they are as those trained on; nothing where they are the other way round."""
    held_out = driven(90, seed=100, strength=strength)
    groups = list(torch.arange(90).split(30))
    chosen = replace(fitted.factor_, exponent=torch.ones(2))
    _Judged(held_out, groups, fitted._inside).choose(chosen, 0.95)
    assert chosen.exponent[0] in exponents


@pytest.mark.parametrize("n_networks", [1, 2, None])
def test_so_many_networks_are_trained(n_networks):
    model = fit(driven(), replace(QUICK, n_networks=n_networks))
    assert len(model.factor_.networks) == (n_networks or 3)


@pytest.mark.parametrize("reach", [0, 1, 5, 17])
@pytest.mark.parametrize("n_groups", [2, 5])
def test_along_time_no_network_is_judged_within_reach_of_what_it_trained_on(
    reach, n_groups
):
    """100 times in any order, two tuples each."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    position = order % 100
    data = driven(200, position=position, reach=reach)
    splits = replace(QUICK, n_groups=n_groups)._splits(data)
    judged = torch.cat([held_out for _, held_out in splits])
    assert judged.sort().values.tolist() == list(range(200))
    for rows, held_out in splits:
        apart = (position[rows][:, None] - position[held_out]).abs()
        assert apart.min() > reach
        # Nothing is left out that could have been trained on.
        assert len(rows) + len(held_out) >= 200 - 2 * 2 * reach


@pytest.mark.parametrize("n_groups", [2, 5])
def test_tuples_of_one_point_stay_together(n_groups):
    data = replace(driven(), point=torch.arange(120) % 40)
    splits = replace(QUICK, n_groups=n_groups)._splits(data)
    judged = torch.cat([held_out for _, held_out in splits])
    assert judged.sort().values.tolist() == list(range(120))
    for rows, held_out in splits:
        assert not set((rows % 40).tolist()) & set((held_out % 40).tolist())
        assert len(rows) + len(held_out) == 120


def test_where_all_times_depend_on_each_other_nothing_is_learned():
    model = fit(driven(position=torch.arange(120), reach=200))
    assert model.factor_ is None
    assert "no factor" in model.describe()
    assert "distance plays no part in the law" in model.describe()


def test_the_state_of_a_model_restores_it(fitted):
    features = driven(20, seed=100).features
    again = PowerLawIncrement.from_state(*fitted.state())
    assert torch.equal(again(features), fitted(features))
    assert again.describe() == fitted.describe()
    assert again.factor == fitted.factor


def test_the_view_puts_all_that_it_shows_side_by_side():
    data = driven(5)
    features = replace(data.features, anchor_error=data.error)
    bound = data.error.flatten(1)
    seen = View(anchor_error=True, bound=True)(features, bound, GRID)
    inputs, anchor, log = seen.double().split(2, dim=1)
    assert_close(inputs, features.inputs, atol=1e-6, rtol=1e-6)
    assert_close(anchor, data.error, atol=1e-6, rtol=1e-6)
    assert_close(log, data.error.log(), atol=1e-6, rtol=1e-6)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"n_groups=1, .* choose 2 or more"):
        FieldFactor(n_groups=1)
    with pytest.raises(ValueError, match="the View shows nothing"):
        View(inputs=False)


def never(x, y):
    pytest.fail("a surrogate was trained before the shapes were refused")


def refused(x_shape, y_shape, view, representation=None):
    """GeoQ, about to train surrogates on fields that do not fit."""
    model = PowerLawIncrement.for_fields(factor=replace(QUICK, view=view))
    geoq = GeoQ(
        lambda x: torch.zeros(len(x), *y_shape, dtype=x.dtype),
        never,
        folds=RandomFolds(3),
        increment_model=model,
        representation=representation,
    )
    geoq.fit(normal(40, *x_shape), normal(40, *y_shape, seed=1))


@pytest.mark.parametrize("x_shape", [(3,), (2, 8, 6), (48,)])
def test_inputs_on_another_grid_are_refused_before_anything_is_trained(x_shape):
    with pytest.raises(
        ValueError,
        match=rf"row of the inputs has shape \({x_shape[0]},.* an error \(2, 6, 8\), .*inputs=False",
    ):
        refused(x_shape, (2, 6, 8), View())


def test_displacements_on_another_grid_are_refused_before_anything_is_trained():
    with pytest.raises(
        ValueError, match=r"row of the representation has shape \(96,\) and an error"
    ):
        refused(
            (2, 6, 8),
            (2, 6, 8),
            View(displacement=True),
            representation=lambda x: x.flatten(1),
        )


def test_outputs_on_another_grid_are_refused():
    shapes = Shapes(z=(2, 6, 8), error=(6, 8), inputs=(2, 6, 8), outputs=(96,))
    View().check_shapes(shapes, 2)
    with pytest.raises(ValueError, match=r"row of the outputs has shape \(96,\)"):
        View(prediction=True).check_shapes(shapes, 2)


def test_errors_without_a_grid_are_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match=r"n_spatial=2, but an error has shape \(3,\)"):
        refused((3,), (3,), View())


def test_a_low_rank_scale_without_a_grid_is_refused_too():
    model = replace(PowerLawIncrement.for_fields(), factor=None)
    with pytest.raises(ValueError, match="put the grid last, or use coordinate_scale"):
        model.check_shapes(Shapes(z=(3,), error=(3,), inputs=(3,), outputs=(3,)))


def test_the_networks_see_every_channel_in_its_own_unit_and_the_inputs_uncorrelated():
    first = normal(40, 1, *GRID, seed=0)
    later = first + 0.1 * normal(40, 1, *GRID, seed=1)
    other = 1e5 * normal(40, 1, *GRID, seed=2) + 3e5
    channels = torch.cat([first, later, other], dim=1).float()
    with torch.random.fork_rng():
        network = FieldFactor().network(3, 1)
    network.fit_normalization(channels, 2, torch.ones(40))
    centred = channels - network.mean.view(-1, 1, 1)
    seen = torch.einsum("cd,nchw->dnhw", network.whitening, centred).flatten(1)
    assert_close(torch.cov(seen[:2]), torch.eye(2), atol=1e-3, rtol=0)
    assert_close(seen[2].std(), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_too_few_judges_leave_the_law_alone():
    """The lift that a factor needs could not be told."""
    few = driven(18)
    assert fit(few).factor_ is None


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
    "model", [FieldFactor, FieldIncrement, IndicatorIncrement], ids=lambda m: m.__name__
)
def test_what_looks_like_channels_last_is_warned_of(
    model, shape, n_spatial, channels_last
):
    shapes = Shapes(shape, shape, shape, shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(n_spatial=n_spatial).check_shapes(shapes)
    assert len(caught) == channels_last
    if channels_last:
        order = (0, len(shape), *range(1, len(shape)))
        assert f"x.permute{order}" in str(caught[0].message)
        assert str(shape) in str(caught[0].message)
