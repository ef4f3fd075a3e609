"""A ready-made recipe for a surrogate of one time step: a network, trained on single steps and then on rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.arrays import Array, to_tensor
from geoq.settings import check_integer, check_object
from geoq.training.loop import Training, seeded, train_on
from geoq.training.recipe import (
    STACK_NUMBERS,
    TrainedNetwork,
    TrainNetwork,
    check_network,
    check_recipe,
    made_by,
    mean_squared_error,
    train_together,
)
from geoq.training.stacked import Call, Loss, Member, can_stack


@dataclass(frozen=True)
class TrainRollout:
    r"""Train a new network on one-step pairs and then fine-tune it on its own rollouts, as the paper does.

    .. math:: \frac1H \sum_{h=1}^H \ell(u_{t+h}, \widehat F^h(u_t))

    Attributes:
        make_network: a function that returns a network with new weights, from states to next states.
        loss: the mean loss as a function of the true and the predicted states.
        training: the training on one-step pairs.
        n_rollout: H, the number of steps of the fine-tuning rollouts. Each rollout is compared with the states of one segment.
        fine_tuning: the training on rollouts; it uses the seed of ``training``.

    Example:
        >>> from functools import partial
        >>> from geoq import MLP, Training
        >>> recipe = TrainRollout(
        ...     partial(MLP, 2, 2, hidden=(8,)),
        ...     training=Training(n_steps=20),
        ...     n_rollout=3,
        ...     fine_tuning=Training(n_steps=10),
        ... )
        >>> surrogate = recipe([np.random.default_rng(0).random((50, 2))])
        >>> surrogate(np.zeros((4, 2))).shape
        (4, 2)
    """

    make_network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = mean_squared_error
    training: Training = field(default_factory=Training)
    n_rollout: int = 8
    fine_tuning: Training = field(
        default_factory=lambda: Training(
            n_steps=500, learning_rate=3e-4, check_every=50
        )
    )

    def __post_init__(self) -> None:
        check_recipe(self.make_network, self.loss, self.training)
        check_integer(self.n_rollout, "n_rollout", 1)
        check_object(self.fine_tuning, Training, "fine_tuning", "Training(n_steps=500)")

    def __call__(self, segments: list[Array]) -> TrainedNetwork:
        if not segments:
            raise ValueError("segments is an empty list; pass at least one segment.")
        tensors = [to_tensor(segment, "segments") for segment in segments]
        places = np.arange(sum(map(len, tensors)))
        ends = np.cumsum([len(tensor) for tensor in tensors])
        return self.train_many(torch.cat(tensors), [np.split(places, ends[:-1])])[0]

    def n_together(self, states: Array) -> int:
        """How many networks to train together, so that the memory of a training step stays small in both trainings."""
        if self.fine_tuning.n_decays:
            return 1
        state = states[:1]
        row = 2 * self.n_rollout * to_tensor(state, "states").numel()
        n_windows = STACK_NUMBERS // max(1, row * self.fine_tuning.batch_size)
        one_step = TrainNetwork(self.make_network, self.loss, self.training)
        return max(1, min(n_windows, one_step.n_together(state, state)))

    def train_many(
        self, states: Array, runs: Sequence[Sequence[Int[np.ndarray, " _"]]]
    ) -> list[TrainedNetwork]:
        """Train one network for each entry of ``runs``, all networks together where that is possible.

        Args:
            states: the states of all trajectories.
            runs: for each network, the runs of consecutive rows that it is trained on.

        Returns:
            The networks; up to rounding, each equals ``self([states[run] for run in runs[i]])``.
        """
        inputs = to_tensor(states, "states").float()
        for own in runs:
            self.check_lengths([len(run) for run in own])
        networks = self._trained(inputs, runs, 1, [self._fresh(inputs)] * len(runs))
        same = [partial(_identity, network) for network in networks]
        networks = self._trained(inputs, runs, self.n_rollout, same)
        return [TrainedNetwork(network) for network in networks]

    def _trained(
        self,
        states: Tensor,
        runs: Sequence[Sequence[np.ndarray]],
        n_steps: int,
        makers: Sequence[Callable[[], nn.Module]],
    ) -> list[nn.Module]:
        """Make the networks and train them on rollouts of ``n_steps`` steps: pairs if it is 1, otherwise fine-tuning."""
        seed = self.training.random_state
        training = self.training if n_steps == 1 else self.fine_tuning
        training = replace(training, random_state=seed)
        starts = [torch.cat([_starts(run, n_steps) for run in own]) for own in runs]
        task = Windows(states, torch.cat(starts).to(states.device), n_steps, self.loss)
        places = torch.arange(len(task.start), device=states.device)
        rows = [
            [own[part] for part in training.hold_out(torch.arange(len(own)).to(own))]
            for own in places.split([len(start) for start in starts])
        ]
        if len(makers) > 1 and not training.n_decays:
            networks = [_seeded(make, seed) for make in makers]
            if can_stack(networks[0], task):
                members = [
                    Member(network, learned, held_out, seed)
                    for network, (learned, held_out) in zip(networks, rows, strict=True)
                ]
                train_together(members, task, training)
                return networks

        def loss(net: nn.Module, rows: Tensor) -> Tensor:
            return task.mean_loss(net, self.loss, rows)

        networks = []
        for make, (learned, held_out) in zip(makers, rows, strict=True):
            # Initial weights and dropout use the same random numbers one after the other, as in every training.
            with seeded(seed):
                networks.append(make())
                train_on(networks[-1], loss, training, learned, held_out)
        return networks

    def _fresh(self, states: Tensor) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            network = made_by(self.make_network).to(states.device)
            check_network(network, self.make_network, states[:1], states[:1])
            return network

        return make

    def check_lengths(self, lengths: list[int]) -> None:
        """Refuse segments that are all too short for a fine-tuning rollout."""
        if max(lengths, default=0) <= self.n_rollout:
            raise ValueError(
                f"n_rollout={self.n_rollout}, but the longest of the {len(lengths)} training segments has only "
                f"{max(lengths, default=0)} states; lower n_rollout, or choose folds that leave longer segments."
            )

    def with_seed(self, random_state: int) -> "TrainRollout":
        """The same recipe with another seed, for the initial weights and for the order of the batches."""
        return replace(self, training=replace(self.training, random_state=random_state))


@dataclass(frozen=True)
class Windows:
    """The training task of rollouts: the mean loss over the steps of a rollout.

    Attributes:
        inputs: the states, common to all networks.
        start: the rows of the states that rollouts start from.
        n_rollout: the number of steps of a rollout.
        loss: the mean loss as a function of the true and the predicted states.
    """

    inputs: Float[Tensor, " n *state"]
    start: Int[Tensor, " n_windows"]
    n_rollout: int
    loss: Loss

    def mean_loss(self, call: Call, loss: Loss, rows: Int[Tensor, " *n"]) -> Tensor:
        start = self.start[rows]
        state, total = self.inputs[start], torch.zeros((), device=start.device)
        for step in range(1, self.n_rollout + 1):
            state = call(state)
            total = total + loss(self.inputs[start + step], state)
        return total / self.n_rollout


def _starts(run: Int[np.ndarray, " n_rows"], n_steps: int) -> Int[Tensor, " _"]:
    """The rows of the run after which at least ``n_steps`` rows of the run follow."""
    return torch.from_numpy(run[: max(0, len(run) - n_steps)])


def _identity(network: nn.Module) -> nn.Module:
    return network


def _seeded(make: Callable[[], nn.Module], random_state: int) -> nn.Module:
    with seeded(random_state):
        return make()
