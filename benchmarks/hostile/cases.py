"""Small calibrated estimators of every kind that a file can contain, with the call that loads them and their answers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import xarray as xr
from sklearn.linear_model import Ridge

import geoq
from geoq import GeoQ, RolloutGeoQ
from geoq.increments import Climatology, FieldFactor
from geoq.rollout import AdditiveRecursion, SaturatingGrowth
from geoq.sklearn import GeoQRegressor
from geoq.xarray import XarrayGeoQ

SHORT = geoq.Training(n_steps=20, check_every=10, batch_size=8, learning_rate=1e-2)


@dataclass(frozen=True)
class Case:
    """An estimator to be saved: how to fit it, how to load it, and its answers as a list of arrays."""

    name: str
    fit: Callable
    load: Callable
    answers: Callable

    @property
    def fitted(self):
        return _fitted(self)

    @property
    def expected(self):
        """The answers of the fitted estimator."""
        return _expected(self)


@cache
def _fitted(case):
    return case.fit()


@cache
def _expected(case):
    return case.answers(case.fitted)


def linear(x):
    return x @ np.array([1.0, -0.5])


class Tenth:
    """An increment model of the user, which a file does not contain."""

    quantile = 0.95

    def fit(self, calibration):
        del calibration
        return self

    def __call__(self, features):
        return features.norm / 10


def table(n=60, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, 2))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] ** 2


def fields():
    x = torch.randn(40, 2, 6, 5, generator=torch.Generator().manual_seed(0))
    return x, x.exp()


def states():
    rows = [(0.1, 0.1)]
    for _ in range(400):
        a, b = rows[-1]
        rows.append((1 - 1.4 * a**2 + b, 0.3 * a))
    return np.array(rows[1:])


def step(s):
    return np.stack([1 - 1.39 * s[:, 0] ** 2 + s[:, 1], 0.3 * s[:, 0]], axis=1)


def arrays_of(answer):
    """The numbers of an assessment."""
    parts = (answer.prediction, answer.error_hat, answer.safe, answer.support_score)
    return [np.asarray(part) for part in parts]


def assessed(queries, estimator):
    return arrays_of(estimator.assess(queries))


def labelled(queries, estimator):
    answer = estimator.assess(queries)
    numbers = [answer[name].values for name in ("error_hat", "safe", "support_score")]
    return [*numbers, answer["anchors"].values.astype(float)]


def rolled_out(estimator):
    answer = estimator.assess(states()[-5:], 20)
    return [np.asarray(answer.error_hat), np.asarray(answer.trusted_horizon)]


def of_table(name, **settings):
    x, y = table()
    settings = {"folds": geoq.RandomFolds(3)} | settings
    own = {"increment_model": Tenth()} if name == "own increment model" else {}
    return Case(
        name,
        lambda: GeoQ(linear, None, **settings).fit(x, y),
        partial(GeoQ.load, surrogate=linear, **own),
        partial(assessed, table(9, seed=1)[0]),
    )


def of_fields(name, truth, **settings):
    x, _ = fields()
    geoq_of = partial(GeoQ, torch.zeros_like, None, folds=geoq.RandomFolds(2))
    return Case(
        name,
        lambda: geoq_of(**settings).fit(x, truth(x)),
        partial(GeoQ.load, surrogate=torch.zeros_like),
        partial(assessed, x[:5] + 0.1),
    )


def of_rollouts(name, scheme):
    settings = {"n_calibration": 15, "n_starts": 12, "n_support": 5}
    return Case(
        name,
        lambda: RolloutGeoQ(step, None, scheme=scheme, **settings).fit(states()),
        partial(RolloutGeoQ.load, surrogate=step),
        rolled_out,
    )


def of_labels():
    times = np.datetime64("2020-01-01", "ns") + np.arange(60) * np.timedelta64(1, "D")
    grid = {"time": times, "place": ["here", "there"]}
    x = xr.DataArray(table()[0], grid, attrs={"units": "K"})
    plain = GeoQ(np.sin, None, folds=geoq.RandomFolds(3))
    return Case(
        "XarrayGeoQ",
        lambda: XarrayGeoQ(plain, "time").fit(x, x**2),
        partial(XarrayGeoQ.load, surrogate=np.sin),
        partial(labelled, x[:5] + 0.1),
    )


def of_regressor():
    x, y = table()
    ridge = Ridge().fit(x, y)
    return Case(
        "GeoQRegressor",
        lambda: GeoQRegressor(Ridge(), folds=geoq.RandomFolds(3)).fit(x, y),
        partial(GeoQRegressor.load, estimator=ridge),
        partial(assessed, table(9, seed=1)[0]),
    )


def is_large(x):
    return (x > 1).float()


CASES = [
    of_table("default"),
    of_table(
        "paper",
        increment_model=geoq.NormScaledIncrement(hidden=(8,), training=SHORT),
        safe_region=geoq.SafeRegion(5),
    ),
    of_table("climatology", increment_model=geoq.TwoLawIncrement(0.9, Climatology())),
    of_table("own increment model", increment_model=Tenth()),
    of_fields(
        "field network",
        torch.exp,
        increment_model=geoq.FieldIncrement(widths=(4, 8), training=SHORT),
        n_support=5,
    ),
    of_fields(
        "field factor",
        torch.exp,
        increment_model=geoq.FieldScaleIncrement(
            factor=FieldFactor(widths=(4,), n_splits=2, training=SHORT)
        ),
    ),
    of_fields(
        "two values",
        is_large,
        increment_model=geoq.IndicatorIncrement(0.8, widths=(4, 8), training=SHORT),
    ),
    of_rollouts("RolloutGeoQ", SaturatingGrowth(0.9)),
    of_rollouts("RolloutGeoQ, paper", AdditiveRecursion(0.9, training=SHORT)),
    of_labels(),
    of_regressor(),
]
