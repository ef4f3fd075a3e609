"""The calibration is the same if fold surrogates are trained together, on other workers, or elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from joblib import parallel_config
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, PredictedFolds, RandomFolds, TrainedFolds


def fit(problem, train, **settings):
    settings = {"folds": RandomFolds(4), **settings}
    surrogate = problem.train(problem.x, problem.y)
    return GeoQ(surrogate, train, **settings).fit(problem.x, problem.y).fitted_.tuples


def test_a_recipe_that_trains_together_is_called_once_per_job(problem):
    sizes = []

    class Recorder:
        def __call__(self, x, y):
            raise AssertionError

        def n_together(self, x, y):
            return 2

        def train_many(self, x, y, subsets):
            sizes.append([len(rows) for rows in subsets])
            return [problem.train(x[rows], y[rows]) for rows in subsets]

    together = fit(problem, Recorder())
    assert sizes == [[90, 90], [90, 90]]
    assert_allclose(together.error, fit(problem, problem.train).error)


def test_surrogates_and_predictions_from_elsewhere_give_the_same_calibration(problem):
    splits = RandomFolds(4).split(problem.x)
    surrogates = [problem.train(problem.x[rows], problem.y[rows]) for rows, _ in splits]
    expected = fit(problem, problem.train)
    arrays = [surrogate(problem.x) for surrogate in surrogates]
    for source in (TrainedFolds(surrogates), PredictedFolds(arrays)):
        found = fit(problem, source)
        assert_allclose(found.error, expected.error)
        assert_allclose(found.features.anchor_error, expected.features.anchor_error)


def test_surrogates_and_predictions_from_elsewhere_must_match_the_folds(problem):
    surrogate = problem.train(problem.x, problem.y)
    known = surrogate(problem.x)
    for source, message in (
        (TrainedFolds([surrogate] * 3), "TrainedFolds has 3 entries, but there are 4 folds"),
        (PredictedFolds([known] * 3 + [known[1:]]), r"arrays\[3\] has 119 rows, but x has 120"),
        (PredictedFolds([known * np.nan] * 4), r"surrogate\(x\)\[0, 0\] is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(problem, source)
    estimator = GeoQ(None, TrainedFolds([surrogate] * 15))
    with pytest.raises(ValueError, match="TrainedFolds, which does not train"):
        estimator.fit(problem.x, problem.y)


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


def test_processes_of_one_machine_give_the_same_calibration(problem, tmp_path):
    nearest, _ = recipes(tmp_path)
    here = fit(problem, nearest)
    with parallel_config(backend="loky", n_jobs=2):
        there = fit(problem, nearest)
    assert_array_equal(here.error, there.error)
    assert_array_equal(here.fold, there.fold)


def test_an_exception_on_a_worker_keeps_its_type_and_its_fold(problem):
    def fails(x, y):
        raise ZeroDivisionError("inside the user's code")

    with parallel_config(backend="threading", n_jobs=2), pytest.raises(ZeroDivisionError) as caught:
        fit(problem, fails)
    assert "while training the surrogate of fold" in caught.value.__notes__[0]


def test_a_cluster_that_loses_a_worker_gives_the_same_calibration(problem, tmp_path):
    """One of two Dask workers is killed during a training."""
    distributed = pytest.importorskip("distributed")
    nearest, kills_its_worker = recipes(tmp_path)
    here = fit(problem, nearest, folds=RandomFolds(8))
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=50,
        ) as cluster,
        distributed.Client(cluster),
        parallel_config(backend="dask"),
    ):
        there = fit(problem, kills_its_worker, folds=RandomFolds(8))
    assert (tmp_path / "killed").exists()
    assert_array_equal(here.error, there.error)
    assert_array_equal(here.features.flat, there.features.flat)


MEMORY = """
import json, sys
from pathlib import Path
import numpy as np
from geoq import GeoQ, RandomFolds

class NoBound:
    uses_neighborhood = False
    def fit(self, tuples, quantile):
        return lambda features: np.zeros_like(features.anchor_error)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024

x = np.random.default_rng(0).normal(size=(150, 96, 96))
y = np.roll(x, 1, 1)
estimator = GeoQ(lambda x: x, lambda x, y: np.tanh, folds=RandomFolds(int(sys.argv[1])), bound_model=NoBound())
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
estimator.fit(x, y)
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_memory_of_cross_fitted_fields_does_not_grow_with_the_folds():
    def extra(n_folds):
        command = [sys.executable, "-c", MEMORY, str(n_folds)]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    few, many = extra(3), extra(10)
    assert many < 1.2 * few
