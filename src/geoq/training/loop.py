"""The mini-batch training loop of all networks: surrogates, increment models and baselines."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.checks import warn
from geoq.settings import is_integer, is_number
from geoq.training import progress
from geoq.training.recorded import recorded
from geoq.training.threads import n_weights, threads_for

logger = logging.getLogger(__name__)

RowLoss = Callable[[nn.Module, Tensor], Tensor]

# The learning rate is multiplied by DECAY at each cut; each lower rate has at least the fraction LOWER_RATE of all steps.
DECAY = 0.2
LOWER_RATE = 1 / 8
MAX_DECAYS = 4


@contextmanager
def seeded(random_state: int) -> Iterator[None]:
    """Seed the random numbers of torch, and restore the earlier random state of the CPU and of the GPUs afterwards."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(random_state)
        yield


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training of a network: Adam on mini-batches, with early stopping on held-out rows.

    Every ``check_every`` steps the loss on the held-out rows (the validation loss) is computed. The training keeps the
    weights with the lowest validation loss, the initial weights included.

    Args:
        n_steps: Largest number of optimiser steps. The default suits small networks; raise it if the log reports a best step
            close to ``n_steps``.
        batch_size: Number of rows per step. If there are fewer training rows, each step uses all of them. The default gives
            several steps per epoch for data sets of a few hundred rows.
        learning_rate: Learning rate of Adam. The default is the learning rate of the paper (model appendix).
        validation_fraction: Fraction of the rows, or of the groups of rows, that is held out for early stopping. The default
            leaves most rows for the training. At least one group is held out if there are two.
        check_every: Number of steps between two computations of the validation loss. With the default these computations
            take a small part of the time.
        patience: The training stops after this many successive checks without a new lowest validation loss. The default
            allows 1000 steps without progress, because the validation loss of mini-batch steps is noisy.
        n_decays: Number of times, from 0 to 4, that the learning rate is cut to a fifth when the patience runs out. The
            training then continues from the best weights. Use 1 to 3 where the noise of the steps limits the accuracy. If
            the patience does not run out, the rate is cut early enough to leave an eighth of ``n_steps`` for each lower
            rate. The default is a constant rate, because networks whose rates are cut cannot be trained together.
        random_state: Seed of the initial weights, the held-out rows, the order of the batches and dropout.

    Example:
        >>> training = Training(n_steps=200, batch_size=16, validation_fraction=0.25)
        >>> rows, validation_rows = training.hold_out(torch.arange(40))
        >>> len(rows), len(validation_rows)
        (30, 10)
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
            count = getattr(self, name)
            if not is_integer(count) or count < 1:
                self._refuse(name, "must be an integer >= 1")
        if not is_integer(self.n_decays) or not 0 <= self.n_decays <= MAX_DECAYS:
            self._refuse("n_decays", f"must be an integer from 0 to {MAX_DECAYS}")
        if not is_number(self.learning_rate) or not self.learning_rate > 0:
            self._refuse("learning_rate", "must be > 0")
        fraction = self.validation_fraction
        if not is_number(fraction) or not 0 < fraction < 1:
            self._refuse("validation_fraction", "must be between 0 and 1, exclusive")
        if not is_integer(self.random_state):
            self._refuse("random_state", "must be an integer, the seed")

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(f"Training({name}={getattr(self, name)!r}): {name} {rule}.")

    def with_seed_offset(self, offset: int) -> "Training":
        """The same settings with ``random_state + offset``, for several networks that differ."""
        return replace(self, random_state=self.random_state + offset)

    def hold_out(
        self, groups: Int[Tensor, " n_rows"]
    ) -> tuple[Int[Tensor, " n_train"], Int[Tensor, " n_validation"]]:
        """Divide rows at random into training rows and validation rows; with a single group both are all rows.

        Rows of one group, such as copies of one point, are never separated. ``groups`` has the group number of each row.
        """
        distinct, group = groups.unique(return_inverse=True)
        if len(distinct) < 2:
            rows = torch.arange(len(groups), device=groups.device)
            return rows, rows
        n, generator = len(distinct), torch.Generator().manual_seed(self.random_state)
        order = torch.randperm(n, generator=generator)
        n_validation = min(max(1, round(self.validation_fraction * n)), n - 1)
        held_out = torch.zeros(n, dtype=torch.bool)
        held_out[order[:n_validation]] = True
        is_validation = held_out.to(groups.device)[group]
        return (~is_validation).nonzero()[:, 0], is_validation.nonzero()[:, 0]


@dataclass(frozen=True)
class TrainingResult:
    """The course of one training.

    Attributes:
        first_loss: Validation loss of the initial weights.
        best_loss: Lowest validation loss; the trained network has the weights of this loss.
        last_loss: Validation loss after the last step.
        best_step: Number of steps after which the lowest loss was found; 0 means that no step has improved the network.
        last_step: Number of steps in total.
        checks: Pairs of the number of steps and the validation loss after them, the initial weights first.
    """

    first_loss: float
    best_loss: float
    last_loss: float
    best_step: int
    last_step: int
    checks: tuple[tuple[int, float], ...] = ()


class EarlyStopping:
    """The lowest validation loss of one training, and whether its patience has run out."""

    def __init__(self, training: Training, first_loss: float) -> None:
        if not math.isfinite(first_loss):
            raise FloatingPointError(
                f"the validation loss of the initial weights is {first_loss}, so no training can be compared with it; check "
                "the loss and the initial weights of the network, or scale the data."
            )
        self.training = training
        self.result = TrainingResult(
            first_loss, first_loss, first_loss, 0, 0, ((0, first_loss),)
        )

    def improves(self, step: int, loss: float) -> bool:
        """Record the validation loss after a step, refused unless it is finite; return whether it is the lowest."""
        training = self.training
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"learning_rate={training.learning_rate:g}, but the validation loss became {loss} by step {step} of "
                f"{training.n_steps}; lower learning_rate or scale the data."
            )
        is_best = loss < self.result.best_loss
        checks = (*self.result.checks, (step, loss))
        self.result = replace(
            self.result, last_loss=loss, last_step=step, checks=checks
        )
        if is_best:
            self.result = replace(self.result, best_loss=loss, best_step=step)
        return is_best

    def out_of_patience(self, since: int = 0) -> bool:
        """Whether the loss has not improved for too long, counted from the step ``since`` or later."""
        n_stalled = self.result.last_step - max(self.result.best_step, since)
        return n_stalled >= self.training.patience * self.training.check_every


def train(
    network: nn.Module,
    loss: RowLoss,
    training: Training,
    groups: Int[Tensor, " n_rows"],
    *,
    repeatable: bool = False,
) -> TrainingResult:
    """Train the network in place. It ends in eval mode, with the weights of the lowest validation loss.

    Args:
        network: The network; its weights are changed.
        loss: Function of the network and of row numbers that returns the mean loss over these rows.
        training: The settings.
        groups: The group number of each row of the data. Rows of one group are either all trained on or all held out.
        repeatable: Whether network and loss do the same operations at every step, so that a GPU can record one step and
            replay it. This is false for networks of the user, which may count or draw random numbers in Python.
    """
    rows = training.hold_out(groups)
    return train_on(network, loss, training, *rows, repeatable=repeatable)


def train_on(
    network: nn.Module,
    loss: RowLoss,
    training: Training,
    training_rows: Int[Tensor, " n_train"],
    validation_rows: Int[Tensor, " n_validation"],
    *,
    repeatable: bool = False,
) -> TrainingResult:
    """Train the network as ``train`` does, with training rows and validation rows that the caller chooses."""
    optimisation = _Optimisation(network, loss, training, repeatable=repeatable)
    with threads_for(n_weights(network)):
        result = optimisation.run(training_rows, validation_rows)
    network.eval()
    log(network, result)
    return result


def warn_if_untrained(results: Sequence[TrainingResult], what: str) -> None:
    """Warn if none of the trainings of a model found weights with a lower validation loss than its initial weights."""
    if any(result.best_step for result in results):
        return
    first = results[0]
    warn(
        f"{what} has its initial weights: no step of its training lowered the held-out loss ({first.first_loss:.4g} at the "
        f"start, {first.last_loss:.4g} after {first.last_step} steps). Lower learning_rate or check_every of its training, "
        "or calibrate on more points or folds."
    )


def log(network: nn.Module, result: TrainingResult) -> None:
    """Log the result of a training."""
    logger.info(
        "trained %s: best loss %.4g at step %d of %d",
        type(network).__name__,
        result.best_loss,
        result.best_step,
        result.last_step,
    )


def epochs(
    rows: Int[Tensor, " n_rows"], batch_size: int, random_state: int
) -> Iterator[Int[Tensor, " n_batches batch_size"]]:
    """Iterate over epochs without end: the batches of each, in a new random order, without the incomplete last batch."""
    generator = torch.Generator().manual_seed(random_state)
    size = min(batch_size, len(rows))
    n_used = len(rows) // size * size
    while True:
        order = torch.randperm(len(rows), generator=generator)[:n_used]
        yield rows[order.to(rows.device)].view(-1, size)


def validation_batches(rows: Int[Tensor, " n"], batch_size: int) -> tuple[Tensor, ...]:
    """Batches of the validation rows; they need no gradients and can therefore be larger than training batches."""
    size = max(batch_size, 1024) if batch_size >= 64 else batch_size
    batches: tuple[Tensor, ...] = rows.split(size)
    return batches


class _Optimisation:
    """A network, its loss and its optimiser."""

    def __init__(
        self, network: nn.Module, loss: RowLoss, training: Training, *, repeatable: bool
    ) -> None:
        self.network, self.loss, self.training = network, loss, training
        weights = list(network.parameters())
        self.recordable = repeatable and all(weight.is_cuda for weight in weights)
        rate: float | Tensor = training.learning_rate
        if self.recordable:
            # A recorded step reads its count and its learning rate on the GPU; fused Adam reads a float32.
            rate = torch.tensor(rate, device=weights[0].device, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(
            weights, lr=rate, fused=True, capturable=self.recordable
        )

    def run(self, training_rows: Tensor, validation_rows: Tensor) -> TrainingResult:
        """Take steps until the patience runs out, and restore the best weights."""
        training, network = self.training, self.network
        every_epoch = epochs(training_rows, training.batch_size, training.random_state)
        batches = (batch for epoch in every_epoch for batch in epoch)
        stopping = EarlyStopping(training, self._mean_loss(validation_rows))
        best_weights = copy.deepcopy(network.state_dict())
        cuts_left, last_cut = training.n_decays, 0
        network.train()
        first = next(batches)
        take_step = (
            recorded(self._step, first, self._state) if self.recordable else self._step
        )
        for step, batch in enumerate(chain([first], batches), 1):
            network.train()
            take_step(batch)
            if step % training.check_every and step < training.n_steps:
                continue
            progress.stage_done(step / training.n_steps)
            if stopping.improves(step, self._mean_loss(validation_rows)):
                best_weights = copy.deepcopy(network.state_dict())
            is_stuck = stopping.out_of_patience(since=last_cut)
            latest_cut = training.n_steps * (1 - LOWER_RATE * cuts_left)
            if step == training.n_steps or (is_stuck and not cuts_left):
                break
            if cuts_left and (is_stuck or step >= latest_cut):
                network.load_state_dict(best_weights)
                self._cut_rate()
                cuts_left, last_cut = cuts_left - 1, step
        network.load_state_dict(best_weights)
        self.optimizer.zero_grad()  # the gradients of a recorded step hold its memory
        return stopping.result

    def _step(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.network, rows).backward()
        self.optimizer.step()

    def _cut_rate(self) -> None:
        for group in self.optimizer.param_groups:
            # In place if the rate is a tensor, because a recorded step reads this tensor.
            group["lr"] *= DECAY

    def _state(self) -> dict[tuple[str, str], Tensor]:
        """All tensors that a step changes: weights, buffers and the state of the optimiser."""
        state = {("network", n): v for n, v in self.network.state_dict().items()}
        for name, weight in self.network.named_parameters():
            state |= {(k, name): v for k, v in self.optimizer.state[weight].items()}
        return state

    @torch.no_grad()
    def _mean_loss(self, rows: Tensor) -> float:
        self.network.eval()
        batches = validation_batches(rows, self.training.batch_size)
        total = sum(self.loss(self.network, batch) * len(batch) for batch in batches)
        return float(total / len(rows))
