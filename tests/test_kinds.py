"""Data as they come: arrays of other libraries, labels, tuples, labelled arrays and trajectories; the boosting libraries."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

from geoq import GeoQ, RandomFolds, RolloutGeoQ
from geoq.sklearn import GeoQRegressor

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(200, 3))
Y = np.sin(3 * X[:, 0]) + X[:, 1]
FOLDS = RandomFolds(3)


class Other:
    """An array of another library: it cannot be changed, and NumPy's functions do not work in place on it."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape, self.dtype, self.ndim = (self.values.shape, self.values.dtype, self.values.ndim)

    @staticmethod
    def asarray(values, dtype=None):
        return Other(np.asarray(values, dtype))

    def __array_namespace__(self):
        return Other

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, key):
        return Other(self.values[key])

    def __bool__(self):
        return bool(self.values)

    def __int__(self):
        return int(self.values)

    def __float__(self):
        return float(self.values)

    def __sub__(self, other):
        return Other(self.values - other.values)

    def __abs__(self):
        return Other(abs(self.values))


def squares(x):
    assert isinstance(x, Other)
    return Other(x.values[:, 0] ** 2)


def test_arrays_of_other_libraries_reach_the_model_and_come_back(tmp_path):
    estimator = GeoQ(squares, None, folds=FOLDS)
    answer = estimator.fit(Other(X), Other(Y)).assess(Other(X[:5] + 0.01))
    plain = GeoQ(lambda x: x[:, 0] ** 2, None, folds=FOLDS)
    same = plain.fit(X, Y).assess(X[:5] + 0.01)
    for name in ("prediction", "error_hat", "safe", "lower"):
        part = getattr(answer, name)
        assert isinstance(part, Other)
        assert_array_equal(part.values, getattr(same, name))
    assert answer.reason(0) == same.reason(0)
    # Queries in another kind of array are converted to the kind of fit.
    assert_array_equal(np.asarray(estimator.bound(X[:5] + 0.01)), same.error_hat)
    estimator.save(tmp_path / "other.geoq")
    loaded = GeoQ.load(tmp_path / "other.geoq", surrogate=lambda x: np.asarray(x)[:, 0] ** 2)
    assert_array_equal(np.asarray(loaded.bound(Other(X[:5] + 0.01))), same.error_hat)


def test_answers_of_a_jax_function_are_numbers():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    x, y = jnp.asarray(X), jnp.asarray(Y)
    answer = GeoQ(lambda x: jnp.sin(x[:, 0]), None, folds=FOLDS).fit(x, y).assess(x[:3])
    assert isinstance(answer.error_hat, type(x))


LABELS = np.where(X[:, 0] > 0.5, "yes", "no")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("x", "y", "surrogate", "message"),
    [
        (
            X,
            Y,
            lambda x: (x[:, 0], x[:, 1]),
            r"got tuple; pass the prediction alone, lambda x: mod",
        ),
        (X, LABELS, lambda x: LABELS[: len(x)], r"code labels as numbers, such as \(y == 'yes'\)"),
        (
            X,
            pd.Series(LABELS),
            lambda x: LABELS,
            "y has dtype (object|str).*code labels as numbers",
        ),
        (xr.DataArray(X), Y, lambda x: x, r"x is a DataArray of xarray; use Labelled\(estimator"),
        (X, xr.DataArray(Y), lambda x: x, r"y is a DataArray .* or pass y.values"),
    ],
)
def test_other_things_are_refused_with_the_way_out(x, y, surrogate, message):
    with pytest.raises(TypeError, match=message):
        GeoQ(surrogate, None, folds=FOLDS).fit(x, y)


def test_trajectories_can_be_one_array_if_it_is_clear_which_axis_is_time():
    start = RNG.normal(size=(30, 1, 2))
    rows = start * 0.9 ** np.arange(25)[None, :, None]
    settings = {"n_calibration": 5}
    one, two = (
        RolloutGeoQ(lambda x: 0.85 * x, None, **settings).fit(given) for given in (rows, [*rows])
    )
    assert_array_equal(one.bound(rows[:3, 0], 5), two.bound(rows[:3, 0], 5))
    with pytest.raises(
        ValueError, match=r"can be 30 trajectories or one of 30 times; pass list\(tra"
    ):
        RolloutGeoQ(lambda x: x, None, **settings).fit(RNG.normal(size=(30, 25, 2)))


def test_words_of_the_regressor_and_of_guarantees():
    estimator = GeoQ(lambda x: x[:, 0], None, folds=FOLDS).fit(X[:140], Y[:140])
    estimator.conformalize(X[140:], Y[140:])
    assert repr(estimator).endswith("fitted, conformalized with 60 pairs")
    assert "with conformal factors" in estimator.assess(X[:1]).reason(0)


def frames():
    kind = np.array(["steel", "brass", "lead"])[RNG.integers(3, size=300)]
    a, b = RNG.uniform(size=(2, 300))
    frame = pd.DataFrame({"a": np.where(b < 0.1, np.nan, a), "b": b, "kind": pd.Categorical(kind)})
    return frame, 2 * a + (kind == "lead") + 0.1 * RNG.normal(size=300)


def lightgbm():
    return pytest.importorskip("lightgbm").LGBMRegressor(n_estimators=30, n_jobs=1, verbose=-1)


def xgboost():
    library = pytest.importorskip("xgboost", reason="XGBoost is not installed")
    return library.XGBRegressor(n_estimators=30, enable_categorical=True, n_jobs=1)


@pytest.mark.parametrize("make", [lightgbm, xgboost])
def test_boosted_trees_use_their_own_categories_and_missing_values(make):
    frame, y = frames()
    model = GeoQRegressor(make(), folds=FOLDS).fit(frame[:250], y[:250])
    answer = model.assess(frame[250:])
    assert (abs(answer.prediction - y[250:]) <= answer.bound).mean() > 0.85
    assert answer.safe.mean() > 0.5
    assert "Amid the data the bound depends most on" in model.describe()


def test_catboost_with_categories_has_a_recipe():
    library = pytest.importorskip("catboost", reason="CatBoost is not installed")
    frame, y = frames()
    settings = {"iterations": 30, "verbose": False, "thread_count": 1, "cat_features": ["kind"]}
    settings["allow_writing_files"] = False

    def train(x, y):
        return library.CatBoostRegressor(**settings).fit(x, y).predict

    answer = GeoQ(None, train, folds=FOLDS).fit(frame[:250], y[:250]).assess(frame[250:])
    assert (abs(answer.prediction - y[250:]) <= answer.bound).mean() > 0.85


def test_early_stopping_sees_no_held_out_row():
    library = pytest.importorskip("lightgbm")
    frame, y = frames()
    sizes = []

    def train(x, y):
        sizes.append(len(x))
        n = len(x) * 4 // 5
        model = library.LGBMRegressor(n_estimators=200, n_jobs=1, verbose=-1)
        stop = library.early_stopping(10, verbose=False)
        model.fit(x[:n], y[:n], eval_X=x[n:], eval_y=y[n:], callbacks=[stop])
        return model.predict

    answer = GeoQ(None, train, folds=FOLDS).fit(frame, y).assess(frame[:5])
    assert sizes == [300, 200, 200, 200]
    assert answer.safe.any()
