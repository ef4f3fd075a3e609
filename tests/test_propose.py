"""The next simulations, and optimisation where the bound is small."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge

from geoq import GeoQ, RandomFolds, RolloutGeoQ, plots
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.planning import TrustRegionSearch, constraint, propose, smooth
from geoq.planning import propose as function
from geoq.planning.distances import DistanceLaw, Located
from geoq.sklearn import GeoQRegressor
from geoq.xarray import Labelled


def truth(x):
    return np.sin(5 * x[:, 0]) + x[:, 0] * x[:, 1]


def drawn(n, low, high, seed):
    return np.random.default_rng(seed).uniform(low, high, size=(n, 2))


def model(x):
    """A function of arrays and of tensors, which is wrong outside the data."""
    return 1.5 * x[:, 0] + x[:, 0] * x[:, 1] - 1.2 * x[:, 0] ** 3


@cache
def calibrated():
    x = drawn(80, -1, 1, 0)
    return GeoQ(model, None).fit(x, truth(x))


def mean_bounds(candidates, queries):
    """A function of rows: the mean bound of the queries if these candidates are data."""
    fitted = calibrated().fitted_
    pool, plan = Located.of(fitted, candidates, "c"), Located.of(fitted, queries, "q")
    law, now = DistanceLaw.of(fitted), DistanceLaw.of(fitted).nearest(plan.z)[0]
    apart = np.linalg.norm(plan.z[:, None] - pool.z, axis=2)

    def mean(rows):
        near = np.minimum(now, apart[:, list(rows)].min(axis=1, initial=np.inf))
        return (plan.bound * law(near) / law(now)).mean()

    return mean


def test_the_picks_are_the_greedy_ones_and_near_the_best_batch():
    """All pairs of 15 candidates; lazy greedy equals greedy, and both reach 1 - 1/e of the best reduction."""
    candidates, queries = drawn(15, 0.5, 1.6, 1), drawn(40, 0.5, 1.6, 2)
    found = propose(calibrated(), candidates, 3, queries=queries)
    total = mean_bounds(candidates, queries)
    rows, before = [], total([])
    for gain in found.gains:
        left = [row for row in range(15) if row not in rows]
        means = [total([*rows, row]) for row in left]
        assert total(rows) - min(means) == pytest.approx(gain)
        rows.append(left[int(np.argmin(means))])
    assert rows == found.rows.tolist()
    assert found.bound_before == pytest.approx(before)
    assert found.bound_after == pytest.approx(total(rows))
    best = min(total(batch) for batch in itertools.combinations(range(15), 3))
    assert before - found.bound_after >= (1 - 1 / math.e) * (before - best)


def test_a_regressor_and_labelled_arrays_stand_for_their_geoq():
    x, candidates = drawn(60, -1, 1, 0), drawn(9, 0.5, 1.6, 1)
    regressor = GeoQRegressor(Ridge(), folds=RandomFolds(4)).fit(x, truth(x))
    arrays = xr.DataArray(x, dims=("run", "input")), xr.DataArray(truth(x), dims="run")
    labelled = Labelled(GeoQ(model, None, folds=RandomFolds(4)), "run").fit(*arrays)
    for estimator, core in ((regressor, regressor.geoq_), (labelled, labelled.estimator_)):
        rows = [propose(own, candidates, 3, queries=x).rows.tolist() for own in (estimator, core)]
        assert rows[0] == rows[1]
        assert plots.calibration(Figure(), estimator)[0].get_ylabel() == "held-out error"
    search = TrustRegionSearch(regressor, lambda y: y, [(-1, 1), (-1, 1)])
    search.tell(search.ask(), -1.0)
    assert isinstance(search.estimator, GeoQ)
    assert regressor.geoq_.fitted_.n_verified == 0
    rollouts = RolloutGeoQ(np.negative, None, n_calibration=4).fit(np.cumsum(x, axis=0))
    with pytest.raises(TypeError, match="bounds of single answers, got RolloutGeoQ; pass"):
        propose(rollouts, candidates, 3)


def test_a_pick_counts_as_data_for_the_next_one():
    """Two copies of the best candidate: the second one gains nothing."""
    candidates, queries = drawn(10, 0.8, 1.4, 1), drawn(40, 0.8, 1.4, 2)
    first = propose(calibrated(), candidates, 1, queries=queries).rows[0]
    twice = np.concatenate([candidates, candidates[first : first + 1]])
    found = propose(calibrated(), twice, 11, queries=queries)
    assert found.rows[0] == first  # ties go to the lower row
    assert found.rows[-1] == 10
    assert found.gains[-1] == 0
    pending = propose(calibrated(), candidates, 1, queries=queries, pending=candidates[[first]])
    assert pending.rows[0] != first
    assert pending.bound_before < found.bound_before


def test_the_picks_follow_the_plan_and_its_weights():
    corners = np.array([[1.3, 1.3], [-1.3, -1.3]])
    queries = np.concatenate([corner + drawn(20, -0.1, 0.1, 3) for corner in corners])
    for heavy, row in ((slice(20), 0), (slice(20, 40), 1)):
        weights = np.full(40, 0.01)
        weights[heavy] = 1.0
        found = propose(calibrated(), corners, 1, queries=queries, weights=weights)
        assert found.rows.tolist() == [row]
    found = propose(calibrated(), corners, 2, queries=queries)
    assert found.safe_after >= found.safe_before
    assert "the nearest run of 20 queries, whose mean bound falls from" in found.reason(1)


def test_without_queries_the_largest_bound_is_picked_and_distances_are_updated():
    candidates = np.array([[1.6, 1.6], [1.61, 1.6], [-1.5, 1.5], [0.11, 0.12]])
    bound = calibrated().bound(candidates)
    found = propose(calibrated(), candidates, 2)
    assert found.rows[0] == bound.argmax()
    assert found.gains[0] == pytest.approx(bound.max())
    assert {*found.rows.tolist()} & {2}
    assert found.reason(0).endswith("the largest one")


def test_random_runs_are_drawn_from_the_plan_with_a_seed():
    candidates, queries = drawn(20, 0.5, 1.5, 1), drawn(30, 0.5, 1.5, 2)
    one, two, other = (
        propose(calibrated(), candidates, 6, queries=queries, n_random=4, random_state=s)
        for s in (0, 0, 1)
    )
    assert one.random_rows.tolist() == two.random_rows.tolist() != other.random_rows.tolist()
    assert (len(one), len(one.random_rows)) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 9}, "n=9, but there are 5 candidates"),
        ({"n": 0}, "n=0 must be an integer >= 1"),
        ({"candidates": drawn(80, -1, 1, 0)[:3]}, r"candidates\[0\] is row 0 of the data \(3 candidates"),
        ({"queries": np.zeros((4, 3))}, "queries: x has shape"),
        ({"queries": np.full((4, 2), np.nan)}, r"queries\[0\] has no bound"),
        ({"pending": np.zeros((1, 5))}, "pending: x has shape"),
        ({"weights": np.ones(3)}, "weights has shape .3,. for 4 queries"),
        ({"weights": -np.ones(4)}, "finite nonnegative number per query"),
        ({"weights": np.ones(5), "queries": None}, "for 0 queries"),
        ({"n_random": 5, "n": 5}, "drawn from 4 queries"),
    ],
)  # fmt: skip
def test_what_a_proposal_refuses(arguments, message):
    given = {"candidates": drawn(5, 1, 2, 1), "n": 2, "queries": drawn(4, 1, 2, 2)} | arguments
    with pytest.raises(ValueError, match=message):
        function(calibrated(), **given)


def test_fields_have_the_mean_of_their_bounds():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6, 6)).cumsum(axis=1)
    model = FieldBound(factor=NoFactor())
    estimator = GeoQ(lambda x: x, None, folds=RandomFolds(4), bound_model=model)
    estimator.fit(x[:30], x[:30] + 0.1 * abs(x[:30]))
    found = propose(estimator, x[30:40], 2, queries=x[40:])
    assert found.bound_before == pytest.approx(estimator.bound(x[40:]).mean(), rel=1e-6)


# Optimisation


def test_scipy_stays_where_the_queries_are_safe():
    """The surrogate falls outside the data for ever; without the constraint the optimiser ends at the edge of the box."""
    estimator = calibrated()

    def objective(x):
        return float(-x[0])

    box = [(-3, 3)] * 2
    free = minimize(objective, [0.1, 0.1], method="SLSQP", bounds=box)
    assert not estimator.assess(free.x[None]).safe[0]
    limits = {"bounds": box, "constraints": constraint(estimator, tolerance=4.0)}
    found = minimize(objective, [0.1, 0.1], method="COBYQA", options={"maxfev": 40}, **limits)
    assert 0.7 < found.x[0] < 1.4
    assert estimator.assess(found.x[None]).support_score[0] <= 1.05
    values = constraint(estimator, tolerance=2.0).fun([0.1, 0.1])
    answer = estimator.assess(np.array([[0.1, 0.1]]))
    expected = np.log([answer.support_score[0], answer.error_hat[0] / 2.0])
    np.testing.assert_allclose(values, expected)
    assert constraint(estimator).fun([np.nan, 0.1]).tolist() == [50.0]


@pytest.mark.parametrize("tolerance", [0, -1.0, np.array([0.1, 0.2]), math.nan])
def test_a_tolerance_is_one_positive_number(tolerance):
    with pytest.raises(ValueError, match="must be one positive number"):
        constraint(calibrated(), tolerance)


def test_the_search_finds_the_optimum_of_the_simulator_and_not_of_the_surrogate():
    estimator, box = calibrated(), [(-2, 2)] * 2
    search = TrustRegionSearch(estimator, lambda y: y, box)
    first, before = search.best, estimator.bound(drawn(5, -1, 1, 3))
    for _ in range(12):
        if not search.done:
            x = search.ask()
            assert search.estimator.assess(x[None]).safe[0]
            search.tell(x, truth(x[None])[0])
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 101)] * 2), -1).reshape(-1, 2)
    assert search.best[2] <= truth(grid).min() + 0.1 < first[2] + 0.1
    assert search.best[2] == pytest.approx(truth(search.best[0][None])[0])  # it was simulated
    assert np.array_equal(estimator.bound(drawn(5, -1, 1, 3)), before)  # a copy was updated


def test_the_radius_follows_the_three_cases():
    """A value as predicted doubles the radius, a worse value halves it, and an input that cannot be better is not asked."""
    search = TrustRegionSearch(calibrated(), lambda y: y, [(-1, 1)] * 2)
    radius, x = search.radius, search.ask()
    predicted, error, usable = search._compared(x[None])
    assert usable[0]
    assert predicted[0] - error[0] < search.best[2]
    good, bad = (TrustRegionSearch(calibrated(), lambda y: y, [(-1, 1)] * 2) for _ in range(2))
    good.ask()
    radius = good.radius
    good.tell(x, predicted[0])
    assert good.radius == 2 * radius
    bad.tell(x, bad.best[2] + 1.0)
    assert bad.radius == 0.25 / 2
    perfect = TrustRegionSearch(calibrated(), lambda y: 0 * y, [(-1, 1)] * 2)
    assert perfect.done
    with pytest.raises(RuntimeError, match="the search is done"):
        perfect.ask()


def test_what_the_search_refuses():
    box = [(-1, 1)] * 2
    with pytest.raises(
        ValueError, match="objective returned nan for row 0 of the outputs of the data"
    ):
        TrustRegionSearch(calibrated(), lambda y: y * math.nan, box)
    with pytest.raises(ValueError, match=r"objective returned shape \(\) for 80 rows"):
        TrustRegionSearch(calibrated(), lambda y: y.mean(), box)
    with pytest.raises(ValueError, match=r"one pair \(lowest, largest\) of finite numbers"):
        TrustRegionSearch(calibrated(), lambda y: y, [(1, -1), (0, 1)])
    with pytest.raises(ValueError, match="no point of the data is within bounds"):
        TrustRegionSearch(calibrated(), lambda y: y, [(5, 6), (5, 6)])
    search = TrustRegionSearch(calibrated(), lambda y: y, box)
    with pytest.raises(ValueError, match=r"received x of shape \(3,\)"):
        search.tell(np.zeros(3), 1.0)
    with pytest.raises(ValueError, match="objective returned nan for row 0 of y"):
        search.tell(np.zeros(2), math.nan)
    assert search.n_asked == 0


def test_the_guide_is_differentiable_and_ranks_queries_as_the_bound_does():
    torch = pytest.importorskip("torch")
    estimator, queries = calibrated(), drawn(300, -1.6, 1.6, 5)
    guide = smooth(estimator)
    ranks = spearmanr(estimator.bound(queries), guide(torch.from_numpy(queries)).numpy())
    assert ranks.statistic > 0.9
    x = torch.tensor([[0.3, 0.2], [1.5, -0.2]], dtype=torch.float64, requires_grad=True)
    step = 1e-6 * torch.tensor([1.0, 0.0])
    (slope,) = torch.autograd.grad(guide(x).sum(), x)
    numeric = (guide(x + step) - guide(x - step)) / 2e-6
    assert torch.allclose(slope[:, 0], numeric, rtol=1e-3)
    at_data = torch.from_numpy(drawn(80, -1, 1, 0)[:3]).requires_grad_()
    assert torch.isfinite(torch.autograd.grad(guide(at_data).sum(), at_data)[0]).all()
