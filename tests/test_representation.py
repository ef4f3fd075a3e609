import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq import identity
from geoq.representation import Standardization


def test_standardised_coordinates_have_mean_0_and_deviation_1():
    points = torch.tensor([[0.0, 1.0], [2.0, 5.0], [4.0, 3.0]], dtype=torch.float64)
    z = Standardization.fit(points)(points)
    assert_close(z.mean(dim=0), torch.zeros(2, dtype=torch.float64))
    assert_close((z**2).mean(dim=0), torch.ones(2, dtype=torch.float64))


@given(st.floats(-1e12, 1e12), st.integers(1, 50))
def test_the_scale_of_a_constant_coordinate_is_its_size(value, n):
    """Rounding leaves the computed deviation of a constant at 1e-17, which must not become the scale."""
    points = torch.full((n, 1), value, dtype=torch.float64)
    scale = Standardization.fit(points).scale.item()
    assert scale == pytest.approx(abs(value) or 1.0)


def test_fields_keep_their_shape():
    points = torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    standardization = Standardization.fit(points)
    assert standardization.scale.shape == (2, 3, 4)
    assert standardization(points).shape == points.shape


def test_identity_is_the_input_itself():
    x = torch.ones(2)
    assert identity(x) is x
