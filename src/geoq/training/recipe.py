"""Ready-made recipes: a new network of one architecture, trained on the pairs that it receives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.arrays import Array, chunks, restore, take, to_tensor
from geoq.training.loop import Training, seeded, threads_for, train
from geoq.training.stacked import Member, Pairs, Task, can_stack, train_stack

# Networks are trained as one while their batches, inputs and outputs together, have fewer numbers than the first and
# their weights fewer than the second. Larger ones gain nothing, and would need memory for all of them at once.
STACK_NUMBERS = 2**18
STACK_WEIGHTS = 2**24


def train_as_one(members: list[Member], task: Task, training: Training) -> None:
    """Train the networks of all members in place, those whose batches have one size together."""
    sizes = [min(training.batch_size, len(m.training_rows)) for m in members]
    for one in dict.fromkeys(sizes):
        alike = [m for m, size in zip(members, sizes, strict=True) if size == one]
        # Threads by the size of one: on a busy machine those of a stack wait for each other at every product.
        with threads_for(alike[0].network):
            train_stack(alike, task, training, training.batch_size)


def mean_squared_error(y: Tensor, y_hat: Tensor) -> Tensor:
    """Mean squared error over everything."""
    return nn.functional.mse_loss(y_hat, y)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network as a surrogate for NumPy arrays and tensors alike; its ``encoder`` can serve as phi."""

    network: nn.Module

    def __call__(self, x: Array) -> Array:
        return self._through(self.network, x)

    def encoder(self, x: Array) -> Array:
        """The network's own representation of the inputs, where it has one (``network.encoder``)."""
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


@dataclass(frozen=True)
class TrainNetwork:
    """Our own recipe for a surrogate: a fresh network of one shape, trained on the pairs it is given.

    Attributes:
        make_network: returns a network with fresh weights; its output must have y's shape.
        loss: mean loss of (y, y_hat).
        training: how to train.
    """

    make_network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = mean_squared_error
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if isinstance(self.make_network, nn.Module):
            kind = type(self.make_network).__name__
            raise TypeError(
                f"make_network is a {kind}, but every training needs a fresh one; pass what makes it, such as {kind} itself "
                f"or lambda: {kind}(...)."
            )

    def __call__(self, x: Array, y: Array) -> TrainedNetwork:
        inputs, targets = to_tensor(x, "x").float(), to_tensor(y, "y").float()
        with seeded(self.training.random_state):
            network = self.make_network().to(inputs.device)
            check_output(network, inputs[:1], targets[:1])
            train(
                network,
                lambda net, rows: self.loss(targets[rows], net(inputs[rows])),
                self.training,
                torch.arange(len(inputs), device=inputs.device),
            )
        return TrainedNetwork(network)

    def n_together(self, x: Array, y: Array) -> int:
        """How many networks are trained as one: as many as keep the memory of a step within bounds.

        Rates are cut at different steps, so that networks whose rates are cut are trained one by one.
        """
        if self.training.n_decays:
            return 1
        row = to_tensor(x[:1], "x").numel() + to_tensor(y[:1], "y").numel()
        weights = sum(weight.numel() for weight in self._fresh().parameters())
        n_batches = STACK_NUMBERS // max(1, row * self.training.batch_size)
        return max(1, min(n_batches, STACK_WEIGHTS // max(1, weights)))

    def train_many(
        self,
        x: Array,
        y: Array,
        subsets: Sequence[Int[Array, " _"]],
        seeds: Sequence[int] | None = None,
    ) -> list[TrainedNetwork]:
        """Train a network on each subset of the rows, all of them as one where that is possible.

        Each result is that of ``self.with_seed(seed)(x[rows], y[rows])``, up to rounding.
        """
        inputs, targets = to_tensor(x, "x").float(), to_tensor(y, "y").float()
        pairs = Pairs(inputs, targets, self.loss)
        if seeds is None:
            seeds = [self.training.random_state] * len(subsets)
        recipes = [self.with_seed(int(seed)) for seed in seeds]
        members = []
        for recipe, rows in zip(recipes, subsets, strict=True):
            members.append(recipe._member(torch.as_tensor(rows).to(inputs.device)))
            members[-1].network.to(inputs.device)
            check_output(members[-1].network, inputs[:1], targets[:1])
        alone = len(members) < 2 or self.training.n_decays
        if alone or not can_stack(members[0].network, pairs):
            return [
                recipe(take(x, rows), take(y, rows))
                for recipe, rows in zip(
                    recipes, map(torch.as_tensor, subsets), strict=True
                )
            ]
        train_as_one(members, pairs, self.training)
        return [TrainedNetwork(member.network) for member in members]

    def _member(self, rows: Int[Tensor, " n_rows"]) -> Member:
        places = torch.arange(len(rows), device=rows.device)
        training, validation = self.training.hold_out(places)
        return Member(
            self._fresh(), rows[training], rows[validation], self.training.random_state
        )

    def _fresh(self) -> nn.Module:
        with seeded(self.training.random_state):
            return self.make_network()

    def with_seed(self, random_state: int) -> "TrainNetwork":
        """The same recipe with other initial weights and another order of the batches."""
        return replace(self, training=replace(self.training, random_state=random_state))


@torch.no_grad()
def check_output(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """Refuse a network whose output the loss would broadcast against y, before it is trained."""
    network.eval()
    shape = tuple(network(x).shape[1:])
    if shape != tuple(y.shape[1:]):
        raise ValueError(
            f"make_network() returns rows of shape {shape}, but y has rows of shape {tuple(y.shape[1:])}; "
            "change the network's output or reshape y."
        )
