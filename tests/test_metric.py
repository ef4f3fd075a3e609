"""The metric: coordinates T, sensitivities and weights by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq import GeoQ, RandomFolds, SensitivityMetric, StandardizedMetric, identity
from geoq.metric import Coordinates, FittedMetric
from geoq.representation import Standardization


def uniform(n, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, *shape, generator=generator, dtype=torch.float64) * 2 - 1


def fitted(x, predict, metric=None):
    metric = metric or SensitivityMetric()
    return metric.fit(metric.coordinates(x), x, predict(x), predict)


def test_without_logarithms_the_coordinates_are_the_standardisation():
    x = torch.cat([uniform(50, 3), torch.full((50, 1), 2.0)], dim=1)
    assert torch.equal(
        Coordinates.fit(x, logarithms=False)(x), Standardization.fit(x)(x)
    )


@pytest.mark.parametrize(
    ("column", "is_log"),
    [
        (torch.logspace(-3, 1, 20), True),
        (torch.logspace(-1, 1, 20), False),
        (torch.logspace(-3, 1, 9), False),
        (torch.linspace(0, 1000, 20), False),
        (-torch.logspace(-3, 1, 20), False),
        (torch.linspace(1e-4, 1, 200), False),
    ],
    ids=["four decades", "two decades", "nine values", "zero", "negative", "uniform"],
)
def test_positive_inputs_over_three_decades_are_logarithms(column, is_log):
    x = column.double().repeat(20)[:180, None]
    coordinates = Coordinates.fit(x, logarithms=True)
    assert coordinates.log.tolist() == [is_log]
    assert_close(coordinates.inverse(coordinates(x)), x)


def test_a_changed_constant_is_found():
    x = torch.cat([uniform(50, 1), torch.full((50, 1), 1.5)], dim=1).double()
    coordinates = Coordinates.fit(x, logarithms=True)
    queries = torch.tensor([[0.0, 1.5], [0.0, 1.5 + 1e-3], [9.0, 1.5]]).double()
    changed = coordinates.changed(coordinates(queries))
    assert changed.tolist() == [[False, False], [False, True], [False, False]]


def test_the_sensitivity_of_a_linear_function_is_its_slope():
    """Two independent draws of an input differ by sqrt(2) deviations in the root mean square."""
    x = uniform(20_000, 3)
    metric = SensitivityMetric(n_rows=20_000)
    g = fitted(x, lambda x: 3 * x[:, :1] - 4 * x[:, 1:2], metric).sensitivity[:, 0]
    expected = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) / math.sqrt(3)
    assert_close(g, expected, rtol=0.03, atol=0.0)


def test_weights_are_square_roots_of_relative_sensitivities_with_a_floor():
    metric = fitted(uniform(400, 3), lambda x: x[:, :1] + 0.25 * x[:, 1:2])
    g = metric.importance
    typical = g.square().mean().sqrt()
    assert_close(metric.weight[:2], (g[:2] / typical).sqrt())
    assert metric.weight[2] == 0.3


def test_outputs_of_different_units_count_equally():
    x = uniform(500, 2)
    metric = fitted(x, lambda x: torch.stack([x[:, 0], 1e6 * x[:, 1]], dim=1))
    assert_close(metric.weight[0], metric.weight[1], rtol=0.05, atol=0.0)


def test_every_evaluated_input_stays_in_its_range():
    x, seen = uniform(100, 2), []

    def predict(x):
        seen.append(x)
        return x[:, :1]

    fitted(x, predict)
    everything = torch.cat(seen)
    assert (everything.amin(dim=0) >= x.amin(dim=0)).all()
    assert (everything.amax(dim=0) <= x.amax(dim=0)).all()


def test_fields_keep_equal_weights_and_the_surrogate_is_not_evaluated():
    def never(_x):
        pytest.fail("the surrogate was evaluated")

    x = uniform(30, 1, 9, 9)
    metric = SensitivityMetric().fit(SensitivityMetric().coordinates(x), x, x, never)
    assert metric.weight is None
    assert metric.sensitivity is None
    t = metric.coordinates(x)
    assert metric(t) is t


def test_the_overhang_is_the_change_of_a_linear_output_outside_its_range():
    x = uniform(5000, 2)
    metric = fitted(x, lambda x: 2 * x[:, :1], SensitivityMetric(n_rows=5000))
    queries = torch.tensor([[0.0, 0.0], [1.5, 0.0], [-2.0, 9.0]], dtype=torch.float64)
    overhang = metric.overhang(metric.coordinates(queries))[:, 0]
    assert overhang[0] == 0
    assert_close(overhang[1:], torch.tensor([1.0, 2.0]).double(), rtol=0.05, atol=0.0)


def test_a_metric_survives_a_file():
    metric = fitted(uniform(100, 2), lambda x: x[:, :1])
    copied = FittedMetric.from_state(metric.state())
    assert torch.equal(copied.weight, metric.weight)
    assert torch.equal(copied.sensitivity, metric.sensitivity)


def test_anchors_and_support_distances_use_the_same_metric(problem):
    def truth(x):
        return x[:, :1] ** 2

    geoq = GeoQ(truth, None, folds=RandomFolds(3)).fit(problem.x, problem.y)
    assert geoq.geometry_.points.shared
    moved = problem.queries.clone()
    moved[:, 1] += 0.5
    before, after = (geoq.assess(q) for q in (problem.queries, moved))
    change = (after.anchor_distance - before.anchor_distance).abs().max()
    standard = GeoQ(
        truth, None, folds=RandomFolds(3), representation=StandardizedMetric()
    )
    standard.fit(problem.x, problem.y)
    before, after = (standard.assess(q) for q in (problem.queries, moved))
    assert change < 0.5 * (after.anchor_distance - before.anchor_distance).abs().max()


def test_a_function_keeps_the_papers_two_spaces(problem):
    geoq = GeoQ(None, problem.train, folds=RandomFolds(3), representation=identity)
    geoq.fit(problem.x, problem.y)
    assert geoq.metric_ is None
    assert not geoq.geometry_.points.shared


def test_the_description_names_the_most_influential_input_first():
    text = fitted(uniform(100, 2), lambda x: x[:, 1:]).describe(["width", "height"])
    assert text.index("height 1") < text.index("width 0")


def test_a_weight_outside_0_and_1_is_refused():
    with pytest.raises(ValueError, match="min_weight=0"):
        SensitivityMetric(min_weight=0)


def test_integer_inputs_are_passed_back_as_integers():
    kinds = set()

    def surrogate(x):
        kinds.add(x.dtype)
        return x[:, :1].astype(float)

    x = np.random.default_rng(0).integers(0, 9, size=(100, 2))
    GeoQ(surrogate, None, folds=RandomFolds(3)).fit(x, x[:, :1] ** 2.0)
    assert kinds == {np.dtype(np.int64)}
