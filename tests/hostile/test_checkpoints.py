"""Checkpoint folders that are foreign, damaged or on a full disk, and recipes that look alike."""

import shutil
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from conftest import fresh
from sklearn.base import clone
from sklearn.linear_model import Ridge
from torch import nn

from geoq import (
    MLP,
    DistanceRegion,
    GeoQ,
    RandomFolds,
    StandardizedMetric,
    Training,
    TrainNetwork,
    archive,
)
from geoq.training import Checkpoint
from geoq.training.recipe_id import Unrecognisable, recipe_id

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (60, 2))
Y = np.sin(3 * X[:, 0]) + X[:, 1] ** 2
FACTOR = 0.9


class Constant:
    """The quickest increment model."""

    quantile = 0.9

    def fit(self, calibration):
        return self

    def __call__(self, features):
        return 0.1 + 0 * features.anchor_error


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


def times(factor):
    return lambda x, y: lambda q: factor * y.std() * truth(q)


def fitted(recipe, checkpoint, y=Y):
    settings = {
        "folds": RandomFolds(3),
        "representation": StandardizedMetric(),
        "increment_model": Constant(),
        "safe_region": DistanceRegion(),
    }
    geoq = GeoQ(truth, recipe, **settings)
    return geoq.fit(X, y, checkpoint=checkpoint)


def errors(recipe, checkpoint, y=Y):
    return fitted(recipe, checkpoint, y).calibration_.error


def with_default(factor):
    def train(x, y, by=factor):
        return lambda q: by * truth(q)

    return train


def with_keyword(factor):
    def train(x, y, *, by=factor):
        return lambda q: by * truth(q)

    return train


def with_other_code(factor):
    if factor > 1:
        return lambda x, y: lambda q: truth(q) + 1
    return lambda x, y: lambda q: truth(q) - 1


def with_constant(factor):
    if factor > 1:
        return lambda x, y: lambda q: truth(q) + 1.5
    return lambda x, y: lambda q: truth(q) + 2.5


def with_large_array(factor):
    weights = np.full(2000, 0.5)
    weights[1000] = factor
    return partial(lambda w, x, y: lambda q: w.mean() * truth(q), weights)


class Scaled:
    """A recipe with the default repr."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x, y):
        return lambda q: self.factor * truth(q)


@dataclass(frozen=True)
class Described:
    factors: np.ndarray

    def __call__(self, x, y):
        return lambda q: self.factors.mean() * truth(q)


def with_class(factor):
    class Recipe:
        power = factor

        def __call__(self, x, y):
            return lambda q: self.power * truth(q)

    return Recipe()


def with_network(factor):
    network = fresh(nn.Linear, 1, 1)
    nn.init.constant_(network.weight, factor)
    nn.init.zeros_(network.bias)
    return partial(lambda net, x, y: truth, network)


def with_global(factor):
    globals()["FACTOR"] = factor
    return lambda x, y: lambda q: FACTOR * truth(q)


LOOK_ALIKE = [
    times,
    with_default,
    with_keyword,
    with_other_code,
    with_constant,
    with_large_array,
    Scaled,
    lambda factor: Scaled(factor).__call__,
    lambda factor: Described(np.r_[np.zeros(5000), factor]),
    with_class,
    with_network,
    with_global,
    lambda factor: partial(lambda model, x, y: clone(model).fit, Ridge(alpha=factor)),
    lambda factor: TrainNetwork(
        partial(MLP, 2, 1, hidden=(4,)), training=Training(learning_rate=factor)
    ),
    lambda factor: {"a": [1, {factor}, (factor,)]},
]


@pytest.mark.parametrize("make", LOOK_ALIKE)
def test_a_recipe_is_recognised_by_its_content(make):
    assert recipe_id(make(0.5)) == recipe_id(make(0.5))
    assert recipe_id(make(0.5)) != recipe_id(make(2.0))


def test_a_recipe_that_calls_itself_is_recognised():
    def make(constant):
        def train(x, y):
            return train if constant else truth

        return train

    assert recipe_id(make(1)) == recipe_id(make(1)) != recipe_id(make(2))


@pytest.mark.parametrize("thing", [threading.Lock(), np.random.default_rng(0)])
def test_a_recipe_that_cannot_be_recognised_needs_a_key(tmp_path, thing):
    def train(x, y):
        return lambda q: (thing and 1) * truth(q)

    with pytest.raises(Unrecognisable):
        recipe_id(train)
    with pytest.raises(ValueError, match=r"cannot recognise; .*key='name'"):
        fitted(train, tmp_path / "a")
    fitted(train, Checkpoint(tmp_path / "a", key="one"))
    fitted(train, Checkpoint(tmp_path / "a", key="one"))
    with pytest.raises(
        ValueError, match="train_surrogate was key 'one', now key 'two'"
    ):
        fitted(train, Checkpoint(tmp_path / "a", key="two"))


def test_another_closure_is_refused_and_the_same_one_continues(tmp_path):
    first = errors(times(0.9), tmp_path)
    assert np.array_equal(first, errors(times(0.9), tmp_path))
    with pytest.raises(ValueError, match=r"train_surrogate was .* with Checkpoint"):
        errors(times(0.1), tmp_path)


@pytest.mark.parametrize("name", ["fold-0001", "jobs", "metric"])
def test_a_file_of_another_calibration_is_refused(tmp_path, name):
    one, other = tmp_path / "one", tmp_path / "other"
    fitted(times(0.9), one)
    fitted(times(0.9), other, 5 * Y)
    shutil.copy(other / f"{name}.geoq", one)
    with pytest.raises(ValueError, match=f"{name}.geoq belongs to another calibration"):
        fitted(times(0.9), one)


def test_a_file_under_the_name_of_another_fold_is_refused(tmp_path):
    fitted(times(0.9), tmp_path)
    shutil.copy(tmp_path / "fold-0001.geoq", tmp_path / "fold-0002.geoq")
    with pytest.raises(
        ValueError, match=r"does not contain the .* of fold 2; delete it"
    ):
        fitted(times(0.9), tmp_path)


@pytest.mark.parametrize(
    "jobs",
    [
        [[0]],
        [[0], [1], [1]],
        [[0, 1, 2, 3]],
        [],
        "abc",
        [[0], ["1"], [2]],
        None,
        [0, 1],
    ],
)
def test_only_a_partition_of_the_folds_is_accepted(tmp_path, jobs):
    fitted(times(0.9), tmp_path)
    file = tmp_path / "jobs.geoq"
    numbers, _ = archive.read(file)
    archive.write(file, numbers | {"jobs": jobs}, {})
    with pytest.raises(ValueError, match=r"needs each of \[0, 1, 2\] once"):
        fitted(times(0.9), tmp_path)


def test_a_deleted_folder_costs_the_checkpoint_and_not_the_calibration(tmp_path):
    def train(x, y):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return lambda q: 0.9 * truth(q)

    with pytest.warns(UserWarning, match="cannot be written .*; fit continues"):
        survived = errors(train, Checkpoint(tmp_path / "a", key="one"))
    assert np.array_equal(survived, errors(lambda x, y: lambda q: 0.9 * truth(q), None))


def test_something_that_is_no_folder_is_refused():
    with pytest.raises(TypeError, match="must be the path of a folder or a Checkpoint"):
        fitted(times(0.9), 3)
