"""Time of a calibration relative to one training, of an assessment relative to one prediction, and their growth with the data.

    python -m benchmarks.costs.cost                      # 7 minutes on two cores
    python -m benchmarks.costs.cost --small

All ratios are ratios of seconds measured in one run on one machine. On a busy machine they vary by tens of percent; ratios
of CPU seconds, which are given where one process does all the work, do not.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from joblib import parallel_config

from benchmarks import record
from benchmarks.forrester import load as load_forrester
from benchmarks.rollouts.data import SMALL, Settings, load, recipe_of
from benchmarks.runs import parser_of
from benchmarks.suite.problems import kuramoto_sivashinsky
from benchmarks.timing import now
from geoq import (
    MLP,
    ClusterFolds,
    GeoQ,
    NestedFolds,
    RandomFolds,
    RolloutGeoQ,
    Training,
    TrainNetwork,
)
from geoq.core.fitted import embed
from geoq.parts import NormScaledBound

BATCHES = (1, 100, 10_000)
SIZES, SMALL_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000), (1_000, 2_000)
# Seconds of a fit after which no larger problem is tried.
PATIENCE = 120.0


@dataclass(frozen=True)
class Case:
    """Training pairs, the paper's network and folds, and the numbers of processes that train the folds."""

    name: str
    x: np.ndarray
    y: np.ndarray
    recipe: TrainNetwork
    folds: Any
    n_jobs: tuple[int, ...] = (1,)


def cases(*, small):
    """The cases: the paper's networks with 250 passes over the data and early stopping."""
    stop = {"n_steps": 60, "check_every": 20} if small else {"patience": 30}
    x, y, _, _ = load_forrester(240 if small else 1200, 10)
    make = partial(MLP, 1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)
    training = Training(**{"n_steps": 8440, "batch_size": 32} | stop)
    yield Case("forrester", x, y, TrainNetwork(make, training=training), NestedFolds(10))
    data = kuramoto_sivashinsky(0, 150 if small else 4000, 10)
    n = 2 if small else 64
    make = partial(MLP, 64, n, hidden=(128, 128, 16, 128, 128), n_encoder_layers=3)
    training = Training(**{"n_steps": 14_060, "batch_size": 64} | stop)
    recipe, jobs = TrainNetwork(make, training=training), (1,) if small else (2, 1)
    yield Case("kuramoto-sivashinsky", data.x, data.y[:, :n], recipe, ClusterFolds(5), jobs)


def seconds_of(work):
    """Result, seconds and CPU seconds of a call."""
    started, cpu = now(), time.process_time()
    result = work()
    return result, now() - started, time.process_time() - cpu


def least_seconds(work, n_times):
    return min(seconds_of(work)[1] for _ in range(n_times))


def measure(case, *, small):
    """Rows of one case: time of calibration relative to training, and of assessment relative to prediction."""
    x, y = case.x.astype(np.float32), case.y.astype(np.float32)
    warm = replace(case.recipe, training=Training(n_steps=20, check_every=10))
    warm.train_many(x[:80], y[:80], [np.arange(80)] * 2)
    surrogate, first, cpu = seconds_of(lambda: case.recipe(x, y))
    brief = {"bound_model": NormScaledBound(training=Training(n_steps=40))} if small else {}
    forms = {
        "default": GeoQ(surrogate, case.recipe, folds=case.folds),
        "paper": GeoQ.paper(
            surrogate, case.recipe, folds=case.folds, representation=surrogate.encoder, **brief
        ),
    }
    splits = [train for train, _ in case.folds.split(case.x)]
    about = {"kind": "calibration", "problem": case.name, "device": "cpu", "seed": 0}
    about["n_folds"], rows = len(splits), []
    for form, geoq in forms.items():
        for n_jobs in case.n_jobs:
            with parallel_config(n_jobs=n_jobs) if n_jobs > 1 else nullcontext():
                _, seconds, own = seconds_of(partial(geoq.fit, x, y, progress=None))
            row = {"form": form, "n_jobs": n_jobs, "calibration_seconds": seconds}
            row["calibration_over_training_cpu"] = own / cpu if n_jobs == 1 else None
            rows.append(about | row | assessed(geoq.fitted_, x))
            print(rows[-1], flush=True)
    # The training is timed again at the end, because the load of the machine may have changed.
    training = (first + seconds_of(lambda: case.recipe(x, y))[1]) / 2
    for row in rows:
        row["training_seconds"] = training
        row["calibration_over_training"] = row["calibration_seconds"] / training
    two = [splits[0], splits[len(splits) // 2]]
    alone = least_seconds(lambda: [case.recipe(x[own], y[own]) for own in two], 1) / 2
    together = least_seconds(lambda: case.recipe.train_many(x, y, splits), 1)
    return [*rows, about | folds_alone(len(splits) * alone, together, training)]


def folds_alone(alone, together, training):
    """Columns of the time of the fold trainings only: one by one, and together."""
    return {
        "form": "folds alone",
        "one_by_one_over_training": alone / training,
        "together_over_training": together / training,
    }


def assessed(fitted, x):
    """Time of an assessment and of its neighbour searches, both relative to the prediction."""
    ratios, searches, rng = {}, {}, np.random.default_rng(0)
    for n in BATCHES:
        queries, n_times = 1.01 * x[rng.integers(len(x), size=n)], 3 if n > 1 else 30
        fitted.assess(queries)
        space = embed(fitted.representation, fitted.metric, queries, fitted.coordinates(queries))
        features = fitted._view(queries)[0]
        alone = least_seconds(partial(fitted.surrogate, queries), n_times)
        searched = least_seconds(partial(fitted.geometry.relate, space), n_times)
        if hasattr(fitted.region, "cloud"):  # the paper's region is a search, too
            searched += least_seconds(partial(fitted.region.support_score, features), n_times)
        whole = least_seconds(partial(fitted.assess, queries), n_times)
        ratios[str(n)], searches[str(n)] = round(whole / alone, 1), round(searched / alone, 1)
    return {"assessment_over_prediction": ratios, "search_over_prediction": searches}


def rollouts(*, small):
    """Rows of RolloutGeoQ on the Kuramoto-Sivashinsky trajectory: calibration, and the fold trainings only."""
    settings = SMALL if small else Settings()
    train = load(0.25, 0, settings).train.astype(np.float32)
    recipe = recipe_of(settings, 0)
    surrogate, first, cpu = seconds_of(lambda: recipe([train]))
    sizes = {"n_calibration": settings.n_calibration, "n_starts": settings.n_starts}
    geoq = RolloutGeoQ(surrogate, recipe, **sizes)
    _, seconds, own = seconds_of(lambda: geoq.fit(train, progress=None))
    runs = [
        np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
        for rows, _ in geoq.folds.split(np.zeros((len(train), 1)))
    ]
    alone = least_seconds(lambda: [recipe([train[run] for run in of]) for of in runs], 1)
    together = least_seconds(lambda: recipe.train_many(train, runs), 1)
    training = (first + seconds_of(lambda: recipe([train]))[1]) / 2
    about = {"kind": "calibration", "problem": "kuramoto-sivashinsky, rollouts", "device": "cpu"}
    about |= {"seed": 0, "n_folds": len(runs)}
    row = {"form": "default", "n_jobs": 1, "training_seconds": training}
    row |= {"calibration_seconds": seconds, "calibration_over_training": seconds / training}
    row |= {"calibration_over_training_cpu": own / cpu, "assessment_over_prediction": None}
    row["search_over_prediction"] = None
    return [about | row, about | folds_alone(alone, together, training)]


def growth(*, small):
    """Seconds of a calibration without training and of 1,000 assessments by the number of points."""
    rows = []
    for n in SMALL_SIZES if small else SIZES:
        x = np.random.default_rng(0).standard_normal((n, 4))
        geoq = GeoQ(lambda x: 4 + 0 * x[:, :1], None, folds=RandomFolds(5))
        fit = partial(geoq.fit, x, (x**2).sum(axis=1, keepdims=True), progress=None)
        _, seconds, _ = seconds_of(fit)
        geoq.assess(x[:1000])
        asking = least_seconds(partial(geoq.assess, 1.1 * x[:1000]), 3)
        times = {"fit_seconds": seconds, "assess_1000_seconds": asking}
        rows.append({"kind": "growth", "seed": 0, "n": n, **times})
        print(rows[-1], flush=True)
        if seconds > PATIENCE:
            break
    return rows


def main(words=None):
    asked = parser_of(__doc__).parse_args(words)
    small = asked.small
    rows = [row for case in cases(small=small) for row in measure(case, small=small)]
    rows += [*rollouts(small=small), *growth(small=small)]
    return record.write("cost", rows, asked.out, small=small)


if __name__ == "__main__":
    main()
