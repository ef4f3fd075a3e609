"""Rows of the neural operators: GeoQ, its conformal forms and simple bounds on new fields, and shifted fields."""

import time
from dataclasses import replace

import numpy as np

from benchmarks.record import QUANTILE
from benchmarks.third_party.rivals import PerValue, RegressionScaled, summaries
from geoq import GeoQ, RandomFolds, WholeField
from geoq.metrics import coverage, pinball

# Fields for the training, the calibration, conformalize, the test and each shift.
FULL = {"train": 200, "calibration": 200, "aside": 100, "test": 300, "shifted": 100}
SMALL = {"train": 30, "calibration": 30, "aside": 30, "test": 10, "shifted": 4}
OURS, FOLDS = "GeoQ", "GeoQ, 5 folds"
RIVALS = {"per-cell conformal": PerValue, "regression-scaled conformal": RegressionScaled}  # fmt: skip


def measure(case, seed, sizes):
    """All rows of one case and seed."""
    rng = np.random.default_rng([seed, 7])
    parts = {}
    for name in ("train", "calibration", "aside", "test"):
        x = case.draw(rng, sizes[name])
        parts[name] = x, case.solve(x)
    recipe = replace(case.recipe, seed=seed)
    started = time.process_time()
    surrogate = recipe(*parts["train"])
    training = time.process_time() - started

    def row(method, bound, seconds, safe=None):
        x, y = parts["test"]
        about = {"method": method, "setting": case.name, "seed": seed, "kind": "field"}
        spent = {"training_seconds": training, "cost": seconds / training}
        return about | scores(abs(surrogate(x) - y), bound, safe) | spent

    rows = [row(name, *simple_bound(rule, surrogate, parts)) for name, rule in RIVALS.items()]
    models = {
        FOLDS: (GeoQ(surrogate, recipe, folds=RandomFolds(5)), "train"),
        OURS: (GeoQ(surrogate, None, folds=RandomFolds(5)), "calibration"),
    }
    for name, (geoq, data) in models.items():
        started = time.process_time()
        geoq.fit(*parts[data], progress=None)
        seconds = time.process_time() - started
        answer = geoq.assess(parts["test"][0])
        rows.append(row(name, answer.error_hat, seconds, answer.safe))
    shifted = shift_rows(case, seed, surrogate, geoq, rng, sizes["shifted"])
    for name, guarantee in (("conformalize", None), ("WholeField(0.9)", WholeField(0.9))):
        settings = {} if guarantee is None else {"guarantee": guarantee}
        geoq.conformalize(*parts["aside"], **settings)
        answer = geoq.assess(parts["test"][0])
        rows.append(row(f"GeoQ, {name}", answer.error_hat, seconds, answer.safe))
    return rows + shifted


def simple_bound(rule, surrogate, parts):
    """The bound of a simple rule on the test fields, and the seconds of its fit."""
    (x, y), (x_test, _) = parts["calibration"], parts["test"]
    started = time.process_time()
    prediction = surrogate(x)
    fitted = rule.fit(summaries(x, prediction), abs(prediction - y))
    seconds = time.process_time() - started
    return fitted(summaries(x_test, surrogate(x_test))), seconds


def shift_rows(case, seed, surrogate, geoq, rng, n):
    """One row per set of shifted fields."""
    rows = []
    for name, (draw, solve) in {"none": (case.draw, case.solve), **case.shifts}.items():
        x = draw(rng, n)
        answer, error = geoq.assess(x), abs(surrogate(x) - solve(x))
        about = {"method": OURS, "setting": case.name, "seed": seed, "kind": "shift", "shift": name}
        about["error"] = float(error.mean())
        rows.append(about | scores(error, answer.error_hat, answer.safe))
    return rows


def scores(error, bound, safe):
    """Loss, coverage of all values, of the worst value and of whole samples, and the same for safe samples."""
    within = error <= bound
    by_sample = within.reshape(len(within), -1).mean(axis=1)
    found = {
        "pinball": pinball(error, bound, QUANTILE),
        "coverage": float(within.mean()),
        "least_coverage": float(within.mean(axis=0).min()),
        "whole": float((by_sample >= QUANTILE).mean()),
    }
    if safe is not None:
        found["safe_fraction"] = float(safe.mean())
        found["safe_coverage"] = coverage(error[safe], bound[safe]) if safe.any() else None
    return found
