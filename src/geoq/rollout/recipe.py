"""Our own recipe for a surrogate in time: one step first, then rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.arrays import Array, to_tensor
from geoq.training.loop import Training, seeded, train_on
from geoq.training.recipe import (
    STACK_NUMBERS,
    TrainedNetwork,
    TrainNetwork,
    check_output,
    mean_squared_error,
    train_as_one,
)
from geoq.training.stacked import Call, Loss, Member, can_stack


@dataclass(frozen=True)
class TrainRollout:
    r"""A fresh network, trained on one-step pairs and then fine-tuned on rollouts of its own.

    .. math:: \frac1H \sum_{h=1}^H \ell(u_{t+h}, \widehat F^h(u_t))

    Attributes:
        make_network: returns a network with fresh weights, from states to next states.
        loss: mean loss of (u, u_hat).
        training: how the one-step pairs are learned.
        n_rollout: H, steps of the fine-tuning rollouts; windows of them lie inside one segment.
        fine_tuning: how rollouts are learned; its seed is that of ``training``.
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

    def __call__(self, segments: list[Array]) -> TrainedNetwork:
        if not segments:
            raise ValueError("segments is an empty list; pass at least one.")
        tensors = [to_tensor(segment, "segments") for segment in segments]
        places = np.arange(sum(map(len, tensors)))
        ends = np.cumsum([len(tensor) for tensor in tensors])
        return self.train_many(torch.cat(tensors), [np.split(places, ends[:-1])])[0]

    def n_together(self, states: Array) -> int:
        """How many networks are trained as one: as many as keep the memory of a step of either training within bounds."""
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
        """Train networks on these states, each on its own runs of rows, all of them as one where that is possible.

        Each result is that of ``self([states[run] for run in own])``, up to rounding.
        """
        known = to_tensor(states, "states").float()
        for own in runs:
            self.check_lengths([len(run) for run in own])
        networks = self._trained(known, runs, 1, [self._fresh(known)] * len(runs))
        tuned = [partial(_itself, network) for network in networks]
        networks = self._trained(known, runs, self.n_rollout, tuned)
        return [TrainedNetwork(network) for network in networks]

    def _trained(
        self,
        states: Tensor,
        runs: Sequence[Sequence[np.ndarray]],
        n_steps: int,
        makers: Sequence[Callable[[], nn.Module]],
    ) -> list[nn.Module]:
        """What the makers make, trained on rollouts of so many steps: one of pairs, more of fine-tuning."""
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
                train_as_one(members, task, training)
                return networks

        def loss(net: nn.Module, rows: Tensor) -> Tensor:
            return task.mean_loss(net, self.loss, rows)

        networks = []
        for make, (learned, held_out) in zip(makers, rows, strict=True):
            # Initial weights and dropout from one stream, as in every training.
            with seeded(seed):
                networks.append(make())
                train_on(networks[-1], loss, training, learned, held_out)
        return networks

    def _fresh(self, states: Tensor) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            network = self.make_network().to(states.device)
            check_output(network, states[:1], states[:1])
            return network

        return make

    def check_lengths(self, lengths: list[int]) -> None:
        """Refuse segments that hold no rollout."""
        if max(lengths, default=0) <= self.n_rollout:
            raise ValueError(
                f"n_rollout={self.n_rollout}, but the longest of the {len(lengths)} segments left in has "
                f"{max(lengths, default=0)} states; lower n_rollout, or choose folds that cut the trajectories less."
            )

    def with_seed(self, random_state: int) -> "TrainRollout":
        """The same recipe with other initial weights and another order of the batches."""
        return replace(self, training=replace(self.training, random_state=random_state))


@dataclass(frozen=True)
class Windows:
    """States that all networks share, where rollouts start, and the loss of their steps."""

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
    """Rows from which so many steps stay inside the run."""
    return torch.from_numpy(run[: max(0, len(run) - n_steps)])


def _itself(network: nn.Module) -> nn.Module:
    return network


def _seeded(make: Callable[[], nn.Module], random_state: int) -> nn.Module:
    with seeded(random_state):
        return make()
