"""Models with memory: the echo state network of reservoirpy and a GRU of torch, as steps of states that contain the memory."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from geoq.parts import WithMemory


@dataclass(frozen=True)
class EchoState:
    """An echo state network whose reservoir is fixed, so that the memory means the same in all folds."""

    n_values: int
    n_units: int = 200
    ridge: float = 1e-6
    seed: int = 0

    def drive(self):
        """The update of the memory: a function of batches of values and of the memory."""
        from reservoirpy.mat_gen import uniform
        from reservoirpy.nodes import Reservoir

        bias = uniform(low=-0.5, high=0.5, sparsity_type="dense")
        how = {"lr": 0.7, "sr": 0.6, "input_scaling": 0.1, "input_connectivity": 1.0}
        reservoir = Reservoir(self.n_units, **how, bias=bias, seed=self.seed)
        reservoir.initialize(np.zeros((1, self.n_values)))

        def next_memory(values, memory):
            # reservoirpy steps one state at a time; the same formula for a batch.
            inside = (reservoir.W @ memory.T + reservoir.Win @ values.T).T
            active = np.tanh(inside + reservoir.bias)
            return (1 - reservoir.lr) * memory + reservoir.lr * active

        return next_memory

    def states(self, series, n_warm):
        """States along a series; the first ones, whose memory still depends on its start, are left out."""
        drive = self.drive()

        def step(values, memory):
            return values, drive(values, memory)

        model = WithMemory(step, self.n_values, self.n_units)
        return model.states(series)[n_warm:]

    def __call__(self, segments):
        """Train the readout on segments of states."""
        from reservoirpy.nodes import Ridge

        after = np.concatenate([segment[1:] for segment in segments])
        values, memory = after[:, : self.n_values], after[:, self.n_values :]
        readout = Ridge(ridge=self.ridge).fit(_features(memory), values)
        weights, bias, drive = readout.Wout, readout.bias, self.drive()

        def step(values, memory):
            memory = drive(values, memory)
            return _features(memory) @ weights + bias, memory

        return WithMemory(step, self.n_values, self.n_units)


def _features(memory):
    """The memory and its squares, as usual for systems with a symmetry."""
    return np.hstack([memory, memory**2])


# The last steps of a training window, in which the network receives its own forecasts.
OWN_STEPS = 10


class GRU(nn.Module):
    """A GRU cell and a linear map to the change of the values."""

    def __init__(self, n_values, n_hidden):
        super().__init__()
        self.cell = nn.GRUCell(n_values, n_hidden)
        self.change = nn.Linear(n_hidden, n_values)

    def forward(self, values, memory):
        memory = self.cell(values, memory)
        return values + self.change(memory), memory


def train_gru(series, n_hidden=48, n_steps=600, window=40, seed=0):
    """Train on windows of a standardised series; in the last steps of a window the GRU receives its own forecasts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = GRU(series.shape[1], n_hidden)
    truth = torch.from_numpy(series.astype(np.float32))
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, n_steps)
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        first = torch.from_numpy(rng.integers(0, len(series) - window - 1, 64))
        predicted, memory = truth[first], torch.zeros(64, n_hidden)
        loss = torch.zeros(())
        for n in range(window):
            values = truth[first + n] if n < window - OWN_STEPS else predicted
            predicted, memory = network(values, memory)
            loss = loss + (predicted - truth[first + n + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return with_memory(network.eval(), series.shape[1], n_hidden)


def with_memory(network, n_values, n_hidden):
    """The network as a step of arrays."""

    def step(values, memory):
        answer = network(*(torch.from_numpy(part.astype(np.float32)) for part in (values, memory)))
        return tuple(part.detach().numpy().astype(float) for part in answer)

    return WithMemory(step, n_values, n_hidden)
