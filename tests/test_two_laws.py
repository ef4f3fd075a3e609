"""The default increment: laws, resemblance, levels, and the bound beyond the data."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq import (
    ClusterFolds,
    CombinedFolds,
    GeoQ,
    RandomFolds,
    TemporalFolds,
    TwoLawIncrement,
    norm_error,
)
from geoq.increments import Climatology
from geoq.increments.law import NAMES, TABLE
from geoq.queries import views


def truth(x):
    return np.sin(3 * x[:, :1]) + x[:, 1:2] ** 2


def train(x, y):
    def design(x):
        return np.concatenate([x, x[:, :1] ** 2, np.ones_like(x[:, :1])], axis=1)

    weights = np.linalg.lstsq(design(x), y, rcond=None)[0]
    return lambda x: design(x) @ weights


def data(n=300, seed=0):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(n, 2))
    return x, truth(x)


@pytest.fixture(scope="module")
def geoq():
    x, y = data()
    return GeoQ(train(x, y), train).fit(x, y)


def queries(n=2000, size=1.0):
    return np.random.default_rng(1).uniform(-size, size, size=(n, 2))


def test_coverage_inside_is_near_its_level(geoq):
    x = queries()
    covered = abs(truth(x) - train(*data())(x)) <= geoq.bound(x)
    assert abs(covered.mean() - 0.95) < 0.03


def test_the_bound_is_positive_and_the_sum_of_its_parts(geoq):
    answer = geoq.assess(queries(size=3.0))
    assert (answer.error_hat > 0).all()
    np.testing.assert_allclose(answer.error_hat, answer.anchor_error + answer.increment)


def test_levels_cover_at_their_level_and_do_not_cross(geoq):
    x, levels = queries(), (0.3, 0.5, 0.8, 0.9, 0.95, 0.99)
    bounds = geoq.bounds(x, levels)
    error = abs(truth(x) - geoq.surrogate_(x))
    for low, high in pairwise(levels):
        assert (bounds[low] <= bounds[high]).all()
    for level in (0.8, 0.9, 0.95):
        assert abs((error <= bounds[level]).mean() - level) < 0.04
    assert_close(bounds[0.95], geoq.bound(x))


def test_the_bound_grows_beyond_the_data(geoq):
    line = np.linspace(0, 6, 7)[:, None] * np.ones((1, 2))
    bound = geoq.bound(line)[:, 0]
    assert (bound[2:] > 3 * bound[1]).all()
    assert bound[-1] > 10 * bound[0]


def test_outside_the_resemblance_is_near_1_and_inside_it_is_small(geoq):
    features = [next(views(geoq, queries(200, size))).features for size in (0.8, 8.0)]
    inside, outside = map(geoq.increment_model_.resemblance_, features)
    assert np.median(inside) < 0.5 < np.median(outside)


def test_one_family_of_folds_has_one_law():
    x, y = data()
    model = GeoQ(train(x, y), train, folds=RandomFolds(5)).fit(x, y).increment_model_
    assert model.resemblance_ is None
    assert model.outside_ is model.inside_


@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_the_unit_of_the_outputs_does_not_matter(geoq, unit):
    x, y = data()
    scaled = GeoQ(train(x, unit * y), train).fit(x, unit * y)
    ratio = scaled.bound(queries(200)) / (unit * geoq.bound(queries(200)))
    np.testing.assert_allclose(ratio, 1, rtol=1e-3)


def test_outputs_have_their_own_scale():
    x, y = data()
    y = np.concatenate([y, 1000 * y], axis=1)
    bound = GeoQ(train(x, y), train).fit(x, y).bound(queries(100))
    np.testing.assert_allclose(bound[:, 1] / bound[:, 0], 1000, rtol=1e-6)


def test_one_number_for_all_outputs():
    x, y = data()
    y = np.concatenate([y, -y], axis=1)
    geoq = GeoQ(train(x, y), train, error_functional=norm_error).fit(x, y)
    error = norm_error(
        np.tile(truth(queries()), 2) * [1, -1], geoq.surrogate_(queries())
    )
    assert abs((error <= geoq.bound(queries())).mean() - 0.95) < 0.04


def test_many_outputs_are_sampled_and_bounded():
    x, y = data(120)
    y = y * np.linspace(0.5, 2, 400)
    geoq = GeoQ(train(x, y), train, folds=RandomFolds(4)).fit(x, y)
    new = queries(300)
    error = abs(truth(new) * np.linspace(0.5, 2, 400) - geoq.surrogate_(new))
    assert abs((error <= geoq.bound(new)).mean() - 0.95) < 0.05


def test_an_exact_surrogate_has_tiny_bounds():
    x, _ = data()
    with pytest.warns(UserWarning, match="as small as at points"):
        geoq = GeoQ(lambda x: x[:, :1], None, folds=RandomFolds(4)).fit(x, x[:, :1])
    assert (geoq.bound(queries(50)) < 1e-9).all()


def test_the_climatology_scales_the_bound():
    x, y = data()
    model = TwoLawIncrement(reference=Climatology())
    geoq = GeoQ(train(x, y), train, increment_model=model).fit(x, y)
    error = abs(truth(queries()) - geoq.surrogate_(queries()))
    assert abs((error <= geoq.bound(queries())).mean() - 0.95) < 0.04


def test_the_spline_makes_the_bound_follow_the_error(geoq):
    x = queries(400, 1.0)
    error = abs(truth(x) - geoq.surrogate_(x))
    assert np.corrcoef(error[:, 0], geoq.bound(x)[:, 0])[0, 1] > 0.95


def test_at_tuples_the_spline_does_not_contain_the_held_out_points():
    x, _ = data()
    y = np.sin(12 * x[:, :1]) * np.cos(8 * x[:, 1:])
    geoq = GeoQ(train(x, y), train, folds=RandomFolds(5)).fit(x, y)
    tuples, model = geoq.calibration_, geoq.increment_model_
    error, anchor = tuples.error, tuples.features.anchor_error
    own, with_all = anchor + model.at_tuples(tuples), anchor + model(tuples.features)
    assert 0.93 < (error <= own).double().mean() < 0.98
    # The spline of queries contains these points, so the bounds would follow the errors too well.
    fits = [np.corrcoef(error[:, 0], bound[:, 0])[0, 1] for bound in (own, with_all)]
    assert fits[1] > fits[0] + 0.05


def test_blocks_of_time_serve_as_interpolating_folds():
    x, y = data()
    folds = CombinedFolds(TemporalFolds(5, gap=3), ClusterFolds(3))
    model = GeoQ(train(x, y), train, folds=folds).fit(x, y).increment_model_
    assert model.resemblance_ is not None


def test_repeated_noisy_rows_are_covered():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.uniform(-1, 1, size=(60, 2)), 5, axis=0)
    y = truth(x) + 0.3 * rng.normal(size=(300, 1))
    geoq = GeoQ(train(x, y), train).fit(x, y)
    new = queries()
    noisy = truth(new) + 0.3 * rng.normal(size=(len(new), 1))
    answer = geoq.assess(new)
    covered = abs(noisy - answer.prediction) <= answer.error_hat
    assert abs(covered.mean() - 0.95) < 0.04
    assert answer.safe.mean() > 0.85


def test_the_description_names_data_bound_inputs_and_region(geoq):
    text = geoq.describe()
    assert text.startswith("300 points, held out ")
    assert "Amid the data the bound depends most on the difference between" in text
    assert "Relative sensitivity of the prediction: input 0 1, " in text
    assert text.endswith(
        "No coverage is guaranteed, since conformalize was not called."
    )


def test_the_laws_have_eight_features_and_increasing_intercepts(geoq):
    law = geoq.increment_model_.inside_
    assert law.slopes.shape == (len(NAMES),) == (8,)
    assert (law.table.diff() >= 0).all()
    assert law.intercept(0.95) == law.table[TABLE.index(0.95)]


def test_a_fit_repeats_bit_for_bit(geoq):
    x, y = data()
    again = GeoQ(train(x, y), train).fit(x, y)
    first, second = (g.assess(queries(size=1.5)) for g in (geoq, again))
    for name in ("error_hat", "support_score", "safe"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_a_loaded_model_answers_bit_for_bit(geoq, tmp_path):
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    x = queries(200, 2.0)
    assert (loaded.bound(x) == geoq.bound(x)).all()
    assert (loaded.assess(x).safe == geoq.assess(x).safe).all()
    assert loaded.assess(x).reason(3) == geoq.assess(x).reason(3)


def test_tensors_and_single_precision(problem):
    x, y = problem.x.float(), problem.y.float()
    geoq = GeoQ(None, problem.train).fit(x, y)
    assert geoq.bound(problem.queries.float()).dtype == torch.float32
