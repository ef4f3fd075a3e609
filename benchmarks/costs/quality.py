"""Quality of calibrations with fewer trainings."""

import copy
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from joblib import Parallel, delayed

from benchmarks.forrester import load as load_forrester
from benchmarks.record import QUANTILE
from benchmarks.suite.problems import PROBLEMS, SHIFTS
from geoq import (
    GeoQ,
    NormScaledIncrement,
    RandomFolds,
    TemporalFolds,
    Training,
    TrainNetwork,
)
from geoq.metrics import coverage, pinball
from geoq.nets.mlp import MLP
from geoq.training import SharedTraining

SEEDS = range(3)
QUICK = NormScaledIncrement(QUANTILE, training=Training(n_steps=40, check_every=20))


@dataclass(frozen=True)
class WarmStart:
    """A fold training that starts from the deployed network, which was trained on the held-out points.

    It is measured to show that this leaks: do not use it.
    """

    recipe: TrainNetwork
    surrogate: object

    def __call__(self, x, y):
        training = self.recipe.training
        return TrainNetwork(
            partial(copy.deepcopy, self.surrogate.network),
            training=replace(training, n_steps=training.n_steps // 10),
        )(x, y)


def quality_problems(seed, *, small):
    """Name, standardised data, recipe and arguments of GeoQ for each problem."""
    n_steps = 60 if small else 3000
    training = Training(n_steps=n_steps, batch_size=64, patience=15, random_state=seed)
    x, y, x_test, y_test = load_forrester(240 if small else 1200, 400)
    network = partial(MLP, 1, 1, hidden=(64, 64, 16, 32))
    recipe = TrainNetwork(network, training=training)
    quick = {"increment_model": QUICK} if small else {}
    yield "forrester", x, y, x_test, y_test, recipe, quick
    if small:
        return
    for name, n_train, folds in (
        ("kuramoto-sivashinsky", 1000, {"folds": TemporalFolds(5, gap=10)}),
        ("branin", 400, {}),
    ):
        data = PROBLEMS[name].make(seed, n_train, 200)
        mean, deviation = data.x.mean(axis=0), data.x.std(axis=0)
        x_test, y_test = (
            np.concatenate([data.tests[shift][part] for shift in SHIFTS])
            for part in (0, 1)
        )
        y, y_test = (v.reshape(len(v), -1) for v in (data.y, y_test))
        network = partial(MLP, data.x.shape[1], y.shape[1], hidden=(64, 64))
        recipe = TrainNetwork(network, training=training)
        x, x_test = ((v - mean) / deviation for v in (data.x, x_test))
        yield name, x, y, x_test, y_test, recipe, folds


def quality(n_jobs, *, small):
    """Rows of all problems, seeds and ways to calibrate: relative CPU time, pinball loss and coverage."""
    seeds = range(1) if small else SEEDS
    parts = Parallel(n_jobs)(
        delayed(ways)(seed, *problem)
        for seed in seeds
        for problem in quality_problems(seed, small=small)
    )
    return [row for rows in parts for row in rows]


def ways(seed, name, x, y, x_test, y_test, recipe, settings):
    torch.set_num_threads(1)
    recipe(x[:50], y[:50])  # imports the modules of the training
    started = time.process_time()
    surrogate = recipe(x, y)
    training_seconds = time.process_time() - started
    fewer = settings.get("folds", RandomFolds(5))
    # The last fifth of data in the order of time, otherwise a random fifth.
    order = np.random.default_rng(seed).permutation(len(x))
    order = np.arange(len(x)) if "folds" in settings else order
    kept = order >= 0.8 * len(x)
    n_support = min(20, int(kept.sum()) // 3)
    without = {**settings, "folds": fewer, "n_support": n_support}
    partly = recipe(x[~kept], y[~kept])
    calibrations = {
        "one training per fold": (GeoQ(surrogate, recipe, **settings), x, y),
        "shared trainings": (
            GeoQ(surrogate, SharedTraining(recipe), **settings),
            x,
            y,
        ),
        "random folds alone": (
            GeoQ(surrogate, recipe, **{**settings, "folds": fewer}),
            x,
            y,
        ),
        "no retraining, a fifth of the data kept for it": (
            GeoQ(partly, None, **without),
            x[kept],
            y[kept],
        ),
        "warm start (leaks)": (
            GeoQ(surrogate, WarmStart(recipe, surrogate), **settings),
            x,
            y,
        ),
        "no retraining on the training data (wrong)": (
            GeoQ(surrogate, None, **settings),
            x,
            y,
        ),
    }
    rows = []
    for way, (geoq, own_x, own_y) in calibrations.items():
        started = time.process_time()
        geoq.fit(own_x, own_y)
        seconds = time.process_time() - started
        a = geoq.assess(x_test)
        error = abs(y_test - a.prediction)
        row = {
            "problem": name,
            "way": way,
            "seed": seed,
            "calibration_over_training": seconds / training_seconds,
            "pinball": pinball(error, a.error_hat, QUANTILE),
            "coverage": coverage(error, a.error_hat),
            "safe_fraction": float(a.safe.mean()),
            "safe_coverage": coverage(error, a.error_hat, a.safe),
        }
        rows.append(row)
        print(
            f"{name}, seed {seed}, {way}: cost {row['calibration_over_training']:.2f}, pinball {row['pinball']:.4f}, "
            f"coverage {row['coverage']:.3f}, safe {row['safe_coverage']:.3f}",
            flush=True,
        )
    return rows
