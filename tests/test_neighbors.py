"""The nearest points against all sorted distances: ties, copies, offsets, groups, both engines."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from geoq.neighbors import MAX_TREE_DIMS, Neighbors

# The first three are searched by a tree.
DIMS = [1, 3, MAX_TREE_DIMS, MAX_TREE_DIMS + 1, 17, 40]
every_dimension = pytest.mark.parametrize("n_dims", DIMS)
both_engines = pytest.mark.parametrize("n_dims", [3, 12])
laws = settings(max_examples=40, deadline=None)


def by_hand(points, queries, k, excluded=None):
    """Compute all distances in double precision and sort them by (distance, index)."""
    points = points.astype(float)
    distance = np.stack([np.sqrt(((points - q) ** 2).sum(axis=1)) for q in queries.astype(float)])
    if excluded is not None:
        distance = np.where(excluded, math.inf, distance)
    index = np.argsort(distance, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distance, index, axis=1), index


def agree(found, expected):
    assert_array_equal(found[1], expected[1])
    assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-12)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@st.composite
def clouds(draw):
    """Points and queries with ties, copies and offsets."""
    n_points = draw(st.integers(1, 40) | st.sampled_from([300, 1000]))
    n_dims, seed = draw(st.sampled_from(DIMS)), draw(st.integers(0, 999))
    kind = draw(st.sampled_from(["ties", "copies", "equal", "generic"]))
    points, queries = normal(n_points, n_dims, seed=seed), normal(20, n_dims, seed=1000)
    if kind == "ties":
        points, queries = (3 * points).round(), (3 * queries).round()
    elif kind == "copies":
        few = max(1, n_points // 10)
        points = points[np.random.default_rng(seed).integers(few, size=n_points)]
        queries[: min(10, n_points)] = points[:10]
    elif kind == "equal":
        points = np.repeat(points[:1], n_points, axis=0)
    offset, dtype = draw(st.sampled_from([0, 1e3])), draw(st.sampled_from(["f4", "f8"]))
    return (points + offset).astype(dtype), (queries + offset).astype(dtype)


@laws
@given(cloud=clouds(), k=st.sampled_from([1, 2, 5, 20, 1000]))
def test_neighbours_are_the_first_of_all_sorted_distances(cloud, k):
    k = min(k, len(cloud[0]))
    agree(Neighbors(cloud[0]).nearest(cloud[1], k), by_hand(*cloud, k))


@laws
@given(cloud=clouds(), k=st.sampled_from([1, 2, 5]), reach=st.sampled_from([None, 0, 1, 7]))
def test_points_within_reach_and_the_point_itself_are_no_others(cloud, k, reach):
    points = np.repeat(cloud[0][:150], 2, axis=0)
    position = np.arange(len(points))
    group = None if reach is None else np.random.default_rng(5).integers(20, size=len(points))
    if group is not None:
        position = group
    near = abs(position[:, None] - position) <= (reach or 0)
    k = min(k, int((~near).sum(axis=1).min()))
    if k:
        found = Neighbors(points).nearest_other(k, group, reach or 0)
        assert_allclose(found, by_hand(points, points, k, near)[0], rtol=1e-6, atol=1e-12)


def test_points_at_equal_distance_and_too_few_others():
    """Corners of a cube in ten dimensions: 252 of 1024 are at the same distance from one."""
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * 10, indexing="ij"), -1).reshape(-1, 10)
    agree(Neighbors(corners).nearest(corners[::90], 500), by_hand(corners, corners[::90], 500))
    with pytest.raises(ValueError, match="k=2, but a point has fewer independent others"):
        Neighbors(normal(4, 2)).nearest_other(2, np.array([0, 1, 2, 9]), reach=3)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("offset", [0, 1000])
def test_thousands_of_dimensions_agree(dtype, offset):
    points = (normal(150, 4000) + offset).astype(dtype)
    points[100:] = points[:50]
    queries = (normal(20, 4000, seed=1) + offset).astype(dtype)
    queries[:5] = points[:5]
    agree(Neighbors(points).nearest(queries, 20), by_hand(points, queries, 20))


@pytest.mark.parametrize("factor", [1e-100, 1e-15, 1e15, 1e100])
@both_engines
def test_multiplying_all_points_does_not_change_the_neighbours(n_dims, factor):
    points, queries = normal(1000, n_dims), normal(20, n_dims, seed=1)
    queries[:5] = points[:5] * 1.01
    distance, index = Neighbors(factor * points).nearest(factor * queries, 5)
    agree((distance / factor, index), by_hand(points, queries, 5))


@every_dimension
def test_the_answer_for_a_query_does_not_depend_on_the_others(n_dims):
    cloud, queries = Neighbors(normal(1000, n_dims)), normal(30, n_dims, seed=1)
    distance, index = cloud.nearest(queries, 4)
    for i in range(30):
        alone = cloud.nearest(queries[i : i + 1], 4)
        assert_array_equal(alone[1], index[i : i + 1])
        assert_allclose(alone[0], distance[i : i + 1], rtol=1e-12)


@both_engines
def test_copies_are_not_all_proposed(n_dims, monkeypatch):
    """With thousands of rows at few places, the memory would grow with the square of the rows."""
    proposed, sizes = Neighbors._proposed, []
    monkeypatch.setattr(
        Neighbors, "_proposed", lambda self, q, m: sizes.append(m) or proposed(self, q, m)
    )
    points = normal(30, n_dims)[np.random.default_rng(0).integers(30, size=3000)]
    queries = np.concatenate([points[:10], normal(10, n_dims, seed=1)])
    agree(Neighbors(points).nearest(queries, 20), by_hand(points, queries, 20))
    assert max(sizes) <= 30


@pytest.mark.parametrize("k", [0, 4])
def test_more_neighbours_than_points_raise(k):
    with pytest.raises(ValueError, match=f"k={k}, but there are 3 points; choose k"):
        Neighbors(normal(3, 2)).nearest(normal(1, 2), k)
