"""What a user reaches for in the first hour: intervals, limits, targets over decades and labels."""

import re
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made import made_tuples
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor
from threadpoolctl import threadpool_info, threadpool_limits

from geoq import GeoQ, RandomFolds, default_folds, log_error, norm_error, relative_norm_error
from geoq.bounds.protocol import model_for
from geoq.core.plan import draw_folds
from geoq.metrics import pinball
from geoq.parts import (
    FieldBound,
    LabelBound,
    NoFactor,
    misclassification_values,
    probability_error_values,
)
from geoq.sklearn import GeoQRegressor

RNG = np.random.default_rng(0)
X, NEW = RNG.uniform(size=(400, 2)), RNG.uniform(size=(2000, 2))
FOLDS = RandomFolds(5)


def train(x, y):
    return LinearRegression().fit(x, y).predict


def within(answer, truth):
    return (answer.lower <= truth) & (truth <= answer.upper)


@pytest.fixture(scope="module")
def waits():
    """Exponential waiting times with the mean 2: a few long ones, none below 0, and a surrogate that knows the mean."""
    y, truth = (np.random.default_rng(i).exponential(2.0, size=n) for i, n in ((1, 400), (2, 2000)))
    settings = {"folds": FOLDS, "limits": (0, None)}
    return GeoQ(lambda x: 0 * x[:, 0] + 2, None, **settings).fit(X, y), truth


def test_lopsided_errors_have_intervals_with_two_equal_tails(waits):
    estimator, truth = waits
    answer = estimator.assess(NEW)
    above, below = (truth > answer.upper)[answer.safe], (truth < answer.lower)[answer.safe]
    assert within(answer, truth)[answer.safe].mean() == pytest.approx(0.95, abs=0.025)
    assert above.mean() == pytest.approx(0.025, abs=0.015)
    assert below.mean() == pytest.approx(0.025, abs=0.015)
    # The bound alone misses on one side only.
    assert ((truth < answer.prediction - answer.bound)[answer.safe]).mean() < 0.005
    assert (answer.upper - answer.prediction > 1.05 * answer.bound)[answer.safe].all()
    # Outside the data, an error can have either sign.
    far = estimator.assess(NEW[:5] + 9.0)
    assert not far.safe.any()
    assert_array_equal(far.upper, far.prediction + far.bound)


def test_the_levels_of_intervals_are_nested_and_the_guarantee_is_symmetric(waits, tmp_path):
    estimator, truth = waits
    answer = estimator.assess(NEW)
    ends = [answer.interval(level) for level in (0.5, 0.8, 0.95)]
    for level, (lower, upper) in zip((0.5, 0.8, 0.95), ends, strict=True):
        assert ((lower <= truth) & (truth <= upper)).mean() == pytest.approx(level, abs=0.04)
    assert (ends[0][1] < ends[1][1]).all()
    assert_array_equal(ends[2], (answer.lower, answer.upper))
    assert_array_equal(estimator.predict_interval(NEW, 0.8), ends[1])
    columns = answer.to_frame(levels=(0.8,)).columns
    assert [*columns[:6]] == ["prediction", "error_hat", "lower", "upper", "lower 0.8", "upper 0.8"]
    estimator.save(tmp_path / "waits.geoq")
    loaded = GeoQ.load(tmp_path / "waits.geoq", surrogate=estimator.surrogate)
    assert_array_equal(loaded.assess(NEW).lower, answer.lower)
    both = loaded.conformalize(NEW[:900], truth[:900]).assess(NEW[900:])
    symmetric = both.prediction + both.bound
    assert_array_equal(both.upper, symmetric)


def test_symmetric_errors_have_symmetric_intervals():
    y = X @ [1.0, 2.0] + 0.1 * np.random.default_rng(3).normal(size=400)
    answer = GeoQ(None, train, folds=FOLDS).fit(X, y).assess(NEW)
    assert_array_equal(answer.lower, answer.prediction - answer.error_hat)
    assert_array_equal(answer.upper, answer.prediction + answer.error_hat)


def test_neither_bounds_nor_intervals_exceed_the_limits():
    share = X[:, :1] * [1.0, 100.0]
    estimator = GeoQ(None, lambda x, y: Ridge(20.0).fit(x, y).predict, limits=(0, [1.0, 100.0]))
    answer = estimator.fit(X, share).assess(10 * NEW)
    assert (answer.lower >= 0).all()
    assert (answer.upper <= [1, 100]).all()
    farther = np.maximum(abs(answer.prediction), abs([1, 100] - answer.prediction))
    assert (answer.bound <= farther).all()
    assert (answer.bound == farther).any()
    assert (estimator.bounds(10 * NEW, (0.99,))[0.99] <= farther).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limits": (0.5, 1)}, r"limits=\(0.5, 1\), but y\[\d+\] is .* that all outputs respect"),
        ({"limits": (1, 0)}, r"limits=\(1, 0\) must be a pair \(low, high\) with low < high"),
        ({"limits": (0, np.nan)}, r"limits=\(0, nan\) must be a pair"),
        ({"limits": "09"}, "limits='09' must be a pair"),
        ({"limits": 3}, r"must be a pair \(low, high\)"),
        ({"limits": (0, 1), "error_functional": norm_error}, "norm_error is no difference of outp"),
        ({"error_functional": log_error}, r"log_error needs positive outputs, but y\[0\] is -"),
    ],
)
def test_unusable_limits_and_outputs_are_refused_before_any_training(settings, message):
    def never(x, y):
        raise AssertionError

    y = X[:, 0] - ("error_functional" in settings and "limits" not in settings)
    with pytest.raises(ValueError, match=message):
        GeoQ(None, never, **settings).fit(X, y)


@pytest.mark.parametrize(("rho", "y"), [(relative_norm_error, 1 + X[:, 0]), (norm_error, X**2)])
def test_errors_that_are_no_differences_of_outputs_have_no_interval(rho, y):
    answer = GeoQ(None, train, folds=FOLDS, error_functional=rho).fit(X, y).assess(NEW)
    with pytest.raises(TypeError, match="no interval of each output; use error_functional=absol"):
        _ = answer.lower
    assert "lower" not in answer.to_frame()


def decades(x, seed):
    noise = np.random.default_rng(seed).normal(size=len(x))
    return np.exp(18 * x[:, 0] + 0.1 * noise)


def train_logarithm(x, y):
    line = LinearRegression().fit(x, np.log(y))
    return lambda x: np.exp(line.predict(x))


def test_outputs_over_decades_have_a_warning_and_logarithmic_errors_cure_it():
    y, truth = decades(X, 4), decades(NEW, 5)
    with pytest.warns(UserWarning, match=r"ranges over 7\.\d decades.*error_functional=log_error"):
        plain = GeoQ(None, train_logarithm, folds=FOLDS).fit(X, y).assess(NEW)
    estimator = GeoQ(None, train_logarithm, folds=FOLDS, error_functional=log_error).fit(X, y)
    answer = estimator.assess(NEW)
    assert_allclose(answer.prediction, plain.prediction)
    assert_allclose(answer.upper / answer.prediction, np.exp(answer.bound))
    assert_allclose(answer.lower / answer.prediction, np.exp(-answer.bound))
    assert within(answer, truth).mean() > 0.93
    # The bound of absolute errors is too large for most of the outputs.
    assert (answer.upper - answer.lower < 0.1 * (plain.upper - plain.lower)).mean() > 0.5
    assert "(quantile level 0.95, of the logarithm)" in answer.reason(0)
    # The second opinion has the unit of y.
    assert_allclose(np.log(answer.second_opinion.prediction), 18 * NEW[:, 0], atol=0.2)
    # An error of logarithms is the absolute error of a model of log(y).
    same = GeoQ(None, train, folds=FOLDS).fit(X, np.log(y)).assess(NEW)
    assert_allclose(answer.bound, same.bound, rtol=1e-6)
    assert_array_equal(answer.safe, same.safe)


@pytest.mark.parametrize(
    ("n_trainings", "families"), [(15, [5, 5, 5]), (10, [5, 3, 2]), (8, [5, 3])]
)
def test_default_folds_exist_with_fewer_trainings(n_trainings, families):
    plan = draw_folds(default_folds(n_trainings=n_trainings), X)
    assert np.bincount(plan.family).tolist() == families
    with pytest.raises(ValueError, match=r"n_trainings=7, but 15, 10 or 8 trainings"):
        default_folds(n_trainings=7)


@pytest.mark.filterwarnings("ignore:n=", "ignore:A Gaussian process")
@pytest.mark.parametrize("n", range(1, 26))
def test_few_rows_are_calibrated_or_the_refusal_names_folds_that_work(n):
    x, y, settings = X[:n], X[:n] @ [1.0, 2.0] + 0.1 * NEW[:n, 0], {}
    for make in (partial(GeoQ, None, train), partial(GeoQRegressor, LinearRegression())):
        if n < 6:
            ways_out = r"folds=RandomFolds\((\d)\)\.$" if n > 1 else "give more data|minimum of 2"
            with pytest.raises(ValueError, match=ways_out) as raised:
                make().fit(x, y)
            if n == 1:
                continue
            settings["folds"] = RandomFolds(int(re.findall(ways_out, str(raised.value))[0]))
        assert make(**settings).fit(x, y).bound(x).shape == (n,)


def test_a_prefit_regressor_is_calibrated_on_new_rows_without_training():
    y = np.sin(5 * X[:, 0]) + X[:, 1]
    tree = DecisionTreeRegressor(max_depth=4, random_state=0).fit(X[:200], y[:200])
    model = GeoQRegressor(tree, prefit=True, folds=FOLDS).fit(X[200:], y[200:])
    plain = GeoQ(tree.predict, None, folds=FOLDS).fit(X[200:], y[200:])
    assert model.estimator_ is tree
    assert_array_equal(model.bound(NEW), plain.bound(NEW))
    with pytest.raises(NotFittedError, match="DecisionTreeRegressor"):
        GeoQRegressor(DecisionTreeRegressor(), prefit=True).fit(X, y)


def test_processes_give_the_answers_of_one_process():
    y = X[:, 0] ** 2
    one, two = (GeoQRegressor(Ridge(), folds=RandomFolds(3), n_jobs=n).fit(X, y) for n in (None, 2))
    assert_array_equal(one.bound(NEW[:9]), two.bound(NEW[:9]))


def test_trainings_on_few_rows_use_one_thread_of_openmp():
    seen = []

    def train_and_look(x, y):
        found = [p for p in threadpool_info() if p["user_api"] == "openmp"]
        seen.extend(p["num_threads"] for p in found if "torch" not in p["filepath"])
        return train(x, y)

    with threadpool_limits(2, user_api="openmp"):
        GeoQ(None, train_and_look, folds=RandomFolds(2)).fit(X, X[:, 0] ** 2)
        after = [p["num_threads"] for p in threadpool_info() if p["user_api"] == "openmp"]
    assert set(seen) == {1}
    assert 2 in after


def labels(x, seed):
    logit = 6 * np.sin(6 * x[:, 0]) + 0 * x[:, 1]
    draws = np.random.default_rng(seed).uniform(size=len(x))
    return (draws < 1 / (1 + np.exp(-logit))).astype(float)


def train_labels(x, y):
    return DecisionTreeClassifier(max_leaf_nodes=8, random_state=0).fit(x, y)


@pytest.mark.parametrize("probabilities", [False, True])
def test_errors_of_labels_and_probabilities_take_two_values_and_fit_says_so(probabilities):
    y, truth = labels(X, 6), labels(NEW, 7)

    def train_one(x, y):
        model = train_labels(x, y)
        return (lambda x: model.predict_proba(x)[:, 1]) if probabilities else model.predict

    name = "probability_error_values" if probabilities else "misclassification_values"
    with pytest.warns(UserWarning, match=rf"bound_model=LabelBound\(values={name}\)"):
        estimator = GeoQ(None, train_one, folds=FOLDS).fit(X, y)
    answer = estimator.assess(NEW)
    error = abs(truth - answer.prediction)
    p = answer.prediction
    values = np.stack([np.minimum(p, 1 - p), np.maximum(p, 1 - p)])
    assert np.isclose(answer.bound, values, atol=1e-6).any(axis=0).all()
    assert (error <= answer.bound + 1e-9).mean() > 0.93
    # The expected error is calibrated, and larger where the label is wrong.
    expected, wrong = estimator.expected_error(NEW), abs(truth - p) > 0.5
    assert expected.mean() == pytest.approx(error.mean(), abs=0.04)
    assert expected[wrong].mean() > 1.5 * expected[~wrong].mean()
    same = GeoQ(None, train_one, folds=FOLDS, bound_model=LabelBound(VALUES[probabilities]))
    assert_array_equal(same.fit(X, y).bound(NEW), answer.bound)
    assert (
        estimator.bound(NEW * [1.0, 1.4]).max() <= 1
    )  # beyond the range of an input that has no influence


VALUES = misclassification_values, probability_error_values


def test_numbers_and_fields_of_zeros_and_ones_have_their_own_bound_models():
    rng = np.random.default_rng(8)
    fields, wrong = (rng.uniform(size=(30, 1, 8, 8)) < p for p in (0.5, 0.1))
    parts = {"outputs": fields.astype(float), "prediction": (fields ^ wrong).astype(float)}
    tuples = made_tuples(wrong.astype(float), fields.astype(float), distance=np.ones(30), **parts)
    how = GeoQ(None, train)
    with pytest.warns(UserWarning, match=r"IndicatorBound\(values=misclassification_values\)"):
        assert type(model_for(how, tuples)).__name__ == "IndicatorBound"
    numbers = replace(tuples, predictions=tuples.predictions + 0.5)
    assert type(model_for(how, numbers)).__name__ == "FieldBound"
    chosen = GeoQ(None, train, bound_model=FieldBound())
    assert model_for(chosen, tuples) is chosen.bound_model


def test_fields_of_a_few_parameters_have_the_bound_with_the_smaller_held_out_loss():
    s, rng = np.linspace(0, 1, 80), np.random.default_rng(9)
    x, new = rng.uniform(size=(2, 80, 2))

    def field(p):
        return np.exp(-(((s - 0.3 - 0.4 * p[:, :1]) / 0.3) ** 2)) * (1 + p[:, 1:])

    with warnings.catch_warnings(action="ignore"):
        chosen = GeoQ(None, train, folds=FOLDS).fit(x, field(x))
        usual = GeoQ(None, train, folds=FOLDS, bound_model=FieldBound(NoFactor())).fit(x, field(x))
    answers = [estimator.assess(new) for estimator in (chosen, usual)]
    losses = [pinball(abs(field(new) - a.prediction), a.bound, 0.95) for a in answers]
    assert type(chosen.fitted_.bound).__name__ == "FittedTwoLaws"
    assert losses[0] < 0.7 * losses[1]
