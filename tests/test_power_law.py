import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq import PowerLawIncrement
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import Climatology, FieldFactor, LowRankScale
from geoq.increments.power_law import (
    ANCHOR_WEIGHTS,
    EXPONENTS,
    MOST_VALUES,
    PowerLaw,
    _coordinates,
    fit_power_law,
)
from geoq.increments.scale import coordinate_scale
from geoq.increments.shapes import Shapes
from geoq.quantiles import inverse_cdf_quantile, pinball_loss, weighted_quantile


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def calibration(error, distance, anchor=None, n_folds=5, family=None, inputs=None):
    n = len(error)
    anchor = torch.zeros_like(error) if anchor is None else anchor
    inputs = torch.zeros(n, 1, dtype=torch.float64) if inputs is None else inputs
    features = GeometricFeatures(
        distance[:, None], distance, anchor, torch.zeros_like(error), inputs
    )
    fold = torch.arange(n) % n_folds
    family = torch.zeros(n, dtype=torch.long) if family is None else family
    return CalibrationSet(features, error, torch.arange(n), fold, family)


def grows_like(exponent, n=4000, scale=(1.0,)):
    """Errors whose conditional 0.95 quantile is 0.95 scale d^exponent."""
    distance = 0.5 + 2 * uniform(n)
    error = uniform(n, len(scale), seed=1) * torch.tensor(scale, dtype=torch.float64)
    return calibration(error * distance[:, None] ** exponent, distance)


PLAIN = PowerLawIncrement(factor=None)
GRID = [(alpha, kappa) for alpha in EXPONENTS for kappa in ANCHOR_WEIGHTS]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=12),
    st.sampled_from([0.05, 0.5, 0.9, 0.95]),
)
def test_a_weighted_quantile_is_the_quantile_of_repeated_values(pairs, level):
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    weights = torch.tensor([float(count) for _, count in pairs], dtype=torch.float64)
    repeated = values.repeat_interleave(weights.long())
    assert weighted_quantile(values, weights, level) == inverse_cdf_quantile(
        repeated, level
    )


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_the_exponent_of_the_growth_is_found(exponent):
    law = fit_power_law(grows_like(exponent), 0.95, GRID)
    assert abs(law.exponent - exponent) <= 0.25
    assert law.anchor_weight == 0


def test_some_cells_of_a_large_field_tell_exponent_and_level_of_all():
    """300,000 values, of which a third are never looked at, with a scale of each cell's own."""
    data = grows_like(1.0, n=300, scale=torch.linspace(1, 9, 1000).tolist())
    law = fit_power_law(data, 0.95, GRID)
    assert law.exponent == 1
    bound = law(data.features.support_distance, data.features.anchor_error)
    assert float((data.error <= bound).double().mean()) == pytest.approx(
        0.95, abs=0.005
    )


@pytest.mark.parametrize("n_wanted", [0, 100, 500, 999])
def test_some_coordinates_are_distinct_in_order_and_no_fewer_than_100(n_wanted):
    some = _coordinates(1000, n_wanted)
    assert len(some) == max(100, n_wanted)
    assert (some.diff() > 0).all()
    assert some[0] >= 0
    assert some[-1] < 1000
    assert torch.equal(some, _coordinates(1000, n_wanted))


def test_few_coordinates_are_all_taken():
    assert _coordinates(100, 0) == _coordinates(1000, 1000) == slice(None)


def test_a_large_field_has_the_law_of_every_tenth_of_its_cells():
    """A million values, of which a fifth is looked at, and a tenth of them, all looked at."""
    scale = torch.linspace(1, 9, 25_000, dtype=torch.float64)
    distance = 0.5 + 2 * uniform(40)
    error = distance[:, None] * scale * uniform(40, 25_000, seed=1)
    assert error[:, ::10].numel() < MOST_VALUES < error.numel()
    large, small = (
        fit_power_law(calibration(part, distance), 0.95, [(0.5, 0.0), (1.0, 0.0)])
        for part in (error, error[:, ::10])
    )
    assert large.exponent == small.exponent == 1
    assert large.level == pytest.approx(small.level, rel=0.02)


def test_the_bound_is_the_conditional_quantile():
    data = grows_like(2.0)
    bound = PLAIN.fit(data)(data.features)[:, 0]
    inside = data.features.support_distance < 2.3
    expected = 0.95 * data.features.support_distance**2
    assert_close(bound[inside], expected[inside], rtol=0.06, atol=0.0)


def test_an_error_like_that_of_the_anchor_is_read_off_the_anchor():
    anchor = uniform(3000, 1) + 0.1
    data = calibration(
        2 * anchor * uniform(3000, 1, seed=1), 1 + uniform(3000, seed=2), anchor
    )
    law = fit_power_law(data, 0.95, GRID)
    assert law.anchor_weight > 0
    bound = law(data.features.support_distance, anchor)
    share = torch.corrcoef(torch.stack([bound[:, 0], anchor[:, 0]]))[0, 1]
    assert share > 0.9


def test_the_level_minimises_the_pinball_loss():
    data = grows_like(1.0, n=500)
    law = fit_power_law(data, 0.95, GRID)

    def loss(level):
        shape = law.growth(data.features.support_distance)[:, None] * law.scale
        return pinball_loss(data.error, level * shape, 0.95).mean()

    assert loss(law.level) <= min(loss(law.level * 1.02), loss(law.level * 0.98))


def test_coordinates_have_scales_of_their_own():
    data = grows_like(1.0, scale=(1.0, 100.0))
    bound = PLAIN.fit(data)(data.features)
    assert_close(
        bound[:, 1] / bound[:, 0],
        torch.full((4000,), 100.0, dtype=torch.float64),
        rtol=0.1,
        atol=0.0,
    )


def test_families_of_folds_weigh_alike():
    """Many easy tuples and few hard ones: each family has half of the weight."""
    family = torch.cat(
        [torch.zeros(900, dtype=torch.long), torch.ones(100, dtype=torch.long)]
    )
    weight = calibration(uniform(1000, 1), 1 + uniform(1000), family=family).weight
    assert_close(weight[:900].sum().item(), 0.5)
    assert_close(weight[900:].sum().item(), 0.5)


def test_the_law_goes_on_along_its_tangent():
    law = PowerLaw(
        exponent=2.0,
        anchor_weight=0.0,
        level=1.0,
        unit=1.0,
        tangent=3.0,
        edge=9.0,
        scale=torch.ones(1),
        slope=torch.zeros(1),
    )
    assert_close(
        law.growth(torch.tensor([2.0, 3.0, 4.0, 5.0])),
        torch.tensor([4.0, 9.0, 15.0, 21.0]),
    )


def test_outside_the_support_the_bound_rises_by_the_mean_of_two_continuations():
    """By hand, at distance 3 beyond an edge of 2: the law rises from 4 to 9, the line by 4 times the slope 5."""
    law = PowerLaw(
        exponent=2.0,
        anchor_weight=0.0,
        level=1.0,
        unit=1.0,
        tangent=9.0,
        edge=2.0,
        scale=torch.ones(1),
        slope=torch.full((1,), 5.0),
    )
    distance, anchor = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 1)
    assert law(distance, anchor)[:, 0].tolist() == [1.0, 4.0, 4 + (5 + 20) / 2]
    lifted = law(distance, anchor, factor=2.0, lift=3.0)[:, 0]
    assert lifted.tolist() == [6.0, 24.0, 24 + (10 + 20) / 2]


def where_matters(n=3000):
    """At equal distances the error is ten times larger on the right."""
    inputs = uniform(n, 1, seed=3)
    size = torch.where(inputs > 0.5, 1.0, 0.1)
    return calibration(size * uniform(n, 1), 1 + uniform(n, seed=1), inputs=inputs)


def test_a_factor_that_wins_on_held_out_folds_stays():
    data = where_matters()
    model = PowerLawIncrement().fit(data)
    bound = model(data.features)
    right = data.features.inputs > 0.5
    assert model.factor_ is not None
    assert bound[right].mean() > 5 * bound[~right].mean()


def test_a_factor_that_wins_nothing_is_dropped():
    model = PowerLawIncrement().fit(grows_like(1.0))
    assert model.factor_ is None
    assert "no factor" in model.describe()


def test_the_trees_answer_as_scikit_learn_does():
    from sklearn.ensemble import HistGradientBoostingRegressor

    from geoq.increments.boosted_factor import Trees

    table, target = uniform(500, 3).numpy(), uniform(500, seed=1).numpy()
    model = HistGradientBoostingRegressor(
        max_iter=20, max_leaf_nodes=8, random_state=0
    ).fit(table, target)
    new = uniform(200, 3, seed=2) * 1.5 - 0.2
    assert_close(
        Trees.of(model)(new), torch.from_numpy(model.predict(new.numpy())).clamp(min=0)
    )


@pytest.mark.parametrize(
    "data", [where_matters(), grows_like(1.5)], ids=["factor", "plain"]
)
def test_the_state_of_a_model_restores_it(data):
    model = PowerLawIncrement().fit(data)
    again = PowerLawIncrement.from_state(*model.state())
    assert torch.equal(again(data.features), model(data.features))
    assert again.describe() == model.describe()


@pytest.mark.parametrize(
    "data", [where_matters(), grows_like(1.5), grows_like(2.0, scale=(1.0, 3.0))]
)
@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_units_do_not_matter(data, unit):
    """Powers of two, which change no digit: trees split by rank, and ranks may change with rounding."""
    scaled = replace(
        data,
        error=data.error * unit,
        features=replace(data.features, anchor_error=data.features.anchor_error * unit),
    )
    plain = PowerLawIncrement().fit(data)(data.features)
    assert_close(
        PowerLawIncrement().fit(scaled)(scaled.features) / unit,
        plain,
        rtol=1e-6,
        atol=1e-9,
    )


def test_increments_are_nonnegative_and_add_up_to_at_least_the_anchor_error():
    data = where_matters()
    anchor = 3 * uniform(3000, 1, seed=9)
    data = replace(data, features=replace(data.features, anchor_error=anchor))
    assert (PowerLawIncrement().fit(data)(data.features) >= 0).all()


def test_the_bound_is_lifted_until_it_holds_in_every_family_inside_the_data():
    """At the same distances one family's errors are three times the other's; pooled, the bound would miss them."""
    family = torch.arange(4000) % 2
    error = (1 + 2 * family)[:, None] * uniform(4000, 1, seed=1)
    data = calibration(error, 1 + uniform(4000), family=family)
    model = PLAIN.fit(data)
    near = data.features.support_distance <= model.law_.edge
    covered = data.error <= model(data.features)
    for number in (0, 1):
        assert covered[near & (family == number)].double().mean() >= 0.95


def natural(n=3000):
    """Errors as large as the distance of the predicted value to what the data do, whatever the geometry."""
    states = uniform(500, 2, seed=5)
    prediction = 3 * uniform(n, 2, seed=6) - 1
    climatology = Climatology.fit(states, 0.95)
    error = climatology(prediction) * uniform(n, 2, seed=7)
    data = calibration(error, 1 + uniform(n, seed=8))
    return replace(data, features=replace(data.features, prediction=prediction)), (
        climatology
    )


def test_a_reference_scale_says_where_outputs_naturally_vary():
    data, climatology = natural()
    plain, told = (
        PowerLawIncrement(factor=None, reference=reference).fit(data)
        for reference in (None, climatology)
    )
    loss = [
        pinball_loss(data.error, model(data.features), 0.95).mean()
        for model in (plain, told)
    ]
    assert loss[1] < 0.75 * loss[0]
    again = PowerLawIncrement.from_state(*told.state())
    assert torch.equal(again(data.features), told(data.features))


def test_a_reference_that_does_not_fit_is_refused():
    data, _ = natural(200)
    for reference in (lambda prediction: prediction[:, :1], torch.neg):
        with pytest.raises(ValueError, match="a scale for each error, none negative"):
            PowerLawIncrement(reference=reference).fit(data)


def test_a_climatology_of_other_outputs_is_refused_before_anything_is_fitted():
    model = PowerLawIncrement(reference=natural(200)[1])
    model.check_shapes(Shapes(z=(3,), error=(2,), inputs=(3,), outputs=(2,)))
    with pytest.raises(ValueError, match="a Climatology of 2 outputs, but an error"):
        model.check_shapes(Shapes(z=(3,), error=(), inputs=(3,), outputs=(2,)))


def test_an_output_that_never_varies_needs_no_reference():
    data, _ = natural()
    still = torch.stack([uniform(500), torch.ones(500, dtype=torch.float64)], dim=1)
    model = PowerLawIncrement(reference=Climatology.fit(still, 0.95)).fit(data)
    assert model(data.features).isfinite().all()


def test_errors_at_distance_zero_are_bounded():
    """Repeated noisy inputs: a law that vanishes at zero would call every repetition exact."""
    distance = torch.where(uniform(600) < 0.6, 0.0, uniform(600, seed=1))
    data = calibration(0.1 + uniform(600, 1, seed=2), distance)
    bound = PowerLawIncrement().fit(data)(data.features)
    assert (data.error <= bound)[distance == 0].double().mean() >= 0.9


def test_a_reference_of_the_users_own_stays_out_of_files():
    data, _ = natural(200)
    model = PowerLawIncrement(factor=None, reference=torch.ones_like).fit(data)
    with pytest.raises(ValueError, match="cannot be saved; use a Climatology"):
        model.state()


def test_no_error_at_all_gives_no_bound():
    data = calibration(torch.zeros(100, 1, dtype=torch.float64), 1 + uniform(100))
    assert not PowerLawIncrement().fit(data)(data.features).any()


def test_points_without_any_distance_are_survived():
    data = calibration(uniform(100, 1), torch.zeros(100, dtype=torch.float64))
    bound = PowerLawIncrement().fit(data)(data.features)
    assert bound.isfinite().all()
    assert (data.error <= bound).double().mean() >= 0.9


def test_impossible_quantiles_are_refused():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        PowerLawIncrement(quantile=math.inf)


FIELD = (2, 6, 8)


def fields(n=60, seed=0, unit=1.0):
    """Errors of a field with a map that both channels share, and anchors wrong by as much at random."""
    scale = unit * (2 * uniform(6, 8, seed=99)).exp()
    error, anchor = (-scale * uniform(n, *FIELD, seed=seed + k).log() for k in (1, 2))
    return calibration(error, 1 + uniform(n, seed=seed), anchor, inputs=0 * error)


UNANCHORED = replace(PowerLawIncrement.for_fields(), factor=None)


def test_the_form_for_fields_shares_its_scale_and_leaves_anchors_and_distance_out():
    factor, reference = FieldFactor(n_spatial=1, n_groups=2), torch.ones_like
    model = PowerLawIncrement.for_fields(
        0.9, n_spatial=1, reference=reference, factor=factor
    )
    assert model == PowerLawIncrement(
        0.9, factor, (0.0,), (0.0,), reference, LowRankScale(n_spatial=1)
    )
    assert PowerLawIncrement.for_fields(n_spatial=1).factor == FieldFactor(n_spatial=1)


def test_a_bound_without_weight_on_the_anchors_does_not_depend_on_their_errors():
    data, other = fields(), fields(seed=10).features.anchor_error
    model = UNANCHORED.fit(data)
    with_others = replace(data.features, anchor_error=other)
    assert_close(
        data.features.anchor_error + model(data.features), other + model(with_others)
    )


def test_such_a_bound_may_lie_below_the_anchors_but_never_below_zero():
    data = fields()
    features = replace(data.features, anchor_error=3 * data.features.anchor_error)
    increment = UNANCHORED.fit(data)(features)
    assert (increment < 0).any()
    assert (features.anchor_error + increment >= 0).all()


def test_anchors_are_kept_where_any_weight_on_them_may_be_chosen():
    data = fields()
    features = replace(data.features, anchor_error=3 * data.features.anchor_error)
    model = replace(UNANCHORED, anchor_weights=(0.0, 0.1)).fit(data)
    assert (model(features) >= 0).all()


@pytest.mark.parametrize("scale", [coordinate_scale, LowRankScale(rank=1)])
def test_the_law_has_the_scale_that_was_asked_for(scale):
    data = fields()
    law = replace(UNANCHORED, scale=scale).fit(data).law_
    expected = scale(data.error, data.weight, 0.95).flatten()
    assert_close(law.scale, expected / expected.mean())


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_a_channel_that_was_never_wrong_does_not_spoil_the_bound_of_the_others(unit):
    data = fields(unit=unit)
    data.error[:, 1] = 0
    bound = data.features.anchor_error + UNANCHORED.fit(data)(data.features)
    covered = (data.error <= bound)[:, 0].double().mean()
    assert 0.94 < covered < 0.98
    assert (bound[:, 1].mean(dim=0) < 0.01 * bound[:, 0].mean(dim=0)).all()


def test_a_scale_of_the_users_own_works_but_stays_out_of_files():
    data = fields()
    model = replace(UNANCHORED, scale=lambda e, w, q: e.mean(dim=0)).fit(data)
    bound = data.features.anchor_error + model(data.features)
    assert (data.error <= bound).double().mean() >= 0.95
    with pytest.raises(ValueError, match="is the user's own and cannot be saved; use"):
        model.state()


def test_a_field_in_the_form_for_tables_is_warned_of():
    field = Shapes(z=(2,), error=(3, 16, 24), inputs=(2,), outputs=(3, 16, 24))
    with pytest.warns(UserWarning, match=r"may be a field .*for_fields\(\)"):
        PowerLawIncrement().check_shapes(field)
    PowerLawIncrement().check_shapes(field._replace(error=(40, 3)))
    on_grid = field._replace(inputs=(1, 16, 24))
    PowerLawIncrement.for_fields().check_shapes(on_grid)
