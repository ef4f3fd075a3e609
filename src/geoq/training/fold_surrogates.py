"""Sources of fold surrogates: trained one by one or together, here or on a cluster, or trained elsewhere (line 7).

The calibration needs only the predictions of a fold surrogate at some points. Surrogates stay in the process that trained them;
only predictions are transferred and kept.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from geoq.arrays import Array, take
from geoq.checks import TRAINED, add_note_on_error, check_callable
from geoq.surrogate import (
    Surrogate,
    TrainSurrogate,
    TrainTogether,
    evaluate,
)
from geoq.training import progress
from geoq.training.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fold:
    """The rows that the surrogate of a fold is trained on (``seen``), and the rows where it is evaluated (``asked``)."""

    number: int
    n_folds: int
    seen: Int[Tensor, " n_seen"]
    asked: Int[Tensor, " n_asked"]

    def __str__(self) -> str:
        return f"fold {self.number + 1} of {self.n_folds}"


@runtime_checkable
class FoldSurrogates(Protocol):
    """A source of fold surrogates that is passed in place of ``train_surrogate``.

    ``jobs`` returns which folds are computed together, as lists of fold numbers, given the number of workers.
    ``predictions`` returns the predictions of the folds of one job. ``pretrained`` is true if nothing is trained.
    """

    @property
    def pretrained(self) -> bool: ...

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int, /
    ) -> list[list[int]]: ...

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold], /
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class TrainedFolds:
    """Fold surrogates that were trained elsewhere, in the order of the folds; pass it as ``train_surrogate``.

    Surrogate number l must not have seen the points that fold l holds out. geoq cannot check this.

    Attributes:
        surrogates: one trained surrogate per fold.
    """

    surrogates: Sequence[Surrogate]
    pretrained: ClassVar[bool] = True

    def jobs(
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
    """Predictions of fold surrogates that were trained elsewhere; pass it as ``train_surrogate``.

    Attributes:
        arrays: one array per fold, with a prediction for every row of the data.
    """

    arrays: Sequence[Array]
    pretrained: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"PredictedFolds of {len(self.arrays)} folds"

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del y, n_workers
        _check_count("PredictedFolds", len(self.arrays), folds[0].n_folds)
        for fold in folds:
            n_rows = len(self.arrays[fold.number])
            if n_rows != len(x):
                raise ValueError(
                    f"the predictions of {fold} have {n_rows} rows, but the data have {len(x)}; "
                    "pass a prediction for every row."
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
    """One training per fold with the user's recipe, together if the recipe supports it."""

    train_surrogate: TrainSurrogate
    pretrained: ClassVar[bool] = False

    def jobs(
        self, x: Array, y: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        if not isinstance(self.train_surrogate, TrainTogether):
            return one_by_one(folds)
        return in_jobs(folds, self.train_surrogate.n_together(x, y), n_workers)

    def predictions(
        self, x: Array, y: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ *output"]]:
        with add_note_on_error(f"while training {describe_folds(folds)}"):
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
    """Train a surrogate on each subset of the rows, together if the recipe supports it."""
    if len(subsets) > 1 and isinstance(train_surrogate, TrainTogether):
        return list(train_surrogate.train_many(x, y, subsets))
    return [train_surrogate(take(x, rows), take(y, rows)) for rows in subsets]


def ask(
    surrogate: Surrogate, x: Array, fold: Fold
) -> Float[Tensor, " n_asked *output"]:
    """The predictions of the surrogate at the rows ``fold.asked``."""
    with add_note_on_error(f"while evaluating the surrogate of {fold}"):
        return evaluate(surrogate, take(x, fold.asked), "surrogate")


def is_pretrained(source: object) -> bool:
    """Whether nothing is trained: fold surrogates come from elsewhere, or there is no recipe."""
    return source is None or (isinstance(source, FoldSurrogates) and source.pretrained)


def describe_folds(folds: Sequence[Fold]) -> str:
    """A phrase that names the surrogates of these folds."""
    if len(folds) == 1:
        return f"the surrogate of {folds[0]}"
    return f"the surrogates of {folds[0]} to {folds[-1]} together"


def in_jobs(folds: Sequence[Fold], n_together: int, n_workers: int) -> list[list[int]]:
    """At most ``n_together`` folds per job, and fewer if there would not be a job for every worker."""
    step = min(n_together, math.ceil(len(folds) / n_workers))
    numbers = [fold.number for fold in folds]
    return [numbers[i : i + step] for i in range(0, len(numbers), step)]


def one_by_one(folds: Sequence[Fold]) -> list[list[int]]:
    """One job per fold."""
    return [[fold.number] for fold in folds]


def fold_predictions(
    source: FoldSurrogates,
    x: Array,
    y: Array,
    folds: Sequence[Fold],
    checkpoint: Checkpoint | None,
) -> Iterator[tuple[int, Tensor]]:
    """Fold numbers and the predictions of their surrogates, in the order in which they are finished.

    The jobs run through joblib: one after the other in this process, unless ``joblib.parallel_config`` selects other
    workers.
    """
    from joblib import effective_n_jobs  # here, because it takes long to import

    # A fold without points to evaluate is not trained.
    asked = [fold for fold in folds if len(fold.asked)]
    jobs = source.jobs(x, y, asked, effective_n_jobs(None))
    if checkpoint is not None:
        # The same jobs as in the interrupted run: rounding depends on which networks are trained together.
        jobs = checkpoint.jobs(jobs)
    start, n_finished = progress.place(), 0
    missing = []
    for job in jobs:
        if checkpoint is None or not all(map(checkpoint.has, job)):
            missing.append((source, x, y, [folds[number] for number in job]))
            continue
        logger.info("%s to %s: from the checkpoint", folds[job[0]], folds[job[-1]])
        n_finished += len(job)
        for number in job:
            yield number, checkpoint.load(number)
    progress.move_to(start + n_finished)
    for numbers, answers in _in_turn(source, missing):
        for number, prediction in zip(numbers, answers, strict=True):
            if checkpoint is not None:
                checkpoint.save(number, prediction)
            n_finished += 1
            progress.move_to(start + n_finished)
            yield number, prediction


# One tuple, not four arguments: Dask stores larger arguments on a single worker, and they are lost if it fails.
_Job: TypeAlias = tuple[FoldSurrogates, Array, Array, list[Fold]]
_Answer: TypeAlias = tuple[list[int], Sequence[Tensor]]


def _in_turn(source: FoldSurrogates, jobs: list[_Job]) -> Iterable[_Answer]:
    if is_pretrained(source):
        return map(_answer, jobs)  # nothing is trained, so no workers are needed
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
            f"{source} has {n_given} entries for {n_folds} folds; pass one per fold, in their order."
        )


def check_any_model(surrogate: object, train_surrogate: object, arguments: str) -> None:
    """Refuse to work without any model."""
    if surrogate is None and train_surrogate is None:
        raise ValueError(
            "surrogate=None and train_surrogate=None, so there is no model whose error could be estimated; "
            f"pass a trained surrogate, or a function train_surrogate({arguments}) that returns one."
        )


def check_deployed_surrogate_given(
    surrogate: object, train_surrogate: object, *, pretrained: bool
) -> None:
    """Refuse pretrained fold surrogates without the deployed surrogate."""
    if surrogate is None and pretrained and not callable(train_surrogate):
        raise ValueError(
            f"surrogate=None and train_surrogate is a {type(train_surrogate).__name__}, which does not train, so "
            "there is no model whose error could be estimated; pass the trained surrogate."
        )


def check_pretrained_folds(train_surrogate: object) -> None:
    """Refuse pretrained fold surrogates that cannot be called, or are in training mode."""
    if isinstance(train_surrogate, TrainedFolds):
        for number, surrogate in enumerate(train_surrogate.surrogates):
            check_callable(surrogate, f"TrainedFolds.surrogates[{number}]")


def check_models(
    surrogate: object,
    train_surrogate: object,
    representation: object,
    error_functional: object,
) -> None:
    """Refuse objects that cannot be called, and the absence of any model."""
    check_any_model(surrogate, train_surrogate, "x, y")
    is_source = isinstance(train_surrogate, FoldSurrogates)
    check_deployed_surrogate_given(surrogate, train_surrogate, pretrained=is_source)
    check_pretrained_folds(train_surrogate)
    callables = {
        "surrogate": surrogate,
        "train_surrogate": None if is_source else train_surrogate,
        "representation": representation,
        "error_functional": error_functional,
    }
    for name, function in callables.items():
        if function is not None:
            check_callable(function, name)
