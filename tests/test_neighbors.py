import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from geoq.neighbors import Neighbors
from geoq.neighbors.blocks import Block
from geoq.neighbors.distances import (
    Centred,
    distances_by_differences,
    distances_to_all,
)

DIMS = [1, 2, 3, 8, 9, 17, 40]
every_dimension = pytest.mark.parametrize("n_dims", DIMS)
laws = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def by_hand(points, queries, k, excluded=None):
    """Compute all distances in float64 and sort them by (distance, index)."""
    parts = queries.double().split(max(1, 2**20 // points.numel()))
    points = points.double()
    distance = [(q[:, None] - points).square().sum(dim=2).sqrt() for q in parts]
    distance = torch.cat(distance)
    if excluded is not None:
        distance = distance.masked_fill(excluded, math.inf)
    distance, index = distance.sort(dim=1, stable=True)
    return distance[:, :k].to(queries.dtype), index[:, :k]


def agree(found, expected):
    assert_close(found[1], expected[1], rtol=0, atol=0)
    assert_close(found[0], expected[0])


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def whole(high, *shape, seed=0):
    """Integers, whose distances are often equal and always exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator).double()


@st.composite
def clouds(draw):
    """Points and queries with ties, copies and offsets."""
    n_points = draw(st.integers(1, 40) | st.sampled_from([300, 1000]))
    n_dims, seed = draw(st.sampled_from(DIMS)), draw(st.integers(0, 999))
    kind = draw(st.sampled_from(["ties", "copies", "equal", "generic"]))
    points, queries = normal(n_points, n_dims, seed=seed), normal(20, n_dims, seed=-1)
    if kind == "ties":
        points, queries = (3 * points).round(), (3 * queries).round()
    elif kind == "copies":
        points = points[whole(max(1, n_points // 10), n_points, seed=seed).long()]
        queries[: min(10, n_points)] = points[:10]
    elif kind == "equal":
        points = points[:1].repeat(n_points, 1)
    offset = draw(st.sampled_from([0, 1e4, 1e6]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return (points + offset).to(dtype), (queries + offset).to(dtype)


counts = st.sampled_from([1, 2, 5, 20, 1000])


@laws
@given(cloud=clouds(), k=counts)
def test_neighbours_are_the_first_of_all_sorted_distances(cloud, k, device):
    points, queries = (part.to(device) for part in cloud)
    k = min(k, len(points))
    agree(Neighbors(points).nearest(queries, k), by_hand(points, queries, k))


@laws
@given(cloud=clouds(), k=counts)
def test_no_point_is_its_own_other_neighbour(cloud, k, device):
    points = cloud[0].repeat(1 + (len(cloud[0]) == 1), 1).to(device)
    k = min(k, len(points) - 1)
    itself = torch.eye(len(points), dtype=torch.bool, device=device)
    agree(Neighbors(points).nearest_other(k), by_hand(points, points, k, itself))


@laws
@given(
    cloud=clouds(),
    k=counts,
    n_groups=st.sampled_from([2, 3, 100]),
    reach=st.sampled_from([0, 1, 2.5, 7]),
    fraction=st.booleans(),
)
def test_points_within_reach_in_position_are_excluded(
    cloud, k, n_groups, reach, fraction, device
):
    points = cloud[0].to(device)
    position = whole(n_groups, len(points), seed=5).long().to(device)
    if fraction:
        position, reach = position.double() / 10, reach / 10
    near = (position[:, None] - position).abs() <= reach
    k = min(k, int((~near).sum(dim=1).min()))
    if k:
        found = Neighbors(points).nearest_other(k, position=position, reach=reach)
        agree(found, by_hand(points, points, k, near))


@every_dimension
def test_ties_go_to_the_lower_index(n_dims, device):
    """Each point occurs twice; the copy with the lower index is the first neighbour."""
    points = normal(50, n_dims).repeat(2, 1).to(device)
    _, index = Neighbors(points).nearest(points[:50], 2)
    first = torch.arange(50, device=device)
    assert_close(index, torch.stack([first, first + 50], dim=1))


@every_dimension
def test_a_copy_is_a_neighbour_at_distance_zero(n_dims, device):
    points = normal(50, n_dims).repeat(2, 1).to(device)
    distance, index = Neighbors(points).nearest_other(1)
    assert_close(distance, torch.zeros_like(distance))
    assert_close(index[:, 0], torch.arange(100, device=device).roll(50))


@pytest.mark.parametrize("n_dims", [1, 3, 12])
def test_neighbours_among_equal_points_are_in_index_order(n_dims, device):
    points = torch.full((30_000, n_dims), 0.3, device=device)
    distance, index = Neighbors(points).nearest_other(3)
    assert_close(distance, torch.zeros_like(distance))
    assert_close(index[5:], torch.arange(3, device=device).expand(29_995, 3))
    assert index[1].tolist() == [0, 2, 3]


@pytest.mark.parametrize("n_dims", [1, 3, 12])
def test_points_with_three_copies_agree(n_dims, device):
    points = normal(300, n_dims).repeat(3, 1).to(device)
    queries = normal(30, n_dims, seed=1).to(device)
    agree(Neighbors(points).nearest(queries, 8), by_hand(points, queries, 8))


@pytest.mark.parametrize("n_dims", [1, 3, 12])
def test_equal_points_of_other_groups_are_found(n_dims, device):
    points = torch.zeros(3000, n_dims, device=device)
    group = torch.arange(3000, device=device) % 2
    _, index = Neighbors(points).nearest_other(2, position=group)
    assert_close(index[::2], torch.tensor([1, 3], device=device).expand(1500, 2))
    assert_close(index[1::2], torch.tensor([0, 2], device=device).expand(1500, 2))


@pytest.mark.parametrize("n_dims", [3, 12])
def test_a_point_surrounded_by_ties_takes_the_lowest_indices(n_dims, device):
    """All other points at the same distance, more than any engine proposes."""
    points = torch.eye(n_dims).repeat(400, 1).to(device)
    points = points * (1 - 2 * (torch.arange(len(points), device=device) % 2))[:, None]
    centre = torch.zeros(1, n_dims, device=device)
    _, index = Neighbors(points).nearest(centre, 5)
    assert index[0].tolist() == [0, 1, 2, 3, 4]


def test_distinct_points_at_equal_distance_are_all_found(device):
    """Corners of a cube in twelve dimensions: 924 of 4096 are at the same distance from one."""
    corners = torch.cartesian_prod(*[torch.arange(2.0)] * 12).to(device)
    agree(
        Neighbors(corners).nearest(corners[::500], 2000),
        by_hand(corners, corners[::500], 2000),
    )


@every_dimension
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_larger_cloud_agrees(n_dims, dtype, device):
    points = normal(40_000, n_dims, dtype=dtype).to(device)
    queries = normal(40, n_dims, seed=1, dtype=dtype).to(device)
    agree(Neighbors(points).nearest(queries, 7), by_hand(points, queries, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0, 1000])
def test_thousands_of_dimensions_agree(dtype, offset, device):
    points = (normal(150, 5000) + offset).to(device, dtype)
    points[100:] = points[:50]
    queries = (normal(20, 5000, seed=1) + offset).to(device, dtype)
    queries[:5] = points[:5]
    agree(Neighbors(points).nearest(queries, 20), by_hand(points, queries, 20))


@pytest.mark.parametrize("factor", [1e-30, 1e-15, 1e15, 1e30])
@every_dimension
def test_multiplying_all_points_does_not_change_the_neighbours(n_dims, factor, device):
    points = (normal(3000, n_dims) * factor).float().to(device)
    queries = points[:20] * 1.01
    agree(Neighbors(points).nearest(queries, 5), by_hand(points, queries, 5))


@pytest.mark.parametrize("factor", [1e-100, 1e100])
def test_float64_may_exceed_the_range_of_float32(factor, device):
    points, queries = normal(3000, 12).to(device), normal(20, 12, seed=1).to(device)
    distance, index = Neighbors(factor * points).nearest(factor * queries, 5)
    agree((distance / factor, index), by_hand(points, queries, 5))


def test_outliers_do_not_affect_other_points(device):
    points = normal(3000, 12).to(device)
    points[::100] *= 1e7
    queries = torch.cat([points[:30], normal(30, 12, seed=1).to(device)])
    agree(Neighbors(points).nearest(queries, 5), by_hand(points, queries, 5))


@pytest.mark.parametrize("n_dims", [*DIMS, 3000])
def test_the_answer_for_a_query_does_not_depend_on_the_others(n_dims, device):
    """The answers are equal bit for bit, for one query at a time and for all at once."""
    n_points = 3000 if n_dims < 1000 else 300
    points, queries = normal(n_points, n_dims).to(device), normal(30, n_dims, seed=1)
    cloud, queries = Neighbors(points), queries.to(device)
    distance, index = cloud.nearest(queries, 4)
    for i in range(30):
        alone = cloud.nearest(queries[i : i + 1], 4)
        assert_close(alone, (distance[i : i + 1], index[i : i + 1]), rtol=0, atol=0)


@every_dimension
def test_k_may_be_the_number_of_points(n_dims, device):
    points = (4 * normal(60, n_dims)).round().to(device)
    agree(Neighbors(points).nearest(points, 60), by_hand(points, points, 60))


@every_dimension
def test_a_single_point_is_found(n_dims, device):
    distance, index = Neighbors(torch.ones(1, n_dims, device=device)).nearest(
        torch.zeros(2, n_dims, device=device), 1
    )
    assert_close(distance, torch.full((2, 1), math.sqrt(n_dims), device=device))
    assert index.tolist() == [[0], [0]]


def test_an_empty_set_of_queries_has_an_empty_answer(device):
    distance, index = Neighbors(normal(10, 3).to(device)).nearest(
        torch.empty(0, 3, dtype=torch.float64, device=device), 2
    )
    assert distance.shape == index.shape == (0, 2)


@pytest.mark.parametrize("n_dims", [1, 3, 12])
def test_a_large_reach_excludes_most_of_a_trajectory(n_dims, device):
    points = normal(900, n_dims).cumsum(dim=0).to(device)
    time = torch.arange(900, device=device)
    near = (time[:, None] - time).abs() <= 400
    found = Neighbors(points).nearest_other(10, position=time, reach=400)
    agree(found, by_hand(points, points, 10, near))


def test_large_integer_positions_are_compared_exactly(device):
    """In float64 these times, in nanoseconds, would be equal."""
    points = normal(2, 3).to(device)
    time = torch.tensor([1_700_000_000_000_000_001, 1_700_000_000_000_000_002])
    _, index = Neighbors(points).nearest_other(1, position=time.to(device))
    assert index.tolist() == [[1], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_have_the_precision_of_the_points(dtype, device):
    points = normal(10, 3, dtype=dtype).to(device)
    distance, index = Neighbors(points).nearest(points, 2)
    assert (distance.dtype, index.dtype) == (dtype, torch.int64)


def test_a_reduced_matmul_precision_is_not_used_and_is_restored(device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        points = normal(3000, 40, dtype=torch.float32).to(device)
        queries = normal(30, 40, seed=1, dtype=torch.float32).to(device)
        agree(Neighbors(points).nearest(queries, 5), by_hand(points, queries, 5))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("k", [0, 4])
def test_more_neighbours_than_points_are_refused(k):
    with pytest.raises(ValueError, match=f"k={k}, but there are 3 points; choose k"):
        Neighbors(normal(3, 2)).nearest(normal(1, 2), k)


@pytest.mark.parametrize("k", [0, 3])
def test_more_neighbours_than_other_points_are_refused(k):
    with pytest.raises(ValueError, match=f"k={k}, but each of the 3 points has 2"):
        Neighbors(normal(3, 2)).nearest_other(k)


def test_too_few_points_beyond_reach_are_refused():
    position = torch.tensor([0, 1, 2, 9])
    with pytest.raises(
        ValueError, match="k=2, but only 1 points differ from point 0 by"
    ):
        Neighbors(normal(4, 2)).nearest_other(2, position=position, reach=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_to_all_points_agree_with_differences(dtype):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(40, 3000, generator=generator, dtype=dtype) + 5
    queries = torch.cat([points[:3], points[3:6] + 1e-4, points[6:20] * 1.1])
    block = Block(queries, slice(2, len(queries)), None)
    everything = torch.arange(len(points)).expand(block.size, -1)
    expected = distances_by_differences(block, points, everything)
    found = distances_to_all(block, Centred(points))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
