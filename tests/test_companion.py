"""The companion of field surrogates, and what the bound of fields makes of it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoq import GeoQ, Grid, Mesh, RandomFolds
from geoq.data.companion import (
    AroundCells,
    BetweenComponents,
    Components,
    Window,
    cells_around,
    field_opinion,
)
from geoq.data.domain import Layout
from geoq.metrics import pinball
from geoq.parts import FieldBound, NoFactor

LINE = Layout(Grid(1), (16,), on_cells=True)
UNITS = np.zeros((1, 16)), np.ones((1, 16))


def fields(n, seed=0, n_cells=16):
    return np.random.default_rng(seed).normal(size=(n, 1, n_cells)).cumsum(axis=2)


def diffused(x):
    """A step of a local equation on a periodic line."""
    return x + 0.2 * (np.roll(x, 1, axis=-1) - 2 * x + np.roll(x, -1, axis=-1))


def splits(n, n_folds=3):
    rows = np.arange(n)
    return [(rows[rows % n_folds != k], rows[rows % n_folds == k]) for k in range(n_folds)]


def test_windows_wrap_around_on_a_grid():
    assert_array_equal(np.sort(cells_around(LINE, 1)[0]), [0, 1, 15])
    plane = Layout(Grid(2), (3, 4), on_cells=True)
    assert_array_equal(np.sort(cells_around(plane, 1)[0]), [0, 1, 3, 4, 5, 7, 8, 9, 11])


def test_windows_of_a_mesh_are_its_nearest_nodes():
    nodes = np.random.default_rng(0).uniform(size=(30, 2))
    near = cells_around(Layout(Mesh(nodes), (30,), on_cells=True), 7)
    distance = np.linalg.norm(nodes[:, None] - nodes, axis=2)
    assert_array_equal(near, np.argsort(distance, axis=1)[:, :7])


def test_components_keep_the_directions_with_the_variance_and_say_what_they_leave():
    rows = np.random.default_rng(0).normal(size=(500, 3)) * [10.0, 5.0, 0.1]
    found = Components.fit(rows, 0.99, 5)
    assert found.axes.shape == (2, 3)
    assert_allclose(np.sqrt(found.left), [0, 0, 0.1], atol=0.02)
    assert_allclose(found.mean + found.unit * found(rows) @ found.axes, rows, atol=0.5)


def test_a_local_equation_is_learned_from_a_few_fields():
    x, new = fields(40), fields(20, seed=1)
    smoothness = BetweenComponents.fit((x, diffused(x))).process.smoothness
    mean, deviation = AroundCells.fit((x, diffused(x)), smoothness, Window(LINE, 2, False))(new)
    assert abs(mean.reshape(new.shape) - diffused(new)).max() < 1e-3
    assert deviation.max() < 1e-3


def test_a_map_between_few_components_is_learned_by_the_process():
    rng = np.random.default_rng(0)
    basis, other = rng.normal(size=(2, 3, 16))
    draw = rng.normal(size=(80, 3))
    x, y = draw @ basis, np.sin(draw) @ other
    mean, deviation = BetweenComponents.fit((x[:60], y[:60]))(x[60:])
    assert abs(mean - y[60:]).mean() < 0.2 * y.std()
    assert 0.7 < (abs(mean - y[60:]) < 2 * deviation).mean() <= 1


def test_a_fold_does_not_know_the_fields_that_it_holds_out():
    x = fields(60)
    y = diffused(x)
    y[0] += 100  # held out by the first fold
    _, opinion = field_opinion(x.reshape(60, 16), UNITS, y, LINE, splits(60))
    assert abs(opinion.mean[0] - y[0, 0]).min() > 50


def wrong_in_the_middle(x):
    """A surrogate whose error depends on the slope at a cell."""
    return diffused(x) + 0.5 * (np.roll(x, 1, axis=-1) - x) ** 2


@dataclass(frozen=True)
class Alone(FieldBound):
    uses_companion: ClassVar[bool] = False


def test_the_bound_is_narrow_where_the_surrogate_is_right():
    x, new = fields(100), fields(200, seed=1)
    losses = []
    for model in (Alone(factor=NoFactor()), FieldBound(factor=NoFactor())):
        estimator = GeoQ(wrong_in_the_middle, None, folds=RandomFolds(3), bound_model=model)
        bound = estimator.fit(x, diffused(x)).bound(new)
        losses.append(pinball(abs(wrong_in_the_middle(new) - diffused(new)), bound, 0.95))
    assert losses[1] < 0.2 * losses[0]


def test_a_companion_that_is_far_worse_than_the_surrogate_is_not_used():
    x = fields(60)
    noise = np.random.default_rng(1).normal(size=(60, 1, 16))
    y = np.sin(3 * x[..., ::-1]) + 0.01 * noise  # neither local nor between few components
    surrogate = lambda x: np.sin(3 * x[..., ::-1])
    estimator = GeoQ(surrogate, None, folds=RandomFolds(3), bound_model=FieldBound(NoFactor()))
    estimator.fit(x, y)
    assert estimator.fitted_.process is None
    assert estimator.fitted_.bound.power == 0
    with pytest.raises(TypeError, match="more than twice as wrong as the surrogate"):
        _ = estimator.assess(x[:2]).second_opinion


def test_a_file_keeps_the_companion(tmp_path):
    x, new = fields(60), fields(5, seed=1)
    how = {"folds": RandomFolds(3), "bound_model": FieldBound(factor=NoFactor())}
    estimator = GeoQ(wrong_in_the_middle, None, **how).fit(x, diffused(x))
    estimator.save(tmp_path / "fields.geoq")
    loaded = GeoQ.load(tmp_path / "fields.geoq", surrogate=wrong_in_the_middle)
    assert estimator.fitted_.bound.power > 0
    assert_array_equal(loaded.bound(new), estimator.bound(new))


def test_a_surrogate_far_worse_than_its_companion_is_reported():
    x = fields(60)
    estimator = GeoQ(wrong_in_the_middle, None, folds=RandomFolds(3), bound_model=Alone(NoFactor()))
    estimator.fit(x, diffused(x))  # without a companion there is nothing to compare with
    with pytest.warns(UserWarning, match="A regression on the same fields has a mean held-out"):
        GeoQ(
            wrong_in_the_middle,
            None,
            folds=RandomFolds(3),
            bound_model=FieldBound(factor=NoFactor()),
        ).fit(x, diffused(x))
    assert estimator.fitted_.process is None
