"""The rivals of the benchmarks against closed forms and other libraries."""

from dataclasses import dataclass
from functools import partial

import lightgbm
import numpy as np
import pytest
import torch
from conftest import fresh
from crepes import ConformalRegressor
from crepes.extras import DifficultyEstimator
from mapie.regression import CrossConformalRegressor
from numpy.testing import assert_array_equal
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import KFold, LeaveOneOut
from torch.testing import assert_close

from benchmarks.rivals import (
    BoostedQuantile,
    CalibratedSpread,
    CVPlus,
    KNNDistanceConformal,
    KNNResidualConformal,
    MeanErrorPredictor,
    NoIncrement,
    OnField,
    OnTable,
    QuantileNetwork,
    RememberedTraining,
    SplineScaledConformal,
    equal_families,
    equal_tuples,
    of_x_distance_and_prediction,
)
from benchmarks.rivals.constant import Constant
from benchmarks.rivals.gp_scaled import GPScaledConformal
from benchmarks.rivals.weights import weighted_conformal_factor
from benchmarks.suite.recipes import Increment, Network
from geoq import (
    ClusterFolds,
    CombinedFolds,
    GeoQ,
    GroupFolds,
    NestedFolds,
    RandomFolds,
    TemporalFolds,
    Training,
    norm_error,
)
from geoq.baselines import Bound, MCDropout
from geoq.baselines.conformal import conformal_factor
from geoq.metrics import coverage

QUICK = Training(n_steps=50, batch_size=16, check_every=25)


def zero(x):
    return 0 * x[:, :1]


def train_zero(x, y):
    """Return the surrogate 0, so that the error is |y|."""
    del x, y
    return zero


def train_zeros(x, y):
    """Return the surrogate that returns zeros of the shape of y."""
    del x
    return lambda x: torch.zeros(len(x), *y.shape[1:]).to(x)


def of_zero(**settings):
    """GeoQ for the surrogate that returns 0, so that a test can choose the errors."""
    settings = {"folds": RandomFolds(), "n_support": 5} | settings
    return GeoQ(zero, train_zero, **settings)


RIVALS = [
    KNNDistanceConformal,
    KNNResidualConformal,
    partial(BoostedQuantile, n_trees=20),
    partial(QuantileNetwork, training=QUICK),
    partial(MeanErrorPredictor, n_trees=20),
]
RIVAL_NAMES = ["distance", "residual", "boosted", "network", "deup"]
every_rival = pytest.mark.parametrize("rival", RIVALS, ids=RIVAL_NAMES)


def test_remembered_training_trains_each_subset_once(problem):
    calls = []

    def train(x, y):
        calls.append(len(x))
        return problem.train(x, y)

    remembered = RememberedTraining(train)
    geoq = GeoQ(None, remembered, folds=RandomFolds(4))
    for rival in (KNNDistanceConformal, KNNResidualConformal):
        rival(geoq).fit(problem.x, problem.y)
    assert calls == [120, 90, 90, 90, 90]
    remembered(problem.x, problem.y + 1)
    remembered(problem.x.cpu().numpy(), problem.y.cpu().numpy())
    assert calls[5:] == [120, 120]


def test_without_increment_only_the_anchor_error_is_left(problem):
    geoq = GeoQ(None, problem.train, increment_model=NoIncrement()).fit(
        problem.x, problem.y
    )
    answer = geoq.assess(problem.queries)
    assert torch.equal(answer.error_hat, answer.anchor_error)


@every_rival
def test_a_rival_predicts_what_geoqs_surrogate_does_and_bounds_it(rival, problem):
    surrogate = problem.train(problem.x, problem.y)
    geoq = GeoQ(surrogate, problem.train)
    bound = rival(geoq).fit(problem.x, problem.y).predict(problem.queries)
    assert_close(bound.prediction, surrogate(problem.queries))
    assert bound.error_hat.shape == bound.prediction.shape
    assert bound.error_hat.dtype == problem.x.dtype
    assert (bound.error_hat >= 0).all()
    assert not hasattr(geoq, "calibration_")


@every_rival
def test_a_rival_answers_in_the_users_kind(rival, problem):
    x, y, queries = (
        part.cpu().double() for part in (problem.x, problem.y, problem.queries)
    )
    surrogate = problem.train(x, y)
    tensors = rival(GeoQ(surrogate, problem.train)).fit(x, y).predict(queries)
    arrays = rival(GeoQ(problem.train(x.numpy(), y.numpy()), problem.train))
    answer = arrays.fit(x.numpy(), y.numpy()).predict(queries.numpy())
    assert isinstance(answer.error_hat, np.ndarray)
    assert_close(
        torch.from_numpy(answer.error_hat), tensors.error_hat, rtol=1e-3, atol=1e-6
    )


@every_rival
def test_a_rival_serves_a_norm_and_a_field_alike(rival, problem):
    y = torch.stack([problem.y * (1 + j) for j in range(20)], dim=1)

    field = rival(GeoQ(None, train_zeros)).fit(problem.x, y).predict(problem.queries)
    assert field.error_hat.shape == (40, 20, 1)
    number = rival(GeoQ(None, train_zeros, error_functional=norm_error)).fit(
        problem.x, y
    )
    assert number.predict(problem.queries).error_hat.shape == (40,)


@every_rival
@pytest.mark.parametrize("folds", [NestedFolds(3), TemporalFolds(4, gap=3)], ids=str)
def test_a_rival_takes_overlapping_folds_and_dependent_points(rival, folds, problem):
    geoq = GeoQ(None, problem.train, folds=folds)
    bound = rival(geoq).fit(problem.x, problem.y).predict(problem.queries)
    assert bound.error_hat.isfinite().all()


@every_rival
def test_a_rival_takes_groups(rival, problem):
    geoq = GeoQ(None, problem.train, folds=GroupFolds())
    groups = [row % 4 for row in range(120)]
    fitted = rival(geoq).fit(problem.x, problem.y, groups=groups)
    assert len(fitted.cross_fitted_.calibration.fold.unique()) == 4


@every_rival
def test_a_rival_refuses_to_answer_before_it_is_fitted(rival, problem):
    with pytest.raises(NotFittedError, match="call fit"):
        rival(of_zero()).predict(problem.queries)


@every_rival
def test_a_rival_refuses_a_level_outside_the_unit_interval(rival, problem):
    with pytest.raises(ValueError, match="quantile=95"):
        rival(of_zero(), quantile=95.0).fit(problem.x, problem.y)


def test_distance_conformal_is_exact_for_an_error_proportional_to_the_support_distance():
    """On a circle of equally spaced points all support distances are equal under leave-one-out, and so are the errors."""
    angle = torch.arange(40, dtype=torch.float64) * 2 * torch.pi / 40
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    y = torch.stack([torch.full((40,), 3.0), torch.full((40,), 6.0)], dim=1).double()

    rival = KNNDistanceConformal(
        GeoQ(None, train_zeros, folds=LeaveOneOut(), n_support=2)
    )
    rival.fit(x, y)
    # nu scales both coordinates by sqrt(2); the two neighbours lie a chord of one step away
    chord = 2 * np.sin(np.pi / 40) * 2**0.5
    assert_close(rival.factor_, torch.tensor([3.0, 6.0]).double() / chord)
    far = rival.predict(torch.tensor([[10.0, 0.0]], dtype=torch.float64))
    distances = torch.linalg.vector_norm(
        (x - torch.tensor([10.0, 0.0])) * 2**0.5, dim=1
    )
    expected = rival.factor_ * distances.sort().values[:2].mean()
    assert_close(far.error_hat[0], expected)


def crepes_half_width(difficulty, residuals, queries):
    """Half width of crepes' normalised intervals, with leave-one-out difficulties while calibrating."""
    regressor = ConformalRegressor().fit(residuals, sigmas=difficulty.apply())
    sigmas = difficulty.apply(queries)
    interval = regressor.predict_int(
        np.zeros(len(queries)), sigmas=sigmas, confidence=0.9
    )
    return (interval[:, 1] - interval[:, 0]) / 2


def heteroscedastic(n_points, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.uniform(0, 1, size=(n_points, 1))
    return x, (0.1 + x) * generator.normal(size=x.shape)


def test_distance_conformal_agrees_with_crepes():
    """One input dimension, so that crepes' min-max scaling and nu order neighbours alike; leave-one-out folds."""
    (x, y), (queries, _) = heteroscedastic(80), heteroscedastic(30, seed=1)
    rival = KNNDistanceConformal(
        of_zero(folds=LeaveOneOut(), n_support=7), quantile=0.9
    )
    difficulty = DifficultyEstimator().fit(X=x, k=7, beta=0, oob=True)
    expected = crepes_half_width(difficulty, y[:, 0], queries)
    error_hat = rival.fit(x, y).predict(queries).error_hat[:, 0]
    np.testing.assert_allclose(error_hat, expected, rtol=1e-6)


def test_residual_conformal_agrees_with_crepes():
    (x, y), (queries, _) = heteroscedastic(80), heteroscedastic(30, seed=1)
    rival = KNNResidualConformal(
        of_zero(folds=LeaveOneOut()), quantile=0.9, n_neighbors=7, beta=0.02
    )
    beta = 0.02 * abs(y).mean()
    difficulty = DifficultyEstimator().fit(
        X=x, residuals=y[:, 0], k=7, beta=beta, oob=True
    )
    expected = crepes_half_width(difficulty, y[:, 0], queries)
    error_hat = rival.fit(x, y).predict(queries).error_hat[:, 0]
    np.testing.assert_allclose(error_hat, expected, rtol=1e-6)


def test_conformal_scales_of_zero_are_refused():
    """Repeated inputs with different outputs: their support distance is zero and their error is not."""
    x = np.repeat(np.arange(10.0), 10)[:, None]
    apart = KFold(5, shuffle=True, random_state=0)
    rival = KNNDistanceConformal(of_zero(n_support=1, folds=apart))
    with pytest.raises(
        ValueError, match=r"in 1 of 1 output coordinates .* remove repeated inputs"
    ):
        rival.fit(x, np.ones_like(x))


@pytest.mark.parametrize(
    "rival",
    [
        BoostedQuantile,
        partial(BoostedQuantile, inputs=of_x_distance_and_prediction),
        QuantileNetwork,
        MeanErrorPredictor,
    ],
    ids=["boosted", "boosted_geometry", "network", "deup"],
)
def test_a_heteroscedastic_quantile_is_recovered(rival):
    """|y| is (0.1 + x) |N(0, 1)|, whose 0.9 quantile is 1.645 (0.1 + x)."""
    x, y = heteroscedastic(3000)
    queries = np.linspace(0.05, 0.95, 19)[:, None]
    bound = rival(of_zero(), quantile=0.9).fit(x, y).predict(queries)
    np.testing.assert_allclose(bound.error_hat, 1.645 * (0.1 + queries), rtol=0.25)
    fresh_x, fresh_y = heteroscedastic(3000, seed=1)
    error_hat = rival(of_zero(), quantile=0.9).fit(x, y).predict(fresh_x).error_hat
    assert coverage(abs(fresh_y), error_hat) == pytest.approx(0.9, abs=0.025)


def test_many_coordinates_have_common_trees_that_distinguish_them():
    """Coordinate j has errors up to 1 + j."""
    generator = np.random.default_rng(0)
    x = generator.uniform(size=(300, 1))
    size = 1.0 + np.arange(20)
    y = size * generator.uniform(size=(300, 20))

    def train(x, y):
        del x, y
        return lambda x: np.zeros((len(x), 20))

    rival = BoostedQuantile(GeoQ(None, train, folds=RandomFolds(3)), quantile=0.9)
    error_hat = rival.fit(x, y).predict(x[:50]).error_hat
    np.testing.assert_allclose(error_hat.mean(axis=0), 0.9 * size, rtol=0.15)


def test_a_table_model_refuses_many_coordinates_without_their_predictions(problem):
    def many(y, y_hat):
        return abs(y - y_hat).repeat(1, 20)

    rival = BoostedQuantile(GeoQ(None, problem.train, error_functional=many), n_trees=5)
    with pytest.raises(
        ValueError,
        match=r"20 coordinates .* use an error functional of the output's shape",
    ):
        rival.fit(problem.x, problem.y)


def test_boosting_without_lightgbm_names_the_extra(problem, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, lightgbm.__name__, None)
    with pytest.raises(ImportError, match=r'pip install "geoq\[boosting\]"'):
        BoostedQuantile(of_zero()).fit(problem.x, problem.y)


def test_a_quantile_network_on_fields_finds_where_the_error_is_large():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1, 16, generator=generator)
    y = torch.cat([0.1 * x, 5 * x], dim=1) * torch.rand(200, 2, 16, generator=generator)

    make_network = OnField(n_spatial=1, widths=(8, 16))
    training = Training(n_steps=600, batch_size=32, learning_rate=3e-3, check_every=50)
    rival = QuantileNetwork(
        GeoQ(None, train_zeros, folds=RandomFolds(3)), 0.9, make_network, training
    )
    error_hat = rival.fit(x, y).predict(x).error_hat
    assert coverage(y, error_hat) == pytest.approx(0.9, abs=0.05)
    large, small = x[:, 0] > 0.8, x[:, 0] < 0.2
    assert error_hat[:, 1][large].mean() > 3 * error_hat[:, 1][small].mean()


def test_a_network_on_fields_refuses_another_grid():
    with pytest.raises(ValueError, match="do not end in the same grid"):
        OnField(n_spatial=1)((3, 16), (3, 8))
    network = fresh(OnTable((4,)), (3, 16), (3, 8))
    assert network(torch.zeros(2, 3, 16)).shape == (2, 3, 8)


def test_local_residuals_refuse_a_scale_that_may_vanish(problem):
    with pytest.raises(ValueError, match="beta=0"):
        KNNResidualConformal(of_zero(), beta=0.0).fit(problem.x, problem.y)


def test_a_refit_that_is_refused_does_not_leave_two_fits_mixed():
    x = np.random.default_rng(0).normal(size=(120, 2))
    bound = KNNDistanceConformal(of_zero()).fit(x, np.ones((120, 1)))
    with pytest.raises(ValueError, match=r"x\[0, 0\] is nan"):
        bound.fit(x * np.nan, np.ones((120, 1)))
    with pytest.raises(NotFittedError, match="not fitted yet"):
        bound.predict(x)


# Weights of the tuples

WEIGHTED = [
    partial(Constant, quantile=0.9),
    partial(KNNDistanceConformal, quantile=0.9),
    partial(KNNResidualConformal, quantile=0.7),
    partial(GPScaledConformal, quantile=0.9),
    partial(SplineScaledConformal, quantile=0.9),
    partial(BoostedQuantile, quantile=0.9, n_trees=20),
    partial(QuantileNetwork, quantile=0.9, training=QUICK),
    partial(MeanErrorPredictor, quantile=0.9, n_trees=20),
]


def bump(n_points=90):
    """Inputs and outputs whose errors under the surrogate 0 grow outwards."""
    x = np.random.default_rng(0).uniform(-1, 1, (n_points, 2))
    return x, (x**2).sum(axis=1, keepdims=True) + 0.1


@pytest.mark.parametrize("rival", WEIGHTED, ids=lambda rival: rival.func.__name__)
def test_family_weights_matter_only_if_families_have_different_sizes(rival):
    x, y = bump()

    def bounds(*families):
        geoq = of_zero(folds=CombinedFolds(*families))
        return [
            rival(geoq, weights=weights).fit(x, y).predict(x).error_hat
            for weights in (equal_tuples, equal_families)
        ]

    once, again = bounds(RandomFolds(3), ClusterFolds(3))
    np.testing.assert_allclose(once, again, rtol=1e-6)
    equal, weighted = bounds(RandomFolds(3), NestedFolds(5))
    assert not np.allclose(equal, weighted, rtol=1e-3)


@pytest.mark.parametrize("shape", [(60,), (60, 3), (60, 2, 2)])
def test_with_equal_weights_the_factor_is_the_conformal_factor(shape):
    generator = torch.Generator().manual_seed(0)
    error, scale = (torch.rand(shape, generator=generator) for _ in range(2))
    factor = weighted_conformal_factor(error, scale, torch.ones(60), 0.9)
    assert torch.equal(factor, conformal_factor(error, scale, 0.9))


def test_the_weighted_factor_is_a_quantile_of_the_weight():
    error = torch.arange(1.0, 41.0)
    weight = torch.cat([torch.full((20,), 3.0), torch.full((20,), 1.0)])
    # The level is 21 / 40 with 41 * 0.5 rounded up, and 14 weights of 3 have 42 of the total of 80.
    factor = weighted_conformal_factor(error, torch.ones(40), weight, 0.5)
    assert float(factor) == 14.0
    with pytest.raises(ValueError, match="5 tuples give no finite factor"):
        weighted_conformal_factor(error[:5], torch.ones(5), weight[:5], 0.95)


# Constant, Gaussian process and spline


def test_the_constant_is_the_quantile_of_all_held_out_errors():
    x, y = bump()
    bound = Constant(of_zero(), 0.9).fit(x, y).predict(5 * x)
    assert_array_equal(bound.error_hat, np.sort(y, axis=0)[[80]].repeat(90, axis=0))


def test_the_bound_of_a_gaussian_process_grows_to_its_prior_deviation():
    x, _ = bump()
    y = abs(np.sin(6 * x).sum(axis=1, keepdims=True)) + 0.1
    rival = GPScaledConformal(of_zero(), 0.9).fit(x, y)
    inside, far, farther = (
        rival.predict(queries).error_hat for queries in (x, x + 50, x + 99)
    )
    assert inside.max() < far.min()
    np.testing.assert_allclose(far, farther)


def test_the_spline_scale_is_the_difference_between_surrogate_and_spline():
    x = np.linspace(-1, 1, 60)[:, None]
    rival = SplineScaledConformal(of_zero(), 0.9).fit(x, 3 * x)
    error_hat = rival.predict(np.array([[-0.5], [0.0], [0.5]])).error_hat
    # The spline is the line itself, and the surrogate is 0.
    gap = np.array([[1.5], [0.0], [1.5]]) + np.sort(3 * abs(x), axis=0)[29]
    np.testing.assert_allclose(error_hat / gap, (error_hat / gap)[:1].repeat(3, 0))


# Calibrated ensembles and dropout


@dataclass
class Proportional:
    """A baseline that predicts 0 with the spread |x|; it counts the rows of each fit."""

    sizes: list

    def fit(self, x, y):
        del y
        self.sizes.append(len(x))
        return self

    def predict(self, x):
        return Bound(0 * x, abs(x))


def test_a_calibrated_spread_is_the_spread_times_the_quantile_of_held_out_ratios():
    x = np.random.default_rng(1).uniform(1, 2, (100, 1))
    ratio = np.linspace(0.02, 2, 100)[:, None]
    sizes = []
    rival = CalibratedSpread(Proportional(sizes), 0.9, RandomFolds(5), beta=0.0)
    bound = rival.fit(x, ratio * x).predict(3 * x)
    # The 91st of 100 ratios, rounded up from 101 * 0.9.
    np.testing.assert_allclose(bound.error_hat, ratio[90] * 3 * x)
    assert sizes == [80] * 5 + [100]


def test_networks_of_the_suite_have_active_dropout_for_mc_dropout():
    x, y = bump()
    network = Network((8,), QUICK).with_dropout(0.1)
    for recipe, target in ((network, y), (Increment(network), np.hstack([y, y]))):
        raw = MCDropout(recipe, n_passes=5).fit(x, target).predict(x)
        assert (raw.error_hat > 0).any()
        scaled = CalibratedSpread(MCDropout(recipe, n_passes=5), 0.9, RandomFolds(3))
        bound = scaled.fit(x, target).predict(x)
        np.testing.assert_array_equal(bound.prediction, raw.prediction)
        assert coverage(abs(target - bound.prediction), bound.error_hat) > coverage(
            abs(target - raw.prediction), raw.error_hat
        )


# CV+


class Cubic(RegressorMixin, BaseEstimator):
    """A cubic polynomial as a scikit-learn model."""

    def fit(self, x, y):
        self.coefficients_ = np.polyfit(x[:, 0], y, 3)
        return self

    def predict(self, x):
        return np.polyval(self.coefficients_, x[:, 0])


@pytest.fixture
def global_seed():
    """The global random numbers of NumPy, which MAPIE uses, are as before afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    yield
    np.random.set_state(state)  # noqa: NPY002


def test_cv_plus_is_that_of_mapie(global_seed):
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (117, 1))
    y = np.sin(4 * x[:, 0]) + 0.2 * rng.standard_normal(117)
    queries = np.linspace(-1.5, 1.5, 40)[:, None]
    folds = KFold(5, shuffle=True, random_state=0)
    theirs = CrossConformalRegressor(Cubic(), confidence_level=0.9, cv=folds)
    theirs.fit_conformalize(x, y)
    _, interval = theirs.predict_interval(queries)
    surrogate = Cubic().fit(x, y).predict
    recipe = RememberedTraining(lambda x, y: Cubic().fit(x, y).predict)
    ours = CVPlus(surrogate, recipe, 0.9, folds).fit(x, y).predict(queries)
    reach = abs(interval[:, :, 0] - surrogate(queries)[:, None]).max(axis=1)
    np.testing.assert_allclose(ours.error_hat, reach)
    with pytest.raises(ValueError, match="8 rows"):
        CVPlus(surrogate, recipe, 0.9, folds).fit(x[:8], y[:8])
