"""Simple bounds that a user would write in a few lines: quantiles per value, quantiles scaled by a regression, quantiles per step."""

from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.record import QUANTILE
from benchmarks.solvers import until


def conformal_quantile(values, quantile=QUANTILE):
    """The order statistic of split conformal prediction along the first axis; the largest value if there are too few."""
    n = len(values)
    rank = min(int(np.ceil((n + 1) * quantile)), n)
    return np.sort(values, axis=0)[rank - 1]


@dataclass(frozen=True)
class PerValue:
    """Split conformal prediction of each cell, lead or coordinate apart: the same bound for all queries."""

    bound: np.ndarray

    @classmethod
    def fit(cls, features, error):
        del features
        return cls(conformal_quantile(error))

    def __call__(self, features):
        return np.broadcast_to(self.bound, (len(features), *self.bound.shape))


@dataclass(frozen=True)
class RegressionScaled:
    """Split conformal prediction of each value, scaled by a cross-validated regression of the sample's log mean error."""

    regression: object
    factor: np.ndarray

    @classmethod
    def fit(cls, features, error):
        size = np.log(error.reshape(len(error), -1).mean(axis=1))
        regression = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))
        predicted = cross_val_predict(regression, features, size, cv=5)
        ratio = error / np.exp(predicted).reshape(-1, *(1,) * (error.ndim - 1))
        return cls(regression.fit(features, size), conformal_quantile(ratio))

    def __call__(self, features):
        size = np.exp(self.regression.predict(features))
        return size.reshape(-1, *(1,) * self.factor.ndim) * self.factor


def summaries(*fields):
    """Mean, deviation, roughness and extremes of each channel of some fields."""
    columns = []
    for field in fields:
        cells = field.reshape(*field.shape[:2], -1)
        columns += [cells.mean(2), cells.std(2), cells.min(2), cells.max(2)]
        for axis in range(2, field.ndim):
            step = np.diff(field, axis=axis).reshape(*field.shape[:2], -1)
            columns.append(np.log(step.std(2) + 1e-12))
    return np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class StepRules:
    """Two rules for the length of all rollouts, from the largest ratio of error and tolerance of held-out rollouts and steps."""

    per_step: int  # the steps before the quantile of the ratio of a step exceeds 1
    exceedance: int  # a low quantile of the number of steps for which held-out rollouts stay within the tolerance

    @classmethod
    def fit(cls, ratio):
        large, kept = conformal_quantile(ratio) > 1, np.sort(until(ratio <= 1))
        steps = int(large.argmax()) if large.any() else ratio.shape[1]
        return cls(steps, int(kept[int((1 - QUANTILE) * len(kept))]))
