import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq.increments import Climatology


@pytest.mark.parametrize("n_states", [50, 5000])
def test_the_climatology_is_the_quantile_of_the_distances_to_the_values(n_states):
    states = torch.from_numpy(np.random.default_rng(0).gamma(2.0, size=(n_states, 3)))
    climatology = Climatology().fit(states, 0.95)
    queries = torch.linspace(-1, 12, 40, dtype=torch.float64)[:, None].expand(-1, 3)
    distance = (queries[:, None] - states).abs().sort(dim=1).values
    exact = distance[:, int(np.ceil(0.95 * n_states - 1e-9)) - 1]
    spacing = float((states.amax(dim=0) - states.amin(dim=0)).max()) / 255
    assert_close(climatology(queries), exact, rtol=0, atol=3 * spacing)


def test_the_climatology_of_a_constant_coordinate_is_the_distance_to_it():
    climatology = Climatology().fit(torch.full((30, 1), 2.0), 0.95)
    distance = climatology(torch.tensor([[2.0], [5.0]]))
    assert_close(distance, torch.tensor([[0.0], [3.0]]))
