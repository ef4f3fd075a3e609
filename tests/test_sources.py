"""The calibration is the same if fold surrogates are trained together, on other workers, or elsewhere."""

import os
import signal
import time

import pytest
from joblib import parallel_config
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, NestedFolds, PredictedFolds, RandomFolds, TrainedFolds
from geoq.training.sources import TrainingTime, count_trainings, in_jobs, is_pretrained

FOLDS = RandomFolds(4)


def fit(problem, train, **settings):
    surrogate = problem.train(problem.x, problem.y)
    estimator = GeoQ(surrogate, train, **{"folds": FOLDS, **settings})
    return estimator.fit(problem.x, problem.y).fitted_.tuples


class Together:
    """A recipe that trains two surrogates at once, and records the numbers of their rows."""

    def __init__(self, train):
        self.train, self.sizes = train, []

    def __call__(self, x, y):
        self.sizes.append([len(x)])
        return self.train(x, y)

    def n_together(self, x, y):
        return 2

    def train_many(self, x, y, subsets):
        self.sizes.append([len(rows) for rows in subsets])
        return [self.train(x[rows], y[rows]) for rows in subsets]


@pytest.mark.parametrize(("folds", "sizes"), [
    (FOLDS, [[90, 90], [90, 90]]),
    (NestedFolds(3), [[90, 60], [30]]),
], ids=repr)  # fmt: skip
def test_a_recipe_that_trains_together_is_called_once_per_job(problem, folds, sizes):
    recipe = Together(problem.train)
    together, alone = (fit(problem, train, folds=folds) for train in (recipe, problem.train))
    assert recipe.sizes == sizes
    assert_allclose(together.error, alone.error)
    assert_allclose(together.increment, alone.increment)


def test_jobs_leave_no_worker_without_one():
    folds = [*range(7)]
    assert in_jobs(folds, n_together=4, n_workers=1) == [[0, 1, 2, 3], [4, 5, 6]]
    assert in_jobs(folds, n_together=4, n_workers=3) == [[0, 1, 2], [3, 4, 5], [6]]


def elsewhere(problem):
    return [problem.train(problem.x[rows], problem.y[rows]) for rows, _ in FOLDS.split(problem.x)]


def test_surrogates_and_predictions_from_elsewhere_give_the_same_calibration(problem):
    surrogates, expected = elsewhere(problem), fit(problem, problem.train)
    arrays = [surrogate(problem.x) for surrogate in surrogates]
    for source in (TrainedFolds(surrogates), PredictedFolds(arrays)):
        tuples = fit(problem, source)
        assert_allclose(tuples.error, expected.error)
        assert_allclose(tuples.features.anchor_error, expected.features.anchor_error)
        assert is_pretrained(source)
        assert count_trainings(None, source, 4) == 1
    assert (count_trainings(None, problem.train, 4), count_trainings(len, None, 4)) == (5, 0)


def recipes(folder):
    """A nearest-neighbour recipe, and the same recipe that kills its worker process in the first training.

    They are defined inside a function to be pickled by value, because other processes cannot import this file.
    """
    marker = str(folder / "killed")

    def nearest(x, y):
        return lambda q: y[((q[:, None] - x[None]) ** 2).sum(axis=2).argmin(axis=1)]

    def kills_its_worker(x, y):
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(0.05)
            return nearest(x, y)
        time.sleep(0.3)  # until the other worker has started
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    return nearest, kills_its_worker


OTHER = "ignore:the mean error of the deployed surrogate"


@pytest.mark.filterwarnings(OTHER)
@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_workers_of_one_machine_give_the_same_calibration(problem, tmp_path, backend):
    nearest, _ = recipes(tmp_path)
    here = fit(problem, nearest)
    with parallel_config(backend=backend, n_jobs=2):
        there = fit(problem, nearest)
    assert_array_equal(here.error, there.error)
    assert_array_equal(here.fold, there.fold)


@pytest.mark.filterwarnings(OTHER)
def test_a_cluster_that_loses_a_worker_gives_the_same_calibration(problem, tmp_path):
    """One of two Dask workers is killed during a training."""
    distributed = pytest.importorskip("distributed")
    nearest, kills_its_worker = recipes(tmp_path)
    here = fit(problem, nearest, folds=RandomFolds(8))
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
    )
    with cluster, distributed.Client(cluster), parallel_config(backend="dask"):
        there = fit(problem, kills_its_worker, folds=RandomFolds(8))
    assert (tmp_path / "killed").exists()
    assert_array_equal(here.error, there.error)
    assert_array_equal(here.features.flat, there.features.flat)


def test_estimates_count_workers_and_networks_that_are_trained_together(problem):
    model = problem.train(problem.x, problem.y)
    for source in (None, TrainedFolds([model] * 4)):
        estimator = GeoQ(model, source, folds=FOLDS)
        assert str(estimator.estimate(problem.x, problem.y)) == "no trainings"
    time = TrainingTime(16, n_together=4, seconds_of_one=30.0, n_workers=2)
    assert time.seconds == 60
    text = "16 trainings, 4 at once: 30 s for one, about 60 s in total on 2 workers"
    assert str(time) == text
    recipe = Together(problem.train)
    assert GeoQ(None, recipe, folds=FOLDS).estimate(problem.x, problem.y).n_together == 2
    assert recipe.sizes == [[90, 90]]
