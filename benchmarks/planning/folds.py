"""Errors at planned queries, estimated with folds that match them, with the default folds, and with one family.

    python -m benchmarks.planning.folds --jobs 2
    python -m benchmarks.planning.folds --small

The problems are the functions on a box of the twelve design problems of the suite. The planned queries fill a box as wide as the training
box, 1.3 and 1.6 times as wide, within the domain of the function. A row has the scores of the 0.95 bound at these queries, and the mean
held-out error divided by the mean error of the deployed surrogate there.
"""

import time

import numpy as np

from benchmarks.rivals import RememberedTraining
from benchmarks.runs import Benchmark, script
from benchmarks.scores import row
from benchmarks.suite.methods import shortened
from benchmarks.suite.problems import PROBLEMS, OnBox
from geoq import ClusterFolds, GeoQ, RandomFolds, default_folds
from geoq.planning import MatchedFolds

WIDTHS, N_QUERIES, SMALL_SIZE = (1.0, 1.3, 1.6), 1000, 100
USED = [name for name, problem in PROBLEMS.items() if isinstance(problem.make, OnBox)]
MATCHED = "matched folds, 5 trainings"
FOLDS = {
    "default folds, 15 trainings": default_folds(),
    MATCHED: MatchedFolds(5),
    "random folds, 5 trainings": RandomFolds(5),
    "cluster folds, 5 trainings": ClusterFolds(5),
}


def planned(problem, data, width, seed):
    """Queries in a box around the training box and their outputs, in the unit of the training outputs."""
    box, rng = problem.make, np.random.default_rng([seed, 2])
    middle, half = np.mean(box.part), width * np.ptp(box.part) / 2
    ends = np.array(box.low), np.array(box.high)
    unit = rng.uniform(max(middle - half, 0), min(middle + half, 1), (N_QUERIES, len(box.low)))
    x = ends[0] + (ends[1] - ends[0]) * unit
    known = box.function(*data.x.T)
    y = (box.function(*x.T) - known.mean()) / known.std()
    return x, y + box.noise * rng.standard_normal(y.shape)


def measure(name, seed, wanted, *, small=False):
    problem = PROBLEMS[name]
    data = problem.make(seed, SMALL_SIZE if small else problem.n_train)
    recipe = problem.recipe(seed)
    train = RememberedTraining(shortened(recipe) if small else recipe)
    surrogate, rows = train(data.x, data.y), []
    asked = {width: planned(problem, data, width, seed) for width in WIDTHS}
    for method in wanted:
        estimator = GeoQ(surrogate, train, folds=FOLDS[method])
        for width, (x, y) in asked.items():
            started = time.perf_counter()
            if method == MATCHED or width == WIDTHS[0]:
                estimator.fit(data.x, data.y, planned=x)
            seconds = time.perf_counter() - started, 0.0
            answer, tuples = estimator.assess(x), estimator.fitted_.tuples
            about = {"method": method, "setting": f"{width:g}", "seed": seed, "problem": name}
            error = tuples.error.reshape(len(tuples), -1).mean(axis=1)
            ratio = float(tuples.weight @ error / abs(y - answer.prediction).mean())
            more = {"estimated_over_true": ratio, "bias": abs(np.log(ratio))}
            rows.append(row(about, y, answer, answer.safe, seconds) | more)
    return rows


BENCHMARK = Benchmark(
    "matched_folds", USED, measure, lambda _: list(FOLDS), (900, 901), ("branin",)
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
