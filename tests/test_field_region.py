"""The safe region for fields: what it detects, its thresholds with few fields, its reasons, its files, its layouts."""

import re

import numpy as np
import pytest
import torch

from geoq import DistanceRegion, FieldRegion, GeoQ, RandomFolds
from geoq.regions.field_region import FittedFieldRegion, joint_thresholds
from geoq.regions.field_scores import (
    Layout,
    Values,
    Windows,
    grid_axes,
    has_grid,
    place_of,
    windows_of,
)
from geoq.regions.safe_region import FittedDistanceRegion

GRIDS = {1: (48,), 2: (16, 16), 3: (8, 8, 8)}


class Largest:
    """The largest error of the calibration: a bound that needs no training."""

    quantile = 0.95

    def fit(self, calibration):
        self.value = calibration.error.amax(dim=0)
        return self

    def __call__(self, features):
        return self.value.expand_as(features.anchor_error)


def fields(n, n_spatial, smoothness=4.0, seed=0):
    """Two channels of random waves; the second one is three times as large."""
    grid = GRIDS[n_spatial]
    rng = np.random.default_rng(seed)
    waves = np.meshgrid(*(np.fft.fftfreq(m, 1 / m) for m in grid), indexing="ij")
    power = (sum(k**2 for k in waves) + 4.0) ** (-smoothness / 2)
    axes = tuple(range(2, 2 + n_spatial))
    white = np.fft.fftn(rng.normal(size=(n, 2, *grid)), axes=axes)
    x = np.fft.ifftn(white * power, axes=axes).real / np.sqrt((power**2).mean())
    return x * np.array([1.0, 3.0]).reshape(1, 2, *(1 for _ in grid))


def surrogate(x):
    return np.sin(x)


def fitted(x, y=None, model=surrogate, **settings):
    y = np.sin(x) + 0.02 * x if y is None else y
    settings = {"folds": RandomFolds(5), "increment_model": Largest()} | settings
    return GeoQ(model, None, **settings).fit(x, y)


@pytest.fixture(scope="module", params=GRIDS)
def on_grid(request):
    return request.param, fitted(fields(120, request.param))


def test_fields_like_those_of_the_calibration_are_safe(on_grid):
    n_spatial, geoq = on_grid
    assert isinstance(geoq.safe_region_, FittedFieldRegion)
    assert geoq.assess(fields(200, n_spatial, seed=1)).safe.mean() > 0.88


SHIFTS = {
    "rougher": lambda x, n_spatial: fields(len(x), n_spatial, 2.0, seed=2),
    "noisy": lambda x, _: (
        x + 0.3 * x.std() * np.random.default_rng(3).normal(size=x.shape)
    ),
    "larger": lambda x, _: 3 * x,
    "steps": lambda x, _: np.sign(x),
    "offset": lambda x, _: x + 8,
    "channels exchanged": lambda x, _: x[:, ::-1].copy(),
}


@pytest.mark.parametrize("shift", SHIFTS)
def test_shifted_fields_are_not_safe(on_grid, shift):
    n_spatial, geoq = on_grid
    shifted = SHIFTS[shift](fields(40, n_spatial, seed=1), n_spatial)
    assert geoq.assess(shifted).safe.mean() <= 0.1


def test_smoother_fields_are_safe(on_grid):
    n_spatial, geoq = on_grid
    smoother = fields(100, n_spatial, 5.0, seed=1)
    assert geoq.assess(smoother).safe.mean() > 0.8


def test_a_prediction_that_does_not_fit_its_input_is_not_safe():
    """Only the score of input and prediction together detects a surrogate that fails on familiar inputs."""

    def unreliable(x):
        return np.where(x[:, :1, :1, :1] > 2.0, -1.0, 1.0) * np.sin(x)

    x = fields(120, 2)
    x = x[x[:, 0, 0, 0] < 2.0]
    geoq = fitted(x, model=unreliable)
    queries = fields(400, 2, seed=1)
    wrong = queries[:, 0, 0, 0] > 2.0
    safe = geoq.assess(queries).safe
    assert safe[~wrong].mean() > 0.88
    assert safe[wrong].mean() < 0.1


@pytest.mark.parametrize("n", [30, 50, 100])
def test_few_fields_suffice_for_the_interior(n):
    safe = [
        fitted(fields(n, 1, seed=10 + seed)).assess(fields(200, 1, seed=seed)).safe
        for seed in range(4)
    ]
    assert np.mean(safe) > 0.93


@pytest.mark.parametrize("n", [20, 50, 200])
def test_a_new_row_exceeds_no_threshold_with_the_nominal_probability(n):
    """Independent scores: thresholds that rows set for themselves would be exceeded by 8 % for n = 50."""
    rng = torch.Generator().manual_seed(n)
    inside = [
        (torch.randn(500, 4, generator=rng).exp() <= thresholds).all(dim=1).double()
        for thresholds in (
            joint_thresholds(torch.randn(n, 4, generator=rng).exp().double(), 0.95)
            for _ in range(60)
        )
    ]
    assert float(torch.cat(inside).mean()) > 0.94 - 0.5 / n


REASONS = {
    "the mean of channel 1 is": lambda x: x + np.array([0, 20]).reshape(2, 1, 1),
    "the standard deviation of channel 0 is": lambda x: (
        x * np.array([0, 1]).reshape(2, 1, 1)
    ),
    "differs from the data within a few cells": lambda x: (
        x + np.random.default_rng(0).normal(size=x.shape)
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_names_the_moment_or_the_windows(reason):
    geoq = fitted(fields(80, 2))
    text = geoq.assess(REASONS[reason](fields(1, 2, seed=1))).reason(0)
    assert "NOT safe" in text
    assert reason in text


def test_the_reason_names_the_place():
    query = fields(1, 2, seed=1)
    query[0, :, 9:12, 3:6] += 6 * np.random.default_rng(0).normal(size=(2, 3, 3))
    text = fitted(fields(80, 2)).assess(query).reason(0)
    row, column = map(int, re.search(r"around cell \((\d+), (\d+)\)", text).groups())
    assert 8 <= row <= 12
    assert 2 <= column <= 6


def test_channels_are_named_and_counted():
    answer = fitted(fields(80, 2)).assess(20 + fields(1, 2, seed=1))
    assert "of channel wind is" in answer.reason(0, names=["wind", "wind"])
    with pytest.raises(ValueError, match=r"names has 3 entries.*2 channels"):
        answer.reason(0, names=["a", "b", "c"])


def test_a_constant_channel_that_changes_is_not_safe():
    """A parameter of the equation as a channel: a new value is detected."""
    x = np.concatenate([fields(60, 1), np.full((60, 1, 48), 0.2)], axis=1)
    geoq = fitted(x)
    assert geoq.assess(x).safe.mean() > 0.9
    x[:, 2] = 0.12
    answer = geoq.assess(x)
    assert not answer.safe.any()
    assert (
        "cell (0,) of channel 2 is 0.12, but it is 0.2 in all the data"
        in answer.reason(0)
    )


def test_the_file_contains_the_region(tmp_path, on_grid):
    n_spatial, _ = on_grid
    geoq = fitted(fields(40, n_spatial))
    geoq.save(tmp_path / "own.geoq")
    loaded = GeoQ.load(
        tmp_path / "own.geoq",
        surrogate=surrogate,
        increment_model=geoq.increment_model_,
    )
    queries = 1.3 * fields(10, n_spatial, seed=1)
    before, after = geoq.assess(queries), loaded.assess(queries)
    np.testing.assert_array_equal(before.support_score, after.support_score)
    assert before.reason(3) == after.reason(3)
    assert loaded.safe_region == FieldRegion()


def test_outputs_that_are_no_fields_leave_three_scores():
    x = fields(60, 2)
    geoq = fitted(x, x.mean((1, 2, 3)) + 0.1, lambda x: x.mean((1, 2, 3)))
    assert len(geoq.safe_region_.thresholds) == 3
    assert not geoq.assess(fields(20, 2, 2.0, seed=1)).safe.any()


def test_the_previous_region_is_one_argument_away():
    geoq = fitted(fields(40, 1), safe_region=DistanceRegion())
    assert isinstance(geoq.safe_region_, FittedDistanceRegion)


def test_too_many_axes_are_refused():
    with pytest.raises(ValueError, match=r"n_spatial=4.*shape \(2, 48\)"):
        fitted(fields(40, 1), safe_region=FieldRegion(n_spatial=4))


@pytest.mark.parametrize(
    ("shape", "n_axes", "is_field"),
    [
        ((64,), 1, False),
        ((3, 64), 1, True),
        ((3, 4), 2, False),
        ((8, 12), 2, True),
        ((64, 32), 2, True),
        ((3, 64, 32), 2, True),
        ((3, 8, 8, 8), 3, True),
    ],
)
def test_the_shape_of_a_row_determines_the_grid(shape, n_axes, is_field):
    assert grid_axes(shape) == n_axes
    assert has_grid(shape) is is_field


def on_nodes(n, nodes, seed=0):
    """Smooth random functions at the nodes of a mesh."""
    rng = np.random.default_rng(seed)
    waves = 4 * np.random.default_rng(9).standard_normal((12, 2)) @ nodes.T
    return (rng.standard_normal((n, 1, 12)) @ np.sin(waves)) / 4


def test_a_region_on_a_mesh_detects_noise_whatever_the_numbers_of_the_nodes(tmp_path):
    rng = np.random.default_rng(1)
    nodes = rng.uniform(size=(400, 2))
    x, queries = on_nodes(120, nodes), on_nodes(60, nodes, seed=1)
    noisy = queries + 0.2 * rng.standard_normal(queries.shape)
    numbers = rng.permutation(400)
    scores = []
    for order in (np.arange(400), numbers):
        region = FieldRegion.on_mesh(nodes[order])
        geoq = fitted(x[..., order], safe_region=region)
        inside = geoq.assess(queries[..., order])
        assert inside.safe.mean() >= 0.85
        assert geoq.assess(noisy[..., order]).safe.mean() <= 0.05
        scores.append(inside.support_score)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-6)
    answer = geoq.assess(noisy[:1, ..., numbers])
    assert re.search(r"around node \d+", answer.reason(0))
    geoq.save(tmp_path / "mesh.geoq")
    own = {"surrogate": surrogate, "increment_model": geoq.increment_model_}
    loaded = GeoQ.load(tmp_path / "mesh.geoq", **own)
    np.testing.assert_array_equal(
        loaded.assess(noisy[:1, ..., numbers]).support_score, answer.support_score
    )


def test_a_mesh_of_other_nodes_is_refused():
    nodes = np.random.default_rng(0).uniform(size=(40, 2))
    with pytest.raises(ValueError, match=r"on_mesh was called with 30 nodes"):
        fitted(on_nodes(30, nodes), safe_region=FieldRegion.on_mesh(nodes[:30]))
    with pytest.raises(ValueError, match=r"has shape \(40,\) or values"):
        FieldRegion.on_mesh(nodes[:, 0])


def test_windows_contain_the_cells_around_their_place():
    field = torch.arange(400.0).reshape(1, 1, 20, 20)
    windows = windows_of(field)
    assert windows.shape == (1, 64, 9)
    for number in (0, 20, 63):
        row, column = place_of(number, (20, 20))
        assert windows[0, number, 4] == field[0, 0, row, column]


def test_windows_of_the_data_have_distance_zero():
    field = torch.randn(4, 2, 30, generator=torch.Generator().manual_seed(0)).double()
    windows = Windows.fit(windows_of(field).flatten(0, 1))
    assert float(windows.distances(field).max()) < 1e-6


def test_gaps_are_distances_to_the_nearest_value_in_deviations():
    values = Values(torch.tensor([2.0]), torch.tensor([[0.0, 1.0, 5.0]]))
    queries = torch.tensor([[-1.0], [0.4], [3.5], [9.0]])
    torch.testing.assert_close(
        values.gaps(queries)[:, 0], torch.tensor([0.5, 0.2, 0.75, 2.0])
    )


def test_a_later_state_is_compared_by_its_change():
    states = torch.from_numpy(fields(30, 1))
    assert Layout.of(states, 0.9 * states, 1).changes
    assert not Layout.of(states, 1e-3 * states, 1).changes
    assert not Layout.of(states, states.mean(2), 1).answers
