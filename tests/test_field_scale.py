from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from geoq import FieldScaleIncrement, Training
from geoq.crossfit import CalibrationPoints, CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import Climatology, FieldFactor, LowRankScale
from geoq.increments.factor import NoFactor
from geoq.increments.shapes import Shapes
from geoq.quantiles import pinball_loss

FIELD = (2, 6, 8)
PLAIN = FieldScaleIncrement(factor=NoFactor())
QUICK = FieldFactor(
    widths=(8,),
    n_splits=3,
    training=Training(n_steps=60, batch_size=16, learning_rate=1e-2, check_every=20),
)


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def fields(n=60, seed=0, unit=1.0):
    """Exponentially distributed errors with a map that both channels have in common; anchor errors are like errors."""
    scale = unit * (2 * uniform(6, 8, seed=99)).exp()
    error, anchor = (-scale * uniform(n, *FIELD, seed=seed + k).log() for k in (1, 2))
    distance, inputs = 1 + uniform(n, seed=seed), torch.zeros_like(error)
    features = GeometricFeatures(inputs, distance, anchor, inputs, inputs)
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


def driven(n=120):
    """The size of the errors is exp of the first input field."""
    x = torch.randn(
        n, *FIELD, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    data = fields(n)
    error = data.error * x[:, :1].exp()
    return replace(data, error=error, features=replace(data.features, inputs=x))


def bound_of(model, features):
    return features.anchor_error + model(features)


def test_the_bound_does_not_depend_on_the_anchor_error():
    data, other = fields(), fields(seed=10).features.anchor_error
    model = PLAIN.fit(data)
    assert_close(
        bound_of(model, data.features),
        bound_of(model, replace(data.features, anchor_error=other)),
    )


def test_increments_can_be_negative_but_bounds_cannot():
    data = fields()
    features = replace(data.features, anchor_error=3 * data.features.anchor_error)
    model = PLAIN.fit(data)
    assert model.may_be_negative
    assert (model(features) < 0).any()
    assert (bound_of(model, features) >= 0).all()


def test_inside_the_data_the_bound_is_a_multiple_of_the_low_rank_scale():
    data = fields()
    model = PLAIN.fit(data)
    inside = data.features.support_distance <= model.edge_
    errors = data.error.__getitem__
    scale = LowRankScale().fit(errors, data.weight, data.error[0], 0.95)
    ratio = bound_of(model, data.features)[inside] / scale
    assert_close(ratio, ratio.mean().expand_as(ratio))


def test_beyond_the_edge_the_bound_rises_by_twice_the_steepest_slope():
    data = fields()
    model = PLAIN.fit(data)
    far, farther = (
        bound_of(
            model,
            replace(data.features, support_distance=torch.full((60,), d).double()),
        )
        for d in (5.0, 6.0)
    )
    slope = (data.error / data.features.support_distance.view(-1, 1, 1, 1)).sort(dim=0)
    assert_close(farther - far, 2 * slope.values[56].expand_as(far))


def test_the_bound_covers_new_fields():
    data, queries = fields(200), fields(200, seed=50)
    covered = queries.error <= bound_of(PLAIN.fit(data), queries.features)
    assert 0.93 < covered.double().mean() < 0.98


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_a_channel_without_errors_does_not_change_the_coverage_of_the_others(unit):
    data = fields(unit=unit)
    data.error[:, 1] = 0
    bound = bound_of(PLAIN.fit(data), data.features)
    assert 0.94 < (data.error <= bound)[:, 0].double().mean() < 0.98
    assert (bound[:, 1].mean(dim=0) < 0.01 * bound[:, 0].mean(dim=0)).all()


def points_with(outputs):
    """Points of which only the outputs are used."""
    return CalibrationPoints(outputs, outputs, outputs, (), None)


def test_a_climatology_lowers_the_loss_where_errors_have_its_size():
    data = fields(200)
    outputs = uniform(500, *FIELD, seed=5)
    prediction = 5 * uniform(200, *FIELD, seed=6) - 2
    natural = Climatology().fit(outputs, 0.95)(prediction.flatten(1))
    data = replace(
        data,
        error=data.error * natural.view_as(data.error),
        data=points_with(outputs),
        features=replace(data.features, prediction=prediction),
    )

    def loss(reference):
        model = replace(PLAIN, reference=reference).fit(data)
        return pinball_loss(data.error, bound_of(model, data.features), 0.95).mean()

    assert loss(Climatology()) < 0.9 * loss(None)


@pytest.mark.parametrize("reference", [None, Climatology()])
def test_the_state_of_a_model_restores_it(reference):
    data = replace(driven(), data=points_with(uniform(50, *FIELD, seed=5)))
    model = FieldScaleIncrement(factor=QUICK, reference=reference).fit(data)
    assert model.factor_ is not None
    again = FieldScaleIncrement.from_state(*model.state())
    assert torch.equal(again(data.features), model(data.features))
    assert again == model
    assert again.describe() == model.describe()
    assert len(model.describe()) < 200


def test_a_factor_of_the_user_is_not_stored():
    with pytest.raises(TypeError, match="a file cannot hold; use a FieldFactor"):
        PLAIN.fit(fields()).state()


def test_errors_without_a_grid_are_refused():
    with pytest.raises(
        ValueError, match=r"error has shape \(3,\) .* put the grid last"
    ):
        PLAIN.check_shapes(Shapes(z=(3,), error=(3,), inputs=(3,), outputs=(3,)))
