"""Our own recipe for a surrogate in time: one step first, then rollouts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from geoq.surrogate import Array, to_tensor
from geoq.training import (
    TrainedNetwork,
    Training,
    TrainNetwork,
    mean_squared_error,
    seeded,
    train,
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
        tensors = [to_tensor(segment, "segments").float() for segment in segments]
        states = torch.cat(tensors)
        lengths = [len(tensor) for tensor in tensors]
        windows = _starts(lengths, self.n_rollout).to(states.device)
        if not len(windows):
            raise ValueError(
                f"n_rollout={self.n_rollout}, but the longest of the {len(lengths)} segments left in has "
                f"{max(lengths)} states; lower n_rollout, or choose folds that cut the trajectories less."
            )
        pairs = _starts(lengths, 1).to(states.device)
        one_step = TrainNetwork(self.make_network, self.loss, self.training)
        network = one_step(states[pairs], states[pairs + 1]).network

        def loss(net: nn.Module, rows: Tensor) -> Tensor:
            state, total = states[windows[rows]], torch.zeros((), device=states.device)
            for step in range(1, self.n_rollout + 1):
                state = net(state)
                total = total + self.loss(states[windows[rows] + step], state)
            return total / self.n_rollout

        fine_tuning = replace(self.fine_tuning, random_state=self.training.random_state)
        with seeded(self.training.random_state):
            units = torch.arange(len(windows), device=states.device)
            train(network, loss, fine_tuning, units)
        return TrainedNetwork(network)

    def with_seed(self, random_state: int) -> "TrainRollout":
        """The same recipe with other initial weights and another order of the batches."""
        return replace(self, training=replace(self.training, random_state=random_state))


def _starts(lengths: list[int], n_steps: int) -> Tensor:
    """Rows from which so many steps stay inside their segment, the segments lying one below the other."""
    first = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return torch.cat(
        [
            torch.arange(start, start + max(0, length - n_steps))
            for start, length in zip(first, lengths, strict=False)
        ]
    )
