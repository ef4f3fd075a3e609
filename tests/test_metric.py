"""The metric: coordinates T, sensitivities and weights by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, RandomFolds
from geoq.data.coordinates import Coordinates, spread
from geoq.data.metric import SensitivityMetric, StandardizedMetric


def uniform(n, *shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, *shape))


def fitted(x, predict, metric=None):
    metric = metric or SensitivityMetric()
    return metric.fit(metric.coordinates(x, None), x, predict(x), predict)


def test_standardised_coordinates_have_mean_0_and_deviation_1():
    points = np.array([[0.0, 1.0, 7.0], [2.0, 5.0, 7.0], [4.0, 3.0, 7.0]])
    z = Coordinates.fit(points, logarithms=False)(points)
    assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    assert_allclose(z.std(axis=0), [1, 1, 0], atol=1e-12)
    mean, scale = spread(np.ones((5, 2, 3)))
    assert mean.shape == scale.shape == (2, 3)


@given(st.floats(-1e12, 1e12), st.integers(1, 50))
def test_the_scale_of_a_constant_coordinate_is_its_size(value, n):
    """Rounding leaves the computed deviation of a constant at 1e-17, which must not become the scale."""
    assert spread(np.full((n, 1), value))[1][0] == pytest.approx(abs(value) or 1.0)


@pytest.mark.parametrize("one_dimensional", [False, True])
@pytest.mark.parametrize(("column", "is_log"), [
    (np.logspace(-3, 1, 20), True),
    (np.logspace(-1, 1, 20), False),
    (np.logspace(-3, 1, 9), False),
    (np.linspace(0, 1000, 20), False),
    (-np.logspace(-3, 1, 20), False),
    (np.linspace(1e-4, 1, 200), False),
], ids=["four decades", "two decades", "nine values", "zero", "negative", "uniform"])  # fmt: skip
def test_positive_inputs_over_three_decades_are_logarithms(column, is_log, one_dimensional):
    x = np.tile(column, 20)[:180]
    x = x if one_dimensional else x[:, None]
    coordinates = Coordinates.fit(x, logarithms=True)
    assert coordinates.log.reshape(-1).tolist() == [is_log]
    assert_allclose(coordinates.inverse(coordinates(x)), x, atol=1e-9)


def test_a_changed_constant_is_found():
    x = np.concatenate([uniform(50, 1), np.full((50, 1), 1.5)], axis=1)
    coordinates = Coordinates.fit(x, logarithms=True)
    queries = coordinates(np.array([[0.0, 1.5], [0.0, 1.5 + 1e-3], [9.0, 1.5]]))
    assert coordinates.changed(queries).tolist() == [[False] * 2, [False, True], [False] * 2]


def test_names_of_channels_do_not_name_the_cells_of_a_field():
    coordinates = Coordinates.fit(np.zeros((3, 2, 4)), logarithms=False)
    lost = np.full((2, 4), [0, 0, np.nan, 0])
    assert coordinates.why_unusable(lost, ["u", "v"], "input").startswith("input 0, 2 is nan")
    assert coordinates.why_unusable(lost, [*"abcdefgh"], "input").startswith("input c is nan")


def test_sensitivities_and_weights_by_hand():
    """Two independent draws of an input differ by sqrt(2) deviations in the root mean square."""
    metric = SensitivityMetric(n_rows=20_000)
    found = fitted(uniform(20_000, 3), lambda x: 3 * x[:, :1] - 4 * x[:, 1:2], metric)
    assert_allclose(found.sensitivity[:, 0], np.array([3, 4, 0]) / math.sqrt(3), rtol=0.03)
    metric = fitted(uniform(400, 3), lambda x: x[:, :1] + 0.25 * x[:, 1:2])
    g = metric.importance
    assert_allclose(metric.weight[:2], np.sqrt(g[:2] / math.sqrt((g**2).mean())))
    assert metric.weight[2] == 0.3

    def predict(x):
        return np.stack([x[:, 0], 1e6 * x[:, 1], np.ones(len(x))], axis=1)

    weight = fitted(uniform(500, 2), predict).weight
    assert_allclose(weight[0], weight[1], rtol=0.05)
    assert_array_equal(fitted(uniform(500, 2), lambda x: np.ones((len(x), 1))).weight, 1)


def test_every_evaluated_input_stays_in_its_range_and_at_most_n_rows_are_asked():
    x, seen = uniform(100, 2), []
    fitted(x, lambda x: seen.append(x) or x[:, :1], SensitivityMetric(n_rows=30))
    assert [len(part) for part in seen[1:]] == [30] * 3
    everything = np.concatenate(seen)
    assert (everything.min(axis=0) >= x.min(axis=0)).all()
    assert (everything.max(axis=0) <= x.max(axis=0)).all()


@pytest.mark.parametrize("metric", [SensitivityMetric(), StandardizedMetric()])
def test_fields_have_equal_weights_and_the_surrogate_is_not_evaluated(metric):
    x = uniform(30, 1, 9, 9)
    found = metric.fit(metric.coordinates(x, None), x, x, lambda x: pytest.fail("evaluated"))
    assert found.weight is found.sensitivity is None
    t = found.coordinates(x)
    assert found(t) is t
    assert "same weight" in found.describe()


def test_the_overhang_is_the_change_of_a_linear_output_outside_its_range():
    metric = fitted(uniform(5000, 2), lambda x: 2 * x[:, :1], SensitivityMetric(n_rows=5000))
    queries = metric.coordinates(np.array([[0.0, 0.0], [1.5, 0.0], [-2.0, 9.0]]))
    assert_allclose(metric.overhang(queries)[:, 0], [0, 1, 2], rtol=0.05)


def test_anchors_and_support_distances_use_the_same_metric(problem):
    """An input without influence hardly changes the distances; equal weights do not know that."""

    def change(representation):
        settings = {"folds": RandomFolds(3), "representation": representation}
        estimator = GeoQ(lambda x: x[:, :1] ** 2, None, **settings)
        estimator.fit(problem.x, problem.y)
        assert estimator.fitted_.geometry.points.shared
        moved = problem.queries + np.array([0, 0.5])
        before, after = (estimator.assess(q).anchor_distance for q in (problem.queries, moved))
        return abs(after - before).max()

    assert change(SensitivityMetric()) < 0.5 * change(StandardizedMetric())


@pytest.mark.parametrize("dtype", ["i8", "u1", "f4", "?"])
def test_inputs_are_passed_back_in_their_type(dtype):
    kinds = set()

    def surrogate(x):
        kinds.add(x.dtype)
        return x[:, :1].astype(float)

    x = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 9, size=(100, 2)).astype(dtype)
    GeoQ(surrogate, None, folds=RandomFolds(2)).fit(x, x[:, :1] * 2.0 + 1)
    assert kinds == {np.dtype(dtype)}
