"""The default bound of tables: laws, resemblance, levels, and the bound beyond the data."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoq import ClusterFolds, CombinedFolds, GeoQ, RandomFolds, TemporalFolds, norm_error
from geoq.bounds.climatology import Climatology
from geoq.bounds.law import NAMES, TABLE, WITHOUT_OPINION
from geoq.bounds.two_laws import TwoLawBound


def truth(x):
    return np.sin(3 * x[:, :1]) + x[:, 1:2] ** 2


def train(x, y):
    def design(x):
        return np.concatenate([x, x[:, :1] ** 2, np.ones_like(x[:, :1])], axis=1)

    weights = np.linalg.lstsq(design(x), y)[0]
    return lambda x: design(x) @ weights


def queries(n=2000, size=1.0, seed=1):
    return np.random.default_rng(seed).uniform(-size, size, size=(n, 2))


X = queries(300, seed=0)


def fitted(y=None, x=X, **settings):
    y = truth(x) if y is None else y
    return GeoQ(train(x, y), train, **settings).fit(x, y)


ESTIMATOR = fitted()
BOUND = ESTIMATOR.fitted_.bound


def error_of(estimator, x):
    return abs(truth(x) - estimator.surrogate_(x))


def test_coverage_is_near_the_level_at_all_levels_which_do_not_cross():
    x = queries()
    error, bound = error_of(ESTIMATOR, x), ESTIMATOR.bound(x)
    assert abs((error <= bound).mean() - 0.95) < 0.03
    assert np.corrcoef(error[:, 0], bound[:, 0])[0, 1] > 0.95
    x, levels = queries(), (0.3, 0.5, 0.8, 0.9, 0.95, 0.99)
    bounds, error = ESTIMATOR.bounds(x, levels), error_of(ESTIMATOR, x)
    for low, high in pairwise(levels):
        assert (bounds[low] <= bounds[high]).all()
    for level in (0.8, 0.9, 0.95):
        assert abs((error <= bounds[level]).mean() - level) < 0.07
    assert_array_equal(bounds[0.95], ESTIMATOR.bound(x))
    x = queries(200)
    assert_array_equal(fitted(quantile=0.5).bound(x), ESTIMATOR.bounds(x, (0.5,))[0.5])


def test_each_level_below_the_default_one_covers_its_fraction_of_held_out_errors():
    """Noise of one size: the law of the level 0.95 does not describe the smaller errors."""
    noise = np.random.default_rng(5).normal(size=truth(X).shape)
    found = fitted(truth(X) + 0.2 * noise, folds=RandomFolds(5)).fitted_
    for level in (0.1, 0.5, 0.8, 0.9):
        covered = found.tuples.error <= found.bound(found.tuples.features, level)
        assert covered.mean() == pytest.approx(level, abs=0.01)


def test_the_bound_is_the_positive_sum_of_its_parts_and_grows_beyond_the_data():
    answer = ESTIMATOR.assess(queries(size=3.0))
    assert (answer.error_hat > 0).all()
    assert (answer.increment < 0).any()
    assert_allclose(answer.error_hat, answer.anchor_error + answer.increment)
    bound = ESTIMATOR.bound(np.linspace(0, 6, 7)[:, None] * np.ones((1, 2)))[:, 0]
    assert (bound[2:] > 3 * bound[1]).all()
    assert bound[-1] > 10 * bound[0]


def test_the_resemblance_tells_inside_from_outside_if_there_are_several_families():
    views = [next(ESTIMATOR.fitted_.views(queries(200, size)))[1] for size in (0.8, 8.0)]
    inside, outside = (BOUND.resemblance(features.relation) for features in views)
    assert np.median(inside) < 0.5 < np.median(outside)
    alone = fitted(folds=RandomFolds(5)).fitted_.bound
    assert alone.resemblance is None
    assert alone.laws.outside is alone.laws.inside
    folds = CombinedFolds(TemporalFolds(5, gap=3), ClusterFolds(3))
    assert fitted(folds=folds).fitted_.bound.resemblance is not None


def test_one_number_or_a_scale_for_each_output():
    y = truth(X) * [1.0, 1000.0]
    bound = fitted(y).bound(queries(100))
    assert_allclose(bound[:, 1] / bound[:, 0], 1000, rtol=1e-6)
    estimator = fitted(truth(X) * [1, -1], error_functional=norm_error)
    x = queries()
    error = norm_error(truth(x) * [1, -1], estimator.surrogate_(x))
    assert abs((error <= estimator.bound(x)).mean() - 0.95) < 0.04


@pytest.mark.parametrize("max_values", [200_000, 1000])
def test_many_outputs_are_bounded_from_all_values_or_a_sample(max_values, monkeypatch):
    monkeypatch.setattr("geoq.bounds.law.MAX_VALUES", max_values)
    sizes, x = np.linspace(0.5, 2, 50), queries()
    estimator = fitted(truth(X) * sizes)
    error = abs(truth(x) * sizes - estimator.surrogate_(x))
    assert abs((error <= estimator.bound(x)).mean() - 0.95) < 0.05


def test_an_exact_surrogate_has_tiny_bounds():
    with pytest.warns(UserWarning, match="as small as at points"):
        estimator = GeoQ(lambda x: x[:, :1], None, folds=RandomFolds(4)).fit(X, X[:, :1])
    assert (estimator.bound(queries(50)) < 1e-9).all()


def test_the_climatology_scales_the_bound_and_needs_an_error_per_output():
    model, x = TwoLawBound(reference=Climatology()), queries()
    estimator = fitted(bound_model=model)
    assert abs((error_of(estimator, x) <= estimator.bound(x)).mean() - 0.95) < 0.04
    with pytest.raises(ValueError, match="a query has 2 outputs and 1 errors; use an elementwise"):
        fitted(truth(X) * [1, 2], bound_model=model, error_functional=norm_error)


def test_the_opinion_on_a_tuple_does_not_know_the_held_out_point():
    y = np.sin(12 * X[:, :1]) * np.cos(8 * X[:, 1:])
    found = fitted(y, folds=RandomFolds(5)).fitted_
    assert 0.93 < (found.tuples.error <= found.bound(found.tuples.features)).mean() < 0.98
    # The process of queries has seen these points.
    gaps = [
        abs(y[found.tuples.point] - opinion.mean)
        for opinion in (
            found.tuples.opinion,
            found.process(found.geometry.points.z[found.tuples.point]),
        )
    ]
    assert np.median(gaps[0]) > 3 * np.median(gaps[1])


def test_repeated_noisy_rows_are_covered():
    rng = np.random.default_rng(0)
    x = np.repeat(X[:60], 5, axis=0)
    estimator = fitted(truth(x) + 0.3 * rng.normal(size=(300, 1)), x)
    new = queries()
    answer = estimator.assess(new)
    noisy = truth(new) + 0.3 * rng.normal(size=(len(new), 1))
    assert abs((abs(noisy - answer.prediction) <= answer.error_hat).mean() - 0.95) < 0.04
    assert answer.safe.mean() > 0.85


def test_the_description_names_data_bound_inputs_and_region():
    text = ESTIMATOR.describe()
    assert text.startswith("300 rows of a table, held out ")
    assert (
        "Amid the data the bound depends most on the error that a Gaussian process through the data expects"
        in text
    )
    assert "Relative sensitivity of the prediction: input 0: 1, " in text
    assert text.endswith("No coverage is guaranteed, since conformalize was not called.")


def test_the_laws_have_one_slope_per_feature_and_increasing_intercepts():
    assert BOUND.laws.inside.names == NAMES
    assert BOUND.plain.inside.names == WITHOUT_OPINION == NAMES[:-1]
    law = BOUND.laws.inside
    assert law.slopes.shape == (len(NAMES),) == (8,)
    assert (np.diff(law.table) >= 0).all()
    assert law.intercept(0.95) == law.table[TABLE.index(0.95)]
    assert law.intercept(1e-9) == law.table[0]
    assert law.table[-1] == law.intercept(1 - 1e-9)
    low, middle, high = (law.intercept(level) for level in (0.9, 0.905, 0.91))
    assert low < middle < high


def test_a_fit_repeats_bit_for_bit():
    first, second = (e.assess(queries(size=1.5)) for e in (ESTIMATOR, fitted()))
    for name in ("error_hat", "support_score", "safe"):
        assert_array_equal(getattr(first, name), getattr(second, name))


# The climatology.


@pytest.mark.parametrize("n_states", [50, 5000])
def test_the_climatology_is_the_quantile_of_the_distances_to_the_values(n_states):
    """Values of nan do not count."""
    states = np.random.default_rng(0).gamma(2.0, size=(n_states, 3))
    with_gaps = np.insert(states, 7, np.nan, axis=0)
    queries = np.linspace(-1, 12, 40)[:, None] * np.ones(3)
    distance = np.sort(abs(queries[:, None] - states), axis=1)
    exact = distance[:, int(np.ceil(0.95 * n_states - 1e-9)) - 1]
    spacing = np.ptp(states, axis=0).max() / 255
    for given in (states, with_gaps):
        assert_allclose(Climatology().fit(given, 0.95)(queries), exact, rtol=0, atol=3 * spacing)


def test_the_climatology_of_a_constant_coordinate_is_the_distance_to_it():
    climatology = Climatology().fit(np.full((30, 1), 2.0), 0.95)
    assert climatology(np.array([[2.0], [5.0]])).tolist() == [[0.0], [3.0]]
