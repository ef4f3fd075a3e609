"""Sources of fold surrogates (line 7): trained here one by one or together, trained on a cluster, or trained elsewhere.

The calibration needs only the predictions of a fold surrogate at some points. A surrogate stays in the process that trained it;
only predictions are transferred and kept.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.arrays import Rows, take, to_tensor
from geoq.checks import TRAINED, add_note_on_error, check_callable
from geoq.probing import FirstFold
from geoq.scratch import in_use, is_lazy, stored
from geoq.surrogate import Surrogate, TrainSurrogate, TrainTogether, evaluate, own_copy
from geoq.table import Table, native, new_levels
from geoq.training import progress
from geoq.training.checkpoint import FinishedFolds
from geoq.training.threads import n_weights, threads_for

logger = logging.getLogger(__name__)

# Lists of the numbers of folds that are computed together.
Jobs: TypeAlias = list[list[int]]
# The predictions of each fold.
Predictions: TypeAlias = list[Float[Tensor, " _ *output"]]


@dataclass(frozen=True)
class Fold:
    """The rows of the data that the surrogate of one fold needs.

    Attributes:
        number: Number of the fold, from 0.
        n_folds: Number of folds.
        training_rows: Rows on which the surrogate is trained.
        evaluated_rows: Rows at which its predictions are needed: held-out points, anchors and some other training points. For
            rollouts, the states from which they start.
    """

    number: int
    n_folds: int
    training_rows: Int[Tensor, " n_train"]
    evaluated_rows: Int[Tensor, " n_evaluated"]

    def __str__(self) -> str:
        return f"fold {self.number + 1} of {self.n_folds}"


@runtime_checkable
class FoldSurrogates(Protocol):
    """A source of fold surrogates, which can be passed as ``train_surrogate``.

    ``jobs`` returns lists of fold numbers; the folds of one list are computed together, by one of the workers.
    ``predictions`` returns the predictions of the folds of one job. ``pretrained`` is true if the source trains nothing.
    """

    @property
    def pretrained(self) -> bool: ...

    def jobs(
        self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int, /
    ) -> Jobs: ...

    def predictions(
        self, x: Any, y: Any, folds: Sequence[Fold], /
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class TrainedFolds:
    """Fold surrogates that were trained elsewhere, in the order of the folds; pass it as ``train_surrogate``.

    Surrogate number l must not have been trained on the points that fold l holds out. geoq cannot check this.

    Args:
        surrogates: One trained surrogate per fold.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import Ridge
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = np.sin(6 * x[:, 0])
        >>> folds = RandomFolds(5)
        >>> trained = [Ridge().fit(x[rows], y[rows]).predict for rows, _ in folds.split(x)]
        >>> geoq = GeoQ(Ridge().fit(x, y).predict, TrainedFolds(trained), folds=folds).fit(x, y)
    """

    surrogates: Sequence[Surrogate]
    pretrained: ClassVar[bool] = True

    def jobs(self, x: Rows, y: Rows, folds: Sequence[Fold], n_workers: int) -> Jobs:
        del x, y, n_workers
        _check_count("TrainedFolds", len(self.surrogates), folds[0].n_folds)
        return one_by_one(folds)

    def predictions(self, x: Rows, y: Rows, folds: Sequence[Fold]) -> Predictions:
        del y
        return [evaluate_fold(self.surrogates[fold.number], x, fold) for fold in folds]


@dataclass(frozen=True)
class PredictedFolds:
    """Predictions of fold surrogates that were trained elsewhere; pass it as ``train_surrogate``.

    Args:
        arrays: One array per fold, in the order of the folds. Each has a prediction for every row of the data. As the data, they
            can be larger than memory.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import Ridge
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = np.sin(6 * x[:, 0])
        >>> folds = RandomFolds(5)
        >>> arrays = [Ridge().fit(x[rows], y[rows]).predict(x) for rows, _ in folds.split(x)]
        >>> geoq = GeoQ(Ridge().fit(x, y).predict, PredictedFolds(arrays), folds=folds).fit(x, y)
    """

    arrays: Sequence[Any]
    pretrained: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"PredictedFolds of {len(self.arrays)} folds"

    def jobs(self, x: Rows, y: Rows, folds: Sequence[Fold], n_workers: int) -> Jobs:
        del y, n_workers
        _check_count("PredictedFolds", len(self.arrays), folds[0].n_folds)
        for fold in folds:
            given = self.arrays[fold.number]
            name = f"PredictedFolds.arrays[{fold.number}]"
            n_rows = given.shape[0] if is_lazy(given) else len(to_tensor(given, name))
            if n_rows != len(x):
                raise ValueError(
                    f"PredictedFolds.arrays[{fold.number}] has {n_rows} rows, but x has {len(x)} rows; "
                    "pass a prediction for every row of x."
                )
        return one_by_one(folds)

    def predictions(self, x: Rows, y: Rows, folds: Sequence[Fold]) -> Predictions:
        del x, y
        rows = (take(stored(self.arrays[f.number]), f.evaluated_rows) for f in folds)
        return [
            evaluate(lambda part: part, own, f"the prediction of {fold}")
            for fold, own in zip(folds, rows, strict=True)
        ]


@dataclass(frozen=True)
class FreshFolds:
    """Fold surrogates trained with the recipe of the user, together if the recipe supports it.

    Args:
        train_surrogate: The recipe.
        n_weights: The number of weights of the deployed surrogate, which determines the number of threads; None if it is not
            available.
        first: Keeps the surrogate of the first fold while the next one is trained.
    """

    train_surrogate: TrainSurrogate
    n_weights: int | None = None
    first: FirstFold = field(default_factory=FirstFold, repr=False, compare=False)
    pretrained: ClassVar[bool] = False

    def jobs(self, x: Rows, y: Rows, folds: Sequence[Fold], n_workers: int) -> Jobs:
        if not isinstance(self.train_surrogate, TrainTogether):
            return one_by_one(folds)
        return in_jobs(
            folds, self.train_surrogate.n_together(native(x), native(y)), n_workers
        )

    def predictions(self, x: Rows, y: Rows, folds: Sequence[Fold]) -> Predictions:
        subsets = [fold.training_rows for fold in folds]
        with threads_for(self.n_weights, x):
            surrogates = train_for(folds, self.train_surrogate, x, y, subsets)
        self.first.check()
        predictions = [
            evaluate_fold(surrogate, x, fold)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]
        self.first.keep(
            partial(evaluate, surrogates[0], name="surrogate"),
            take(x, folds[0].evaluated_rows),
            predictions[0],
        )
        return predictions


def train_each(
    train_surrogate: TrainSurrogate, x: Rows, y: Rows, subsets: Sequence[Tensor]
) -> list[Surrogate]:
    """Train a surrogate on each subset of the rows, together if the recipe supports it."""
    if len(subsets) > 1 and isinstance(train_surrogate, TrainTogether):
        return list(train_surrogate.train_many(native(x), native(y), subsets))
    return [
        train_surrogate(native(take(x, rows)), native(take(y, rows)))
        for rows in subsets
    ]


def train_for(
    folds: Sequence[Fold],
    train_surrogate: TrainSurrogate,
    x: Rows,
    y: Rows,
    subsets: Sequence[Tensor],
) -> list[Surrogate]:
    """Train a surrogate on each subset of the rows; an exception gets a note that names the folds."""
    with add_note_on_error(f"while training {describe_folds(folds)}"):
        surrogates = train_each(train_surrogate, x, y, subsets)
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
    return surrogates


def evaluate_fold(
    surrogate: Surrogate, x: Rows, fold: Fold
) -> Float[Tensor, " n_evaluated *output"]:
    """The predictions of the surrogate at the rows ``fold.evaluated_rows``."""
    new = isinstance(x, Table) and new_levels(x, fold.training_rows.numpy())
    unknown = (
        f"; its training rows lack {new}, so the model must accept new categories, for example with "
        "OneHotEncoder(handle_unknown='ignore')"
    )
    with add_note_on_error(
        f"while evaluating the surrogate of {fold}{unknown if new else ''}"
    ):
        return evaluate(surrogate, take(x, fold.evaluated_rows), "surrogate")


def is_pretrained(source: object) -> bool:
    """Whether the source trains nothing: the fold surrogates were trained elsewhere, or there is no recipe."""
    return source is None or (isinstance(source, FoldSurrogates) and source.pretrained)


def count_trainings(surrogate: object, train_surrogate: object, n_folds: int) -> int:
    """The number of trainings: one per fold, and one for a deployed surrogate that is not given."""
    return n_folds * (not is_pretrained(train_surrogate)) + (surrogate is None)


def describe_folds(folds: Sequence[Fold]) -> str:
    """A phrase for the surrogates of these folds, for messages."""
    if len(folds) == 1:
        return f"the surrogate of {folds[0]}"
    return f"the surrogates of {folds[0]} to {folds[-1]} together"


def in_jobs(folds: Sequence[Fold], n_together: int, n_workers: int) -> Jobs:
    """At most ``n_together`` folds per job, and fewer if there would not be a job for every worker."""
    step = min(n_together, math.ceil(len(folds) / n_workers))
    numbers = [fold.number for fold in folds]
    return [numbers[i : i + step] for i in range(0, len(numbers), step)]


def one_by_one(folds: Sequence[Fold]) -> Jobs:
    """One job per fold."""
    return [[fold.number] for fold in folds]


def fold_predictions(
    source: FoldSurrogates,
    x: Rows,
    y: Rows,
    folds: Sequence[Fold],
    checkpoint: FinishedFolds | None,
) -> Iterator[tuple[int, Tensor]]:
    """Iterate over fold numbers and the predictions of the fold surrogates, in the order in which they are finished.

    The jobs run through joblib: one after the other in this process, unless ``joblib.parallel_config`` selects other
    workers.
    """
    from joblib import effective_n_jobs  # here, because it takes long to import

    # A fold without rows to evaluate needs no surrogate.
    needed = [fold for fold in folds if len(fold.evaluated_rows)]
    jobs = source.jobs(x, y, needed, effective_n_jobs(None))
    if checkpoint is not None:
        # The same jobs as in the interrupted run: rounding depends on which networks are trained together.
        jobs = checkpoint.jobs(jobs)
    start, n_finished = progress.position(), 0
    missing = []
    for job in jobs:
        if checkpoint is None or not all(map(checkpoint.has, job)):
            missing.append((source, x, y, [folds[number] for number in job]))
            continue
        logger.info("%s to %s: from the checkpoint", folds[job[0]], folds[job[-1]])
        n_finished += len(job)
        for number in job:
            yield number, checkpoint.load(number, len(folds[number].evaluated_rows))
    progress.move_to(start + n_finished)
    progress.restored(n_finished)
    for numbers, predictions in _run(source, missing):
        if not source.pretrained:
            progress.trained(_name([folds[number] for number in numbers]), len(numbers))
        for number, prediction in zip(numbers, predictions, strict=True):
            if checkpoint is not None:
                checkpoint.save(number, prediction)
            n_finished += 1
            progress.move_to(start + n_finished)
            yield number, prediction


# One tuple, not four arguments: Dask stores larger arguments on a single worker, and they are lost if it fails.
_Job: TypeAlias = tuple[FoldSurrogates, Rows, Rows, list[Fold]]
_Predictions: TypeAlias = tuple[list[int], Sequence[Tensor]]


def _run(source: FoldSurrogates, jobs: list[_Job]) -> Iterable[_Predictions]:
    if is_pretrained(source):
        return map(_predictions_of, jobs)  # workers are used for trainings only
    from joblib import Parallel, delayed

    parallel = Parallel(return_as="generator_unordered")
    results: Iterable[_Predictions] = parallel(
        delayed(_predictions_of)(job) for job in jobs
    )
    return results


def _predictions_of(job: _Job) -> _Predictions:
    source, x, y, folds = job
    with progress.stage(_name(folds), len(folds)):
        return [fold.number for fold in folds], source.predictions(x, y, folds)


def _name(folds: Sequence[Fold]) -> str:
    return str(folds[0]) if len(folds) == 1 else f"{len(folds)} folds together"


def _check_count(source: str, n_given: int, n_folds: int) -> None:
    if n_given != n_folds:
        raise ValueError(
            f"{source} has {n_given} entries, but there are {n_folds} folds; pass one entry per fold, in the order of the "
            "folds."
        )


def check_sources(
    surrogate: object, train_surrogate: object, arguments: str, *, is_source: bool
) -> None:
    """Refuse the absence of any model, and pretrained fold surrogates that are unusable or without the deployed surrogate."""
    if surrogate is None and train_surrogate is None:
        raise ValueError(
            "surrogate=None and train_surrogate=None, so there is no model whose error could be estimated; "
            f"pass a trained surrogate, or a function train_surrogate({arguments}) that returns one."
        )

    if surrogate is None and is_source and not callable(train_surrogate):
        raise ValueError(
            f"surrogate=None and train_surrogate is a {type(train_surrogate).__name__}, which does not train, so "
            "there is no model whose error could be estimated; pass the trained surrogate."
        )

    if isinstance(train_surrogate, TrainedFolds):
        for number, trained in enumerate(train_surrogate.surrogates):
            check_callable(trained, f"TrainedFolds.surrogates[{number}]")


def check_models(
    surrogate: object,
    train_surrogate: object,
    representation: object,
    error_functional: object,
) -> None:
    """Refuse callables of the user that cannot be called or are missing."""
    is_source = isinstance(train_surrogate, FoldSurrogates)
    check_sources(surrogate, train_surrogate, "x, y", is_source=is_source)
    callables = {
        "surrogate": surrogate,
        "train_surrogate": None if is_source else train_surrogate,
        "representation": representation,
        "error_functional": error_functional,
    }
    for name, function in callables.items():
        if function is not None:
            check_callable(function, name)


def deployed(
    surrogate: Surrogate | None,
    train_surrogate: TrainSurrogate | FoldSurrogates | None,
    x: Rows,
    y: Rows,
) -> Surrogate:
    """The deployed surrogate: the given one, or one that is trained on all data (line 1)."""
    if surrogate is not None:
        return surrogate
    assert callable(train_surrogate)
    with add_note_on_error("while training the deployed surrogate on all data"):
        with progress.stage("deployed surrogate"):
            copies = (
                take(part, torch.arange(len(part))) if in_use() else own_copy(part)
                for part in (x, y)
            )
            trained: Surrogate = train_surrogate(*map(native, copies))
        check_callable(trained, TRAINED)
    progress.trained("deployed surrogate")
    return trained


def sources_of(
    train_surrogate: TrainSurrogate | FoldSurrogates | None, surrogate: object
) -> FoldSurrogates | None:
    """The source of the fold surrogates, which have about the size of the deployed surrogate.

    None means that every fold uses the deployed surrogate, which has not seen any of the data.
    """
    if train_surrogate is None or isinstance(train_surrogate, FoldSurrogates):
        return train_surrogate
    return FreshFolds(train_surrogate, n_weights(surrogate))
