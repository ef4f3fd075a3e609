"""Fewer trainings than folds; ``docs/cost.md`` reports what this costs in quality."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from geoq.arrays import Array
from geoq.surrogate import Surrogate, TrainSurrogate
from geoq.training.fold_surrogates import Fold, ask, train_each


def shared_folds(folds: Sequence[Fold], smallest: float) -> list[list[int]]:
    """Positions of folds that can share one training, on the rows that all of them leave in.

    A fold joins the first set in which the common rows remain at least the fraction ``smallest`` of the rows that any
    member leaves in.
    """
    found: list[list[int]] = []
    for place, fold in enumerate(folds):
        for places in found:
            members = [folds[other].seen for other in places] + [fold.seen]
            if len(common(members)) >= smallest * max(map(len, members)):
                places.append(place)
                break
        else:
            found.append([place])
    return found


def common(subsets: Sequence[Int[Tensor, " _"]]) -> Int[Tensor, " n_common"]:
    """Rows that are in every subset, in ascending order."""
    rows, counts = torch.cat(list(subsets)).unique(return_counts=True)
    shared: Tensor = rows[counts == len(subsets)]
    return shared


@dataclass(frozen=True)
class SharedTraining:
    """A recipe that trains one surrogate for several folds, to be passed as ``train_surrogate``.

    The surrogate is trained on the rows that all of these folds leave in, so it has not seen any point that they hold out.
    It is trained on fewer rows than with one training per fold, so its errors, and with them the bounds, are larger.

    Attributes:
        train_surrogate: the recipe.
        smallest: the training has at least this fraction of the rows of each of its folds.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> recipe = SharedTraining(lambda x, y: Ridge().fit(x, y).predict, smallest=0.5)
    """

    train_surrogate: TrainSurrogate
    smallest: float = 0.5
    pretrained: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= 1:
            raise ValueError(
                f"SharedTraining(smallest={self.smallest}): smallest must be a fraction above 0 and at most 1."
            )

    def __call__(self, x: Array, y: Array) -> Surrogate:
        return self.train_surrogate(x, y)

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del x, y, n_workers
        return [[fold.number for fold in folds]]

    def predictions(self, x: Array, y: Array, folds: Sequence[Fold]) -> list[Tensor]:
        found = shared_folds(folds, self.smallest)
        rows = [common([folds[place].seen for place in places]) for places in found]
        trained = train_each(self.train_surrogate, x, y, rows)
        surrogate_of = {
            place: surrogate
            for places, surrogate in zip(found, trained, strict=True)
            for place in places
        }
        return [ask(surrogate_of[place], x, fold) for place, fold in enumerate(folds)]
