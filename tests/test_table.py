"""Tables: data frames go to the user's callables unchanged, and every kind of column has a place in the geometry."""

import datetime as dt
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.compose import make_column_transformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.tree import DecisionTreeRegressor

from geoq import ClusterFolds, GeoQ, NestedFolds, RandomFolds, default_folds
from geoq.columns import Category, Ignored, Log, Number, Part, Periodic, fit_columns
from geoq.metric import Columns
from geoq.sklearn import GeoQRegressor
from geoq.table import Table, input_rows, output_rows

N = 80
COLUMNS = ["temp", "conc", "site", "on", "day"]


def data(n: int = N, seed: int = 0) -> dict[str, Any]:
    """A number, a number over nine decades, a category with a rare level, a boolean and a date."""
    rng = np.random.default_rng(seed)
    return {
        "temp": rng.uniform(0, 1, n),
        "conc": 10 ** rng.uniform(-6, 3, n),
        "site": [["north", "south", "rare"][min(2, i % 13 // 6)] for i in range(n)],
        "on": rng.random(n) > 0.5,
        "day": [dt.datetime(2020, 1, 1) + dt.timedelta(days=i % 50) for i in range(n)],
    }


def pandas_frame(**changes: Any) -> pd.DataFrame:
    frame = pd.DataFrame(data() | changes, index=np.arange(N) + 1000)
    return frame.astype({"site": "category"})


def polars_frame(**changes: Any) -> pl.DataFrame:
    return pl.DataFrame(data() | changes)


FRAMES = pytest.mark.parametrize("make", [pandas_frame, polars_frame])


def outputs(x: Any) -> np.ndarray:
    """A function of all columns, of a table of either kind."""
    columns = {name: x[name].to_list() for name in x.columns}
    site = [{"north": 0.0, "south": 2.0}.get(s, -3.0) for s in columns["site"]]
    return (
        3 * np.array(columns["temp"])
        + np.log10(columns["conc"])
        + np.array(site)
        + np.array(columns["on"])
    )


def surrogate(x: Any) -> np.ndarray:
    return 0.9 * outputs(x)


def calibrated(x: Any, **settings: Any) -> GeoQ:
    return GeoQ(surrogate, None, folds=RandomFolds(5), **settings).fit(x, outputs(x))


@FRAMES
def test_the_surrogate_and_the_recipe_receive_the_rows_of_the_table_as_they_are(
    make: Callable[[], Any],
) -> None:
    x, seen = make(), []
    y = pd.Series(outputs(x), index=x.index) if make is pandas_frame else outputs(x)

    def train(x: Any, y: Any) -> Any:
        seen.append((x, y))
        return surrogate

    GeoQ(None, train, folds=RandomFolds(3)).fit(x, y)
    assert len(seen) == 4
    for rows, targets in seen:
        assert type(rows) is type(x)
        assert list(rows.columns) == COLUMNS
        assert list(rows.dtypes) == list(x.dtypes)
        assert len(rows) == len(targets)
        np.testing.assert_allclose(outputs(rows), np.asarray(targets))
        if make is pandas_frame:
            assert rows.index.equals(targets.index)


@FRAMES
def test_queries_are_answered_by_name_in_any_order_of_the_columns(
    make: Callable[[], Any],
) -> None:
    x = make()
    geoq = calibrated(x)
    expected = geoq.assess(x)
    reordered = geoq.assess(x[COLUMNS[::-1]])
    np.testing.assert_array_equal(reordered.error_hat, expected.error_hat)
    assert expected.safe.mean() > 0.9
    assert set(geoq.bounds(x, (0.5, 0.9))) == {0.5, 0.9}
    np.testing.assert_array_equal(geoq.bound(x), expected.error_hat)


@FRAMES
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"site": ["Mars"] * N}, "input site is 'Mars', which does not occur in the"),
        ({"site": [None] * N}, "NOT safe, input site is missing, but it is never"),
        ({"conc": [1e-9] * N}, "input conc is 1e-09, 3.1 decades below its range"),
        (
            {"temp": [7.0] * N},
            "input temp is 7, .* above its range in the data, .* to ",
        ),
        (
            {"day": [dt.datetime(2025, 1, 1)] * N},
            "input day is 2025-01-01, .* in the data, .* to 2020-02-19",
        ),
    ],
)
def test_a_query_outside_the_data_is_not_safe_and_its_column_is_named(
    make: Callable[..., Any], change: dict[str, Any], reason: str
) -> None:
    answer = calibrated(make()).assess(make(**change)[:5])
    assert not answer.safe.any()
    found = answer.reason(0)
    assert re.search(reason, found), found


def test_rare_categories_have_their_own_anchors() -> None:
    x = pandas_frame()
    rare = (x["site"] == "rare").to_numpy()
    assert 0 < rare.sum() < 10
    queries = x[rare].assign(temp=x["temp"][rare] + 0.01)
    assert rare[calibrated(x).assess(queries).anchors].all()


def distances(kind: Any, values: list[float], queries: list[float]) -> torch.Tensor:
    points, new = (
        torch.tensor(v, dtype=torch.float64)[:, None] for v in (values, queries)
    )
    t = fit_columns(points, {0: kind}, None, logarithms=True)
    return torch.cdist(t(new), t(new))


def test_all_pairs_of_categories_are_equally_far_apart_also_unseen_and_missing() -> (
    None
):
    nan = float("nan")
    found = distances(Category(), [0, 0, 0, 1, 2, nan], [0, 1, 2, nan, 5])
    off = found[~torch.eye(5, dtype=torch.bool)]
    torch.testing.assert_close(off, torch.full_like(off, 12**0.5))


def test_periodic_numbers_are_near_across_the_end_of_the_period() -> None:
    found = distances(Periodic(24), list(range(24)), [23.5, 0.5, 12.0])
    assert found[0, 1] < 0.3
    assert found[0, 2] > 1.9


def test_logarithms_are_measured_in_ratios() -> None:
    found = distances(Log(), [1.0, 10.0, 100.0], [1.0, 10.0, 100.0])
    torch.testing.assert_close(found[0, 1], found[1, 2])
    assert distances(Number(), [1.0, 10.0, 100.0], [1.0, 10.0, 100.0])[1, 2] > 1


def test_ignored_columns_have_no_coordinates_and_others_find_their_kind() -> None:
    x = pandas_frame()
    table = input_rows(x)
    points = torch.from_numpy(table.array)
    kinds = {"temp": Ignored()}
    found = fit_columns(points, kinds, table.schema, logarithms=True)
    by_column = {
        name: set(found.part[found.column == j].tolist())
        for j, name in enumerate(COLUMNS)
    }
    category, number = {Part.LEVEL, Part.UNSEEN}, {Part.VALUE}
    assert by_column == {
        "temp": set(),
        "conc": number,
        "site": category,
        "on": category,
        "day": number,
    }
    assert COLUMNS[int(found.column[found.log])] == "conc"


def test_columns_of_arrays_are_described_by_number() -> None:
    x = np.random.default_rng(0).uniform(size=(N, 2))
    x[:, 1] = np.arange(N) % 3
    geoq = GeoQ(
        lambda x: x.sum(axis=1),
        None,
        folds=RandomFolds(5),
        representation=Columns({1: Category()}),
    ).fit(x, x[:, 0] ** 2)
    answer = geoq.assess(np.array([[0.5, 1.0], [0.5, 1.5]]))
    assert answer.safe.tolist() == [True, False]
    assert "input 1 is 1.5, which does not occur in the data" in answer.reason(1)


def test_the_sensitivity_of_the_surrogate_to_a_category_is_measured() -> None:
    x = pandas_frame()
    metric = calibrated(x).metric_
    assert metric is not None
    assert metric.describe(COLUMNS).startswith(
        "relative sensitivity of the prediction: conc (logarithm) 1, site"
    )


@FRAMES
def test_a_model_that_accepts_missing_values_may_have_them(
    make: Callable[..., Any],
) -> None:
    temp = data()["temp"].tolist()
    temp[::5] = [None] * len(temp[::5])
    x, full = make(temp=temp), make()

    def surrogate(x: Any) -> np.ndarray:
        return outputs(_Columns(x))

    geoq = GeoQ(surrogate, None, folds=RandomFolds(5)).fit(x, outputs(full))
    answer = geoq.assess(x)
    assert answer.safe.mean() > 0.9
    assert np.isfinite(answer.error_hat).all()


class _Columns:
    """A table whose missing numbers are zero."""

    def __init__(self, x: Any) -> None:
        self.x, self.columns = x, x.columns

    def __getitem__(self, name: str) -> pd.Series:
        found = pd.Series(self.x[name].to_list())
        return found.fillna(0.0) if name == "temp" else found


def test_a_table_keeps_types_when_values_are_exchanged_between_rows() -> None:
    for x in (pandas_frame(), polars_frame()):
        table = input_rows(x)
        assert isinstance(table, Table)
        same = table.like(table.array[[3, 1, 1]])
        assert list(same.dtypes) == list(x.dtypes)
        np.testing.assert_array_equal(
            same["temp"].to_numpy(), x["temp"].to_numpy()[[3, 1, 1]]
        )


X = pandas_frame()
Y = outputs(X)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X.assign(conc=np.inf), Y, r"column 'conc' is inf in row 0; remove or impute"),
        (X.assign(site=[{}] * N), Y, r"column 'site' has dtype object, and \{\} in row 0 is a dict"),
        (X.assign(site=["1"] * (N - 1) + [1]), Y, r"and 1 in row 79 is a int, not a string; convert"),
        (X.set_axis(["a", "a", "b", "c", "d"], axis=1), Y, r"x has several columns named 'a'; rename"),
        (X[[]], Y, r"x has no columns; pass a table"),
        (X, Y[:-1], r"x has 80 rows and y has 79"),
        (X, pd.Series(["a"] * N, name="flow"), r"column 'flow' has dtype String, but"),
        (X, pd.Series(Y, index=X.index[::-1]), r"in another order; pass y.loc\[x.index\]"),
        (X, pd.DataFrame({"a": Y, "b": np.nan}), r"y\[0, 1\] is nan"),
        (pl.LazyFrame(data()), Y, r"whose rows are not in memory; pass x.collect\(\)"),
        (X.assign(conc=X["conc"].where(X["conc"] > 1)), Y, r"x has missing values in 'conc', and surrogate failed on them"),
    ],
)  # fmt: skip
def test_unusable_tables_are_refused_before_any_training(
    x: Any, y: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GeoQ(surrogate, None, folds=RandomFolds(5)).fit(x, y)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (X.drop(columns="site"), r"x lacks the column 'site', but GeoQ was fitted on 'temp', .*; add it"),
        (X.assign(y=0.0, z=1.0), r"x also has the columns 'y', 'z', but .*; drop them"),
        (X.assign(temp="hot"), r"column 'temp' has dtype String, but it held numbers in the data of fit"),
        (X.assign(day=1.0), r"column 'day' has dtype Float64, but it held dates"),
        (X.to_numpy(), r"x is a ndarray, but GeoQ was fitted on a table with the columns 'temp', 'conc'"),
        (X[:0], r"pass at least one query"),
    ],
)  # fmt: skip
def test_queries_with_other_columns_are_refused(queries: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CALIBRATED.assess(queries)


CALIBRATED = calibrated(X)


def test_a_table_for_an_estimator_of_arrays_is_refused() -> None:
    x = X[["temp"]].to_numpy()
    geoq = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(x, Y)
    with pytest.raises(TypeError, match="x is a data frame, but GeoQ was fitted on an"):
        geoq.assess(X[["temp"]])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"tmp": Number()}, r"Columns describes 'tmp', but x has the columns 'temp'"),
        ({"temp": Log}, r"Columns\(\{'temp': <class .*Log'>\}\): a kind is an object"),
        ({"temp": "log"}, r"a kind is an object of geoq.columns; pass Number\(\)"),
        ({"site": Number()}, r"column 'site' holds categories, but its kind is Number"),
        ({name: Ignored() for name in COLUMNS}, r"all columns are ignored"),
        (["temp"], r"kinds must map columns to kinds"),
    ],
)
def test_wrong_kinds_are_refused(kinds: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        calibrated(X, representation=Columns(kinds))


def test_logarithms_of_zero_and_impossible_periods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"column 'temp' has the value 0, but Log\(\)"):
        calibrated(X.assign(temp=0.0), representation=Columns({"temp": Log()}))
    with pytest.raises(ValueError, match="period must be a positive number"):
        Periodic(0)


def test_identifiers_are_ignored_with_a_warning() -> None:
    x = X.assign(name=[f"car {i}" for i in range(N)])
    with pytest.warns(UserWarning, match="column 'name' has 80 different values in 80"):
        geoq = GeoQ(lambda x: surrogate(x[COLUMNS]), None, folds=RandomFolds(5)).fit(
            x, Y
        )
    assert geoq.assess(x.assign(name="new")).safe.mean() > 0.9


@FRAMES
def test_a_file_keeps_names_and_levels(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    x = make()
    geoq = calibrated(x)
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    queries = make(site=["Mars"] * 3 + ["rare"] * (N - 3))[:6]
    before, after = geoq.assess(queries), loaded.assess(queries)
    np.testing.assert_array_equal(before.error_hat, after.error_hat)
    assert [before.reason(i) for i in range(6)] == [after.reason(i) for i in range(6)]
    with pytest.raises(ValueError, match="surrogate is not the one that the file was"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: 2 * surrogate(x))
    with pytest.raises(ValueError, match="x lacks the column 'site'"):
        loaded.assess(x[["temp", "conc", "on", "day"]])


def test_a_file_is_loaded_without_the_library_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(polars_frame()).save(tmp_path / "a.geoq")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.warns(UserWarning, match="a table that cannot be rebuilt here"):
        loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    assert loaded.assess(X).safe.mean() > 0.9


def pipeline() -> Any:
    encode = OneHotEncoder(handle_unknown="ignore")
    columns = make_column_transformer(
        (encode, ["site"]), ("passthrough", ["temp", "conc", "on"])
    )
    return make_pipeline(columns, DecisionTreeRegressor(random_state=0))


@FRAMES
def test_a_regressor_passes_the_table_to_its_pipeline(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    x = make()
    y = pd.Series(outputs(x), name="flow") if make is pandas_frame else pl.Series(outputs(x))  # fmt: skip
    if make is pandas_frame:
        y.index = x.index
    regressor = GeoQRegressor(pipeline(), folds=RandomFolds(5)).fit(x, y)
    assert list(regressor.feature_names_in_) == COLUMNS
    np.testing.assert_array_equal(regressor.predict(x), regressor.estimator_.predict(x))
    answer = regressor.assess(make(site=["Mars"] * N))
    assert not answer.safe.any()
    assert regressor.assess(x).safe.mean() > 0.9
    with pytest.raises(ValueError, match=r"feature names should match|same order"):
        regressor.predict(x[COLUMNS[::-1]])
    regressor.save(tmp_path / "a.geoq")
    loaded = GeoQRegressor.load(tmp_path / "a.geoq", estimator=regressor.estimator_)
    np.testing.assert_array_equal(loaded.bound(x), regressor.bound(x))


def test_a_regressor_that_accepts_missing_values_has_them() -> None:
    x = X.assign(conc=X["conc"].where(X["conc"] > 1))[["temp", "conc"]]
    regressor = GeoQRegressor(
        DecisionTreeRegressor(random_state=0), folds=RandomFolds(5)
    ).fit(x, Y)
    assert regressor.assess(x).safe.mean() > 0.9
    missing = regressor.assess(pd.DataFrame({"temp": [np.nan], "conc": [2.0]}))
    assert "input temp is missing, but it is never missing" in missing.reason(0)
    with pytest.raises(ValueError, match="contains NaN"):
        GeoQRegressor(Ridge(), folds=RandomFolds(5)).fit(x, Y)


def repeated(n_places: int = 30, n_each: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Noisy measurements, several at each place of a grid that is symmetric about its centre."""
    rng = np.random.default_rng(0)
    places = np.repeat(np.linspace(-1, 1, n_places), n_each)
    order = rng.permutation(len(places))
    x = places[order, None]
    return x, np.sin(3 * x[:, 0]) + rng.normal(0, 0.3, len(x))


@pytest.mark.parametrize(
    "folds", [RandomFolds(5), ClusterFolds(5), NestedFolds(5), default_folds()]
)
def test_all_default_folds_hold_out_rows_with_equal_inputs_together(folds: Any) -> None:
    x, _ = repeated()
    for train, held_out in folds.split(x):
        assert len(train)
        assert len(held_out)
        assert not np.intersect1d(x[train], x[held_out]).size


def test_the_reason_gives_the_spread_of_repeats_at_the_anchor(tmp_path: Path) -> None:
    x, y = repeated()
    geoq = GeoQ(lambda x: np.sin(3 * x[:, 0]), None, folds=RandomFolds(5)).fit(x, y)
    geoq.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    answer = geoq.assess(x[:1])
    spread = y[x[:, 0] == x[0, 0]].std(ddof=1)
    text = f"4 rows of the data have the inputs of this anchor; the standard deviation of their outputs is {spread:.3g}"
    assert text in answer.reason(0)
    assert answer.reason(0) == loaded.assess(x[:1]).reason(0)
    unique = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5)).fit(
        x + np.arange(len(x))[:, None], y
    )
    assert "rows of the data" not in unique.assess(x[:1]).reason(0)


def test_outputs_are_listed_by_name_and_never_averaged(tmp_path: Path) -> None:
    y = pd.DataFrame({"deflection": 1e-6 * Y, "force": 1e3 * Y}, index=X.index)
    y.attrs["units"] = {"deflection": "m"}

    def two(x: Any) -> np.ndarray:
        return np.stack([1.1e-6 * outputs(x), 1.1e3 * outputs(x)], axis=1)

    geoq = GeoQ(two, None, folds=RandomFolds(5)).fit(X, y)
    answer = geoq.assess(X[:1])
    bounds = answer.error_hat[0]
    reason = answer.reason(0)
    assert reason.startswith(
        "query 0: error bounds of 2 outputs (quantile level 0.95), safe"
    )
    assert (
        f"  deflection (m): prediction {answer.prediction[0, 0]:.4g}, error bound {bounds[0]:.3g} = anchor "
        in reason
    )
    assert f", error bound {bounds[1]:.3g} = anchor error " in reason
    assert "mean" not in reason
    named = answer.reason(0, outputs=["a in mm", "b in N"])
    assert "  a in mm: prediction" in named
    with pytest.raises(ValueError, match="outputs has 1 entries, but an error has 2"):
        answer.reason(0, outputs=["a"])
    geoq.save(tmp_path / "a.geoq")
    assert GeoQ.load(tmp_path / "a.geoq", surrogate=two).assess(X[:1]).reason(0) == reason  # fmt: skip


def test_an_encoder_that_refuses_new_categories_gets_a_note() -> None:
    x = X[["temp", "site"]].assign(site=["once"] + ["often"] * (N - 1))
    model = make_pipeline(
        make_column_transformer((OneHotEncoder(), ["site"]), remainder="passthrough"),
        Ridge(),
    )
    with pytest.raises(ValueError, match="Found unknown categories") as caught:
        GeoQRegressor(model, folds=RandomFolds(5)).fit(x, Y)
    assert re.search(
        r"training rows lack site='once', so the model must accept new categories",
        caught.value.__notes__[0],
    )


def test_a_list_of_fields_with_different_shapes_is_refused():
    rows = [np.zeros((2, 5)), np.zeros((2, 6))]
    for refuse in (input_rows, output_rows):
        with pytest.raises(ValueError, match=r"\(2, 5\) and \(2, 6\), .*common nodes"):
            refuse(rows)
