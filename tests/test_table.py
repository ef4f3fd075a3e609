"""Tables: data frames go to the user's callables unchanged, and every kind of column has a place in the geometry."""

import datetime as dt
import re
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.compose import make_column_transformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from geoq import GeoQ, RandomFolds
from geoq.data.coordinates import Category, Ignored, Log, Number, Part, Periodic, fit_columns
from geoq.data.metric import Columns
from geoq.data.table import Table, input_rows, output_rows

N = 80
COLUMNS = ["temp", "conc", "site", "on", "day"]


def data(n=N, seed=0):
    """A number, a number over nine decades, a category with a rare level, a boolean and a date."""
    rng = np.random.default_rng(seed)
    return {
        "temp": rng.uniform(0, 1, n),
        "conc": 10 ** rng.uniform(-6, 3, n),
        "site": [["north", "south", "rare"][min(2, i % 13 // 6)] for i in range(n)],
        "on": rng.random(n) > 0.5,
        "day": [dt.datetime(2020, 1, 1) + dt.timedelta(days=i % 50) for i in range(n)],
    }


def pandas_frame(**changes):
    frame = pd.DataFrame(data() | changes, index=np.arange(N) + 1000)
    return frame.astype({"site": "category"})


def polars_frame(**changes):
    return pl.DataFrame(data() | changes)


frames = pytest.mark.parametrize("make", [pandas_frame, polars_frame])


def outputs(x):
    """A function of all columns, of a table of either kind; a missing temperature counts as 0."""
    columns = {name: x[name].to_list() for name in x.columns}
    site = [{"north": 0.0, "south": 2.0}.get(s, -3.0) for s in columns["site"]]
    temp = np.nan_to_num(np.array(columns["temp"], dtype=float))
    return 3 * temp + np.log10(columns["conc"]) + np.array(site) + np.array(columns["on"])


def surrogate(x):
    return 0.9 * outputs(x)


def calibrated(x, y=None, model=surrogate, **settings):
    return GeoQ(model, None, folds=RandomFolds(5), **settings).fit(
        x, outputs(x) if y is None else y
    )


X = pandas_frame()
Y = outputs(X)
CALIBRATED = calibrated(X)


@frames
def test_the_surrogate_and_the_recipe_receive_the_rows_of_the_table_as_they_are(make):
    x, seen = make(), []
    y = pd.Series(outputs(x), index=x.index) if make is pandas_frame else outputs(x)

    def train(x, y):
        seen.append((x, y))
        factor = 0.95 - 0.01 * len(seen)
        return lambda x: factor * outputs(x)

    GeoQ(None, train, folds=RandomFolds(3)).fit(x, y)
    assert len(seen) == 4
    for rows, targets in seen:
        assert type(rows) is type(x)
        assert list(rows.columns) == COLUMNS
        assert list(rows.dtypes) == list(x.dtypes)
        assert_allclose(outputs(rows), np.asarray(targets))
        if make is pandas_frame:
            assert rows.index.equals(targets.index)


@frames
def test_queries_are_answered_by_name_in_any_order_of_the_columns(make):
    x = make()
    estimator = calibrated(x)
    expected = estimator.assess(x)
    assert_array_equal(estimator.assess(x[COLUMNS[::-1]]).error_hat, expected.error_hat)
    assert_array_equal(estimator.bound(x), expected.error_hat)
    assert expected.safe.mean() > 0.9
    assert set(estimator.bounds(x, (0.5, 0.9))) == {0.5, 0.9}


@frames
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"site": ["Mars"] * N}, "input site is 'Mars', which does not occur in the data; they contain 'north', 'rare', 'south'"),
        ({"site": [None] * N}, "NOT safe, input site is missing, but it is never"),
        ({"conc": [1e-9] * N}, "input conc is 1e-09, 3.1 decades below its range"),
        ({"temp": [7.0] * N}, "input temp is 7, .* above its range in the data, .* to "),
        ({"day": [dt.datetime(2025, 1, 1)] * N}, "input day is 2025-01-01, .* in the data, .* to 2020-02-19"),
    ],
)  # fmt: skip
def test_a_query_outside_the_data_is_not_safe_and_its_column_is_named(make, change, reason):
    answer = calibrated(make()).assess(make(**change)[:5])
    assert not answer.safe.any()
    assert re.search(reason, answer.reason(0)), answer.reason(0)


def test_rare_categories_have_their_own_anchors():
    rare = (X["site"] == "rare").to_numpy()
    assert 0 < rare.sum() < 10
    queries = X[rare].assign(temp=X["temp"][rare] + 0.01)
    assert rare[CALIBRATED.assess(queries).anchors].all()


def test_levels_that_occur_once_do_not_make_a_new_level_safe():
    """Held-out points with a level that their fold does not know set no threshold."""
    x = X.assign(site=[f"once {i}" if i % 10 == 0 else "often" for i in range(N)])
    estimator = calibrated(x, Y)
    assert estimator.fitted_.region.thresholds.max() < 10
    assert not estimator.assess(x.assign(site="Mars")).safe.any()


def distances(kind, values, queries):
    points, new = (np.array(v, dtype=float)[:, None] for v in (values, queries))
    z = fit_columns(points, {0: kind}, None, logarithms=True)(new)
    return np.linalg.norm(z[:, None] - z, axis=2)


def test_distances_of_categories_periods_and_logarithms():
    found = distances(Category(), [0, 0, 0, 1, 2, np.nan], [0, 1, 2, np.nan, 5])
    assert_allclose(found[~np.eye(5, dtype=bool)], 12**0.5)
    circle = distances(Periodic(24), list(range(24)), [23, 0.5, 12.0])
    assert circle[0, 1] < 0.6
    assert circle[0, 2] > 1.9
    decades = [1.0, 10.0, 100.0]
    found = distances(Log(), decades, decades)
    assert_allclose(found[0, 1], found[1, 2])
    assert distances(Number(), decades, decades)[1, 2] > 1


def test_each_column_finds_its_kind_of_coordinates():
    table = input_rows(X)
    found = fit_columns(table.array, {"temp": Ignored()}, table.schema, logarithms=True)
    by_column = {n: set(found.part[found.column == j].tolist()) for j, n in enumerate(COLUMNS)}
    category, number = {Part.LEVEL, Part.UNSEEN}, {Part.VALUE}
    kinds = [set(), number, category, category, number]
    assert by_column == dict(zip(COLUMNS, kinds, strict=True))
    assert [COLUMNS[j] for j in found.column[found.log]] == ["conc"]
    assert CALIBRATED.fitted_.metric.describe(COLUMNS).startswith(
        "relative sensitivity of the prediction: conc (logarithm): 1, site"
    )


def test_columns_of_arrays_are_described_by_number():
    x = np.random.default_rng(0).uniform(size=(N, 2))
    x[:, 1] = np.arange(N) % 3
    representation = Columns({1: Category()})
    estimator = calibrated(x, x[:, 0] ** 2, lambda x: x.sum(axis=1), representation=representation)
    answer = estimator.assess(np.array([[0.5, 1.0], [0.5, 1.5]]))
    assert answer.safe.tolist() == [True, False]
    assert "input 1 is 1.5, which does not occur in the data" in answer.reason(1)


@frames
def test_a_model_that_accepts_missing_values_may_have_them(make):
    temp = data()["temp"].tolist()
    temp[::5] = [None] * len(temp[::5])
    x = make(temp=temp)
    answer = calibrated(x, outputs(make())).assess(x)
    assert answer.safe.mean() > 0.9
    assert np.isfinite(answer.error_hat).all()


@frames
def test_tables_keep_their_types_also_when_built_from_numbers(make):
    x = make()
    table = input_rows(x)
    same = table.like(table.array[[3, 1, 1]]).native
    assert list(same.dtypes) == list(x.dtypes)
    for name in COLUMNS:
        assert same[name].to_list() == [x[name].to_list()[row] for row in (3, 1, 1)]
    own = table.copy()
    assert type(own.native) is type(x)
    assert own.native is not x
    table = input_rows(make())
    again = table.schema.build(table.array)
    assert isinstance(again, Table)
    assert {n: again.native[n].to_list() for n in COLUMNS} == {
        n: table.native[n].to_list() for n in COLUMNS
    }


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X.assign(conc=np.inf), Y, r"column 'conc' is inf in row 0; remove or impute"),
        (X.assign(site=[{}] * N), Y, r"column 'site' has dtype object, and \{\} in row 0 is a dict"),
        (X.assign(site=["1"] * (N - 1) + [1]), Y, r"and 1 in row 79 is a int, not a string; convert"),
        (X.assign(temp=[dt.timedelta(1)] * N), Y, r"column 'temp' has dtype Duration.*, but a column must hold numbers, dates"),
        (X.set_axis(["a", "a", "b", "c", "d"], axis=1), Y, r"x has several columns named 'a'; rename"),
        (X[[]], Y, r"x has no columns; pass a table"),
        (X, Y[:-1], r"x has 80 rows and y has 79"),
        (X, pd.Series(["a"] * N, name="flow"), r"y has dtype object.*code labels as numbers"),
        (X, pd.Series(Y, index=X.index[::-1]), r"in another order; pass y.loc\[x.index\]"),
        (X, pd.DataFrame({"a": Y, "b": np.nan}), r"y\[0, 1\] is nan"),
        (pl.LazyFrame(data()), Y, r"not a table in memory; pass x.collect\(\)"),
        (X.assign(on=X["on"].where(X["temp"] > 0.5)), Y, r"x has missing values in 'on', and surrogate failed on them"),
    ],
)  # fmt: skip
def test_unusable_tables_raise_before_any_training(x, y, message):
    def careful(x):
        if x.isna().to_numpy().any():
            raise ValueError("contains NaN")
        return surrogate(x)

    with pytest.raises((ValueError, TypeError), match=message):
        GeoQ(careful, lambda x, y: pytest.fail("trained")).fit(x, y)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (X.drop(columns="site"), r"x has other columns than 'temp', .*, on which GeoQ was fitted; add 'site'"),
        (X.assign(y=0.0, z=1.0), r"x has other columns .*; drop 'y', 'z'"),
        (X.assign(temp="hot"), r"column 'temp' has dtype String, but it held numbers in the data of fit"),
        (X.assign(day=1.0), r"column 'day' has dtype Float64, but it held dates"),
        (X.to_numpy(), r"x is a ndarray, but GeoQ was fitted on a table with the columns 'temp', 'conc'"),
        (X[:0], r"pass at least one query"),
    ],
)  # fmt: skip
def test_queries_with_other_columns_raise(queries, message):
    with pytest.raises((ValueError, TypeError), match=message):
        CALIBRATED.assess(queries)


def test_a_table_for_an_estimator_of_arrays_raises():
    estimator = calibrated(X[["temp"]].to_numpy(), Y, lambda x: x[:, 0])
    with pytest.raises(TypeError, match="x is a data frame, but GeoQ was fitted on an"):
        estimator.assess(X[["temp"]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kinds", "message"), [
    ({"tmp": Number()}, r"Columns describes 'tmp', but x has the columns 'temp'"),
    ({"temp": Log}, r"Columns\(\{'temp': <class .*Log'>\}\): a kind is an object"),
    ({"temp": "log"}, r"a kind is an object of geoq.parts; pass Number\(\)"),
    ({"site": Number()}, r"column 'site' holds categories, but its kind is Number"),
    ({name: Ignored() for name in COLUMNS}, r"all columns are ignored"),
    (["temp"], r"for each column, as in Columns\(\{'hour'"),
])  # fmt: skip
def test_wrong_kinds_raise(kinds, message):
    with pytest.raises((ValueError, TypeError), match=message):
        calibrated(
            X.assign(day=X["day"] - pd.Timedelta(days=40_000)), Y, representation=Columns(kinds)
        )


def test_columns_without_a_use_raise_or_are_ignored_with_a_warning():
    with pytest.raises(ValueError, match=r"column 'temp' has the value 0, but Log\(\)"):
        calibrated(X.assign(temp=0.0), Y, representation=Columns({"temp": Log()}))
    with pytest.raises(ValueError, match="period must be a positive number"):
        Periodic(0)
    x = X.assign(name=[f"car {i}" for i in range(N)])
    with pytest.warns(UserWarning, match="column 'name' has 80 different values in 80"):
        estimator = calibrated(x, Y, lambda x: surrogate(x[COLUMNS]))
    assert estimator.assess(x.assign(name="new")).safe.mean() > 0.9


@frames
def test_a_file_keeps_names_and_levels(make, tmp_path):
    estimator = calibrated(make())
    estimator.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    queries = make(site=["Mars"] * 3 + ["rare"] * (N - 3))[:6]
    before, after = estimator.assess(queries), loaded.assess(queries)
    assert_array_equal(before.error_hat, after.error_hat)
    assert [before.reason(i) for i in range(6)] == [after.reason(i) for i in range(6)]
    with pytest.raises(ValueError, match="surrogate differs from the surrogate of the file"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: 2 * surrogate(x))
    with pytest.raises(ValueError, match=r"x has other columns than .*; add 'site'"):
        loaded.assess(make()[["temp", "conc", "on", "day"]])


def test_a_file_is_loaded_without_the_library_of_the_table(tmp_path, monkeypatch):
    calibrated(polars_frame()).save(tmp_path / "a.geoq")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.warns(UserWarning, match="a table that cannot be rebuilt here"):
        loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    assert loaded.assess(X).safe.mean() > 0.9


def test_the_reason_gives_the_spread_of_repeats_at_the_anchor():
    """Noisy measurements, several at each place of a grid."""
    rng = np.random.default_rng(0)
    x = np.repeat(np.linspace(-1, 1, 30), 4)[rng.permutation(120), None]
    y = np.sin(3 * x[:, 0]) + rng.normal(0, 0.3, len(x))
    reason = calibrated(x, y, lambda x: np.sin(3 * x[:, 0])).assess(x[:1]).reason(0)
    spread = y[x[:, 0] == x[0, 0]].std(ddof=1)
    text = "4 rows of the data have the inputs of this anchor; the standard deviation of their outputs is"
    assert f"{text} {spread:.3g}" in reason
    unique = calibrated(x + np.arange(len(x))[:, None], y, lambda x: x[:, 0])
    assert "rows of the data" not in unique.assess(x[:1]).reason(0)


def test_outputs_are_listed_by_name_and_never_averaged(tmp_path):
    y = pd.DataFrame({"deflection": 1e-6 * Y, "force": 1e3 * Y}, index=X.index)
    y.attrs["units"] = {"deflection": "m"}

    def two(x):
        return np.stack([1.1e-6 * outputs(x), 1.1e3 * outputs(x)], axis=1)

    estimator = calibrated(X, y, two)
    answer = estimator.assess(X[:1])
    bounds, reason = answer.error_hat[0], answer.reason(0)
    assert reason.startswith("query 0: error bounds of 2 outputs (quantile level 0.95), safe")
    prediction = f"deflection (m): prediction {answer.prediction[0, 0]:.4g}, error bound"
    assert f"  {prediction} {bounds[0]:.3g} = anchor error " in reason
    assert f", error bound {bounds[1]:.3g} = anchor error " in reason
    assert "mean" not in reason
    assert "  a in mm: prediction" in answer.reason(0, outputs=["a in mm", "b in N"])
    with pytest.raises(ValueError, match="outputs has 1 entries, but an error has 2"):
        answer.reason(0, outputs=["a"])
    estimator.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=two)
    assert loaded.assess(X[:1]).reason(0) == reason


def test_an_encoder_that_raises_for_new_categories_gets_a_note():
    x = X[["temp", "site"]].assign(site=["once"] + ["often"] * (N - 1))

    def train(x, y):
        encode = make_column_transformer((OneHotEncoder(), ["site"]), remainder="passthrough")
        return make_pipeline(encode, Ridge()).fit(x, y).predict

    with pytest.raises(ValueError, match="Found unknown categories") as caught:
        GeoQ(None, train, folds=RandomFolds(5)).fit(x, Y)
    text = "training rows lack site='once', so the model must accept new categories"
    assert text in caught.value.__notes__[1]


@pytest.mark.parametrize("rows", [input_rows, output_rows])
def test_a_list_of_fields_with_different_shapes_raises(rows):
    with pytest.raises(ValueError, match=r"\(2, 5\) and \(2, 6\), .*common nodes"):
        rows([np.zeros((2, 5)), np.zeros((2, 6))])
