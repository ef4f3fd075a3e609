"""The output of a state, and models with memory: an echo state network and a GRU."""

import numpy as np
import pytest
import torch
from henon import STATES, STEP, TRAINING, analogue, fitted, henon, small
from torch import nn

from geoq import RolloutGeoQ
from geoq.rollout import WithMemory

SERIES = henon(1400)[:, :1]


@pytest.mark.parametrize(
    ("output", "columns"),
    [
        (-1, [1]),
        (slice(0, 1), [0]),
        ([1, 0], [1, 0]),
        (np.array([True, False]), [0]),
        (slice(None), [0, 1]),
    ],
    ids=str,
)
def test_the_output_has_the_prediction_and_the_bound_of_its_coordinates(
    output, columns
):
    whole = fitted().assess(STATES[700:720], 50)
    part = small(None, analogue, output=output).fit(TRAINING)
    a = part.assess(STATES[700:720], 50, tolerance=np.ones(len(columns)))
    np.testing.assert_array_equal(a.prediction, whole.prediction[..., columns])
    assert a.error_hat.shape == a.prediction.shape
    np.testing.assert_array_equal(a.support_score, whole.support_score)
    truth = np.stack([STATES[700 + n : 720 + n] for n in range(1, 51)], axis=1)
    assert (abs(truth[..., columns] - a.prediction) <= a.error_hat).mean() > 0.9


def test_the_trusted_horizon_depends_on_the_output_alone():
    loose = fitted().assess(STATES[700:720], 40, np.array([np.inf, 0.2]))
    part = small(None, analogue, output=-1).fit(TRAINING)
    tight = part.assess(STATES[700:720], 40, tolerance=0.2)
    assert tight.trust.n_rollouts == loose.trust.n_rollouts
    assert abs(tight.trusted_horizon.mean() - loose.trusted_horizon.mean()) < 1


def test_a_file_keeps_the_output(tmp_path):
    grids = TRAINING[:, :, None] * np.ones((1, 1, 3))
    step = analogue([grids[:300]])
    geoq = small(step, None, output=(slice(None), [0, 2])).fit(grids[300:])
    geoq.save(tmp_path / "part.geoq")
    loaded = RolloutGeoQ.load(tmp_path / "part.geoq", surrogate=step)
    assert geoq.bound(grids[:3], 4).shape == (3, 4, 2, 2)
    np.testing.assert_array_equal(geoq.bound(grids[:3], 4), loaded.bound(grids[:3], 4))
    again = loaded.set_params(folds=geoq.folds).fit(grids[300:])
    np.testing.assert_array_equal(geoq.bound(grids[:3], 4), again.bound(grids[:3], 4))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (2, r"output=2, but states have shape \(2,\); pass an index"),
        ([], r"output=\[\] selects no coordinate"),
        (lambda s: s[:, -1:], "is not an index; pass an index of one state"),
        ("x", "output='x' is not an index"),
        ((0, 0), r"output=\(0, 0\), but states have shape"),
    ],
)
def test_unusable_outputs_are_refused(output, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small(STEP, None, output=output).fit(TRAINING)


class Forecaster(nn.Module):
    """A GRU and a linear readout; ``memory`` is kept between the calls of ``remembering``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.readout = nn.GRUCell(1, 16), nn.Linear(16, 1)
        self.memory = None

    def step(self, values, memory):
        memory = self.cell(values, memory)
        return self.readout(memory), memory

    def remembering(self, values):
        if self.memory is None or len(self.memory) != len(values):
            self.memory = torch.zeros(len(values), 16)
        values, self.memory = self.step(values, self.memory)
        return values.detach()


@pytest.fixture(scope="module")
def gru():
    """Trained on the next value along windows of the series."""
    model, series = Forecaster(), torch.from_numpy(SERIES[:400]).float()
    windows = series[:, 0].unfold(0, 20, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(120):
        memory, loss = torch.zeros(len(windows), 16), 0.0
        for n in range(19):
            predicted, memory = model.step(windows[:, n : n + 1], memory)
            if n > 3:
                loss = loss + ((predicted[:, 0] - windows[:, n + 1]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_a_gru_with_its_memory_in_the_state_has_covered_values(gru):
    model = WithMemory(gru.step, n_values=1, n_memory=16)
    series = torch.from_numpy(SERIES[400:]).float()
    states = model.states(series)
    assert states.shape == (1000, 17)
    geoq = small(model, None, output=model.output, n_calibration=10, n_starts=60)
    a = geoq.fit(states[20:700]).assess(states[720:980], 10, tolerance=0.5)
    truth = torch.stack([series[720 + n : 980 + n] for n in range(1, 11)], dim=1)
    covered = ((truth - a.prediction).abs() <= a.error_hat).double().mean(dim=0)
    assert float(covered.min()) > 0.88
    one = geoq.assess(states[720:721], 10)
    torch.testing.assert_close(one.error_hat, a.error_hat[:1], rtol=1e-3, atol=1e-5)


def reservoir(n=30):
    """The fixed weights of an echo state network."""
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((n, n))
    inner *= 0.5 / abs(np.linalg.eigvals(inner)).max()
    return inner, rng.uniform(-1, 1, (1, n))


INNER, OUTER = reservoir()


def echo(readout):
    """The step of an echo state network with this readout."""

    def step(values, memory):
        memory = np.tanh(memory @ INNER + values @ OUTER)
        # Without the limits, rollouts of the map run off.
        return np.clip(memory @ readout, -1.5, 1.5), memory

    return WithMemory(step, n_values=1, n_memory=30)


def train_readout(segments):
    """Fit the readout: the reservoir is the same in all folds."""
    memory = np.concatenate([segment[1:, 1:] for segment in segments])
    values = np.concatenate([segment[1:, :1] for segment in segments])
    gram = memory.T @ memory + 1e-8 * np.eye(30)
    return echo(np.linalg.solve(gram, memory.T @ values))


def test_the_readout_of_an_echo_state_network_can_be_trained_for_each_fold():
    model = echo(np.zeros((30, 1)))
    states = model.states(SERIES)[50:]
    geoq = small(None, train_readout, output=model.output, n_starts=60).fit(
        states[:1000]
    )
    a = geoq.assess(states[1000:1300], 40, tolerance=0.3)
    truth = np.stack([states[1000 + n : 1300 + n, :1] for n in range(1, 41)], axis=1)
    covered = (abs(truth - a.prediction) <= a.error_hat).mean(axis=0)
    assert covered.min() > 0.88
    assert (a.trusted_horizon > 0).mean() > 0.9


class Echo:
    """An echo state network in the usual form: a batch is a sequence, and the memory stays after the call."""

    def __init__(self):
        self.memory = np.zeros((1, 30))

    def __call__(self, values):
        rows = []
        for row in values:
            self.memory = np.tanh(self.memory @ INNER + row[None] @ OUTER)
            rows.append(self.memory[0, :1])
        return np.array(rows)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["gru", "echo"])
def test_a_step_that_remembers_is_refused_with_the_way_out(kind, trained):
    states = SERIES if kind == "echo" else torch.from_numpy(SERIES).float()

    def make(segments=None):
        return Echo() if kind == "echo" else Forecaster().eval().remembering

    geoq = small(None, make) if trained else small(make(), None)
    with pytest.raises(ValueError, match=r"answers to the same.*WithMemory\(step"):
        geoq.fit(states)


def test_a_fold_surrogate_that_remembers_is_refused():
    with pytest.raises(ValueError, match=r"answers to the same.*WithMemory\(step"):
        small(lambda x: 0.9 * x, lambda segments: Echo()).fit(SERIES)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda u, m: u, "step returned ndarray, but WithMemory needs two arrays"),
        (lambda u, m: (u, m[:, :1]), r"memory of shape \(1, 1\).*n_memory=2"),
        (lambda u, m: (m, m), r"values of shape \(1, 2\).*n_values=1"),
    ],
)
def test_unusable_steps_with_memory_are_refused(step, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WithMemory(step, n_values=1, n_memory=2).states(SERIES)
    with pytest.raises(ValueError, match="pass one trajectory at a time"):
        WithMemory(step, n_values=1, n_memory=2).states(STATES)
