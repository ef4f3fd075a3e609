"""Training of the Fourier neural operator, and the trained operator as a surrogate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.richtmyer_meshkov.fourier_operator import FourierOperator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Cells at most this far from an interface count as near it.
NEAR = 4


@dataclass(frozen=True, kw_only=True)
class OperatorTraining:
    """How the operator is trained: AdamW with one cycle of the learning rate, in bfloat16 on the GPU."""

    make_network: Callable[[], FourierOperator] = FourierOperator
    n_epochs: int = 20
    batch_size: int = 16
    learning_rate: float = 3e-3  # the highest of the cycle
    weight_decay: float = 1e-4
    interface_weight: float = (
        2.0  # additional weight of cells near an interface in the cross-entropy
    )
    augment: bool = (
        True  # random shifts and mirror images in y, in which the problem is periodic and symmetric
    )
    compiled: bool = field(default_factory=torch.cuda.is_available)
    random_state: int = 0


def train_operator(u0, u, training, *, device=DEVICE):
    """A network trained on initial fields (n, y, x) and later ones (n, n_times, y, x); heavy is what exceeds 0.5."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(training.random_state)
        network = training.make_network().to(device)
        n_times = network.settings["n_times"]
        if u.shape != (len(u0), n_times, *u0.shape[1:]):
            shapes = f"u has shape {tuple(u.shape)} and u0 {tuple(u0.shape)}"
            raise ValueError(f"{shapes}, but the network predicts {n_times} later fields.")
        initial, labels = binary(u0, device), labelled(binary(u, device))
        for epoch, loss in enumerate(epochs(network, initial, labels, training), 1):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss became {loss} in epoch {epoch}.")
    return network.eval()


def binary(fields, device):
    return (torch.as_tensor(fields).to(device) > 0.5).to(torch.uint8)


def labelled(u):
    """Bytes with the field in bit 0 and, in bit 1, whether a cell is near an interface."""
    labels = u.clone()
    for part in labels.split(16):
        around = functional.pad(part.float(), (0, 0, NEAR, NEAR), mode="circular")
        how = {"padding": (0, NEAR), "count_include_pad": False}
        mean = functional.avg_pool2d(around, 2 * NEAR + 1, 1, **how)
        part += 2 * ((mean > 0) & (mean < 1)).to(torch.uint8)
    return labels


def epochs(network, u0, labels, training):
    """Train in place; the mean loss after each pass, the only time at which the host waits for the device."""
    n_steps = max(1, len(u0) // training.batch_size)
    rate, decay = training.learning_rate, {"weight_decay": training.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(network.parameters(), rate, **decay)
    cycle = {"pct_start": 0.2, "cycle_momentum": False}
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, training.n_epochs * n_steps, **cycle
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


def gathered(u0, labels, rows, *, augment):
    """The simulations of a batch, each with its own random shift and reflection in y."""
    n_y = u0.shape[1]
    y = torch.arange(n_y, device=u0.device).expand(len(rows), -1)
    if augment:
        y = (y + torch.randint(n_y, (len(rows), 1), device=u0.device)) % n_y
        mirrored = torch.randint(2, (len(rows), 1), device=u0.device) == 1
        y = torch.where(mirrored, n_y - 1 - y, y)
    times = torch.arange(labels.shape[1], device=u0.device)[:, None]
    initial = u0[rows[:, None], y].to(precision(u0.device))
    return initial, labels[rows[:, None, None], times, y[:, None]]


def precision(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def loss_of(network, u0, labels, interface_weight):
    """Weighted binary cross-entropy plus Dice loss, in float32.

    The paper does not give its weights. These are equal on both sides of an interface, so that p = 0.5 remains its position.
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
    """The compiled loss; the network is an argument, so that all trainings of one shape use it."""
    return torch.compile(loss_of, dynamic=False)


@torch.no_grad()
def probabilities(network, u0, batch_size=16):
    """Probabilities (n, n_times, y, x) of the heavy gas, in float32 on the device of u0."""
    device = next(network.parameters()).device
    parts = [
        network(part.to(device, precision(device))).float().sigmoid().to(u0.device)
        for part in u0.split(batch_size)
    ]
    return torch.cat(parts)


@dataclass(frozen=True)
class OperatorSurrogate:
    """A trained operator as a surrogate: probabilities in float32, as the same kind of array as the input."""

    network: FourierOperator

    def __call__(self, u0):
        answer = probabilities(self.network, torch.as_tensor(u0))
        return answer if isinstance(u0, Tensor) else answer.numpy()


@dataclass(frozen=True)
class TrainOperator:
    """The recipe of the deployed surrogate, the fold surrogates and the ensemble members."""

    training: OperatorTraining = field(default_factory=OperatorTraining)
    device: str = DEVICE

    def __call__(self, u0, u):
        network = train_operator(u0, u, self.training, device=self.device)
        return OperatorSurrogate(network)

    def with_seed(self, random_state):
        return replace(self, training=replace(self.training, random_state=random_state))
