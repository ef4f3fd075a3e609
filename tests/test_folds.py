import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import GroupKFold, KFold

from geoq import (
    ClusterFolds,
    CombinedFolds,
    GroupFolds,
    NestedFolds,
    RandomFolds,
    TemporalFolds,
    default_folds,
)
from geoq.core.plan import FoldPlan, draw_folds

PARTITIONS = [RandomFolds(4), ClusterFolds(4), TemporalFolds(4), GroupFolds(4), GroupFolds()]
SCHEMES = [
    *PARTITIONS,
    TemporalFolds(4, gap=2),
    NestedFolds(6),
    CombinedFolds(RandomFolds(3), NestedFolds(2)),
]


def data(seed, n=24):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, 2)), np.arange(n) % 6


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=10)
def test_no_fold_trains_on_what_it_holds_out(scheme, seed):
    points, groups = data(seed)
    for train, held_out in scheme.split(points, None, groups):
        assert not np.intersect1d(train, held_out).size
        assert len(held_out)


@pytest.mark.parametrize("scheme", PARTITIONS, ids=repr)
@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=10)
def test_a_partition_holds_each_point_out_once(scheme, seed):
    points, groups = data(seed)
    held_out = np.concatenate([h for _, h in scheme.split(points, None, groups)])
    assert sorted(held_out) == list(range(len(points)))


def test_a_splitter_of_scikit_learn_serves_inside_combined_folds():
    points, _ = data(0)
    splits = list(CombinedFolds(KFold(4), NestedFolds(2)).split(points))
    assert [len(held_out) for _, held_out in splits] == [6, 6, 6, 6, 8, 16]


def test_schemes_by_hand():
    points = np.concatenate([np.full((3, 1), 0.0), np.full((2, 1), 50.0)])
    points += 0.01 * np.arange(5)[:, None]
    held_out = {tuple(h) for _, h in ClusterFolds(2).split(points)}
    assert held_out == {(0, 1, 2), (3, 4)}
    splits = list(TemporalFolds(3, gap=1).split(np.zeros((9, 1))))
    train, held_out = splits[1]
    assert held_out.tolist() == [3, 4, 5]
    assert train.tolist() == [0, 1, 7, 8]
    points = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    splits = [(t.tolist(), h.tolist()) for t, h in NestedFolds(4).split(points)]
    assert splits[0] == ([0, 1, 2, 3], [4])
    assert splits[-1] == ([2], [0, 1, 3, 4])
    for (inner, _), (outer, _) in zip(splits[1:], splits, strict=False):
        assert set(inner) < set(outer)
    groups = np.repeat(["a", "b", "c", "d"], [5, 1, 2, 2])
    splits = list(GroupFolds(2).split(np.zeros((10, 1)), None, groups))
    assert [len(h) for _, h in splits] == [5, 5]
    for train, held_out in splits:
        assert not set(groups[train]) & set(groups[held_out])


def test_gaps_and_groups_state_who_depends_on_whom():
    time, gap = TemporalFolds(3, gap=2).dependence(4)
    assert (time.tolist(), gap) == ([0, 1, 2, 3], 2)
    group, reach = GroupFolds().dependence(3, np.array(["b", "a", "b"]))
    assert (group.tolist(), reach) == ([1, 0, 1], 0)
    assert TemporalFolds(3).dependence(4) is None
    combined = CombinedFolds(RandomFolds(3), TemporalFolds(3, gap=2))
    assert combined.dependence(4)[1] == 2
    with pytest.raises(ValueError, match="2 schemes that define different dependences"):
        CombinedFolds(TemporalFolds(3, gap=1), TemporalFolds(3, gap=2)).dependence(4)


@pytest.mark.parametrize(("scheme", "message"), [
    (RandomFolds(1), r"RandomFolds\(n_folds=1\), but there are 24 distinct points"),
    (RandomFolds(25), r"between 2 and 24, or one family alone, folds=RandomFolds\(5\)"),
    (ClusterFolds(25), r"ClusterFolds\(n_folds=25\), but there are 24 points"),
    (TemporalFolds(30), r"TemporalFolds\(n_folds=30\)"),
    (TemporalFolds(3, gap=-1), r"gap=-1.*must be an integer >= 0"),
    (NestedFolds(24), r"there are 23 proper nested subsets"),
    (GroupFolds(7), r"GroupFolds\(n_folds=7\), but there are 6 groups"),
], ids=repr)  # fmt: skip
def test_impossible_fold_counts_raise(scheme, message):
    points, groups = data(0)
    with pytest.raises(ValueError, match=message):
        list(scheme.split(points, None, groups))


def test_without_equal_rows_random_folds_are_a_permutation_of_the_rows():
    points = np.random.default_rng(0).normal(size=(24, 2))
    order = np.random.default_rng(7).permutation(24)
    expected = [np.sort(part) for part in np.array_split(order, 4)]
    folds = RandomFolds(4, random_state=7).split(points)
    for (_, held_out), rows in zip(folds, expected, strict=True):
        np.testing.assert_array_equal(held_out, rows)


def test_plans_count_independent_points_and_remember_families_of_tuples():
    points, groups = np.arange(12.0)[:, None], np.repeat([0, 1, 2], 4)
    for scheme, n_groups in ((RandomFolds(2), 12), (GroupFolds(), 3), (TemporalFolds(2, gap=1), 6)):
        assert FoldPlan.draw(scheme, points, groups).n_groups == n_groups
    splits = ((np.arange(3), np.array([3, 4])), (np.array([3, 4]), np.arange(3)))
    plan = FoldPlan(splits, (0, 0), n_points=5, position=np.arange(5), reach=1)
    assert plan.n_independent == 2
    points = np.arange(6.0)[:, None]
    plan = FoldPlan.draw(CombinedFolds(TemporalFolds(2), NestedFolds(2)), points, None)
    assert plan.family == (0, 0, 1, 1)
    assert plan.point.tolist() == [*range(6), *plan.splits[2][1], *plan.splits[3][1]]
    assert plan.per_tuple(plan.family).tolist() == [0] * 6 + [1] * 6


def test_equal_points_cannot_be_clustered():
    with pytest.raises(ValueError, match="there are 1 distinct points to divide"):
        list(ClusterFolds(2).split(np.zeros((5, 1))))


class Given:
    """A scheme that yields the splits it was given."""

    def __init__(self, splits):
        self.splits = splits

    def __repr__(self):
        return "Given"

    def split(self, points, y=None, groups=None):
        return self.splits


@pytest.mark.parametrize(("splits", "message"), [
    ([], "yielded no fold"),
    ([(np.arange(3), np.array([], int))], "fold 1 of 1 has no held-out points"),
    ([(np.array([], int), np.arange(3))], "fold 1 of 1 has no training points"),
    ([(np.arange(3), np.array([2, 3]))], "fold 1 of 1 trains on points that it holds out"),
    ([(np.arange(3), np.array([9]))], "contains row 9, but there are 5 rows"),
])  # fmt: skip
def test_folds_that_keep_nothing_apart_raise(splits, message):
    with pytest.raises(ValueError, match=message):
        FoldPlan.draw(Given(splits), np.zeros((5, 1)), None)


LABELS = np.arange(120) // 4


@pytest.mark.parametrize("folds", [
    default_folds(),
    default_folds(GroupFolds(5)),
    RandomFolds(4),
    NestedFolds(4),
    CombinedFolds(RandomFolds(3), GroupFolds(3)),
    GroupKFold(5),
    TemporalFolds(5),
], ids=repr)  # fmt: skip
def test_groups_are_held_out_whole_in_all_families(folds):
    points = np.random.default_rng(0).uniform(-1, 1, (120, 2))
    order = np.random.default_rng(1).permutation(30).repeat(4)
    labels = LABELS if isinstance(folds, TemporalFolds) else order
    plan = draw_folds(folds, points, labels)
    for train, held_out in plan.splits:
        assert len(train)
        assert len(held_out)
        assert not set(labels[train]) & set(labels[held_out])
    assert plan.n_groups == 30
    assert len(set(plan.family)) == len(getattr(folds, "schemes", [folds]))


def test_copies_at_the_centre_count_once_in_nested_folds():
    """A central composite design with six runs at its centre; without them the subsets are the same."""
    runs = np.concatenate(
        [np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]]), 1.5 * np.eye(2), -1.5 * np.eye(2)]
    )
    repeated = np.concatenate([runs, np.zeros((6, 2))])
    held_out = [h.tolist() for _, h in NestedFolds(5).split(repeated)]
    once = [h.tolist() for _, h in NestedFolds(5).split(np.concatenate([runs, np.zeros((1, 2))]))]
    assert held_out == once
    assert [len(h) for h in held_out] == [2, 3, 5, 6, 8]
    FoldPlan.draw(default_folds(), repeated, None)  # raises for a fold without training points


@pytest.mark.parametrize("folds", [RandomFolds(5), ClusterFolds(5), NestedFolds(5), default_folds()], ids=repr)  # fmt: skip
def test_all_default_folds_hold_out_rows_with_equal_inputs_together(folds):
    places = np.repeat(np.linspace(-1, 1, 30), 4)[np.random.default_rng(0).permutation(120)]
    for train, held_out in folds.split(places[:, None]):
        assert len(train)
        assert len(held_out)
        assert not np.intersect1d(places[train], places[held_out]).size


def test_the_identity_of_a_plan_changes_with_its_rows():
    points = np.random.default_rng(0).normal(size=(24, 2))

    def identity(*folds):
        return FoldPlan.draw(*folds, points, None).identity

    assert identity(RandomFolds(3)) == identity(RandomFolds(3))
    one, other = ([(np.arange(12), np.arange(12, n))] for n in (23, 24))
    assert identity(Given(one)) != identity(Given(other))
    assert identity(RandomFolds(3)) != identity(RandomFolds(3, random_state=1))
