"""The default safe region: one input out of range, ridges, holes, constants, categories, repeats."""

from itertools import combinations

import numpy as np
import pytest

from geoq import GeoQ, RandomFolds, SupportRegion
from geoq.neighbors.planes import Planes
from geoq.regions.safe_region import FittedDistanceRegion

RNG = np.random.default_rng(0)


def smooth(x):
    return np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * x[:, -1]


def assessed(x, queries, surrogate=smooth, **settings):
    geoq = GeoQ(lambda x: surrogate(x) + 0.05 * np.sin(9 * x[:, 0]), None, **settings)
    return geoq.fit(x, surrogate(x)).assess(queries)


def box(n=300, d=6, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, d))


def test_most_of_the_interior_is_safe():
    assert assessed(box(), box(2000, seed=1)).safe.mean() > 0.93


@pytest.mark.parametrize("which", range(6))
def test_one_input_out_of_its_range_is_not_safe(which):
    queries = box(200, seed=1)
    queries[:, which] = 1.5
    assert not assessed(box(), queries).safe.any()


def test_far_queries_are_not_safe():
    assert not assessed(box(), 3 * np.sign(box(200, seed=1))).safe.any()


def test_off_a_ridge_of_correlated_inputs_is_not_safe():
    first = RNG.uniform(-1, 1, size=(300, 1))
    x = np.concatenate(
        [first, first + 0.02 * RNG.normal(size=(300, 1)), box(300, 2)], 1
    )
    queries = box(200, 4, seed=1)
    queries[:, 1] = -queries[:, 0]
    queries = queries[abs(queries[:, 0]) > 0.3]
    assert assessed(x, queries).safe.mean() < 0.05


def test_a_hole_in_two_inputs_is_not_safe():
    x = box(1500, 2)
    x = x[np.hypot(*x.T) > 0.5]
    queries = box(500, 2, seed=1)
    queries = queries[np.hypot(*queries.T) < 0.25]
    assert assessed(x, queries).safe.mean() < 0.1


def test_a_gap_between_clusters_is_not_safe():
    x = box(300, 3)
    x[:, 0] = np.sign(x[:, 0]) + 0.1 * x[:, 0]
    queries = box(200, 3, seed=1)
    queries[:, 0] *= 0.3
    assert assessed(x, queries).safe.mean() < 0.05


def test_a_new_code_of_a_category_is_not_safe():
    x = box(300, 3)
    x[:, 1] = RNG.integers(0, 3, size=300)
    queries = box(100, 3, seed=1)
    queries[:, 1] = 3
    assert not assessed(x, queries).safe.any()


def test_a_changed_constant_is_not_safe_and_is_named():
    x = box(300, 3)
    x[:, 2] = 1.5
    queries = box(100, 3, seed=1)
    queries[:, 2] = 1.5
    same = assessed(x, queries)
    queries[:, 2] = 1.8
    changed = assessed(x, queries)
    assert same.safe.mean() > 0.85
    assert not changed.safe.any()
    assert "input 2 is 1.8, but it is 1.5 in all the data" in changed.reason(0)


def test_logarithms_are_compared_in_decades():
    x = box(300, 2)
    x[:, 1] = 10 ** (4 * x[:, 1])

    def surrogate(x):
        return np.log10(x[:, 1]) + x[:, 0]

    queries = box(100, 2, seed=1)
    queries[:, 1] = 1e-7
    answer = assessed(x, queries, surrogate)
    assert not answer.safe.any()
    assert "decades below its range in the data" in answer.reason(0)


def test_repeated_rows_do_not_make_the_interior_unsafe():
    x = np.repeat(box(100, 3), 5, axis=0)
    assert assessed(x, box(500, 3, seed=1)).safe.mean() > 0.85


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x * [1, 1, 1, 1, 1, 0] + [0, 0, 0, 0, 0, 1.5], "input 5 is 1.5"),
        (lambda x: 3 * np.sign(x), "above its range|below its range"),
        (lambda x: 0 * x, "within the region of the held-out points"),
    ],
    ids=["one input", "far", "centre"],
)
def test_the_reason_names_the_cause(spoil, words):
    reason = assessed(box(), spoil(box(5, seed=1))).reason(0)
    assert any(word in reason for word in words.split("|"))


def test_the_reason_uses_the_names_of_the_inputs():
    queries = box(5, seed=1)
    queries[:, 0] = 2.0
    names = ["pressure", "b", "c", "d", "e", "f"]
    assert "input pressure is 2" in assessed(box(), queries).reason(0, names=names)


def test_a_wrong_number_of_names_is_refused():
    with pytest.raises(ValueError, match="names has 1 entries, but there are 6 inputs"):
        assessed(box(), box(5, seed=1)).reason(0, names=["pressure"])


def test_the_support_score_is_a_ratio_to_the_threshold():
    answer = assessed(box(), box(500, seed=1) * 1.3)
    assert answer.threshold == 1.0
    np.testing.assert_array_equal(answer.safe, answer.support_score <= 1 + 1e-9)


def test_a_smaller_quantile_is_stricter():
    queries = box(2000, seed=1)
    strict, loose = (
        assessed(box(), queries, safe_region=SupportRegion(quantile)).safe.mean()
        for quantile in (0.5, 0.95)
    )
    assert strict < loose


def test_a_smaller_weight_accepts_inputs_without_influence():
    queries = box(500, seed=1)
    queries[:, 3] = 1.2
    strict, loose = (
        assessed(box(), queries, safe_region=SupportRegion(min_weight=weight))
        for weight in (1.0, 0.01)
    )
    assert strict.safe.mean() < 0.05 < loose.safe.mean()
    safe = int(np.flatnonzero(loose.safe)[0])
    assert "out of its range, which is less than its influence" in loose.reason(safe)


def test_many_inputs_without_a_grid_have_the_distance_region():
    x = RNG.normal(size=(60, 81))
    geoq = GeoQ(lambda x: 0.9 * x.mean(axis=1), None, folds=RandomFolds(4))
    geoq.fit(x, x.mean(axis=1))
    assert isinstance(geoq.safe_region_, FittedDistanceRegion)


def test_few_queries_and_many_have_the_same_scores():
    x, queries = box(300, 4), 1.2 * box(500, 4, seed=1)
    geoq = GeoQ(lambda x: smooth(x) + 0.05, None).fit(x, smooth(x))
    together = geoq.assess(queries).support_score
    alone = [geoq.assess(q[None]).support_score[0] for q in queries[:20]]
    np.testing.assert_allclose(alone, together[:20], rtol=1e-9)


@pytest.mark.parametrize("n", [3, 40, 600])
def test_the_largest_distance_in_a_plane_does_not_depend_on_the_bounds(n):
    rng = np.random.default_rng(n)
    points = np.round(rng.normal(size=(n, 5)) ** 3, 1)
    points[:, 4] = 1.0  # a constant input
    queries = 2 * np.round(rng.normal(size=(500, 5)), 2)
    planes = Planes(points, list(combinations(range(5), 2)))
    expected = planes.distances(queries).max(axis=1)
    assert (planes.largest(queries[:1]) == expected[:1]).all()  # all distances
    assert (planes.largest(queries) == expected).all()  # bounded by the grids
    assert (planes.largest(queries[7:8]) == expected[7:8]).all()
