"""Where fold surrogates come from: trained one by one or together, here or on a cluster, or brought along (line 7).

All that calibration needs of a fold surrogate is what it predicts at some points. So surrogates stay where they were
trained, and only predictions travel and are kept.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from geoq import progress
from geoq.checkpoint import Checkpoint
from geoq.surrogate import (
    TRAINED,
    Array,
    Surrogate,
    TrainSurrogate,
    TrainTogether,
    check_callable,
    evaluate,
    noting,
    take,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fold:
    """A fold as its surrogate sees it: the rows it may be trained on, and the rows it is asked about."""

    number: int
    n_folds: int
    seen: Int[Tensor, " n_seen"]
    asked: Int[Tensor, " n_asked"]

    def __str__(self) -> str:
        return f"fold {self.number + 1} of {self.n_folds}"


@runtime_checkable
class FoldSurrogates(Protocol):
    """Stands in for ``train_surrogate`` where fold surrogates do not come from one training each.

    ``groups`` says which folds are answered at once, when there are so many workers to answer different groups.
    ``predictions`` answers the folds of one group. Where nothing is trained, ``given`` is true.
    """

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int, /
    ) -> list[list[int]]: ...

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold], /
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class TrainedFolds:
    """Fold surrogates that were trained elsewhere, in the order of the folds.

    Surrogate number l must not have seen the points that fold l holds out; nothing here can tell.
    """

    surrogates: Sequence[Surrogate]
    given: ClassVar[bool] = True

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del x, y, n_workers
        _check_count("TrainedFolds", len(self.surrogates), folds[0].n_folds)
        return one_by_one(folds)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ *output"]]:
        del y
        return [ask(self.surrogates[fold.number], x, fold) for fold in folds]


@dataclass(frozen=True)
class PredictedFolds:
    """What fold surrogates that were trained elsewhere predict: one array per fold, with a row for each row of the data."""

    arrays: Sequence[Array]
    given: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"PredictedFolds of {len(self.arrays)} folds"

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del y, n_workers
        _check_count("PredictedFolds", len(self.arrays), folds[0].n_folds)
        for fold in folds:
            n_rows = len(self.arrays[fold.number])
            if n_rows != len(x):
                raise ValueError(
                    f"the predictions of {fold} have {n_rows} rows, but the data have {len(x)}; "
                    "give a prediction for every row."
                )
        return one_by_one(folds)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ *output"]]:
        del x, y

        def answer(fold: Fold) -> Tensor:
            rows = take(self.arrays[fold.number], fold.asked)
            return evaluate(lambda part: part, rows, f"the prediction of {fold}")

        return [answer(fold) for fold in folds]


@dataclass(frozen=True)
class FreshFolds:
    """One training per fold by the user's recipe: together where it knows how, otherwise one by one."""

    train_surrogate: TrainSurrogate

    def groups(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        if not isinstance(self.train_surrogate, TrainTogether):
            return one_by_one(folds)
        return in_groups(folds, self.train_surrogate.n_together(x, y), n_workers)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ *output"]]:
        with noting(f"while training {whose(folds)}"):
            surrogates = train_each(
                self.train_surrogate, x, y, [fold.seen for fold in folds]
            )
            for surrogate in surrogates:
                check_callable(surrogate, TRAINED)
        return [
            ask(surrogate, x, fold)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]


def train_each(
    train_surrogate: TrainSurrogate, x: Array, y: Array, subsets: Sequence[Tensor]
) -> list[Surrogate]:
    """A surrogate for each subset of the rows, trained together where the recipe knows how."""
    if len(subsets) > 1 and isinstance(train_surrogate, TrainTogether):
        return list(train_surrogate.train_many(x, y, subsets))
    return [train_surrogate(take(x, rows), take(y, rows)) for rows in subsets]


def ask(
    surrogate: Surrogate, x: Array, fold: Fold
) -> Float[Tensor, " n_asked *output"]:
    """What the surrogate predicts at the points that the fold is asked about."""
    with noting(f"while evaluating the surrogate of {fold}"):
        return evaluate(surrogate, take(x, fold.asked), "surrogate")


def is_given(source: object) -> bool:
    """Whether nothing is trained: fold surrogates were brought along, or there is no recipe at all."""
    return source is None or bool(getattr(source, "given", False))


def whose(folds: Sequence[Fold]) -> str:
    """The surrogates of these folds, in words."""
    if len(folds) == 1:
        return f"the surrogate of {folds[0]}"
    return f"the surrogates of {folds[0]} to {folds[-1]} together"


def in_groups(
    folds: Sequence[Fold], n_together: int, n_workers: int
) -> list[list[int]]:
    """So many folds together, or fewer where each worker gets its share."""
    step = min(n_together, math.ceil(len(folds) / n_workers))
    numbers = [fold.number for fold in folds]
    return [numbers[i : i + step] for i in range(0, len(numbers), step)]


def one_by_one(folds: Sequence[Fold]) -> list[list[int]]:
    """Each fold on its own."""
    return [[fold.number] for fold in folds]


def fold_predictions(
    source: FoldSurrogates,
    x: Array,
    y: Array,
    folds: Sequence[Fold],
    checkpoint: Checkpoint | None,
) -> Iterator[tuple[int, Tensor]]:
    """Numbers of the folds and what their surrogates predict, as they are finished.

    Groups of folds are jobs for joblib: one after the other in this process, unless ``joblib.parallel_config`` names
    other workers.
    """
    from joblib import effective_n_jobs  # here, because it takes long to import

    # A fold that is asked about nothing need not be trained.
    asked = [fold for fold in folds if len(fold.asked)]
    groups = source.groups(x, y, asked, effective_n_jobs(None))
    if checkpoint is not None:
        # As they were: networks trained together with others round differently.
        groups = checkpoint.groups(groups)
    start, n_finished = progress.place(), 0
    missing = []
    for group in groups:
        if checkpoint is None or not all(map(checkpoint.has, group)):
            missing.append((source, x, y, [folds[number] for number in group]))
            continue
        logger.info("%s to %s: from the checkpoint", folds[group[0]], folds[group[-1]])
        n_finished += len(group)
        for number in group:
            yield number, checkpoint.load(number)
    progress.move_to(start + n_finished)
    for group, answers in _in_turn(source, missing):
        for number, prediction in zip(group, answers, strict=True):
            if checkpoint is not None:
                checkpoint.save(number, prediction)
            n_finished += 1
            progress.move_to(start + n_finished)
            yield number, prediction


# One tuple, not four arguments: Dask puts larger arguments on a single worker, and loses them with it.
_Job: TypeAlias = tuple[FoldSurrogates, Array, Array, list[Fold]]
_Answer: TypeAlias = tuple[list[int], Sequence[Tensor]]


def _in_turn(source: FoldSurrogates, jobs: list[_Job]) -> Iterable[_Answer]:
    if is_given(source):
        return map(_answer, jobs)  # nothing to train, so nothing to hand out
    from joblib import Parallel, delayed

    run = Parallel(return_as="generator_unordered")
    results: Iterable[_Answer] = run(delayed(_answer)(job) for job in jobs)
    return results


def _answer(job: _Job) -> _Answer:
    source, x, y, folds = job
    named = str(folds[0]) if len(folds) == 1 else f"{len(folds)} folds together"
    with progress.stage(named, len(folds)):
        return [fold.number for fold in folds], source.predictions(x, y, folds)


def _check_count(source: str, n_given: int, n_folds: int) -> None:
    if n_given != n_folds:
        raise ValueError(
            f"{source} has {n_given} entries for {n_folds} folds; give one per fold, in their order."
        )
