"""The safe region of rollouts: its threshold, the surface of small states by hand, and states off an attractor."""

import numpy as np
import pytest
from henon import fitted, henon
from numpy.testing import assert_allclose

from geoq import RolloutGeoQ
from geoq.data.coordinates import Coordinates
from geoq.regions.table_scores import ROUNDING_OFF_SURFACE, Surface
from geoq.regions.views import TableView
from geoq.rollout.series import RowLayout


def test_the_region_contains_the_quantile_of_the_whole_held_out_rollouts():
    """Two tests, of the steps and of the initial states, exclude 5 % together."""
    farthest = fitted().fitted_.calibration.features.support_distance.max(axis=1)
    threshold = fitted().fitted_.region.threshold
    assert (farthest <= threshold).mean() >= 0.975
    assert (farthest < threshold).mean() < 0.975
    assert (fitted().fitted_.held_out.supported == 40).mean() >= 0.95


def view(points):
    nu = Coordinates.fit(np.random.default_rng(0).random((9, points.shape[1])), logarithms=False)
    zeros = np.zeros(len(points))
    return TableView(points, points, zeros, zeros, zeros.astype(bool), nu, None)


def test_the_score_counts_deviations_along_and_across_the_nearest_states():
    """Twenty states on a line with variance 1 along it and none across it."""
    line = np.linspace(-1, 1, 20)
    surface = Surface(np.stack([line / line.std(), np.zeros(20)], axis=1))
    queries = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 0.01]])
    expected = [0.0, 2 / np.sqrt(2), 0.01 / ROUNDING_OFF_SURFACE / np.sqrt(2)]
    assert_allclose(surface(view(queries)), expected, rtol=1e-5, atol=1e-9)


def least_squares(segments):
    """A least-squares fit of smooth terms, clipped to the range of the data."""
    now = np.concatenate([s[:-1] for s in segments])
    soon = np.concatenate([s[1:] for s in segments])

    def terms(x):
        return np.column_stack([np.ones(len(x)), x, np.tanh(x), x[:, :1] * x[:, 1:]])

    weights = np.linalg.lstsq(terms(now), soon)[0]
    low, high = now.min(axis=0), now.max(axis=0)
    return lambda x: np.clip(terms(x) @ weights, low, high)


def test_states_off_an_attractor_are_not_safe_although_they_are_near_the_data():
    states = henon(2900)
    estimator = RolloutGeoQ(None, least_squares, n_calibration=10).fit(states[:2000])
    usual = states[2000:2600:3]
    noise = np.random.default_rng(0).standard_normal(usual.shape)
    moved = usual + 0.1 * states.std(axis=0) * noise
    inside, outside = estimator.assess(usual, 10), estimator.assess(moved, 10)
    assert inside.safe[:, 0].mean() >= 0.92
    assert outside.safe[:, 0].mean() <= 0.35
    # A forecast from such a state stays unsafe, although its later steps return to the attractor.
    assert not outside.safe[~outside.safe[:, 0]].any()
    first = int(np.flatnonzero(~outside.safe[:, 0])[0])
    assert "off the surface that its 20 nearest states" in outside.reason(first)


def test_initial_states_on_a_grid_are_compared_as_fields_without_their_forcing():
    """Waves on two channels with 16 cells that move by one cell per step, and a forcing of both channels."""
    rng, place = np.random.default_rng(0), np.linspace(0, 2 * np.pi, 16, endpoint=False)
    wave = np.exp(1j * (2 * np.pi / 16) * np.arange(340))[:, None]
    both = np.concatenate([wave * np.exp(1j * place), wave**2 * np.exp(2j * place)], axis=1)
    states = np.real(both).reshape(-1, 2, 16) + 0.1 * rng.standard_normal((340, 2, 16))
    force = 0.1 * rng.standard_normal((300, 2))

    def step(x, u):
        return np.roll(x, -1, axis=2) + u[:, :, None]

    estimator = RolloutGeoQ(step, None, n_calibration=10).fit(states[:300], forcing=force)
    usual = states[300:]
    x0 = np.concatenate([usual, 2 * usual, usual + rng.standard_normal(usual.shape)])
    a = estimator.assess(x0, 3, forcing=force[:3])
    safe = a.safe[:, 0].reshape(3, 40).mean(axis=1)
    assert safe[0] > 0.8
    assert safe[1:].max() < 0.1
    assert "standard deviation of channel" in a.reason(40)


@pytest.mark.parametrize(("state", "n_bounded", "cells"), [
    ((3,), 3, None),
    ((3, 4), 12, None),
    ((203,), 3, None),
    ((64,), 64, (64,)),
    ((64,), 1, (64,)),
    ((2, 20), 3, (20,)),
    ((3, 8, 8), 192, (8, 8)),
])  # fmt: skip
def test_states_are_fields_on_a_grid_and_otherwise_rows_of_few_numbers(state, n_bounded, cells):
    index = np.arange(np.prod(state)).reshape(state) < n_bounded
    layout = RowLayout.of(state, None, index)
    assert layout.region_layout.is_table == (cells is None)
    if cells is None:
        assert layout.compared(np.zeros((1, *state))).size == n_bounded
    else:
        assert layout.region_layout.cells == cells
