"""Sources of fold surrogates (line 7): trained here one by one or together, trained on a cluster, or trained elsewhere.

The calibration needs only the predictions of a fold surrogate at some points. A surrogate stays in the process that trained it;
only predictions are transferred and kept.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Int

from geoq.arrays import native, own_copy, take, to_numbers
from geoq.checks import add_note_on_error
from geoq.data.probes import FirstFold
from geoq.data.scratch import is_lazy, is_mapped, stored
from geoq.data.table import Table, lacking_levels
from geoq.surrogate import (
    TRAINED,
    Surrogate,
    TrainSurrogate,
    TrainTogether,
    answers_of,
    check_callable,
)
from geoq.training.checkpoint import FinishedFolds
from geoq.training.progress import Trainings, duration, plural

logger = logging.getLogger(__name__)

# Lists of the numbers of folds that are computed together.
Jobs: TypeAlias = list[list[int]]


@dataclass(frozen=True)
class Fold:
    """The rows of the data that the surrogate of one fold needs.

    Attributes:
        number: number of the fold, from 0.
        n_folds: number of folds.
        training_rows: rows on which the surrogate is trained.
        evaluated_rows: rows at which its predictions are needed: held-out points, anchors and some other training points. For
            rollouts, the states from which they start.
    """

    number: int
    n_folds: int
    training_rows: Int[np.ndarray, " n_train"]
    evaluated_rows: Int[np.ndarray, " n_evaluated"]

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

    def jobs(self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int, /) -> Jobs: ...

    def predictions(self, x: Any, y: Any, folds: Sequence[Fold], /) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class TrainedFolds:
    """Fold surrogates that were trained elsewhere, in the order of the folds; pass it as ``train_surrogate``.

    Surrogate number l must not have been trained on the points that fold l holds out.

    Args:
        surrogates: one trained surrogate per fold.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = np.sin(6 * x[:, 0])
        >>> folds = RandomFolds(5)
        >>> trained = [Ridge().fit(x[rows], y[rows]).predict for rows, _ in folds.split(x)]
        >>> estimator = GeoQ(Ridge().fit(x, y).predict, TrainedFolds(trained), folds=folds).fit(x, y)
    """

    surrogates: Sequence[Surrogate]
    pretrained: ClassVar[bool] = True

    def jobs(self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int) -> Jobs:
        del x, y, n_workers
        _check_count("TrainedFolds", len(self.surrogates), folds[0].n_folds)
        return one_by_one(folds)

    def predictions(self, x: Any, y: Any, folds: Sequence[Fold]) -> list[np.ndarray]:
        del y
        return [evaluate_fold(self.surrogates[fold.number], x, fold) for fold in folds]


@dataclass(frozen=True)
class PredictedFolds:
    """Predictions of fold surrogates that were trained elsewhere; pass it as ``train_surrogate``.

    Args:
        arrays: one array per fold, in the order of the folds. Each has a prediction for every row of the data. As the data, they
            can be larger than memory.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> from geoq import GeoQ, RandomFolds
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = np.sin(6 * x[:, 0])
        >>> folds = RandomFolds(5)
        >>> arrays = [Ridge().fit(x[rows], y[rows]).predict(x) for rows, _ in folds.split(x)]
        >>> estimator = GeoQ(Ridge().fit(x, y).predict, PredictedFolds(arrays), folds=folds).fit(x, y)
    """

    arrays: Sequence[Any]
    pretrained: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"PredictedFolds of {len(self.arrays)} folds"

    def jobs(self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int) -> Jobs:
        del y, n_workers
        _check_count("PredictedFolds", len(self.arrays), folds[0].n_folds)
        for fold in folds:
            given, name = self.arrays[fold.number], f"arrays[{fold.number}]"
            n = given.shape[0] if is_lazy(given) else len(to_numbers(given, name))
            if n != len(x):
                raise ValueError(
                    f"PredictedFolds.{name} has {n} rows, but x has {len(x)} rows; pass a prediction for every row of x."
                )
        return one_by_one(folds)

    def predictions(self, x: Any, y: Any, folds: Sequence[Fold]) -> list[np.ndarray]:
        del x, y
        rows = (take(stored(self.arrays[f.number]), f.evaluated_rows) for f in folds)
        return [
            answers_of(lambda part: part, own, f"the prediction of {fold}")
            for fold, own in zip(folds, rows, strict=True)
        ]


@dataclass(frozen=True)
class FreshFolds:
    """Fold surrogates trained with the recipe of the user, together if the recipe supports it.

    Args:
        train_surrogate: the recipe.
        first: keeps the surrogate of the first fold while the next one is trained.
    """

    train_surrogate: TrainSurrogate
    first: FirstFold = field(default_factory=FirstFold, repr=False, compare=False)
    pretrained: ClassVar[bool] = False

    def jobs(self, x: Any, y: Any, folds: Sequence[Fold], n_workers: int) -> Jobs:
        if not isinstance(self.train_surrogate, TrainTogether):
            return one_by_one(folds)
        n_together = self.train_surrogate.n_together(native(x), native(y))
        return in_jobs(folds, n_together, n_workers)

    def predictions(self, x: Any, y: Any, folds: Sequence[Fold]) -> list[np.ndarray]:
        subsets = [fold.training_rows for fold in folds]
        with add_note_on_error(f"while training {describe_folds(folds)}"):
            surrogates = train_each(self.train_surrogate, x, y, subsets)
        self.first.check()
        predictions = [
            evaluate_fold(surrogate, x, fold)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]
        self.first.keep(
            partial(answers_of, surrogates[0], name="surrogate"),
            take(x, folds[0].evaluated_rows),
            predictions[0],
        )
        return predictions


def train_each(
    recipe: TrainSurrogate, x: Any, y: Any, subsets: Sequence[np.ndarray]
) -> list[Surrogate]:
    """Train a surrogate on each subset of the rows, together if the recipe supports it."""
    if len(subsets) > 1 and isinstance(recipe, TrainTogether):
        own = [native(part if is_mapped(part) else own_copy(part)) for part in (x, y)]
        surrogates = list(recipe.train_many(own[0], own[1], subsets))
    else:
        pairs = ((native(take(x, rows)), native(take(y, rows))) for rows in subsets)
        surrogates = [recipe(*pair) for pair in pairs]
    for surrogate in surrogates:
        check_callable(surrogate, TRAINED)
    return surrogates


def train_deployed(recipe: TrainSurrogate, x: Any, y: Any) -> Surrogate:
    """A surrogate that is trained on all data (line 1)."""
    with add_note_on_error("while training the deployed surrogate on all data"):
        trained = recipe(native(own_copy(x)), native(own_copy(y)))
        check_callable(trained, TRAINED)
    return trained


def evaluate_fold(surrogate: Surrogate, x: Any, fold: Fold) -> np.ndarray:
    """The predictions of the surrogate at the rows ``fold.evaluated_rows``."""
    new = isinstance(x, Table) and lacking_levels(x, fold.training_rows)
    unknown = (
        f"; its training rows lack {new}, so the model must accept new categories, for example with "
        "OneHotEncoder(handle_unknown='ignore')"
    )
    with add_note_on_error(f"while evaluating the surrogate of {fold}{unknown if new else ''}"):
        return answers_of(surrogate, take(x, fold.evaluated_rows), "surrogate")


def source_of(train_surrogate: Any) -> FoldSurrogates | None:
    """The source of the fold surrogates; None if every fold uses the deployed surrogate, which has not seen the data."""
    if train_surrogate is None or isinstance(train_surrogate, FoldSurrogates):
        return train_surrogate
    return FreshFolds(train_surrogate)


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
    x: Any,
    y: Any,
    folds: Sequence[Fold],
    progress: Trainings,
    checkpoint: FinishedFolds | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over fold numbers and the predictions of the fold surrogates, in the order in which they are finished.

    The jobs run through joblib: one after the other in this process, unless ``joblib.parallel_config`` selects other
    workers.
    """
    from joblib import effective_n_jobs  # here, because it takes long to import

    # A fold without rows to evaluate needs no surrogate.
    needed = [fold for fold in folds if len(fold.evaluated_rows)]
    jobs = source.jobs(x, y, needed, effective_n_jobs(None))
    missing = []
    if checkpoint is None:
        missing = jobs
    else:
        # The same jobs as in the interrupted run: rounding depends on which networks are trained together.
        for job in checkpoint.jobs(jobs):
            if not all(map(checkpoint.has, job)):
                missing.append(job)
                continue
            progress.skip(len(job))
            for number in job:
                yield number, checkpoint.load(number, len(folds[number].evaluated_rows))
    tasks = [(source, x, y, [folds[number] for number in job]) for job in missing]
    for numbers, predictions in _run(source, tasks):
        if not source.pretrained:
            of_job = [folds[number] for number in numbers]
            name = str(of_job[0]) if len(of_job) == 1 else f"{len(of_job)} folds"
            progress.done(name, len(numbers))
        for number, prediction in zip(numbers, predictions, strict=True):
            if checkpoint is not None:
                checkpoint.save(number, prediction)
            yield number, prediction


# One tuple, not four arguments: Dask stores larger arguments on a single worker, and they are lost if it fails.
_Task: TypeAlias = tuple[FoldSurrogates, Any, Any, list[Fold]]
_Predictions: TypeAlias = tuple[list[int], Sequence[np.ndarray]]


def _run(source: FoldSurrogates, tasks: list[_Task]) -> Iterable[_Predictions]:
    if source.pretrained:
        return map(_predictions_of, tasks)  # workers are used for trainings only
    from joblib import Parallel, delayed

    parallel = Parallel(return_as="generator_unordered")
    results: Iterable[_Predictions] = parallel(delayed(_predictions_of)(task) for task in tasks)
    return results


def _predictions_of(task: _Task) -> _Predictions:
    source, x, y, folds = task
    return [fold.number for fold in folds], source.predictions(x, y, folds)


def _check_count(source: str, n_given: int, n_folds: int) -> None:
    if n_given != n_folds:
        raise ValueError(
            f"{source} has {n_given} entries, but there are {n_folds} folds; pass one entry per fold, in the order of the "
            "folds."
        )


def check_sources(surrogate: object, train_surrogate: object, arguments: str) -> None:
    """Raise if there is no model at all, and for models that cannot be called."""
    if surrogate is None and train_surrogate is None:
        raise ValueError(
            "surrogate=None and train_surrogate=None, so there is no model whose error could be estimated; "
            f"pass a trained surrogate, or a function train_surrogate({arguments}) that returns one."
        )
    is_source = isinstance(train_surrogate, FoldSurrogates)
    if surrogate is None and is_source and not callable(train_surrogate):
        raise ValueError(
            f"surrogate=None and train_surrogate is a {type(train_surrogate).__name__}, which does not train, so "
            "there is no model whose error could be estimated; pass the trained surrogate."
        )
    if isinstance(train_surrogate, TrainedFolds):
        for number, trained in enumerate(train_surrogate.surrogates):
            check_callable(trained, f"TrainedFolds.surrogates[{number}]")
    if surrogate is not None:
        check_callable(surrogate, "surrogate")
    if train_surrogate is not None and not is_source:
        check_callable(train_surrogate, "train_surrogate")


@dataclass(frozen=True)
class TrainingTime:
    """The number of trainings of a calibration and their estimated time.

    Attributes:
        n_trainings: the number of trainings.
        n_together: how many surrogates are trained at once, for recipes that support it.
        seconds_of_one: the measured seconds of one training, or of ``n_together`` trainings.
        n_workers: the number of joblib workers that share the trainings.
    """

    n_trainings: int
    n_together: int = 1
    seconds_of_one: float = 0.0
    n_workers: int = 1

    @property
    def seconds(self) -> float:
        """The estimated seconds of all trainings."""
        n_jobs = math.ceil(self.n_trainings / self.n_together)
        return math.ceil(n_jobs / self.n_workers) * self.seconds_of_one

    def __str__(self) -> str:
        if not self.n_trainings:
            return "no trainings"
        together = f", {self.n_together} at once" if self.n_together > 1 else ""
        workers = f" on {self.n_workers} workers" if self.n_workers > 1 else ""
        return (
            f"{plural(self.n_trainings, 'training')}{together}: {duration(self.seconds_of_one)} for one, "
            f"about {duration(self.seconds)} in total{workers}"
        )


def measure(
    source: FoldSurrogates | None,
    x: Any,
    y: Any,
    splits: Sequence[tuple[np.ndarray, np.ndarray]],
    n_trainings: int,
    clock: Callable[[], float],
) -> TrainingTime:
    """Train and evaluate the surrogates of one job, and estimate the time of all; without a source nothing is trained."""
    if source is None or source.pretrained:
        return TrainingTime(n_trainings)
    from joblib import effective_n_jobs  # here, because it takes long to import

    folds = [Fold(n, len(splits), *split) for n, split in enumerate(splits)]
    n_workers = effective_n_jobs(None)
    jobs = source.jobs(x, y, folds, n_workers)
    # The job whose size is nearest to the mean.
    sizes = np.array([sum(len(splits[n][0]) for n in job) for job in jobs])
    job = jobs[int(abs(sizes - sizes.mean()).argmin())]
    began = clock()
    source.predictions(x, y, [folds[number] for number in job])
    return TrainingTime(n_trainings, len(job), clock() - began, n_workers)
