"""Rows of two series of statsmodels: the yearly sunspots by rollouts of an autoregression, El Nino by six leads at once.

Seed s moves the end of the training data, because the data contain no random numbers: the test data are the years after it.
"""

import time

import numpy as np
from sklearn.linear_model import RidgeCV

from benchmarks.third_party.chaos import rollout_rows
from benchmarks.third_party.fields import scores
from benchmarks.third_party.rivals import PerValue, RegressionScaled
from geoq import GeoQ, RolloutGeoQ, TemporalFolds

N_LAGS, N_STEPS = 11, 15
N_MONTHS, N_LEADS = 12, 6


def sunspots(seed):
    """Rollouts of an autoregression on windows of eleven years; the newest value is the one that is bounded."""
    from statsmodels.datasets import sunspots as data

    numbers = data.load_pandas().data["SUNACTIVITY"].to_numpy()
    end = (190, 205, 220)[seed]
    windows = np.lib.stride_tricks.sliding_window_view(numbers, N_LAGS).copy()
    train = windows[: end - N_LAGS + 1]
    later = windows[end - N_LAGS + 1 :]
    begins = range(len(later) - N_STEPS)
    truth = np.stack([later[n + 1 : n + 1 + N_STEPS, -1:] for n in begins])
    start = np.stack([later[n] for n in begins])
    started = time.process_time()
    model = autoregression([train])
    training = time.process_time() - started
    how = {"n_calibration": N_STEPS, "output": slice(N_LAGS - 1, N_LAGS)}
    geoq = RolloutGeoQ(model, autoregression, **how)
    started = time.process_time()
    geoq.fit(train, progress=None)
    cost = (time.process_time() - started) / training
    rows = rollout_rows(geoq, start, truth, (40.0, 80.0))
    more = {"setting": "Sunspots", "seed": seed, "cost": cost}
    return [row | more | {"training_seconds": training} for row in rows]


def autoregression(segments):
    """Fit an autoregression to segments of windows. ``AutoReg`` of statsmodels accepts a single series, so this is its ``OLS``."""
    from statsmodels.regression.linear_model import OLS

    before = np.concatenate([segment[:-1] for segment in segments])
    newest = np.concatenate([segment[1:, -1] for segment in segments])
    fitted = OLS(newest, np.column_stack([np.ones(len(before)), before])).fit()
    first, *weights = fitted.params

    def step(x):
        newest = first + x @ np.asarray(weights)
        return np.column_stack([x[:, 1:], np.maximum(newest, 0)])

    return step


def el_nino(seed):
    """Sea surface temperatures of the next six months from the last twelve, by a ridge regression."""
    from statsmodels.datasets import elnino

    table = elnino.load_pandas().data.set_index("YEAR")
    months = np.asarray(table, dtype=float).ravel()
    months = months[np.isfinite(months)]
    both = np.lib.stride_tricks.sliding_window_view(months, N_MONTHS + N_LEADS)
    x, y = both[:, :N_MONTHS].copy(), both[:, N_MONTHS:].copy()
    end = 12 * (32, 36, 40)[seed]
    gap = N_MONTHS + N_LEADS
    train, test = slice(0, end), slice(end + N_LEADS, end + N_LEADS + 12 * 18)
    started = time.process_time()
    surrogate = ridge(x[train], y[train])
    training = time.process_time() - started
    geoq = GeoQ(surrogate, ridge, folds=TemporalFolds(5, gap=gap))
    started = time.process_time()
    geoq.fit(x[train], y[train], progress=None)
    cost = (time.process_time() - started) / training
    answer = geoq.assess(x[test])
    error = abs(surrogate(x[test]) - y[test])
    rows = [{"method": "GeoQ", **scores(error, answer.error_hat, answer.safe)}]
    held_out = held_out_errors(x[train], y[train], gap)
    rules = {"per-step quantiles": PerValue, "regression-scaled conformal": RegressionScaled}
    for name, rule in rules.items():
        bound = rule.fit(x[train], held_out)(x[test])
        rows.append({"method": name, **scores(error, bound, None)})
    more = {"setting": "El Nino", "seed": seed, "kind": "vector", "cost": cost}
    return [row | more | {"training_seconds": training} for row in rows]


def ridge(x, y):
    return RidgeCV(np.logspace(-3, 3, 13)).fit(x, y).predict


def held_out_errors(x, y, gap):
    """Errors of the same folds as GeoQ uses."""
    error = np.zeros_like(y)
    for left_in, held_out in TemporalFolds(5, gap=gap).split(x):
        error[held_out] = abs(ridge(x[left_in], y[left_in])(x[held_out]) - y[held_out])
    return error
