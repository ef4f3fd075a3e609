"""Recipes that train a new network on the pairs that they receive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.arrays import Array, chunks, restore, take, to_tensor
from geoq.settings import check_function, check_object
from geoq.training.loop import Training, TrainingResult, seeded, train
from geoq.training.stacked import Member, Pairs, Task, can_stack, train_stack
from geoq.training.threads import n_weights, threads_for

# Networks are trained as a stack while their batches (inputs and outputs) have at most STACK_NUMBERS numbers in total, and
# their weights at most STACK_WEIGHTS. Larger networks gain nothing, and all of them would be in memory at once.
STACK_NUMBERS = 2**18
STACK_WEIGHTS = 2**24


def train_together(
    members: list[Member], task: Task, training: Training
) -> list[TrainingResult]:
    """Train the networks of all members in place, one stack for each batch size, and return the result of each member."""
    sizes = [min(training.batch_size, len(m.training_rows)) for m in members]
    results: dict[int, TrainingResult] = {}
    for size in dict.fromkeys(sizes):
        places = [place for place, other in enumerate(sizes) if other == size]
        stack = [members[place] for place in places]
        # Threads for the size of one network: on a busy machine the threads of a stack wait for each other at every product.
        with threads_for(n_weights(stack[0].network)):
            results |= zip(places, train_stack(stack, task, training), strict=True)
    return [results[place] for place in range(len(members))]


def mean_squared_error(y: Tensor, y_hat: Tensor) -> Tensor:
    """Mean squared error over all rows and output values."""
    return nn.functional.mse_loss(y_hat, y)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network as a surrogate of NumPy arrays or tensors.

    Args:
        network: The trained network, in eval mode. If it has an attribute ``encoder``, the method ``encoder`` can serve as
            the representation phi.

    Example:
        >>> import numpy as np
        >>> surrogate = TrainedNetwork(nn.Linear(2, 1).eval())
        >>> surrogate(np.zeros((5, 2))).shape
        (5, 1)
    """

    network: nn.Module

    def __call__(self, x: Array) -> Array:
        return self._through(self.network, x)

    def encoder(self, x: Array) -> Array:
        """The output of ``network.encoder``: the representation that the network has learned."""
        encoder = self.network.encoder
        assert isinstance(encoder, nn.Module)
        return self._through(encoder, x)

    @torch.no_grad()
    def _through(self, module: nn.Module, x: Array) -> Array:
        tensor = to_tensor(x, "x")
        parameter = next(module.parameters())
        parts = [
            module(tensor[rows].to(parameter.device, parameter.dtype)).to(
                tensor.device, tensor.dtype
            )
            for rows in chunks(len(tensor), tensor[:1].numel())
        ]
        return restore(torch.cat(parts), x)


def check_recipe(make_network: object, loss: object, training: object) -> None:
    """Refuse a network in place of a function that makes networks, a loss that is not a function, and unusable settings."""
    if isinstance(make_network, nn.Module):
        kind = type(make_network).__name__
        raise TypeError(
            f"make_network is a {kind}, but every training needs a new network; pass a function that makes it, such as "
            f"{kind} itself or lambda: {kind}(...)."
        )
    check_function(make_network, "make_network", "make_network()")
    check_function(loss, "loss", "loss(y, y_hat)")
    check_object(training, Training, "training", "Training(n_steps=1000)")


@dataclass(frozen=True)
class TrainNetwork:
    """A recipe that trains a new network of one architecture; pass it as ``train_surrogate``.

    The networks of all folds are trained together if this saves time.

    Args:
        make_network: Function without arguments that returns a network with new random weights. An output of the network
            must have the shape of a row of y.
        loss: Function of (y, y_hat) that returns the mean loss of a batch.
        training: Settings of the training.

    Example:
        >>> from geoq import MLP
        >>> recipe = TrainNetwork(lambda: MLP(1, 1, hidden=(8,)), training=Training(n_steps=100))
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> surrogate = recipe(x, 2 * x)
        >>> surrogate(x).shape
        torch.Size([50, 1])
    """

    make_network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = mean_squared_error
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        check_recipe(self.make_network, self.loss, self.training)

    def __call__(self, x: Array, y: Array) -> TrainedNetwork:
        inputs, targets = to_tensor(x, "x").float(), to_tensor(y, "y").float()
        with seeded(self.training.random_state):
            network = made_by(self.make_network).to(inputs.device)
            check_network(network, self.make_network, inputs[:1], targets[:1])
            train(
                network,
                lambda net, rows: self.loss(targets[rows], net(inputs[rows])),
                self.training,
                torch.arange(len(inputs), device=inputs.device),
            )
        return TrainedNetwork(network)

    def n_together(self, x: Array, y: Array) -> int:
        """The number of networks to train together: as many as the limits on numbers and weights allow.

        Networks with ``n_decays`` above 0 are trained one by one, because their rates are cut at different steps.
        """
        if self.training.n_decays:
            return 1
        row = to_tensor(x[:1], "x").numel() + to_tensor(y[:1], "y").numel()
        weights = sum(weight.numel() for weight in self._new_network().parameters())
        n_batches = STACK_NUMBERS // max(1, row * self.training.batch_size)
        return max(1, min(n_batches, STACK_WEIGHTS // max(1, weights)))

    def train_many(
        self,
        x: Array,
        y: Array,
        subsets: Sequence[Int[Array, " _"]],
        seeds: Sequence[int] | None = None,
    ) -> list[TrainedNetwork]:
        """Train a network on each subset of the rows, all together if possible.

        Each network equals ``self.with_seed(seed)(x[rows], y[rows])`` up to rounding.

        Args:
            x: Inputs, one per row.
            y: Reference outputs, one per row.
            subsets: The row numbers of each network.
            seeds: The seed of each network; ``training.random_state`` for all if None.
        """
        inputs, targets = to_tensor(x, "x").float(), to_tensor(y, "y").float()
        pairs = Pairs(inputs, targets, self.loss)
        if seeds is None:
            seeds = [self.training.random_state] * len(subsets)
        rows = [torch.as_tensor(subset) for subset in subsets]
        own = [*zip((self.with_seed(int(seed)) for seed in seeds), rows, strict=True)]
        members = [recipe._member(r.to(inputs.device)) for recipe, r in own]
        first = members[0].network
        check_network(first, self.make_network, inputs[:1], targets[:1])
        alone = len(members) < 2 or self.training.n_decays
        if alone or not can_stack(first, pairs):
            return [recipe(take(x, r), take(y, r)) for recipe, r in own]
        train_together(members, pairs, self.training)
        return [TrainedNetwork(member.network) for member in members]

    def _member(self, rows: Int[Tensor, " n_rows"]) -> Member:
        one_group_each = torch.arange(len(rows), device=rows.device)
        training, validation = self.training.hold_out(one_group_each)
        network = self._new_network().to(rows.device)
        seed = self.training.random_state
        return Member(network, rows[training], rows[validation], seed)

    def _new_network(self) -> nn.Module:
        with seeded(self.training.random_state):
            return made_by(self.make_network)

    def with_seed(self, random_state: int) -> "TrainNetwork":
        """The same recipe with another ``training.random_state``."""
        return replace(self, training=replace(self.training, random_state=random_state))


def made_by(make_network: Callable[[], Any]) -> nn.Module:
    """A new network; refused if it is not a module."""
    network = make_network()
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"make_network() returned a {type(network).__name__}; it must return a network, a torch.nn.Module."
        )
    return network


@torch.no_grad()
def check_network(
    network: nn.Module, make_network: Callable[[], nn.Module], x: Tensor, y: Tensor
) -> None:
    """Refuse a network that is used twice, or whose output has another shape than y, because the loss would broadcast the two."""
    with seeded(0):
        other = make_network()
    weights = {id(weight) for weight in network.parameters()}
    if any(id(weight) in weights for weight in other.parameters()):
        raise ValueError(
            f"make_network() returned the same {type(network).__name__} twice, so every training would continue from the one "
            f"before; build the network inside the function, for example lambda: {type(network).__name__}(...)."
        )
    network.eval()
    shape = tuple(network(x.clone()).shape[1:])
    if shape != tuple(y.shape[1:]):
        raise ValueError(
            f"make_network() returns rows of shape {shape}, but y has rows of shape {tuple(y.shape[1:])}; "
            "change the network's output or reshape y."
        )
