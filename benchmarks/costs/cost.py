"""Time of a calibration relative to one training, and time of an assessment relative to one prediction.

    python -m benchmarks.costs.cost                      # calibration, assessment and growth: 7 minutes on two cores
    python -m benchmarks.costs.cost --device cuda        # the same on a GPU: 4 minutes
    python -m benchmarks.costs.cost --quality            # calibrations with fewer trainings: 10 minutes
    python -m benchmarks.costs.cost --small              # everything with small sizes: within a minute

All ratios are ratios of seconds measured in one run on one machine. On a busy machine they vary by tens of percent; ratios
of CPU seconds, which are given where one process does all the work, do not.
"""

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from joblib import parallel_config

from benchmarks import record
from benchmarks.costs import tables as cost_tables
from benchmarks.costs.quality import QUICK, quality
from benchmarks.forrester import load as load_forrester
from benchmarks.record import QUANTILE
from benchmarks.rollouts import kuramoto_sivashinsky as ks
from benchmarks.suite.problems import kuramoto_sivashinsky
from geoq import (
    ClusterFolds,
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    RolloutGeoQ,
    SafeRegion,
    Training,
    TrainNetwork,
)
from geoq.nets.mlp import MLP
from geoq.queries import coordinates_of, embed
from geoq.regions.safe_region import FittedSafeRegion
from geoq.rollout.trajectories import Trajectories

BATCHES = (1, 100, 10_000)
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
# Seconds of a fit after which no larger problem is tried.
PATIENCE = 120.0


@dataclass(frozen=True)
class Case:
    """Training pairs, the paper's network and folds, and the numbers of processes that train the folds on a CPU."""

    name: str
    x: np.ndarray
    y: np.ndarray
    recipe: TrainNetwork
    folds: object
    n_jobs: tuple[int, ...] = (1,)


def cases(*, small):
    """The cases: the paper's networks with 250 passes over the data and early stopping."""
    x, y, _, _ = load_forrester(240 if small else 1200, 10)
    steps = {"n_steps": 60, "check_every": 20} if small else {"patience": 30}
    network = partial(MLP, 1, 1, hidden=(64, 64, 16, 32), n_encoder_layers=3)
    training = Training(**{"n_steps": 8440, "batch_size": 32} | steps)
    yield Case(
        "forrester", x, y, TrainNetwork(network, training=training), NestedFolds(10)
    )
    data = kuramoto_sivashinsky(0, 150 if small else 4000, 10)
    n_outputs = 2 if small else 64
    hidden = (128, 128, 16, 128, 128)
    network = partial(MLP, 64, n_outputs, hidden=hidden, n_encoder_layers=3)
    training = Training(**{"n_steps": 14_060, "batch_size": 64} | steps)
    yield Case(
        "kuramoto-sivashinsky",
        data.x,
        data.y[:, :n_outputs],
        TrainNetwork(network, training=training),
        ClusterFolds(5),
        n_jobs=(1,) if small else (2, 1),
    )


def forms(surrogate, *, small):
    """Arguments of GeoQ for the default and for the paper's form; both use the paper's folds."""
    increment = QUICK if small else NormScaledIncrement(QUANTILE)
    return {
        "default": {},
        "paper": {
            "representation": surrogate.encoder,
            "increment_model": increment,
            "safe_region": SafeRegion(),
        },
    }


def seconds_of(work):
    """Result and seconds of a call; waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def least_seconds(work, n_times):
    return min(seconds_of(work)[1] for _ in range(n_times))


def measure(case, device, *, small):
    """Rows of one case: time of calibration relative to training, and of assessment relative to prediction."""
    x, y = (torch.from_numpy(part).float().to(device) for part in (case.x, case.y))
    warm = replace(case.recipe, training=Training(n_steps=20, check_every=10))
    warm.train_many(x[:80], y[:80], [torch.arange(80)] * 2)
    warm(x[:80], y[:80])
    started = time.process_time()
    surrogate, training_seconds = seconds_of(lambda: case.recipe(x, y))
    training_cpu = time.process_time() - started
    n_folds = len([*case.folds.split(case.x)])
    rows = []
    for form, settings in forms(surrogate, small=small).items():
        geoq = GeoQ(surrogate, case.recipe, folds=case.folds, **settings)
        for n_jobs in case.n_jobs if device == "cpu" else (1,):
            workers = parallel_config(n_jobs=n_jobs) if n_jobs > 1 else nullcontext()
            started = time.process_time()
            with workers:
                _, seconds = seconds_of(partial(geoq.fit, x, y))
            cpu_ratio = (time.process_time() - started) / training_cpu
            row = {
                "problem": case.name,
                "device": device,
                "form": form,
                "seed": 0,
                "n_folds": n_folds,
                "n_jobs": n_jobs,
                "training_seconds": training_seconds,
                "calibration_seconds": seconds,
                "calibration_over_training": seconds / training_seconds,
                "calibration_over_training_cpu": cpu_ratio if n_jobs == 1 else None,
                **assessed(geoq, x),
            }
            rows.append(row)
            print(
                f"{case.name}, {form}, {n_jobs} process(es): training {training_seconds:.1f} s, "
                f"calibration over training {row['calibration_over_training']:.2f} (CPU seconds {cpu_ratio:.2f}), "
                f"assessment over prediction {row['assessment_over_prediction']}",
                flush=True,
            )
    # The training is timed again at the end, because the load of the machine may have changed.
    training_seconds = (training_seconds + seconds_of(lambda: case.recipe(x, y))[1]) / 2
    for row in rows:
        row["training_seconds"] = training_seconds
        row["calibration_over_training"] = row["calibration_seconds"] / training_seconds
    if not small:
        rows.append(one_by_one(case, device, x, y, training_seconds, n_folds))
    return rows


def measure_rollouts(device, *, small):
    """Rows of RolloutGeoQ on the Kuramoto-Sivashinsky trajectory: calibration, and the fold trainings only."""
    settings = ks.SMALL if small else ks.Settings()
    train = torch.from_numpy(ks.load(0.25, 0, settings).train).float().to(device)
    recipe = ks.recipe_of(settings, 0)
    replace(recipe, training=QUICK.training)([train[:80]])
    started = time.process_time()
    surrogate, training_seconds = seconds_of(lambda: recipe([train]))
    training_cpu = time.process_time() - started
    geoq = RolloutGeoQ(
        surrogate,
        recipe,
        n_calibration=settings.n_calibration,
        n_starts=settings.n_starts,
    )
    started = time.process_time()
    _, seconds = seconds_of(lambda: geoq.fit(train))
    cpu_ratio = (time.process_time() - started) / training_cpu
    kept = [rows for rows, _ in geoq.folds.split(np.zeros((len(train), 1)))]
    trajectory = Trajectories(train, np.zeros(len(train), dtype=int))
    pieces = [trajectory.segments(rows) for rows in kept]
    _, alone = seconds_of(lambda: [recipe(piece) for piece in pieces])
    runs = [trajectory.runs(rows) for rows in kept]
    _, together = seconds_of(lambda: recipe.train_many(train, runs))
    training_seconds = (training_seconds + seconds_of(lambda: recipe([train]))[1]) / 2
    common = {
        "problem": "kuramoto-sivashinsky, rollouts",
        "device": device,
        "seed": 0,
        "n_folds": len(pieces),
    }
    rows = [
        {
            **common,
            "form": "default",
            "n_jobs": 1,
            "training_seconds": training_seconds,
            "calibration_seconds": seconds,
            "calibration_over_training": seconds / training_seconds,
            "calibration_over_training_cpu": cpu_ratio,
            "assessment_over_prediction": None,
            "search_over_prediction": None,
        },
        {
            **common,
            "form": "folds alone",
            "one_by_one_over_training": alone / training_seconds,
            "together_over_training": together / training_seconds,
        },
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def one_by_one(case, device, x, y, training_seconds, n_folds):
    """Time of the fold trainings only: one by one, extrapolated from two folds, and together."""
    splits = [torch.from_numpy(train) for train, _ in case.folds.split(case.x)]
    two = [splits[0], splits[len(splits) // 2]]
    _, seconds = seconds_of(lambda: [case.recipe(x[rows], y[rows]) for rows in two])
    seconds *= len(splits) / 2
    _, together = seconds_of(lambda: case.recipe.train_many(x, y, splits))
    print(
        f"{case.name}: folds alone over training, one by one {seconds / training_seconds:.2f}, "
        f"together {together / training_seconds:.2f}",
        flush=True,
    )
    return {
        "problem": case.name,
        "device": device,
        "form": "folds alone",
        "seed": 0,
        "n_folds": n_folds,
        "one_by_one_over_training": seconds / training_seconds,
        "together_over_training": together / training_seconds,
    }


def assessed(geoq, x):
    """Time of an assessment and of its neighbour searches, both relative to the prediction."""
    generator = torch.Generator().manual_seed(0)
    ratios, searches = {}, {}
    for n in BATCHES:
        rows = torch.randint(len(x), (n,), generator=generator)
        queries = 1.01 * x[rows.to(x.device)]
        n_times = 3 if n > 1 else 30
        geoq.assess(queries)
        alone = least_seconds(partial(geoq.surrogate_, queries), n_times)
        whole = least_seconds(partial(geoq.assess, queries), n_times)
        searched = least_seconds(partial(search, geoq, queries), n_times)
        ratios[str(n)], searches[str(n)] = whole / alone, searched / alone
    return {
        "assessment_over_prediction": {n: round(r, 1) for n, r in ratios.items()},
        "search_over_prediction": {n: round(r, 1) for n, r in searches.items()},
    }


def search(geoq, queries):
    """The neighbour searches of an assessment: anchors, support distance, and safe region if it has one."""
    relation = geoq.geometry_.relate(
        embed(geoq, queries, coordinates_of(geoq, queries))
    )
    if isinstance(geoq.safe_region_, FittedSafeRegion):
        geoq.safe_region_.support_score(
            replace(
                geoq.calibration_.features[: len(queries)],
                displacement=relation.displacement,
                support_distance=relation.support_distance,
            )
        )


def growth(device, *, small):
    """Seconds of a calibration without training and of 1,000 assessments by the number of points."""
    rows = []
    for n in (1_000, 2_000) if small else SIZES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, 4, generator=generator).to(device)
        y = x.square().sum(dim=1, keepdim=True)
        geoq = GeoQ(lambda x: 4 + 0 * x[:, :1], None, folds=RandomFolds(5))
        _, seconds = seconds_of(partial(geoq.fit, x, y))
        geoq.assess(x[:1000])
        assess_seconds = least_seconds(partial(geoq.assess, 1.1 * x[:1000]), 3)
        rows.append(
            {"n": n, "fit_seconds": seconds, "assess_1000_seconds": assess_seconds}
        )
        print(
            f"n = {n}: fit {seconds:.2f} s, 1,000 queries {assess_seconds:.3f} s",
            flush=True,
        )
        if seconds > PATIENCE:
            break
    large = [row for row in rows if row["n"] >= 10_000] or rows
    n = np.log([row["n"] for row in large])
    slopes = {
        name: float(np.polyfit(n, np.log([row[name] for row in large]), 1)[0])
        if len(large) > 1
        else None
        for name in ("fit_seconds", "assess_1000_seconds")
    }
    return {"device": device, "rows": rows, "slopes": slopes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument(
        "--quality",
        action="store_true",
        help="quality of calibrations with fewer trainings",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes for --quality")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument(
        "--picture", type=Path, help="file for the picture of the growth"
    )
    arguments = parser.parse_args()
    small = arguments.small
    path = arguments.out or record.RESULTS / (
        "cost.json" if arguments.device == "cpu" else f"cost-{arguments.device}.json"
    )
    # Results of the part that is not run are kept.
    known = json.loads(path.read_text()) if path.is_file() else {}
    rows = [r | {"commit": known["commit"]} for r in known.get("rows", [])]
    extra = {}
    for part in ("growth", "quality"):
        extra[part] = known.get(part)
    if arguments.quality or small:
        extra["quality"] = record.part(rows=quality(arguments.jobs, small=small))
    if not arguments.quality or small:
        rows = []
        for case in cases(small=small):
            rows += measure(case, arguments.device, small=small)
            record.write("cost", rows, path, threads=torch.get_num_threads(), **extra)
        rows += measure_rollouts(arguments.device, small=small)
        extra["growth"] = record.part(**growth(arguments.device, small=small))
        if arguments.picture:
            cost_tables.draw(extra["growth"], arguments.picture)
    print(record.write("cost", rows, path, threads=torch.get_num_threads(), **extra))


if __name__ == "__main__":
    main()
