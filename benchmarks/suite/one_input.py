"""False trust when one input leaves its range at a time, and in families of data that distance alone misses.

    python -m benchmarks.suite.one_input --seeds 900 --jobs 16
    python -m benchmarks.suite.one_input --problems hole-2-gbr ridge-mlp
    python -m benchmarks.suite.one_input --small                      # two cases

A case is a problem, a surrogate and a seed. A query is falsely trusted if it is called safe and its error exceeds the bound;
with several outputs it counts by the fraction of outputs that exceed their bounds. The rules have the same bounds and differ in the
safe region.
"""

from functools import partial

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.multioutput import MultiOutputRegressor

from benchmarks.record import QUANTILE
from benchmarks.rivals import DistanceRegion, RememberedTraining
from benchmarks.runs import Benchmark, script
from benchmarks.suite.methods import shortened
from benchmarks.suite.one_input_problems import ONE_INPUT
from benchmarks.suite.recipes import Regressor, network, scaled
from geoq import GeoQ, Region

# A cell up to this many half-widths is harmless if 90 % of its errors are at most this multiple of the inside's 95 % quantile.
HARMLESS_WIDTH, HARMLESS_ERROR = 1.5, 1.2
RULES = {"GeoQ": Region(), "GeoQ (DistanceRegion)": DistanceRegion()}


class PerOutput:
    """A regressor of one output, or one regressor per output."""

    def __init__(self, model):
        self.model = model

    def fit(self, x, y):
        model = self.model if y.ndim == 1 else MultiOutputRegressor(self.model)
        return model.fit(x, y)


def gradient_boosting(random_state):
    settings = {"n_estimators": 200, "max_depth": 3, "learning_rate": 0.08}
    return PerOutput(GradientBoostingRegressor(**settings, random_state=random_state))


def forest(random_state):
    return RandomForestRegressor(80, random_state=random_state)


def process(_random_state, *, n_inputs):
    length = np.ones(n_inputs) if n_inputs <= 8 else 1.0
    kernel = ConstantKernel() * RBF(length) + WhiteKernel(1e-4)
    settings = {"normalize_y": True, "n_restarts_optimizer": 2, "random_state": 0}
    return scaled(GaussianProcessRegressor(kernel, **settings))


def recipe(surrogate, seed, n_inputs):
    """The recipe of a surrogate."""
    if surrogate == "mlp":
        return network(seed)
    models = {"gbr": gradient_boosting, "forest": forest}
    return Regressor(models.get(surrogate, partial(process, n_inputs=n_inputs)), seed)


def loaded(name, seed, *, small):
    """The problem of a case, its data and recipe, and the rows of each label."""
    problem_name, surrogate = name.rsplit("-", 1)
    problem = ONE_INPUT[problem_name]
    x, _, queries, _ = data = problem.data(seed)
    train = recipe(surrogate, seed, x.shape[1])
    rows = {label: queries.label == label for label in dict.fromkeys(queries.label)}
    return problem, data, shortened(train) if small else train, rows


def measure(name, seed, wanted, *, small=False):
    """A row for each rule: safe fraction, false trust, coverage and pinball loss by label."""
    problem, (x, y, queries, query_y), train, rows = loaded(name, seed, small=small)
    remembered = RememberedTraining(train)
    deployed = remembered(x, y)
    found = []
    for rule in wanted:
        fitted = GeoQ(deployed, remembered, safe_region=RULES[rule]).fit(x, y).fitted_
        answer = fitted.assess(queries.x)
        error, bound = (flat(v) for v in (abs(query_y - answer.prediction), answer.error_hat))
        importance = fitted.metric.importance.tolist()
        found.append(
            {
                "problem": name,
                "method": rule,
                "seed": seed,
                "family": problem.family,
                "r2": r_squared(fitted.tuples, y),
                "harmless": harmless(error, rows),
                "top": max(problem.movable, key=importance.__getitem__, default=None),
                "labels": measures(error, bound, answer.safe, rows),
            }
        )
    return found


def flat(values):
    """One row of numbers per query."""
    return np.asarray(values, dtype=float).reshape(len(values), -1)


def measures(error, bound, safe, rows):
    """Safe fraction, false trust, coverage and pinball loss by label."""
    exceeds, gap = (error > bound).mean(axis=1), error - bound
    loss = np.maximum(QUANTILE * gap, (QUANTILE - 1) * gap).mean(axis=1)
    columns = np.stack([safe, exceeds * safe, 1 - exceeds, loss])
    return {label: columns[:, mine].mean(axis=1).tolist() for label, mine in rows.items()}


def harmless(error, rows):
    """Labels of cells just outside a range whose errors are hardly larger than inside."""
    largest = HARMLESS_ERROR * np.quantile(error[rows["inside"]], 0.95, axis=0)
    return [
        label
        for label, mine in rows.items()
        if label.startswith("input")
        and float(label.split()[2]) <= HARMLESS_WIDTH
        and (np.quantile(error[mine], 0.9, axis=0) <= largest).all()
    ]


def r_squared(tuples, y):
    """The fraction of the variance that the surrogates of the random folds explain on held-out points."""
    error, outputs = flat(tuples.error[tuples.interpolating]), flat(y)
    return float(1 - (error**2).sum() / ((outputs - outputs.mean(axis=0)) ** 2).sum())


CASES = [
    f"{name}-{surrogate}" for surrogate in ("gp", "mlp", "gbr", "forest") for name in ONE_INPUT
]
BENCHMARK = Benchmark(
    "one_input", CASES, measure, lambda _: list(RULES), (900,), ("hole-2-forest", "constant-forest")
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
