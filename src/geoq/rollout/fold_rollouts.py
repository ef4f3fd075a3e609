"""Rollouts of fold surrogates, as jobs like any fold's predictions: kept in a checkpoint, sent to other workers.

To ``fold_surrogates`` the states of all trajectories are x, the numbers of their trajectories are y, and a fold is asked
about the held-out states that its rollouts start from.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from geoq.fold_surrogates import Fold, TrainedFolds, in_groups, one_by_one, whose
from geoq.rollout.trajectories import (
    TrainStepper,
    TrainSteppersTogether,
    Trajectories,
    roll_out,
)
from geoq.surrogate import TRAINED, Array, Surrogate, check_callable, take, to_tensor


@dataclass(frozen=True)
class FreshRollouts:
    """One training per fold on the pieces of trajectories that it leaves in, then the fold's rollouts.

    Trained together where the recipe knows how, otherwise one by one.
    """

    train_surrogate: TrainStepper
    n_steps: int
    limit: Float[Tensor, " *state"]

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        asked = [fold for fold in folds if len(fold.asked)]
        if not isinstance(self.train_surrogate, TrainSteppersTogether):
            return one_by_one(asked)
        segments = _trajectories(x, y).segments(asked[0].seen.numpy())
        return in_groups(asked, self.train_surrogate.n_together(segments), n_workers)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        surrogates = trained(
            self.train_surrogate,
            _trajectories(x, y),
            [fold.seen for fold in folds],
            whose(folds),
        )
        return [
            rolled_out(surrogate, x, fold, self.n_steps, self.limit)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]


@dataclass(frozen=True)
class TrainedRollouts(TrainedFolds):
    """Rollouts of fold surrogates that were trained elsewhere."""

    n_steps: int
    limit: Float[Tensor, " *state"]

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        super().groups(x, y, folds, n_workers)  # refuses too few surrogates
        return one_by_one([fold for fold in folds if len(fold.asked)])

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        del y
        return [
            rolled_out(self.surrogates[fold.number], x, fold, self.n_steps, self.limit)
            for fold in folds
        ]


def _trajectories(x: Array, y: Array) -> Trajectories:
    return Trajectories(x, to_tensor(y, "y").cpu().numpy())


def rolled_out(
    surrogate: Surrogate, states: Array, fold: Fold, n_steps: int, limit: Tensor
) -> Float[Tensor, " n_starts n_times *state"]:
    """The fold's rollouts from the states it is asked about."""
    with noting(f"while rolling out the surrogate of {fold}"):
        return roll_out(surrogate, take(states, fold.asked), n_steps, limit)


def trained(
    train_surrogate: TrainStepper,
    trajectories: Trajectories,
    subsets: Sequence[Tensor],
    what: str,
) -> list[Surrogate]:
    """A surrogate for each subset of the rows, trained on its contiguous pieces."""
    pieces = [trajectories.segments(rows.numpy()) for rows in subsets]
    with noting(f"while training {what}"):
        surrogates = (
            list(train_surrogate.train_many(pieces))
            if len(pieces) > 1 and isinstance(train_surrogate, TrainSteppersTogether)
            else [train_surrogate(segments) for segments in pieces]
        )
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
    return surrogates


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Exceptions of user code keep their type and gain a note."""
    try:
        yield
    except Exception as exc:
        exc.add_note(note)
        raise
