"""Outputs over decades: absolute errors and ``log_error``, against the quantiles of cross-validated errors per decile of the prediction.

    python -m benchmarks.suite.decades           # eight draws of eight settings: ten minutes on one core
    python -m benchmarks.suite.decades --small   # one setting with few rows

Boosted trees of log10(y) on 600 rows of 4 inputs; 4000 new rows inside the data. The last two forms are ``log_error`` in the unit of y.
"""

import warnings

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold

from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, script
from geoq import GeoQ, log_error
from geoq.metrics import coverage, pinball

FORMS = ("absolute error", "`log_error`, of the logarithm", "`exp(bound) - 1`", "upper end at 0.9")
# For each noise of log(y), factors for about 2, 3.2, 4.7 and 7.2 decades between the 1 % and the 99 % quantile of y.
FACTORS = {0.05: (2.7, 4.4, 6.5, 9.9), 0.7: (1.9, 3.9, 6.1, 9.7)}
SETTINGS = {f"{f:g}, {noise:g}": (f, noise) for noise, each in FACTORS.items() for f in each}


def draw(rng, n, factor, noise):
    x = rng.uniform(size=(n, 4))
    curve = 0.6 * x[:, 0] + 0.25 * np.sin(3 * x[:, 1]) + 0.25 * x[:, 2] * x[:, 3]
    return x, 10 ** (factor * curve / 1.1) * np.exp(noise * rng.normal(size=n))


def train(x, y):
    model = HistGradientBoostingRegressor(random_state=0).fit(x, np.log10(y))
    return lambda x: 10 ** model.predict(x)


def per_decile(fitted, error, predicted):
    """The quantile of the errors of each decile of cross-validated predictions, for new predictions."""
    edges = np.quantile(fitted, np.arange(1, 10) / 10)
    own = np.digitize(fitted, edges)
    found = np.array([np.quantile(error[own == k], QUANTILE) for k in range(10)])
    return found[np.digitize(predicted, edges)]


def measure(problem, seed, wanted, *, small=False):
    """A row for each form of the bound."""
    (factor, noise), rng = SETTINGS[problem], np.random.default_rng(seed)
    numbers = (200, 400) if small else (600, 4000)
    (x, y), (queries, truth) = (draw(rng, n, factor, noise) for n in numbers)
    surrogate, fitted = train(x, y), np.empty(len(x))
    for rows, held_out in KFold(5, shuffle=True, random_state=0).split(x):
        fitted[held_out] = train(x[rows], y[rows])(x[held_out])
    predicted = surrogate(queries)
    error, log = abs(truth - predicted), abs(np.log(truth / predicted))
    plain = per_decile(fitted, abs(y - fitted), predicted)
    of_log = per_decile(fitted, abs(np.log(y / fitted)), predicted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the outputs range over decades
        absolute = GeoQ(surrogate, train).fit(x, y, progress=None).bound(queries)
        logs = GeoQ(surrogate, train, error_functional=log_error).fit(x, y, progress=None)
    bounds = logs.bounds(queries, (QUANTILE, 0.9))
    factors = [(error, predicted * np.expm1(bound), plain) for bound in bounds.values()]
    found = (error, absolute, plain), (log, bounds[QUANTILE], of_log), *factors
    decades = float(np.log10(np.quantile(y, 0.99) / np.quantile(y, 0.01)))
    about = {"setting": problem, "noise": noise, "seed": seed, "decades": decades}
    rows = {form: known for form, known in zip(FORMS, found, strict=True) if form in wanted}
    return [
        {**about, "method": form, "coverage": coverage(e, bound)}
        | {"loss": pinball(e, bound, QUANTILE) / pinball(e, simple, QUANTILE)}
        for form, (e, bound, simple) in rows.items()
    ]


BENCHMARK = Benchmark(
    "decades", list(SETTINGS), measure, lambda _: FORMS, range(300, 308), list(SETTINGS)[3:4]
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
