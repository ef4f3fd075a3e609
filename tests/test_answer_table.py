"""How an answer is read: the reason, the line per query, the table in a notebook and the data frame."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from geoq import DistanceRegion, GeoQ, RandomFolds

RNG = np.random.default_rng(0)
X = pd.DataFrame(
    RNG.uniform(-1, 1, (80, 2)), columns=["<b>speed</b>", "angle"]
).set_axis([f"run {i} & more" for i in range(80)])
ARRAY = X.to_numpy()


def model(x: Any) -> np.ndarray:
    return 2.0 * np.asarray(x)[:, 0]


def two(x: Any) -> np.ndarray:
    return np.stack([model(x), 100 * model(x)], axis=1)


def field(x: Any) -> np.ndarray:
    return model(x)[:, None, None] * np.ones((4, 5))


def calibrated(x: Any, surrogate: Any = model, **settings: Any) -> GeoQ:
    y = surrogate(x) + 0.1 * surrogate(np.asarray(x)[:, ::-1]) ** 2
    return GeoQ(surrogate, None, folds=RandomFolds(4), **settings).fit(x, y)


class Tables(HTMLParser):
    """The cells of a table; fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.caption = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "caption":
            self.caption += data
        else:
            assert self.open[-1] in ("td", "th")
            self.rows[-1][-1] += data


def parsed(answer: Any) -> Tables:
    tables = Tables()
    tables.feed(answer._repr_html_())
    tables.close()
    assert not tables.open
    return tables


def test_the_table_of_a_notebook_has_a_row_per_query_and_escapes_names() -> None:
    queries = X[:3].assign(angle=[0.0, 0.1, 9.0])
    tables = parsed(calibrated(X).assess(queries))
    head, *rows = tables.rows
    assert head == ["", "prediction", "error_hat", "safe", "support_score", "reason"]
    assert [row[0] for row in rows] == ["run 0 & more", "run 1 & more", "run 2 & more"]
    assert {len(row) for row in rows} == {6}
    assert rows[2][3] == "False"
    assert "input angle is 9, " in rows[2][5]
    assert "The quantile level of the bounds is 0.95" in tables.caption
    speed = X[:1].assign(**{"<b>speed</b>": [9.0]})
    assert "input <b>speed</b> is 9" in parsed(calibrated(X).assess(speed)).rows[1][5]


@pytest.mark.parametrize(("n", "n_rows"), [(1, 1), (20, 20), (21, 21), (80, 21)])
def test_the_table_of_many_queries_is_shortened(n: int, n_rows: int) -> None:
    _, *rows = parsed(calibrated(ARRAY).assess(ARRAY[:n])).rows
    assert len(rows) == n_rows
    assert (rows[-1][0] == "\N{HORIZONTAL ELLIPSIS}") == (n > 20)


def test_a_query_without_an_answer_is_in_the_table() -> None:
    queries = ARRAY[:2].copy()
    queries[1, 0] = np.nan
    answer = calibrated(ARRAY).assess(queries)
    row = parsed(answer).rows[2]
    assert row[:4] == ["1", "nan", "nan", "False"]
    assert "input 0 is nan" in row[5]
    assert "query 1: no error bound, NOT safe" in repr(answer)


@pytest.mark.parametrize(
    ("surrogate", "columns"),
    [
        (model, ["prediction", "error_hat"]),
        (
            two,
            [
                "prediction output 0",
                "prediction output 1",
                "error_hat output 0",
                "error_hat output 1",
            ],
        ),
        (field, ["prediction mean", "error_hat mean"]),
    ],
)
def test_a_frame_has_a_column_per_output_and_the_mean_of_a_field(
    surrogate: Any, columns: list[str]
) -> None:
    answer = calibrated(ARRAY, surrogate).assess(ARRAY[:3])
    frame = answer.to_frame()
    assert list(frame.columns) == [*columns, "safe", "support_score"]
    np.testing.assert_array_equal(frame["safe"], answer.safe)
    flat = answer.error_hat.reshape(3, -1).mean(axis=1)
    bounds = frame.filter(like="error_hat").mean(axis=1)
    np.testing.assert_allclose(bounds, flat)


def test_a_frame_has_the_library_and_the_index_of_the_queries() -> None:
    geoq = calibrated(X)
    queries = X[5:8]
    frame = geoq.assess(queries).to_frame()
    assert frame.index.equals(queries.index)
    joined = queries.join(frame)
    np.testing.assert_array_equal(joined["prediction"], model(queries))
    of_polars = calibrated(pl.DataFrame(ARRAY, schema=["a", "b"]))
    answer = of_polars.assess(pl.DataFrame(ARRAY[:3], schema=["a", "b"]))
    assert isinstance(answer.to_frame(), pl.DataFrame)
    np.testing.assert_array_equal(answer.to_frame()["error_hat"], answer.error_hat)


def test_the_text_of_an_answer_has_a_line_per_query_and_stays_short() -> None:
    geoq = calibrated(ARRAY)
    few = geoq.assess(ARRAY[:2])
    title, first, second = repr(few).splitlines()
    assert title.startswith("Assessment of 2 queries, ")
    assert first == (
        f"  query 0: prediction {few.prediction[0]:.4g}, error bound {few.error_hat[0]:.3g}, "
        + ("safe" if few.safe[0] else "NOT safe")
    )
    assert second.startswith("  query 1: ")
    assert repr(geoq.assess(ARRAY)).splitlines()[-1] == "  ... 75 more"
    assert "error bound of output 1 " in repr(calibrated(ARRAY, two).assess(ARRAY[:1]))
    assert "query 0: mean error bound" in repr(
        calibrated(ARRAY, field).assess(ARRAY[:1])
    )


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])-?\d+\.\d+(?:e-?\d+)?", text)


@pytest.mark.parametrize("settings", [{}, {"safe_region": DistanceRegion()}])
def test_a_reason_prints_no_number_twice(settings: dict[str, Any]) -> None:
    answer = calibrated(ARRAY, **settings).assess(ARRAY[:9] + 0.013)
    for query in range(9):
        found = numbers(answer.reason(query))
        assert len(found) == len(set(found)), answer.reason(query)


def test_a_reason_gives_the_prediction_the_level_and_the_range_of_each_input() -> None:
    answer = calibrated(ARRAY).assess(np.array([[7.0, -8.0]]))
    first, why, *_ = answer.reason(0, names=["speed", "angle"]).splitlines()
    assert first.startswith("query 0: prediction 14, error bound ")
    assert " (quantile level 0.95), NOT safe" in first
    for name, value, column in (("speed", "7", 0), ("angle", "-8", 1)):
        assert re.search(rf"input {name} (is|\(){value},? ?", why.replace("is ", "is"))
        low, high = ARRAY[:, column].min(), ARRAY[:, column].max()
        assert f"{low:.4g} to {high:.4g}" in why


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_masked_cells_of_a_field_do_not_count_in_its_mean(kind: Any) -> None:
    answer = calibrated(ARRAY, field).assess(ARRAY[:3])
    cells = np.zeros((3, 4, 5), dtype=bool)
    cells[:, 0] = True
    if kind is np.asarray:
        masked: Any = np.ma.array(answer.error_hat, mask=cells)
    else:
        masked = torch.from_numpy(np.where(cells, np.nan, answer.error_hat))
    frame = replace(answer, error_hat=masked).to_frame()
    expected = answer.error_hat[:, 1:].reshape(3, -1).mean(axis=1)
    np.testing.assert_allclose(frame["error_hat mean"], expected)
