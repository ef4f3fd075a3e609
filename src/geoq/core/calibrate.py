"""Algorithm 1 of the paper, lines 1 to 12; ``fitted.py`` has lines 13 to 17."""

from typing import Any

from geoq.arrays import few_threads
from geoq.training.checkpoint import Checkpoint
from geoq.training.sources import ShowProgress, trainings


def calibrate(task: Any, show: ShowProgress, finished: Checkpoint | None) -> Any:
    """Calibrate the error bound of a surrogate.

    Args:
        task: ``Pairs`` or ``Trajectories``, with the settings of the estimator: their points, and the errors of a fold
            surrogate, are what differs. The folds were drawn before (line 5), so that unusable data raise before any training.
        show: how the progress is shown.
        finished: the checkpoint; None without one.

    Returns:
        The fitted estimator, which answers queries.
    """
    with trainings(show, task.n_trainings) as progress:
        # Line 1: the deployed surrogate F-hat, given or trained on all data.
        surrogate = task.deployed(progress)
        # Lines 2 to 4: the representation phi, the normalisation nu and the observed errors E.
        points = task.relate(surrogate, finished)
        # Lines 6 and 8, first part: what each fold leaves in, and how its held-out points are related to that.
        held_out = task.folds(points)
        # Line 7: train a surrogate for each fold; only its predictions are kept.
        predictions = task.predictions(held_out, surrogate, progress, finished)
        # Lines 8 and 9: the errors of the held-out points.
        for fold, prediction in predictions:
            held_out.put(fold, prediction)
    # Line 10: the calibration tuples of all folds together.
    tuples = task.tuples(points, held_out)
    with few_threads(tuples.n_numbers):
        # Lines 11 and 12: the bound, with the standardisation T where the bound uses it.
        bound = task.fit_bound(tuples)
        # The threshold tau_safe of line 16.
        region = task.fit_region(tuples)
    return task.fitted(surrogate, points, tuples, bound, region)
