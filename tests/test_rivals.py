"""The rivals of the benchmarks against closed forms, hand-computed cases and other libraries."""

from functools import partial

import numpy as np
import pytest
from crepes import ConformalRegressor
from crepes.extras import DifficultyEstimator
from mapie.regression import CrossConformalRegressor
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold, LeaveOneOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from torch import nn

import geoq
from benchmarks import rivals
from benchmarks.rivals import RememberedTraining, equal_families, equal_tuples
from benchmarks.rivals.networks import spread
from geoq.metrics import coverage

QUICK = geoq.Training(n_steps=50, batch_size=16, check_every=25)
RIVALS = {
    "constant": rivals.Constant,
    "distance": rivals.KNNDistanceConformal,
    "residual": rivals.KNNResidualConformal,
    "process": rivals.GPScaledConformal,
    "spline": rivals.SplineScaledConformal,
    "boosted": partial(rivals.BoostedQuantile, n_trees=20),
    "network": partial(rivals.QuantileNetwork, training=QUICK),
    "mean": partial(rivals.MeanErrorPredictor, n_trees=20),
}
every_rival = pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS)


def train_zero(x, y):
    """The surrogate that returns zeros of the shape of y, so that the error is |y|."""
    shape = y.shape[1:]
    return lambda x: np.zeros((len(x), *shape))


def of_zero(**settings):
    """GeoQ for the surrogate that returns 0, so that a test can choose the errors."""
    return geoq.GeoQ(None, train_zero, **{"folds": geoq.RandomFolds(), "n_support": 5} | settings)


def bump(n_points=90):
    """Inputs and outputs whose size grows outwards."""
    x = np.random.default_rng(0).uniform(-1, 1, (n_points, 2))
    return x, (x**2).sum(axis=1, keepdims=True) + 0.1


def heteroscedastic(n_points, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, size=(n_points, 1))
    return x, (0.1 + x) * rng.normal(size=x.shape)


# All of them


@every_rival
def test_a_rival_bounds_the_error_of_geoqs_surrogate(rival, problem):
    surrogate = problem.train(problem.x, problem.y)
    estimator = geoq.GeoQ(surrogate, problem.train)
    bound = rival(estimator).fit(problem.x, problem.y).predict(problem.queries)
    np.testing.assert_allclose(bound.prediction, surrogate(problem.queries))
    assert bound.error_hat.shape == bound.prediction.shape
    assert (bound.error_hat >= 0).all()
    assert not hasattr(estimator, "fitted_")  # the given GeoQ is not changed
    y = np.stack([problem.y * (1 + j) for j in range(20)], axis=1)
    field = rival(of_zero()).fit(problem.x, y).predict(problem.queries)
    assert field.error_hat.shape == (40, 20, 1)
    if rival is not rivals.SplineScaledConformal:  # its scale is a difference of outputs
        number = rival(of_zero(error_functional=geoq.norm_error)).fit(problem.x, y)
        assert number.predict(problem.queries).error_hat.shape == (40,)


@every_rival
def test_family_weights_matter_only_if_families_have_different_sizes(rival):
    x, y = bump()

    def bounds(*families):
        estimator = of_zero(folds=geoq.CombinedFolds(*families))
        return [
            rival(estimator, quantile=0.8, weights=weights).fit(x, y).predict(x).error_hat
            for weights in (equal_tuples, equal_families)
        ]

    once, again = bounds(geoq.RandomFolds(3), geoq.ClusterFolds(3))
    np.testing.assert_allclose(once, again, rtol=1e-6)
    equal, weighted = bounds(geoq.RandomFolds(3), geoq.NestedFolds(5))
    assert not np.allclose(equal, weighted, rtol=1e-3)


LEARNED = {
    "boosted": rivals.BoostedQuantile,
    "more inputs": partial(rivals.BoostedQuantile, inputs=rivals.of_x_distance_and_prediction),
    "network": rivals.QuantileNetwork,
    "mean": rivals.MeanErrorPredictor,
}


@pytest.mark.parametrize("rival", LEARNED.values(), ids=LEARNED)
def test_a_heteroscedastic_quantile_is_recovered(rival):
    """|y| is (0.1 + x) |N(0, 1)|, whose 0.9 quantile is 1.645 (0.1 + x)."""
    x, y = heteroscedastic(3000)
    new, truth = heteroscedastic(3000, seed=1)
    error_hat = rival(of_zero(), quantile=0.9).fit(x, y).predict(new).error_hat
    assert coverage(abs(truth), error_hat) == pytest.approx(0.9, abs=0.025)
    assert np.median(abs(error_hat / (0.1645 + 1.645 * new) - 1)) < 0.1


# Conformal factors


def test_the_conformal_rank_by_hand():
    """The 0.95 quantile of 19 errors is the 19th smallest, of 99 errors the 95th smallest."""
    assert rivals.conformal_factor(np.arange(1.0, 20), quantile=0.95) == 19
    assert rivals.conformal_factor(np.arange(1.0, 100), quantile=0.95) == 95
    with pytest.raises(ValueError, match=r"18 errors give no finite factor; use at least 19"):
        rivals.conformal_factor(np.arange(18.0), quantile=0.95)
    error, weight = np.arange(1.0, 41.0), np.repeat([3.0, 1.0], 20)
    # The level is 21 / 40 with 41 * 0.5 rounded up, and 14 weights of 3 have 42 of the total of 80.
    assert rivals.conformal_factor(error, quantile=0.5, weight=weight) == 14
    assert rivals.conformal_factor(np.stack([error, error], 1), error, 0.5).tolist() == [1, 1]
    # Repeated inputs with different outputs: the scale is zero and the error is not.
    with pytest.raises(ValueError, match=r"in 1 of 1 output coordinates .* remove repeated inputs"):
        rivals.conformal_factor(error, 0 * error, 0.9)


def test_split_conformal_bounds_each_coordinate_by_held_out_errors(problem):
    seen, y = [], np.stack([problem.y, 10 * problem.y], axis=1)

    def train(x, y):
        seen.append(x)
        return train_zero(x, y)

    bound = rivals.SplitConformal(train, 0.9, 0.25).fit(problem.x, y).predict(problem.queries)
    held_out = ~(problem.x[:, None] == seen[0]).all(axis=2).any(axis=1)
    assert held_out.sum() == 30
    expected = np.sort(abs(y[held_out]), axis=0)[27]  # ceil(31 * 0.9) is 28
    np.testing.assert_array_equal(bound.error_hat, np.broadcast_to(expected, (40, 2, 1)))


def test_the_constant_is_the_quantile_of_all_held_out_errors():
    x, y = bump()
    bound = rivals.Constant(of_zero(), 0.9).fit(x, y).predict(5 * x)
    np.testing.assert_array_equal(bound.error_hat, np.sort(y, axis=0)[[80]].repeat(90, axis=0))


def crepes_half_width(difficulty, residuals, queries):
    """Half width of crepes' normalised intervals, with leave-one-out difficulties while calibrating."""
    regressor = ConformalRegressor().fit(residuals, sigmas=difficulty.apply())
    sigmas = difficulty.apply(queries)
    interval = regressor.predict_int(np.zeros(len(queries)), sigmas=sigmas, confidence=0.9)
    return (interval[:, 1:] - interval[:, :1]) / 2


def test_local_scales_agree_with_crepes():
    """One input dimension, so that crepes' scaling and ours order neighbours alike; leave-one-out folds."""
    (x, y), (queries, _) = heteroscedastic(80), heteroscedastic(30, seed=1)
    known = DifficultyEstimator().fit(X=x, k=7, beta=0, oob=True)
    rival = rivals.KNNDistanceConformal(of_zero(folds=LeaveOneOut(), n_support=7), quantile=0.9)
    error_hat = rival.fit(x, y).predict(queries).error_hat
    np.testing.assert_allclose(error_hat, crepes_half_width(known, y[:, 0], queries), rtol=1e-6)
    share = 0.02 * abs(y).mean()
    known = DifficultyEstimator().fit(X=x, residuals=y[:, 0], k=7, beta=share, oob=True)
    estimator = of_zero(folds=LeaveOneOut())
    rival = rivals.KNNResidualConformal(estimator, quantile=0.9, n_neighbors=7, beta=0.02).fit(x, y)
    expected = crepes_half_width(known, y[:, 0], queries)
    np.testing.assert_allclose(rival.predict(queries).error_hat, expected, rtol=1e-6)


def test_the_spline_scale_is_the_difference_between_surrogate_and_spline():
    x = np.linspace(-1, 1, 60)[:, None]
    rival = rivals.SplineScaledConformal(of_zero(), 0.9).fit(x, 3 * x)
    error_hat = rival.predict(np.array([[-0.5], [0.0], [0.5]])).error_hat
    # The spline is the line itself, and the surrogate is 0.
    gap = np.array([[1.5], [0.0], [1.5]]) + np.sort(3 * abs(x), axis=0)[29]
    np.testing.assert_allclose(error_hat / gap, (error_hat / gap)[:1].repeat(3, 0), rtol=1e-5)


def test_cv_plus_is_that_of_mapie():
    rng, state = np.random.default_rng(2), np.random.get_state()  # noqa: NPY002
    x = rng.uniform(-1, 1, (117, 1))
    y = np.sin(4 * x[:, 0]) + 0.2 * rng.standard_normal(117)
    queries, folds = np.linspace(-1.5, 1.5, 40)[:, None], KFold(5, shuffle=True, random_state=0)
    cubic = make_pipeline(PolynomialFeatures(3), LinearRegression())
    theirs = CrossConformalRegressor(cubic, confidence_level=0.9, cv=folds)
    _, interval = theirs.fit_conformalize(x, y).predict_interval(queries)
    np.random.set_state(state)  # noqa: NPY002 - which MAPIE draws from
    recipe = RememberedTraining(lambda x, y: clone(cubic).fit(x, y).predict)
    surrogate = recipe(x, y)
    ours = rivals.CVPlus(surrogate, recipe, 0.9, folds).fit(x, y).predict(queries)
    reach = abs(interval[:, :, 0] - surrogate(queries)[:, None]).max(axis=1)
    np.testing.assert_allclose(ours.error_hat, reach)


# Gaussian process


def test_a_process_agrees_with_scikit_learn():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 2)) * [1, 5] + [0, 3]
    y = np.sin(2 * x[:, :1]) + 0.1 * x[:, 1:] + 0.1 * rng.normal(size=(60, 1))
    queries = rng.normal(size=(20, 2)) * [1.5, 7]
    process = rivals.GaussianProcess().fit(
        x, np.hstack([x[:, 1:] ** 2, y])
    )  # two independent processes
    mean, scale = x.mean(axis=0), x.std(axis=0)
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    reference = GaussianProcessRegressor(kernel, alpha=0, normalize_y=True)
    reference.fit((x - mean) / scale, y[:, 0])
    expected, deviation = reference.predict((queries - mean) / scale, return_std=True)
    likelihood = reference.log_marginal_likelihood_value_
    assert float(process.log_likelihood_[1]) == pytest.approx(likelihood, abs=0.02)
    bound = process.predict(queries)
    np.testing.assert_allclose(bound.prediction[:, 1], expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(bound.error_hat[:, 1], 1.96 * deviation, rtol=0.03)
    noise_free = rivals.GaussianProcess(1e-8).fit(x[:, :1], x[:, :1] ** 2)
    assert float(noise_free.ratio_[0] * noise_free.signal_[0]) == pytest.approx(1e-8, rel=1e-3)


# Dropout and ensembles


def test_dropout_before_a_linear_layer_has_the_known_spread():
    """A sum of x_i b_i / (1 - p) with b_i Bernoulli has mean sum x_i and variance sum x_i^2 p / (1 - p)."""

    def make_network():
        layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 1, bias=False))
        nn.init.ones_(layers[1].weight)
        return layers

    x, n_passes = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=np.float32), 4000
    # A step too small to move anything: the weights stay one.
    recipe = geoq.TrainNetwork(make_network, training=geoq.Training(n_steps=1, learning_rate=1e-30))
    bound = rivals.MCDropout(recipe, n_passes=n_passes).fit(x, x[:, :1]).predict(x)
    variance = (x**2).sum(axis=1, keepdims=True) * 0.1 / 0.9
    off = abs(bound.prediction - x.sum(axis=1, keepdims=True))
    assert (off <= 4 * np.sqrt(variance / n_passes)).all()
    np.testing.assert_allclose(bound.error_hat, 1.96 * np.sqrt(variance), rtol=0.08)


def test_dropout_is_reproducible_and_changes_dropout_layers_only():
    def make_network():
        return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    x = np.linspace(-1, 1, 40)[:, None]
    rival = rivals.MCDropout(geoq.TrainNetwork(make_network, training=QUICK), n_passes=3).fit(x, x)
    before = rival.surrogate_.network[1].running_mean.clone()
    once, twice = rival.predict(x + 5), rival.predict(x + 5)
    np.testing.assert_array_equal(once.error_hat, twice.error_hat)
    assert once.error_hat.max() > 0
    assert not any(module.training for module in rival.surrogate_.network.modules())
    assert (rival.surrogate_.network[1].running_mean == before).all()


def test_an_ensemble_is_the_mean_and_the_unbiased_deviation_of_its_members():
    members = np.random.default_rng(0).normal(size=(7, 5, 2))
    mean, deviation = spread(iter(members))
    np.testing.assert_allclose(mean, members.mean(axis=0))
    np.testing.assert_allclose(deviation, members.std(axis=0, ddof=1))

    def returning(seed):
        """A recipe whose surrogate returns its seed."""
        train = partial(lambda seed, x, y: lambda x: np.full((len(x), 1), float(seed)), seed)
        train.with_seed = returning
        return train

    ensembles = (rivals.DeepEnsemble(returning(0), 4, seed) for seed in (0, 0, 1))
    one, same, other = (ensemble.fit([0], [0]).predict([0]) for ensemble in ensembles)
    assert one == same != other
    x = np.linspace(-1, 1, 40)[:, None]
    recipe = geoq.TrainNetwork(partial(geoq.MLP, 1, 1, hidden=(8,)), training=QUICK)
    # Networks that are trained together have different seeds, too.
    assert rivals.DeepEnsemble(recipe, 3).fit(x, x).predict(x).error_hat.min() > 0


def test_a_calibrated_spread_is_the_spread_times_the_quantile_of_held_out_ratios():
    sizes = []

    class Proportional(rivals.DeepEnsemble):
        """Predicts 0 with the spread |x|, and counts the rows of each fit."""

        def fit(self, x, y):
            sizes.append(len(x))
            return self

        def predict(self, x):
            return rivals.Bound(0 * x, abs(x))

    x = np.random.default_rng(1).uniform(1, 2, (100, 1))
    ratio = np.linspace(0.02, 2, 100)[:, None]
    rival = rivals.CalibratedSpread(Proportional(None), 0.9, geoq.RandomFolds(5), beta=0.0)
    bound = rival.fit(x, ratio * x).predict(3 * x)
    # The 91st of 100 ratios: 101 * 0.9 rounded up.
    np.testing.assert_allclose(bound.error_hat, ratio[90] * 3 * x)
    assert sizes == [80] * 5 + [100]


def test_remembered_training_trains_each_subset_once(problem):
    calls = []

    def train(x, y):
        calls.append(len(x))
        return problem.train(x, y)

    remembered = RememberedTraining(train)
    estimator = geoq.GeoQ(None, remembered, folds=geoq.RandomFolds(4))
    for rival in (rivals.KNNDistanceConformal, rivals.KNNResidualConformal):
        rival(estimator).fit(problem.x, problem.y)
    assert calls == [120, 90, 90, 90, 90]
    remembered(problem.x, problem.y + 1)
    assert calls[5:] == [120]


def test_the_anchor_error_and_the_distance_can_stand_alone(problem):
    region = rivals.DistanceRegion(quantile=0.8)
    estimator = geoq.GeoQ(None, problem.train, bound_model=rivals.AnchorError(), safe_region=region)
    answer = estimator.fit(problem.x, problem.y).assess(problem.queries)
    np.testing.assert_array_equal(answer.error_hat, answer.anchor_error)
    tuples = estimator.fitted_.tuples
    distance = np.sort(tuples.relation.support_distance[tuples.interpolating])
    threshold = distance[int(np.ceil(0.8 * len(distance))) - 1]
    np.testing.assert_array_equal(answer.safe, answer.support_distance <= threshold)
