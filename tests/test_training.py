"""The training loop, the recipe for networks, and networks as surrogates of any array."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import GeoQ, RandomFolds, Training, TrainNetwork
from geoq.nets.mlp import MLP
from geoq.training.loop import TrainingResult, train, warn_if_untrained
from geoq.training.recipe import TrainedNetwork

QUICK = Training(n_steps=300, batch_size=16, learning_rate=1e-2, check_every=20)


def line(n=64):
    x = torch.linspace(-1, 1, n)[:, None]
    return x, 2 * x + 1


def recipe(training=QUICK, **settings):
    return TrainNetwork(partial(MLP, 1, 1, hidden=(16,), **settings), training=training)


def test_a_network_learns_a_line_and_repeats_bit_for_bit():
    x, y = line()
    assert (recipe()(x, y)(x) - y).abs().max() < 0.1
    x, y = line()
    once, twice, other = recipe()(x, y), recipe()(x, y), recipe().with_seed(1)(x, y)
    assert torch.equal(once(x), twice(x))
    assert not torch.equal(once(x), other(x))


def test_the_initial_weights_are_restored_if_no_step_improves_them():
    network = fresh(nn.Linear, 1, 1)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    calls = iter(range(10**6))

    def growing(net, rows):
        return net(torch.ones(len(rows), 1)).mean() * 0 + next(calls)

    result = train(network, growing, QUICK, *QUICK.hold_out(torch.arange(20)))
    assert (result.first_loss, result.best_loss, result.best_step) == (0, 0, 0)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert not network.training
    with pytest.warns(UserWarning, match="the model has its initial weights: no step of its"):
        warn_if_untrained([result], "the model")


def test_training_stops_when_patience_runs_out():
    n_steps = 0

    def constant(net, rows):
        nonlocal n_steps
        n_steps += net.training
        return net(torch.ones(len(rows), 1)).sum() * 0

    training = Training(n_steps=1000, check_every=5, patience=2, batch_size=4)
    result = train(fresh(nn.Linear, 1, 1), constant, training, *training.hold_out(torch.arange(20)))
    assert n_steps == result.last_step == 10


def test_a_training_loss_that_is_not_finite_raises():
    training = Training(n_steps=100, learning_rate=1e30, check_every=10)
    with pytest.raises(FloatingPointError, match=r"loss became (nan|inf) by step \d+ of 100"):
        recipe(training)(*line())
    with pytest.raises(FloatingPointError, match="initial weights is nan, so no training"):
        TrainingResult.of_initial_weights(math.nan)


def test_rows_of_one_group_are_not_separated():
    groups = torch.arange(40) // 4
    rows, held_out = Training(validation_fraction=0.3).hold_out(groups)
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(40))
    assert not set(groups[rows].tolist()) & set(groups[held_out].tolist())
    assert len(held_out) == 12
    rows, held_out = Training().hold_out(0 * groups)
    assert rows.tolist() == held_out.tolist() == list(range(40))


def test_training_continues_from_the_best_weights_when_the_rate_is_cut():
    """Each step lowers the training loss and raises the validation loss, so that the initial weights remain the best."""
    network = fresh(nn.Linear, 1, 1)
    best, seen = float(network.weight.detach()), []

    def opposed(net, rows):
        held_out = not net.training
        if not held_out:
            seen.append(float(net.weight.detach()))
        return (1 if held_out else -1) * net.weight.sum() + 0 * rows.sum()

    training = Training(n_steps=1000, check_every=10, patience=2, n_decays=3)
    result = train(network, opposed, training, *training.hold_out(torch.arange(8)))
    assert (result.best_step, result.last_step) == (0, 80)
    assert len(seen) == 80
    assert [seen[step] for step in (0, 20, 40, 60)] == [best] * 4
    # The length of Adam's first steps is the learning rate, which each cut divides by five.
    assert seen[21] - best < 0.5 * (seen[1] - best)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (partial(nn.Linear, 1, 2), ValueError, r"rows of shape \(2,\), but y has"),
        (lambda n=fresh(nn.Linear, 1, 1): n, ValueError, "the same Linear twice"),  # noqa: B008
        (fresh(nn.Linear, 1, 1), TypeError, "make_network is a Linear, but every training"),
    ],
)
def test_functions_that_make_no_fitting_new_network_raise(make, error, message):
    with pytest.raises(error, match=message):
        TrainNetwork(make, training=QUICK)(*line())


# Networks as surrogates


@pytest.mark.parametrize("x", [
    np.arange(8.0).reshape(4, 2),
    np.arange(8, dtype=np.float32).reshape(4, 2)[::-1],
    np.arange(8.0, dtype=">f8").reshape(4, 2),
    np.arange(8).reshape(4, 2),
    torch.arange(8.0, dtype=torch.float64).view(4, 2),
    torch.arange(8.0).bfloat16().view(4, 2),
    torch.arange(8).view(4, 2),
], ids=lambda x: f"{type(x).__name__} {x.dtype}")  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_network_answers_any_array_in_its_kind_and_precision(x, dtype):
    network = fresh(nn.Linear, 2, 3).to(dtype)
    answer = TrainedNetwork(network)(x)
    assert type(answer) is type(x)
    expected = network(torch.arange(8).view(4, 2).to(dtype)).double().detach()
    if isinstance(x, np.ndarray) and x[0, 0] == 6:
        expected = expected.flip(0)
    assert_close(torch.as_tensor(answer).double(), expected, rtol=1e-2, atol=1e-2)
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        assert answer.dtype == x.dtype
    elif x.dtype == np.float64:
        assert answer.dtype.itemsize == 8


def test_integers_stay_integers_where_the_network_accepts_them():
    network = fresh(nn.Embedding, 5, 3)
    for x in (np.array([0, 4]), torch.tensor([0, 4])):
        assert_close(torch.as_tensor(TrainedNetwork(network)(x)), network.weight[[0, 4]].detach())


def test_answers_of_a_batch_that_is_cut_into_chunks_are_in_order(monkeypatch):
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 6)
    network, x = fresh(nn.Linear, 2, 1), np.arange(20.0).reshape(10, 2)
    expected = network(torch.from_numpy(x).float()).detach().double().numpy()
    np.testing.assert_allclose(TrainedNetwork(network)(x), expected, rtol=1e-6)


class Wave(nn.Module):
    """A layer with complex weights, as in Fourier neural operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, dtype=torch.complex64))

    def forward(self, u):
        return torch.fft.irfft(torch.fft.rfft(u) * self.weight)


def test_networks_with_complex_weights_are_trained_alone_and_together():
    x = np.random.default_rng(0).normal(size=(60, 16))
    y = np.roll(x, 1, axis=1)
    alone = TrainNetwork(Wave, training=QUICK)(x, y)
    assert abs(alone(x) - y).mean() < 0.1
    many = TrainNetwork(Wave, training=QUICK).train_many(x, y, [np.arange(60)] * 2)
    np.testing.assert_allclose(many[1](x), alone(x), atol=1e-4)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_a_network_that_returns_no_tensor_and_a_masked_input_raise():
    with pytest.raises(TypeError, match=r"Pair returned a tuple.*lambda x: network\(x\)\[0\]"):
        TrainedNetwork(Pair().eval())(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="x is masked in 1 of 2 values"):
        TrainedNetwork(Pair().eval())(np.ma.array([1.0, 2.0], mask=[True, False]))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["arrays", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_module_is_a_surrogate_of_arrays_and_tensors_of_another_precision(kind, dtype):
    network = fresh(nn.Linear, 2, 1).to(dtype)
    x = np.random.default_rng(0).normal(size=(60, 2))
    estimator = GeoQ(network, None, folds=RandomFolds(3)).fit(kind(x), kind(x[:, :1] ** 2))
    answer = estimator.assess(kind(x[:5]))
    assert type(answer.error_hat) is type(kind(x))
    expected = network(torch.from_numpy(x[:5]).to(dtype)).double().detach()
    assert_close(torch.as_tensor(answer.prediction).double(), expected, rtol=1e-6, atol=1e-6)
