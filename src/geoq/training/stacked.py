"""Networks of one shape trained as one: each has its own data, order and early stopping, one step of Adam serves all.

A member ends as it would have ended alone, up to rounding. What is saved is the time that small networks spend between
their products: ten of them cost little more than one.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from geoq.training import progress
from geoq.training.recorded import Step, recorded

logger = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
Call = Callable[[Tensor], Tensor]
State = dict[str, Tensor]

# Layers that treat all numbers alike, so that they serve many networks at once as they are.
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


@runtime_checkable
class Descent(Protocol):
    """How a network is trained, as far as a stack has to know it; ``Training`` is one."""

    @property
    def n_steps(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def check_every(self) -> int: ...

    @property
    def patience(self) -> int: ...


@dataclass(frozen=True)
class Member:
    """One network of a stack, and the rows of the data that it learns from and stops by."""

    network: nn.Module
    training_rows: Int[Tensor, " n_train"]
    validation_rows: Int[Tensor, " n_validation"]
    random_state: int


@runtime_checkable
class Task(Protocol):
    """What all members learn, each from its own rows.

    ``mean_loss`` calls the networks and the loss that it is given: of one network, or of all members at once, where rows
    and what is made of them have a first dimension of members.
    """

    @property
    def inputs(self) -> Tensor: ...

    @property
    def loss(self) -> Loss: ...

    def mean_loss(
        self, call: Call, loss: Loss, rows: Int[Tensor, " *n"], /
    ) -> Tensor: ...


@dataclass(frozen=True)
class Pairs:
    """Inputs and targets that all members share, and the mean loss of (y, y_hat)."""

    inputs: Float[Tensor, " n *input"]
    targets: Float[Tensor, " n *output"]
    loss: Loss

    def mean_loss(self, call: Call, loss: Loss, rows: Int[Tensor, " *n"]) -> Tensor:
        return loss(self.targets[rows], call(self.inputs[rows]))


def epochs(
    rows: Int[Tensor, " n_rows"], batch_size: int, random_state: int
) -> Iterator[Int[Tensor, " n_batches batch_size"]]:
    """All batches of one pass over the rows after the other, each pass in a new order; what fills no batch is left."""
    generator = torch.Generator().manual_seed(random_state)
    size = min(batch_size, len(rows))
    n_used = len(rows) // size * size
    while True:
        order = torch.randperm(len(rows), generator=generator)[:n_used]
        yield rows[order.to(rows.device)].view(-1, size)


def validation_parts(rows: Int[Tensor, " n"], batch_size: int) -> tuple[Tensor, ...]:
    """The rows in parts small enough to be evaluated at once."""
    size = max(batch_size, 1024) if batch_size >= 64 else batch_size
    parts: tuple[Tensor, ...] = rows.split(size)
    return parts


def train_stack(
    members: Sequence[Member], task: Task, descent: Descent, batch_size: int
) -> None:
    """Train the members' networks in place; each ends in eval mode with the best weights that it saw.

    All members must have batches of one size: none fewer training rows than ``batch_size``, or all the same number.
    """
    stack = _Stack([member.network for member in members], task, descent.learning_rate)
    batches = [
        _Blocks(epochs(m.training_rows, batch_size, m.random_state)) for m in members
    ]
    parts = [validation_parts(m.validation_rows, batch_size) for m in members]
    best_loss = stack.validation_losses(parts)
    best_step = [0] * len(members)
    best = [_copied(state) for state in stack.member_states()]
    running = list(range(len(members)))
    step = 0
    while running and step < descent.n_steps:
        n_steps = min(descent.check_every, descent.n_steps - step)
        stack.descend(torch.stack([batches[n].take(n_steps) for n in running], dim=1))
        step += n_steps
        progress.reached(step / descent.n_steps)
        losses = stack.validation_losses([parts[n] for n in running])
        states = stack.member_states()
        stopped = []
        for place, (number, loss) in enumerate(zip(running, losses, strict=True)):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the training loss became {loss} by step {step} of {descent.n_steps}; "
                    f"lower learning_rate={descent.learning_rate:g} or scale the data."
                )
            if loss < best_loss[number]:
                best_loss[number], best_step[number] = loss, step
                best[number] = _copied(states[place])
            elif step - best_step[number] >= descent.patience * descent.check_every:
                stopped.append(place)
        if stopped:
            stack.drop(stopped)
            running = [n for place, n in enumerate(running) if place not in stopped]
    for member, state, loss, at in zip(
        members, best, best_loss, best_step, strict=True
    ):
        member.network.load_state_dict(state)
        member.network.eval()
        logger.info(
            "trained %s: best loss %.4g at step %d",
            type(member.network).__name__,
            loss,
            at,
        )


def _copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def can_stack(network: nn.Module, task: Task) -> bool:
    """Whether several such networks can be trained as one.

    They cannot where weights are shared between layers, where a layer is random (dropout), or where it keeps count of
    what it has seen (batch normalisation).
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


class _Blocks:
    """Batches of one member, handed out some steps at a time."""

    def __init__(self, passes: Iterator[Int[Tensor, " n_batches batch_size"]]) -> None:
        self.passes, self.left = passes, next(passes)

    def take(self, n_steps: int) -> Int[Tensor, " n_steps batch_size"]:
        parts = [self.left[:n_steps]]
        self.left = self.left[n_steps:]
        while (missing := n_steps - sum(map(len, parts))) > 0:
            following = next(self.passes)
            parts.append(following[:missing])
            self.left = following[missing:]
        return torch.cat(parts)


class _Stack:
    """Weights of all members, one tensor per name with a first dimension of members, and their Adam."""

    def __init__(
        self, networks: list[nn.Module], task: Task, learning_rate: float
    ) -> None:
        self.task, self.learning_rate = task, learning_rate
        self.template = copy.deepcopy(networks[0])
        states = [network.state_dict() for network in networks]
        stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        layers = chain(self.template) if task.inputs.ndim == 2 else None
        self._outputs = (
            _Mapped(self.template)
            if layers is None
            else _Products(layers, self.template)
        )
        for name in self._outputs.turned:
            stacked[name] = stacked[name].mT.contiguous()
        learned = {n for n, w in self.template.named_parameters() if w.requires_grad}
        self.weights = {
            n: w.requires_grad_() for n, w in stacked.items() if n in learned
        }
        self.buffers = {n: b for n, b in stacked.items() if n not in learned}
        self.optimizer = self._adam()
        self._vmapped_loss = vmap(task.loss)
        self._replay: Step | None = None

    def descend(self, rows: Int[Tensor, " n_steps n_members batch_size"]) -> None:
        """One step for the batches in each row."""
        self.template.train()
        if self._replay is None:
            self._replay = recorded(self._step, rows[0], self._numbers)
        for batches in rows:
            self._replay(batches)

    def losses(
        self, rows: Int[Tensor, " n_members batch_size"]
    ) -> Float[Tensor, " n_members"]:
        """Loss of each member on its own batch."""
        call = partial(self._outputs, self.weights | self.buffers)
        return self.task.mean_loss(call, self._vmapped_loss, rows)

    def _step(self, rows: Int[Tensor, " n_members batch_size"]) -> None:
        self.optimizer.zero_grad()
        self.losses(rows).sum().backward()
        self.optimizer.step()

    def _numbers(self) -> dict[tuple[str, str], Tensor]:
        """All that a step changes: weights, buffers and what Adam remembers."""
        held = {("weights", n): w.detach() for n, w in self.weights.items()}
        held |= {("buffers", n): b for n, b in self.buffers.items()}
        for name, weight in self.weights.items():
            held |= {(k, name): v for k, v in self.optimizer.state[weight].items()}
        return held

    @torch.no_grad()
    def validation_losses(self, parts: Sequence[tuple[Tensor, ...]]) -> list[float]:
        """Mean loss of each member over its own rows."""
        self.template.eval()
        return [
            self._mean_loss(state, own)
            for state, own in zip(self.member_states(), parts, strict=True)
        ]

    def _mean_loss(self, state: State, parts: tuple[Tensor, ...]) -> float:
        """Of one member."""

        def call(x: Tensor) -> Tensor:
            y_hat: Tensor = functional_call(self.template, state, (x,))
            return y_hat

        total = sum(
            self.task.mean_loss(call, self.task.loss, rows) * len(rows)
            for rows in parts
        )
        return float(total / sum(map(len, parts)))

    def member_states(self) -> list[State]:
        """Views of the members' weights and buffers, as ``state_dict`` names them."""
        everything = {n: w.detach() for n, w in self.weights.items()} | self.buffers
        everything |= {name: everything[name].mT for name in self._outputs.turned}
        n_members = len(next(iter(everything.values())))
        return [{n: w[m] for n, w in everything.items()} for m in range(n_members)]

    def drop(self, places: list[int]) -> None:
        """Leave members out from now on, and keep what Adam knows of the others."""
        n_members = len(next(iter(self.weights.values())))
        kept = [m for m in range(n_members) if m not in places]
        known = {n: self.optimizer.state[w] for n, w in self.weights.items()}
        self.weights = {
            n: w.detach()[kept].requires_grad_() for n, w in self.weights.items()
        }
        self.buffers = {n: b[kept] for n, b in self.buffers.items()}
        self.optimizer, self._replay = self._adam(), None
        for name, weight in self.weights.items():
            self.optimizer.state[weight] = {
                key: value[kept] if value.ndim else value
                for key, value in known[name].items()
            }

    def _adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(
            self.weights.values(),
            lr=self.learning_rate,
            fused=True,
            # A step that is recorded has to keep its count on the GPU.
            capturable=self.task.inputs.is_cuda,
        )


class _Mapped:
    """Any network, by ``vmap``: the operations of one, each on all members."""

    turned: tuple[str, ...] = ()

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
    """Linear and elementwise layers in a row: a linear layer of all members is one batched product.

    Half the time of ``vmap`` on Forrester's network, ten members on one core. ``turned`` names the weights that are kept
    transposed, which saves another tenth.
    """

    def __init__(self, layers: list[nn.Module], network: nn.Module) -> None:
        names = {module: name for name, module in network.named_modules()}
        self.layers = [(names[layer], layer) for layer in layers]
        self.turned = tuple(
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


def chain(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a network in the order in which it calls them, where it is a plain sequence of known ones."""
    # Hooks, subclasses and parametrised layers may do more than their kind; those are left to vmap.
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (nn.Linear, *ELEMENTWISE):
        return [module]
    if type(module).forward is not nn.Sequential.forward:
        return None
    # Not children(), which leaves out a layer that is called a second time.
    parts = [chain(part) for part in module._modules.values() if part is not None]
    if any(part is None for part in parts):
        return None
    return [layer for part in parts if part for layer in part]
