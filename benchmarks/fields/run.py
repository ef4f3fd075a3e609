"""Is the safe flag of fields a gate? Shifted inputs of seven problems, with the support distance alone and the default region.

python -m benchmarks.fields.run                         # all problems, about ten minutes on two cores
python -m benchmarks.fields.run --problems Darcy
python -m benchmarks.fields.run --small
"""

import numpy as np

from benchmarks.fields.operator import train
from benchmarks.fields.problems import PROBLEMS
from benchmarks.rivals import DistanceRegion
from benchmarks.runs import Benchmark, script
from geoq import GeoQ, RandomFolds, Region, Training
from geoq.parts import FieldBound, FieldFactor

SMALL = {"n_train": 30, "n_steps": 3, "n_inside": 10, "n_shifted": 4, "sizes": (30,)}
FULL = {"n_train": 300, "n_inside": 200, "n_shifted": 80, "sizes": (200, 60)}
REGIONS = {"DistanceRegion": DistanceRegion(), "FieldRegion": Region()}


def measure(name, seed, wanted, *, small=False):
    """One row per size, set of queries and region."""
    problem, sizes = PROBLEMS[name], SMALL if small else FULL
    rng, n_train, n_inside = np.random.default_rng(seed), sizes["n_train"], sizes["n_inside"]
    x = problem.draw(rng, n_train + max(sizes["sizes"]) + n_inside)
    y = problem.solve(x)
    how = {"n_steps": sizes.get("n_steps", problem.n_steps), "n_modes": problem.n_modes}
    surrogate = train(x[:n_train], y[:n_train], seed=seed, **how, in_time=problem.in_time)
    queries = {"inside": (x[-n_inside:], y[-n_inside:])}
    for shift, draw in problem.shifts.items():
        shifted = draw(rng, sizes["n_shifted"])
        queries[shift] = shifted, problem.solve(shifted)
    rows = []
    for n in sizes["sizes"]:
        pairs = x[n_train : n_train + n], y[n_train : n_train + n]
        about = {"setting": name, "seed": seed, "n": n, "design": problem.design}
        training = Training(n_steps=5 if small else 100)
        found = of_size(surrogate, pairs, queries, wanted, training)
        rows += [{"method": row.pop("method")} | about | row for row in found]
    return rows


def of_size(surrogate, pairs, queries, wanted, training):
    """Rows of the sets of queries and of the regions, which have the same bounds."""
    model = FieldBound(factor=FieldFactor(training=training))
    geoq = GeoQ(surrogate, None, folds=RandomFolds(5), bound_model=model)
    fitted = geoq.fit(*pairs, progress=None).fitted_
    regions = {method: REGIONS[method].fit(fitted.tuples) for method in wanted}
    inside, rows = None, []
    for shift, (x, y) in queries.items():
        error = abs(surrogate(x) - y)
        inside = error.mean() if inside is None else inside
        covered = (error <= geoq.bound(x)).reshape(len(x), -1).mean(axis=1)
        parts = [part[1] for part in fitted.views(x)]
        for method, region in regions.items():
            safe = np.concatenate([region.support_score(part) <= 1 + 1e-9 for part in parts])
            scores = {
                "error_ratio": float(error.mean() / inside),
                "coverage": float(covered.mean()),
                "safe_fraction": float(safe.mean()),
                "safe_coverage": float(covered[safe].mean()) if safe.any() else None,
            }
            rows.append({"method": method, "shift": shift} | scores)
    return rows


SMALLEST = ("Heat in a cube",)
BENCHMARK = Benchmark("fields", list(PROBLEMS), measure, lambda _: list(REGIONS), (10,), SMALLEST)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
