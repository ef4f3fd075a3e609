"""Recipes that train a new network on the pairs that they receive (with torch)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.arrays import chunks, is_tensor, take, to_numbers
from geoq.checks import check_function, check_object
from geoq.training.loop import Call, Loss, Task, Training, can_stack, seeded, train, train_together

# Networks are trained as a stack while their batches (inputs and outputs) have at most STACK_NUMBERS numbers in total, and their
# weights at most STACK_WEIGHTS. Larger networks gain nothing, and all of them would be in memory at once.
STACK_NUMBERS = 2**18
STACK_WEIGHTS = 2**24


def mean_squared_error(y: Tensor, y_hat: Tensor) -> Tensor:
    """Mean squared error over all rows and output values."""
    return nn.functional.mse_loss(y_hat, y)


def single(array: Any, name: str) -> Tensor:
    """The numbers of a user's array in single precision, on the device of a tensor."""
    numbers = torch.from_numpy(np.array(to_numbers(array, name), np.float32, order="C"))
    return numbers.to(array.device) if is_tensor(array) else numbers


@dataclass(frozen=True)
class TrainedNetwork:
    """A network as a surrogate of NumPy arrays or tensors; it returns the kind and the precision of array that it receives.

    The network is called on batches, on its own device and in the precision of its weights. Integers stay integers where the
    network accepts them.

    Attributes:
        network: the trained network, in eval mode. If it has an attribute ``encoder``, the method ``encoder`` can serve as the
            representation phi.

    Example:
        >>> surrogate = TrainedNetwork(nn.Linear(2, 1).eval())
        >>> surrogate(np.zeros((5, 2))).shape
        (5, 1)
    """

    network: nn.Module

    def __call__(self, x: Any) -> Any:
        return _through(self.network, x)

    def encoder(self, x: Any) -> Any:
        """The output of ``network.encoder``: the representation that the network has learned."""
        return _through(self.network.encoder, x)


@torch.no_grad()
def _through(module: Any, x: Any) -> Any:
    """The output of a module at the rows of x."""
    parts = [_answer(module, x[rows]) for rows in chunks(len(x), int(np.prod(x.shape[1:])))]
    return torch.cat(parts) if is_tensor(x) else torch.cat(parts).numpy()


def _answer(module: Any, x: Any) -> Tensor:
    given = x
    if not is_tensor(x):
        numbers = to_numbers(x, "x")
        given = torch.tensor(np.ascontiguousarray(x if x.dtype.kind in "iu" else numbers))
    is_real = given.is_floating_point()
    weight = next(module.parameters(), given).real
    try:
        answer = module(given.to(weight) if is_real else given.to(weight.device))
    except RuntimeError:
        if is_real:
            raise
        answer = module(given.to(weight))
    if not is_tensor(answer):
        raise TypeError(
            f"{type(module).__name__} returned a {type(answer).__name__}, but a surrogate must return a tensor; pass a function "
            "that selects it, for example lambda x: network(x)[0]."
        )
    shown: Tensor = answer.to(given.device, given.dtype if is_real else torch.float32)
    return shown


def check_recipe(make_network: object, loss: object, training: object) -> None:
    """Raise for a network in place of a function that makes networks, a loss that is not a function, and unusable settings."""
    if isinstance(make_network, nn.Module):
        kind = type(make_network).__name__
        raise TypeError(
            f"make_network is a {kind}, but every training needs a new network; pass a function that makes it, such as {kind} "
            f"itself or lambda: {kind}(...)."
        )
    check_function(make_network, "make_network", "make_network()")
    check_function(loss, "loss", "loss(y, y_hat)")
    check_object(training, Training, "training", "Training(n_steps=1000)")


@dataclass(frozen=True)
class TrainNetwork:
    """A recipe that trains a new network of one architecture; pass it as ``train_surrogate``.

    The networks of all folds are trained together if this saves time.

    Attributes:
        make_network: a function without arguments that returns a network with new random weights. An output of the network must
            have the shape of a row of y.
        loss: a function of (y, y_hat) that returns the mean loss of a batch.
        training: the settings of the training.

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

    def __call__(self, x: Any, y: Any) -> TrainedNetwork:
        task, targets = self._task(x, y)
        device = targets.device
        with seeded(self.training.random_state):
            network = self.make_network().to(device)
            check_network(network, self.make_network, task.inputs[:1], targets[:1])
            rows = self.training.hold_out(torch.arange(len(targets), device=device))
            train(network, task.loss_of, self.training, *rows)
        return TrainedNetwork(network)

    def _task(self, x: Any, y: Any) -> tuple[Task, Tensor]:
        inputs, targets = single(x, "x"), single(y, "y")

        def mean_loss(call: Call, loss: Loss, rows: Tensor) -> Tensor:
            return loss(targets[rows], call(inputs[rows]))

        return Task(inputs, self.loss, mean_loss), targets

    def n_together(self, x: Any, y: Any) -> int:
        """The number of networks to train together: as many as the limits on numbers and weights allow.

        Networks with ``n_decays`` above 0 are trained one by one, because their rates are cut at different steps.
        """
        if self.training.n_decays:
            return 1
        row = int(np.prod(x.shape[1:]) + np.prod(y.shape[1:]))
        weights = sum(weight.numel() for weight in self._new_network().parameters())
        n_batches = STACK_NUMBERS // max(1, row * self.training.batch_size)
        return max(1, min(n_batches, STACK_WEIGHTS // max(1, weights)))

    def train_many(
        self, x: Any, y: Any, subsets: Sequence[Int[Any, " _"]], seeds: Sequence[int] | None = None
    ) -> list[TrainedNetwork]:
        """Train a network on each subset of the rows, all together if possible, with the seed of ``training`` if no seeds are given.

        Each network equals ``self.with_seed(seed)(x[rows], y[rows])`` up to rounding.
        """
        task, targets = self._task(x, y)
        seeds = [self.training.random_state] * len(subsets) if seeds is None else [*map(int, seeds)]
        recipes = [self.with_seed(seed) for seed in seeds]
        device = task.inputs.device
        networks = [recipe._new_network().to(device) for recipe in recipes]
        check_network(networks[0], self.make_network, task.inputs[:1], targets[:1])
        if len(networks) < 2 or self.training.n_decays or not can_stack(networks[0], task):
            return [
                recipe(take(x, r), take(y, r)) for recipe, r in zip(recipes, subsets, strict=True)
            ]
        rows = []
        for recipe, subset in zip(recipes, subsets, strict=True):
            own = torch.as_tensor(subset, device=device)
            learned, held_out = recipe.training.hold_out(torch.arange(len(own), device=device))
            rows.append((own[learned], own[held_out]))
        train_together(networks, rows, seeds, task, self.training)
        return [TrainedNetwork(network) for network in networks]

    def _new_network(self) -> nn.Module:
        with seeded(self.training.random_state):
            return self.make_network()

    def with_seed(self, random_state: int) -> "TrainNetwork":
        """The same recipe with another ``training.random_state``."""
        return replace(self, training=replace(self.training, random_state=random_state))


@torch.no_grad()
def check_network(
    network: nn.Module, make_network: Callable[[], nn.Module], x: Tensor, y: Tensor
) -> None:
    """Raise for a network that is used twice, or whose output has another shape than y: the loss would broadcast them."""
    with seeded(0):
        other = make_network()
    weights = {id(weight) for weight in network.parameters()}
    kind = type(network).__name__
    if any(id(weight) in weights for weight in other.parameters()):
        raise ValueError(
            f"make_network() returned the same {kind} twice, so every training would continue from the one before; build the "
            f"network inside the function, for example lambda: {kind}(...)."
        )
    network.eval()
    shape = tuple(network(x.clone()).shape[1:])
    if shape != tuple(y.shape[1:]):
        raise ValueError(
            f"make_network() returns rows of shape {shape}, but y has rows of shape {tuple(y.shape[1:])}; change the network's "
            "output or reshape y."
        )
