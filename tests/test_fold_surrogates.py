"""The calibration is the same if fold surrogates are trained together, on other workers, or elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from joblib import parallel_config
from torch.testing import assert_close

from benchmarks.rivals import RememberedTraining
from geoq import (
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    PredictedFolds,
    RandomFolds,
    TrainedFolds,
    Training,
    TrainNetwork,
)
from geoq.nets.mlp import MLP

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
NETWORK = TrainNetwork(
    partial(MLP, 2, 1, hidden=(16,)), training=Training(n_steps=60, check_every=20)
)


def fit(problem, train, **settings):
    settings = {"folds": RandomFolds(4), "increment_model": QUICK, **settings}
    surrogate = problem.train(problem.x, problem.y)
    return GeoQ(surrogate, train, **settings).fit(problem.x, problem.y)


def splits(problem):
    return [*RandomFolds(4).split(problem.x.cpu().numpy())]


@pytest.mark.parametrize("folds", [RandomFolds(4), NestedFolds(3)], ids=repr)
def test_networks_trained_together_and_one_by_one_give_the_same_calibration(
    problem, folds
):
    together = fit(problem, NETWORK, folds=folds, n_support=5)
    alone = fit(problem, lambda x, y: NETWORK(x, y), folds=folds, n_support=5)
    for part in ("error", "increment"):
        assert_close(
            getattr(together.calibration_, part),
            getattr(alone.calibration_, part),
            rtol=1e-3,
            atol=1e-4,
        )


def test_a_recipe_that_trains_together_is_called_once_per_job(problem):
    sizes = []

    class Recorder:
        def __call__(self, x, y):
            raise AssertionError

        def n_together(self, x, y):
            return 2

        def train_many(self, x, y, subsets, seeds=None):
            assert seeds is None
            sizes.append([len(rows) for rows in subsets])
            return [problem.train(x[rows], y[rows]) for rows in subsets]

    together, alone = fit(problem, Recorder()), fit(problem, problem.train)
    assert sizes == [[90, 90], [90, 90]]
    assert_close(together.calibration_.error, alone.calibration_.error)


def test_an_exception_in_a_training_of_several_folds_names_the_folds(problem):
    exploding = Training(n_steps=20, learning_rate=1e30, check_every=10)
    with pytest.raises(FloatingPointError) as caught:
        fit(problem, TrainNetwork(NETWORK.make_network, training=exploding))
    assert caught.value.__notes__ == [
        "while training the surrogates of fold 1 of 4 to fold 4 of 4 together"
    ]


def test_remembered_trainings_are_not_repeated_together_or_alone(problem):

    remembered = RememberedTraining(NETWORK)
    first = fit(problem, remembered)
    assert not remembered.seconds_saved
    second = fit(problem, remembered)
    assert remembered.seconds_saved > 0
    assert torch.equal(first.calibration_.error, second.calibration_.error)
    rows = torch.as_tensor(splits(problem)[0][0], device=problem.x.device)
    before = remembered.seconds_saved
    remembered(problem.x[rows], problem.y[rows])
    assert remembered.seconds_saved > before


def test_surrogates_and_predictions_from_elsewhere_give_the_same_calibration(problem):
    surrogates = [
        problem.train(problem.x[train], problem.y[train])
        for train, _ in splits(problem)
    ]
    expected = fit(problem, problem.train).calibration_
    pretrained = fit(problem, TrainedFolds(surrogates)).calibration_
    assert_close(pretrained.error, expected.error)
    arrays = [surrogate(problem.x) for surrogate in surrogates]
    predicted = fit(problem, PredictedFolds(arrays)).calibration_
    assert_close(predicted.error, expected.error)
    assert_close(predicted.features.anchor_error, expected.features.anchor_error)


def test_surrogates_and_predictions_from_elsewhere_must_match_the_folds(problem):
    surrogate = problem.train(problem.x, problem.y)
    with pytest.raises(
        ValueError, match="TrainedFolds has 3 entries, but there are 4 folds"
    ):
        fit(problem, TrainedFolds([surrogate] * 3))
    short = [surrogate(problem.x)] * 3 + [surrogate(problem.x)[1:]]
    with pytest.raises(
        ValueError, match=r"arrays\[3\] has 119 rows, but x has 120 rows"
    ):
        fit(problem, PredictedFolds(short))
    broken = surrogate(problem.x) * torch.nan
    with pytest.raises(ValueError, match=r"the prediction of fold 1 of 4\(x\)\[0, 0\]"):
        fit(problem, PredictedFolds([broken] * 4))


def test_surrogates_from_elsewhere_cannot_train_the_deployed_surrogate(problem):
    geoq = GeoQ(None, TrainedFolds([problem.train(problem.x, problem.y)] * 15))
    with pytest.raises(ValueError, match="TrainedFolds, which does not train"):
        geoq.fit(problem.x, problem.y)


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
    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy()
    geoq = GeoQ(None, nearest, folds=RandomFolds(4), increment_model=QUICK)
    here = geoq.fit(x, y).calibration_
    with parallel_config(backend="loky", n_jobs=2):
        there = geoq.fit(x, y).calibration_
    assert torch.equal(here.error, there.error)
    assert torch.equal(here.fold, there.fold)


def test_an_exception_on_a_worker_keeps_its_type_and_its_fold(problem):
    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy()

    def fails(x, y):
        raise ZeroDivisionError("inside the user's code")

    geoq = GeoQ(lambda x: x[:, :1], fails, folds=RandomFolds(2), increment_model=QUICK)
    with (
        parallel_config(backend="threading", n_jobs=2),
        pytest.raises(ZeroDivisionError) as caught,
    ):
        geoq.fit(x, y)
    assert "while training the surrogate of fold" in caught.value.__notes__[0]


def test_a_cluster_that_loses_a_worker_gives_the_same_calibration(problem, tmp_path):
    """One of two Dask workers is killed during a training."""
    distributed = pytest.importorskip("distributed")
    nearest, kills_its_worker = recipes(tmp_path)
    x, y = problem.x.cpu().numpy(), problem.y.cpu().numpy()
    settings = {"folds": RandomFolds(8), "increment_model": QUICK}
    surrogate = nearest(x, y)
    here = GeoQ(surrogate, nearest, **settings).fit(x, y).calibration_
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
        there = GeoQ(surrogate, kills_its_worker, **settings).fit(x, y).calibration_
    assert (tmp_path / "killed").exists()
    assert torch.equal(here.error, there.error)
    assert torch.equal(here.features.flat, there.features.flat)


MEMORY = """
import json, sys, torch
from pathlib import Path
from geoq import GeoQ, RandomFolds, TrainNetwork, Training
from torch import nn
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    def forward(self, x):
        return x + self.layers(x[:, None])[:, 0]

class NoIncrement:
    quantile = 0.95
    def fit(self, calibration):
        return self
    def __call__(self, features):
        return torch.zeros_like(features.anchor_error)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024

x = torch.randn(150, 96, 96, generator=torch.Generator().manual_seed(0))
y = x.roll(1, 1)
recipe = TrainNetwork(Net, training=Training(n_steps=1, batch_size=8))
geoq = GeoQ(lambda x: x, recipe, folds=RandomFolds(int(sys.argv[1])), increment_model=NoIncrement())
recipe(x[:20], y[:20])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
geoq.fit(x, y)
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_memory_of_cross_fitted_fields_does_not_grow_with_the_folds():
    def extra(n_folds):
        command = [sys.executable, "-c", MEMORY, str(n_folds)]
        done = subprocess.run(command, check=True, capture_output=True)
        return json.loads(done.stdout)

    few, many = extra(3), extra(10)
    assert many < 1.2 * few
