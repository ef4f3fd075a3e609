"""Bounds with features of the user and without: a residual, the spread of networks, a useless feature and a wrong use.

    python -m benchmarks.suite.features
    python -m benchmarks.suite.features --small

"just outside" are queries from a box that is 1.35 times as wide as the box of the data, with at least one input beyond its range.
"""

import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.neural_network import MLPRegressor

from benchmarks.runs import Benchmark, script
from benchmarks.scores import row
from geoq import GeoQ, Grid

N_NODES, N_BLOCKS, N_BASIS = 200, 9, 8
N_QUERIES, WIDER = 1000, 1.35
# Differences of neighbouring nodes of the bar, whose ends are 0, and the block of each difference.
STEPS = np.eye(N_NODES + 1, N_NODES) - np.eye(N_NODES + 1, N_NODES, -1)
BLOCK = np.arange(N_NODES + 1) * N_BLOCKS // (N_NODES + 1)
LOAD = np.full(N_NODES, 1 / (N_NODES + 1))


def stiffness(x):
    """Between neighbouring nodes, for logarithms of the conductivities of the blocks."""
    return (N_NODES + 1) * np.exp(x)[:, BLOCK]


def temperature(x):
    return np.array([np.linalg.solve((STEPS.T * k) @ STEPS, LOAD) for k in stiffness(x)])


def reduced_basis(_, y):
    basis = np.linalg.svd(y, full_matrices=False)[2][:N_BASIS]
    steps = basis @ STEPS.T

    def predict(x):
        matrices = (stiffness(x)[:, None] * steps) @ steps.T
        return np.linalg.solve(matrices, basis @ LOAD) @ basis

    return predict


def residual(x, prediction):
    return np.linalg.norm((stiffness(x) * (prediction @ STEPS.T)) @ STEPS - LOAD, axis=1)


def front(x):
    return np.tanh(12 * x[:, 0] + 8.4 * x[:, 1] * x[:, 2] - 3.6 * x[:, 3]) + 0.3 * x[:, 4] * x[:, 5]


def forest(x, y):
    return RandomForestRegressor(60, random_state=0).fit(x, y)


def spread_of(members):
    return lambda x, _: np.std([member.predict(x) for member in members], axis=0)


def parts(name, x, y, rng):
    """The surrogate, its recipe and the features of a problem with these rows."""
    if name == BASIS:
        return reduced_basis(x, y), reduced_basis, residual
    if name == NETWORKS:
        given, sizes = rng.uniform(-1, 1, (1500, 6)), {"hidden_layer_sizes": (64, 64)}
        members = [MLPRegressor(**sizes, random_state=k).fit(given, front(given)) for k in range(5)]
        return lambda x: np.mean([m.predict(x) for m in members], axis=0), None, spread_of(members)
    trees = forest(x, y)
    wrong, useless = spread_of(trees.estimators_), lambda x, _: np.sin(1e5 * x.sum(1))
    return trees.predict, lambda x, y: forest(x, y).predict, wrong if name == WRONG else useless


BASIS, NETWORKS = "reduced basis, residual", "five networks, spread at 250 new rows"
USELESS, WRONG = "forest, a useless number", "forest, spread at its own rows (wrong)"
# The function, the number of inputs, half of the width of the box, the number of rows, and the settings.
PROBLEMS = {
    BASIS: (temperature, N_BLOCKS, 1.2, 200, {"domain": Grid(1)}),
    NETWORKS: (front, 6, 1.0, 250, {}),
    **dict.fromkeys((USELESS, WRONG), (front, 6, 1.0, 400, {})),
}


def measure(name, seed, wanted, *, small=False):
    """Rows with the features and without, inside and just outside."""
    (truth, d, half, n, settings), rng = PROBLEMS[name], np.random.default_rng([seed, 6])
    x = rng.uniform(-half, half, (60 if small else n, d))
    wide = WIDER * rng.uniform(-half, half, (3 * N_QUERIES, d))
    wide = wide[(abs(wide) > half).any(axis=1)][:N_QUERIES]
    queries = {"inside": rng.uniform(-half, half, (N_QUERIES, d)), "just outside": wide}
    surrogate, train, features = parts(name, x, truth(x), rng)
    rows = []
    for method in wanted:
        asked = features if method == "with" else None
        geoq = GeoQ(surrogate, train, features=asked, **settings).fit(x, truth(x), progress=None)
        used = {"used": float(geoq.fitted_.tuples.points.user is not None)}
        for shift, query in queries.items():
            about = {"method": method, "problem": name, "seed": seed, "shift": shift}
            rows.append(row(about, truth(query), geoq.assess(query)) | used)
    return rows


SEEDS, METHODS = range(200, 205), ("with", "without")
BENCHMARK = Benchmark("features", list(PROBLEMS), measure, lambda _: METHODS, SEEDS, [WRONG])
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
