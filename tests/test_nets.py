import numpy as np
import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import Mesh
from geoq.nets.mesh import MeshConvolution, MeshNet, stencils
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet


def test_the_layers_of_a_network_are_those_that_were_asked_for():
    network = fresh(MLP, 1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)
    widths = [m.out_features for m in network.modules() if isinstance(m, nn.Linear)]
    assert widths == [64, 64, 16, 32, 1]
    assert network.encoder(torch.zeros(2, 1)).shape == (2, 16)
    network = fresh(MLP, 1, 1, hidden=(4, 4), dropout=0.1)
    assert sum(isinstance(m, nn.Dropout) for m in network.modules()) == 2


@pytest.mark.parametrize("space", [(1,), (7,), (64,), (5, 6), (1, 1), (12, 17), (3, 4, 5)])
def test_the_output_has_the_grid_of_the_input(space):
    network = fresh(UNet, 3, 2, n_spatial=len(space), widths=(4, 6, 8))
    assert network(torch.ones(5, 3, *space), torch.ones(5)).shape == (5, 2, *space)


NODES = Mesh(np.random.default_rng(0).uniform(size=(30, 2)))


@pytest.mark.parametrize(("make", "settings", "cells"), [
    (UNet, {"n_spatial": 2}, (8, 8)),
    (MeshNet, {"mesh": NODES}, (30,)),
], ids=["grid", "mesh"])  # fmt: skip
def test_the_condition_changes_the_output_and_fields_of_a_batch_do_not(make, settings, cells):
    network = fresh(make, 1, 1, widths=(4, 8), **settings)
    fields = torch.randn(3, 1, *cells, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0.0, 1.0, 2.0])
    together = network(fields, numbers)
    alone = [network(fields[i : i + 1], numbers[i : i + 1]) for i in range(3)]
    assert_close(together, torch.cat(alone))
    assert (network(fields, 0 * numbers) - together).abs().max() > 1e-6


def test_a_surface_has_no_gradient_across_it():
    """Values that change along a tilted plane only are seen with their slope."""
    plane = np.random.default_rng(0).uniform(size=(200, 2))
    tilted = np.stack([plane[:, 0], plane[:, 1], plane[:, 0] + plane[:, 1]], axis=1)
    layer = fresh(MeshConvolution, 1, 1, stencils(Mesh(tilted), 12))
    values = torch.from_numpy(tilted[:, 0])[None, None]
    own, mean, *slope = layer.sums(values).double()[0]
    assert_close(own, values[0, 0])
    assert_close(mean, own, atol=0.1, rtol=0)
    # The gradient of the first coordinate within the plane is (2, -1, 1) / 3.
    ratio = torch.stack(slope) / slope[0]
    assert_close(ratio.mean(1), torch.tensor([1.0, -0.5, 0.5]).double(), atol=1e-3, rtol=0)


def test_each_block_of_a_mesh_combines_twice_as_many_neighbours_and_stencils_are_kept():
    network = fresh(MeshNet, 1, 1, mesh=NODES, widths=(4, 4))
    own = [block.first.matrix for block in network.blocks]
    per_node = [len(matrix.values()) / (3 * 30) for matrix in own]
    assert per_node[0] < per_node[1]
    assert own[0] is stencils(NODES, 8)
    assert own[1] is stencils(NODES, 16)
