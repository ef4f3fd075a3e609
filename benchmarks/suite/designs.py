"""Designs of experiments between their runs, and the exchange of harmless queries against false trust beyond the ranges.

    python -m benchmarks.suite.designs
    python -m benchmarks.suite.designs --problems "3 levels, 3 inputs" product-gbr
    python -m benchmarks.suite.designs --small

A design is measured alone and with five further runs, for three functions with little noise and two surrogates. The cases of ``one_input``
have a seed of the design of the flag; their methods differ in the change that is allowed beyond a range.
"""

from dataclasses import replace

import numpy as np
from scipy.stats import qmc
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from benchmarks.runs import Benchmark, script
from benchmarks.suite.one_input import flat, harmless, loaded, measures, r_squared
from benchmarks.suite.one_input_problems import ONE_INPUT
from geoq import GeoQ
from geoq.regions.views import LITTLE

NOISE, N_QUERIES = 0.02, 300
LIMITS = {f"at most {limit:g}": limit for limit in (0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)}
MORE = ("no further runs", "5 at the centre", "5 of a Latin hypercube")


def factorial(levels, d):
    return np.stack(np.meshgrid(*[np.linspace(-1, 1, levels)] * d), axis=-1).reshape(-1, d)


def composite(d, outer):
    """Corners, two runs on each axis and six at the centre, in a cube; the corners are at 1 / outer."""
    star = np.concatenate([np.eye(d), -np.eye(d), np.zeros((6, d))])
    return np.concatenate([factorial(2, d) / outer, star])


def one_at_a_time(levels, d):
    values = [v for v in np.linspace(-1, 1, levels) if abs(v) > 1e-9]
    return np.concatenate([np.zeros((1, d)), *(v * np.eye(d) for v in values)])


def spread_out(kind, n, d, seed=0):
    return 2 * kind(d, seed=seed).random(n) - 1


DESIGNS = {
    "2 levels, 3 inputs": factorial(2, 3),
    "2 levels, 5 inputs": factorial(2, 5),
    "3 levels, 3 inputs": factorial(3, 3),
    "3 levels, 4 inputs": factorial(3, 4),
    "4 levels, 3 inputs": factorial(4, 3),
    "5 levels, 3 inputs": factorial(5, 3),
    "composite, 3 inputs, on the faces": composite(3, 1.0),
    "composite, 3 inputs": composite(3, 1.68),
    "composite, 5 inputs": composite(5, 2.0),
    "one at a time, 5 values, 3 inputs": one_at_a_time(5, 3),
    "Latin hypercube, 20 runs, 3 inputs": spread_out(qmc.LatinHypercube, 20, 3),
    "Sobol points, 64 runs, 4 inputs": spread_out(qmc.Sobol, 64, 4),
}
FUNCTIONS = (
    lambda x: np.sin(2 * x[:, 0]) + x[:, 1] * x[:, -1],
    lambda x: np.exp(x[:, 0]) + x[:, 1] ** 2 - x[:, -1],
    lambda x: abs(x[:, 0] - 0.13) + x[:, 1] * x[:, -1],
)


def quadratic(x, y):
    return make_pipeline(PolynomialFeatures(2), Ridge(1e-6)).fit(x, y).predict


def trees(x, y):
    return ExtraTreesRegressor(30, random_state=0).fit(x, y).predict


def of_design(name, seed, wanted, *, small):
    """For each kind of further runs, which fraction of queries within the design is safe, and the coverage."""
    design, rng = DESIGNS[name], np.random.default_rng([seed, 3])
    d, rows = design.shape[1], []
    for method in wanted:
        found = []
        for number, function in enumerate(FUNCTIONS[:1] if small else FUNCTIONS):
            further = spread_out(qmc.LatinHypercube, 5, d, seed + number + 1)
            further = {MORE[0]: further[:0], MORE[1]: 0 * further, MORE[2]: further}[method]
            x, queries = np.concatenate([design, further]), rng.uniform(-1, 1, (N_QUERIES, d))
            y, truth = (function(p) + NOISE * rng.standard_normal(len(p)) for p in (x, queries))
            for train in (quadratic,) if small else (quadratic, trees):
                answer = GeoQ(None, train).fit(x, y).assess(queries)
                found.append((answer.safe, abs(answer.prediction - truth) <= answer.error_hat))
        safe, covered = np.concatenate(found, axis=1)
        of_safe = float(covered[safe].mean()) if safe.any() else None
        numbers = {
            "safe": float(safe.mean()),
            "coverage": float(covered.mean()),
            "safe_coverage": of_safe,
        }
        rows.append({"problem": name, "method": method, "seed": seed, "n": len(design), "kind": "design"} | numbers)  # fmt: skip
    return rows


def of_case(name, seed, wanted, *, small):
    """The flags of a case of one_input with each allowed change."""
    problem, (x, y, queries, query_y), train, rows = loaded(name, seed, small=small)
    fitted = GeoQ(train(x, y), train).fit(x, y).fitted_
    _, features, _, _ = next(fitted.views(queries.x))
    error = flat(abs(query_y - features.prediction))
    about = {
        "problem": name,
        "seed": seed,
        "kind": "exchange",
        "family": problem.family,
        "top": None,
    }
    about |= {"r2": r_squared(fitted.tuples, y), "harmless": harmless(error, rows)}
    found = []
    for method in wanted:
        limit = LIMITS[method]
        change = features.change * LITTLE / limit if limit else None
        seen = replace(features, change=change)
        safe = fitted.region.support_score(seen) <= 1 + 1e-9
        safe &= ~fitted.coordinates.changed(features.inputs).any(axis=1)
        bound = flat(fitted.scaled_bound(seen, None, safe))
        found.append(about | {"method": method, "labels": measures(error, bound, safe, rows)})
    return found


def measure(name, seed, wanted, *, small=False):
    """A row for each method."""
    return (of_design if name in DESIGNS else of_case)(name, seed, wanted, small=small)


KINDS = ("gbr", "forest", "mlp")
CASES = [f"{name}-{kind}" for kind in KINDS for name in ONE_INPUT if name != "welch"]
BENCHMARK = Benchmark(
    "designs",
    (*DESIGNS, *CASES),
    measure,
    lambda name: MORE if name in DESIGNS else list(LIMITS),
    dict.fromkeys(DESIGNS, (0,)) | dict.fromkeys(CASES, (500,)),
    ("2 levels, 3 inputs", "3 levels, 3 inputs", "constant-forest"),
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
