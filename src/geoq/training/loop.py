"""The one mini-batch loop that surrogates, increment models and baselines all train by."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.arrays import few_threads
from geoq.training import progress
from geoq.training.recorded import recorded
from geoq.training.stacked import epochs, validation_parts

logger = logging.getLogger(__name__)

RowLoss = Callable[[nn.Module, Tensor], Tensor]

# What is left of the learning rate when it is cut, and the share of all steps that each lower rate has at least.
DECAY = 0.2
LOWER_RATE = 1 / 8


@contextmanager
def seeded(random_state: int) -> Iterator[None]:
    """Random numbers from this seed; afterwards the user's own go on as if nothing had been drawn, on GPUs too."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(random_state)
        yield


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained: Adam on mini-batches, stopped early by the loss on held-out rows.

    Attributes:
        n_steps: most steps of the optimiser.
        batch_size: rows a step.
        learning_rate: Adam's.
        validation_fraction: share of the rows held out to stop by.
        check_every: steps between two looks at the held-out rows.
        patience: looks without improvement after which training stops; the best network seen is kept.
        n_decays: how often the patience may run out before that: the rate is cut to a fifth, and training goes on from the
            best network seen. Steps of one rate end in a noise that the held-out rows cannot tell from progress. Patience
            that lasts is cut short, so that each lower rate has an eighth of ``n_steps``.
        random_state: seed of initial weights, held-out rows, order of the batches and dropout.
    """

    n_steps: int = 5000
    batch_size: int = 64
    learning_rate: float = 1e-3
    validation_fraction: float = 0.1
    check_every: int = 100
    patience: int = 10
    n_decays: int = 0
    random_state: int = 0

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "check_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Training({name}={getattr(self, name)}), but it counts something; choose 1 or more."
                )
        if not 0 <= self.n_decays <= 1 / LOWER_RATE / 2:
            raise ValueError(
                f"Training(n_decays={self.n_decays}), but each takes an eighth of the steps, and half of them are for the "
                "first rate; choose 0 to 4."
            )
        if not self.learning_rate > 0:
            raise ValueError(
                f"Training(learning_rate={self.learning_rate}), but steps must go down; choose above 0."
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"Training(validation_fraction={self.validation_fraction}), but some rows must train and some must "
                "stop the training; choose between 0 and 1."
            )

    def with_seed_offset(self, number: int) -> "Training":
        """That of the first of several networks, or of another: other weights, batches and held-out rows."""
        return replace(self, random_state=self.random_state + number)

    def hold_out(
        self, units: Int[Tensor, " n_rows"]
    ) -> tuple[Int[Tensor, " n_train"], Int[Tensor, " n_validation"]]:
        """Rows to train on and rows to stop by; rows of one unit (copies of one point) stay on one side."""
        distinct, unit = units.unique(return_inverse=True)
        if (
            len(distinct) < 2
        ):  # nothing can be held out, so the training rows themselves decide
            rows = torch.arange(len(units), device=units.device)
            return rows, rows
        order = torch.randperm(
            len(distinct), generator=torch.Generator().manual_seed(self.random_state)
        )
        n_validation = min(
            max(1, round(self.validation_fraction * len(distinct))), len(distinct) - 1
        )
        held_out = torch.zeros(len(distinct), dtype=torch.bool)
        held_out[order[:n_validation]] = True
        validates = held_out.to(units.device)[unit]
        return (~validates).nonzero()[:, 0], validates.nonzero()[:, 0]


def train(
    network: nn.Module,
    loss: RowLoss,
    training: Training,
    units: Int[Tensor, " n_rows"],
    *,
    repeatable: bool = False,
) -> None:
    """Train the network in place; ends in eval mode with the best weights seen, the initial ones included.

    Args:
        network: is changed in place.
        loss: mean loss of the network over the rows it is given.
        training: how to train.
        units: one number per row of the data; rows with equal numbers are never split between training and stopping.
        repeatable: whether network and loss do the same operations at every step, so that a GPU may record one and
            replay it. Ours do; a user's network may count or draw in Python, unless it passed the trial of a stack.
    """
    rows = training.hold_out(units)
    train_on(network, loss, training, *rows, repeatable=repeatable)


def train_on(
    network: nn.Module,
    loss: RowLoss,
    training: Training,
    training_rows: Int[Tensor, " n_train"],
    validation_rows: Int[Tensor, " n_validation"],
    *,
    repeatable: bool = False,
) -> None:
    """``train`` on rows of the caller's choice, stopped by rows of the caller's choice."""
    descend = _Descend(network, loss, training, repeatable=repeatable)
    with threads_for(network):
        best_loss, best_step, last_step = descend(training_rows, validation_rows)
    network.eval()
    logger.info(
        "trained %s: best loss %.4g at step %d of %d",
        type(network).__name__,
        best_loss,
        best_step,
        last_step,
    )


def threads_for(network: nn.Module) -> AbstractContextManager[None]:
    """One thread while a small network on the CPU is trained."""
    parameters = list(network.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    # A network is small by its parameters: batches are too.
    n_numbers = 4 * sum(parameter.numel() for parameter in parameters)
    return few_threads(n_numbers) if on_cpu else nullcontext()


class _Descend:
    """A network, its loss and its Adam."""

    def __init__(
        self, network: nn.Module, loss: RowLoss, training: Training, *, repeatable: bool
    ) -> None:
        self.network, self.loss, self.training = network, loss, training
        weights = list(network.parameters())
        self.recordable = repeatable and all(weight.is_cuda for weight in weights)
        rate: float | Tensor = training.learning_rate
        if self.recordable:
            # A step that is recorded has to keep its count and its rate on the GPU; fused Adam reads a float32.
            rate = torch.tensor(rate, device=weights[0].device, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(
            weights, lr=rate, fused=True, capturable=self.recordable
        )

    def __call__(
        self, training_rows: Tensor, validation_rows: Tensor
    ) -> tuple[float, int, int]:
        """Steps until patience runs out; the loss and step of the weights that are kept, and the last step."""
        training, network = self.training, self.network
        passes = epochs(training_rows, training.batch_size, training.random_state)
        batches = (batch for one_pass in passes for batch in one_pass)
        best_loss, best_step = self._mean_loss(validation_rows), 0
        best_weights = copy.deepcopy(network.state_dict())
        cuts_left, last_cut = training.n_decays, 0
        network.train()
        first = next(batches)
        take_step = (
            recorded(self._step, first, self._numbers)
            if self.recordable
            else self._step
        )
        for step, batch in enumerate(chain([first], batches), 1):
            network.train()
            take_step(batch)
            if step % training.check_every and step < training.n_steps:
                continue
            progress.reached(step / training.n_steps)
            validation_loss = self._mean_loss(validation_rows)
            if not math.isfinite(validation_loss):
                raise FloatingPointError(
                    f"the training loss became {validation_loss} by step {step} of {training.n_steps}; "
                    f"lower learning_rate={training.learning_rate:g} or scale the data."
                )
            if validation_loss < best_loss:
                best_loss, best_step = validation_loss, step
                best_weights = copy.deepcopy(network.state_dict())
            since = step - max(best_step, last_cut)
            is_stuck = since >= training.patience * training.check_every
            latest = training.n_steps * (1 - LOWER_RATE * cuts_left)
            if is_stuck and not cuts_left:
                break
            if cuts_left and (is_stuck or step >= latest):
                network.load_state_dict(best_weights)
                self._cut_rate()
                cuts_left, last_cut = cuts_left - 1, step
            if step == training.n_steps:
                break
        network.load_state_dict(best_weights)
        self.optimizer.zero_grad()  # gradients of a recorded step would keep its memory
        return best_loss, best_step, step

    def _step(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.network, rows).backward()
        self.optimizer.step()

    def _cut_rate(self) -> None:
        for group in self.optimizer.param_groups:
            # In place, where it is a tensor: a recorded step reads that one.
            group["lr"] *= DECAY

    def _numbers(self) -> dict[tuple[str, str], Tensor]:
        """All that a step changes: weights, buffers and what Adam remembers."""
        held = {("network", n): v for n, v in self.network.state_dict().items()}
        for name, weight in self.network.named_parameters():
            held |= {(k, name): v for k, v in self.optimizer.state[weight].items()}
        return held

    @torch.no_grad()
    def _mean_loss(self, rows: Tensor) -> float:
        self.network.eval()
        parts = validation_parts(rows, self.training.batch_size)
        total = sum(self.loss(self.network, part) * len(part) for part in parts)
        return float(total / len(rows))
