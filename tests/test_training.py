import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import fresh
from torch import nn
from torch.testing import assert_close

from geoq import Training, TrainNetwork
from geoq.nets.mlp import MLP
from geoq.training.loop import EarlyStopping, train, train_on
from geoq.training.recorded import recorded

QUICK = Training(n_steps=300, batch_size=16, learning_rate=1e-2, check_every=20)


def line(n=64):
    x = torch.linspace(-1, 1, n)[:, None]
    return x, 2 * x + 1


def recipe(training=QUICK, **settings):
    return TrainNetwork(partial(MLP, 1, 1, hidden=(16,), **settings), training=training)


def test_a_network_learns_a_line():
    x, y = line()
    assert (recipe()(x, y)(x) - y).abs().max() < 0.1


def test_training_repeats_bit_for_bit_and_differs_with_the_seed():
    x, y = line()
    once, twice, other = recipe()(x, y), recipe()(x, y), recipe().with_seed(1)(x, y)
    assert torch.equal(once(x), twice(x))
    assert not torch.equal(once(x), other(x))


def test_a_trained_network_returns_numpy_arrays_of_the_precision_of_its_input():
    x, y = (part.double().numpy() for part in line())
    prediction = recipe()(x, y)(x)
    assert isinstance(prediction, np.ndarray)
    assert prediction.dtype == np.float64


def test_the_encoder_of_a_trained_network_has_the_chosen_layers():
    x, y = line()
    trained = TrainNetwork(
        partial(MLP, 1, 1, hidden=(8, 5, 3), n_encoder_layers=2), training=QUICK
    )(x, y)
    assert trained.encoder(x).shape == (64, 5)
    assert_close(trained.network.head(trained.encoder(x)), trained(x))


def test_the_initial_weights_are_restored_if_no_step_improves_them():
    network = fresh(nn.Linear, 1, 1)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    calls = iter(range(10**6))

    def growing(net, rows):
        return net(torch.ones(len(rows), 1)).mean() * 0 + next(calls)

    result = train(network, growing, QUICK, torch.arange(20))
    assert (result.first_loss, result.best_loss, result.best_step) == (0, 0, 0)
    assert all(
        torch.equal(before[name], value) for name, value in network.state_dict().items()
    )
    assert not network.training


def test_training_stops_when_patience_runs_out():
    n_steps = 0

    def constant(net, rows):
        nonlocal n_steps
        n_steps += net.training
        return net(torch.ones(len(rows), 1)).sum() * 0

    training = Training(n_steps=1000, check_every=5, patience=2, batch_size=4)
    network = fresh(nn.Linear, 1, 1)
    result = train(network, constant, training, torch.arange(20))
    assert n_steps == result.last_step == 10


def test_the_result_has_the_losses_of_the_initial_and_of_the_returned_network():
    x, y = line()
    network = fresh(MLP, 1, 1, hidden=(16,))
    rows, held_out = QUICK.hold_out(torch.arange(64))

    def squares(net, rows):
        return nn.functional.mse_loss(net(x[rows]), y[rows])

    first = float(squares(network, held_out).detach())
    result = train_on(network, squares, QUICK, rows, held_out)
    last = float(squares(network, held_out).detach())
    assert (result.first_loss, result.best_loss) == pytest.approx((first, last))
    assert result.best_loss < result.first_loss
    assert 0 < result.best_step <= result.last_step <= QUICK.n_steps
    assert result.checks[0] == (0, result.first_loss)
    assert result.checks[-1] == (result.last_step, result.last_loss)
    assert (result.best_step, result.best_loss) in result.checks


def test_a_network_whose_output_has_another_shape_than_y_is_refused():
    x, y = line()
    with pytest.raises(
        ValueError, match=r"rows of shape \(1,\), but y has rows of shape \(\)"
    ):
        recipe()(x, y[:, 0])


def test_a_training_loss_that_is_not_finite_raises_an_error():
    x, y = line()
    with pytest.raises(
        FloatingPointError, match=r"the validation loss became (nan|inf) by step \d+"
    ):
        recipe(Training(n_steps=100, learning_rate=1e30, check_every=10))(x, y)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_initial_loss_that_is_not_finite_is_refused(loss):
    with pytest.raises(FloatingPointError, match=f"initial weights is {loss}"):
        EarlyStopping(QUICK, loss)


def test_rows_of_one_group_are_not_separated():
    groups = torch.arange(40) // 4
    rows, held_out = Training(validation_fraction=0.3).hold_out(groups)
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(40))
    assert not set(groups[rows].tolist()) & set(groups[held_out].tolist())
    assert len(held_out) == 12


def test_a_single_group_is_both_trained_on_and_validated_on():
    rows, held_out = Training().hold_out(torch.zeros(3, dtype=torch.long))
    assert rows.tolist() == held_out.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_steps": 0}, "Training(n_steps=0): n_steps must be an integer >= 1."),
        ({"patience": 0}, "Training(patience=0): patience must be an integer >= 1."),
        ({"n_decays": -1}, "Training(n_decays=-1): n_decays must be an integer from 0"),
        ({"n_decays": 5}, "Training(n_decays=5): n_decays must be an integer from 0"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0."),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Training(**setting)


def test_train_on_the_rows_of_hold_out_equals_train():
    x, y = line()
    groups = torch.arange(64) // 2

    def squares(net, rows):
        return (net(x[rows]) - y[rows]).square().mean()

    whole, split = fresh(nn.Linear, 1, 1), fresh(nn.Linear, 1, 1)
    train(whole, squares, QUICK, groups)
    train_on(split, squares, QUICK, *QUICK.hold_out(groups))
    assert torch.equal(whole.weight, split.weight)
    assert not split.training


def test_rows_outside_the_training_and_validation_rows_are_not_used():
    used = set()
    network = fresh(nn.Linear, 1, 1)

    def squares(net, rows):
        used.update(rows.tolist())
        return net(rows[:, None].float()).square().mean()

    train_on(network, squares, QUICK, torch.arange(0, 10), torch.arange(20, 24))
    assert used == {*range(10), *range(20, 24)}


@pytest.mark.parametrize("n_decays", [0, 2])
def test_recorded_steps_give_the_same_network_as_launched_steps(device, n_decays):
    x, y = (part.to(device) for part in line())
    training = replace(QUICK, patience=1, n_decays=n_decays)
    outputs = []
    for repeatable in (False, True):
        network = fresh(MLP, 1, 1, hidden=(16,)).to(device)
        train(
            network,
            lambda net, rows: nn.functional.mse_loss(net(x[rows]), y[rows]),
            training,
            torch.arange(len(x), device=device),
            repeatable=repeatable,
        )
        outputs.append(network(x))
    assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_steps_on_a_cpu_are_not_recorded():
    def step(rows):
        del rows

    assert recorded(step, torch.arange(3), dict) is step


def test_cuts_of_a_learning_rate_that_is_too_high_lower_the_error():
    x, y = line()
    noisy = Training(
        n_steps=2000, batch_size=8, learning_rate=0.3, check_every=20, patience=3
    )
    errors = []
    for n_decays in (0, 2):
        network = fresh(nn.Linear, 1, 1)
        train(
            network,
            lambda net, rows: nn.functional.l1_loss(net(x[rows]), y[rows]),
            replace(noisy, n_decays=n_decays),
            torch.arange(len(x)),
        )
        errors.append(float((network(x) - y).abs().mean().detach()))
    assert errors[1] < 0.3 * errors[0]


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
    result = train(network, opposed, training, torch.arange(8))
    assert (result.best_step, result.last_step) == (0, 80)
    assert len(seen) == 80
    assert [seen[step] for step in (0, 20, 40, 60)] == [best] * 4
    # The length of Adam's first steps is the learning rate, which each cut divides by five.
    assert seen[21] - best < 0.5 * (seen[1] - best)


def test_each_lower_rate_has_an_eighth_of_the_steps_if_the_loss_always_improves():
    """The gradient is constant, so that the length of Adam's steps is the learning rate."""
    network, seen = fresh(nn.Linear, 1, 1), []

    def falling(net, rows):
        if net.training:
            seen.append(net.weight.detach().clone())
        return net.weight.sum() + 0 * rows.sum()

    training = Training(
        n_steps=80, check_every=10, patience=2, n_decays=2, learning_rate=0.1
    )
    train(network, falling, training, torch.arange(8))
    weights = torch.stack([*seen, network.weight.detach()]).flatten()
    rates = [0.1] * 60 + [0.02] * 10 + [0.004] * 10
    assert_close(-weights.diff(), torch.tensor(rates), rtol=1e-3, atol=1e-5)


def test_a_network_in_place_of_a_function_that_makes_it_is_refused():
    with pytest.raises(TypeError, match="make_network is a Linear, but every training"):
        TrainNetwork(fresh(nn.Linear, 1, 1))
