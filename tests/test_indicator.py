import copy
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from geoq import GeoQ, IndicatorIncrement, RandomFolds, Training
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import (
    displacement,
    inputs,
    log_bound,
    logit_error_values,
    misclassification_values,
    probability_error_values,
)
from geoq.increments.prior import CellPrior, FittedCellPrior, PredictionPrior
from geoq.increments.shapes import Shapes
from geoq.quantiles import pinball_loss

GRID = (6, 8)
QUICK = IndicatorIncrement(
    quantile=0.9,
    widths=(8,),
    n_networks=1,
    training=Training(n_steps=150, batch_size=16, learning_rate=1e-2, check_every=50),
)


def normal(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def draw(p, seed):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(p.shape, generator=generator, dtype=torch.float64)
    return (uniform < p).double()


def probability(field):
    """A probability that is 1 - tau = 0.1 where the field is 0."""
    return (3 * field + torch.tensor(0.1).logit()).sigmoid()


def tuples(n=150, seed=0, grid=GRID):
    """The probability of an error depends on the input field of the same channel; anchor errors are random."""
    x = normal(n, 2, *grid, seed=seed)
    error = draw(probability(x), seed + 1)
    anchor = draw(torch.full_like(error, 0.2), seed + 2)
    features = GeometricFeatures(x, x.flatten(1).norm(dim=1), anchor, 0 * error, x)
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


@pytest.fixture(scope="module")
def fitted():
    return replace(QUICK).fit(tuples())


def bound_of(model, features):
    return features.anchor_error + model(features)


def test_a_network_ends_below_the_loss_of_the_prior(fitted):
    (result,) = fitted.trainings_
    assert result.best_step > 0
    assert result.best_loss < 0.9 * result.first_loss


def test_the_bound_is_1_where_errors_are_more_likely_than_1_minus_the_level(fitted):
    features = tuples(100, seed=100).features
    clear = features.inputs.abs() > 0.3
    right = bound_of(fitted, features) == (features.inputs > 0)
    assert right[clear].double().mean() > 0.95


def test_the_bound_is_0_or_1_for_any_anchor_error_so_increments_can_be_negative(fitted):
    features = tuples(100, seed=100).features
    bound = bound_of(fitted, features)
    wrong = features.anchor_error == 1
    assert bound[wrong].unique().tolist() == [0, 1]
    assert bound[~wrong].unique().tolist() == [0, 1]
    assert fitted(features).unique().tolist() == [-1, 0, 1]


def test_the_bound_has_a_lower_loss_than_0_and_1_everywhere(fitted):
    queries = tuples(100, seed=100)

    def loss(bound):
        return pinball_loss(queries.error, bound.expand_as(queries.error), 0.9).mean()

    learned = loss(bound_of(fitted, queries.features))
    assert learned < 0.5 * loss(queries.error.new_zeros(1))
    assert learned < 0.7 * loss(queries.error.new_ones(1))


def test_a_higher_quantile_level_has_a_larger_bound(fitted):
    features = tuples(50, seed=100).features
    lower = replace(QUICK, quantile=0.6).fit(tuples())
    assert (bound_of(lower, features) <= bound_of(fitted, features)).all()


def test_the_bound_of_a_channel_without_errors_is_0():
    data = tuples()
    data.error[:, 1] = 0
    bound = bound_of(replace(QUICK).fit(data), data.features)
    assert bound[:, 0].any()
    assert not bound[:, 1].any()


def test_fields_on_a_line_have_a_bound():
    model = QUICK.fit(tuples(grid=(24,)))
    features = tuples(100, seed=100, grid=(24,)).features
    clear = features.inputs.abs() > 0.5
    right = bound_of(model, features) == (features.inputs > 0)
    assert right[clear].double().mean() > 0.9


def test_a_fit_repeats_bit_for_bit(fitted):
    features = tuples(20, seed=100).features
    again = replace(QUICK).fit(tuples())
    assert torch.equal(again.probability(features), fitted.probability(features))


@pytest.mark.parametrize(
    ("settings", "uses_prediction"),
    [
        ({}, True),
        ({"prior": PredictionPrior()}, True),
        ({"sees": (inputs,), "prior": PredictionPrior()}, True),
        ({"sees": (inputs,)}, False),
        ({"prior": CellPrior()}, False),
    ],
)
def test_networks_start_from_the_prior(settings, uses_prediction):
    """Errors occur where the prediction is near 0. Before training the bound depends on the prior alone."""
    data = tuples(400)
    predicted = normal(*data.error.shape, seed=5)
    data.features.prediction.copy_(predicted)
    uncertain = predicted.abs() < 0.5
    data.error.copy_(draw(torch.where(uncertain, 0.5, 0.01), 6))
    untrained = Training(n_steps=1, learning_rate=1e-12)
    model = replace(QUICK, training=untrained, **settings).fit(data)
    # In each cell errors are more frequent than 1 - tau.
    expected = uncertain if uses_prediction else torch.ones_like(uncertain)
    agreement = bound_of(model, data.features) == expected
    assert agreement.double().mean() > 0.95


def test_without_one_prediction_per_error_the_prior_comes_from_the_cells():
    def two(prediction):
        pair = prediction.expand(-1, 2, -1, -1)
        return torch.zeros_like(pair), torch.ones_like(pair)

    data = tuples(60)
    pooled = data.features.prediction.mean(dim=1, keepdim=True)
    features = replace(data.features, prediction=pooled)
    model = replace(QUICK, values=two).fit(replace(data, features=features))
    assert isinstance(model.prior_, FittedCellPrior)
    assert model.prior_.offset.shape == (2, 48)


@pytest.mark.parametrize(
    "settings", [{}, {"sees": (inputs,)}, {"prior": CellPrior(), "n_networks": 2}]
)
def test_the_state_of_a_model_restores_it(settings):
    features = tuples(20, seed=100).features
    model = replace(QUICK, **settings).fit(tuples(60))
    again = IndicatorIncrement.from_state(*model.state())
    assert again == model
    assert torch.equal(again.probability(features), model.probability(features))


def logit_tuples(n=150, seed=0):
    """The logits of the surrogate are a third of the true logits."""
    x = 3 * normal(n, 1, *GRID, seed=seed)
    truth, prediction = draw(x.sigmoid(), seed + 1), x / 3
    error = (truth - prediction.sigmoid()).abs()
    features = GeometricFeatures(x, x.flatten(1).norm(dim=1), 0 * error, prediction, x)
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


def test_probabilities_and_their_logits_have_the_same_bound():
    data = logit_tuples()
    as_p = replace(
        data,
        features=replace(data.features, prediction=data.features.prediction.sigmoid()),
    )
    one = replace(QUICK, values=logit_error_values, sees=(inputs,)).fit(data)
    other = replace(QUICK, values=probability_error_values, sees=(inputs,)).fit(as_p)
    assert_close(one(data.features), other(as_p.features))


@pytest.fixture(scope="module")
def fitted_logits():
    return replace(QUICK, values=logit_error_values).fit(logit_tuples())


def test_the_bound_of_a_probability_is_one_of_its_two_possible_errors(fitted_logits):
    """It is the larger one where the truth is uncertain, and the smaller one where it is certain."""
    queries = logit_tuples(100, seed=100)
    x = queries.features.inputs.abs()
    bound = bound_of(fitted_logits, queries.features)
    smaller, larger = logit_error_values(queries.features.prediction)
    assert torch.isclose(bound[x < 1], larger[x < 1]).double().mean() > 0.95
    assert torch.isclose(bound[x > 4], smaller[x > 4]).double().mean() > 0.95


def test_the_expected_error_is_between_both_values_and_equals_the_mean(fitted_logits):
    queries = logit_tuples(100, seed=100)
    expected = fitted_logits.expected_error(queries.features)
    smaller, larger = logit_error_values(queries.features.prediction)
    assert ((smaller <= expected) & (expected <= larger)).all()
    assert expected.mean().item() == pytest.approx(queries.error.mean().item(), rel=0.1)


def test_values_of_the_user_are_fitted_but_not_stored():
    """The error is 0 or 5."""
    data = tuples()
    data = replace(data, error=5 * data.error)
    own = replace(QUICK, values=lambda p: (0 * p, 0 * p + 5)).fit(data)
    assert bound_of(own, data.features).unique().tolist() == [0, 5]
    with pytest.raises(
        ValueError, match=r"a file cannot hold; use one of misclassification_values"
    ):
        own.state()


def test_a_prior_of_the_user_is_fitted_but_not_stored():
    class NoPrior:
        def fit(self, is_larger, prediction, group):
            return FittedCellPrior(torch.zeros(is_larger.shape[1:]))

    model = replace(QUICK, prior=NoPrior()).fit(tuples(60))
    assert not model.prior_.offset.any()
    with pytest.raises(ValueError, match="a file cannot hold; use one of CellPrior"):
        model.state()


def test_errors_with_fewer_channels_than_the_prediction_are_refused():
    own = replace(QUICK, values=lambda p: (0 * p[:, 0], 0 * p[:, 0] + 5))
    with pytest.raises(ValueError, match="both by up to 1; pass the two values as"):
        own.check_errors(torch.zeros(4, 3, *GRID), torch.ones(4, *GRID))


@pytest.mark.parametrize("n_anchors", [1, 3, 7])
def test_the_bound_of_geoq_is_0_or_1_for_any_number_of_anchors(n_anchors):
    x = normal(60, 2, *GRID)
    geoq = GeoQ(
        torch.zeros_like,
        None,
        folds=RandomFolds(2),
        increment_model=replace(QUICK, training=Training(n_steps=5)),
        n_anchors=n_anchors,
    )
    geoq.fit(x, draw(probability(x), 1))
    assert set(geoq.bound(x).unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("wrong", [0.5, -1.0, 2.0])
def test_errors_that_are_not_0_or_1_are_refused(wrong):
    data = tuples(20)
    data.error[3, 1, 2, 2] = wrong
    with pytest.raises(
        ValueError, match=r"errors differ from both by up to \S+; pass the two values"
    ):
        replace(QUICK).fit(data)


@pytest.mark.parametrize(
    ("predict", "error", "values", "advice"),
    [
        (
            torch.sigmoid,
            None,
            misclassification_values,
            "they fit values=probability_error_values",
        ),
        (
            lambda x: x,
            torch.sigmoid,
            misclassification_values,
            "they fit values=logit_error_values",
        ),
        (
            lambda x: (x > 0) + 0.0,
            None,
            logit_error_values,
            "they fit values=misclassification_values",
        ),
        (lambda x: x, None, misclassification_values, "pass the two values as values="),
    ],
    ids=["probabilities", "logits", "classes", "numbers"],
)
def test_errors_with_other_values_are_refused_before_the_folds_are_trained(
    predict, error, values, advice
):
    def never(x, y):
        pytest.fail("training started")

    x = normal(30, 1, *GRID)
    settings = {}
    if error is not None:
        settings["error_functional"] = lambda y, y_hat: (y - error(y_hat)).abs()
    geoq = GeoQ(
        predict,
        never,
        folds=RandomFolds(2),
        increment_model=replace(QUICK, values=values),
        **settings,
    )
    with pytest.raises(ValueError, match=f"differ from both by up to .*; {advice}"):
        geoq.fit(x, draw(x.sigmoid(), 1))


def test_the_bound_is_described_in_one_sentence(fitted):
    assert fitted.describe() == (
        "the error takes one of two values (misclassification_values), and the bound is the larger one where its "
        "probability exceeds 0.1, estimated from inputs, prediction and the distance to the data"
    )


def test_fields_on_two_grids_are_refused():
    shapes = Shapes(z=(96,), error=(2, 6, 8), inputs=(2, 6, 8), outputs=(2, 6, 8))
    replace(QUICK, sees=(inputs,)).check_shapes(shapes)
    with pytest.raises(ValueError, match=r"sees contains displacement, but a row"):
        replace(QUICK, sees=(inputs, displacement)).check_shapes(shapes)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        IndicatorIncrement(quantile=1.0)
    with pytest.raises(ValueError, match="sees contains log_bound, but Indicator"):
        IndicatorIncrement(sees=(inputs, log_bound))
    with pytest.raises(ValueError, match="n_networks=0 must be an integer >= 1"):
        IndicatorIncrement(n_networks=0)
    # The value is set afterwards, because the tests check the types of arguments first.
    model = IndicatorIncrement()
    model.values = "probability_error_values"
    with pytest.raises(
        TypeError, match=r"values='probability_error_values', but it is called as"
    ):
        model.__post_init__()


@pytest.fixture(scope="module")
def geoq_of_errors():
    x = normal(60, 2, *GRID)
    y = draw(probability(x), 1)

    def never(x):
        return torch.zeros_like(x)

    geoq = GeoQ(
        never,
        None,
        folds=RandomFolds(3),
        increment_model=replace(QUICK, sees=(inputs,)),
    )
    return geoq.fit(x, y), x, y


def test_bounds_at_other_levels_threshold_the_same_probability(geoq_of_errors):
    geoq, x, _ = geoq_of_errors
    low, own, high = geoq.bounds(x[:9], (0.5, 0.9, 0.999)).values()
    assert torch.equal(own, geoq.bound(x[:9]))
    assert (low <= own).all()
    assert (own <= high).all()
    assert low.sum() < own.sum() < high.sum()


def test_a_bound_of_two_values_cannot_be_conformalized(geoq_of_errors):
    geoq, x, y = geoq_of_errors
    with pytest.raises(TypeError, match="a factor on it does not raise its coverage"):
        geoq.conformalize(x, y)


def test_the_probability_is_the_mean_of_the_networks():
    model = replace(QUICK, n_networks=3).fit(tuples(60))
    features = tuples(20, seed=100).features

    def probability_of(networks):
        some = copy.copy(model)
        some.networks_ = networks
        return some.probability(features)

    each = [probability_of(model.networks_[n : n + 1]) for n in range(3)]
    assert not torch.allclose(each[0], each[1])
    assert_close(model.probability(features), sum(each) / 3)


def test_the_first_network_does_not_depend_on_the_number_of_networks():
    features = tuples(20, seed=100).features
    one, three = (replace(QUICK, n_networks=n).fit(tuples(60)) for n in (1, 3))
    three.networks_ = three.networks_[:1]
    assert torch.equal(one.probability(features), three.probability(features))


def test_the_bound_is_1_where_the_expected_error_exceeds_1_minus_the_level(
    geoq_of_errors,
):
    geoq, x, _ = geoq_of_errors
    expected, bound = geoq.expected_error(x), geoq.bound(x)
    assert expected.shape == bound.shape
    assert (expected[bound == 0] <= 0.1).all()
    assert (expected[bound == 1] > 0.1).all()


def test_a_model_that_estimates_only_a_quantile_has_no_expected_error():
    geoq = GeoQ(torch.zeros_like, None, folds=RandomFolds(2))
    x = normal(40, 1)
    geoq.fit(x, x)
    with pytest.raises(TypeError, match="TwoLawIncrement estimates an upper"):
        geoq.expected_error(x)
