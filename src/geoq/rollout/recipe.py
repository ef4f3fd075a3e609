"""A ready-made recipe for a surrogate of one time step: a network, trained on single steps and then on rollouts (with torch)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from geoq.arrays import is_tensor
from geoq.checks import check_integer, check_object
from geoq.training.loop import Call, Loss, Task, Training, can_stack, seeded, train, train_together
from geoq.training.recipe import (
    STACK_NUMBERS,
    TrainedNetwork,
    TrainNetwork,
    check_network,
    check_recipe,
    mean_squared_error,
    single,
)


@dataclass(frozen=True)
class TrainRollout:
    r"""Train a new network on one-step pairs and then fine-tune it on its own rollouts, as the paper does.

    .. math:: \frac1H \sum_{h=1}^H \ell(u_{t+h}, \widehat F^h(u_t))

    Attributes:
        make_network: a function that returns a network with new weights, from states to next states. With forcing, the network
            receives the state and the forcing joined along the first axis of the state.
        loss: the mean loss as a function of the true and the predicted states.
        training: the training on one-step pairs.
        n_rollout: H, the number of steps of the fine-tuning rollouts. Each rollout is compared with the states of one segment.
        fine_tuning: the training on rollouts; it uses the seed of ``training``.

    Example:
        >>> from geoq import MLP, Training
        >>> few = {"training": Training(n_steps=20), "n_rollout": 3, "fine_tuning": Training(n_steps=10)}
        >>> recipe = TrainRollout(lambda: MLP(2, 2, hidden=(8,)), **few)
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

    def __call__(self, segments: Sequence[Any]) -> Any:
        if not segments:
            raise ValueError("segments is an empty list; pass at least one segment.")
        pairs = [s if isinstance(s, tuple) else (s,) for s in segments]
        tensors = [with_forcing(*pair) for pair in pairs]
        ends = np.cumsum([len(tensor) for tensor in tensors])
        runs = np.split(np.arange(ends[-1]), ends[:-1])
        n_forcing = tensors[0].shape[1] - pairs[0][0].shape[1]
        network: Any = None
        for task, training, rows in self._stages(torch.cat(tensors), [runs], n_forcing):
            # Initial weights and dropout use the same random numbers one after the other, as in every training.
            with seeded(training.random_state):
                network = network or self._new_network(task.inputs, n_forcing)
                train(network, task.loss_of, training, *rows[0])
        trained = TrainedNetwork(network)
        return partial(_forced, trained) if n_forcing else trained

    def n_together(self, states: Any) -> int:
        """How many networks to train together, so that the memory of a training step stays small in both trainings."""
        if self.fine_tuning.n_decays:
            return 1
        row = 2 * self.n_rollout * int(np.prod(states.shape[1:]))
        n_windows = STACK_NUMBERS // max(1, row * self.fine_tuning.batch_size)
        one_step = TrainNetwork(self.make_network, self.loss, self.training)
        return max(1, min(n_windows, one_step.n_together(states[:1], states[:1])))

    def train_many(self, states: Any, runs: Sequence[Sequence[Int[np.ndarray, " _"]]]) -> list[Any]:
        """Train one network for each list of runs of consecutive rows, all networks together where that is possible.

        Up to rounding, network i equals ``self([states[run] for run in runs[i]])``.
        """
        stages, networks = list(self._stages(single(states, "states"), runs, 0)), []
        for _ in runs:
            with seeded(self.training.random_state):
                networks.append(self._new_network(stages[0][0].inputs, 0))
        n_decays = self.training.n_decays + self.fine_tuning.n_decays
        if len(runs) < 2 or n_decays or not can_stack(networks[0], stages[0][0]):
            return [self([states[run] for run in own]) for own in runs]
        for task, training, rows in stages:
            train_together(networks, rows, [training.random_state] * len(runs), task, training)
        return [TrainedNetwork(network) for network in networks]

    def _stages(
        self, inputs: Tensor, runs: Sequence[Sequence[np.ndarray]], n_forcing: int
    ) -> Iterator[tuple[Task, Training, list[tuple[Tensor, Tensor]]]]:
        """The trainings on pairs and on rollouts, and for each network the rows whose rollouts it is trained on and holds out."""
        for own in runs:
            self.check_lengths([len(run) for run in own])
        for n_steps, given in ((1, self.training), (self.n_rollout, self.fine_tuning)):
            training = replace(given, random_state=self.training.random_state)
            rows = []
            for own in runs:
                # The rows after which enough rows of their run follow.
                starts = np.concatenate([run[: max(0, len(run) - n_steps)] for run in own])
                places = torch.from_numpy(starts).to(inputs.device)
                learned, held_out = training.hold_out(torch.arange(len(places)).to(places))
                rows.append((places[learned], places[held_out]))
            yield rollout_task(inputs, n_steps, self.loss, n_forcing), training, rows

    def _new_network(self, inputs: Tensor, n_forcing: int) -> nn.Module:
        rows = inputs[:1]
        network = self.make_network().to(rows.device)
        check_network(network, self.make_network, rows, split(rows, rows.ndim, n_forcing)[0])
        return network

    def check_lengths(self, lengths: list[int]) -> None:
        """Raise if all segments are too short for a fine-tuning rollout."""
        longest = max(lengths, default=0)
        if longest <= self.n_rollout:
            raise ValueError(
                f"n_rollout={self.n_rollout}, but the longest of the {len(lengths)} training segments has only {longest} states; "
                "lower n_rollout, or choose folds that leave longer segments."
            )


def rollout_task(inputs: Tensor, n_rollout: int, loss: Loss, n_forcing: int = 0) -> Task:
    """The mean loss over the steps of rollouts from rows of the inputs: states, then their forcing along the first axis."""

    def mean_loss(call: Call, loss: Loss, rows: Tensor) -> Tensor:
        state, total = inputs[rows], torch.zeros((), device=rows.device)
        for step in range(1, n_rollout + 1):
            truth, forcing = split(inputs[rows + step], inputs.ndim, n_forcing)
            state = call(state)
            total = total + loss(truth, state)
            if n_forcing:
                state = torch.cat([state, forcing], dim=1 - inputs.ndim)
        return total / n_rollout

    return Task(inputs, loss, mean_loss)


def split(rows: Tensor, n_dims: int, n_forcing: int) -> tuple[Tensor, Tensor]:
    """The states and their forcing; several networks add dimensions before the samples."""
    axis = 1 - n_dims
    states, forcing = rows.split([rows.shape[axis] - n_forcing, n_forcing], dim=axis)
    return states, forcing


def _forced(network: TrainedNetwork, states: Any, forcing: Any) -> Any:
    """The step(states, forcing) of a trained network."""
    rows = with_forcing(states, forcing)
    return network(rows if is_tensor(states) else rows.numpy())


def with_forcing(states: Any, *forcing: Any) -> Tensor:
    """States and their forcing joined along the first axis of the state."""
    parts = [single(part, "segments") for part in (states, *forcing)]
    if parts[-1].shape[2:] != parts[0].shape[2:]:
        raise ValueError(
            f"the forcing has shape {tuple(parts[-1].shape[1:])} per state, but states have shape {tuple(parts[0].shape[1:])}; "
            "TrainRollout joins them along the first axis, so the other axes must be equal."
        )
    return torch.cat(parts, dim=1)
