"""Networks trained together are those trained apart."""

import logging
from functools import partial

import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import Training, TrainNetwork, training
from geoq.baselines import DeepEnsemble
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.surrogate import TrainTogether
from geoq.training.stacked import chain

QUICK = Training(n_steps=60, batch_size=16, learning_rate=5e-3, check_every=20)


class FieldNetwork(nn.Module):
    """A U-Net that takes its condition from the field itself."""

    def __init__(self):
        super().__init__()
        self.unet = UNet(
            1,
            1,
            n_spatial=1,
            widths=(4, 6),
            n_condition=4,
            gpu_dtype=torch.float32,
        )

    def forward(self, x):
        return self.unet(x[:, None], x.mean(dim=1))[:, 0]


class Normalised(nn.Module):
    """A network with a buffer, and with a layer that counts what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.rand(1))
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x + self.shift)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 8).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


class Sine(nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()


def shared_activation():
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(2, 9), act, nn.Linear(9, 9), act, nn.Linear(9, 1))


def bounded_weight():
    layer = nn.Linear(2, 9)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(9, 1))


def plane(device, n=150):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    return x.to(device), (x[:, :1] ** 2 + x[:, 1:]).to(device)


def subsets(n=150):
    """Unequal in size, overlapping, in no order."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(n, generator=generator)[:size] for size in (150, 97, 120)]


NETWORKS = {
    "mlp": partial(MLP, 2, 1, hidden=(16, 8), n_encoder_layers=1),
    "sequence": lambda: nn.Sequential(
        nn.Linear(2, 9, bias=False), nn.GELU(), nn.Sequential(nn.Linear(9, 1))
    ),
    "batch norm and buffer": Normalised,
    "frozen layer": Frozen,
    "one activation called twice": shared_activation,
    "a layer that does more than its kind": lambda: nn.Sequential(
        Sine(2, 9), nn.Linear(9, 1)
    ),
    "parametrised layer": bounded_weight,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_member_is_what_it_would_be_alone(name, device):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS[name], training=QUICK)
    together = recipe.train_many(x, y, subsets(), [3, 4, 5])
    for rows, seed, member in zip(subsets(), (3, 4, 5), together, strict=True):
        alone = recipe.with_seed(seed)(x[rows], y[rows])
        assert_close(member(x), alone(x), rtol=1e-4, atol=1e-5)
        assert not member.network.training


def test_a_u_net_among_others_is_what_it_would_be_alone(device, monkeypatch):
    # A GPU convolves float32 in 10 bits unless told not to.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 12, generator=generator).to(device)
    y = x.roll(1, dims=1) ** 2
    recipe = TrainNetwork(FieldNetwork, training=QUICK)
    halves = [torch.arange(40), torch.arange(15, 60)]
    for rows, member in zip(halves, recipe.train_many(x, y, halves), strict=True):
        assert_close(member(x), recipe(x[rows], y[rows])(x), rtol=1e-4, atol=1e-5)


def test_members_stop_at_their_own_times(device, caplog):
    x, y = plane(device)
    recipe = TrainNetwork(
        NETWORKS["mlp"],
        training=Training(
            n_steps=400, batch_size=16, learning_rate=0.02, check_every=10, patience=3
        ),
    )
    with caplog.at_level(logging.INFO, logger="geoq"):
        together = recipe.train_many(x, y, subsets(), [0, 1, 2])
        ends = [record.args[2] for record in caplog.records]
        caplog.clear()
        alone = [
            recipe.with_seed(seed)(x[rows], y[rows])
            for seed, rows in enumerate(subsets())
        ]
    assert ends == [record.args[2] for record in caplog.records]
    assert len(set(ends)) > 1
    for member, other in zip(together, alone, strict=True):
        assert_close(member(x), other(x), rtol=1e-2, atol=1e-3)


def test_a_member_with_fewer_rows_than_a_batch_has_its_own_batches(device):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    few = [torch.arange(9), torch.arange(100), torch.arange(50)]
    for rows, member in zip(few, recipe.train_many(x, y, few), strict=True):
        assert_close(member(x), recipe(x[rows], y[rows])(x), rtol=1e-4, atol=1e-5)


def test_a_network_with_dropout_is_trained_alone_and_is_the_same(device):
    x, y = plane(device)
    recipe = TrainNetwork(partial(NETWORKS["mlp"], dropout=0.2), training=QUICK)
    for rows, member in zip(subsets(), recipe.train_many(x, y, subsets()), strict=True):
        assert torch.equal(member(x), recipe(x[rows], y[rows])(x))


def test_numpy_users_may_train_together(device):
    x, y = plane(device)
    x, y = x.cpu().double().numpy(), y.cpu().double().numpy()
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    rows = [part.numpy() for part in subsets()]
    member = recipe.train_many(x, y, rows)[1]
    assert_close(member(x), recipe(x[rows[1]], y[rows[1]])(x), rtol=1e-4, atol=1e-5)


def test_a_loss_that_explodes_is_reported(device):
    x, y = plane(device)
    training = Training(n_steps=100, learning_rate=1e30, check_every=10)
    recipe = TrainNetwork(NETWORKS["mlp"], training=training)
    with pytest.raises(FloatingPointError, match=r"loss became (nan|inf) by step \d+"):
        recipe.train_many(x, y, subsets())


def test_only_plain_sequences_become_batched_products():
    assert len(chain(fresh(MLP, 2, 1, hidden=(4, 4)))) == 5
    assert chain(fresh(FieldNetwork)) is None
    assert chain(nn.Sequential(nn.ReLU(), nn.Dropout(0.1))) is None


def test_large_batches_or_networks_are_not_trained_together(monkeypatch):
    x, y = plane("cpu")
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    assert isinstance(recipe, TrainTogether)
    assert recipe.n_together(x, y) > 100
    monkeypatch.setattr(training, "STACK_NUMBERS", 16 * 3 * 4)
    assert recipe.n_together(x, y) == 4
    monkeypatch.setattr(training, "STACK_WEIGHTS", 1)
    assert recipe.n_together(x, y) == 1


def test_an_ensemble_of_networks_is_that_of_its_members_alone(device, monkeypatch):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    together = DeepEnsemble(recipe, n_members=3).fit(x, y)
    monkeypatch.setattr(training, "STACK_WEIGHTS", 1)
    alone = DeepEnsemble(recipe, n_members=3).fit(x, y)
    assert_close(
        together.predict(x).error_hat, alone.predict(x).error_hat, rtol=1e-3, atol=1e-4
    )
