"""Is the safe flag of fields a gate? Shifted inputs of seven problems, with the previous and the present safe region.

python -m benchmarks.fields.run                         # all problems, about ten minutes on two cores
python -m benchmarks.fields.run --problems Darcy        # one problem; rows of the same code are kept
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import record
from benchmarks.fields.operator import train
from benchmarks.fields.problems import PROBLEMS
from geoq import (
    DistanceRegion,
    FieldRegion,
    FieldScaleIncrement,
    GeoQ,
    RandomFolds,
    Training,
)
from geoq.geometry import GeometricFeatures
from geoq.increments import FieldFactor
from geoq.queries import views

N_TRAIN, N_INSIDE, N_SHIFTED = 300, 200, 80
SIZES = (200, 60)
SMALL = {"n_train": 40, "n_steps": 5, "n_inside": 20, "n_shifted": 6, "sizes": (40,)}
REGIONS = {"DistanceRegion": DistanceRegion(), "FieldRegion": FieldRegion()}


def rows_of(problem, seed, settings):
    """One row per size, set of queries and region."""
    rng = np.random.default_rng(seed)
    n_train, n_inside = settings["n_train"], settings["n_inside"]
    x = problem.draw(rng, n_train + max(settings["sizes"]) + n_inside)
    y = problem.solve(x)
    surrogate = train(
        x[:n_train],
        y[:n_train],
        seed=seed,
        n_steps=settings["n_steps"] or problem.n_steps,
        n_modes=problem.n_modes,
        in_time=problem.in_time,
    )
    queries = {"inside": (x[-n_inside:], y[-n_inside:])}
    for name, draw in problem.shifts.items():
        shifted = draw(rng, settings["n_shifted"])
        queries[name] = shifted, problem.solve(shifted)
    rows = []
    for n in settings["sizes"]:
        pairs = x[n_train : n_train + n], y[n_train : n_train + n]
        rows += _rows_of_size(problem, seed, surrogate, pairs, queries)
    return rows


def _rows_of_size(problem, seed, surrogate, pairs, queries):
    model = FieldScaleIncrement(factor=FieldFactor(training=Training(n_steps=100)))
    geoq = GeoQ(surrogate, None, folds=RandomFolds(5), increment_model=model)
    geoq.fit(*pairs)
    regions = {name: rule.fit(geoq.calibration_) for name, rule in REGIONS.items()}
    inside, rows = None, []
    for shift, (x, y) in queries.items():
        error = abs(surrogate(x) - y)
        inside = error.mean() if inside is None else inside
        covered = (error <= geoq.bound(x)).reshape(len(x), -1).mean(axis=1)
        features = GeometricFeatures.cat([view.features for view in views(geoq, x)])
        for name, region in regions.items():
            started = time.perf_counter()
            safe = region.contains(region.support_score(features)).numpy()
            seconds = time.perf_counter() - started
            rows.append(
                {
                    "method": name,
                    "setting": problem.name,
                    "seed": seed,
                    "n": len(pairs[0]),
                    "shift": shift,
                    "design": problem.design,
                    "relative_error": relative_error(surrogate, pairs),
                    "error_ratio": float(error.mean() / inside),
                    "coverage": float(covered.mean()),
                    "safe_fraction": float(safe.mean()),
                    "safe_coverage": float(covered[safe].mean())
                    if safe.any()
                    else float("nan"),
                    "query_ms": 1e3 * seconds / len(x),
                }
            )
    return rows


def relative_error(surrogate, pairs):
    """Error on the calibration fields, which were not trained on, relative to the deviation from the mean output."""
    x, y = pairs
    return float(np.linalg.norm(surrogate(x) - y) / np.linalg.norm(y - y.mean(axis=0)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [problem.name for problem in PROBLEMS]
    parser.add_argument("--problems", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--small", action="store_true", help="a run of seconds")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "fields.json")
    arguments = parser.parse_args()
    settings = {
        "n_train": N_TRAIN,
        "n_inside": N_INSIDE,
        "n_shifted": N_SHIFTED,
        "n_steps": None,
        "sizes": SIZES,
    }
    settings |= SMALL if arguments.small else {}
    torch.set_num_threads(1)
    source = record.source("benchmarks.fields.run")
    rows = record.measured(arguments.out, source=source)
    for problem in PROBLEMS:
        for seed in arguments.seeds:
            if problem.name not in arguments.problems or any(
                (row["setting"], row["seed"]) == (problem.name, seed) for row in rows
            ):
                continue
            started = time.perf_counter()
            rows += rows_of(problem, seed, settings)
            print(f"{problem.name}, seed {seed}: {time.perf_counter() - started:.0f} s")
            record.write("fields", rows, arguments.out, source=source)


if __name__ == "__main__":
    main()
