import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq.geometry import Embedding, GeometricFeatures, Geometry, anchor_error

seeds = st.integers(0, 2**31)


def cloud(seed, n_points=30, n_queries=7, shape=(3,)):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n_points, *shape, generator=generator, dtype=torch.float64)
    queries = torch.randn(n_queries, *shape, generator=generator, dtype=torch.float64)
    return points, queries


def relate(points, queries, n_anchors=3, n_support=5):
    geometry = Geometry(
        Embedding(points, points), n_anchors=n_anchors, n_support=n_support
    )
    return geometry.relate(Embedding(queries, queries))


@given(seeds, st.floats(-100, 100))
@settings(deadline=None)
def test_features_ignore_translation(seed, shift):
    points, queries = cloud(seed)
    here, there = relate(points, queries), relate(points + shift, queries + shift)
    assert_close(here.displacement, there.displacement)
    assert_close(here.support_distance, there.support_distance)


@given(seeds)
@settings(deadline=None)
def test_features_ignore_the_order_of_the_points(seed):
    points, queries = cloud(seed)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    here, there = relate(points, queries), relate(points[order], queries)
    assert_close(here.displacement, there.displacement)
    assert_close(here.support_distance, there.support_distance)
    assert torch.equal(here.anchors, order[there.anchors])


def test_a_point_is_its_own_anchor():
    points, _ = cloud(0)
    relation = relate(points, points, n_anchors=1, n_support=1)
    assert torch.equal(relation.anchors[:, 0], torch.arange(len(points)))
    assert not relation.displacement.any()
    assert not relation.support_distance.any()


def test_several_anchors_are_averaged():
    error = torch.tensor([[1.0], [3.0], [8.0]])
    anchors = torch.tensor([[0, 1], [2, 1]])
    assert anchor_error(anchors, error).tolist() == [[2.0], [5.5]]


def test_anchors_are_near_in_z_and_support_in_normalised_space():
    """Point 0 is the nearest in z, point 1 in nu."""
    points = Embedding(torch.tensor([[0.0], [9.0]]), torch.tensor([[5.0], [1.0]]))
    query = Embedding(torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    relation = Geometry(points, n_anchors=1, n_support=1).relate(query)
    assert relation.anchors.tolist() == [[0]]
    assert relation.support_distance.tolist() == [1.0]


def test_one_search_serves_both_where_phi_is_nu():
    """The shared search and two searches over equal clouds give the same relation."""
    points, queries = cloud(1)
    one = relate(points, queries)
    geometry = Geometry(Embedding(points, points.clone()), n_anchors=3, n_support=5)
    two = geometry.relate(Embedding(queries, queries.clone()))
    assert geometry._anchors is not geometry._support
    assert torch.equal(one.anchors, two.anchors)
    assert_close(one.support_distance, two.support_distance)


def test_field_displacements_keep_their_shape():
    points, queries = cloud(2, shape=(2, 4, 3))
    assert relate(points, queries).displacement.shape == (7, 2, 4, 3)


def test_scalar_inputs_need_no_second_dimension():
    points, queries = cloud(3, shape=())
    assert relate(points, queries).displacement.shape == (7,)


def features(displacement, support_distance):
    zeros = torch.zeros(len(displacement), 1)
    return GeometricFeatures(displacement, support_distance, zeros, zeros, zeros)


def test_the_norm_of_psi_is_that_of_the_flattened_vector():
    psi = features(
        torch.tensor([[[2.0], [3.0]], [[0.0], [0.0]]]), torch.tensor([6.0, 0.0])
    )
    assert psi.flat.tolist() == [[2.0, 3.0, 6.0], [0.0, 0.0, 0.0]]
    assert psi.norm.tolist() == [7.0, 0.0]


def test_concatenated_features_are_those_of_the_parts():
    psi = features(torch.arange(8.0).reshape(4, 2), torch.arange(4.0))
    again = GeometricFeatures.cat([psi[:1], psi[torch.tensor([1, 2, 3])]])
    assert all(torch.equal(a, b) for a, b in zip(psi.parts, again.parts, strict=True))


@given(seeds, st.integers(1, 5))
@settings(deadline=None)
def test_the_anchor_regularity_bound_holds_for_lipschitz_maps(seed, n_anchors):
    """eq:anchor_regularity_bound with F = sin and F-hat = 0.5 cos of a random direction: L_F = 1, L_F-hat = 0.5."""
    points, queries = cloud(seed)
    direction = torch.nn.functional.normalize(points[0], dim=0)

    def error(x):
        return (torch.sin(x @ direction) - 0.5 * torch.cos(x @ direction)).abs()

    relation = relate(points, queries, n_anchors=n_anchors)
    bound = anchor_error(
        relation.anchors, error(points)
    ) + 1.5 * relation.anchor_distance.mean(dim=1)
    assert (error(queries) <= bound + 1e-12).all()
