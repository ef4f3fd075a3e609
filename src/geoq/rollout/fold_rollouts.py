"""Rollouts of fold surrogates, as jobs like any fold's predictions: kept in a checkpoint, sent to other workers.

To ``fold_surrogates`` the states of all trajectories are x, the numbers of their trajectories are y, and a fold is asked
about the held-out states that its rollouts start from.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from geoq.fold_surrogates import Fold, TrainedFolds
from geoq.rollout.trajectories import TrainStepper, Trajectories, roll_out
from geoq.surrogate import TRAINED, Array, Surrogate, check_callable, take, to_tensor


@dataclass(frozen=True)
class FreshRollouts:
    """One training per fold on the pieces of trajectories that it leaves in, then the fold's rollouts."""

    train_surrogate: TrainStepper
    n_steps: int
    limit: Float[Tensor, " *state"]

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del x, y, n_workers
        return with_starts(folds)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        trajectories = Trajectories(x, to_tensor(y, "y").cpu().numpy())

        def answer(fold: Fold) -> Tensor:
            surrogate = trained(
                self.train_surrogate,
                trajectories,
                fold.seen,
                f"the surrogate of {fold}",
            )
            return rolled_out(surrogate, x, fold, self.n_steps, self.limit)

        return [answer(fold) for fold in folds]


@dataclass(frozen=True)
class TrainedRollouts(TrainedFolds):
    """Rollouts of fold surrogates that were trained elsewhere."""

    n_steps: int
    limit: Float[Tensor, " *state"]

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        super().groups(x, y, folds, n_workers)  # refuses too few surrogates
        return with_starts(folds)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        del y
        return [
            rolled_out(self.surrogates[fold.number], x, fold, self.n_steps, self.limit)
            for fold in folds
        ]


def with_starts(folds: Sequence[Fold]) -> list[list[int]]:
    """Each fold that has a rollout on its own; the others need no training."""
    return [[fold.number] for fold in folds if len(fold.asked)]


def rolled_out(
    surrogate: Surrogate, states: Array, fold: Fold, n_steps: int, limit: Tensor
) -> Float[Tensor, " n_starts n_times *state"]:
    """The fold's rollouts from the states it is asked about."""
    with noting(f"while rolling out the surrogate of {fold}"):
        return roll_out(surrogate, take(states, fold.asked), n_steps, limit)


def trained(
    train_surrogate: TrainStepper, trajectories: Trajectories, rows: Tensor, what: str
) -> Surrogate:
    """A surrogate trained on the contiguous pieces of these rows."""
    with noting(f"while training {what}"):
        surrogate = train_surrogate(trajectories.segments(rows.numpy()))
        check_callable(surrogate, TRAINED)
    return surrogate


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Exceptions of user code keep their type and gain a note."""
    try:
        yield
    except Exception as exc:
        exc.add_note(note)
        raise
