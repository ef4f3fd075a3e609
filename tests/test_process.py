"""The Gaussian process beside the surrogate: its equations, and what is said about it."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern
from sklearn.tree import DecisionTreeRegressor

from geoq import GeoQ, RandomFolds, Region
from geoq.core.opinion import mixed_rows
from geoq.data import process
from geoq.data.process import KERNELS, Process, second_opinion, smoothness_of
from geoq.parts import EachInput, PaperRegion, Unexplained


def box(n, d=3, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, d))


def truth(x):
    return np.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


@pytest.mark.parametrize(
    ("kernel", "theirs"),
    [
        ("rbf", RBF),
        ("matern52", lambda s: Matern(s, nu=2.5)),
        ("matern32", lambda s: Matern(s, nu=1.5)),
    ],
)
def test_mean_and_deviation_are_those_of_a_textbook_process(kernel, theirs):
    x, queries, noise, scales = box(60), box(25, seed=1), 1e-3, np.array([0.5, 1.0, 2.0])
    y = np.hstack([truth(x), x[:, :1] ** 2])
    own = Process.fit(x, y, (kernel, scales, noise))(queries)
    centred = y - y.mean(axis=0)
    gram = theirs(scales)(x) + noise * np.eye(60)
    signal = (centred * np.linalg.solve(gram, centred)).mean(axis=0)
    for j in range(2):
        known = GaussianProcessRegressor(theirs(scales), alpha=noise, optimizer=None)
        mean, deviation = known.fit(x, centred[:, j]).predict(queries, return_std=True)
        assert_allclose(own.mean[:, j], mean + y[:, j].mean(), atol=1e-8)
        assert_allclose(own.left, deviation, atol=1e-6)
        assert_allclose(own.deviation[:, j], np.sqrt(signal[j] * (deviation**2 + noise)), atol=1e-6)


def test_the_likelihood_has_the_right_slope():
    x, y = box(30), truth(box(30))
    for kernel in KERNELS:
        for squared in (0.3, 2.0):
            value, slope = KERNELS[kernel](np.array(squared))
            step = (KERNELS[kernel](np.array(squared + 1e-6))[0] - value) / 1e-6
            assert_allclose(-2 * step, slope, rtol=1e-4)
    _, scales, noise = smoothness_of(box(150), truth(box(150)))
    assert noise < 1e-4
    assert scales[0] < scales[1]  # the sine varies faster
    wrong = 0.5 * np.random.default_rng(0).normal(size=(150, 1))
    assert smoothness_of(box(150), truth(box(150)) + wrong)[2] > 0.05
    assert y.shape == (30, 1)
    assert x.shape == (30, 3)


def test_rows_with_equal_inputs_are_averaged_and_weigh_more():
    x, y = box(20), truth(box(20))
    shared = "rbf", np.ones(3), 0.1
    three = Process.fit(np.tile(x, (3, 1)), np.concatenate([y - 1, y, y + 1]), shared)(x)
    lower = Process.fit(x, y, ("rbf", np.ones(3), 0.1 / 3))(x)
    assert_allclose(three.mean, lower.mean)
    assert_allclose(three.left, lower.left)


def test_centres_and_the_nearest_points_are_close_to_the_process_through_all(monkeypatch):
    x, queries = box(400), box(100, seed=1)
    shared = "matern32", np.ones(3), 1e-4
    exact = Process.fit(x, truth(x), shared)(queries)
    monkeypatch.setattr(process, "MAX_EXACT", 300)
    near = Process.fit(x, truth(x), shared)
    assert len(near.others) == 150
    local = near(queries)
    monkeypatch.setattr(process, "N_NEAREST", 150)
    everything = near(queries)
    assert_allclose(everything.left, exact.left, atol=1e-6)
    assert_allclose(
        everything.mean, exact.mean, atol=2e-3
    )  # the mean of all points is that of the centres
    centres = Process.fit(
        x[np.sort(process.permutation(400)[:250])],
        truth(x)[np.sort(process.permutation(400)[:250])],
        shared,
    )(queries)
    gaps = [abs(o.mean - exact.mean).mean() for o in (local, centres)]
    assert gaps[0] < 0.5 * gaps[1]
    assert (local.left >= exact.left - 1e-9).all()


def test_the_unexplained_part_goes_from_0_at_the_data_to_1_far_away():
    x = box(50)
    left = Process.fit(x, truth(x), ("rbf", np.ones(3), 1e-8))(
        np.concatenate([x[:1], x[:1] + 50])
    ).left
    assert left[0] < 1e-3
    assert left[1] == pytest.approx(1)


def test_a_fold_does_not_know_the_points_that_it_holds_out():
    x, y = box(60), truth(box(60))
    rows = np.arange(60)
    splits = [(rows[rows % 3 != k], rows[rows % 3 == k]) for k in range(3)]
    y[0] += 5
    _, opinion = second_opinion(x, y, splits)
    assert abs(opinion.mean[0] - y[0]) > 3  # row 0 is the first held-out point of the first fold


def model(x, y):
    return DecisionTreeRegressor(max_depth=4, random_state=0).fit(x, y).predict


X = box(200)
Y = truth(X)[:, 0]


@pytest.fixture(scope="module")
def fitted():
    with pytest.warns(
        UserWarning,
        match="A Gaussian process through the same data has a mean held-out error of 0.00",
    ):
        return GeoQ(model(X, Y), model).fit(X, Y)


def test_an_answer_has_the_second_opinion(fitted):
    queries = np.insert(box(30, seed=1), 3, np.nan, axis=0)
    opinion = fitted.assess(queries).second_opinion
    known = np.arange(31) != 3
    assert abs(opinion.prediction[known] - truth(queries[known])[:, 0]).max() < 0.02
    assert np.isnan([opinion.prediction[3], opinion.deviation[3]]).all()
    assert "a mean held-out error of 0.00" in fitted.describe()


def test_few_fields_have_no_second_opinion():
    x = np.random.default_rng(0).normal(size=(25, 1, 80)).cumsum(axis=2)
    estimator = GeoQ(lambda x: 0.9 * x, None, folds=RandomFolds(3), safe_region=PaperRegion(3))
    with pytest.raises(TypeError, match="has no second opinion"):
        _ = estimator.fit(x, x).assess(x).second_opinion


def test_a_point_off_the_manifold_of_the_data_is_not_safe():
    """Four inputs on a curved surface: every input and every pair of inputs is in range."""
    rng = np.random.default_rng(0)
    u = rng.uniform(-1, 1, size=(300, 2))
    x = np.column_stack([u, np.sin(2 * u[:, 0] * u[:, 1]), np.cos(2 * u.sum(axis=1))])
    y = x.sum(axis=1)
    region = Region((EachInput(), Unexplained()))
    estimator = GeoQ(lambda x: x.sum(axis=1) + 0.01 * x[:, 0] ** 2, None, safe_region=region).fit(
        x, y
    )
    off = x[:100].copy()
    off[:, 2] = x[100:200, 2]
    apart = abs(off[:, 2] - x[:100, 2]) > 0.5
    answer = estimator.assess(off)
    assert answer.safe[apart].mean() < 0.1
    assert "of its deviation unexplained here" in answer.reason(
        int(np.flatnonzero(~answer.safe & apart)[0])
    )


def test_a_surrogate_that_was_trained_on_the_rows_raises_the_alarm_and_its_twin_does_not():
    tree = DecisionTreeRegressor(max_leaf_nodes=150, random_state=0)
    with pytest.warns(UserWarning, match="must never have seen x and y"):
        GeoQ(tree.fit(X, Y).predict, None).fit(X, Y)
    other = box(400, seed=5)
    GeoQ(tree.fit(other, truth(other)[:, 0]).predict, None).fit(X, Y)


def test_mixed_rows_take_values_of_two_rows():
    x = box(50)
    mixed = mixed_rows(x, x)
    assert (mixed[:, None] == x[None]).any(axis=1).all()
    assert not (mixed[:, None] == x[None]).all(axis=2).any()
    assert mixed_rows(x[:, :1], x[:, :1]).shape == (50, 1)
