"""The time of all trainings of a calibration, estimated from one of them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from geoq.arrays import Rows
from geoq.training.fold_surrogates import Fold, FoldSurrogates
from geoq.training.progress import duration, plural


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
    x: Rows,
    y: Rows,
    splits: Sequence[tuple[np.ndarray, np.ndarray]],
    n_trainings: int,
) -> TrainingTime:
    """Train and evaluate the surrogates of one job, and estimate the time of all; without a source nothing is trained."""
    if source is None or source.pretrained:
        return TrainingTime(n_trainings)
    from joblib import effective_n_jobs  # here, because it takes long to import

    folds = [
        Fold(number, len(splits), torch.as_tensor(train), torch.as_tensor(held_out))
        for number, (train, held_out) in enumerate(splits)
    ]
    n_workers = effective_n_jobs(None)
    jobs = source.jobs(x, y, folds, n_workers)
    # The job whose size is nearest to the mean.
    sizes = np.array([sum(len(splits[n][0]) for n in job) for job in jobs])
    job = jobs[int(abs(sizes - sizes.mean()).argmin())]
    began = time.perf_counter()
    source.predictions(x, y, [folds[number] for number in job])
    took = time.perf_counter() - began
    return TrainingTime(n_trainings, len(job), took, n_workers)
