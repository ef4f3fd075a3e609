"""Networks that are trained together equal networks that are trained alone."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import GeoQ, NestedFolds, RandomFolds, Training, TrainNetwork
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.training import recipe as recipes
from geoq.training.loop import Task, train, train_together

QUICK = Training(n_steps=60, batch_size=16, learning_rate=5e-3, check_every=20)


class FieldNetwork(nn.Module):
    """A U-Net whose condition is the mean of the field."""

    def __init__(self):
        super().__init__()
        self.unet = UNet(1, 1, n_spatial=1, widths=(4, 6), n_condition=4)

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


NETWORKS = {
    "mlp": partial(MLP, 2, 1, hidden=(16, 8), n_encoder_layers=1),
    "dropout, which is trained alone": partial(MLP, 2, 1, hidden=(16,), dropout=0.2),
    "sequence": lambda: nn.Sequential(nn.Linear(2, 9, bias=False), nn.GELU(), nn.Sequential(nn.Linear(9, 1))),
    "batch norm and buffer": Normalised,
    "frozen layer": Frozen,
    "one activation called twice": shared_activation,
    "subclass of a linear layer": lambda: nn.Sequential(Sine(2, 9), nn.Linear(9, 1)),
    "parametrised layer": bounded_weight,
}  # fmt: skip
GENERATOR = np.random.default_rng(0)
X = torch.from_numpy(GENERATOR.normal(size=(150, 2))).float()
Y = X[:, :1] ** 2 + X[:, 1:]
# Overlapping subsets of different sizes, in random order.
SUBSETS = [GENERATOR.permutation(150)[:size] for size in (150, 97, 120)]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_member_of_a_stack_equals_a_network_trained_alone(name):
    recipe = TrainNetwork(NETWORKS[name], training=QUICK)
    together = recipe.train_many(X, Y, SUBSETS, [3, 4, 5])
    for rows, seed, member in zip(SUBSETS, (3, 4, 5), together, strict=True):
        alone = recipe.with_seed(seed)(X[rows], Y[rows])
        assert_close(member(X), alone(X), rtol=1e-4, atol=1e-5)
        assert not member.network.training


def test_a_u_net_in_a_stack_equals_a_u_net_trained_alone():
    x = X[:144].reshape(24, 12).repeat(2, 1)
    recipe = TrainNetwork(FieldNetwork, training=QUICK)
    halves = [np.arange(30), np.arange(15, 48)]
    for rows, member in zip(halves, recipe.train_many(x, x.roll(1, 1), halves), strict=True):
        alone = recipe(x[rows], x.roll(1, 1)[rows])
        assert_close(member(x), alone(x), rtol=1e-4, atol=1e-5)


def test_each_member_of_a_stack_stops_at_its_own_step():
    training = Training(n_steps=400, batch_size=16, learning_rate=0.02, check_every=10, patience=3)
    splits = [training.hold_out(torch.from_numpy(rows)) for rows in SUBSETS]

    def loss(net, rows):
        return nn.functional.mse_loss(net(X[rows]), Y[rows])

    networks = [fresh(NETWORKS["mlp"]) for _ in splits]
    task = Task(X, nn.functional.mse_loss, lambda call, loss, rows: loss(Y[rows], call(X[rows])))
    together = train_together(networks, splits, [0] * 3, task, training)
    for network, result, own in zip(networks, together, splits, strict=True):
        alone = fresh(NETWORKS["mlp"])
        expected = train(alone, loss, training, *own)
        assert result.best_step == expected.best_step
        assert result.last_step == expected.last_step
        assert result.first_loss == pytest.approx(expected.first_loss, rel=1e-4)
        assert_close(network(X), alone(X), rtol=1e-2, atol=1e-3)
    assert len({result.last_step for result in together}) > 1


def test_the_results_of_members_with_different_batch_sizes_have_the_order_of_the_members():
    few, many = torch.arange(9), torch.arange(100)
    splits = [(many, few), (few, few), (many, many)]
    networks = [fresh(NETWORKS["mlp"]) for _ in splits]
    task = Task(X, nn.functional.mse_loss, lambda call, loss, rows: loss(Y[rows], call(X[rows])))
    results = train_together(networks, splits, [0] * 3, task, QUICK)
    for network, result, (_, rows) in zip(networks, results, splits, strict=True):
        loss = nn.functional.mse_loss(network(X[rows]), Y[rows])
        assert result.best_loss == pytest.approx(float(loss.detach()), rel=1e-4)


def test_a_loss_of_a_stack_that_is_not_finite_raises_and_names_the_folds():
    training = Training(n_steps=100, learning_rate=1e30, check_every=10)
    recipe = TrainNetwork(NETWORKS["mlp"], training=training)
    with pytest.raises(FloatingPointError, match=r"loss became (nan|inf) by step \d+") as caught:
        GeoQ(lambda x: x[:, :1], recipe, folds=RandomFolds(4)).fit(X, Y)
    assert caught.value.__notes__ == [
        "while training the surrogates of fold 1 of 4 to fold 4 of 4 together"
    ]


def test_large_batches_or_networks_are_not_trained_together(monkeypatch):
    recipe = TrainNetwork(NETWORKS["mlp"], training=QUICK)
    assert recipe.n_together(X, Y) > 100
    monkeypatch.setattr(recipes, "STACK_NUMBERS", 16 * 3 * 4)
    assert recipe.n_together(X, Y) == 4
    monkeypatch.setattr(recipes, "STACK_WEIGHTS", 1)
    assert recipe.n_together(X, Y) == 1


@pytest.mark.parametrize("folds", [RandomFolds(4), NestedFolds(3)], ids=repr)
def test_networks_trained_together_and_one_by_one_give_the_same_calibration(problem, folds):
    recipe = TrainNetwork(partial(MLP, 2, 1, hidden=(16,)), training=QUICK)
    surrogate = problem.train(problem.x, problem.y)
    together, alone = (
        GeoQ(surrogate, train, folds=folds, n_support=5).fit(problem.x, problem.y).fitted_.tuples
        for train in (recipe, lambda x, y: recipe(x, y))
    )
    np.testing.assert_allclose(together.error, alone.error, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(together.increment, alone.increment, rtol=1e-3, atol=1e-4)
