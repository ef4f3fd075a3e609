"""Networks that are trained together equal networks that are trained alone."""

from functools import partial

import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import Training, TrainNetwork
from geoq.baselines import DeepEnsemble
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.surrogate import TrainTogether
from geoq.training import recipe as recipes
from geoq.training.loop import train_on
from geoq.training.recipe import train_together
from geoq.training.stacked import Member, Pairs, layer_sequence

QUICK = Training(n_steps=60, batch_size=16, learning_rate=5e-3, check_every=20)


class FieldNetwork(nn.Module):
    """A U-Net whose condition is the mean of the field."""

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
    """A network with a buffer, and with a layer that changes its buffers during training."""

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
    """Overlapping subsets of different sizes, in random order."""
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
    "subclass of a linear layer": lambda: nn.Sequential(Sine(2, 9), nn.Linear(9, 1)),
    "parametrised layer": bounded_weight,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_member_of_a_stack_equals_a_network_trained_alone(name, device):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS[name], training=QUICK)
    together = recipe.train_many(x, y, subsets(), [3, 4, 5])
    for rows, seed, member in zip(subsets(), (3, 4, 5), together, strict=True):
        alone = recipe.with_seed(seed)(x[rows], y[rows])
        assert_close(member(x), alone(x), rtol=1e-4, atol=1e-5)
        assert not member.network.training


def test_a_u_net_in_a_stack_equals_a_u_net_trained_alone(device, monkeypatch):
    # By default a GPU rounds float32 to 10 bits in convolutions.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 12, generator=generator).to(device)
    y = x.roll(1, dims=1) ** 2
    recipe = TrainNetwork(FieldNetwork, training=QUICK)
    halves = [torch.arange(40), torch.arange(15, 60)]
    for rows, member in zip(halves, recipe.train_many(x, y, halves), strict=True):
        assert_close(member(x), recipe(x[rows], y[rows])(x), rtol=1e-4, atol=1e-5)


def test_each_member_of_a_stack_stops_at_its_own_step(device):
    x, y = plane(device)
    training = Training(
        n_steps=400, batch_size=16, learning_rate=0.02, check_every=10, patience=3
    )
    pairs = Pairs(x, y, nn.functional.mse_loss)
    rows = [[part.to(device) for part in training.hold_out(rows)] for rows in subsets()]

    def network():
        return fresh(NETWORKS["mlp"]).to(device)

    def loss(net, rows):
        return nn.functional.mse_loss(net(x[rows]), y[rows])

    members = [Member(network(), *own, random_state=0) for own in rows]
    together = train_together(members, pairs, training)
    last_steps = []
    for member, result, own in zip(members, together, rows, strict=True):
        alone = network()
        expected = train_on(alone, loss, training, *own)
        assert result.best_step == expected.best_step
        assert result.last_step == expected.last_step
        assert result.first_loss == pytest.approx(expected.first_loss, rel=1e-4)
        assert result.best_loss == pytest.approx(expected.best_loss, rel=1e-2)
        assert_close(member.network(x), alone(x), rtol=1e-2, atol=1e-3)
        last_steps.append(result.last_step)
    assert len(set(last_steps)) > 1


def test_the_results_of_members_with_different_batch_sizes_have_the_order_of_the_members():
    x, y = plane("cpu")
    network = NETWORKS["mlp"]
    few, many = torch.arange(9), torch.arange(100)
    members = [
        Member(fresh(network), rows, held_out, random_state=0)
        for rows, held_out in [(many, few), (few, few), (many, many)]
    ]
    pairs = Pairs(x, y, nn.functional.mse_loss)
    results = train_together(members, pairs, QUICK)
    for member, result in zip(members, results, strict=True):
        rows = member.validation_rows
        loss = nn.functional.mse_loss(member.network(x[rows]), y[rows])
        assert result.best_loss == pytest.approx(float(loss.detach()), rel=1e-4)


def test_a_member_with_fewer_rows_than_the_batch_size_equals_a_network_trained_alone(
    device,
):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    few = [torch.arange(9), torch.arange(100), torch.arange(50)]
    for rows, member in zip(few, recipe.train_many(x, y, few), strict=True):
        assert_close(member(x), recipe(x[rows], y[rows])(x), rtol=1e-4, atol=1e-5)


def test_networks_with_dropout_are_trained_one_by_one(device):
    x, y = plane(device)
    recipe = TrainNetwork(partial(NETWORKS["mlp"], dropout=0.2), training=QUICK)
    for rows, member in zip(subsets(), recipe.train_many(x, y, subsets()), strict=True):
        assert torch.equal(member(x), recipe(x[rows], y[rows])(x))


def test_networks_are_trained_together_on_numpy_arrays(device):
    x, y = plane(device)
    x, y = x.cpu().double().numpy(), y.cpu().double().numpy()
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    rows = [part.numpy() for part in subsets()]
    member = recipe.train_many(x, y, rows)[1]
    assert_close(member(x), recipe(x[rows[1]], y[rows[1]])(x), rtol=1e-4, atol=1e-5)


def test_a_loss_of_a_stack_that_is_not_finite_raises_an_error(device):
    x, y = plane(device)
    training = Training(n_steps=100, learning_rate=1e30, check_every=10)
    recipe = TrainNetwork(NETWORKS["mlp"], training=training)
    with pytest.raises(FloatingPointError, match=r"loss became (nan|inf) by step \d+"):
        recipe.train_many(x, y, subsets())


def test_only_sequences_of_linear_and_elementwise_layers_use_batched_products():
    assert len(layer_sequence(fresh(MLP, 2, 1, hidden=(4, 4)))) == 5
    assert layer_sequence(fresh(FieldNetwork)) is None
    assert layer_sequence(nn.Sequential(nn.ReLU(), nn.Dropout(0.1))) is None


def test_large_batches_or_networks_are_not_trained_together(monkeypatch):
    x, y = plane("cpu")
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    assert isinstance(recipe, TrainTogether)
    assert recipe.n_together(x, y) > 100
    monkeypatch.setattr(recipes, "STACK_NUMBERS", 16 * 3 * 4)
    assert recipe.n_together(x, y) == 4
    monkeypatch.setattr(recipes, "STACK_WEIGHTS", 1)
    assert recipe.n_together(x, y) == 1


def test_a_deep_ensemble_trained_together_equals_one_trained_one_by_one(
    device, monkeypatch
):
    x, y = plane(device)
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    together = DeepEnsemble(recipe, n_members=3).fit(x, y)
    monkeypatch.setattr(recipes, "STACK_WEIGHTS", 1)
    alone = DeepEnsemble(recipe, n_members=3).fit(x, y)
    assert_close(
        together.predict(x).error_hat, alone.predict(x).error_hat, rtol=1e-3, atol=1e-4
    )
