"""Attacks by untidy numbers and code that must give the right answer, or a warning; most have an honest twin."""

import copy
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor

from geoq import GeoQ, RandomFolds, Region
from geoq.regions.region import PaperRegion
from geoq.regions.table_scores import SupportDistance
from geoq.surrogate import evaluate

X = np.random.default_rng(0).uniform(-1, 1, (120, 2))
NEW = np.random.default_rng(1).uniform(-1, 1, (50, 2))
GOOD = NEW[:7]


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


def rough(x):
    """A surrogate with an error of about a tenth."""
    return 0.9 * truth(x)


Y = truth(X)


def fit(surrogate=rough, recipe=None, x=X, y=Y, **settings):
    return GeoQ(surrogate, recipe, **{"folds": RandomFolds(3), **settings}).fit(x, y)


# Queries without an answer.


def careful(x):
    """A model that raises for inputs that are not finite, as scikit-learn's do, and that is nan in a corner."""
    assert np.isfinite(x).all()
    assert abs(x).max() < 1e100
    return np.where(x[:, 0] > 2, np.nan, rough(x))


FITTED = fit(careful)
UNUSABLE = {
    "nan": ([np.nan, 0.0], "input u is nan; replace it by a number"),
    "inf": ([0.0, np.inf], "input v is inf; replace it by a number"),
    "-inf": ([-np.inf, 0.0], "input u is -inf; replace it by a number"),
    "overflow": ([0.0, 1e200], r"input v is 1e\+200, which is too far from the data"),
    "answer": ([3.0, 0.0], "did not return finite numbers here; check their output"),
}


@pytest.mark.parametrize(("bad", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_query_has_no_bound_and_the_others_have_theirs(bad, reason):
    queries = np.insert(GOOD, 3, bad, axis=0)
    whole, without = FITTED.assess(queries), FITTED.assess(GOOD)
    for part in ("error_hat", "support_score", "anchor_distance", "prediction"):
        assert np.isnan(getattr(whole, part)[3]).all(), part
    assert not whole.safe[3]
    assert whole.anchors[3] == -1
    for part in ("error_hat", "safe", "support_score", "prediction", "anchors"):
        others = np.delete(getattr(whole, part), 3, axis=0)
        assert_allclose(others, getattr(without, part), rtol=1e-9)
    explained = whole.reason(3, names=["u", "v"])
    assert explained.startswith("query 3: no error bound, NOT safe, ")
    assert re.search(reason, explained)
    assert whole.reason(-5) == whole.reason(3).replace("query 3", "query -5")
    assert "1 without an answer" in repr(whole)
    assert "without" not in repr(without)
    assert_array_equal(FITTED.bound(queries), whole.error_hat)
    for bounds in FITTED.bounds(queries, (0.5, 0.9)).values():
        assert np.isnan(bounds).tolist() == [i == 3 for i in range(8)]
    assert np.isnan(FITTED.bound(np.array([bad, bad]))).all()
    assert not FITTED.assess(np.array([bad, bad])).safe.any()


def test_tensors_and_a_representation_that_is_not_finite():
    points = torch.from_numpy(X)
    settings = {"representation": lambda x: 1 / (x - 5), "safe_region": PaperRegion()}
    estimator = fit(lambda x: x[:, 0], x=points, y=points[:, 1], **settings)
    answer = estimator.assess(torch.tensor([[0.1, 0.2], [torch.nan, 0.0], [5.0, 0.0]]).double())
    assert answer.error_hat.isnan().tolist() == [False, True, True]
    assert not answer.safe[1:].any()


def test_an_expected_error_of_a_field_with_a_missing_pixel():
    class MeanError:
        def fit(self, tuples, quantile):
            return self

        def __call__(self, features):
            return features.anchor_error + 1

        def expected_error(self, features):
            return 0.5 * self(features)

    x = np.random.default_rng(0).normal(size=(60, 1, 8, 8))
    estimator = fit(lambda x: 0.9 * x, x=x, y=x, bound_model=MeanError())
    queries = x[:3].copy()
    queries[1, 0, 2, 5] = np.nan
    expected = estimator.expected_error(queries)
    assert np.isnan(expected).all(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert "input 0, 2, 5 is nan" in estimator.assess(queries).reason(1)


# Numbers in extreme units, and inputs that never varied.

REGIONS = {
    "default": {},
    "distance": {"safe_region": Region((SupportDistance(),))},
    "paper": {"safe_region": PaperRegion(), "representation": lambda x: x},
}


@pytest.mark.parametrize("constant", [0.0, 1e-12, 300.0, 1e10])
@pytest.mark.parametrize("settings", REGIONS.values(), ids=REGIONS)
def test_a_constant_input_that_changes_is_not_safe(constant, settings):
    """Its rounding is, and so is the constant itself."""
    estimator = fit(x=np.column_stack([X, np.full(len(X), constant)]), **settings)
    third = [constant, 1.001 * constant + 1e-15, constant * (1 + 1e-12)]
    answer = estimator.assess(np.column_stack([X[:3], third]))
    assert answer.safe.tolist() == [True, False, True]
    assert np.isposinf(answer.support_score[1])
    assert f"but it is {constant:.4g} in all the data" in answer.reason(1)
    assert "in all the data" not in answer.reason(0)


@pytest.mark.parametrize("unit", [1e-100, 1e-30, 1e30, 1e100])
@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize("settings", [REGIONS["default"], REGIONS["distance"]], ids=["default", "distance"])  # fmt: skip
def test_bounds_and_flags_do_not_depend_on_the_unit(unit, which, settings):
    queries = np.array([[0.1, 0.2], [1.9, 0.0]])

    def assessed(x_unit, y_unit):
        estimator = fit(
            lambda x: y_unit * rough(x / x_unit), x=x_unit * X, y=y_unit * Y, **settings
        )
        return estimator.assess(x_unit * queries)

    units = (unit, 1.0) if which == "x" else (1.0, unit)
    expected, found = assessed(1.0, 1.0), assessed(*units)
    assert found.safe.tolist() == expected.safe.tolist() == [True, False]
    assert_allclose(found.error_hat / units[1], expected.error_hat, 1e-5)


@pytest.mark.parametrize("make", [
    np.asfortranarray,
    lambda a: a[::-1][::-1],
    lambda a: np.repeat(a, 2, axis=0)[::2],
    lambda a: a.astype(">f8"),
    lambda a: np.lib.stride_tricks.as_strided(a, a.shape, a.strides, writeable=False),
    lambda a: np.ma.masked_array(a, mask=False),
    lambda a: torch.from_numpy(a).requires_grad_(),
    lambda a: a.tolist(),
])  # fmt: skip
def test_memory_and_kind_of_an_array_change_nothing(make):
    def surrogate(x):
        return rough(np.asarray(x.detach() if hasattr(x, "detach") else x))

    found = GeoQ(surrogate, None, folds=RandomFolds(3)).fit(make(X), make(Y)).bound(make(NEW))
    assert_allclose(np.asarray(found), fit().bound(NEW), rtol=1e-6)


def test_small_integers_do_not_wrap_around_and_a_stride_of_zero_is_accepted():
    x, y = (np.round(100 * a + 100).astype("u1") for a in (X, Y / 3))
    surrogate = lambda q: np.round(100 * truth(q / 100.0 - 1) / 3 + 103).astype("u1")
    tidy = GeoQ(lambda q: surrogate(q).astype(float), None, folds=RandomFolds(3))
    untidy = GeoQ(surrogate, None, folds=RandomFolds(3)).fit(x, y)
    assert untidy.fitted_.error.max() < 10
    assert_array_equal(untidy.bound(x), tidy.fit(x, y.astype(float)).bound(x))
    column = torch.tensor(X[:, 0]).as_strided((len(X), 1), (1, 0))
    estimator = fit(lambda x: 0.9 * x, None, column, column)
    assert estimator.assess(column).error_hat.isfinite().all()


def test_outputs_without_variation_and_inputs_without_others_have_finite_bounds():
    estimator = fit(lambda x: np.ones(len(x)) + 0.1 * x[:, 0], y=np.ones(120))
    assert np.isfinite(estimator.bound(NEW)).all()
    assert (abs(0.1 * NEW[:, 0]) <= estimator.bound(NEW)).mean() > 0.7
    # Every row is one of two points, and half of the rows are held out at a time.
    x = np.repeat([[0.0, 1.0], [1.0, 0.0]], 30, axis=0)
    noise = np.random.default_rng(0).normal(size=60)
    estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(2)).fit(x, x[:, 0] + noise)
    answer = estimator.assess(x[::20])
    assert np.isfinite(answer.error_hat).all()
    assert (answer.error_hat > 0.5).all()


# Code that works in place, uses its memory again, or rounds.


class Buffer:
    """A wrapper that returns the same memory at every call."""

    def __init__(self):
        self.memory = np.empty(2**21)

    def __call__(self, x):
        answer = self.memory[: len(x)]
        answer[:] = rough(x)
        return answer


def test_an_output_buffer_that_is_used_again_gives_the_same_answers():
    x = np.zeros((2**19 + 7, 9))
    x[:, 0] = np.linspace(-1, 1, len(x))
    assert_array_equal(evaluate(Buffer(), x, "surrogate"), rough(x))
    assert_array_equal(fit(Buffer()).bound(NEW), fit(rough).bound(NEW))


def centred(x, y):
    x -= x.mean(0)
    model = plain(x, y)
    y -= y.mean()
    return model


def in_place_error(y, y_hat):
    y -= y_hat
    return np.abs(y, out=y)


def plain(x, y):
    factor = 0.9 + 0.001 * y.mean()
    return lambda x: factor * truth(x)


IN_PLACE = {
    "surrogate": ({"surrogate": lambda x: rough(np.clip(x, -0.5, 0.5, out=x))}, {"surrogate": lambda x: rough(np.clip(x, -0.5, 0.5))}),
    "recipe": ({"surrogate": None, "recipe": centred}, {"surrogate": None, "recipe": plain}),
    "error functional": ({"error_functional": in_place_error}, {}),
    "representation": ({"representation": lambda x: np.tanh(x, out=x)}, {"representation": np.tanh}),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "tidy"), IN_PLACE.values(), ids=IN_PLACE)
def test_code_that_works_in_place_gives_the_answers_of_tidy_code(attack, tidy):
    x, y, queries = X.copy(), Y.copy(), NEW.copy()
    attacked, expected = fit(**attack, x=x, y=y).assess(queries), fit(**tidy).assess(NEW)
    for array, before in ((x, X), (y, Y), (queries, NEW)):
        assert_array_equal(array, before)
    assert_array_equal(attacked.error_hat, expected.error_hat)
    assert_array_equal(attacked.prediction, expected.prediction)


def test_answers_are_not_views_of_the_calibration():
    """Whoever changes an answer changes no later answer."""
    estimator, pairs = fit(), (X.copy(), Y.copy())
    own = fit(x=pairs[0], y=pairs[1])
    before = estimator.assess(NEW)
    first = own.assess(NEW)
    for part in (first.error_hat, first.anchor_error, first.prediction, first.anchors, *pairs):
        part[:] = 7
    assert_array_equal(own.assess(NEW).error_hat, before.error_hat)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_single_precision_rounds_in_batches_without_an_exception(offset):
    """Products of matrices round differently in batches of different sizes."""
    weights = np.random.default_rng(0).normal(size=(2, 300)).astype("f4")

    def network(x):
        return np.tanh(x @ weights) @ weights.T[:, 0] / np.float32(150) + np.float32(offset)

    x = X.astype("f4")
    assert np.isfinite(fit(network, x=x, y=network(x) + np.float32(0.1) * x[:, 1]).bound(x)).all()


# Pairs and points that the surrogate has seen.


def nearest(x, y):
    return KNeighborsRegressor(1).fit(x, y).predict


def test_pairs_of_fit_are_found_by_a_file_and_repeated_measurements_are_new_pairs(tmp_path):
    """The inputs of the pairs are calibration points, but they were measured again."""
    noise = np.random.default_rng(2).normal(scale=0.05, size=(3, 120))
    x, y = np.tile(X, (2, 1)), (Y + noise[:2]).reshape(-1)
    estimator = fit(None, nearest, x=x, y=y).conformalize(X, Y + noise[2])
    assert estimator.fitted_.conformal.safe > 0
    with pytest.raises(ValueError, match=r"120 of 120 pairs .*x\[0\] and its y are row 120"):
        estimator.conformalize(X, Y + noise[1])  # the second measurement at each place
    estimator = fit(None, nearest)
    for calibration in (True, False):
        estimator.save(tmp_path / "a.geoq", calibration=calibration)
        loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=estimator.surrogate_)
        with pytest.raises(ValueError, match=r"120 of 120 pairs equal pairs of fit up to rounding"):
            loaded.conformalize(X, Y)


def test_a_conformal_factor_is_never_zero():
    estimator = fit(lambda x: np.where(x[:, 0] > 5, 0.0, rough(x)))
    estimator.fitted_ = copy.copy(estimator.fitted_)
    object.__setattr__(estimator.fitted_, "surrogate", truth)
    with pytest.warns(UserWarning, match="the conformal factor would be 0"):
        estimator.conformalize(NEW, truth(NEW))
    assert estimator.fitted_.conformal.safe == 1
    assert estimator.describe().endswith(f"from {len(NEW)} pairs that were set aside.")


POORER = "A Gaussian process through the same data"
MODELS = [
    GaussianProcessRegressor(alpha=1e-10, optimizer=None),
    DecisionTreeRegressor(random_state=0),
    KNeighborsRegressor(1),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_surrogate_on_its_own_training_data_gives_a_warning(model):
    with pytest.warns(UserWarning, match="must never have seen x and y"):
        fit(model.fit(X, Y).predict)
    # The same surrogate with new points, and a recipe, are tidy.
    new = np.random.default_rng(3).uniform(-1, 1, (120, 2))
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", POORER)
        fit(model.predict, x=new, y=truth(new))
        fit(None, lambda x, y: copy.deepcopy(model).fit(x, y).predict)


def test_tidy_code_gives_no_warning():
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", POORER)
        for settings in REGIONS.values():
            fit(rough, plain, **settings)


# Several users at once.


def test_threads_ask_and_save_without_disturbing_each_other(tmp_path):
    estimator, failures = fit(), []
    expected = fit().bound(NEW)

    def work():
        try:
            for _ in range(5):
                assert_array_equal(estimator.bound(NEW), expected)
                estimator.save(tmp_path / "a.geoq")
                loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=rough)
                assert_array_equal(loaded.bound(NEW), expected)
        except Exception as exc:  # noqa: BLE001
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.name for path in tmp_path.iterdir()] == ["a.geoq"]
