import copy
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from geoq import GeoQ, IndicatorIncrement, RandomFolds, Training
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments import (
    View,
    logit_error_values,
    misclassification_values,
    probability_error_values,
)
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
    chance = torch.rand(
        p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (chance < p).double()


def probability(field):
    """Crosses 1 - tau = 0.1 where the field is 0."""
    return (3 * field + torch.tensor(0.1).logit()).sigmoid()


def tuples(n=150, seed=0, grid=GRID):
    """Channel 0 is wrong by the first input field there, channel 1 by the second; anchors are wrong anywhere."""
    inputs = normal(n, 2, *grid, seed=seed)
    error = draw(probability(inputs), seed + 1)
    anchor = draw(torch.full_like(error, 0.2), seed + 2)
    features = GeometricFeatures(
        inputs, inputs.flatten(1).norm(dim=1), anchor, 0 * error, inputs
    )
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


@pytest.fixture(scope="module")
def fitted():
    return replace(QUICK).fit(tuples())


def bound_of(model, features):
    return features.anchor_error + model(features)


def test_the_verdict_is_1_where_errors_are_more_likely_than_1_minus_the_level(fitted):
    features = tuples(100, seed=100).features
    clear = features.inputs.abs() > 0.3
    right = bound_of(fitted, features) == (features.inputs > 0)
    assert right[clear].double().mean() > 0.95


def test_the_bound_is_0_or_1_also_where_anchors_were_wrong(fitted):
    """There a verdict of 0 needs a negative increment."""
    features = tuples(100, seed=100).features
    bound = bound_of(fitted, features)
    wrong = features.anchor_error == 1
    assert bound[wrong].unique().tolist() == [0, 1]
    assert bound[~wrong].unique().tolist() == [0, 1]
    assert fitted(features).unique().tolist() == [-1, 0, 1]


def test_the_verdict_loses_less_than_always_and_never(fitted):
    queries = tuples(100, seed=100)

    def loss(bound):
        return pinball_loss(queries.error, bound.expand_as(queries.error), 0.9).mean()

    told = loss(bound_of(fitted, queries.features))
    assert told < 0.5 * loss(queries.error.new_zeros(1))
    assert told < 0.7 * loss(queries.error.new_ones(1))


def test_a_higher_level_calls_more_cells_wrong(fitted):
    features = tuples(50, seed=100).features
    lower = replace(QUICK, quantile=0.6).fit(tuples())
    assert (bound_of(lower, features) <= bound_of(fitted, features)).all()


def test_a_channel_that_was_never_wrong_is_not_called_wrong():
    data = tuples()
    data.error[:, 1] = 0
    bound = bound_of(replace(QUICK).fit(data), data.features)
    assert bound[:, 0].any()
    assert not bound[:, 1].any()


def test_fields_on_a_line_have_verdicts_too():
    model = replace(QUICK, n_spatial=1).fit(tuples(grid=(24,)))
    features = tuples(100, seed=100, grid=(24,)).features
    clear = features.inputs.abs() > 0.5
    right = bound_of(model, features) == (features.inputs > 0)
    assert right[clear].double().mean() > 0.9


def test_a_fit_repeats_bit_for_bit(fitted):
    features = tuples(20, seed=100).features
    again = replace(QUICK).fit(tuples())
    assert torch.equal(again.probability(features), fitted.probability(features))


def test_a_fresh_network_starts_from_what_the_prediction_is_worth():
    """A surrogate that is wrong where it predicts about 0: before any step the verdict finds that."""
    data = tuples(400)
    doubt = normal(*data.error.shape, seed=5)
    data.features.prediction.copy_(doubt)
    data.error.copy_(draw(torch.where(doubt.abs() < 0.5, 0.5, 0.01), 6))
    untrained = Training(n_steps=1, learning_rate=1e-12)
    told = replace(QUICK, training=untrained)
    blind = replace(told, view=View(inputs=True))
    right = doubt.abs() < 0.5
    assert (bound_of(told.fit(data), data.features) == right).double().mean() > 0.95
    assert bound_of(
        blind.fit(data), data.features
    ).all()  # each cell is wrong too often


def test_predictions_that_are_not_one_per_error_leave_the_start_to_the_cells():
    def two(prediction):
        pair = prediction.expand(-1, 2, -1, -1)
        return torch.zeros_like(pair), torch.ones_like(pair)

    data = tuples(60)
    pooled = data.features.prediction.mean(dim=1, keepdim=True)
    features = replace(data.features, prediction=pooled)
    model = replace(QUICK, values=two).fit(replace(data, features=features))
    assert model.start_.offset.shape == (2, 48)


def test_the_state_of_a_model_that_does_not_see_predictions_restores_it():
    model = replace(QUICK, view=View(inputs=True)).fit(tuples(60))
    again = IndicatorIncrement.from_state(*model.state())
    features = tuples(20, seed=100).features
    assert torch.equal(model.probability(features), again.probability(features))


def test_the_state_of_a_model_restores_it(fitted):
    features = tuples(20, seed=100).features
    again = IndicatorIncrement.from_state(*fitted.state())
    assert again == fitted
    assert torch.equal(again.probability(features), fitted.probability(features))


def of_logits(n=150, seed=0):
    """A surrogate that is less sure than it could be: its logit is a third of the right one."""
    x = 3 * normal(n, 1, *GRID, seed=seed)
    truth, prediction = draw(x.sigmoid(), seed + 1), x / 3
    error = (truth - prediction.sigmoid()).abs()
    features = GeometricFeatures(x, x.flatten(1).norm(dim=1), 0 * error, prediction, x)
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


def test_probabilities_and_their_logits_have_the_same_bound():
    data = of_logits()
    as_p = replace(
        data,
        features=replace(data.features, prediction=data.features.prediction.sigmoid()),
    )
    view = View()
    one = replace(QUICK, values=logit_error_values, view=view).fit(data)
    other = replace(QUICK, values=probability_error_values, view=view).fit(as_p)
    assert_close(one(data.features), other(as_p.features))


def test_the_bound_of_a_probability_is_one_of_the_two_errors_it_can_have():
    """The greater one where p is unsure, the lesser one where the truth is clear."""
    model = replace(QUICK, values=logit_error_values).fit(of_logits())
    queries = of_logits(100, seed=100)
    x, p = queries.features.inputs, queries.features.prediction.sigmoid()
    bound = bound_of(model, queries.features)
    less, greater = torch.minimum(p, 1 - p), torch.maximum(p, 1 - p)
    assert (
        torch.isclose(bound[x.abs() < 1], greater[x.abs() < 1]).double().mean() > 0.95
    )
    assert torch.isclose(bound[x.abs() > 4], less[x.abs() > 4]).double().mean() > 0.95


def test_the_expected_error_lies_between_the_two_and_is_right_on_average():
    model = replace(QUICK, values=logit_error_values).fit(of_logits())
    queries = of_logits(100, seed=100)
    expected = model.expected(queries.features)
    less, greater = logit_error_values(queries.features.prediction)
    assert ((less <= expected) & (expected <= greater)).all()
    assert expected.mean().item() == pytest.approx(queries.error.mean().item(), rel=0.1)


def test_values_of_the_users_own_work_but_stay_out_of_files():
    """Wrong by 0 or by 5."""
    data = tuples()
    data = replace(data, error=5 * data.error)
    own = replace(QUICK, values=lambda p: (0 * p, 0 * p + 5)).fit(data)
    assert bound_of(own, data.features).unique().tolist() == [0, 5]
    with pytest.raises(
        ValueError, match=r"cannot be saved; use one of misclassification_values"
    ):
        own.state()


def test_errors_of_fewer_channels_than_the_prediction_are_refused_in_our_words():
    own = replace(QUICK, values=lambda p: (0 * p[:, 0], 0 * p[:, 0] + 5))
    with pytest.raises(ValueError, match="away from both; give the values that they"):
        own.check_errors(torch.zeros(4, 3, *GRID), torch.ones(4, *GRID))


@pytest.mark.parametrize("n_anchors", [1, 3, 7])
def test_the_bound_of_geoq_is_0_or_1_however_many_anchors(n_anchors):
    x = normal(60, 2, *GRID)
    geoq = GeoQ(
        torch.zeros_like,
        None,
        folds=RandomFolds(2),
        increment_model=replace(QUICK, training=Training(n_steps=5)),
        n_anchors=n_anchors,
    )
    geoq.fit(x, draw(probability(x), 1))
    assert set(geoq.predict(x).unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("wrong", [0.5, -1.0, 2.0])
def test_errors_that_are_not_0_or_1_are_refused(wrong):
    data = tuples(20)
    data.error[3, 1, 2, 2] = wrong
    with pytest.raises(
        ValueError, match=r"errors are up to \S+ away from both; give the"
    ):
        replace(QUICK).fit(data)


@pytest.mark.parametrize(
    ("predict", "error", "values", "way_out"),
    [
        (
            torch.sigmoid,
            None,
            misclassification_values,
            "those of values=probability_error_values: from geoq",
        ),
        (
            lambda x: x,
            torch.sigmoid,
            misclassification_values,
            "those of values=logit_error_values: from geoq",
        ),
        (
            lambda x: (x > 0) + 0.0,
            None,
            logit_error_values,
            "those of values=misclassification_values: from",
        ),
        (lambda x: x, None, misclassification_values, "give the values that they take"),
    ],
    ids=["probabilities", "logits", "verdicts", "numbers"],
)
def test_errors_of_other_values_are_refused_before_the_folds_are_trained(
    predict, error, values, way_out
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
    with pytest.raises(ValueError, match=f"away from both; .*{way_out}"):
        geoq.fit(x, draw(x.sigmoid(), 1))


def test_the_verdict_is_described_in_a_sentence(fitted):
    assert fitted.describe() == (
        "the error takes one of two values (misclassification_values), and the bound is the greater one where that has more than the "
        "probability 0.1, judged from inputs, prediction and the distance to the data"
    )


def test_fields_on_two_grids_are_refused():
    shapes = Shapes(z=(96,), error=(2, 6, 8), inputs=(2, 6, 8), outputs=(2, 6, 8))
    replace(QUICK, view=View()).check_shapes(shapes)
    with pytest.raises(ValueError, match=r"View\(displacement=True\), but a row"):
        replace(QUICK, view=View(displacement=True)).check_shapes(shapes)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        IndicatorIncrement(quantile=1.0)
    with pytest.raises(ValueError, match="no bound under its verdict"):
        IndicatorIncrement(view=View(bound=True))
    # Set afterwards, because types are checked before anything else while testing.
    model = IndicatorIncrement()
    model.values = "probability_error_values"
    with pytest.raises(
        TypeError, match=r"values='probability_error_values', but it is called as"
    ):
        model.__post_init__()


def verdicts_of_geoq():
    x = normal(60, 2, *GRID)
    y = draw(probability(x), 1)

    def never(x):
        return torch.zeros_like(x)

    geoq = GeoQ(
        never,
        None,
        folds=RandomFolds(3),
        increment_model=replace(QUICK, view=View()),
    )
    return geoq.fit(x, y), x, y


def test_levels_of_verdicts_are_judged_anew_and_never_cross():
    geoq, x, _ = verdicts_of_geoq()
    low, own, high = geoq.bounds(x[:9], (0.5, 0.9, 0.999)).values()
    assert torch.equal(own, geoq.predict(x[:9]))
    assert (low <= own).all()
    assert (own <= high).all()
    assert low.sum() < own.sum() < high.sum()


def test_no_factor_makes_a_verdict_hold():
    geoq, x, y = verdicts_of_geoq()
    with pytest.raises(TypeError, match="IndicatorIncrement gives verdicts"):
        geoq.conformalize(x, y)


def test_the_probability_is_the_mean_of_the_networks():
    model = replace(QUICK, n_networks=3).fit(tuples(60))
    features = tuples(20, seed=100).features

    def of(networks):
        some = copy.copy(model)
        some.networks_ = networks
        return some.probability(features)

    each = [of(model.networks_[n : n + 1]) for n in range(3)]
    assert not torch.allclose(each[0], each[1])
    assert_close(model.probability(features), sum(each) / 3)


def test_the_first_network_is_that_of_a_model_with_one():
    features = tuples(20, seed=100).features
    one, three = (replace(QUICK, n_networks=n).fit(tuples(60)) for n in (1, 3))
    three.networks_ = three.networks_[:1]
    assert torch.equal(one.probability(features), three.probability(features))


def test_geoq_answers_the_expected_error_beside_the_verdict():
    """Where the verdict is right at 0.9, no more than a tenth is expected; where it is wrong, more."""
    geoq, x, _ = verdicts_of_geoq()
    expected, verdict = geoq.expected_error(x), geoq.predict(x)
    assert expected.shape == verdict.shape
    assert (expected[verdict == 0] <= 0.1).all()
    assert (expected[verdict == 1] > 0.1).all()


def test_a_model_that_knows_only_a_quantile_answers_no_expected_error():
    geoq = GeoQ(torch.zeros_like, None, folds=RandomFolds(2))
    x = normal(40, 1)
    geoq.fit(x, x)
    with pytest.raises(TypeError, match="PowerLawIncrement knows an upper quantile"):
        geoq.expected_error(x)
