import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet


def test_the_forrester_network_has_the_papers_widths():
    network = fresh(MLP, 1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)
    widths = [m.out_features for m in network.modules() if isinstance(m, nn.Linear)]
    assert widths == [64, 64, 16, 32, 1]
    assert network.encoder(torch.zeros(2, 1)).shape == (2, 16)


def test_dropout_stands_behind_every_hidden_layer():
    network = fresh(MLP, 1, 1, hidden=(4, 4), dropout=0.1)
    assert sum(isinstance(m, nn.Dropout) for m in network.modules()) == 2


@pytest.mark.parametrize("space", [(1,), (7,), (64,), (5, 6), (1, 1), (12, 17)])
def test_any_grid_comes_back_with_its_size(space):
    network = fresh(UNet, 3, 2, n_spatial=len(space), widths=(4, 6, 8))
    assert network(torch.ones(5, 3, *space), torch.ones(5)).shape == (5, 2, *space)


@pytest.mark.parametrize("n_spatial", [1, 2])
@pytest.mark.parametrize("widths", [(16, 32, 64, 64), (32, 64, 128, 128, 128)])
def test_every_level_of_a_deep_fresh_network_is_heard(n_spatial, widths):
    network = fresh(UNet, 3, 2, n_spatial=n_spatial, widths=widths)
    loudness = []
    for block in [*network.down, *network.up]:
        block.register_forward_hook(lambda *call: loudness.append(call[-1].std()))
    generator = torch.Generator().manual_seed(0)
    smooth = torch.randn(4, 3, *(64,) * n_spatial, generator=generator).cumsum(-1)
    network(smooth / smooth.std(), torch.zeros(4))
    assert len(loudness) == 2 * len(widths) - 1
    assert 1 / 4 < min(loudness) < max(loudness) < 4


def test_the_condition_modulates_the_answer():
    network = fresh(UNet, 1, 1, n_spatial=1, widths=(4, 8))
    field = torch.ones(1, 1, 16)
    near, far = network(field, torch.zeros(1)), network(field, torch.ones(1))
    assert (near - far).abs().max() > 1e-6


def test_fields_of_a_batch_do_not_mix():
    network = fresh(UNet, 1, 1, n_spatial=2, widths=(4, 8))
    fields = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0.0, 1.0, 2.0])
    together = network(fields, numbers)
    alone = torch.cat(
        [network(fields[i : i + 1], numbers[i : i + 1]) for i in range(3)]
    )
    assert_close(together, alone)
