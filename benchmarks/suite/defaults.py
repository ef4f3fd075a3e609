"""GeoQ with its defaults against the rivals on the twenty public problems of the suite, or on another set of problems.

    python -m benchmarks.suite.defaults --jobs 16                     # all problems, 5 seeds
    python -m benchmarks.suite.defaults --seed-list 400 401 402 --jobs 16 --minutes 8
    python -m benchmarks.suite.defaults --set fresh --seed-list 400 401 402 --jobs 16
    python -m benchmarks.suite.defaults --problems branin darcy       # two problems
    python -m benchmarks.suite.defaults --small                       # two problems, one seed, short trainings

Losses are relative to the best rival of each problem, chosen in hindsight. Rivals that calibrate on held-out errors use
the same fold surrogates and the default folds: random folds (blocks of time for data in the order of time), cluster folds
and nested folds. They have three versions: all tuples with the same weight, the weights of GeoQ (each family of folds has
the same total), and random folds alone, as most of them were proposed. The spread of deep ensembles and of MC dropout is
measured as it is and calibrated on held-out errors. The row "GeoQ" is
``GeoQ(surrogate, train_surrogate)``; for data in the order of time it has the argument
``folds=default_folds(TemporalFolds(5, gap=10))``.

The results file is written after each pair of problem and seed. A rerun with the same code measures the missing pairs;
rows measured by other code are dropped.
"""

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks import record
from benchmarks.record import Stopwatch
from benchmarks.rivals import RememberedTraining
from benchmarks.suite.confirmation import CONFIRMATION
from benchmarks.suite.fresh import FRESH
from benchmarks.suite.methods import OWN_SURROGATE, is_ours, methods, shortened
from benchmarks.suite.problems import PROBLEMS, SHIFTS, Problem
from benchmarks.suite.runs import (
    add_options,
    chosen_problems,
    chosen_seeds,
    finished,
)
from benchmarks.suite.second_fresh import SECOND_FRESH
from benchmarks.suite.table import roc_areas, summary
from benchmarks.suite.third_fresh import THIRD_FRESH
from geoq.metrics import coverage

SEEDS = 5
SUITE = PROBLEMS | CONFIRMATION
SMALL = ("branin", "burgers")
EVERY = SUITE | FRESH | SECOND_FRESH | THIRD_FRESH
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
# The problems that take longest, longest first: they start first.
LONGEST = (
    "kuramoto-sivashinsky",
    "spilled-pollutant",
    "darcy",
    "lorenz-96",
    "nonlinear-diffusion",
    "epidemic",
    "solar-cell",
    "double-pendulum",
    "pipe",
    "drug-noisy",
    "enzyme-cascade",
    "traffic-shock",
    "queue",
    "burgers",
    "advected-pulse",
    "borehole",
    "franke-tracks",
    "robot-arm",
    "wing-weight",
    "branin",
    "ishigami-clusters",
    "flood",
    "oscillator-map",
    "steel-column",
    "hartmann-noisy",
)


@dataclass(frozen=True)
class ProblemSet:
    """Problems that are measured together.

    Attributes:
        problems: the problems by name.
        small: names of the problems of a short trial run.
        file: name of the results file, without its ending.
    """

    problems: dict[str, Problem]
    small: tuple[str, ...]
    file: str


SETS = {
    "public": ProblemSet(SUITE, SMALL, "defaults"),
    "design": ProblemSet(PROBLEMS, SMALL, "defaults"),
    "fresh": ProblemSet(FRESH, tuple(FRESH)[-2:], "fresh"),
    "second": ProblemSet(SECOND_FRESH, tuple(SECOND_FRESH)[-2:], "second_fresh"),
    "third": ProblemSet(THIRD_FRESH, tuple(THIRD_FRESH)[-2:], "third_fresh"),
}


def run(name, seed, *, small=False):
    """Rows of all methods on one problem and seed, for each shift and for all shifts together."""
    problem = EVERY[name]
    recipe = problem.recipe(seed)
    if small:
        problem, recipe = replace(problem, n_train=120), shortened(recipe)
    data = problem.data(seed)
    x, y = data.x, data.y
    remembered = RememberedTraining(recipe)
    deployed = Stopwatch()
    with deployed.running():
        surrogate = remembered(x, y)
    x_test, y_test = (
        np.concatenate([data.tests[shift][part] for shift in SHIFTS]) for part in (0, 1)
    )
    shift_of_row = np.repeat(SHIFTS, [len(data.tests[shift][0]) for shift in SHIFTS])
    rows, safe = [], None
    for method, estimator in methods(
        problem, surrogate, remembered, len(x), seed
    ).items():
        estimator = shortened(estimator) if small else estimator
        own = method in OWN_SURROGATE
        watch = Stopwatch(remembered, 0.0 if own else deployed.seconds)
        with watch.running():
            estimator.fit(x, y)
        started = time.perf_counter()
        ours = is_ours(method)
        bound = estimator.assess(x_test) if ours else estimator.predict(x_test)
        seconds = time.perf_counter() - started
        if method == "GeoQ":
            safe = bound.safe  # also for the rivals' safe columns
        levels = estimator.bounds(x_test, LEVELS) if method == "GeoQ" else {}
        for shift in (*SHIFTS, "all"):
            where = (shift_of_row == shift) | (shift == "all")
            line = record.row(
                method,
                setting=f"{problem.name}, {shift}",
                seed=seed,
                y=y_test[where],
                prediction=bound.prediction[where],
                error_hat=bound.error_hat[where],
                safe=(bound.safe if ours else safe)[where],
                train_seconds=watch.seconds,
                inference_seconds=seconds * where.mean(),
            )
            line |= {
                "problem": problem.name,
                "shift": shift,
                "held_back": problem.name not in PROBLEMS,
            }
            if ours:
                scores = {
                    "support_score": bound.support_score,
                    "distance": bound.features.support_distance,
                }
                line |= roc_areas(y_test, bound, scores, where)
            line |= record.trainings(estimator)
            if levels:
                error = abs(y_test - bound.prediction)[where]
                line["coverage_by_level"] = {
                    f"{level:g}": coverage(error, values[where])
                    for level, values in levels.items()
                }
            rows.append(line)
    return rows


def in_order(names):
    """Names with those that take longest first."""
    return sorted(
        names, key=lambda n: LONGEST.index(n) if n in LONGEST else len(LONGEST)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, SEEDS)
    parser.add_argument(
        "--set",
        choices=SETS,
        default="public",
        help="the twenty public problems (public, the default), the twelve of them that the first default was designed "
        "with (design), or the eight problems of fresh.py (fresh), second_fresh.py (second) or third_fresh.py (third)",
    )
    arguments = parser.parse_args()
    chosen = SETS[arguments.set]
    names = chosen_problems(parser, arguments, chosen.problems, chosen.small)
    seeds = chosen_seeds(arguments)
    file = f"{chosen.file}{'-small' if arguments.small else ''}.json"
    path = arguments.out or record.RESULTS / file

    conditions = {
        "source": record.source("benchmarks.suite.defaults"),
        "small": arguments.small,
    }
    rows = record.measured(path, **conditions)
    done = {(r["problem"], r["seed"]) for r in rows}
    pairs = [(n, s) for n in in_order(names) for s in seeds if (n, s) not in done]
    task = partial(run, small=arguments.small)
    for new in finished(task, pairs, jobs=arguments.jobs, minutes=arguments.minutes):
        rows += new
        record.write("defaults", rows, path, **conditions)
    print(path)
    # Rows of other problems in the file are not shown.
    asked = [r for r in rows if r["problem"] in names and r["seed"] in seeds]
    print(summary(asked) if asked else "no results")


if __name__ == "__main__":
    main()
