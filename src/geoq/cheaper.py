"""Fewer trainings than folds, for those who cannot pay them all; ``docs/cost.md`` says what each costs in quality.

Each is passed in place of ``train_surrogate``, and none is a default. What they share with one training per fold is
that no surrogate has seen the points it is judged on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from geoq.fold_surrogates import Fold, ask, train_each
from geoq.neighbors import Neighbors
from geoq.representation import Standardization
from geoq.stacked import chain
from geoq.surrogate import (
    Array,
    Surrogate,
    TrainSurrogate,
    evaluate,
    take,
    to_tensor,
)
from geoq.training import TrainedNetwork


def shares(folds: Sequence[Fold], smallest: float) -> list[list[int]]:
    """Places of folds that can share a training, on the rows that all of them leave in.

    A fold joins the first share in which the common rows stay at least ``smallest`` of what any member leaves in.
    """
    found: list[list[int]] = []
    for place, fold in enumerate(folds):
        for share in found:
            members = [folds[other].seen for other in share] + [fold.seen]
            if len(common(members)) >= smallest * max(map(len, members)):
                share.append(place)
                break
        else:
            found.append([place])
    return found


def common(subsets: Sequence[Int[Tensor, " _"]]) -> Int[Tensor, " n_common"]:
    """Rows that are in every subset, in ascending order."""
    rows, counts = torch.cat(list(subsets)).unique(return_counts=True)
    shared: Tensor = rows[counts == len(subsets)]
    return shared


def _check_share(smallest: float, name: str) -> None:
    if not 0 < smallest <= 1:
        raise ValueError(
            f"{name}(smallest={smallest}), but it is a share of a fold's rows; choose above 0 and at most 1."
        )


@dataclass(frozen=True)
class SharedTraining:
    """One training serves several folds: on the rows that all of them leave in, so that it has seen none held out.

    Its surrogates know less than those of one training per fold, so the bounds are rather too large.

    Attributes:
        train_surrogate: the recipe.
        smallest: share of a fold's rows that the training has at least.
    """

    train_surrogate: TrainSurrogate
    smallest: float = 0.5

    def __post_init__(self) -> None:
        _check_share(self.smallest, type(self).__name__)

    def __call__(self, x: Array, y: Array) -> Surrogate:
        return self.train_surrogate(x, y)

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del x, y, n_workers
        return [[fold.number for fold in folds]]

    def predictions(self, x: Array, y: Array, folds: Sequence[Fold]) -> list[Tensor]:
        found = shares(folds, self.smallest)
        rows = [common([folds[place].seen for place in share]) for share in found]
        trained = train_each(self.train_surrogate, x, y, rows)
        answers: dict[int, Tensor] = {}
        for share, surrogate in zip(found, trained, strict=True):
            served = [folds[place] for place in share]
            answers |= zip(share, self._answers(surrogate, x, y, served), strict=True)
        return [answers[place] for place in range(len(folds))]

    def _answers(
        self, surrogate: Surrogate, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Tensor]:
        """What a shared surrogate predicts for each of the folds it serves."""
        del y
        return [ask(surrogate, x, fold) for fold in folds]


@dataclass(frozen=True)
class RefittedHead(SharedTraining):
    """The last layer refitted for each fold, by least squares, on an encoder that did not see the fold.

    Encoders are shared between folds as in ``SharedTraining``; the last layer is fitted to all that the fold leaves in.

    Attributes:
        train_surrogate: a recipe for a plain sequence of layers, such as ``MLP``, that ends in a linear one.
        smallest: share of a fold's rows that the encoder was trained on at least.
        penalty: of the squared weights, in units of the mean square of the encoder's outputs.
    """

    penalty: float = 1e-6

    def _answers(
        self, surrogate: Surrogate, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Tensor]:
        targets = to_tensor(y, "y")
        z = _before_the_last(surrogate, x)
        answers = []
        for fold in folds:
            seen, asked = (part.to(z.device) for part in (fold.seen, fold.asked))
            head = _least_squares(z[seen], targets[seen], self.penalty)
            answers.append((_with_one(z[asked]) @ head).to(targets))
        return answers


def _before_the_last(surrogate: Surrogate, x: Array) -> Float[Tensor, " n n_features"]:
    """What goes into the last layer of the network, in double precision."""
    assert isinstance(surrogate, TrainedNetwork)
    layers = chain(surrogate.network)
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise TypeError(
            f"RefittedHead knows plain sequences of layers that end in a linear one, got "
            f"{type(surrogate.network).__name__}; pass a recipe for an MLP, or SharedTraining."
        )
    encoder = TrainedNetwork(nn.Sequential(*layers[:-1]))
    return evaluate(encoder, x, "the encoder").double()


def _with_one(z: Float[Tensor, " n n_features"]) -> Float[Tensor, " n n_columns"]:
    return torch.cat([z, torch.ones_like(z[:, :1])], dim=1)


def _least_squares(
    z: Float[Tensor, " n n_features"], y: Float[Tensor, " n n_outputs"], penalty: float
) -> Float[Tensor, " n_columns n_outputs"]:
    design = _with_one(z)
    square = design.T @ design
    square.diagonal()[:-1].add_(penalty * square.diagonal()[:-1].mean())
    solution: Tensor = torch.linalg.solve(square, design.T @ y.double())
    return solution


@dataclass(frozen=True)
class SkippedFolds:
    """Only every n-th fold is trained; the held-out errors of the others are predicted from those.

    A held-out point of a fold that was skipped gets the error that the trained folds made at the most similar distance
    to the data; where a surrogate would have seen the point, the deployed one answers.

    Attributes:
        train_surrogate: the recipe.
        surrogate: the deployed surrogate.
        every: one fold of so many is trained.
    """

    train_surrogate: TrainSurrogate
    surrogate: Surrogate
    every: int = 2

    def __post_init__(self) -> None:
        if self.every < 2:
            raise ValueError(
                f"SkippedFolds(every={self.every}) skips none; choose 2 or more, or pass the recipe itself."
            )

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del x, y, n_workers
        return [[fold.number for fold in folds]]

    def predictions(self, x: Array, y: Array, folds: Sequence[Fold]) -> list[Tensor]:
        targets, deployed = to_tensor(y, "y"), evaluate(self.surrogate, x, "surrogate")
        answers: list[Tensor] = [deployed[f.asked.to(deployed.device)] for f in folds]
        trained = folds[:: self.every]
        surrogates = train_each(
            self.train_surrogate, x, y, [fold.seen for fold in trained]
        )
        distances, errors = [], []
        places = {fold.number: place for place, fold in enumerate(folds)}
        for surrogate, fold in zip(surrogates, trained, strict=True):
            answers[places[fold.number]] = answer = ask(surrogate, x, fold)
            unseen = ~torch.isin(fold.asked, fold.seen).to(answer.device)
            distances.append(self._distance(x, fold))
            reference = to_tensor(take(y, fold.asked), "y").to(answer)
            errors.append((answer - reference)[unseen])
        numbers = {fold.number for fold in trained}
        known = Neighbors(torch.cat(distances)[:, None])
        error = torch.cat(errors)
        for fold, answer in zip(folds, answers, strict=True):
            if fold.number in numbers:
                continue
            unseen = ~torch.isin(fold.asked, fold.seen).to(answer.device)
            _, alike = known.nearest(self._distance(x, fold)[:, None], 1)
            rows = fold.asked.to(targets.device)[unseen.to(targets.device)]
            answer[unseen] = targets[rows].to(answer) + error[alike[:, 0]].to(answer)
        return answers

    @staticmethod
    def _distance(x: Array, fold: Fold) -> Float[Tensor, " n_unseen"]:
        """Distance of each held-out point to the nearest that the fold leaves in, in standardised inputs."""
        points = to_tensor(x, "x").reshape(len(x), -1)
        seen, asked = (part.to(points.device) for part in (fold.seen, fold.asked))
        normalization = Standardization.fit(points)
        unseen = asked[~torch.isin(asked, seen)]
        cloud = Neighbors(normalization(points[seen]))
        return cloud.nearest(normalization(points[unseen]), 1)[0][:, 0]
