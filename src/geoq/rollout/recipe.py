"""Our own recipe for a surrogate in time: one step first, then rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.stacked import Call, Loss, Member, can_stack
from geoq.surrogate import Array, to_tensor
from geoq.training import (
    STACK_NUMBERS,
    TrainedNetwork,
    Training,
    TrainNetwork,
    mean_squared_error,
    seeded,
    train_as_one,
    train_on,
)


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
        return self.train_many([segments])[0]

    def n_together(self, segments: list[Array]) -> int:
        """How many networks are trained as one: as many as keep the memory of a step of either training within bounds."""
        if self.fine_tuning.n_decays:
            return 1
        state = segments[0][:1]
        row = 2 * self.n_rollout * to_tensor(state, "segments").numel()
        n_windows = STACK_NUMBERS // max(1, row * self.fine_tuning.batch_size)
        return max(1, min(n_windows, self._one_step.n_together(state, state)))

    def train_many(self, pieces: Sequence[list[Array]]) -> list[TrainedNetwork]:
        """Train a network on each list of segments, all of them as one where that is possible.

        Each result is that of ``self(segments)``, up to rounding.
        """
        of_each = [
            [to_tensor(segment, "segments").float() for segment in segments]
            for segments in pieces
        ]
        lengths = [[len(segment) for segment in segments] for segments in of_each]
        for own in lengths:
            self._check_windows(own)
        states = torch.cat([torch.cat(segments) for segments in of_each])
        first = torch.tensor([0, *map(sum, lengths)]).cumsum(0).tolist()

        def starts(n_steps: int) -> list[Tensor]:
            """Of each network, as rows of all states."""
            return [
                (_starts(own, n_steps) + place).to(states.device)
                for own, place in zip(lengths, first, strict=False)
            ]

        pairs = starts(1)
        trained = self._one_step.train_many(
            states[torch.cat(pairs)], states[torch.cat(pairs) + 1], _numbered(pairs)
        )
        self._fine_tune(
            [one.network for one in trained], states, starts(self.n_rollout)
        )
        return trained

    def _fine_tune(
        self, networks: list[nn.Module], states: Tensor, windows: list[Tensor]
    ) -> None:
        seed = self.training.random_state
        training = replace(self.fine_tuning, random_state=seed)
        task = Windows(states, torch.cat(windows), self.n_rollout, self.loss)
        members = []
        for network, rows in zip(networks, _numbered(windows), strict=True):
            places = torch.arange(len(rows), device=states.device)
            learned, held_out = (rows[part] for part in training.hold_out(places))
            members.append(Member(network, learned, held_out, seed))
        together = len(members) > 1 and not training.n_decays
        if together and can_stack(networks[0], task):
            train_as_one(members, task, training)
            return

        def loss(net: nn.Module, rows: Tensor) -> Tensor:
            return task.mean_loss(net, self.loss, rows)

        for member in members:
            learned, held_out = member.training_rows, member.validation_rows
            with seeded(seed):
                train_on(member.network, loss, training, learned, held_out)

    @property
    def _one_step(self) -> TrainNetwork:
        return TrainNetwork(self.make_network, self.loss, self.training)

    def _check_windows(self, lengths: list[int]) -> None:
        if max(lengths) <= self.n_rollout:
            raise ValueError(
                f"n_rollout={self.n_rollout}, but the longest of the {len(lengths)} segments left in has "
                f"{max(lengths)} states; lower n_rollout, or choose folds that cut the trajectories less."
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


def _numbered(parts: list[Tensor]) -> list[Tensor]:
    """Numbers of the rows of each part, the parts lying one below the other."""
    everything = torch.arange(sum(map(len, parts)), device=parts[0].device)
    numbers: list[Tensor] = list(everything.split([len(part) for part in parts]))
    return numbers


def _starts(lengths: list[int], n_steps: int) -> Tensor:
    """Rows from which so many steps stay inside their segment, the segments lying one below the other."""
    first = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return torch.cat(
        [
            torch.arange(start, start + max(0, length - n_steps))
            for start, length in zip(first, lengths, strict=False)
        ]
    )
