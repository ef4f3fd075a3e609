"""The trainings of a calibration (line 7): where fold surrogates come from, and how the progress is shown.

Fold surrogates are trained here one by one or together, trained on a cluster, or trained elsewhere. The calibration needs only their
predictions at some points. A surrogate stays in the process that trained it; only predictions are transferred and kept.

A source of fold surrogates has the data and the ``recipe``. ``n_together(n_folds)`` is the number of folds that are computed together.
``train(subsets)`` trains surrogates, ``answers(surrogate, fold)`` are the predictions of one, and ``probe(surrogate, fold, answers)`` is
what ``keep_first`` keeps of it.
"""

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Int

from geoq.arrays import is_lazy, native, own_copy, stored, take, to_numbers
from geoq.checks import add_note_on_error, check_function
from geoq.data.probes import First, check_first, keep_first
from geoq.data.table import Table, lacking_levels
from geoq.surrogate import TRAINED, Surrogate, TrainSurrogate, answers_of, check_callable
from geoq.training.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """The state of a calibration. ``str(progress)`` is a line for a log.

    Attributes:
        stage: the stage that has just ended, for example ``"fold 3 of 15"``.
        n_done: the number of finished trainings.
        n_trainings: the number of all trainings, without folds that come from a checkpoint.
        elapsed: seconds since the start.
        remaining: the estimated seconds of the remaining trainings; None before the first training has ended.
    """

    stage: str
    n_done: int
    n_trainings: int
    elapsed: float = 0.0
    remaining: float | None = None

    def __str__(self) -> str:
        counted = f"{self.n_done} of {plural(self.n_trainings, 'training')} done"
        if not self.n_done:
            return f"{self.stage}: {counted}"
        left = f", about {duration(self.remaining)} left" if self.remaining else ""
        return f"{self.stage}: {counted} after {duration(self.elapsed)}{left}"


ShowProgress: TypeAlias = Callable[[Progress], object] | None


def progress_bar(progress: Progress) -> None:
    """Show the progress as a bar on terminals and in notebooks: the default of ``fit(x, y, progress=...)``."""
    del progress  # drawn by ``trainings``, which closes the bar


# A function report(stage, n_trained=1, n_skipped=0); folds that come from a checkpoint are skipped.
Report: TypeAlias = Callable[..., None]


@contextmanager
def trainings(show: ShowProgress, n: int) -> Iterator[Report]:
    """Count n trainings, and show and log their progress, in this context."""
    from tqdm.auto import tqdm  # here, because it looks for a notebook

    if show is not None:
        check_function(show, "progress", "progress(state)")
    n_done, began = 0, time.monotonic()
    # Text in every notebook; elsewhere disable=None, with which tqdm shows the bar on a terminal only.
    shown = False if "ipykernel" in sys.modules else None
    hidden = shown if show is progress_bar else True
    with tqdm(total=n, disable=hidden, leave=False, unit="training") as bar:

        def report(stage: str, n_trained: int = 1, n_skipped: int = 0) -> None:
            nonlocal n_done
            n_done += n_trained
            bar.total -= n_skipped
            bar.update(n_trained)
            bar.set_description_str(stage)
            elapsed, left = time.monotonic() - began, max(0, bar.total - n_done)
            remaining = elapsed / n_done * left if n_done else None
            state = Progress(stage, n_done, bar.total, elapsed, remaining)
            logger.info("%s", state)
            if show is not None:
                show(state)

        if n:
            report("start", 0)
        yield report


def plural(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def duration(seconds: float | None) -> str:
    """Seconds in words."""
    if seconds is None or seconds < 99.5:
        return f"{seconds or 0.0:.2g} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:.3g} h"


@dataclass(frozen=True)
class Fold:
    """The rows on which the surrogate of a fold is trained, and those at which it is evaluated.

    These are held-out points, anchors and some other training points. For rollouts, they are the states from which they start.
    """

    number: int
    n_folds: int
    training_rows: Int[np.ndarray, " n_train"]
    evaluated_rows: Int[np.ndarray, " n_evaluated"]

    def __str__(self) -> str:
        return f"fold {self.number + 1} of {self.n_folds}"


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

    def __repr__(self) -> str:
        return f"PredictedFolds of {len(self.arrays)} folds"


@dataclass(frozen=True)
class PairFolds:
    """The source for pairs; ``first`` keeps the first surrogate while the next one is trained."""

    recipe: Any
    x: Any
    y: Any
    first: First = field(default_factory=list, repr=False, compare=False)

    def n_together(self, n_folds: int) -> int:
        check_count(self.recipe, n_folds)
        if isinstance(self.recipe, PredictedFolds):
            for number, given in enumerate(self.recipe.arrays):
                name, n = f"arrays[{number}]", len(self.x)
                n_rows = given.shape[0] if is_lazy(given) else len(to_numbers(given, name))
                if n_rows != n:
                    raise ValueError(
                        f"PredictedFolds.{name} has {n_rows} rows, but x has {n} rows; pass a prediction for every row of x."
                    )
        if not hasattr(self.recipe, "train_many"):
            return 1
        return int(self.recipe.n_together(native(self.x), native(self.y)))

    def train(self, subsets: Sequence[np.ndarray]) -> list[Surrogate]:
        return train_each(self.recipe, self.x, self.y, subsets)

    def answers(self, surrogate: Any, fold: Fold) -> np.ndarray:
        rows = fold.evaluated_rows
        if isinstance(self.recipe, PredictedFolds):
            own = take(stored(surrogate), rows)
            return answers_of(lambda part: part, own, f"the prediction of {fold}")
        new = isinstance(self.x, Table) and lacking_levels(self.x, fold.training_rows)
        unknown = (
            f"; its training rows lack {new}, so the model must accept new categories, for example with "
            "OneHotEncoder(handle_unknown='ignore')"
        )
        with add_note_on_error(f"while evaluating the surrogate of {fold}{unknown if new else ''}"):
            return answers_of(surrogate, take(self.x, rows), "surrogate")

    def probe(self, surrogate: Surrogate, fold: Fold, answers: np.ndarray) -> tuple[Any, ...]:
        ask = partial(answers_of, surrogate, name="surrogate")
        return ask, take(self.x, fold.evaluated_rows), answers


def check_count(recipe: Any, n_folds: int) -> None:
    """Raise unless surrogates or predictions from elsewhere are one per fold."""
    given = _given(recipe)
    if given is not None and len(given) != n_folds:
        raise ValueError(
            f"{type(recipe).__name__} has {len(given)} entries, but there are {n_folds} folds; pass one entry per fold, in the order "
            "of the folds."
        )


def _given(recipe: Any) -> Sequence[Any] | None:
    """What was trained elsewhere, one entry per fold; None for a recipe."""
    if isinstance(recipe, PredictedFolds):
        return recipe.arrays
    return recipe.surrogates if isinstance(recipe, TrainedFolds) else None


def predictions_of(source: Any, folds: Sequence[Fold]) -> list[np.ndarray]:
    """The predictions of the surrogates of these folds, which are trained here or are given."""
    given = _given(source.recipe)
    if given is not None:
        return [source.answers(given[fold.number], fold) for fold in folds]
    together = f" to {folds[-1]} together" if len(folds) > 1 else ""
    with add_note_on_error(
        f"while training the surrogate{'s' * bool(together)} of {folds[0]}{together}"
    ):
        surrogates = source.train([fold.training_rows for fold in folds])
    check_first(source.first)
    answers = [source.answers(*pair) for pair in zip(surrogates, folds, strict=True)]
    keep_first(source.first, *source.probe(surrogates[0], folds[0], answers[0]))
    return answers


def train_each(
    recipe: TrainSurrogate, x: Any, y: Any, subsets: Sequence[np.ndarray]
) -> list[Surrogate]:
    """Train a surrogate on each subset of the rows, together if the recipe supports it."""
    if len(subsets) > 1 and hasattr(recipe, "train_many"):
        kept = [isinstance(getattr(part, "base", None), np.memmap) for part in (x, y)]
        own = [native(p if k else own_copy(p)) for p, k in zip((x, y), kept, strict=True)]
        surrogates = list(recipe.train_many(own[0], own[1], subsets))
    else:
        pairs = ((native(take(x, rows)), native(take(y, rows))) for rows in subsets)
        surrogates = [recipe(*pair) for pair in pairs]
    for surrogate in surrogates:
        check_callable(surrogate, TRAINED)
    return surrogates


def train_deployed(recipe: TrainSurrogate, x: Any, y: Any) -> Surrogate:
    """A surrogate that is trained on all data (line 1)."""
    with add_note_on_error("while training the deployed surrogate by train_surrogate(x, y)"):
        trained = recipe(native(own_copy(x)), native(own_copy(y)))
        check_callable(trained, TRAINED)
    return trained


def is_pretrained(train_surrogate: object) -> bool:
    """Whether nothing is trained: the fold surrogates were trained elsewhere, or there is no recipe."""
    return train_surrogate is None or isinstance(train_surrogate, TrainedFolds | PredictedFolds)


def count_trainings(surrogate: object, train_surrogate: object, n_folds: int) -> int:
    """The number of trainings: one per fold, and one for a deployed surrogate that is not given."""
    return n_folds * (not is_pretrained(train_surrogate)) + (surrogate is None)


def in_jobs(folds: list[T], n_together: int, n_workers: int) -> list[list[T]]:
    """At most ``n_together`` folds per job, and fewer if there would not be a job for every worker."""
    step = max(1, min(n_together, math.ceil(len(folds) / n_workers)))
    return [folds[start : start + step] for start in range(0, len(folds), step)]


def fold_predictions(
    source: Any, folds: Sequence[Fold], progress: Report, checkpoint: Checkpoint | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over fold numbers and the predictions of the fold surrogates, in the order in which they are finished.

    The jobs run through joblib: one after the other in this process, unless ``joblib.parallel_config`` selects other workers.
    """
    from joblib import Parallel, delayed, effective_n_jobs  # here, because it takes long to import

    # A fold without rows to evaluate needs no surrogate.
    needed = [fold for fold in folds if len(fold.evaluated_rows)]
    jobs = in_jobs(needed, source.n_together(len(folds)), effective_n_jobs(None))
    if checkpoint is not None:
        # The same jobs as in the interrupted run: rounding depends on which networks are trained together.
        jobs = checkpoint.jobs(jobs)
    missing = []
    for job in jobs:
        if checkpoint is None or not all(checkpoint.has(fold.number) for fold in job):
            missing.append(job)
            continue
        progress(f"{plural(len(job), 'fold')} from the checkpoint", 0, len(job))
        for fold in job:
            yield fold.number, checkpoint.load(fold.number, len(fold.evaluated_rows))
    # One tuple, not two arguments: Dask stores larger arguments on a single worker, and they are lost if it fails.
    tasks = [(source, job) for job in missing]
    done: Iterable[tuple[list[int], list[np.ndarray]]] = map(_computed, tasks)
    trained = not is_pretrained(source.recipe)
    if trained:  # workers are used for trainings only
        done = Parallel(return_as="generator_unordered")(delayed(_computed)(task) for task in tasks)
    with _termination_as_exit():
        for numbers, predictions in done:
            if trained:
                n = len(numbers)
                progress(str(folds[numbers[0]]) if n == 1 else f"{n} folds", n)
            for number, prediction in zip(numbers, predictions, strict=True):
                if checkpoint is not None:
                    checkpoint.save(number, prediction)
                yield number, prediction


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, on which joblib ends its workers, unless the user handles it or this is no main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _computed(task: tuple[Any, list[Fold]]) -> tuple[list[int], list[np.ndarray]]:
    source, folds = task
    return [fold.number for fold in folds], predictions_of(source, folds)


def check_sources(surrogate: object, train_surrogate: object, arguments: str) -> None:
    """Raise if there is no model at all, and for models that cannot be called."""
    is_source = train_surrogate is not None and is_pretrained(train_surrogate)
    if surrogate is None and is_pretrained(train_surrogate):
        kind = f" is a {type(train_surrogate).__name__}, which does not train" * is_source
        raise ValueError(
            f"surrogate=None and train_surrogate{kind or '=None'}, so there is no model whose error could be estimated; pass a trained "
            f"surrogate, or a function train_surrogate({arguments}) that returns one."
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
    source: Any, splits: Sequence[tuple[np.ndarray, np.ndarray]], n_trainings: int
) -> TrainingTime:
    """Train and evaluate the surrogates of one job, and estimate the time of all; without a recipe nothing is trained."""
    if is_pretrained(source.recipe):
        return TrainingTime(n_trainings)
    from joblib import effective_n_jobs  # here, because it takes long to import

    folds = [Fold(n, len(splits), *split) for n, split in enumerate(splits) if len(split[1])]
    n_workers = effective_n_jobs(None)
    jobs = in_jobs(folds, source.n_together(len(folds)), n_workers)
    # The job whose size is nearest to the mean.
    sizes = np.array([sum(len(fold.training_rows) for fold in job) for job in jobs])
    job = jobs[int(abs(sizes - sizes.mean()).argmin())]
    began = time.perf_counter()
    predictions_of(source, job)
    return TrainingTime(n_trainings, len(job), time.perf_counter() - began, n_workers)
