"""The region of small states: its score by hand, and states off an attractor."""

import numpy as np
import pytest
import torch

from geoq import FieldRegion, RolloutGeoQ
from geoq.neighbors import Neighbors
from geoq.regions.local_region import ROUNDING, LocalRegion, local_scores
from geoq.rollout import RolloutRegion


def henon(n):
    states = np.zeros((n, 2))
    for i in range(n - 1):
        states[i + 1] = 1 - 1.4 * states[i, 0] ** 2 + states[i, 1], 0.3 * states[i, 0]
    return states


def least_squares(segments):
    """A least-squares fit of smooth terms, clipped to the range of the data."""
    now = np.concatenate([s[:-1] for s in segments])
    soon = np.concatenate([s[1:] for s in segments])

    def terms(x):
        return np.column_stack([np.ones(len(x)), x, np.tanh(x), x[:, :1] * x[:, 1:]])

    weights = np.linalg.lstsq(terms(now), soon)[0]
    low, high = now.min(axis=0), now.max(axis=0)
    return lambda x: np.clip(terms(x) @ weights, low, high)


def test_the_score_counts_deviations_along_and_across_the_nearest_states():
    # Twenty states on a line with variance 1 along it and none across it.
    line = torch.linspace(-1, 1, 20, dtype=torch.float64)
    states = torch.stack([line / line.std(correction=0), torch.zeros(20)], dim=1)
    queries = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 0.01]], dtype=torch.float64)
    expected = [0.0, 2 / np.sqrt(2), 0.01 / ROUNDING / np.sqrt(2)]
    torch.testing.assert_close(
        local_scores(Neighbors(states), queries),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-5,
        atol=1e-9,
    )


def test_states_off_an_attractor_are_not_safe_although_they_are_near_the_data():
    states = henon(3000)[100:]
    geoq = RolloutGeoQ(None, least_squares, n_calibration=10).fit(states[:2000])
    usual = states[2000:2600:3]
    noise = np.random.default_rng(0).standard_normal(usual.shape)
    moved = usual + 0.1 * states.std(axis=0) * noise
    inside, outside = geoq.assess(usual, 10), geoq.assess(moved, 10)
    assert inside.safe[:, 0].mean() >= 0.92
    assert outside.safe[:, 0].mean() <= 0.35
    assert np.median(outside.support_score[:, 1]) < geoq.safe_region_.threshold
    first = int(np.flatnonzero(~outside.safe[:, 0])[0])
    assert "off the surface that its 20 nearest states" in outside.reason(first)


@pytest.mark.parametrize(
    ("state", "bounded", "places"),
    [((3,), 3, None), ((3, 4), 12, None), ((203,), 3, (0, 1, 2))],
)
def test_small_states_and_small_outputs_of_long_states_are_compared(
    state, bounded, places
):
    left_out = torch.arange(np.prod(state)).reshape(state) >= bounded
    assert RolloutRegion(0.9).initial_rule(left_out) == LocalRegion(0.95, places)


@pytest.mark.parametrize(("state", "bounded"), [((64,), 64), ((64,), 1), ((2, 20), 3)])
def test_states_on_a_grid_are_compared_as_fields(state, bounded):
    left_out = torch.arange(np.prod(state)).reshape(state) >= bounded
    assert isinstance(RolloutRegion().initial_rule(left_out), FieldRegion)


def test_a_quantile_that_is_no_fraction_is_refused():
    with pytest.raises(ValueError, match=r"LocalRegion\.quantile"):
        LocalRegion(1.5)
