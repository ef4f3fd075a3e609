"""A small Fourier neural operator on grids of one, two or three axes, and its training."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

BATCH = 20


class SpectralLayer(nn.Module):
    """Mix the channels of the lowest Fourier modes, and of each cell with its neighbours."""

    def __init__(self, width, n_modes, n_spatial):
        super().__init__()
        shape = (width, width, *(2 * n_modes for _ in range(n_spatial)))
        self.weight = nn.Parameter(torch.randn(*shape, 2) / width)
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n_spatial - 1]
        self.local = convolution(width, width, 3, padding=1, padding_mode="circular")
        self.n_modes = n_modes
        self.axes = tuple(range(2, 2 + n_spatial))

    def forward(self, fields):
        spectrum = torch.fft.fftshift(torch.fft.fftn(fields, dim=self.axes), dim=self.axes)
        kept, cut = spectrum, []
        for axis in self.axes:
            first = fields.shape[axis] // 2 - self.n_modes
            kept = kept.narrow(axis, first, 2 * self.n_modes)
            cut = [first, fields.shape[axis] - first - 2 * self.n_modes, *cut]
        weight = torch.view_as_complex(self.weight)
        mixed = torch.einsum("ni...,io...->no...", kept, weight)
        spectrum = torch.fft.ifftshift(nn.functional.pad(mixed, cut), dim=self.axes)
        return torch.fft.ifftn(spectrum, dim=self.axes).real + self.local(fields)


class Operator(nn.Module):
    """Lift, three spectral layers, project. With ``in_time`` it adds the input and does not see the position."""

    def __init__(self, n_in, n_out, n_spatial, *, width, n_modes, in_time):
        super().__init__()
        self.lift = nn.Linear(n_in + n_spatial, width)
        self.layers = nn.ModuleList(SpectralLayer(width, n_modes, n_spatial) for _ in range(3))
        ends = nn.Linear(width, 2 * width), nn.Linear(2 * width, n_out)
        self.project = nn.Sequential(ends[0], nn.GELU(), ends[1])
        self.in_time = in_time

    def forward(self, fields):
        grid = fields.shape[2:]
        lines = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
        where = torch.stack(lines).expand(len(fields), *(-1,) * (len(grid) + 1))
        where = torch.zeros_like(where) if self.in_time else where
        hidden = self.lift(torch.cat([fields, where], 1).movedim(1, -1)).movedim(-1, 1)
        for layer in self.layers:
            hidden = nn.functional.gelu(layer(hidden))
        change = self.project(hidden.movedim(1, -1)).movedim(-1, 1)
        return fields + change if self.in_time else change


@dataclass(frozen=True)
class Surrogate:
    """A trained operator as a function of arrays, with the means and deviations of input and output."""

    network: Operator
    inputs: tuple[np.ndarray, np.ndarray]
    outputs: tuple[np.ndarray, np.ndarray]

    def __call__(self, x):
        with torch.no_grad():
            parts = standardised(x, self.inputs).split(100)
            answer = torch.cat([self.network(part) for part in parts])
        mean, scale = self.outputs
        return mean + scale * answer.numpy().astype(float)


def standardised(fields, moments):
    mean, scale = moments
    return torch.from_numpy(((fields - mean) / scale).astype(np.float32))


def moments(fields):
    axes = (0, *range(2, fields.ndim))
    return fields.mean(axes, keepdims=True), fields.std(axes, keepdims=True)


def train(x, y, *, seed, n_steps, n_modes, in_time, width=16):
    """Train an operator on pairs of fields. With ``in_time`` the output is a later state."""
    sizes = {"width": width, "n_modes": n_modes, "in_time": in_time}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Operator(x.shape[1], y.shape[1], x.ndim - 2, **sizes)
    rng = np.random.default_rng(seed)
    batches = (
        rows
        for _ in itertools.count()
        for rows in np.array_split(rng.permutation(len(x)), len(x) // BATCH)
    )
    optimizer = torch.optim.Adam(network.parameters(), 4e-3)
    parts = moments(x), moments(x if in_time else y)
    return fitted(network, x, y, parts, optimizer, itertools.islice(batches, n_steps), n_steps)


def fitted(network, x, y, parts, optimizer, batches, n_steps):
    """The network after one step for each batch, with one cycle of the learning rate of the optimizer."""
    inputs, outputs = (standardised(f, of) for f, of in zip((x, y), parts, strict=True))
    rate = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, n_steps)
    for rows in batches:
        optimizer.zero_grad()
        (network(inputs[rows]) - outputs[rows]).square().mean().backward()
        optimizer.step()
        schedule.step()
    return Surrogate(network.eval(), *parts)
