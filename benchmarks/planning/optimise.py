"""Optimisation on a surrogate: the search of geoq, the constraint, the surrogate alone, and COBYQA on the simulator.

    python -m benchmarks.planning.optimise --jobs 2        # about three minutes on two cores
    python -m benchmarks.planning.optimise --small

The data are 20 d random points (15 of one input). The objective is the output. A row has the value of the simulator at the end above its
minimum, in standard deviations of the outputs, and how often the simulator was called; the start is the best point of the data.
"""

import numpy as np
from scipy.optimize import Bounds, minimize

from benchmarks.planning.problems import PROBLEMS, SURROGATES
from benchmarks.runs import Benchmark, script
from geoq import GeoQ
from geoq.planning import TrustRegionSearch, constraint

USED = (
    "Forrester",
    "Branin",
    "Rosenbrock 2",
    "Rosenbrock 5",
    "Hartmann 4",
    "Hartmann 6",
    "false well",
)
KINDS = ("trees", "kernel ridge", "cubic")
MOST_CALLS, N_STARTS, RADIUS = 25, 3, 0.1


def search(estimator, simulator, start):
    """The best input, the number of calls, and the fraction of asked inputs whose error was within the bound."""
    found = TrustRegionSearch(estimator, lambda y: y, [(0, 1)] * len(start))
    within = []
    while found.n_asked < MOST_CALLS and not found.done:
        x = found.ask()
        answer, y = found.estimator.assess(x[None]), simulator(x)
        within.append(float(abs(answer.prediction[0] - y) <= answer.error_hat[0]))
        found.tell(x, y)
    return found.best[0], found.n_asked, float(np.mean(within)) if within else None


def on_surrogate(estimator, simulator, start, *, limited):
    """The lowest prediction from the start and from further points; one call of the simulator at the end."""
    starts = [start, *np.random.default_rng(0).uniform(size=(N_STARTS - 1, len(start)))]

    def prediction(x):
        return float(estimator.surrogate_(np.clip(x, 0, 1)[None])[0])

    limits = {"constraints": constraint(estimator)} if limited else {}
    ends = [
        minimize(
            prediction, s, method="COBYQA", bounds=Bounds(0, 1), options={"maxfev": 100}, **limits
        ).x
        for s in starts
    ]
    ends = np.clip(ends, 0, 1)
    if limited:
        ends = [x for x in ends if estimator.assess(x[None]).support_score[0] < 1.05] or [start]
    best = min(ends, key=prediction)
    answer = estimator.assess(best[None])
    inside = float(abs(answer.prediction[0] - simulator(best)) <= answer.error_hat[0])
    return best, 1, inside


def on_simulator(_estimator, simulator, start):
    asked = [start]

    def value(x):
        asked.append(np.clip(x, 0, 1))
        return simulator(x)

    options = {"maxfev": MOST_CALLS, "initial_tr_radius": RADIUS}
    minimize(value, start, method="COBYQA", bounds=Bounds(0, 1), options=options)
    return min(asked, key=simulator), len(asked) - 1, None


METHODS = {
    "TrustRegionSearch": search,
    "surrogate with constraint": lambda *given: on_surrogate(*given, limited=True),
    "surrogate alone": lambda *given: on_surrogate(*given, limited=False),
    "COBYQA on the simulator": on_simulator,
}


def measure(name, seed, wanted, *, small=False):
    """One row per surrogate and method."""
    problem, rows = PROBLEMS[name], []
    x = np.random.default_rng((seed, problem.d)).uniform(
        *problem.covered, size=(max(15, 20 * problem.d), problem.d)
    )
    y = problem.function(x)

    def simulator(point):
        return float(problem.function(np.clip(point, 0, 1)[None])[0])

    for surrogate in KINDS[-1:] if small else KINDS:
        train = SURROGATES[surrogate]
        estimator = GeoQ(train(x, y), train).fit(x, y, progress=None)
        for method in wanted:
            best, n_calls, within = METHODS[method](estimator, simulator, x[y.argmin()])
            above = (simulator(best) - problem.minimum) / y.std()
            row = {"problem": name, "setting": surrogate, "method": method, "seed": seed}
            row |= {
                "above": above,
                "start": (y.min() - problem.minimum) / y.std(),
                "calls": n_calls,
            }
            row |= {"within": within, "safe": float(estimator.assess(best[None]).safe[0])}
            rows.append(row | {"worse": float(simulator(best) > y.min())})
    return rows


BENCHMARK = Benchmark(
    "optimise", USED, measure, lambda _: tuple(METHODS), (0, 1, 2), ("Forrester",)
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
