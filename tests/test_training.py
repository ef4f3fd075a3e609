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
from geoq.training.loop import train, train_on
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


def test_numpy_users_get_numpy_answers_of_their_precision():
    x, y = (part.double().numpy() for part in line())
    answer = recipe()(x, y)(x)
    assert isinstance(answer, np.ndarray)
    assert answer.dtype == np.float64


def test_the_encoder_ends_where_it_was_told():
    x, y = line()
    trained = TrainNetwork(
        partial(MLP, 1, 1, hidden=(8, 5, 3), n_encoder_layers=2), training=QUICK
    )(x, y)
    assert trained.encoder(x).shape == (64, 5)
    assert_close(trained.network.head(trained.encoder(x)), trained(x))


def test_the_best_weights_are_kept():
    """A loss that only grows is best at the start, so the initial weights come back."""
    network = fresh(nn.Linear, 1, 1)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    calls = iter(range(10**6))

    def growing(net, rows):
        return net(torch.ones(len(rows), 1)).mean() * 0 + next(calls)

    train(network, growing, QUICK, torch.arange(20))
    assert all(
        torch.equal(before[name], value) for name, value in network.state_dict().items()
    )
    assert not network.training


def test_training_stops_when_patience_runs_out():
    steps = []
    network = fresh(nn.Linear, 1, 1)

    def constant(net, rows):
        steps.append(net.training)
        return net(torch.ones(len(rows), 1)).sum() * 0

    training = Training(n_steps=1000, check_every=5, patience=2, batch_size=4)
    train(network, constant, training, torch.arange(20))
    assert sum(steps) == 10


def test_an_output_that_would_be_broadcast_is_refused_before_the_training():
    x, y = line()
    with pytest.raises(
        ValueError, match=r"rows of shape \(1,\), but y has rows of shape \(\)"
    ):
        recipe()(x, y[:, 0])


def test_a_loss_that_explodes_is_reported_not_returned():
    x, y = line()
    with pytest.raises(
        FloatingPointError, match=r"the training loss became (nan|inf) by step \d+"
    ):
        recipe(Training(n_steps=100, learning_rate=1e30, check_every=10))(x, y)


def test_rows_of_one_unit_are_never_split():
    units = torch.arange(40) // 4
    rows, held_out = Training(validation_fraction=0.3).hold_out(units)
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(40))
    assert not set(units[rows].tolist()) & set(units[held_out].tolist())
    assert len(held_out) == 12


def test_a_single_unit_trains_and_stops_on_itself():
    rows, held_out = Training().hold_out(torch.zeros(3, dtype=torch.long))
    assert rows.tolist() == held_out.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_steps": 0}, "n_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"n_decays": -1}, "n_decays=-1.*choose 0 to 4"),
        ({"n_decays": 5}, "n_decays=5.*choose 0 to 4"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
    ],
)
def test_impossible_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Training(**setting)


def test_rows_of_the_callers_choice_train_as_those_of_hold_out_do():
    x, y = line()
    units = torch.arange(64) // 2

    def squares(net, rows):
        return (net(x[rows]) - y[rows]).square().mean()

    whole, split = fresh(nn.Linear, 1, 1), fresh(nn.Linear, 1, 1)
    train(whole, squares, QUICK, units)
    train_on(split, squares, QUICK, *QUICK.hold_out(units))
    assert torch.equal(whole.weight, split.weight)
    assert not split.training


def test_rows_that_are_neither_trained_on_nor_stopped_by_are_never_seen():
    seen = set()
    network = fresh(nn.Linear, 1, 1)

    def squares(net, rows):
        seen.update(rows.tolist())
        return net(rows[:, None].float()).square().mean()

    train_on(network, squares, QUICK, torch.arange(0, 10), torch.arange(20, 24))
    assert seen == {*range(10), *range(20, 24)}


@pytest.mark.parametrize("n_decays", [0, 2])
def test_steps_that_a_gpu_replays_end_where_launched_steps_do(device, n_decays):
    x, y = (part.to(device) for part in line())
    training = replace(QUICK, patience=1, n_decays=n_decays)
    ends = []
    for repeatable in (False, True):
        network = fresh(MLP, 1, 1, hidden=(16,)).to(device)
        train(
            network,
            lambda net, rows: nn.functional.mse_loss(net(x[rows]), y[rows]),
            training,
            torch.arange(len(x), device=device),
            repeatable=repeatable,
        )
        ends.append(network(x))
    assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_steps_on_a_cpu_stay_as_they_are():
    def step(rows):
        del rows

    assert recorded(step, torch.arange(3), dict) is step


def test_a_lower_rate_gets_closer_where_patience_ran_out():
    """At a rate that is too high the steps jump about the best line; with two cuts they settle on it."""
    x, y = line()
    restless = Training(
        n_steps=2000, batch_size=8, learning_rate=0.3, check_every=20, patience=3
    )
    errors = []
    for n_decays in (0, 2):
        network = fresh(nn.Linear, 1, 1)
        train(
            network,
            lambda net, rows: nn.functional.l1_loss(net(x[rows]), y[rows]),
            replace(restless, n_decays=n_decays),
            torch.arange(len(x)),
        )
        errors.append(float((network(x) - y).abs().mean().detach()))
    assert errors[1] < 0.3 * errors[0]


def test_training_goes_on_from_the_best_weights_when_the_rate_is_cut(caplog):
    """Steps lower what is trained on and raise what is held out: the first weights stay best, and every cut returns there."""
    network = fresh(nn.Linear, 1, 1)
    best, seen = float(network.weight.detach()), []

    def opposed(net, rows):
        held_out = not net.training
        if not held_out:
            seen.append(float(net.weight.detach()))
        return (1 if held_out else -1) * net.weight.sum() + 0 * rows.sum()

    training = Training(n_steps=1000, check_every=10, patience=2, n_decays=3)
    with caplog.at_level("INFO"):
        train(network, opposed, training, torch.arange(8))
    _, _, best_step, last_step = caplog.records[-1].args
    assert (best_step, last_step) == (0, 80)
    assert len(seen) == 80
    assert [seen[step] for step in (0, 20, 40, 60)] == [best] * 4
    # Adam's first steps are as long as the rate, a fifth after each cut.
    assert seen[21] - best < 0.5 * (seen[1] - best)


def test_each_lower_rate_has_an_eighth_of_the_steps_where_patience_lasts():
    """A loss that falls for ever: Adam's steps are as long as the rate."""
    network, seen = fresh(nn.Linear, 1, 1), []

    def falling(net, rows):
        if net.training:
            seen.append(net.weight.detach().clone())
        return net.weight.sum() + 0 * rows.sum()

    training = Training(
        n_steps=80, check_every=10, patience=2, n_decays=2, learning_rate=0.1
    )
    train(network, falling, training, torch.arange(8))
    ends = torch.stack([*seen, network.weight.detach()]).flatten()
    rates = [0.1] * 60 + [0.02] * 10 + [0.004] * 10
    assert_close(-ends.diff(), torch.tensor(rates), rtol=1e-3, atol=1e-5)


def test_a_network_in_place_of_what_makes_it_is_refused():
    with pytest.raises(TypeError, match="make_network is a Linear, but every training"):
        TrainNetwork(fresh(nn.Linear, 1, 1))
