"""Several networks of one architecture, trained together as a stack (with torch).

Each member of the stack has its own rows, batches and early stopping; one step of Adam serves all members. A member ends with the
weights of a separate training, up to rounding. Ten small members cost little more than one.

The data and the loss of all members are a task, such as ``PairTask``. ``mean_loss(call, loss, rows)`` evaluates the network ``call``
and the loss at these rows of the data. The call is one network or all members at once; then the rows, the inputs and the outputs
have a first dimension of members.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from geoq.arrays import few_threads
from geoq.training.loop import (
    Rows,
    Training,
    TrainingResult,
    log,
    n_training_numbers,
    random_batches,
    validation_batches,
)

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Call: TypeAlias = Callable[[Tensor], Tensor]
State: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class PairTask:
    """A task with pairs of inputs and targets; ``loss`` is a function of the targets and of the outputs of a network."""

    inputs: Float[Tensor, " n *input"]
    targets: Float[Tensor, " n *output"]
    loss: Loss

    def mean_loss(self, call: Call, loss: Loss, rows: Int[Tensor, " *n"]) -> Tensor:
        return loss(self.targets[rows], call(self.inputs[rows]))


def train_together(
    networks: Sequence[nn.Module],
    rows: Sequence[tuple[Rows, Rows]],
    seeds: Sequence[int],
    task: Any,
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
    task: Any,
    training: Training,
) -> list[TrainingResult]:
    """Train networks whose batches have the same size."""
    stack = _Stack(networks, task, training.learning_rate)
    batches = [
        random_batches(own[0], training, seed) for own, seed in zip(rows, seeds, strict=True)
    ]
    held_out = [validation_batches(own[1], training) for own in rows]
    results = [TrainingResult.of_initial_weights(x) for x in stack.validation_losses(held_out)]
    best = [_copied(state) for state in stack.member_states()]
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
                best[n] = _copied(state)
        kept = [p for p, n in enumerate(running) if not results[n].out_of_patience(training)]
        if len(kept) < len(running):
            stack.keep(kept)
            running = [running[place] for place in kept]
    for network, state, result in zip(networks, best, results, strict=True):
        network.load_state_dict(state)
        network.eval()
        log(network, result)
    return results


def _copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def can_stack(network: nn.Module, task: Any) -> bool:
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

    def __init__(self, networks: list[nn.Module], task: Any, learning_rate: float) -> None:
        self.task, self.learning_rate = task, learning_rate
        self.template = copy.deepcopy(networks[0])
        states = [network.state_dict() for network in networks]
        stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        learned = {n for n, w in self.template.named_parameters() if w.requires_grad}
        self.weights = {n: w.requires_grad_() for n, w in stacked.items() if n in learned}
        self.buffers = {n: b for n, b in stacked.items() if n not in learned}
        self.optimizer = self._adam()
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
        self.optimizer = self._adam()
        for name, weight in self.weights.items():
            self.optimizer.state[weight] = {
                key: value[kept] if value.ndim else value for key, value in states[name].items()
            }

    def _adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.weights.values(), lr=self.learning_rate, fused=True)
