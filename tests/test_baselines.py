from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import beta
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import nn
from torch.testing import assert_close

from geoq import (
    Training,
    TrainNetwork,
)
from geoq.baselines import DeepEnsemble, GaussianProcess, MCDropout, SplitConformal
from geoq.baselines.bound import spread
from geoq.baselines.conformal import conformal_quantile
from geoq.metrics import coverage
from geoq.nets.mlp import MLP

QUICK = Training(n_steps=50, batch_size=16, check_every=25)


def zero(x):
    return 0 * x[:, :1]


def train_zero(x, y):
    """The surrogate that answers 0, so that the error is |y|."""
    del x, y
    return zero


class Recipe:
    """Least squares; the seed decides only how far the answer is shifted."""

    def __init__(self, train, shift=0.0):
        self.train, self.shift = train, shift

    def __call__(self, x, y):
        surrogate = self.train(x, y)
        return lambda x: surrogate(x) + self.shift

    def with_seed(self, random_state):
        return Recipe(self.train, self.shift and self.shift * random_state)


def linear_with_dropout(rate, n_inputs):
    layers = nn.Sequential(nn.Dropout(rate), nn.Linear(n_inputs, 1, bias=False))
    nn.init.ones_(layers[1].weight)
    return layers


# Gaussian process


def correlated(x, length_scale):
    return np.exp(-((x - x.T) ** 2) / (2 * length_scale**2))


def test_a_process_covers_data_drawn_from_its_own_prior():
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 2, size=(120, 1))
    covariance = 4 * correlated(x, 0.4) + 0.01 * np.eye(120)
    y = np.linalg.cholesky(covariance) @ generator.normal(size=(120, 40))
    bound = GaussianProcess().fit(x[:60], y[:60]).predict(x[60:])
    covered = coverage(abs(y[60:] - bound.prediction), bound.error_hat)
    # 40 draws of 60 dependent points: the standard error is about 0.01
    assert covered == pytest.approx(0.95, abs=0.03)


def test_a_process_agrees_with_scikit_learn():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(60, 2)) * [1, 5] + [0, 3]
    y = np.sin(2 * x[:, :1]) + 0.1 * x[:, 1:] + 0.1 * generator.normal(size=(60, 1))
    queries = generator.normal(size=(20, 2)) * [1.5, 7]
    process = GaussianProcess().fit(x, y)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    reference = GaussianProcessRegressor(kernel, alpha=0, normalize_y=True)
    reference.fit((x - mean) / scale, y[:, 0])
    expected, deviation = reference.predict((queries - mean) / scale, return_std=True)
    likelihood = reference.log_marginal_likelihood_value_
    assert float(process.log_likelihood_[0]) == pytest.approx(likelihood, abs=0.02)
    bound = process.predict(queries)
    np.testing.assert_allclose(bound.prediction[:, 0], expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(bound.error_hat[:, 0], 1.96 * deviation, rtol=0.03)


def test_coordinates_have_independent_processes(problem):
    fields = torch.stack([problem.y[:, 0], problem.x[:, 0].sin()], dim=1)
    together = GaussianProcess().fit(problem.x, fields).predict(problem.queries)
    for j in range(2):
        alone = GaussianProcess().fit(problem.x, fields[:, j]).predict(problem.queries)
        assert_close(together.prediction[:, j], alone.prediction)
        assert_close(together.error_hat[:, j], alone.error_hat)


def test_noise_free_data_attain_the_noise_bound():
    x = np.linspace(0, 1, 30)[:, None]
    coarse, fine = (
        GaussianProcess(bound).fit(x, np.sin(6 * x)) for bound in (1e-3, 1e-8)
    )
    for process, least in ((coarse, 1e-3), (fine, 1e-8)):
        noise = float(process.ratio_ * process.signal_)
        assert noise == pytest.approx(least, rel=1e-3)
    errors = [
        abs(p.predict(x).prediction - np.sin(6 * x)).max() for p in (coarse, fine)
    ]
    assert errors[1] < errors[0] / 10


def test_a_constant_output_is_predicted_exactly():
    x = np.linspace(0, 1, 20)[:, None]
    bound = GaussianProcess().fit(x, np.full((20, 1), 3.0)).predict(x)
    np.testing.assert_allclose(bound.prediction, 3)
    assert bound.error_hat.max() < 0.01 * 3


def test_a_process_refuses_invalid_settings_and_inputs(problem):
    with pytest.raises(ValueError, match="noise_lower_bound=0"):
        GaussianProcess(0.0).fit(problem.x, problem.y)
    with pytest.raises(ValueError, match="one distinct point in 4 rows"):
        GaussianProcess().fit(np.ones((4, 1)), np.ones(4))
    fitted = GaussianProcess().fit(problem.x[:20], problem.y[:20])
    with pytest.raises(ValueError, match=r"1 numbers per row, but .* fitted on 2"):
        fitted.predict(problem.queries[:, :1])


# MC dropout


def test_dropout_before_a_linear_layer_has_the_known_spread():
    """A sum of x_i b_i / (1 - p) with b_i Bernoulli has mean sum x_i and variance sum x_i^2 p / (1 - p)."""
    x, rate, n_passes = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), 0.1, 4000
    # a step too small to move anything: the weights stay one
    still = Training(n_steps=1, learning_rate=1e-30)
    recipe = TrainNetwork(partial(linear_with_dropout, rate, 3), training=still)
    bound = MCDropout(recipe, n_passes=n_passes).fit(x, x[:, :1]).predict(x)
    variance = (x**2).sum(dim=1, keepdim=True) * rate / (1 - rate)
    standard_error = (variance / n_passes).sqrt()
    assert (
        (bound.prediction - x.sum(dim=1, keepdim=True)).abs() <= 4 * standard_error
    ).all()
    assert_close(bound.error_hat, 1.96 * variance.sqrt(), rtol=0.08, atol=0)


def test_dropout_is_reproducible_and_leaves_the_network_in_eval_mode():
    x = torch.linspace(-1, 1, 40)[:, None].double().numpy()
    recipe = TrainNetwork(partial(MLP, 1, 1, hidden=(8,), dropout=0.1), training=QUICK)
    baseline = MCDropout(recipe, n_passes=5).fit(x, x)
    once, twice = baseline.predict(x), baseline.predict(x)
    np.testing.assert_array_equal(once.error_hat, twice.error_hat)
    assert once.error_hat.max() > 0
    assert isinstance(once.prediction, np.ndarray)
    assert not any(module.training for module in baseline.surrogate_.network.modules())


def test_dropout_does_not_change_normalization_layers():
    x = torch.linspace(-1, 1, 40)[:, None]

    def make_network():
        return nn.Sequential(
            nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    baseline = MCDropout(TrainNetwork(make_network, training=QUICK), n_passes=3).fit(
        x, x
    )
    before = baseline.surrogate_.network[1].running_mean.clone()
    baseline.predict(x + 5)
    assert torch.equal(baseline.surrogate_.network[1].running_mean, before)


def test_a_network_without_dropout_is_refused(problem):
    x = torch.linspace(-1, 1, 40)[:, None]
    for rate in (None, 0.0):
        layers = [] if rate is None else [nn.Dropout(rate)]
        recipe = TrainNetwork(
            lambda layers=layers: nn.Sequential(nn.Linear(1, 1), *layers),
            training=QUICK,
        )
        with pytest.raises(
            ValueError, match="no dropout layer with a probability above 0"
        ):
            MCDropout(recipe).fit(x, x)
    with pytest.raises(TypeError, match="has no attribute network"):
        MCDropout(problem.train).fit(problem.x, problem.y)
    with pytest.raises(ValueError, match="n_passes=1"):
        MCDropout(problem.train, n_passes=1).fit(problem.x, problem.y)


# Deep ensemble


def test_spread_is_the_mean_and_the_unbiased_deviation():
    members = torch.randn(7, 5, 2, generator=torch.Generator().manual_seed(0)).double()
    mean, deviation = spread(iter(members))
    assert_close(mean, members.mean(dim=0))
    assert_close(deviation, members.std(dim=0, correction=1))


def test_identical_members_have_no_spread(problem):
    ensemble = DeepEnsemble(Recipe(problem.train), 4).fit(problem.x, problem.y)
    bound = ensemble.predict(problem.queries)
    assert_close(bound.error_hat, torch.zeros_like(bound.error_hat))
    assert_close(bound.prediction, problem.train(problem.x, problem.y)(problem.queries))


def test_members_have_different_reproducible_seeds(problem):
    def seeds(random_state):
        recipe = Recipe(problem.train, shift=1.0)
        members = (
            DeepEnsemble(recipe, 3, random_state).fit(problem.x, problem.y).members_
        )
        plain = problem.train(problem.x, problem.y)(problem.queries[:1])
        return {round(float(m(problem.queries[:1]) - plain)) for m in members}

    assert len(seeds(0)) == 3
    assert seeds(0) == seeds(0)
    assert not seeds(0) & seeds(1)


def test_networks_of_an_ensemble_differ():
    x = torch.linspace(-1, 1, 40)[:, None]
    recipe = TrainNetwork(partial(MLP, 1, 1, hidden=(8,)), training=QUICK)
    assert DeepEnsemble(recipe, 3).fit(x, x).predict(x).error_hat.min() > 0


def test_an_ensemble_refuses_one_member_and_recipes_without_a_seed(problem):
    with pytest.raises(ValueError, match="n_members=1"):
        DeepEnsemble(Recipe(problem.train), 1).fit(problem.x, problem.y)
    with pytest.raises(TypeError, match=r"without with_seed"):
        DeepEnsemble(problem.train, 3).fit(problem.x, problem.y)


# Split conformal


def test_the_conformal_rank_by_hand():
    """The 0.95 quantile of 19 scores is the 19th smallest, of 99 scores the 95th smallest."""
    assert conformal_quantile(torch.arange(1.0, 20), 0.95) == 19
    assert conformal_quantile(torch.arange(1.0, 100), 0.95) == 95


def test_too_few_scores_are_refused():
    with pytest.raises(ValueError, match=r"18 calibration scores .* at least 19"):
        conformal_quantile(torch.arange(18.0), 0.95)


def test_split_conformal_has_its_guaranteed_coverage():
    """Coverage given the split is Beta(k, n + 1 - k) for continuous errors, with mean k / (n + 1) >= tau."""
    n_repeats, n_calibration, quantile = 400, 20, 0.9
    generator = np.random.default_rng(0)
    covered = []
    for repeat in range(n_repeats):
        x = generator.normal(size=(100 + 50, 1))
        y = x + (0.2 + abs(x)) * generator.standard_t(3, size=x.shape)
        baseline = SplitConformal(lstsq, quantile, 0.2, random_state=repeat).fit(
            x[:100], y[:100]
        )
        bound = baseline.predict(x[100:])
        covered.append(coverage(abs(y[100:] - bound.prediction), bound.error_hat))
    rank = 19  # ceil(21 * 0.9)
    expected = rank / (n_calibration + 1)
    between = beta(rank, n_calibration + 1 - rank).var()
    within = expected * (1 - expected) / 50
    standard_error = ((between + within) / n_repeats) ** 0.5
    assert np.mean(covered) == pytest.approx(expected, abs=4 * standard_error)


def lstsq(x, y):
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    return lambda x: x @ weights


def test_split_conformal_bounds_each_coordinate_by_held_out_errors(problem):
    seen = []

    def train(x, y):
        del y
        seen.append(x)
        return lambda x: torch.zeros_like(x).reshape(len(x), 2, 1)

    y = torch.stack([problem.y, 10 * problem.y], dim=1)
    baseline = SplitConformal(train, 0.9, 0.25).fit(problem.x, y)
    (trained_on,) = seen
    held_out = torch.tensor(
        [not bool((trained_on == row).all(dim=1).any()) for row in problem.x]
    )
    assert int(held_out.sum()) == 30
    expected = conformal_quantile(y[held_out.to(y.device)].abs(), 0.9)
    error_hat = baseline.predict(problem.queries).error_hat
    assert_close(error_hat, expected.expand(40, 2, 1))


def test_split_conformal_refuses_too_small_splits(problem):
    with pytest.raises(
        ValueError, match=r"holds out 12 of 120 rows, but .* needs at least 19"
    ):
        SplitConformal(problem.train, 0.95, 0.1).fit(problem.x, problem.y)
    with pytest.raises(ValueError, match="calibration_fraction=1"):
        SplitConformal(problem.train, 0.95, 1.0).fit(problem.x, problem.y)


@pytest.mark.parametrize(
    "baseline",
    [
        GaussianProcess(),
        SplitConformal(train_zero),
        DeepEnsemble(Recipe(train_zero)),
        MCDropout(train_zero),
    ],
    ids=lambda baseline: type(baseline).__name__,
)
def test_a_baseline_refuses_unequal_rows_and_early_questions(baseline, problem):
    with pytest.raises(NotFittedError, match="call fit"):
        baseline.predict(problem.queries)
    with pytest.raises(ValueError, match="x has 120 rows and y has 119"):
        baseline.fit(problem.x, problem.y[1:])
