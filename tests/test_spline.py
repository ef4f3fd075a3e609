"""The smoothing spline: exact cases, noise, repeated rows, and points in a plane."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.interpolate import RBFInterpolator

from geoq.bounds.spline import MAX_CENTRES, SmoothingSpline, best_smoothing


def points(n=60, d=2, seed=0):
    return np.random.default_rng(seed).uniform(size=(n, d))


def wave(x):
    return np.sin(4 * x.sum(axis=1, keepdims=True))


def test_without_smoothing_it_is_the_cubic_interpolant():
    x, new = points(), points(20, seed=1)
    spline = SmoothingSpline.fit(x, wave(x), 0.0)
    expected = RBFInterpolator(x, wave(x), kernel="cubic", degree=1)(new)
    assert_allclose(spline(new), expected, rtol=1e-5, atol=1e-6)


def test_linear_functions_are_continued_exactly():
    x, far = points(), 5 + points(9, seed=1)
    y = np.concatenate([1 + x[:, :1] - 2 * x[:, 1:], x[:, 1:]], axis=1)
    for smoothing in (0.0, 1.0):
        value = SmoothingSpline.fit(x, y, smoothing)(far)
        expected = np.concatenate([1 + far[:, :1] - 2 * far[:, 1:], far[:, 1:]], axis=1)
        assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_exact_data_are_interpolated_and_noise_is_smoothed():
    x = points(200)
    noise = np.random.default_rng(2).normal(size=(200, 1))
    assert best_smoothing(x, wave(x)) <= 1e-6
    assert best_smoothing(x, wave(x) + noise) >= 1e-2


def test_leave_one_out_agrees_with_leaving_one_out():
    x = points(15)
    y = wave(x) + 0.3 * points(15, 1, seed=3)

    def error(smoothing):
        kept = [np.arange(15) != i for i in range(15)]
        values = [SmoothingSpline.fit(x[k], y[k], smoothing)(x[~k]) for k in kept]
        return ((np.concatenate(values) - y) ** 2).mean()

    # The two differ a little, because the unit of the smoothing depends on the points.
    candidates = (0.0, 1e-6, 1e-4, 1e-2, 1.0)
    assert error(best_smoothing(x, y)) <= 1.05 * min(map(error, candidates))


def test_rows_with_equal_points_are_averaged():
    x = points(30)
    spline = SmoothingSpline.fit(np.tile(x, (2, 1)), np.concatenate([wave(x), wave(x) + 2]), 0.0)
    assert_allclose(spline(x), wave(x) + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_points_have_a_constant_tail(n):
    x = points(n, 4)
    assert best_smoothing(x, wave(x)) >= 0
    spline = SmoothingSpline.fit(x, wave(x), 0.0)
    assert len(spline.tail) == 1
    assert_allclose(spline(x), wave(x), rtol=1e-6, atol=1e-6)


def test_points_in_a_plane_are_interpolated():
    x = points(40)
    flat = np.column_stack([x, x.sum(axis=1), np.ones(40)])
    spline = SmoothingSpline.fit(flat, wave(x), 0.0)
    assert_allclose(spline(flat), wave(x), rtol=1e-5, atol=1e-5)


def test_many_points_are_represented_by_a_sample():
    x = points(MAX_CENTRES + 300)
    spline = SmoothingSpline.fit(x, wave(x), 0.0)
    assert len(spline.centres) == MAX_CENTRES
    assert abs(spline(x) - wave(x)).max() < 0.05
