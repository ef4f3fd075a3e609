"""Which simulations next? The error at planned queries while a design grows, for the proposals of geoq and simple choices.

    python -m benchmarks.planning.propose --jobs 2        # about 15 minutes on two cores
    python -m benchmarks.planning.propose --small

After the protocol of Holzmüller et al. (2023): a design of 10 d points grows by 5 batches of 2 d from 400 candidates, the surrogate is
trained again after each batch, and a method has the mean of the logarithm of its errors over all steps. The planned queries fill a corner
of the box, or the box. All methods know the surrogate; only some know the plan.
"""

from functools import partial

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import qmc

from benchmarks.planning.problems import PROBLEMS, SURROGATES
from benchmarks.runs import Benchmark, script
from geoq import GeoQ
from geoq.data.process import KERNELS, smoothness_of
from geoq.planning import propose

USED = ("Branin", "front", "camel", "Hartmann 4", "Friedman", "Hartmann 6")
PLANS = {"corner": (0.6, 1.0), "box": (0.0, 1.0)}
N_CANDIDATES, N_QUERIES, N_STEPS = 400, 200, 5


def of_geoq(x, y, pool, queries, n, train, *, plan):
    estimator = GeoQ(train(x, y), train).fit(x, y, progress=None)
    return propose(estimator, pool, n, queries=queries if plan else None).rows


def top_k(x, y, pool, _queries, n, train):
    estimator = GeoQ(train(x, y), train).fit(x, y, progress=None)
    return np.argsort(-estimator.bound(pool), kind="stable")[:n]


def k_centre(x, _y, pool, _queries, n, _train):
    near, rows = cdist(pool, x).min(axis=1), []
    for _ in range(n):
        rows.append(int(near.argmax()))
        near = np.minimum(near, cdist(pool, pool[rows[-1:]])[:, 0])
    return rows


def largest_cluster(x, _y, pool, _queries, n, _train):
    """LCMD on the inputs: the farthest candidate of the cluster with the largest sum of squared distances."""
    centres, rows = x, []
    for _ in range(n):
        apart = cdist(pool, centres)
        own, near = apart.argmin(axis=1), apart.min(axis=1)
        largest = np.bincount(own, near**2, len(centres)).argmax()
        rows.append(int(np.where(own == largest, near, -1).argmax()))
        centres = np.concatenate([centres, pool[rows[-1:]]])
    return rows


def integrated_variance(x, y, pool, queries, n, _train):
    """The candidates that lower the summed variance of a Gaussian process at the queries most, one after the other."""
    name, scales, noise = smoothness_of(x, y[:, None])

    def k(a, b):
        return KERNELS[name](cdist(a / scales, b / scales, "sqeuclidean"))[0]

    every, inner, rows = np.concatenate([pool, queries]), k(x, x) + noise * np.eye(len(x)), []
    cross = k(every, pool) - k(every, x) @ np.linalg.solve(inner, k(x, pool))
    for _ in range(n):
        own = cross.diagonal().copy() + noise
        gain = (cross[len(pool) :] ** 2).sum(axis=0) / own
        gain[rows] = -np.inf
        rows.append(int(gain.argmax()))
        cross = cross - np.outer(cross[:, rows[-1]], cross[rows[-1]]) / own[rows[-1]]
    return rows


METHODS = {
    "random": None,
    "random queries": None,
    "Sobol": None,
    "k-centre": k_centre,
    "LCMD": largest_cluster,
    "top-k bound": top_k,
    "GP integrated variance": integrated_variance,
    "propose": partial(of_geoq, plan=True),
    "propose, without the plan": partial(of_geoq, plan=False),
}


def grown(method, step, state, rng, sobol):
    """The design and its outputs with one more batch, and the candidates that are left."""
    x, y, pool, queries, function, train = state
    n = 2 * x.shape[1]
    if method == "random queries":
        new = queries[rng.permutation(len(queries))[:n]] + 0.0
    elif method == "Sobol":
        new = sobol[step * n : (step + 1) * n]
    else:
        choose = METHODS[method]
        rows = (
            rng.permutation(len(pool))[:n]
            if choose is None
            else choose(x, y, pool, queries, n, train)
        )
        new, pool = pool[rows], np.delete(pool, rows, axis=0)
    return np.concatenate([x, new]), np.concatenate([y, function(new)]), pool


def measure(name, seed, wanted, *, small=False):
    """One row per plan, surrogate and method."""
    problem, rows = PROBLEMS[name], []
    n_steps, surrogates = (2, ("cubic",)) if small else (N_STEPS, ("trees", "kernel ridge"))
    for plan, (low, high) in PLANS.items():
        rng = np.random.default_rng((seed, problem.d))
        start = rng.uniform(size=(10 * problem.d, problem.d))
        candidates = rng.uniform(size=(N_CANDIDATES, problem.d))
        queries = rng.uniform(low, high, size=(N_QUERIES, problem.d))
        tested = rng.uniform(low, high, size=(4 * N_QUERIES, problem.d))
        sobol = qmc.Sobol(problem.d, rng=seed).random(256)
        truth, deviation = problem.function(tested), problem.function(candidates).std()
        for surrogate in surrogates:
            train = SURROGATES[surrogate]
            for method in wanted:
                x, pool, draw = start, candidates, np.random.default_rng(seed)
                y, errors = problem.function(x), []
                for step in range(n_steps + 1):
                    if step:
                        state = x, y, pool, queries, problem.function, train
                        x, y, pool = grown(method, step - 1, state, draw, sobol)
                    error = train(x, y)(tested) - truth
                    errors.append(float(np.sqrt((error**2).mean()) / deviation))
                row = {"problem": name, "setting": surrogate, "shift": plan, "method": method}
                row |= {"seed": seed, "errors": errors, "d": problem.d}
                row["log_error"] = float(np.exp(np.mean(np.log(errors[1:]))))
                if method in ("random", "propose"):
                    answer = GeoQ(train(x, y), train).fit(x, y, progress=None).assess(tested)
                    covered = abs(answer.prediction - truth) <= answer.error_hat
                    row |= {"coverage": float(covered.mean()), "safe": float(answer.safe.mean())}
                rows.append(row)
    return rows


BENCHMARK = Benchmark("propose", USED, measure, lambda _: tuple(METHODS), (0, 1), ("front",))
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
