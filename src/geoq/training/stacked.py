"""Several networks of one architecture, trained together as a stack (with torch).

Each member of the stack has its own rows, batches and early stopping; one step of Adam serves all members. A member ends with the
weights of a separate training, up to rounding. A stack is faster because small networks spend most of their time between matrix
products: ten members cost little more than one.

The data and the loss of all members are a task: an object with ``inputs``, ``loss`` and ``mean_loss(call, loss, rows)``, which
evaluates the network ``call`` and the loss at these rows of the data. ``PairTask`` is one. The call is one network or all members
at once; then the rows, the inputs and the outputs have a first dimension of members.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from geoq.training.loop import (
    EarlyStopping,
    Training,
    TrainingResult,
    epochs,
    log,
    validation_batches,
)

logger = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
Call = Callable[[Tensor], Tensor]
State = dict[str, Tensor]

# Layers that act on each number separately. They can be applied to the values of all members without a change.
ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.ELU,
    nn.LeakyReLU,
    nn.Identity,
)


@dataclass(frozen=True)
class Member:
    """One network of a stack.

    Attributes:
        network: the network; the training changes its weights.
        training_rows: rows of the data for its steps.
        validation_rows: rows of the data for its early stopping.
        random_state: seed of the order of its batches.
    """

    network: nn.Module
    training_rows: Int[Tensor, " n_train"]
    validation_rows: Int[Tensor, " n_validation"]
    random_state: int


@dataclass(frozen=True)
class PairTask:
    """A task with pairs of inputs and targets.

    Attributes:
        inputs: the inputs of all rows.
        targets: the targets of all rows.
        loss: the mean loss, a function of the targets and of the outputs of a network.
    """

    inputs: Float[Tensor, " n *input"]
    targets: Float[Tensor, " n *output"]
    loss: Loss

    def mean_loss(self, call: Call, loss: Loss, rows: Int[Tensor, " *n"]) -> Tensor:
        return loss(self.targets[rows], call(self.inputs[rows]))


def train_stack(members: Sequence[Member], task: Any, training: Training) -> list[TrainingResult]:
    """Train the networks of all members in place. Each ends in eval mode, with the weights of its lowest validation loss.

    All batches must have the same size: each member has at least ``training.batch_size`` training rows, or all members have the
    same number of training rows. The seeds are the seeds of the members.
    """
    stack = _Stack([member.network for member in members], task, training.learning_rate)
    size = training.batch_size
    batches = [_batches(m, size) for m in members]
    held_out = [validation_batches(m.validation_rows, size) for m in members]
    stopping = [EarlyStopping(training, loss) for loss in stack.validation_losses(held_out)]
    best = [_copied(state) for state in stack.member_states()]
    running = list(range(len(members)))
    step = 0
    while running and step < training.n_steps:
        n_steps = min(training.check_every, training.n_steps - step)
        for rows in zip(*(islice(batches[n], n_steps) for n in running), strict=True):
            stack.descend(torch.stack(rows))
        step += n_steps
        losses = stack.validation_losses([held_out[n] for n in running])
        for n, loss, state in zip(running, losses, stack.member_states(), strict=True):
            if stopping[n].improves(step, loss):
                best[n] = _copied(state)
        kept = [p for p, n in enumerate(running) if not stopping[n].out_of_patience()]
        if len(kept) < len(running):
            stack.keep(kept)
            running = [running[place] for place in kept]
    results = [one.result for one in stopping]
    for member, state, result in zip(members, best, results, strict=True):
        member.network.load_state_dict(state)
        member.network.eval()
        log(member.network, result)
    return results


def _batches(member: Member, size: int) -> Iterator[Tensor]:
    """The batches of one member, without end."""
    for epoch in epochs(member.training_rows, size, member.random_state):
        yield from epoch


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
        layers = layer_sequence(self.template) if task.inputs.ndim == 2 else None
        self._outputs = (
            _Mapped(self.template) if layers is None else _Products(layers, self.template)
        )
        for name in self._outputs.transposed:
            stacked[name] = stacked[name].mT.contiguous()
        learned = {n for n, w in self.template.named_parameters() if w.requires_grad}
        self.weights = {n: w.requires_grad_() for n, w in stacked.items() if n in learned}
        self.buffers = {n: b for n, b in stacked.items() if n not in learned}
        self.optimizer = self._adam()
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
        return [
            self._mean_loss(state, own)
            for state, own in zip(self.member_states(), batches, strict=True)
        ]

    def _mean_loss(self, state: State, batches: tuple[Tensor, ...]) -> float:
        def call(x: Tensor) -> Tensor:
            y_hat: Tensor = functional_call(self.template, state, (x,))
            return y_hat

        total = sum(self.task.mean_loss(call, self.task.loss, rows) * len(rows) for rows in batches)
        return float(total / sum(map(len, batches)))

    def member_states(self) -> list[State]:
        """Views of the weights and buffers of each member, under the names of ``state_dict``."""
        everything = {n: w.detach() for n, w in self.weights.items()} | self.buffers
        everything |= {name: everything[name].mT for name in self._outputs.transposed}
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


class _Mapped:
    """The outputs of all members for any network, by ``vmap``."""

    transposed: tuple[str, ...] = ()

    def __init__(self, network: nn.Module) -> None:
        def call(state: State, x: Tensor) -> Tensor:
            result: Tensor = functional_call(network, state, (x,))
            return result

        self.call = vmap(call)

    def __call__(
        self, state: State, x: Float[Tensor, " n_members n *input"]
    ) -> Float[Tensor, " n_members n *output"]:
        result: Tensor = self.call(state, x)
        return result


class _Products:
    """The outputs of all members for a sequence of linear and elementwise layers: one batched product per linear layer.

    This takes half the time of ``vmap`` on Forrester's network (ten members, one core). ``transposed`` has the names of the
    weights that are stored transposed, which saves another tenth.
    """

    def __init__(self, layers: list[nn.Module], network: nn.Module) -> None:
        names = {module: name for name, module in network.named_modules()}
        self.layers = [(names[layer], layer) for layer in layers]
        self.transposed = tuple(
            {f"{n}.weight" for n, layer in self.layers if isinstance(layer, nn.Linear)}
        )

    def __call__(
        self, state: State, x: Float[Tensor, " n_members n n_inputs"]
    ) -> Float[Tensor, " n_members n n_outputs"]:
        for name, layer in self.layers:
            if not isinstance(layer, nn.Linear):
                x = layer(x)
            elif layer.bias is None:
                x = torch.bmm(x, state[f"{name}.weight"])
            else:
                bias = state[f"{name}.bias"][:, None]
                x = torch.baddbmm(bias, x, state[f"{name}.weight"])
        return x


def layer_sequence(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a network in the order of their calls, or None if it is not a sequence of linear and elementwise layers."""
    # Hooks, subclasses and parametrised layers can do more than the plain layer, so that vmap is used for them.
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (nn.Linear, *ELEMENTWISE):
        return [module]
    if type(module).forward is not nn.Sequential.forward:
        return None
    # children() would omit a layer that is called a second time.
    children = [child for child in module._modules.values() if child is not None]
    parts = [layer_sequence(child) for child in children]
    if any(part is None for part in parts):
        return None
    return [layer for part in parts if part for layer in part]
