"""Folds, guarantees and acceptance for planned queries."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from geoq import CombinedFolds, GeoQ, Grid, RandomFolds, default_folds, plots
from geoq.core.plan import draw_folds
from geoq.parts import FieldBound, NoFactor
from geoq.planning import EstimatedRatio, KnownRatio, MatchedFolds, accept, conformalize
from geoq.planning.guarantee import curve_of, factors_of, selected
from geoq.planning.matched import held_out_distances
from geoq.quantiles import conformal_factor

ONES = np.ones(1)


def box(n, width=1.0, seed=0, d=2):
    return np.random.default_rng([seed, n]).uniform(-width, width, size=(n, d))


def chosen(points, queries, **settings):
    return [*MatchedFolds(**settings).split(points, queries=queries)]


# Folds


def test_the_wasserstein_distance_of_six_points_on_a_line():
    """Pairs of neighbours are held out at the distances 2 1 | 1 1 | 1 2; planned queries are 0.5, 0.5 and 3 away."""
    points, queries = np.arange(6.0)[:, None], np.array([[0.5], [4.5], [8.0]])
    pairs = [(np.setdiff1d(np.arange(6), p), np.array(p)) for p in ((0, 1), (2, 3), (4, 5))]
    assert held_out_distances(points, pairs).tolist() == [2, 1, 1, 1, 1, 2]
    compared = MatchedFolds(n_folds=3).compare(points, queries)
    # In six equal parts 0.5 0.5 0.5 0.5 3 3 against 1 1 1 1 2 2.
    assert compared["slabs across the principal axis"] == pytest.approx(4 / 6)


def test_queries_like_the_data_have_random_folds():
    points = box(400)
    folds = chosen(points, box(300, seed=1))
    for (train, held_out), (_, random) in zip(folds, RandomFolds(5).split(points), strict=True):
        np.testing.assert_array_equal(held_out, random)
        assert len(train) + len(held_out) == 400


@pytest.mark.parametrize("width", [1.3, 1.6])
def test_outside_the_data_the_folds_with_the_least_distance_are_used(width):
    points, queries = box(400), box(300, width, seed=1)
    compared = MatchedFolds().compare(points, queries)
    best = min(compared, key=compared.get)
    assert compared[best] < 0.9 * compared["random"]
    folds = chosen(points, queries)
    median = np.median(held_out_distances(points, folds))
    assert median > 1.1 * np.median(held_out_distances(points, [*RandomFolds(5).split(points)]))
    again = chosen(points, queries)
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(folds, again, strict=True))


@pytest.mark.parametrize("width", [1.0, 1.3, 2.0])
def test_groups_and_equal_rows_are_held_out_together(width):
    points, queries = box(60).repeat(4, axis=0), box(100, width, seed=1)
    labels = np.arange(240) // 8
    whole = draw_folds(MatchedFolds(4), points, labels, queries)
    for plan, of_row in ((whole, labels), (draw_folds(MatchedFolds(4), points, None, queries), np.arange(240) // 4)):  # fmt: skip
        for train, held_out in plan.splits:
            assert not set(of_row[train]) & set(of_row[held_out])
    assert whole.n_groups == 30


def test_fields_are_compared_by_random_combinations():
    points, queries = box(60, d=200), box(50, seed=1, d=200)
    near = MatchedFolds().compare(points, queries)["random"]
    # The distance of two independent rows is sqrt(2 / 3 * 200) on average.
    distance = held_out_distances(points, chosen(points, queries)).mean()
    wide = MatchedFolds().compare(points, queries + 100)["random"]
    assert near < 0.1 * distance
    assert wide == pytest.approx(100 * math.sqrt(200) - distance, rel=0.3)


def fitted_on(x, folds=None, planned=None, train=None, **settings):
    estimator = GeoQ(lambda x: x[:, 0], train, folds=folds or RandomFolds(3), **settings)
    return estimator.fit(x, x[:, 0] + 0.1 * np.cos(40 * x.sum(axis=1)), planned=planned)


@pytest.mark.parametrize("folds", [MatchedFolds(), default_folds(), CombinedFolds(RandomFolds(3), MatchedFolds(3))], ids=repr)  # fmt: skip
def test_queries_beyond_all_held_out_points_are_stated(folds):
    x = box(120)
    planned = np.concatenate([x[:60] + 1e-3, x[:60] + 50])
    with pytest.warns(UserWarning, match="50 % of the planned queries are farther from the data"):
        estimator = fitted_on(x, folds, planned)
    assert "50 % of the planned queries are farther" in estimator.describe()
    described = fitted_on(x, folds, x + 1e-3).describe()
    assert "0 % of the planned queries are farther" in described
    assert "planned" not in fitted_on(x).describe()


@pytest.mark.parametrize(("planned", "folds", "message"), [
    (box(5, d=3), None, r"planned has shape \(5, 3\), but a row of x has shape \(2,\)"),
    (np.zeros((0, 2)), None, r"planned has shape \(0, 2\)"),
    (np.array([[0, 0], [np.nan, 1]]), None, r"1 of 2 rows with missing or infinite values, the first one is row 1"),
    (None, MatchedFolds(), r"fit received none; call fit\(x, y, planned=xq\)"),
    (box(9), MatchedFolds(40), "there are 30 distinct points"),
])  # fmt: skip
def test_unusable_planned_queries_raise_before_any_training(planned, folds, message):
    trained = []
    with pytest.raises(ValueError, match=message):
        fitted_on(box(30), folds, planned, train=lambda x, y: trained.append(x))
    assert not trained


def test_planned_queries_of_a_table_have_its_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(box(60), columns=["a", "b"])
    estimator = GeoQ(lambda t: t["a"].to_numpy(), None, folds=MatchedFolds(3))
    fit = estimator.fit(frame, frame["a"] ** 2, planned=frame[["b", "a"]])
    assert fit.fitted_.beyond == 0
    with pytest.raises(ValueError, match="planned has other columns"):
        estimator.fit(frame, frame["a"], planned=frame[["a"]])
    aside = pandas.DataFrame(box(90, seed=2), columns=["a", "b"])
    weights = KnownRatio(lambda t: 0 * t["a"], lambda t: t["a"])
    answer = conformalize(fit, aside, aside["a"] ** 2, weights=weights).assess(frame)
    assert np.isfinite(answer.error_hat[answer.safe]).mean() > 0.9


def test_the_picture_shows_planned_queries_and_each_family():
    estimator = fitted_on(box(120), default_folds())
    axes = plots.distances(Figure(figsize=(7, 4.5)), estimator, box(100, 1.5, seed=1))
    labels = [line.get_label().split(",")[0] for line in axes.lines]
    held_out = [f"held out by {name}Folds" for name in ("Random", "Cluster", "Nested")]
    assert labels == ["data among themselves", *held_out, "planned queries", "planned and safe"]
    ends = [line.get_ydata()[-1] for line in axes.lines]
    assert ends[:-1] == [1] * 5
    assert ends[-1] == estimator.assess(box(100, 1.5, seed=1)).safe.mean()
    distance = axes.lines[-2].get_xdata()
    answer = estimator.assess(box(100, 1.5, seed=1))
    np.testing.assert_allclose(distance, np.sort(answer.anchor_distance[:, 0]))


# Guarantees


def test_factors_by_hand():
    curve = curve_of(np.array([[3.0], [1.0], [2.0]]), np.array([1.0, 2.0, 1.0]))
    # The weights up to 1, 2 and 3 are 2, 3 and 4; half of 4 + w is wanted.
    asked = np.array([0, 0.1, 2, 2.1, 4, 4.1, math.inf])
    assert factors_of(curve, asked, 0.5).tolist() == [1, 2, 2, 3, 3, math.inf, math.inf]
    nothing = curve_of(np.zeros((0, 1)), np.zeros(0))
    assert factors_of(nothing, np.array([0.0, 1.0]), 0.5).tolist() == [math.inf] * 2


@given(st.lists(st.integers(0, 9), min_size=19, max_size=40), st.integers(1, 3), st.sampled_from([0.8, 0.95]))  # fmt: skip
def test_equal_weights_give_the_conformal_factor(values, n_values, level):
    ratio = np.stack([np.roll(values, k) for k in range(n_values)], axis=1).astype(float)
    ratio[0, 1:] = np.nan
    found = factors_of(curve_of(ratio, np.ones(len(ratio))), ONES, level)
    assert found[0] == conformal_factor(ratio, level)


def corner(rng, *shape):
    """A design that is uniform in the unit square, queries near a corner, errors that grow towards it, and the ratio of the densities."""
    design, plan = rng.uniform(size=(*shape, 2)), rng.beta(4, 1, size=(*shape, 2))
    errors = [np.exp(2 * x.sum(axis=-1)) * abs(rng.normal(size=shape)) for x in (design, plan)]
    return design, plan, *errors, (4 * design**3).prod(axis=-1), (4 * plan**3).prod(axis=-1)


def test_known_densities_repair_the_coverage_in_a_corner_over_2000_repetitions():
    _, _, error, other, weight, own = corner(np.random.default_rng(0), 2000, 100)
    covered, infinite = np.zeros((2000, 2)), np.zeros(2000)
    for n in range(2000):
        for k, w in enumerate((weight[n], 0 * weight[n] + 1)):
            asked = own[n, :1] if k == 0 else ONES
            factor = factors_of(curve_of(error[n, :, None], w), asked, 0.9)
            covered[n, k] = other[n, 0] <= factor[0]
            infinite[n] += math.isinf(factor[0])
    known, unweighted = covered.mean(axis=0)
    slack = 3 * math.sqrt(0.9 * 0.1 / 2000)
    assert 0.9 - slack <= known <= 0.96
    assert unweighted < 0.7
    assert 0.05 < infinite.mean() < 0.15


def test_an_estimated_ratio_is_near_the_level_and_labelled_as_an_estimate():
    rng, fitted = np.random.default_rng(0), fitted_on(box(60)).fitted_
    covered = []
    for _ in range(25):
        design, plan, error, other, _, _ = corner(rng, 200)
        at_pairs, log_ratio = EstimatedRatio(plan[100:]).fit(fitted, design)
        weight = np.exp(log_ratio(plan[:100]))
        factor = factors_of(curve_of(error[:, None], np.exp(at_pairs)), weight, 0.9)
        covered.append((other[:100] <= factor).mean())
    assert 0.85 < np.mean(covered) < 0.97
    x = box(90, seed=3)
    estimate = conformalize(fitted_on(box(60)), x, x[:, 0], weights=EstimatedRatio(0.5 * x))
    assert "expected, not proved, to be within their bounds" in estimate.describe()


def aside(n=90, seed=5):
    x = box(n, seed=seed)
    return x, x[:, 0] + 0.3 * np.cos(40 * x.sum(axis=1))


def test_without_weights_the_factors_of_safe_queries_are_conformal_factors():
    estimator, x = fitted_on(box(120)), box(50, 1.5, seed=1)
    before = estimator.assess(x)
    planned = conformalize(estimator, *aside())
    answer, safe = planned.assess(x), before.safe
    assert planned.n_effective == planned.pairs.safe.sum()
    assert "are guaranteed to be within their bounds" in planned.describe()
    own = estimator.conformalize(*aside()).assess(x)
    np.testing.assert_allclose(answer.error_hat[safe], own.error_hat[safe])
    np.testing.assert_allclose(answer.increment, answer.error_hat - answer.anchor_error)
    assert np.isinf(answer.error_hat[~safe]).all()  # fewer than 19 such pairs
    assert "error bound inf" in answer.reason(int(np.flatnonzero(~safe)[0]))


def test_nothing_is_guaranteed_where_the_plan_has_no_queries_and_weights_shrink_the_number():
    left = KnownRatio(lambda x: 0 * x[:, 0], lambda x: np.where(x[:, 0] < 0, 0, -np.inf))
    planned = conformalize(fitted_on(box(120)), *aside(), weights=left)
    answer = planned.assess(box(50, 0.9, seed=1))
    infinite = np.isinf(answer.error_hat)
    assert (infinite >= (answer.asked[:, 0] > 0)).all()
    assert not infinite[answer.safe & (answer.asked[:, 0] < 0)].any()
    assert planned.n_effective == (planned.pairs.safe & (aside()[0][:, 0] < 0)).sum()
    with pytest.warns(UserWarning, match="but 19 are needed at the level 0.95"):
        conformalize(fitted_on(box(120)), *aside(20), weights=left)


def test_cells_of_fields_are_weighted_risk_control_and_lost_queries_have_no_bound():
    x, cells = box(80), np.linspace(0, 1, 16)
    y = np.sin(3 * x[:, :1] + 4 * cells) * x[:, 1:]
    estimator = GeoQ(lambda x: 0 * x[:, :1] + 0 * cells, None, folds=RandomFolds(3), domain=Grid(1))
    estimator = replace(estimator, bound_model=FieldBound(factor=NoFactor())).fit(x[:40], y[:40])
    known = KnownRatio(lambda x: 0 * x[:, 0], lambda x: 0.3 * x[:, 0])
    planned = conformalize(estimator, x[40:], y[40:], weights=known)
    answer = planned.assess(np.concatenate([x[:9], [[np.nan, 0]]]))
    assert np.isnan(answer.error_hat[9]).all()
    np.testing.assert_array_equal(np.isfinite(answer.error_hat[:9]).all(axis=1), answer.safe[:9])
    assert answer.safe.any()
    accepted = accept(planned, np.concatenate([x[40:], [[np.nan, 0]]]), 10.0, 0.5)
    assert not accepted[-1]
    assert accepted[:-1].mean() > 0.7


@pytest.mark.parametrize(("weights", "message"), [
    (KnownRatio(lambda x: np.where(x[:, 0] < 0, -np.inf, 0), lambda x: x[:, 0]), "density is zero where data are"),
    (KnownRatio(lambda x: x, lambda x: x[:, 0]), r"log_design\(x\) has shape \(90, 2\) for 90 rows"),
    (KnownRatio(lambda x: x[:, 0], lambda x: np.log(x[:, 0])), r"log_plan\(x\)\[\d+\] is nan"),
    (KnownRatio(lambda x: x[:, 0], lambda x: x[:, 0] - np.inf), "log_plan is -inf at all 90 pairs"),
    (EstimatedRatio(box(9, d=3)), r"x has shape \(9, 3\), but GeoQ was fitted on rows of shape \(2,\)"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_unusable_densities_raise(weights, message, unchecked):
    with pytest.raises(ValueError, match=message):
        conformalize(fitted_on(box(60)), *aside(), weights=weights)
    with pytest.raises(TypeError, match="a ratio of densities is needed"):
        conformalize(fitted_on(box(60)), *aside(), weights=np.ones(90))


# Acceptance


def by_definition(bad, bad_weight, total, bound, weight, q):
    """Weighted conformal selection with each p-value of each auxiliary batch."""
    below = np.array([bad_weight[bad <= b].sum() for b in bound])
    m, sizes = len(bound), []
    for j in range(m):
        p = (below + weight[j] * (bound[j] <= bound)) / (total + weight[j])
        p[j] = 0
        sizes.append(np.flatnonzero(np.sort(p) <= q * np.arange(1, m + 1) / m).max() + 1)
    sizes = np.array(sizes)
    candidate = (below + weight) / (total + weight) <= q * sizes / m
    most = max((r for r in range(m + 1) if (candidate & (sizes <= r)).sum() >= r), default=0)
    return candidate & (sizes <= most)


def test_the_selection_is_the_one_of_its_definition():
    rng, n_selected = np.random.default_rng(0), 0
    for _ in range(500):
        n, m = rng.integers(0, 9), rng.integers(1, 12)
        bad, bound = (rng.integers(0, 6, k).astype(float) for k in (n, m))
        bad_weight, weight = rng.uniform(size=n), rng.uniform(size=m)
        case = bad, bad_weight, bad_weight.sum() + rng.uniform(0, 8), bound, weight, 0.3
        found = selected(*case)
        np.testing.assert_array_equal(found, by_definition(*case))
        n_selected += found.sum()
    assert n_selected > 500


@pytest.mark.parametrize("weighted", [False, True])
def test_the_false_share_is_kept_over_2000_repetitions(weighted):
    rng, q = np.random.default_rng(1), 0.2
    x, asked = rng.uniform(size=(2000, 200)), rng.beta(1 + weighted, 1, size=(2000, 20))
    false, accepted = np.zeros((2, 2000))
    for n in range(2000):
        bounds = [np.exp(2 * part[n]) / 3 for part in (x, asked)]
        errors = [bound * abs(rng.normal(size=len(bound))) for bound in bounds]
        weights = [2 * part[n] if weighted else np.ones(len(part[n])) for part in (x, asked)]
        bad = errors[0] > 1
        case = bounds[0][bad], weights[0][bad], weights[0].sum(), bounds[1], weights[1], q
        chosen = selected(*case)
        false[n] = (chosen & (errors[1] > 1)).sum() / max(1, chosen.sum())
        accepted[n] = chosen.mean()
    assert false.mean() <= q + 3 * false.std() / math.sqrt(2000)
    assert false.mean() > 0.7 * q
    assert accepted.mean() > 0.25


def test_queries_that_are_not_safe_are_never_accepted(unchecked):
    planned = conformalize(fitted_on(box(120)), *aside(200))
    x = box(300, 1.5, seed=1)
    safe = planned.fitted.assess(x).safe
    generous, strict = (accept(planned, x, tolerance) for tolerance in (10.0, 1e-6))
    np.testing.assert_array_equal(generous, safe)
    assert not strict.any()
    for wrong in ([0.1, 0.2], -1.0, math.nan):
        with pytest.raises(ValueError, match="one positive number is needed"):
            accept(planned, x, wrong)
    with pytest.raises(TypeError, match=r"estimator=.* must be a PlannedBound"):
        accept(fitted_on(box(60)), x, 0.1)
    with pytest.raises(ValueError, match=r"false_share=1\.5"):
        accept(planned, x, 0.1, 1.5)
