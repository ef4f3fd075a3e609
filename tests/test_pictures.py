"""The pictures of the benchmarks show the arrays that they are given."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import pictures
from benchmarks.record import RESULTS
from geoq.metrics import coverage_by_bin

DOCS = Path(__file__).parents[1] / "docs"


def shown_rows(name):
    """The rows of results files that a picture of the pages shows."""
    if name == "cost":
        return json.loads((RESULTS / "cost.json").read_text())["growth"]["rows"]
    if name == "kuramoto-sivashinsky-training":
        rows = json.loads((RESULTS / "kuramoto_sivashinsky.json").read_text())["rows"]
        return [row for row in rows if row["method"] == "GeoQ (paper)"]
    file = {"results": "defaults", "fields-shifted": "fields"}.get(name, name)
    return json.loads((RESULTS / f"{file}.json").read_text())["rows"]


DIGESTS = {path.stem: pictures.stored_digest(path) for path in DOCS.glob("*.png")}


@pytest.mark.parametrize("name", [name for name, digest in DIGESTS.items() if digest])
def test_a_picture_shows_the_rows_of_its_results_file(name):
    assert DIGESTS[name] == pictures.digest(shown_rows(name))


def test_pictures_that_are_drawn_from_results_files_have_a_digest():
    assert {n for n, d in DIGESTS.items() if d} >= {
        "cost",
        "third_party",
        "fields-shifted",
        "kuramoto-sivashinsky-training",
        "results",
    }


def test_a_digest_changes_with_a_number_but_not_with_its_eighth_digit(tmp_path):
    rows = [{"seed": 0, "pinball": 0.12345678}, {"seed": 1, "pinball": 0.2}]
    pictures.save(Figure(), tmp_path / "picture.png", rows)
    stored = pictures.stored_digest(tmp_path / "picture.png")
    # Results files have seven digits.
    assert stored == pictures.digest([rows[0] | {"pinball": 0.1234568}, rows[1]])
    assert stored != pictures.digest([rows[0] | {"pinball": 0.123458}, rows[1]])
    assert stored != pictures.digest(rows[::-1])
    Figure().savefig(tmp_path / "other.png")
    assert pictures.stored_digest(tmp_path / "other.png") is None


@pytest.fixture
def axes(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    yield axes
    figure.savefig(tmp_path / "picture.png")  # it can be drawn, labels and all
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_legend() is not None


def test_the_calibration_curve(axes):
    levels = np.array([0.5, 0.9])
    pictures.calibration_curve(
        axes, levels, np.array([0.4, 0.8]), np.array([0.5, 0.92])
    )
    assert axes.lines[1].get_ydata().tolist() == [0.4, 0.8]


def test_the_support_scores(axes, scene):
    _, _, _, a = scene
    pictures.support_scores(axes, a.support_score, a.threshold)
    assert sum(bar.get_height() for bar in axes.patches) == len(a)
    assert f"{a.safe.mean():.0%} safe" in axes.get_legend().get_texts()[0].get_text()


def test_the_coverage_by_score(axes, scene):
    _, _, error, a = scene
    bins = coverage_by_bin(error, a.error_hat[:, 0], a.support_score, 10)
    pictures.coverage_by_score(axes, bins, 0.95)
    assert [bar.get_height() for bar in axes.patches] == [b.coverage for b in bins]


def test_the_error_over_time_marks_the_calibration_horizon(axes):
    error = np.random.default_rng(0).random((3, 20, 4))
    pictures.error_over_time(axes, error, 2 * error, 10)
    curves = {line.get_label(): line for line in axes.lines}
    mean = error.mean(axis=(0, 2))
    np.testing.assert_allclose(curves["true error"].get_ydata(), mean)
    np.testing.assert_allclose(curves["estimate"].get_ydata(), 2 * mean)
    assert curves["true error"].get_xdata()[0] == 1
    assert set(curves["calibration horizon"].get_xdata()) == {10}


def test_a_field_over_space_and_time():
    figure = Figure()
    axes = pictures.space_time(figure.subplots(), np.eye(5, 7), 1.0, "true error")
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), np.eye(5, 7))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("coordinate", "step")


def test_trusted_horizons_are_shown_with_the_true_ones(axes):
    trusted, held = np.array([3, 0, 7]), np.array([5, 2, 6])
    pictures.trusted_horizons(axes, trusted, held)
    assert [bar.get_height() for bar in axes.patches] == [3, 0, 7]
    (dashes,) = axes.collections
    assert [dash[0, 1] for dash in dashes.get_segments()] == [5, 2, 6]


@pytest.mark.parametrize("n", [1, 3, 10, 20, 60, 300])
def test_the_numbers_of_rollouts_do_not_overlap(axes, n):
    pictures.trusted_horizons(axes, np.arange(n), np.arange(n))
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = axes.get_xticks()
    shown = [
        label.get_window_extent()
        for tick, label in zip(ticks, axes.get_xticklabels(), strict=True)
        if low <= tick <= high
    ]
    assert all(left.x1 < right.x0 for left, right in pairwise(shown))
    assert all(tick == round(tick) for tick in ticks)


def test_a_calibration_horizon_past_the_steps_is_not_in_the_legend(axes):
    error = np.ones((3, 20, 4))
    pictures.error_over_time(axes, error, 2 * error, 21)
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["true error", "estimate"]
