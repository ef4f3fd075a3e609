"""A ready-made recipe for a surrogate of one time step: a network, trained on single steps and then on rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.arrays import Array, restore, to_tensor
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
        make_network: a function that returns a network with new weights, from states to next states. With forcing, the
            network receives the state and the forcing joined along the first axis of the state.
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
    training: Training = Training()
    n_rollout: int = 8
    fine_tuning: Training = Training(n_steps=500, learning_rate=3e-4, check_every=50)

    def __post_init__(self) -> None:
        check_recipe(self.make_network, self.loss, self.training)
        check_integer(self.n_rollout, "n_rollout", 1)
        check_object(self.fine_tuning, Training, "fine_tuning", "Training(n_steps=500)")

    def __call__(
        self, segments: Sequence[Array | tuple[Array, Array]]
    ) -> "TrainedNetwork | ForcedNetwork":
        if not segments:
            raise ValueError("segments is an empty list; pass at least one segment.")
        pairs = [s if isinstance(s, tuple) else (s,) for s in segments]
        tensors = [with_forcing(*pair) for pair in pairs]
        places = np.arange(sum(map(len, tensors)))
        ends = np.cumsum([len(tensor) for tensor in tensors])
        runs = [np.split(places, ends[:-1])]
        n_forcing = tensors[0].shape[1] - pairs[0][0].shape[1]
        network = self._networks(torch.cat(tensors), runs, n_forcing)[0]
        return ForcedNetwork(network) if n_forcing else network

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
        """Train one network for each list of runs of consecutive rows, all networks together where that is possible.

        Up to rounding, network i equals ``self([states[run] for run in runs[i]])``.
        """
        return self._networks(to_tensor(states, "states"), runs, 0)

    def _networks(
        self, states: Tensor, runs: Sequence[Sequence[np.ndarray]], n_forcing: int
    ) -> list[TrainedNetwork]:
        inputs = states.float()
        for own in runs:
            self.check_lengths([len(run) for run in own])
        task = Windows(inputs, torch.arange(0), 1, self.loss, n_forcing)
        networks = self._trained(task, runs, lambda _: self._fresh(task))
        task = replace(task, n_rollout=self.n_rollout)
        networks = self._trained(task, runs, networks.__getitem__)
        return [TrainedNetwork(network) for network in networks]

    def _trained(
        self,
        task: "Windows",
        runs: Sequence[Sequence[np.ndarray]],
        make: Callable[[int], nn.Module],
    ) -> list[nn.Module]:
        """Make the networks and train them on rollouts: pairs if these have one step, otherwise fine-tuning."""
        states, n_steps = task.inputs, task.n_rollout
        seed = self.training.random_state
        training = self.training if n_steps == 1 else self.fine_tuning
        training = replace(training, random_state=seed)
        starts = [torch.cat([_starts(run, n_steps) for run in own]) for own in runs]
        task = replace(task, start=torch.cat(starts).to(states.device))
        places = torch.arange(len(task.start), device=states.device)
        rows = [
            [own[part] for part in training.hold_out(torch.arange(len(own)).to(own))]
            for own in places.split([len(start) for start in starts])
        ]
        networks: list[nn.Module] = []
        if len(runs) > 1 and not training.n_decays:
            for number in range(len(runs)):
                with seeded(seed):
                    networks.append(make(number))
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
        for number, (learned, held_out) in enumerate(rows):
            # Initial weights and dropout use the same random numbers one after the other, as in every training.
            with seeded(seed):
                networks.append(make(number))
                train_on(networks[-1], loss, training, learned, held_out)
        return networks

    def _fresh(self, task: "Windows") -> nn.Module:
        rows = task.inputs[:1]
        network = made_by(self.make_network).to(rows.device)
        check_network(network, self.make_network, rows, task.split(rows)[0])
        return network

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
    """The training task of rollouts: the mean loss over the steps of a rollout that starts from a row of the inputs.

    The inputs are the states, followed by their forcing along the first axis of a state, where it has the length ``n_forcing``.
    """

    inputs: Float[Tensor, " n *state"]
    start: Int[Tensor, " n_windows"]
    n_rollout: int
    loss: Loss
    n_forcing: int = 0

    def split(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The states and their forcing; several networks add dimensions before the samples."""
        sizes = [self.inputs.shape[1] - self.n_forcing, self.n_forcing]
        states, forcing = inputs.split(sizes, dim=1 - self.inputs.ndim)
        return states, forcing

    def mean_loss(self, call: Call, loss: Loss, rows: Int[Tensor, " *n"]) -> Tensor:
        start = self.start[rows]
        state, total = self.inputs[start], torch.zeros((), device=start.device)
        for step in range(1, self.n_rollout + 1):
            truth, forcing = self.split(self.inputs[start + step])
            state = call(state)
            total = total + loss(truth, state)
            if self.n_forcing:
                state = torch.cat([state, forcing], dim=1 - self.inputs.ndim)
        return total / self.n_rollout


@dataclass(frozen=True)
class ForcedNetwork:
    """A trained network as a step(states, forcing)."""

    network: TrainedNetwork

    def __call__(self, states: Array, forcing: Array) -> Array:
        return self.network(restore(with_forcing(states, forcing), states))


def with_forcing(states: Array, *forcing: Array) -> Tensor:
    """States and their forcing joined along the first axis of the state."""
    parts = [to_tensor(part, "segments") for part in (states, *forcing)]
    if parts[-1].shape[2:] != parts[0].shape[2:]:
        raise ValueError(
            f"the forcing has shape {tuple(parts[-1].shape[1:])} per state, but states have shape {tuple(parts[0].shape[1:])}; "
            "TrainRollout joins them along the first axis, so the other axes must be equal."
        )
    return torch.cat(parts, dim=1)


def _starts(run: Int[np.ndarray, " n_rows"], n_steps: int) -> Int[Tensor, " _"]:
    """The rows of the run after which at least ``n_steps`` rows of the run follow."""
    return torch.from_numpy(run[: max(0, len(run) - n_steps)])
