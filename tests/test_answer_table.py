"""How an answer is read: the reason, the line per query, the table in a notebook and the data frame."""

import re
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import polars as pl
import pytest

from geoq import GeoQ, RandomFolds
from geoq.bounds.fields import FieldBound, NoFactor

RNG = np.random.default_rng(0)
INDEX = [f"run {i} & more" for i in range(80)]
X = pd.DataFrame(RNG.uniform(-1, 1, (80, 2)), columns=["<b>speed</b>", "angle"], index=INDEX)
ARRAY = X.to_numpy()


def model(x):
    return 2.0 * np.asarray(x)[:, 0]


def two(x):
    return np.stack([model(x), 100 * model(x)], axis=1)


def field(x):
    return model(x)[:, None, None] * np.ones((4, 5))


def calibrated(x, surrogate=model, **settings):
    if surrogate is field:
        settings["bound_model"] = FieldBound(factor=NoFactor())
    y = surrogate(x) + 0.1 * surrogate(np.asarray(x)[:, ::-1]) ** 2
    return GeoQ(surrogate, None, folds=RandomFolds(4), **settings).fit(x, y)


class Tables(HTMLParser):
    """The cells of a table; fails on tags that are not closed in order."""

    def __init__(self, answer):
        super().__init__()
        self.open, self.rows, self.caption, self.colours = [], [], "", []
        self.feed(answer._repr_html_())
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.colours += ["background-color" in dict(attrs).get("style", "")] * bool(self.rows)
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "caption":
            self.caption += data
        else:
            assert self.open[-1] in ("td", "th")
            self.rows[-1][-1] += data


def test_the_table_of_a_notebook_has_a_row_per_query_and_escapes_names():
    estimator = calibrated(X)
    queries = X[:3].assign(angle=[0.0, 0.1, 9.0])
    queries.attrs["units"] = {"<b>speed</b>": "m/s"}
    tables = Tables(estimator.assess(queries))
    head, *rows = tables.rows
    inputs = ["<b>speed</b> (m/s)", "angle"]
    assert head == ["", *inputs, "prediction", "bound", "safe", "support_score", "reason"]
    assert rows[2][1:3] == [f"{X.iloc[2, 0]:.4g}", "9"]
    assert [row[0] for row in rows] == INDEX[:3]
    assert {len(row) for row in rows} == {len(head)}
    assert rows[2][-3] == "False"
    assert "input angle is 9, " in rows[2][-1]
    assert tables.colours == [False, False, True]
    assert "The quantile level of the bounds is 0.95" in tables.caption
    speed = Tables(estimator.assess(X[:1].assign(**{"<b>speed</b>": [9.0]})))
    assert "input <b>speed</b> is 9" in speed.rows[1][-1]


def test_values_are_escaped_and_of_many_inputs_the_first_ones_are_shown():
    x = pd.DataFrame({"u": ARRAY[:, 0], "site": np.where(ARRAY[:, 1] > 0, "<script>", "b")})
    estimator = GeoQ(lambda x: np.asarray(x["u"]), None, folds=RandomFolds(4)).fit(x, x["u"] ** 2)
    assert "<script>" in {row[2] for row in Tables(estimator.assess(x[:9])).rows}
    wide = np.repeat(ARRAY, 5, axis=1)
    head, *rows = Tables(calibrated(wide).assess(wide[:2])).rows
    assert head[1:9] == [*(f"input {i}" for i in range(6)), "...", "prediction"]
    assert [row[7] for row in rows] == ["...", "..."]


def test_a_query_without_an_answer_is_in_the_table():
    answer = calibrated(ARRAY).assess(np.where([[False, False], [True, False]], np.nan, ARRAY[:2]))
    row = Tables(answer).rows[2]
    assert row[:6] == ["1", "nan", f"{ARRAY[1, 1]:.4g}", "nan", "nan", "False"]
    assert "input 0 is nan" in row[-1]
    assert "query 1: no error bound, NOT safe" in repr(answer)
    assert "Assessment of 2 queries, 1 of them safe and 1 without an answer" in repr(answer)


PARTS = ["prediction", "error_hat", "lower", "upper"]


@pytest.mark.parametrize(("surrogate", "columns"), [
    (model, PARTS),
    (two, [f"{part} output {i}" for part in PARTS for i in (0, 1)]),
    (field, ["prediction mean", "error_hat mean"]),
])  # fmt: skip
def test_a_frame_has_a_column_per_output_and_the_mean_of_a_field(surrogate, columns):
    answer = calibrated(ARRAY, surrogate).assess(ARRAY[:3])
    frame = answer.to_frame()
    assert list(frame.columns) == [*columns, "safe", "support_score"]
    np.testing.assert_array_equal(frame["safe"], answer.safe)
    bounds = frame.filter(like="error_hat").mean(axis=1)
    np.testing.assert_allclose(bounds, answer.error_hat.reshape(3, -1).mean(axis=1))


def test_a_frame_has_the_library_and_the_index_of_the_queries(monkeypatch):
    estimator, queries = calibrated(X), X[5:8]
    answer = estimator.assess(queries)
    assert answer.to_frame().index.equals(queries.index)
    np.testing.assert_array_equal(queries.join(answer.to_frame())["prediction"], model(queries))
    of_polars = calibrated(pl.DataFrame(ARRAY, schema=["a", "b"]))
    frame = of_polars.assess(pl.DataFrame(ARRAY[:3], schema=["a", "b"])).to_frame()
    assert isinstance(frame, pl.DataFrame)
    of_arrays = calibrated(ARRAY).assess(ARRAY[:3])
    np.testing.assert_array_equal(frame["error_hat"], of_arrays.error_hat)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(of_arrays.to_frame(), pl.DataFrame)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ImportError, match="needs pandas or polars"):
        of_arrays.to_frame()


def test_the_text_of_an_answer_has_a_line_per_query_and_stays_short():
    estimator = calibrated(ARRAY)
    few = estimator.assess(ARRAY[:2])
    title, first, second = repr(few).splitlines()
    assert title.startswith("Assessment of 2 queries, ")
    numbers = f"prediction {few.prediction[0]:.4g}, error bound {few.error_hat[0]:.3g}"
    assert first == f"  query 0: {numbers}, {'safe' if few.safe[0] else 'NOT safe'}"
    assert second.startswith("  query 1: ")
    assert repr(estimator.assess(ARRAY)).splitlines()[-1] == "  ... 75 more"
    assert "error bound of output 1 " in repr(calibrated(ARRAY, two).assess(ARRAY[:1]))
    assert "query 0: mean error bound" in repr(calibrated(ARRAY, field).assess(ARRAY[:1]))


def test_a_reason_gives_the_prediction_the_level_and_the_range_of_each_input():
    answer = calibrated(ARRAY).assess(np.array([[7.0, -8.0]]))
    first, why, *_ = answer.reason(0, name="the prototype", names=["speed", "angle"]).splitlines()
    assert first.startswith("the prototype: prediction 14, error bound ")
    assert " (quantile level 0.95), NOT safe" in first
    for name, value, column in (("speed", "7", 0), ("angle", "-8", 1)):
        assert re.search(rf"input {name} (is |\(){value},? ?", why)
        low, high = ARRAY[:, column].min(), ARRAY[:, column].max()
        assert f"{low:.4g} to {high:.4g}" in why
