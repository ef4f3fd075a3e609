"""Fewer trainings than folds. ``docs/cost.md`` reports the effect on the bounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from geoq.arrays import Array
from geoq.quantiles import check_fraction
from geoq.surrogate import Surrogate, TrainSurrogate
from geoq.training.fold_surrogates import Fold, Jobs, evaluate_fold, train_for


def shared_folds(folds: Sequence[Fold], smallest: float) -> list[list[int]]:
    """Sets of folds that share one training, as lists of their places.

    Each fold joins the first set whose common training rows remain at least the fraction ``smallest`` of the training rows of
    each of its folds.
    """
    sets: list[list[int]] = []
    for place in range(len(folds)):
        for places in sets:
            members = [folds[other].training_rows for other in (*places, place)]
            if len(common_rows(members)) >= smallest * max(map(len, members)):
                places.append(place)
                break
        else:
            sets.append([place])
    return sets


def common_rows(subsets: Sequence[Int[Tensor, " _"]]) -> Int[Tensor, " n_common"]:
    """Rows that are in every subset, in ascending order."""
    rows, counts = torch.cat(list(subsets)).unique(return_counts=True)
    shared: Tensor = rows[counts == len(subsets)]
    return shared


@dataclass(frozen=True)
class SharedTraining:
    """A recipe that trains one surrogate for several folds; pass it as ``train_surrogate``.

    The surrogate is trained on the rows that all of these folds leave in. It is therefore not trained on any point that one
    of them holds out. It has fewer training rows than with one training per fold. Its errors are therefore larger, and so are
    the bounds.

    Args:
        train_surrogate: The recipe.
        smallest: Each training has at least this fraction of the training rows of each of its folds. A smaller value gives
            fewer trainings and larger bounds.

    Example:
        With six random folds, three folds share a training on half of the data: two trainings instead of six.

        >>> import numpy as np
        >>> from sklearn.linear_model import Ridge
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = np.sin(6 * x[:, 0])
        >>> recipe = SharedTraining(lambda x, y: Ridge().fit(x, y).predict)
        >>> geoq = GeoQ(recipe(x, y), recipe, folds=RandomFolds(6)).fit(x, y)
    """

    train_surrogate: TrainSurrogate
    smallest: float = 0.5
    pretrained: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fraction(self.smallest, "SharedTraining.smallest")

    def __call__(self, x: Array, y: Array) -> Surrogate:
        return self.train_surrogate(x, y)

    def jobs(self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int) -> Jobs:
        del x, y, n_workers
        return [[fold.number for fold in folds]]

    def predictions(self, x: Array, y: Array, folds: Sequence[Fold]) -> list[Tensor]:
        sets = shared_folds(folds, self.smallest)
        rows = [
            common_rows([folds[p].training_rows for p in places]) for places in sets
        ]
        trained = train_for(folds, self.train_surrogate, x, y, rows)
        predicted = {
            place: evaluate_fold(surrogate, x, folds[place])
            for places, surrogate in zip(sets, trained, strict=True)
            for place in places
        }
        return [predicted[place] for place in range(len(folds))]
