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
from geoq.increments import Climatology
from geoq.increments.boosted_factor import Trees
from geoq.increments.climatology import FittedClimatology
from geoq.increments.edge import random_coordinates
from geoq.increments.power_law import (
    ANCHOR_WEIGHTS,
    EXPONENTS,
    MAX_VALUES,
    PowerLaw,
    fit_power_law,
)
from geoq.increments.shapes import Shapes
from geoq.quantiles import inverse_cdf_quantile, pinball_loss, weighted_quantile


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def normal(*shape, seed=0):
    return torch.randn(
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


def test_a_sample_of_the_coordinates_determines_exponent_and_coefficient():
    """There are 300,000 values, each coordinate has its own scale, and two thirds of the values are sampled."""
    data = grows_like(1.0, n=300, scale=torch.linspace(1, 9, 1000).tolist())
    law = fit_power_law(data, 0.95, GRID)
    assert law.exponent == 1
    bound = law(data.features.support_distance, data.features.anchor_error)
    assert float((data.error <= bound).double().mean()) == pytest.approx(
        0.95, abs=0.005
    )


@pytest.mark.parametrize("n_wanted", [0, 100, 500, 999])
def test_sampled_coordinates_are_distinct_sorted_and_at_least_100(n_wanted):
    some = random_coordinates(1000, n_wanted)
    assert len(some) == max(100, n_wanted)
    assert (some.diff() > 0).all()
    assert some[0] >= 0
    assert some[-1] < 1000
    assert torch.equal(some, random_coordinates(1000, n_wanted))


def test_a_sample_of_few_coordinates_contains_all_of_them():
    assert random_coordinates(100, 0) == random_coordinates(1000, 1000) == slice(None)


def test_many_coordinates_have_the_same_law_as_every_tenth_of_them():
    """A million values, of which a fifth is sampled, and a tenth of them, which are all used."""
    scale = torch.linspace(1, 9, 25_000, dtype=torch.float64)
    distance = 0.5 + 2 * uniform(40)
    error = distance[:, None] * scale * uniform(40, 25_000, seed=1)
    assert error[:, ::10].numel() < MAX_VALUES < error.numel()
    large, small = (
        fit_power_law(calibration(part, distance), 0.95, [(0.5, 0.0), (1.0, 0.0)])
        for part in (error, error[:, ::10])
    )
    assert large.exponent == small.exponent == 1
    assert large.coefficient == pytest.approx(small.coefficient, rel=0.02)


def test_the_bound_is_the_conditional_quantile():
    data = grows_like(2.0)
    bound = PLAIN.fit(data)(data.features)[:, 0]
    inside = data.features.support_distance < 2.3
    expected = 0.95 * data.features.support_distance**2
    assert_close(bound[inside], expected[inside], rtol=0.06, atol=0.0)


def test_the_bound_follows_the_anchor_error_if_errors_do():
    anchor = uniform(3000, 1) + 0.1
    data = calibration(
        2 * anchor * uniform(3000, 1, seed=1), 1 + uniform(3000, seed=2), anchor
    )
    law = fit_power_law(data, 0.95, GRID)
    assert law.anchor_weight > 0
    bound = law(data.features.support_distance, anchor)
    assert torch.corrcoef(torch.stack([bound[:, 0], anchor[:, 0]]))[0, 1] > 0.9


def test_the_coefficient_minimises_the_pinball_loss():
    data = grows_like(1.0, n=500)
    law = fit_power_law(data, 0.95, GRID)

    def loss(multiple):
        shape = law.growth(data.features.support_distance)[:, None] * law.scale
        bound = multiple * law.coefficient * shape
        return pinball_loss(data.error, bound, 0.95).mean()

    assert loss(1.0) <= min(loss(1.02), loss(0.98))


def test_each_coordinate_has_its_own_scale():
    data = grows_like(1.0, scale=(1.0, 100.0))
    bound = PLAIN.fit(data)(data.features)
    assert_close(
        bound[:, 1] / bound[:, 0],
        torch.full((4000,), 100.0, dtype=torch.float64),
        rtol=0.1,
        atol=0.0,
    )


def test_families_of_folds_have_equal_weights():
    """One family has 900 tuples and the other has 100; each has half of the weight."""
    family = torch.cat(
        [torch.zeros(900, dtype=torch.long), torch.ones(100, dtype=torch.long)]
    )
    weight = calibration(uniform(1000, 1), 1 + uniform(1000), family=family).weight
    assert_close(weight[:900].sum().item(), 0.5)
    assert_close(weight[900:].sum().item(), 0.5)


def test_the_law_continues_along_its_tangent():
    law = PowerLaw(
        exponent=2.0,
        anchor_weight=0.0,
        coefficient=1.0,
        typical_distance=1.0,
        tangent=3.0,
        edge=9.0,
        scale=torch.ones(1),
        slope=torch.zeros(1),
    )
    assert_close(
        law.growth(torch.tensor([2.0, 3.0, 4.0, 5.0])),
        torch.tensor([4.0, 9.0, 15.0, 21.0]),
    )


def test_beyond_the_edge_the_bound_rises_by_the_mean_of_two_continuations():
    """From the edge at distance 2 to distance 3, the law rises from 4 to 9, and the line rises by 4 times the slope 5."""
    law = PowerLaw(
        exponent=2.0,
        anchor_weight=0.0,
        coefficient=1.0,
        typical_distance=1.0,
        tangent=9.0,
        edge=2.0,
        scale=torch.ones(1),
        slope=torch.full((1,), 5.0),
    )
    distance, anchor = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 1)
    assert law(distance, anchor)[:, 0].tolist() == [1.0, 4.0, 4 + (5 + 20) / 2]
    lifted = law(distance, anchor, factor=2.0, lift=3.0)[:, 0]
    assert lifted.tolist() == [6.0, 24.0, 24 + (10 + 20) / 2]


def located_errors(n=3000):
    """At equal distances the errors of inputs above 0.5 are ten times larger."""
    inputs = uniform(n, 1, seed=3)
    size = torch.where(inputs > 0.5, 1.0, 0.1)
    return calibration(size * uniform(n, 1), 1 + uniform(n, seed=1), inputs=inputs)


def test_a_factor_that_lowers_the_held_out_loss_is_used():
    data = located_errors()
    model = PowerLawIncrement().fit(data)
    bound = model(data.features)
    right = data.features.inputs > 0.5
    assert model.factor_ is not None
    assert bound[right].mean() > 5 * bound[~right].mean()


def test_a_factor_that_does_not_lower_the_held_out_loss_is_not_used():
    model = PowerLawIncrement().fit(grows_like(1.0))
    assert model.factor_ is None
    assert "no factor" in model.describe()


def test_the_description_of_a_model_with_trees_is_one_short_sentence():
    model = PowerLawIncrement().fit(located_errors())
    assert isinstance(model.factor_, Trees)
    assert "boosted trees" in model.describe()
    assert len(model.describe()) < 200
    assert "\n" not in model.describe()


@pytest.mark.parametrize("n_leaves", [2, 8, 31])
@pytest.mark.parametrize("loss", ["quantile", "squared_error"])
def test_the_trees_predict_what_scikit_learn_predicts(n_leaves, loss):
    """``Trees.of`` reads private attributes of scikit-learn, which a new version can change."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    table, target = normal(2000, 3).numpy(), 3 + normal(2000, seed=1).numpy()
    target = target + table[:, 0] + table[:, 0] * table[:, 1]
    model = HistGradientBoostingRegressor(
        loss=loss,
        quantile=0.9 if loss == "quantile" else None,
        max_iter=30,
        max_leaf_nodes=n_leaves,
        random_state=0,
    ).fit(table, target)
    # New rows, the rows of the training data, and rows outside their range.
    rows = torch.cat(
        [normal(500, 3, seed=2), torch.from_numpy(table), 9 * normal(50, 3)]
    )
    expected = torch.from_numpy(model.predict(rows.numpy()))
    assert expected.std() > 0.1
    assert_close(Trees.of(model)(rows), expected.clamp(min=0))


@pytest.mark.parametrize(
    "data", [located_errors(), grows_like(1.5)], ids=["factor", "plain"]
)
def test_the_state_of_a_model_restores_it(data):
    model = PowerLawIncrement().fit(data)
    again = PowerLawIncrement.from_state(*model.state())
    assert torch.equal(again(data.features), model(data.features))
    assert again.describe() == model.describe()


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        (located_errors(), 2.0**-20),
        (grows_like(1.5, n=1000), 2.0**20),
        (grows_like(2.0, n=500, scale=(1.0, 3.0)), 2.0**20),
    ],
    ids=["factor", "scalar", "vector"],
)
def test_bounds_change_with_the_units_of_the_errors(data, unit):
    """Powers of two change no digit; with other units, rounding could change the ranks by which trees split."""
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


def test_increments_are_nonnegative():
    data = located_errors()
    anchor = 3 * uniform(3000, 1, seed=9)
    data = replace(data, features=replace(data.features, anchor_error=anchor))
    model = PowerLawIncrement()
    assert not model.may_be_negative
    assert (model.fit(data)(data.features) >= 0).all()


def test_increments_can_be_negative_if_no_weight_on_the_anchors_is_allowed():
    data = located_errors()
    anchor = 3 * uniform(3000, 1, seed=9)
    data = replace(data, features=replace(data.features, anchor_error=anchor))
    model = PowerLawIncrement(factor=None, anchor_weights=(0.0,))
    assert model.may_be_negative
    increment = model.fit(data)(data.features)
    assert (increment < 0).any()
    assert (anchor + increment >= 0).all()


def test_the_bound_is_lifted_until_it_holds_in_every_family_inside_the_data():
    """At the same distances the errors of one family are three times as large."""
    family = torch.arange(4000) % 2
    error = (1 + 2 * family)[:, None] * uniform(4000, 1, seed=1)
    data = calibration(error, 1 + uniform(4000), family=family)
    model = PLAIN.fit(data)
    near = data.features.support_distance <= model.law_.edge
    covered = data.error <= model(data.features)
    for number in (0, 1):
        assert covered[near & (family == number)].double().mean() >= 0.95


def natural(n=3000):
    """Errors as large as the distance of the prediction to the values in the data, at any support distance."""
    outputs = uniform(500, 2, seed=5)
    prediction = 3 * uniform(n, 2, seed=6) - 1
    error = Climatology().fit(outputs, 0.95)(prediction) * uniform(n, 2, seed=7)
    data = calibration(error, 1 + uniform(n, seed=8))
    features = replace(data.features, prediction=prediction)
    return replace(data, features=features, outputs=outputs)


def test_a_reference_lowers_the_loss_where_errors_have_its_size():
    data = natural()
    plain, referred = (
        PowerLawIncrement(factor=None, reference=reference).fit(data)
        for reference in (None, Climatology())
    )
    loss, lower = (
        pinball_loss(data.error, model(data.features), 0.95).mean()
        for model in (plain, referred)
    )
    assert lower < 0.75 * loss
    again = PowerLawIncrement.from_state(*referred.state())
    assert isinstance(again.reference_, FittedClimatology)
    assert torch.equal(again(data.features), referred(data.features))


class Own:
    """A reference of the user."""

    def __init__(self, function):
        self.function = function

    def fit(self, outputs, quantile):
        return self.function


@pytest.mark.parametrize("function", [lambda prediction: prediction[:, :1], torch.neg])
def test_a_reference_with_wrong_or_negative_scales_is_refused(function):
    with pytest.raises(ValueError, match="must return a nonnegative scale for each"):
        PowerLawIncrement(reference=Own(function)).fit(natural(200))


def test_a_reference_for_errors_that_are_not_elementwise_is_refused():
    model = PowerLawIncrement(reference=Climatology())
    model.check_shapes(Shapes(z=(3,), error=(2,), inputs=(3,), outputs=(2,)))
    with pytest.raises(ValueError, match=r"has one scale per output, but .*\(2,\)"):
        model.check_shapes(Shapes(z=(3,), error=(), inputs=(3,), outputs=(2,)))


def test_an_output_that_never_varies_has_a_finite_bound():
    constant = torch.stack([uniform(500), torch.ones(500, dtype=torch.float64)], dim=1)
    data = replace(natural(), outputs=constant)
    model = PowerLawIncrement(reference=Climatology()).fit(data)
    assert model(data.features).isfinite().all()


def test_errors_at_distance_zero_have_a_bound():
    """Repeated noisy inputs: a law that is zero at distance zero would not cover them."""
    distance = torch.where(uniform(600) < 0.6, 0.0, uniform(600, seed=1))
    data = calibration(0.1 + uniform(600, 1, seed=2), distance)
    bound = PowerLawIncrement().fit(data)(data.features)
    assert (data.error <= bound)[distance == 0].double().mean() >= 0.9


def test_a_reference_of_the_user_is_not_stored():
    model = PowerLawIncrement(factor=None, reference=Own(torch.ones_like))
    with pytest.raises(TypeError, match=r"a file cannot hold; use Climatology\(\)"):
        model.fit(natural(200)).state()


def test_a_scale_of_the_user_is_fitted_but_not_stored():
    data = grows_like(1.0, scale=(1.0, 3.0))
    model = replace(PLAIN, scale=lambda e, w, q: e.mean(dim=0)).fit(data)
    assert (data.error <= model(data.features)).double().mean() >= 0.94
    with pytest.raises(ValueError, match="of the user, which a file cannot hold; use"):
        model.state()


def test_without_any_error_the_bound_is_zero():
    data = calibration(torch.zeros(100, 1, dtype=torch.float64), 1 + uniform(100))
    assert not PowerLawIncrement().fit(data)(data.features).any()


def test_points_at_distance_zero_have_a_bound():
    data = calibration(uniform(100, 1), torch.zeros(100, dtype=torch.float64))
    bound = PowerLawIncrement().fit(data)(data.features)
    assert bound.isfinite().all()
    assert (data.error <= bound).double().mean() >= 0.9


def test_impossible_quantiles_are_refused():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        PowerLawIncrement(quantile=math.inf)


def test_a_field_in_the_model_for_tables_is_warned_of():
    field = Shapes(z=(2,), error=(3, 16, 24), inputs=(2,), outputs=(3, 16, 24))
    with pytest.warns(UserWarning, match=r"may be a field .*FieldScaleIncrement\(\)"):
        PowerLawIncrement().check_shapes(field)
    PowerLawIncrement().check_shapes(field._replace(error=(40, 3)))
