"""The mini-batch training of all networks: of one, or of several of one architecture as a stack (with torch).

Each member of a stack has its own rows, batches and early stopping; one step of Adam serves all members. A member ends with the
weights of a separate training, up to rounding. Ten small members cost little more than one.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from geoq.arrays import few_threads
from geoq.checks import check_integer, is_number, warn

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
RowLoss: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
Rows: TypeAlias = Int[Tensor, " _"]
Call: TypeAlias = Callable[[Tensor], Tensor]
State: TypeAlias = dict[str, Tensor]

# The learning rate is multiplied by DECAY at each cut; each lower rate has at least the fraction LOWER_RATE of all steps.
DECAY, LOWER_RATE = 0.2, 1 / 8


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

    Every ``check_every`` steps the loss on the held-out rows (the validation loss) is computed. The training keeps the weights
    with the lowest validation loss, the initial weights included.

    Attributes:
        n_steps: largest number of optimiser steps. The default suits small networks; raise it if the log reports a best step
            close to ``n_steps``.
        batch_size: number of rows per step. If there are fewer training rows, each step uses all of them. The default gives
            several steps per epoch for data sets of a few hundred rows.
        learning_rate: learning rate of Adam. The default is the learning rate of the paper (model appendix).
        validation_fraction: fraction of the rows, or of the groups of rows, that is held out for early stopping. The default
            leaves most rows for the training. At least one group is held out if there are two.
        check_every: number of steps between two computations of the validation loss. With the default these computations take a
            small part of the time.
        patience: the training stops after this many successive checks without a new lowest validation loss. The default allows
            1000 steps without progress, because the validation loss of mini-batch steps is noisy.
        n_decays: number of times that the learning rate is cut to a fifth when the patience runs out. The training
            then continues from the best weights. Use 1 to 3 where the noise of the steps limits the accuracy. If the patience
            does not run out, the rate is cut early enough to leave an eighth of ``n_steps`` for each lower rate. The default is a
            constant rate, because networks whose rates are cut cannot be trained together.
        random_state: seed of the initial weights, the held-out rows, the order of the batches and dropout.

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
            check_integer(getattr(self, name), f"Training.{name}", 1)
        check_integer(self.n_decays, "Training.n_decays", 0)
        check_integer(self.random_state, "Training.random_state")
        for name, most in (("learning_rate", math.inf), ("validation_fraction", 1)):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < most:
                raise ValueError(f"Training.{name}={value!r} must lie between 0 and {most}.")

    def hold_out(self, groups: Rows) -> tuple[Rows, Rows]:
        """Divide rows at random into training rows and validation rows; with a single group both are all rows.

        Rows of one group, such as copies of one point, are never separated. ``groups`` has the group number of each row.
        """
        distinct, group = groups.unique(return_inverse=True)
        n = len(distinct)
        if n < 2:
            rows = torch.arange(len(groups), device=groups.device)
            return rows, rows
        n_validation = min(max(1, round(self.validation_fraction * n)), n - 1)
        held_out = torch.zeros(n, dtype=torch.bool, device="cpu")
        held_out[_shuffled(n, _generator(self.random_state))[:n_validation]] = True
        is_validation = held_out.to(groups.device)[group]
        return (~is_validation).nonzero()[:, 0], is_validation.nonzero()[:, 0]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _shuffled(n: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(n, generator=generator, device="cpu")


@dataclass(frozen=True)
class TrainingResult:
    """The validation losses of one training, first with the initial weights, with the numbers of steps before them.

    The trained network has the weights of the best loss. The best step 0 means that no step has improved the network.
    """

    first_loss: float
    best_loss: float
    last_loss: float
    best_step: int
    last_step: int
    checks: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of_initial_weights(loss: float) -> "TrainingResult":
        """A training without steps; raises unless its loss is finite."""
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the validation loss of the initial weights is {loss}, so no training can be compared with it; check the loss and "
                "the initial weights of the network, or scale the data."
            )
        return TrainingResult(loss, loss, loss, 0, 0, ((0, loss),))

    def after(self, step: int, loss: float, training: Training) -> "TrainingResult":
        """The course with one more check; raises unless the loss is finite. The best step is this one if the loss is the lowest."""
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"learning_rate={training.learning_rate:g}, but the validation loss became {loss} by step {step} of "
                f"{training.n_steps}; lower learning_rate or scale the data."
            )
        lowest, best_step = min((self.best_loss, self.best_step), (loss, step))
        return TrainingResult(
            self.first_loss, lowest, loss, best_step, step, (*self.checks, (step, loss))
        )

    def out_of_patience(self, training: Training, since: int = 0) -> bool:
        """Whether the loss has not improved for too long, counted from the step ``since`` or later."""
        n_stalled = self.last_step - max(self.best_step, since)
        return n_stalled >= training.patience * training.check_every


def train(
    network: nn.Module, loss: RowLoss, training: Training, rows: Rows, held_out: Rows
) -> TrainingResult:
    """Train the network in place. It ends in eval mode, with the weights of the lowest validation loss.

    ``loss`` is a function of the network and of row numbers that returns the mean loss over these rows.
    """
    with few_threads(n_training_numbers(network)):
        result = _optimise(network, loss, training, rows, held_out)
    network.eval()
    log(network, result)
    return result


def n_training_numbers(network: nn.Module) -> int:
    """How many numbers a step of a training changes: an optimiser stores about four for each weight."""
    return 4 * sum(weight.numel() for weight in network.parameters())


def warn_if_untrained(results: Sequence[TrainingResult], what: str) -> None:
    """Warn if none of the trainings of a model found weights with a lower validation loss than its initial weights."""
    if any(result.best_step for result in results):
        return
    first = results[0]
    warn(
        f"{what} has its initial weights: no step of its training lowered the held-out loss ({first.first_loss:.4g} at the "
        f"start, {first.last_loss:.4g} after {first.last_step} steps). Lower learning_rate or check_every of its training, or "
        "calibrate on more points or folds."
    )


def log(network: nn.Module, result: TrainingResult) -> None:
    """Log the result of a training."""
    numbers = result.best_loss, result.best_step, result.last_step
    logger.info("trained %s: best loss %.4g at step %d of %d", type(network).__name__, *numbers)


def random_batches(rows: Rows, training: Training, random_state: int) -> Iterator[Rows]:
    """Batches without end, in a new random order in each epoch, which leaves out the incomplete last batch."""
    generator = _generator(random_state)
    size = min(training.batch_size, len(rows))
    n_used = len(rows) // size * size
    while True:
        order = _shuffled(len(rows), generator)[:n_used]
        yield from rows[order.to(rows.device)].view(-1, size)


def validation_batches(rows: Rows, training: Training) -> tuple[Tensor, ...]:
    """Batches of the validation rows; they need no gradients and can therefore be larger than training batches."""
    size = training.batch_size
    batches: tuple[Tensor, ...] = rows.split(max(size, 1024) if size >= 64 else size)
    return batches


def _adam(weights: list[Tensor], learning_rate: float) -> torch.optim.Adam:
    """Adam, in its faster fused form unless weights are complex, as in Fourier layers."""
    is_real = not any(weight.is_complex() for weight in weights)
    return torch.optim.Adam(weights, lr=learning_rate, fused=is_real)


def _optimise(
    network: nn.Module, loss: RowLoss, training: Training, rows: Rows, held_out: Rows
) -> TrainingResult:
    """Take steps until the patience runs out, and restore the best weights."""

    @torch.no_grad()
    def validation_loss() -> float:
        network.eval()
        batches = validation_batches(held_out, training)
        return float(sum(loss(network, b) * len(b) for b in batches) / len(held_out))

    optimizer = _adam([*network.parameters()], training.learning_rate)
    result = TrainingResult.of_initial_weights(validation_loss())
    best_weights = copy.deepcopy(network.state_dict())
    cuts_left, last_cut = training.n_decays, 0
    for step, batch in enumerate(random_batches(rows, training, training.random_state), 1):
        network.train()
        optimizer.zero_grad()
        loss(network, batch).backward()
        optimizer.step()
        if step % training.check_every and step < training.n_steps:
            continue
        result = result.after(step, validation_loss(), training)
        if result.best_step == step:
            best_weights = copy.deepcopy(network.state_dict())
        is_stuck = result.out_of_patience(training, since=last_cut)
        latest_cut = training.n_steps * (1 - LOWER_RATE * cuts_left)
        if step == training.n_steps or (is_stuck and not cuts_left):
            break
        if cuts_left and (is_stuck or step >= latest_cut):
            network.load_state_dict(best_weights)
            for group in optimizer.param_groups:
                group["lr"] *= DECAY
            cuts_left, last_cut = cuts_left - 1, step
    network.load_state_dict(best_weights)
    return result


# Stacks


@dataclass(frozen=True)
class Task:
    """The data and the loss of trainings: ``loss`` is a function of the targets and of the outputs of a network.

    ``mean_loss(call, loss, rows)`` evaluates the network ``call`` and the loss at these rows of the data. The call is one network or
    all members of a stack at once; then the rows, the inputs and the outputs have a first dimension of members.
    """

    inputs: Float[Tensor, " n *input"]
    loss: Loss
    mean_loss: Callable[[Call, Loss, Tensor], Tensor]

    def loss_of(self, network: nn.Module, rows: Rows) -> Tensor:
        """The mean loss of one network."""
        return self.mean_loss(network, self.loss, rows)


def train_together(
    networks: Sequence[nn.Module],
    rows: Sequence[tuple[Rows, Rows]],
    seeds: Sequence[int],
    task: Task,
    training: Training,
) -> list[TrainingResult]:
    """Train all networks in place, one stack for each batch size, and return the result of each network.

    Each ends in eval mode, with the weights of its lowest validation loss. ``rows`` are the rows of the data for the steps and for
    the early stopping of each network, ``seeds`` determine the order of their batches.
    """
    sizes = [min(training.batch_size, len(learned)) for learned, _ in rows]
    results: dict[int, TrainingResult] = {}
    for size in dict.fromkeys(sizes):
        members = [member for member, other in enumerate(sizes) if other == size]
        parts = [networks[m] for m in members], [rows[m] for m in members]
        order = [seeds[m] for m in members]
        # Threads for the size of one network: on a busy machine the threads of a stack wait for each other at every product.
        with few_threads(n_training_numbers(networks[members[0]])):
            results |= zip(members, _train_stack(*parts, order, task, training), strict=True)
    return [results[member] for member in range(len(networks))]


def _train_stack(
    networks: list[nn.Module],
    rows: list[tuple[Rows, Rows]],
    seeds: list[int],
    task: Task,
    training: Training,
) -> list[TrainingResult]:
    """Train networks whose batches have the same size."""
    stack = _Stack(networks, task, training.learning_rate)
    batches = [
        random_batches(own[0], training, seed) for own, seed in zip(rows, seeds, strict=True)
    ]
    held_out = [validation_batches(own[1], training) for own in rows]
    results = [TrainingResult.of_initial_weights(x) for x in stack.validation_losses(held_out)]
    best = [network.state_dict() for network in networks]  # the stack has copies
    running = list(range(len(networks)))
    step = 0
    while running and step < training.n_steps:
        n_steps = min(training.check_every, training.n_steps - step)
        for of_members in zip(*(islice(batches[n], n_steps) for n in running), strict=True):
            stack.descend(torch.stack(of_members))
        step += n_steps
        losses = stack.validation_losses([held_out[n] for n in running])
        for n, loss, state in zip(running, losses, stack.member_states(), strict=True):
            results[n] = results[n].after(step, loss, training)
            if results[n].best_step == step:
                best[n] = {name: value.clone() for name, value in state.items()}
        kept = [p for p, n in enumerate(running) if not results[n].out_of_patience(training)]
        if len(kept) < len(running):
            stack.keep(kept)
            running = [running[place] for place in kept]
    for network, state, result in zip(networks, best, results, strict=True):
        network.load_state_dict(state)
        network.eval()
        log(network, result)
    return results


def can_stack(network: nn.Module, task: Task) -> bool:
    """Whether several networks of this architecture can be trained as a stack.

    This is not possible if layers share weights, if a layer is random (dropout), or if a layer changes its buffers (batch
    normalisation).
    """
    buffers = {name for name, _ in network.named_buffers()}
    own = buffers | {name for name, _ in network.named_parameters()}
    if set(network.state_dict()) - own:
        return False
    stack = _Stack([network, network], task, learning_rate=1.0)
    stack.template.train()
    try:
        stack.losses(torch.zeros(2, 2, dtype=torch.long, device=task.inputs.device))
    except RuntimeError as exc:
        logger.info("%s is trained alone: %s", type(network).__name__, exc)
        return False
    stack.template(task.inputs[:2])
    before, after = network.state_dict(), stack.template.state_dict()
    return all(torch.equal(before[name], after[name]) for name in buffers & set(before))


class _Stack:
    """The weights of all members, as one tensor per name with a first dimension of members, and their optimiser."""

    def __init__(self, networks: list[nn.Module], task: Task, learning_rate: float) -> None:
        self.task, self.learning_rate = task, learning_rate
        self.template = copy.deepcopy(networks[0])
        states = [network.state_dict() for network in networks]
        stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        learned = {n for n, w in self.template.named_parameters() if w.requires_grad}
        self.weights = {n: w.requires_grad_() for n, w in stacked.items() if n in learned}
        self.buffers = {n: b for n, b in stacked.items() if n not in learned}
        self.optimizer = _adam([*self.weights.values()], self.learning_rate)
        self._outputs = vmap(partial(functional_call, self.template))
        self._vmapped_loss = vmap(task.loss)

    def descend(self, rows: Int[Tensor, " n_members batch_size"]) -> None:
        """Take one step, with a batch for each member."""
        self.template.train()
        self.optimizer.zero_grad()
        self.losses(rows).sum().backward()
        self.optimizer.step()

    def losses(self, rows: Int[Tensor, " n_members batch_size"]) -> Float[Tensor, " n_members"]:
        """The loss of each member on its own batch."""
        call = partial(self._outputs, self.weights | self.buffers)
        each: Tensor = self.task.mean_loss(call, self._vmapped_loss, rows)
        return each

    @torch.no_grad()
    def validation_losses(self, batches: Sequence[tuple[Tensor, ...]]) -> list[float]:
        """The mean loss of each member over its own validation batches."""
        self.template.eval()
        losses = []
        for state, own in zip(self.member_states(), batches, strict=True):
            call = partial(functional_call, self.template, state)
            total = sum(self.task.mean_loss(call, self.task.loss, rows) * len(rows) for rows in own)
            losses.append(float(total / sum(map(len, own))))
        return losses

    def member_states(self) -> list[State]:
        """Views of the weights and buffers of each member, under the names of ``state_dict``."""
        everything = {n: w.detach() for n, w in self.weights.items()} | self.buffers
        n_members = len(next(iter(everything.values())))
        return [{n: w[m] for n, w in everything.items()} for m in range(n_members)]

    def keep(self, kept: list[int]) -> None:
        """Remove all members except these, together with their optimiser states."""
        states = {n: self.optimizer.state[w] for n, w in self.weights.items()}
        self.weights = {n: w.detach()[kept].requires_grad_() for n, w in self.weights.items()}
        self.buffers = {n: b[kept] for n, b in self.buffers.items()}
        self.optimizer = _adam([*self.weights.values()], self.learning_rate)
        for name, weight in self.weights.items():
            self.optimizer.state[weight] = {
                key: value[kept] if value.ndim else value for key, value in states[name].items()
            }
