"""Reports: what they count, that all formats have the same content, that a page is safe to open, and how it looks in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from geoq import GeoQ, Grid, RandomFolds, RolloutGeoQ
from geoq.parts import FieldBound, NoFactor
from geoq.report import report
from geoq.report.evidence import carriers, columns_of, covered, held_out
from geoq.sklearn import GeoQRegressor

VOID = {"meta", "line", "rect", "circle", "path"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


class Page(HTMLParser):
    """Raises for tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def calibrated():
    """A table whose error grows with its first input alone, and a surrogate that is zero."""
    x = np.random.default_rng(0).uniform(size=(300, 3))
    return GeoQ(lambda x: 0 * x[:, 0], None).fit(x, np.exp(3 * x[:, 0])), x


@pytest.fixture(scope="module")
def forecasts():
    angle = 0.1 * np.arange(500)
    states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    step = np.array([[np.cos(0.1), 0.97 * np.sin(0.1)], [-np.sin(0.1), np.cos(0.1)]])
    return RolloutGeoQ(lambda x: x @ step, None, n_calibration=20).fit(states[:400]), states


def written(tmp_path, suffix, *args, **named):
    report(args[0], tmp_path / f"report{suffix}", *args[1:], **named)
    return (tmp_path / f"report{suffix}").read_text()


def test_the_interval_of_a_coverage_is_wilsons_with_the_number_of_groups():
    """Nine of ten rows within their bounds: Wilson's interval is 0.596 to 0.982. Twice the values of a row change nothing."""
    error, bound = np.full((10, 2), 0.5), np.ones((10, 2))
    error[0] = 2
    rows = {"error": error, "bound": bound, "group": np.arange(10)}
    p, low, high, n_values, n = covered(rows)
    assert (p, n_values, n) == (0.9, 20, 10)
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)
    assert covered(rows | {"group": np.arange(10) // 5})[4] == 2


def test_the_input_that_the_error_depends_on_carries_it(calibrated):
    estimator, _ = calibrated
    fitted = estimator.fitted_
    first, *others = carriers(held_out(fitted), columns_of(fitted, ["load", "speed", "angle"]))
    assert first[0] == "load"
    assert first[1] > 0.9  # the rank of the error is the rank of the input, in five bins
    assert max(row[1] for row in others) < 0.1
    assert float(first[2].split(" to ")[0]) > 0.7
    assert first[3] > 1.5


def test_all_formats_have_the_same_content_and_the_same_bytes_twice(calibrated, tmp_path):
    estimator, x = calibrated
    new = x[:40] + 0.3
    args, names = (estimator, new, np.exp(3 * new[:, 0]), x[:20] - 1), ["<b>", "a|b", "c&d"]
    formats = (".html", ".md", ".json", ".html")
    page, card, data, again = (written(tmp_path, s, *args, names=names) for s in formats)
    assert page == again
    assert len(page) < 1_000_000
    shown = Page(page)
    assert not shown.tags & {"script", "link", "img", "b"}
    assert not re.search(r"https?:|src=|href=|url\(|@import", page)
    plain, card = " ".join(shown.texts), card.replace("\\", "")
    for title, parts in json.loads(data)["sections"].items():
        assert title in plain
        assert f"## {title}" in card
        for part in parts:
            cells = [c for row in part["rows"] for c in row if c is not None]
            cells = [c if isinstance(c, str) else f"{c:.4g}" for c in cells]
            assert all(cell in plain and cell in card for cell in [part["text"], *cells])
    assert "NOT safe: input <b>" in plain


def test_a_test_is_counted_apart_from_the_errors_that_the_bound_was_fitted_to(calibrated, tmp_path):
    estimator, x = calibrated
    data = json.loads(written(tmp_path, ".json", estimator, x[:50] + 0.01, np.full(50, 1e9)))
    numbers = {row[0]: row[1:] for row in data["sections"]["Five numbers"][0]["rows"]}
    assert numbers["coverage"][0].startswith("0.000")
    assert numbers["coverage"][1] == "test pairs, safe"
    fitted = json.loads(written(tmp_path, ".json", estimator))["sections"]["Bound against error"]
    assert "this is no test" in fitted[0]["text"]


def test_queries_without_answers_and_a_test_without_safe_queries_are_counted(calibrated, tmp_path):
    """One planned query has no input, and none of the test is safe: what cannot be counted is unknown."""
    estimator, x = calibrated
    planned = np.full((2, 3), np.nan)
    card = written(tmp_path, ".md", estimator, x[:20] + 9, np.ones(20), planned)
    assert "| coverage | unknown | test pairs, safe |" in card
    assert "| fraction safe | 0.000 | planned queries |" in card
    assert "| NOT safe, input 0 is nan" in card


def test_a_report_names_the_guarantee_that_conformalize_gives(tmp_path):
    x = np.random.default_rng(0).uniform(size=(300, 2))
    y = np.sin(5 * x[:, 0])
    estimator = GeoQ(lambda x: 0 * x[:, 0], None, folds=RandomFolds(5)).fit(x[:200], y[:200])
    assert "Nothing is guaranteed" in written(tmp_path, ".md", estimator)
    card = written(tmp_path, ".md", estimator.conformalize(x[200:], y[200:]))
    assert "exchangeable with the 100 pairs" in card
    assert "with a probability of 0.95 or more" in card
    card = written(tmp_path, ".md", estimator.update(x[:30] + 0.02, np.sin(5 * x[:30, 0] + 0.1)))
    assert "Nothing is guaranteed since update received 30 verified queries" in card


def test_forecasts_are_counted_by_lead_time(forecasts, tmp_path):
    estimator, states = forecasts
    truth = np.stack([states[i + 1 : i + 13] for i in range(400, 480, 8)])
    given = states[400:480:8], truth, states[:3] * 5
    data = json.loads(written(tmp_path, ".json", estimator, *given))
    parts = {part["text"]: part for part in data["sections"]["Coverage"]}
    steps = parts["Coverage by lead time"]["rows"]
    assert [row[0] for row in steps[:2]] == ["steps 1 to 2", "steps 3 to 4"]
    assert sum(row[4] for row in steps) == truth.size
    where = [part["text"] for part in data["sections"]["Where the data and the queries are"]]
    assert "Planned queries are supported for 0 of 20 steps (median, from 0 to 0)." in where
    with pytest.raises(ValueError, match="reshape y"):
        report(estimator, tmp_path / "r.md", states[:2], truth)


def test_fields_have_a_map_of_their_coverage(tmp_path):
    x = np.random.default_rng(0).uniform(size=(60, 2))
    grid = np.ones((60, 8, 50)) * x[:, :1, None]
    settings = {"bound_model": FieldBound(factor=NoFactor()), "folds": RandomFolds(5)}
    estimator = GeoQ(lambda x: np.zeros((len(x), 8, 50)), None, domain=Grid(2), **settings)
    page = written(tmp_path, ".html", estimator.fit(x, grid))
    # Two maps of 8 x 40 blocks, each with a scale of 20 colours.
    assert page.count("<rect") == 2 * (8 * 40 + 20)


def test_a_regressor_a_saved_file_and_labelled_arrays_have_reports(calibrated, tmp_path):
    xr = pytest.importorskip("xarray")
    from geoq.xarray import Labelled

    estimator, x = calibrated
    y = np.exp(3 * x[:, 0])
    model = GeoQRegressor(LinearRegression(), folds=RandomFolds(5)).fit(x, y)
    assert "GeoQ(" in written(tmp_path, ".md", model, x[:9] + 0.01, y[:9])
    estimator.save(tmp_path / "small.geoq", calibration=False)
    loaded = GeoQ.load(tmp_path / "small.geoq", surrogate=estimator.surrogate)
    card = written(tmp_path, ".md", loaded, planned=x[:5])
    assert "No errors are stored in the file" in card
    assert "| fraction safe | 1.000 | planned queries |" in card
    dims = {"time": np.arange(300.0), "probe": ["top", "mid", "low"]}
    inputs = xr.DataArray(x, dims)
    outputs = xr.DataArray(y, {"time": dims["time"]}, name="heat", attrs={"units": "W"})
    small = GeoQ(lambda x: 0 * x[:, 0], None, folds=RandomFolds(5))
    labelled = Labelled(small, "time").fit(inputs, outputs)
    card = written(tmp_path, ".md", labelled, inputs[:20] + 0.01, outputs[:20], inputs[:5] + 2)
    assert "| probe top | planned queries |" in card
    with pytest.raises(ValueError, match="labels from top to mid"):
        report(labelled, tmp_path / "r.md", planned=inputs[:, :2])


def test_a_wrong_suffix_and_half_a_test_are_refused(calibrated, tmp_path):
    estimator, x = calibrated
    with pytest.raises(ValueError, match=r"suffix '.pdf'; choose .html, .md, .json"):
        report(estimator, tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="belong together"):
        report(estimator, tmp_path / "report.md", x)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, which shows the page")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 1000), ("light", 360)])
def test_a_browser_shows_the_page(scheme, width, calibrated, tmp_path):
    """The page is as wide as its window, and its background has the colour that the reader prefers."""
    matplotlib = pytest.importorskip("matplotlib.image")
    written(tmp_path, ".html", calibrated[0])
    frame = f'<iframe src="report.html" style="width:{width}px;height:900px;border:0;color-scheme:{scheme}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<body style='margin:0;background:lime'>{frame}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "shot.png"
    flags += ["--window-size=1000,900", f"--screenshot={shot}"]
    command = [CHROMIUM, *flags, f"file://{tmp_path}/frame.html"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    pixels = matplotlib.imread(shot)[..., :3]
    page, background = pixels[:880, :width], pixels[5, 5]
    assert (background.mean() > 0.9) == (scheme == "light")
    written_on = abs(page - background).max(axis=2) > 0.3
    assert 0.01 < written_on.mean() < 0.3
    assert written_on[:, :10].mean() < 0.01
    assert not written_on[:, -5:].any()  # nothing is cut off at the right
