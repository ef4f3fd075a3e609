import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from geoq.core.geometry import Features, Geometry, Space, anchor_mean, displacement

seeds = st.integers(0, 2**31)


def cloud(seed, n_points=30, n_queries=7, shape=(3,)):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n_points, *shape)), rng.normal(size=(n_queries, *shape))


def space(points):
    return Space(points, points, points)


def relate(points, queries, n_anchors=3, n_support=5):
    """The relation, and the displacement."""
    relation = Geometry(space(points), n_anchors, n_support).relate(space(queries))
    return relation, displacement(queries, relation.anchors, points)


@given(seeds, st.floats(-100, 100))
@settings(deadline=None)
def test_features_ignore_translation_and_the_order_of_the_points(seed, shift):
    points, queries = cloud(seed)
    order = np.random.default_rng(seed).permutation(len(points))
    here, there = relate(points, queries), relate(points[order] + shift, queries + shift)
    assert_allclose(here[1], there[1], rtol=1e-7, atol=1e-9)
    for part in ("support_distance", "side", "nearest", "anchor_distance"):
        assert_allclose(getattr(here[0], part), getattr(there[0], part), rtol=1e-7, atol=1e-9)
    assert_array_equal(here[0].anchors, order[there[0].anchors])


def test_anchors_are_near_in_z_and_support_in_normalised_space_and_a_point_is_its_own_anchor():
    points, _ = cloud(0)
    relation, moved = relate(points, points, n_anchors=1, n_support=1)
    assert_array_equal(relation.anchors[:, 0], np.arange(len(points)))
    assert not moved.any()
    assert not relation.support_distance.any()
    # Point 0 is the nearest in z, point 1 in nu.
    z, nu = np.array([[0.0], [9.0]]), np.array([[5.0], [1.0]])
    query = Space(np.array([[1.0]]), np.array([[0.0]]), np.array([[0.0]]))
    relation = Geometry(Space(z, nu, nu), n_anchors=1, n_support=1).relate(query)
    assert relation.anchors.tolist() == [[0]]
    assert relation.near.tolist() == [[1]]
    assert relation.support_distance.tolist() == [1.0]


def test_means_sides_and_norms_by_hand():
    error, anchors = np.array([[1.0], [3.0], [8.0]]), np.array([[0, 1], [2, 1]])
    assert anchor_mean(anchors, error).tolist() == [[2.0], [5.5]]
    points = np.array([[-1.0, 0], [1, 0], [0, -1], [0, 1]])
    relation, _ = relate(points, np.array([[0.0, 0.0], [1e4, 0.0]]), n_support=4)
    assert_allclose(relation.side, [0.0, 1.0], atol=1e-3)
    moved, distance = np.array([[[2.0], [3.0]], [[0.0], [0.0]]]), np.array([6.0, 0.0])
    zeros = np.zeros((2, 1))
    psi = Features(moved, distance, zeros, zeros, zeros)
    assert psi.flat.tolist() == [[2.0, 3.0, 6.0], [0.0, 0.0, 0.0]]
    assert psi.norm.tolist() == [7.0, 0.0]
    assert psi[1:].norm.tolist() == [0.0]


def test_one_search_serves_both_where_phi_is_nu():
    """The shared search and two searches over equal clouds give the same relation."""
    points, queries = cloud(1)
    for numbers in ((3, 5), (5, 3)):
        one, _ = relate(points, queries, *numbers)
        geometry = Geometry(Space(points, points.copy(), points), *numbers)
        two = geometry.relate(Space(queries, queries.copy(), queries))
        assert geometry._anchors is not geometry._support
        for part, values in vars(one).items():
            assert_array_equal(values, getattr(two, part))


@given(seeds, st.integers(1, 5))
@settings(deadline=None)
def test_the_anchor_regularity_bound_holds_for_lipschitz_maps(seed, n_anchors):
    """eq:anchor_regularity_bound with F = sin and F-hat = 0.5 cos of a random direction: L_F = 1, L_F-hat = 0.5."""
    points, queries = cloud(seed)
    direction = points[0] / np.linalg.norm(points[0])

    def error(x):
        return abs(np.sin(x @ direction) - 0.5 * np.cos(x @ direction))

    relation, _ = relate(points, queries, n_anchors=n_anchors)
    bound = anchor_mean(relation.anchors, error(points)) + 1.5 * relation.anchor_distance.mean(1)
    assert (error(queries) <= bound + 1e-12).all()
