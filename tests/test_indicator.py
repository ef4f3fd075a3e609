"""The bound for errors with two values, and its prior."""

from dataclasses import replace

import numpy as np
import pytest
from made import made_tuples
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit, logit

from geoq import GeoQ, Grid, Mesh, RandomFolds, Training
from geoq.bounds.indicator import IndicatorBound, Prior
from geoq.bounds.network import displacement, inputs, log_bound
from geoq.bounds.two_values import (
    logit_error_values,
    misclassification_values,
    probability_error_values,
)
from geoq.data.domain import Layout, Shapes

GRID = (6, 8)
LEVEL = 0.9
QUICK = IndicatorBound(
    widths=(8,),
    n_networks=1,
    training=Training(n_steps=150, batch_size=16, learning_rate=1e-2, check_every=50),
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def draw(p, seed):
    return (np.random.default_rng(seed).uniform(size=p.shape) < p).astype(float)


def probability(field):
    """A probability that is 1 - tau = 0.1 where the field is 0."""
    return expit(3 * field + logit(0.1))


def norm_of(x):
    return np.linalg.norm(x.reshape(len(x), -1), axis=1)


def tuples(n=150, seed=0, grid=GRID):
    """The probability of an error depends on the input field of the same channel; anchor errors are random."""
    x = normal(n, 2, *grid, seed=seed)
    error = draw(probability(x), seed + 1)
    anchor = draw(np.full_like(error, 0.2), seed + 2)
    return made_tuples(error, x, distance=norm_of(x), anchor_error=anchor)


FITTED = QUICK.fit(tuples(), LEVEL)
QUERIES = tuples(100, seed=100)


@pytest.mark.parametrize("grid", [GRID, (24,)])
def test_the_bound_is_1_where_errors_are_more_likely_than_1_minus_the_level(grid):
    queries = tuples(100, seed=100, grid=grid)
    bound = QUICK.fit(tuples(grid=grid), LEVEL)(queries.features)
    x = queries.features.inputs
    assert set(np.unique(bound)) == {0, 1}
    assert (bound == (x > 0))[abs(x) > 0.5].mean() > 0.9


def test_a_higher_level_has_a_larger_bound():
    lower, own, higher = (FITTED(QUERIES.features, level) for level in (0.6, None, 0.99))
    assert_array_equal(own, FITTED(QUERIES.features, LEVEL))
    assert lower.sum() < own.sum() < higher.sum()
    assert (lower <= own).all()
    assert (own <= higher).all()


def test_errors_that_are_0_or_nan_do_not_change_the_bound_of_others():
    data = tuples()
    data.errors[:, 1] = 0
    exact = np.zeros((2, *GRID), dtype=bool)
    exact[1] = True
    hidden = replace(data, errors=np.where(exact, np.nan, data.errors))
    for known in (data, replace(hidden, points=replace(data.points, exact=exact))):
        bound = QUICK.fit(known, LEVEL)(data.features)
        assert bound[:, 0].any()
        assert not bound[:, 1].any()
    # Half of the errors are absent, and the others are as before.
    data = tuples(300)
    data.errors[draw(np.full(data.errors.shape, 0.5), 9) > 0] = np.nan
    bound = QUICK.fit(data, LEVEL)(QUERIES.features)
    x = QUERIES.features.inputs
    assert (bound == (x > 0))[abs(x) > 0.5].mean() > 0.9


def logit_tuples(n=150, seed=0):
    """The logits of the surrogate are a third of the true logits."""
    x = 3 * normal(n, 1, *GRID, seed=seed)
    error = abs(draw(expit(x), seed + 1) - expit(x / 3))
    return made_tuples(error, x, distance=norm_of(x), prediction=x / 3)


LOGITS = replace(QUICK, values=logit_error_values).fit(logit_tuples(), LEVEL)


def test_bounds_and_expected_errors_of_probabilities():
    """It is the larger one where the truth is uncertain, and the smaller one where it is certain."""
    features = logit_tuples(100, seed=100).features
    x, bound = abs(features.inputs), LOGITS(features)
    smaller, larger = logit_error_values(features.prediction)
    assert np.isclose(bound, larger)[x < 1].mean() > 0.95
    assert np.isclose(bound, smaller)[x > 4].mean() > 0.95
    queries = logit_tuples(100, seed=100)
    expected = LOGITS.expected_error(queries.features)
    smaller, larger = logit_error_values(queries.features.prediction)
    assert ((smaller <= expected) & (expected <= larger)).all()
    assert expected.mean() == pytest.approx(queries.error.mean(), rel=0.1)


def test_values_of_the_user_are_fitted():
    """The error is 0 or 5."""
    data = tuples()
    own = replace(QUICK, values=lambda p: (0 * p, 0 * p + 5))
    bound = own.fit(replace(data, errors=5 * data.errors), LEVEL)
    assert np.unique(bound(data.features)).tolist() == [0, 5]
    assert "two values (<lambda>)" in bound.describe()
    with pytest.raises(ValueError, match="both by up to 2; pass the two values as"):
        own.check_errors(np.zeros((4, *GRID)), np.full((4, *GRID), 2.0))


# The estimator


def estimator_of(model, x, y, values=np.zeros_like, **settings):
    settings = {"folds": RandomFolds(3), "quantile": LEVEL, "bound_model": model, **settings}
    return GeoQ(values, None, **settings).fit(x, y)


X = normal(60, 2, *GRID)
ESTIMATOR = estimator_of(replace(QUICK, sees=(inputs,)), X, draw(probability(X), 1))


def test_bounds_and_expected_errors_of_the_estimator():
    low, own, high = ESTIMATOR.bounds(X, (0.5, LEVEL, 0.999)).values()
    assert_array_equal(own, ESTIMATOR.bound(X))
    assert low.sum() < own.sum() < high.sum()
    expected = ESTIMATOR.expected_error(X)
    assert (expected[own == 0] <= 0.1).all()
    assert (expected[own == 1] > 0.1).all()
    assert ESTIMATOR.fitted_.bound.describe() == (
        "The error takes one of two values (misclassification_values), and the bound is the larger one where its "
        "probability exceeds 0.1, estimated from inputs and the distance to the data"
    )
    with pytest.raises(TypeError, match="FittedIndicator cannot be conformalized"):
        ESTIMATOR.conformalize(X, X)


@pytest.mark.parametrize("values", [misclassification_values, probability_error_values])
def test_a_file_gives_the_same_bounds(values, tmp_path):
    truth = draw(expit(X), 1)
    surrogate = expit if values is probability_error_values else np.zeros_like
    model = replace(QUICK, values=values, n_networks=2, training=Training(n_steps=20))
    estimator = estimator_of(model, X, truth, surrogate)
    estimator.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    assert_array_equal(loaded.bound(X), estimator.bound(X))
    assert_array_equal(loaded.expected_error(X), estimator.expected_error(X))
    assert loaded.bound_model == model


@pytest.mark.parametrize(
    ("grid", "domain"), [((5, 6, 5), None), ((40,), Mesh(normal(40, 2)))], ids=["volume", "mesh"]
)
def test_wrong_cells_of_a_volume_and_of_a_mesh(grid, domain):
    x = normal(40, 1, *grid)
    model = replace(QUICK, widths=(4, 4), training=Training(n_steps=20))
    estimator = estimator_of(model, x, (x > 1) * 1.0, domain=domain, n_anchors=3)
    assert set(np.unique(estimator.bound(x))) <= {0.0, 1.0}


@pytest.mark.parametrize(("predict", "error", "values", "advice"), [
    (expit, None, misclassification_values, "they fit values=probability_error_values"),
    (lambda x: x, expit, misclassification_values, "they fit values=logit_error_values"),
    (lambda x: (x > 0) * 1.0, None, logit_error_values, "they fit values=misclassification"),
    (lambda x: x, None, misclassification_values, "pass the two values as values="),
], ids=["probabilities", "logits", "classes", "numbers"])  # fmt: skip
def test_errors_with_other_values_raise_before_the_folds_are_trained(
    predict, error, values, advice
):
    def never(x, y):
        pytest.fail("training started")

    x, settings = normal(30, 1, *GRID), {}
    if error is not None:
        settings["error_functional"] = lambda y, y_hat: abs(y - error(y_hat))
    model = replace(QUICK, values=values)
    estimator = GeoQ(predict, never, folds=RandomFolds(2), bound_model=model, **settings)
    with pytest.raises(ValueError, match=f"differ from both by up to .*; {advice}"):
        estimator.fit(x, draw(expit(x), 1))


def test_impossible_settings_raise(unchecked):
    with pytest.raises(ValueError, match="sees contains log_bound, but Indicator"):
        IndicatorBound(sees=(inputs, log_bound))
    shapes = Shapes(z=(96,), error=(2, 6, 8), inputs=(2, 6, 8), outputs=(2, 6, 8))
    layout = Layout(Grid(2), GRID, on_cells=True)
    replace(QUICK, sees=(inputs,)).check_shapes(shapes, layout)
    with pytest.raises(ValueError, match="sees contains displacement, but a row"):
        replace(QUICK, sees=(inputs, displacement)).check_shapes(shapes, layout)
    with pytest.raises(ValueError, match="IndicatorBound is for fields"):
        QUICK.check_shapes(shapes, Layout())


# The prior


def prior_of(larger, prediction, group=None):
    """A prior of errors that all count; each row is a group."""
    rows = np.arange(len(larger)) if group is None else group
    return Prior.fit(larger, np.ones_like(larger), prediction, rows)


def prior_of_cell(value, larger):
    """The prior of one channel with one cell, from one prediction per row."""
    return prior_of(np.asarray(larger, bool)[:, None, None], np.asarray(value)[:, None, None])


def frequency_at(prior, *values):
    return expit(prior(np.array(values)[:, None, None])).reshape(-1)


def test_frequencies_are_interpolated_as_logits_between_two_predictions():
    """The prediction 1 is wrong in 495 of 990 cases, the prediction 3 in 99 of 990 cases."""
    values = [1.0] * 990 + [3.0] * 990
    prior = prior_of_cell(values, [1] * 495 + [0] * 495 + [1] * 99 + [0] * 891)
    at_both = frequency_at(prior, 1.0, 3.0)
    assert_allclose(at_both, [0.5, 0.1], rtol=0.02)
    assert_allclose(frequency_at(prior, 2.0), expit(logit(at_both).mean()))
    assert_allclose(frequency_at(prior, -50.0, 50.0), at_both)


def test_the_logits_of_prediction_and_cell_are_added_where_they_are_informative():
    value, cell = normal(5000, 1, 3), np.array([-1.0, -3.0, -4.0])
    larger = draw(expit(value + cell), 1) > 0

    def difference(prediction):
        found = prior_of(larger, prediction)(value[:200]) - value[:200] - cell
        return abs(found)[abs(value[:200]) < 1.5].mean()

    assert difference(value) < 0.3
    assert difference(None) > 0.6
    random = draw(np.full((2000, 1, 2), 0.5), 2)
    larger = draw(np.broadcast_to([0.5, 0.02], random.shape), 3) > 0
    found = expit(prior_of(larger, random)(random[:5]))
    assert_allclose(found, np.broadcast_to([0.5, 0.02], found.shape), rtol=0.15, atol=0.01)


@pytest.mark.parametrize("frequency", [0, 1])
def test_frequencies_0_and_1_and_a_single_row_give_finite_logits(frequency):
    prior = prior_of_cell(normal(1000), np.full(1000, frequency))
    found = frequency_at(prior, 0.0, 1e9, -1e9)
    assert ((found > 0) & (found < 1)).all()
    assert (abs(found - frequency) < 0.02).all()
    single = prior_of(np.array([[[True, False, False, False]]]), np.zeros((1, 1, 4)))
    assert np.isfinite(single(np.zeros((2, 1, 4)))).all()


def test_copies_of_a_row_in_one_group_do_not_make_cells_seem_informative():
    """Errors are noise, but each row occurs twice. If the copies are in different groups, a cell is validated by itself."""
    twice = np.tile(draw(np.full((10, 1, 400), 0.1), 0) > 0, (2, 1, 1))
    grouped, separate = (
        prior_of(twice, np.zeros(twice.shape), group)
        for group in (np.tile(np.arange(10), 2), np.arange(20))
    )
    assert grouped.offset.std() < 0.2 * separate.offset.std()
