"""GeoQ with its defaults against the rivals on the twenty public problems of the suite, or on another set of problems.

    python -m benchmarks.suite.defaults --seeds 700 701 702 --jobs 16
    python -m benchmarks.suite.defaults --set fresh --seeds 400 401 402 --jobs 16 --minutes 8
    python -m benchmarks.suite.defaults --problems branin darcy --methods "GeoQ*" GP
    python -m benchmarks.suite.defaults --small                       # one problem, one seed, short trainings

Rivals that calibrate on held-out errors use the same fold surrogates and the default folds: random folds (blocks of time for data in
the order of time), cluster folds and nested folds. They have three versions: all tuples with the same weight, the weights of GeoQ
(each family of folds has the same total), and random folds alone, as most of them were proposed. The spread of deep ensembles and of
MC dropout is measured as it is and calibrated on held-out errors. The row "GeoQ" is ``GeoQ(surrogate, train_surrogate)``; for data in
the order of time it has the argument ``folds=default_folds(TemporalFolds(5, gap=10))``. The safe columns of the rivals have the flags
of "GeoQ", if it is measured in the same run.
"""

import math
import time
from dataclasses import replace
from functools import partial

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rivals import RememberedTraining
from benchmarks.runs import Benchmark, parser_of, run
from benchmarks.scores import row
from benchmarks.suite import SHIFTS, is_ours
from benchmarks.suite.confirmation import CONFIRMATION
from benchmarks.suite.fourth_fresh import FOURTH_FRESH
from benchmarks.suite.fresh import FRESH
from benchmarks.suite.methods import OWN_SURROGATE, methods, shortened
from benchmarks.suite.problems import PROBLEMS
from benchmarks.suite.second_fresh import SECOND_FRESH
from benchmarks.suite.third_fresh import THIRD_FRESH
from benchmarks.timing import Stopwatch
from geoq.metrics import coverage

SUITE = PROBLEMS | CONFIRMATION
# Problems that are measured together, the name of their results file, and the problems of a small run.
SETS = {
    "public": (SUITE, "defaults", ("burgers",)),
    "fresh": (FRESH, "fresh", ("shell", "blend-repeats")),
    "second": (SECOND_FRESH, "second_fresh", ("etalon-fringes",)),
    "third": (THIRD_FRESH, "third_fresh", ("ladder",)),
    "fourth": (FOURTH_FRESH, "fourth_fresh", ("home-battery",)),
}
EVERY = SUITE | FRESH | SECOND_FRESH | THIRD_FRESH | FOURTH_FRESH
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
SMALL_SIZE = 100


class Case:
    """The data, the deployed surrogate and the queries of a problem and seed."""

    def __init__(self, name, seed, *, small):
        self.problem, self.seed = EVERY[name], seed
        recipe = self.problem.recipe(seed)
        n_test = {"n_test": 60} if small else {}
        if small:
            self.problem, recipe = replace(self.problem, n_train=SMALL_SIZE), shortened(recipe)
        data = self.problem.make(seed, self.problem.n_train, **n_test)
        self.x, self.y, self.remembered = data.x, data.y, RememberedTraining(recipe)
        self.deployed = Stopwatch()
        with self.deployed.running():
            self.surrogate = self.remembered(self.x, self.y)
        pairs = zip(*(data.tests[shift] for shift in SHIFTS), strict=True)
        self.queries, self.truth = map(np.concatenate, pairs)
        self.shift = np.repeat(SHIFTS, [len(data.tests[shift][0]) for shift in SHIFTS])

    def rows(self, method, bound, safe, seconds=(0.0, 0.0), more=lambda where: {}):  # noqa: ARG005
        """One row for each shift and one for all of them together."""
        found = []
        for shift in (*SHIFTS, "all"):
            where = (self.shift == shift) | (shift == "all")
            about = {
                "method": method,
                "setting": f"{self.problem.name}, {shift}",
                "seed": self.seed,
            }
            about |= {"problem": self.problem.name, "shift": shift}
            spent = seconds[0], seconds[1] * where.mean()
            found.append(row(about, self.truth, bound, safe, spent, where) | more(where))
        return found


def names(problem):
    """The names of the methods of a problem."""
    known = EVERY[problem]
    return list(methods(known, None, RememberedTraining(known.recipe(0)), known.n_train, 0))


def measure(name, seed, wanted, *, small=False):
    """Rows of some methods on one problem and seed, for each shift and for all shifts together."""
    case, rows, safe = Case(name, seed, small=small), [], None
    every = methods(case.problem, case.surrogate, case.remembered, len(case.x), seed)
    for method, estimator in every.items():
        if method not in wanted:
            continue
        estimator = shortened(estimator) if small else estimator
        own = method in OWN_SURROGATE
        watch = Stopwatch(case.remembered, 0.0 if own else case.deployed.seconds)
        with watch.running():
            estimator.fit(case.x, case.y)
        started, ours = time.perf_counter(), is_ours(method)
        bound = estimator.assess(case.queries) if ours else estimator.predict(case.queries)
        seconds = watch.seconds, time.perf_counter() - started
        safe = bound.safe if method == "GeoQ" else safe  # also for the rivals
        more = partial(of_geoq, case, estimator, bound, method) if ours else lambda where: {}  # noqa: ARG005
        found = case.rows(method, bound, bound.safe if ours else safe, seconds, more)
        rows += [line | record.trainings(estimator) for line in found]
    return rows


def of_geoq(case, estimator, answer, method, where):
    """Further columns of GeoQ: areas under the ROC curves of its scores, and the default's coverage by level."""
    found = {}
    for name in ("support_score", "support_distance"):
        column = "distance" if name == "support_distance" else name
        found |= roc_areas(case.truth, answer, column, getattr(answer, name), where)
    if method == "GeoQ":
        error = abs(case.truth - answer.prediction)[where]
        levels = estimator.bounds(case.queries, LEVELS).items()
        found["coverage_by_level"] = {f"{q:g}": coverage(error, b[where]) for q, b in levels}
    return found


def roc_areas(y, answer, name, score, where=...):
    """Areas under the ROC curves of a score: too many errors of a row exceed their bounds; its mean error is in the upper tenth."""
    error = abs(y - answer.prediction).reshape(len(y), -1)[where]
    bound, size = answer.error_hat.reshape(len(y), -1)[where], error.mean(axis=1)
    exceeds = (error > bound).mean(axis=1) > 1 - QUANTILE
    events = {"exceeds": exceeds, "large": size > np.quantile(size, 0.9)}
    areas = {}
    for event, happened in events.items():
        both = 0 < happened.sum() < len(happened)
        area = float(roc_auc_score(happened, score[where])) if both else math.nan
        areas[f"{name}_roc_{event}"] = area
    return areas


def benchmark(chosen):
    """The benchmark of a set of problems."""
    problems, file, small = SETS[chosen]
    return Benchmark(file, list(problems), measure, names, range(5), small)


def main(words=None):
    parser = parser_of(__doc__)
    parser.add_argument("--set", choices=SETS, default="public", help="the problems")
    asked = parser.parse_args(words)
    return run(benchmark(asked.set), asked)


if __name__ == "__main__":
    main()
