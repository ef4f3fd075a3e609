"""Attacks by untidy code of the user: each ends in a refusal, or in the answer that tidy code gives."""

import copy
import warnings

import numpy as np
import pytest
import torch
from henon import STEP, TRAINING, analogue, small
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor
from torch import nn

from geoq import (
    MLP,
    DistanceRegion,
    GeoQ,
    RandomFolds,
    RolloutGeoQ,
    StandardizedMetric,
    Training,
    TrainNetwork,
    TwoLawIncrement,
    identity,
)
from geoq.surrogate import evaluate

X = np.random.default_rng(0).uniform(-1, 1, (120, 2))
QUERIES = np.random.default_rng(1).uniform(-1, 1, (50, 2))
FOLDS = RandomFolds(3)


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


def rough(x):
    """A surrogate with an error of about a tenth."""
    return 0.9 * truth(x)


Y = truth(X)


def fit(surrogate, train_surrogate=None, x=X, y=Y, **settings):
    settings = {"folds": FOLDS} | settings
    return GeoQ(surrogate, train_surrogate, **settings).fit(x, y)


# Surrogates whose answers depend on more than the query.


class Buffer:
    """A wrapper that returns the same memory at every call."""

    def __init__(self):
        self.memory = np.empty(2**22)

    def __call__(self, x):
        answer = self.memory[: len(x)]
        answer[:] = rough(x)
        return answer


def batch_norm(x):
    return nn.BatchNorm1d(2, track_running_stats=False, affine=False).eval()(x)[:, 0]


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (lambda x: truth(x - x.mean(0)), "in another batch"),
        (lambda x: np.sort(rough(x)), "the other rows or on their order"),
        (lambda x: rough(x) + len(x) / 100, "in another batch"),
        (lambda x: batch_norm(torch.from_numpy(x)).numpy(), "running statistics"),
        (
            lambda x: rough(x) + np.random.default_rng().normal(size=len(x)),
            "two answers to the same inputs",
        ),
        (lambda x: np.asarray(rough(x).squeeze()), "for 1 inputs"),
    ],
    ids=["centred", "sorted", "counted", "BatchNorm", "random", "squeezed"],
)
def test_answers_that_depend_on_more_than_the_query_are_refused(surrogate, message):
    trainings = []

    def train(x, y):
        trainings.append(len(x))
        return rough

    with pytest.raises((ValueError, TypeError), match=message):
        fit(surrogate, train)
    assert not trainings
    with pytest.raises((ValueError, TypeError), match=message):
        fit(None, lambda x, y: surrogate)


def test_a_representation_that_draws_random_numbers_is_refused():
    dropout = nn.Dropout(0.5)
    with (
        torch.random.fork_rng(),
        pytest.raises(ValueError, match="representation gave"),
    ):
        fit(
            lambda x: x[:, 0],
            x=torch.from_numpy(X),
            y=torch.from_numpy(Y),
            representation=lambda x: dropout(x),
        )


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_a_float32_network_rounds_without_being_refused(n_outputs, offset):
    """Products of matrices round differently in batches of different sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = MLP(2, n_outputs, hidden=(64, 64)).eval()
    x = torch.from_numpy(X).float()
    y = (torch.from_numpy(Y)[:, None] + offset).float().expand(-1, n_outputs)
    fit(lambda x: network(x) + offset, x=x, y=y)


def test_an_output_buffer_that_is_used_again_gives_the_same_answers():
    n = 2**20
    x = np.zeros((n, 8))
    x[:, 0] = np.linspace(-1, 1, n)
    assert np.array_equal(evaluate(Buffer(), x, "surrogate").numpy(), rough(x))
    np.testing.assert_array_equal(
        fit(Buffer()).bound(QUERIES), fit(rough).bound(QUERIES)
    )


# Code that works in place.


def clipped(x):
    return rough(np.clip(x, -0.5, 0.5, out=x))


def centred(x, y):
    x -= x.mean(0)
    y -= y.mean()
    return rough


def in_place_error(y, y_hat):
    y -= y_hat
    return np.abs(y, out=y)


@pytest.mark.parametrize(
    ("attack", "tidy"),
    [
        (
            {"surrogate": clipped},
            {"surrogate": lambda x: rough(np.clip(x, -0.5, 0.5))},
        ),
        (
            {"surrogate": None, "train_surrogate": centred},
            {"surrogate": None, "train_surrogate": lambda x, y: rough},
        ),
        (
            {"surrogate": rough, "error_functional": in_place_error},
            {"surrogate": rough},
        ),
        (
            {"surrogate": rough, "representation": lambda x: np.tanh(x, out=x)},
            {"surrogate": rough, "representation": np.tanh},
        ),
    ],
    ids=["surrogate", "recipe", "error functional", "representation"],
)
def test_code_that_works_in_place_gives_the_answers_of_tidy_code(attack, tidy):
    x, y, queries = X.copy(), Y.copy(), QUERIES.copy()
    attacked = fit(**attack, x=x, y=y).assess(queries)
    expected = fit(**tidy).assess(QUERIES)
    for array, before in ((x, X), (y, Y), (queries, QUERIES)):
        np.testing.assert_array_equal(array, before)
    np.testing.assert_array_equal(attacked.error_hat, expected.error_hat)
    np.testing.assert_array_equal(attacked.prediction, expected.prediction)


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("which", ["x", "y"])
def test_changed_data_are_refused(kind, which):
    data = {"x": kind(X), "y": kind(Y)}

    def train(x, y):
        data[which][7] += 1
        return lambda x: x[:, 0]

    with pytest.raises(ValueError, match=f"{which} was changed during fit.*on a copy"):
        fit(lambda x: x[:, 0], train, **data)


def test_data_with_a_stride_of_zero_are_accepted():
    column = torch.tensor(X[:, 0]).as_strided((len(X), 1), (1, 0))
    geoq = fit(None, lambda x, y: lambda x: 0.9 * x, column, column)
    assert geoq.assess(column).error_hat.isfinite().all()


# One model object for all folds.


def test_a_model_object_that_all_folds_share_is_refused():
    model = GaussianProcessRegressor(optimizer=None, alpha=1e-6)
    with pytest.raises(ValueError, match="build the model inside"):
        fit(None, lambda x, y: model.fit(x, y).predict)
    deployed = copy.deepcopy(model.fit(X, Y)).predict
    with pytest.raises(ValueError, match="a fold surrogate changed when the next"):
        fit(deployed, lambda x, y: model.fit(x, y).predict)


@pytest.mark.parametrize("n_decays", [0, 1], ids=["together", "one by one"])
def test_a_network_that_all_folds_share_is_refused(n_decays):
    with torch.random.fork_rng():
        net = MLP(2, 1, hidden=(4,))
    training = Training(n_steps=4, check_every=2, n_decays=n_decays)
    with pytest.raises(ValueError, match="returned the same MLP twice"):
        fit(
            lambda x: rough(x)[:, None],
            TrainNetwork(lambda: net, training=training),
            y=Y[:, None],
        )
    with pytest.raises(TypeError, match=r"make_network\(\) returned a list"):
        TrainNetwork(lambda: [net], training=training)(X, Y[:, None])


def test_rollouts_refuse_a_model_object_that_all_folds_share():
    table = {}

    def train(segments):
        table["step"] = analogue(segments)
        return lambda x: table["step"](x)

    with pytest.raises(ValueError, match="a fold surrogate changed when the next"):
        small(STEP, train).fit(TRAINING)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: STEP(x - x.mean(0)), "in another batch"),
        (lambda x: STEP(x) + np.random.default_rng().normal(), "two answers"),
    ],
    ids=["centred", "random"],
)
def test_rollouts_refuse_steps_that_depend_on_more_than_the_state(step, message):
    with pytest.raises(ValueError, match=message):
        small(step, None).fit(TRAINING)
    with pytest.raises(ValueError, match=message):
        small(None, lambda segments: step).fit(TRAINING)


def test_rollouts_refuse_a_network_that_returned_to_training_mode():
    states = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    nn.init.constant_(network[0].weight, 0.25)
    nn.init.constant_(network[0].bias, 0.25)
    geoq = RolloutGeoQ(network, None, n_calibration=10, n_starts=10, n_support=5)
    geoq.fit(states)
    network.train()
    with pytest.raises(ValueError, match=r"call surrogate\.eval\(\) first"):
        geoq.assess(states[:3], 5)


# Own increment models, safe regions, references and metrics.


class Own:
    """An increment model that returns what a function of the features returns."""

    quantile = 0.95

    def __init__(self, answer, fitted=lambda self: self):
        self.answer, self.fitted = answer, fitted

    def fit(self, calibration):
        return self.fitted(self)

    def __call__(self, features):
        return self.answer(features)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Own(lambda f: f.support_distance[:, None]), r"shape \(8, 1\) for anchor"),
        (Own(lambda f: f.support_distance[:3]), r"shape \(3,\) for anchor errors"),
        (Own(lambda f: f.support_distance.numpy()), "return a floating-point tensor"),
        (Own(lambda f: f.support_distance.long()), "return a floating-point tensor"),
        (Own(lambda f: -1 - f.support_distance), "may_be_negative = True"),
        (Own(lambda f: f.support_distance * torch.nan), "Own returned nan"),
        (Own(lambda f: f.support_distance + torch.inf), "Own returned the increment"),
        (Own(None, fitted=lambda self: None), "end it with return self"),
        (Own(None, fitted=lambda self: Own), "end it with return self"),
    ],
    ids=["column", "few", "numpy", "long", "negative", "nan", "inf", "none", "class"],
)
def test_increments_that_cannot_be_added_to_the_anchor_errors_are_refused(
    model, message
):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(rough, increment_model=model)


def test_increments_are_checked_at_queries_too():
    wrong_later = Own(
        lambda f: f.support_distance if len(f) == 8 else -1 - f.support_distance
    )
    with pytest.raises(ValueError, match="increments are nonnegative"):
        fit(rough, increment_model=wrong_later).assess(QUERIES)
    tidy = Own(lambda f: f.support_distance.requires_grad_())
    assert (fit(rough, increment_model=tidy).bound(QUERIES) >= 0).all()


class OwnRegion:
    """A rule whose fitted region has these parts."""

    meaning = ("near", "far")

    def __init__(self, threshold=1.0, score=None, contains=None, meaning=meaning):
        self.threshold, self.meaning = threshold, meaning
        self.support_score = score or (lambda features: features.support_distance)
        self.contains = contains or (lambda score: score <= self.threshold)

    def fit(self, calibration):
        return self


class Unfinished:
    def fit(self, calibration):
        pass


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Unfinished(), "Unfinished.fit returned None"),
        (OwnRegion(threshold=np.nan), "threshold=nan; the threshold must be a number"),
        (OwnRegion(meaning="near"), "it must be two phrases"),
        (
            OwnRegion(score=lambda f: f.support_distance[:, None]),
            "support_score returned a tensor of shape",
        ),
        (
            OwnRegion(score=lambda f: f.support_distance * torch.nan),
            "support_score returned nan",
        ),
        (OwnRegion(contains=lambda s: s), "return a boolean tensor"),
        (OwnRegion(contains=lambda s: True), "contains returned a bool for"),
    ],
    ids=["none", "nan", "words", "column", "nan score", "scores", "one flag"],
)
def test_regions_without_one_score_and_one_flag_per_query_are_refused(region, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(rough, safe_region=region)


class OwnReference:
    def __init__(self, fitted):
        self.fitted = fitted

    def fit(self, outputs, quantile):
        return self.fitted


@pytest.mark.parametrize(
    ("fitted", "message"),
    [
        (None, "OwnReference.fit returned None"),
        (lambda p: p * torch.nan, "function returned scales of shape"),
        (lambda p: p[:3].abs(), r"function returned scales of shape \(3, 1\)"),
        (lambda p: p.abs() + torch.inf, "finite, nonnegative scale"),
    ],
    ids=["none", "nan", "few", "inf"],
)
def test_references_without_a_scale_for_each_error_are_refused(fitted, message):
    model = TwoLawIncrement(reference=OwnReference(fitted))
    with pytest.raises((ValueError, TypeError), match=message):
        fit(rough, increment_model=model)


class OwnMetric(StandardizedMetric):
    def fit(self, coordinates, points, outputs, predict):
        return None


class OwnCoordinates(StandardizedMetric):
    def coordinates(self, points):
        return None


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (OwnMetric(), "OwnMetric.fit returned NoneType; return a FittedMetric"),
        (OwnCoordinates(), r"OwnCoordinates\.coordinates returned NoneType"),
    ],
)
def test_metrics_that_return_nothing_are_refused(metric, message):
    with pytest.raises(TypeError, match=message):
        fit(rough, representation=metric)


class OwnScheme(Own):
    pass


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (OwnScheme(None, fitted=lambda self: None), "OwnScheme.fit returned None"),
        (OwnScheme(lambda f: f.support_distance), "one bound for each value"),
        (OwnScheme(lambda f: -1 - f.climatology), "a bound is nonnegative"),
    ],
    ids=["none", "shape", "negative"],
)
def test_schemes_without_a_bound_for_each_value_are_refused(scheme, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small(STEP, None, scheme=scheme).fit(TRAINING)


@pytest.mark.parametrize(
    ("error_functional", "message"),
    [
        (lambda y, y_hat: abs(y - y_hat).sum(keepdims=True), "one row per pair"),
        (lambda y, y_hat: y - y_hat, "take its absolute value"),
        (lambda y, y_hat: np.abs(y - y_hat) / 0, "must return finite numbers"),
        (lambda y, y_hat: np.abs(y - y_hat).astype(str), "must hold real numbers"),
    ],
    ids=["number", "signed", "inf", "text"],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_error_functionals_without_an_error_per_pair_are_refused(
    error_functional, message
):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(rough, error_functional=error_functional)


# Pairs that the surrogate or the calibration has seen.


def nearest(x, y):
    return KNeighborsRegressor(1).fit(x, y).predict


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ((X, Y), r"120 of 120 pairs equal pairs of fit \(x\[0\] and its y are row 0"),
        ((X[::-1].copy(), Y[::-1].copy()), r"x\[0\] and its y are row 119"),
        (
            (np.r_[QUERIES, X[5:7]], np.r_[truth(QUERIES), Y[5:7]]),
            r"2 of 52 pairs .*x\[50\] and its y are row 5",
        ),
    ],
    ids=["same", "reversed", "two"],
)
def test_pairs_of_fit_cannot_set_conformal_factors(tmp_path, pairs, message):
    geoq = fit(None, nearest)
    with pytest.raises(ValueError, match=message):
        geoq.conformalize(*pairs)
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    with pytest.raises(ValueError, match=message):
        loaded.conformalize(*pairs)


def test_repeated_measurements_can_set_conformal_factors():
    """The inputs of the pairs are calibration points, but they were measured again."""
    noise = np.random.default_rng(2).normal(scale=0.05, size=(3, 120))
    x, y = np.tile(X, (2, 1)), (Y + noise[:2]).reshape(-1)
    geoq = fit(None, nearest, x=x, y=y).conformalize(X, Y + noise[2])
    assert geoq.conformal_factors_.safe > 0


def test_a_conformal_factor_is_never_zero():
    geoq = fit(rough)
    geoq.surrogate_ = truth
    with pytest.warns(UserWarning, match="the conformal factor would be 0"):
        geoq.conformalize(QUERIES, truth(QUERIES))
    assert geoq.conformal_factors_.safe == 1
    assert geoq.describe().endswith(f"from {len(QUERIES)} pairs that were set aside.")


@pytest.mark.parametrize(
    "model",
    [
        GaussianProcessRegressor(alpha=1e-10, optimizer=None),
        DecisionTreeRegressor(random_state=0),
        KNeighborsRegressor(1),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_surrogate_on_its_own_training_data_gives_a_warning(model):
    with pytest.warns(UserWarning, match="as small as at points that a surrogate was"):
        fit(model.fit(X, Y).predict)
    # The same surrogate with new points, and a recipe, are tidy.
    with warnings.catch_warnings(action="error"):
        new = np.random.default_rng(3).uniform(-1, 1, (120, 2))
        fit(model.predict, x=new, y=truth(new))
        fit(None, lambda x, y: copy.deepcopy(model).fit(x, y).predict)


def test_tidy_code_gives_no_warning():
    with warnings.catch_warnings(action="error"):
        for settings in ({}, {"representation": identity}):
            fit(rough, lambda x, y: rough, safe_region=DistanceRegion(), **settings)
