import numpy as np
import pytest
from numpy.testing import assert_allclose

from geoq.bounds.climatology import Climatology


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
