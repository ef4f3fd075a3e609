"""Rollouts of fold surrogates, as jobs like any fold's predictions: kept in a checkpoint, sent to other workers.

To ``fold_surrogates`` the states of all trajectories are x, the numbers of their trajectories are y, and a fold is asked
about the held-out states that its rollouts start from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, take
from geoq.checks import TRAINED, add_note_on_error, check_callable
from geoq.rollout.trajectories import (
    TrainStepper,
    TrainSteppersTogether,
    Trajectories,
    roll_out,
)
from geoq.surrogate import Surrogate
from geoq.training.fold_surrogates import (
    Fold,
    TrainedFolds,
    describe_folds,
    in_jobs,
    one_by_one,
)


@dataclass(frozen=True)
class FreshRollouts:
    """One training per fold on the pieces of trajectories that it leaves in, then the fold's rollouts.

    Trained together where the recipe knows how, otherwise one by one.
    """

    train_surrogate: TrainStepper
    n_steps: int
    limit: Float[Tensor, " *state"]
    pretrained: ClassVar[bool] = False

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del y
        if not isinstance(self.train_surrogate, TrainSteppersTogether):
            return one_by_one(folds)
        with add_note_on_error(
            f"while asking {type(self.train_surrogate).__name__} how to train"
        ):
            n_together = self.train_surrogate.n_together(x)
        return in_jobs(folds, n_together, n_workers)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        surrogates = trained(
            self.train_surrogate,
            Trajectories(x, np.asarray(y)),
            [fold.seen for fold in folds],
            describe_folds(folds),
        )
        return [
            rolled_out(surrogate, x, fold, self.n_steps, self.limit)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]


@dataclass(frozen=True)
class TrainedRollouts:
    """Rollouts of fold surrogates that were trained elsewhere."""

    folds: TrainedFolds
    n_steps: int
    limit: Float[Tensor, " *state"]
    pretrained: ClassVar[bool] = True

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        return self.folds.jobs(x, y, folds, n_workers)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        del y
        surrogates = self.folds.surrogates
        return [
            rolled_out(surrogates[fold.number], x, fold, self.n_steps, self.limit)
            for fold in folds
        ]


def rolled_out(
    surrogate: Surrogate, states: Array, fold: Fold, n_steps: int, limit: Tensor
) -> Float[Tensor, " n_starts n_times *state"]:
    """The fold's rollouts from the states it is asked about."""
    with add_note_on_error(f"while rolling out the surrogate of {fold}"):
        return roll_out(surrogate, take(states, fold.asked), n_steps, limit)


def trained(
    train_surrogate: TrainStepper,
    trajectories: Trajectories,
    subsets: Sequence[Tensor],
    what: str,
) -> list[Surrogate]:
    """A surrogate for each subset of the rows, trained on its contiguous pieces."""
    kept = [rows.numpy() for rows in subsets]
    with add_note_on_error(f"while training {what}"):
        if len(kept) > 1 and isinstance(train_surrogate, TrainSteppersTogether):
            runs = [trajectories.runs(rows) for rows in kept]
            surrogates = list(train_surrogate.train_many(trajectories.states, runs))
        else:
            surrogates = [train_surrogate(trajectories.segments(rows)) for rows in kept]
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
    return surrogates
