"""The surrogate of the Richtmyer-Meshkov benchmark: a Fourier neural operator from the initial field to 12 later ones.

The network is the paper's (model appendix). Its transforms are products with fixed matrices, because only 24 of 512
modes are kept: a truncated transform reads the field once, and an FFT would read and write it several times. Fields are
laid out as rows of the grid, (n * n_y, n_x, channels), in which every step is a batched matrix product without a copy.

    python benchmarks/fourier_operator.py --speed [--n-simulations 900]
"""

import argparse
import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoq.surrogate import Array, restore

logger = logging.getLogger(__name__)

FIELD = (240, 480)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Cells at most this far from an interface count as near it.
NEAR = 4


def product(matrix: Tensor, fields: Tensor) -> Tensor:
    """The matrix times each of the fields; cast before it is expanded, since a cast would copy it for every field."""
    return torch.bmm(matrix.to(fields.dtype).expand(len(fields), -1, -1), fields)


def pointwise(layer: nn.Linear, fields: Tensor) -> Tensor:
    """A 1x1 convolution; row by row, so that the gradient of its weights is many short sums and not a long one."""
    weight = layer.weight.to(fields.dtype).T.expand(len(fields), -1, -1)
    return torch.bmm(fields, weight) + layer.bias.to(fields.dtype)


def waves(wave_numbers: Tensor, n_points: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each wave number at each point of a periodic grid."""
    turns = wave_numbers[:, None] * torch.arange(n_points) % n_points
    angle = 2 * math.pi * turns.double() / n_points
    return angle.cos().float(), angle.sin().float()


def interpolation(n_from: int, n_to: int, like: Tensor, *, periodic: bool) -> Tensor:
    """Matrix (n_to, n_from) that resizes a line of cells linearly, as ``interpolate`` does, or around the period."""
    cells = torch.arange(n_from, device=like.device)
    places = torch.arange(n_to, device=like.device) + 0.5
    places = places * (n_from / n_to) - 0.5
    if not periodic:
        places = places.clamp(0, n_from - 1)
    distance = (places[:, None] - cells).abs()
    if periodic:
        distance = torch.minimum(distance, n_from - distance)
    return (1 - distance).clamp(min=0).to(like.dtype)


class SpectralConvolution(nn.Module):
    """Mixes the channels of the lowest Fourier modes: wave numbers -m_y to m_y - 1 in y and 0 to m_x - 1 in x."""

    def __init__(self, width: int, modes: tuple[int, int], size: tuple[int, int]):
        super().__init__()
        self.width, self.modes, self.size = width, modes, size
        (m_y, m_x), (n_y, n_x) = modes, size
        if 2 * m_y > n_y or 2 * m_x > n_x:
            raise ValueError(
                f"modes={modes}, but a grid of {size} has {n_y // 2} and {n_x // 2}; lower modes."
            )
        # Real and imaginary part, mode, channel in, channel out.
        self.weight = nn.Parameter(torch.randn(2, 2 * m_y * m_x, width, width) / width)
        cos, sin = waves(torch.cat([torch.arange(m_y), torch.arange(-m_y, 0)]), n_y)
        self._buffer("to_modes_y", torch.cat([cos, sin]) / n_y)
        self._buffer("from_modes_y", torch.cat([cos, sin]).T)
        cos, sin = waves(torch.arange(m_x), n_x)
        self._buffer("to_modes_x", torch.cat([cos, -sin]) / n_x)
        # The modes left out are the conjugates of all but the first.
        twice = torch.full((2 * m_x,), 2.0)
        twice[[0, m_x]] = 1.0
        self._buffer("from_modes_x", torch.cat([cos, -sin]).T * twice)

    def _buffer(self, name: str, matrix: Tensor) -> None:
        self.register_buffer(name, matrix.contiguous(), persistent=False)

    def forward(self, fields: Tensor) -> Tensor:
        return self._to_grid(self._mixed(self._to_modes(fields)))

    def _to_modes(self, fields: Tensor) -> Tensor:
        """(n * n_y, n_x, width) to (modes, n, real then imaginary part of the channels)."""
        (m_y, m_x), n_y = self.modes, self.size[0]
        along_x = product(self.to_modes_x, fields)
        both = product(self.to_modes_y, along_x.view(-1, n_y, 2 * m_x * self.width))
        (cos_real, cos_imag), (sin_real, sin_imag) = (
            part.unbind(2)
            for part in both.view(-1, 2, 2 * m_y, 2, m_x, self.width).unbind(1)
        )
        spectrum = torch.cat([cos_real + sin_imag, cos_imag - sin_real], -1)
        return spectrum.flatten(1, 2).transpose(0, 1)

    def _mixed(self, spectrum: Tensor) -> Tensor:
        real, imag = self.weight.to(spectrum.dtype)
        rows = torch.cat([real, imag], 2), torch.cat([-imag, real], 2)
        return torch.bmm(spectrum, torch.cat(rows, 1))

    def _to_grid(self, spectrum: Tensor) -> Tensor:
        m_y, m_x = self.modes
        parts = spectrum.view(2 * m_y, m_x, -1, 2, self.width).permute(3, 2, 0, 1, 4)
        real, imag = parts.unbind(0)
        cos, sin = torch.stack([real, imag], 2), torch.stack([-imag, real], 2)
        both = torch.cat([cos, sin], 1).flatten(2)
        along_x = product(self.from_modes_y, both)
        return product(self.from_modes_x, along_x.view(-1, 2 * m_x, self.width))


class FFTConvolution(nn.Module):
    """What ``SpectralConvolution`` computes, by the FFT: its definition, and the standard to compare it with."""

    def __init__(self, convolution: SpectralConvolution):
        super().__init__()
        self.convolution = convolution

    def forward(self, fields: Tensor) -> Tensor:
        (m_y, m_x), (n_y, n_x) = self.convolution.modes, self.convolution.size
        width = self.convolution.width
        spectrum = torch.fft.rfft2(fields.view(-1, n_y, n_x, width), dim=(1, 2))
        lowest = torch.cat([spectrum[:, :m_y, :m_x], spectrum[:, -m_y:, :m_x]], 1)
        weight = torch.complex(*self.convolution.weight)
        weight = weight.view(2 * m_y, m_x, width, width)
        mixed = torch.einsum("nyxi,yxio->nyxo", lowest, weight)
        full = torch.zeros_like(spectrum)
        full[:, :m_y, :m_x], full[:, -m_y:, :m_x] = mixed[:, :m_y], mixed[:, m_y:]
        return torch.fft.irfft2(full, s=(n_y, n_x), dim=(1, 2)).flatten(0, 1)


class Block(nn.Module):
    def __init__(self, width, modes, size, dropout):
        super().__init__()
        self.convolution = SpectralConvolution(width, modes, size)
        self.local = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, fields: Tensor) -> Tensor:
        mixed = self.convolution(fields) + pointwise(self.local, fields)
        return self.dropout(functional.gelu(mixed))


class FourierOperator(nn.Module):
    """Logits of the heavy gas at later times from a binary initial field; computes in the precision of its input.

    Two small departures from the paper: fields are resized around the period in y, so that shifts in y stay shifts, and
    the last resize is of the logits and not of the probabilities.
    """

    def __init__(
        self,
        n_times: int = 12,
        width: int = 64,
        modes: tuple[int, int] = (24, 24),
        n_blocks: int = 4,
        n_projection: int = 128,
        internal: tuple[int, int] = (256, 512),
        dropout: float = 0.0,
    ):
        super().__init__()
        self.settings = {
            "n_times": n_times,
            "width": width,
            "modes": modes,
            "n_blocks": n_blocks,
            "n_projection": n_projection,
            "internal": internal,
            "dropout": dropout,
        }
        self.internal = internal
        self.lift = nn.Linear(3, width)
        self.blocks = nn.Sequential(
            *(Block(width, modes, internal, dropout) for _ in range(n_blocks))
        )
        self.projection = nn.Linear(width, n_projection)
        self.output = nn.Linear(n_projection, n_times)
        # PyTorch's own scale would shrink the field twelvefold through four blocks, and training would take longer.
        for layer in (*(block.local for block in self.blocks), self.projection):
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, u0: Tensor) -> Tensor:
        if u0.ndim != 3:
            raise ValueError(
                f"u0 has shape {tuple(u0.shape)}, but the operator reads fields of shape (n, n_y, n_x); "
                "drop the axis of time or channels."
            )
        fields = self.blocks(self._lifted(u0))
        hidden = functional.gelu(pointwise(self.projection, fields))
        return self._resized(product(self.output.weight, hidden.transpose(1, 2)), u0)

    def _lifted(self, u0: Tensor) -> Tensor:
        """The field and its two coordinates through the first layer; coordinates once for all fields."""
        n_y, n_x = self.internal
        to_y = interpolation(u0.shape[1], n_y, u0, periodic=True)
        to_x = interpolation(u0.shape[2], n_x, u0, periodic=False)
        resized = product(to_y, u0) @ to_x.T
        of_field, of_y, of_x = self.lift.weight.T
        y = torch.linspace(0, 1, n_y, device=u0.device)[:, None, None]
        x = torch.linspace(0, 1, n_x, device=u0.device)[:, None]
        position = (y * of_y + x * of_x + self.lift.bias).to(u0.dtype)
        lifted = resized[..., None] * of_field.to(u0.dtype) + position
        return lifted.flatten(0, 1)

    def _resized(self, logits: Tensor, u0: Tensor) -> Tensor:
        """(n * internal y, n_times, internal x) to (n, n_times, y, x)."""
        n_times, (n_y, n_x) = logits.shape[1], self.internal
        to_x = interpolation(n_x, u0.shape[2], u0, periodic=False)
        to_y = interpolation(n_y, u0.shape[1], u0, periodic=True)
        along_x = (logits.flatten(0, 1) @ to_x.T).view(-1, n_y, n_times * u0.shape[2])
        resized = product(to_y, along_x).unflatten(2, (n_times, -1)).transpose(1, 2)
        return resized + self.output.bias.to(u0.dtype)[:, None, None]


def with_fft(network: FourierOperator) -> FourierOperator:
    """The same network with its transforms done by the FFT."""
    network = copy.deepcopy(network)
    for block in network.blocks:
        block.convolution = FFTConvolution(block.convolution)
    return network


@dataclass(frozen=True, kw_only=True)
class OperatorTraining:
    """How the operator is trained: AdamW with one cycle of the learning rate, in bfloat16 on the GPU.

    Attributes:
        make_network: returns a network with fresh weights.
        n_epochs: passes over the simulations; what does not fill a batch is left out of a pass.
        batch_size: simulations a step.
        learning_rate: the highest of the cycle.
        weight_decay: AdamW's.
        interface_weight: how much more a cell near an interface counts in the cross-entropy.
        augment: shift and mirror the simulations at random in y, in which the problem is periodic and symmetric.
        compiled: whether to fuse the steps by torch.compile.
        random_state: seed of initial weights, order of the batches, shifts and dropout.
    """

    make_network: Callable[[], FourierOperator] = FourierOperator
    n_epochs: int = 20
    batch_size: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    interface_weight: float = 2.0
    augment: bool = True
    compiled: bool = field(default_factory=torch.cuda.is_available)
    random_state: int = 0


def train_operator(
    u0: Array,
    u: Array,
    training: OperatorTraining,
    *,
    device: torch.device | str = DEVICE,
) -> FourierOperator:
    """A network trained on initial fields (n, y, x) and later ones (n, n_times, y, x); heavy is what exceeds 0.5."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(training.random_state)
        network = training.make_network().to(device)
        n_times = network.settings["n_times"]
        if u.shape != (len(u0), n_times, *u0.shape[1:]):
            raise ValueError(
                f"u has shape {tuple(u.shape)} and u0 {tuple(u0.shape)}, but a network of {n_times} times needs "
                "(n, n_times, y, x) and (n, y, x)."
            )
        initial, labels = binary(u0, device), labelled(binary(u, device))
        for epoch, loss in enumerate(epochs(network, initial, labels, training), 1):
            logger.info("epoch %d of %d: loss %.4g", epoch, training.n_epochs, loss)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss became {loss} in epoch {epoch}; lower learning_rate={training.learning_rate:g}."
                )
    return network.eval()


def binary(fields: Array, device: torch.device) -> Tensor:
    return (torch.as_tensor(fields).to(device) > 0.5).to(torch.uint8)


def labelled(u: Tensor) -> Tensor:
    """Bit 0: the field; bit 1: whether a cell is near an interface. One byte, so that a batch is gathered at once."""
    labels = u.clone()
    for part in labels.split(16):
        around = functional.pad(part.float(), (0, 0, NEAR, NEAR), mode="circular")
        mean = functional.avg_pool2d(
            around, 2 * NEAR + 1, 1, padding=(0, NEAR), count_include_pad=False
        )
        part += 2 * ((mean > 0) & (mean < 1)).to(torch.uint8)
    return labels


def epochs(
    network: FourierOperator, u0: Tensor, labels: Tensor, training: OperatorTraining
) -> Iterator[float]:
    """Train in place; the mean loss after each pass, the only time at which the host waits for the device."""
    n_steps = max(1, len(u0) // training.batch_size)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        training.learning_rate,
        total_steps=training.n_epochs * n_steps,
        pct_start=0.2,
        cycle_momentum=False,
    )
    loss = compiled_loss() if training.compiled else loss_of
    network.train()
    for _ in range(training.n_epochs):
        total = torch.zeros((), device=u0.device)
        order = torch.randperm(len(u0), device=u0.device)
        # Full batches only: torch.compile would compile another program for the rest.
        for rows in order[: n_steps * training.batch_size].split(training.batch_size):
            batch = gathered(u0, labels, rows, augment=training.augment)
            optimizer.zero_grad()
            step_loss = loss(network, *batch, training.interface_weight)
            step_loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += step_loss.detach()
        yield float(total) / n_steps


def gathered(
    u0: Tensor, labels: Tensor, rows: Tensor, *, augment: bool
) -> tuple[Tensor, Tensor]:
    """The simulations of a batch, each with a shift and a mirroring in y of its own."""
    n_y = u0.shape[1]
    y = torch.arange(n_y, device=u0.device).expand(len(rows), -1)
    if augment:
        y = (y + torch.randint(n_y, (len(rows), 1), device=u0.device)) % n_y
        mirrored = torch.randint(2, (len(rows), 1), device=u0.device) == 1
        y = torch.where(mirrored, n_y - 1 - y, y)
    times = torch.arange(labels.shape[1], device=u0.device)[:, None]
    initial = u0[rows[:, None], y].to(precision(u0.device))
    return initial, labels[rows[:, None, None], times, y[:, None]]


def precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def loss_of(
    network: nn.Module, u0: Tensor, labels: Tensor, interface_weight: float
) -> Tensor:
    """Weighted binary cross-entropy plus Dice, in float32.

    The paper does not give its weights. Ours are larger near the interfaces, alike on both sides, so that p = 0.5 stays
    the place of the interface; weights by class would move it.
    """
    logits = network(u0).float()
    u, weight = (labels & 1).float(), 1 + interface_weight * (labels >> 1).float()
    entropy = functional.binary_cross_entropy_with_logits(logits, u, reduction="none")
    p = logits.sigmoid()
    overlap, total = (p * u).sum((2, 3)), (p + u).sum((2, 3))
    dice = 1 - (2 * overlap + 1) / (total + 1)
    return (weight * entropy).sum() / weight.sum() + dice.mean()


@cache
def compiled_loss():
    """One compiled program for all trainings of one shape: the network is its argument."""
    return torch.compile(loss_of, dynamic=False)


@torch.no_grad()
def probabilities(network: FourierOperator, u0: Tensor, batch_size: int = 16) -> Tensor:
    """Probabilities (n, n_times, y, x) of the heavy gas, float32 on u0's device; dropout is as the network has it."""
    device = next(network.parameters()).device
    parts = [
        network(part.to(device, precision(device))).float().sigmoid().to(u0.device)
        for part in u0.split(batch_size)
    ]
    return torch.cat(parts)


@contextmanager
def dropout_on(network: FourierOperator) -> Iterator[None]:
    """The dropout of MC passes; outside of it a trained network answers the same each time."""
    dropouts = [block.dropout for block in network.blocks]
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


@dataclass(frozen=True)
class OperatorSurrogate:
    """A trained operator as a surrogate: probabilities in float32, in the kind of array it is given."""

    network: FourierOperator

    def __call__(self, u0: Array) -> Array:
        return restore(probabilities(self.network, torch.as_tensor(u0)), u0)


@dataclass(frozen=True)
class TrainOperator:
    """The recipe that GeoQ's folds, the ensemble and MC dropout train by."""

    training: OperatorTraining = field(default_factory=OperatorTraining)
    device: str = DEVICE

    def __call__(self, u0: Array, u: Array) -> OperatorSurrogate:
        network = train_operator(u0, u, self.training, device=self.device)
        return OperatorSurrogate(network)

    def with_seed(self, random_state: int) -> "TrainOperator":
        return replace(self, training=replace(self.training, random_state=random_state))


def save(network: FourierOperator, path: Path) -> None:
    torch.save({"settings": network.settings, "weights": network.state_dict()}, path)


def load(path: Path) -> FourierOperator:
    """A saved network in eval mode on the CPU."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    # Its initial weights are drawn and overwritten; the caller's random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        network = FourierOperator(**saved["settings"])
    network.load_state_dict(saved["weights"])
    return network.eval()


@torch.no_grad()
def relative_difference(network: FourierOperator, u0: Tensor) -> float:
    """Of the logits in bfloat16 by matrix products to those in float32 by the FFT."""
    reference = with_fft(network)(u0.float())
    return float((network(u0.bfloat16()).float() - reference).norm() / reference.norm())


def seconds_per_epoch(
    n_simulations: int, device: torch.device, training: OperatorTraining
) -> tuple[float, float]:
    """Of the first epoch, which may compile, and of the second; ``epochs`` waits for the device after each."""
    u0 = torch.randint(2, (n_simulations, *FIELD), dtype=torch.uint8, device=device)
    labels = u0[:, None].expand(-1, 12, -1, -1).contiguous()
    network = training.make_network().to(device)
    seconds, start = [], time.perf_counter()
    for _ in epochs(network, u0, labels, replace(training, n_epochs=2)):
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return tuple(seconds)


def speed(n_simulations: int) -> None:
    device, begin = torch.device(DEVICE), time.perf_counter()
    network = FourierOperator().to(device).eval()
    u0 = torch.randint(2, (1, *FIELD), device=device)
    difference = relative_difference(network, u0)
    n_weights = sum(weight.numel() for weight in network.parameters())
    print(f"{n_weights:,} weights, bfloat16 to float32 FFT {difference:.2e}")
    print(
        "| batch | compiled | first epoch s | epoch s | peak GB |\n|---|---|---|---|---|"
    )
    for compiled in (False, True) if DEVICE == "cuda" else (False,):
        for batch_size in (16, 8):
            training = OperatorTraining(batch_size=batch_size, compiled=compiled)
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            first, second = seconds_per_epoch(n_simulations, device, training)
            peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
            row = f"| {batch_size} | {compiled} | {first:.2f} | {second:.2f} | {peak:.1f} |"
            print(row, flush=True)
    start = time.perf_counter()
    float(probabilities(network, u0.expand(n_simulations, -1, -1)).sum())
    print(f"{n_simulations} answers {time.perf_counter() - start:.2f} s")
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--speed", action="store_true", required=True, help="time an epoch"
    )
    parser.add_argument("--n-simulations", type=int, default=900)
    speed(parser.parse_args().n_simulations)
