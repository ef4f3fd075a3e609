"""Pictures of a fitted estimator: along each input, and of its calibration."""

import datetime as dt

import numpy as np
import pandas as pd
import polars as pl
import pytest
from matplotlib.dates import num2date
from matplotlib.figure import Figure

from geoq import ClusterFolds, CombinedFolds, GeoQ, RandomFolds, norm_error, plots
from geoq.parts import Columns, Periodic, TwoLawBound

RNG = np.random.default_rng(0)
N = 90
COLUMNS = {
    "temp": RNG.uniform(-1, 1, N),
    "conc": 10 ** RNG.uniform(-4, 1, N),
    "site": RNG.choice(["north", "south"], N),
    "count": RNG.integers(0, 9, N),
    "day": [dt.datetime(2024, 1, 1) + dt.timedelta(days=i) for i in range(N)],
    "hour": RNG.uniform(0, 24, N),
    "fixed": np.full(N, 3.0),
}
BOTH = CombinedFolds(RandomFolds(4), ClusterFolds(3))


def model(x):
    return np.sin(3 * np.asarray(x["temp"])) + 0.1 * (np.asarray(x["site"]) == "north")


def array(surrogate, **settings):
    x = np.random.default_rng(1).uniform(-1, 1, (80, 2))
    estimator = GeoQ(surrogate, None, **({"folds": BOTH} | settings))
    return estimator.fit(x, 1.1 * surrogate(x) + 0.1 * surrogate(x) ** 2)


def first(x):
    return x[:, 0]


def two(x):
    return x[:, :2] * [1.0, 100.0]


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame])
def test_each_column_that_varies_has_a_panel_with_its_name(make, tmp_path):
    x = make(COLUMNS)
    columns = Columns({"hour": Periodic(24)})
    estimator = GeoQ(model, None, folds=RandomFolds(5), representation=columns)
    estimator.fit(x, model(x) + 0.1 * np.log10(COLUMNS["conc"]))
    figure = Figure(figsize=(11, 6))
    axes = plots.inputs(figure, estimator, make(COLUMNS)[:1])
    figure.savefig(tmp_path / "picture.png")  # fails if a label cannot be drawn
    names = [panel.get_xlabel() for panel in axes]
    assert names == ["temp", "conc", "site", "count", "day", "hour"]
    temp, conc, site, count, day, hour = axes
    assert conc.get_xscale() == "log"
    assert [tick.get_text() for tick in site.get_xticklabels()] == ["north", "south"]
    steps = count.lines[0].get_xdata()
    np.testing.assert_array_equal(steps, np.round(steps))
    assert num2date(day.get_xlim()[1]).year == 2024
    assert hour.get_xlim() == (0, 24)
    (ticks,) = (line for line in temp.lines if line.get_label() == "calibration points")
    np.testing.assert_allclose(ticks.get_xdata(), np.sort(COLUMNS["temp"]))
    new = make({name: values[:1] for name, values in COLUMNS.items()} | {"site": ["west"]})
    with pytest.raises(ValueError, match="x0 has a category that the data do not contain"):
        plots.inputs(Figure(), estimator, new)


def test_a_panel_shows_the_answers_at_its_queries():
    estimator = array(first)
    axes = plots.inputs(Figure(), estimator, [0.3, -0.2])
    line = axes[0].lines[0]
    moved = np.stack([line.get_xdata(), np.full(len(line.get_xdata()), -0.2)], axis=1)
    answer = estimator.assess(moved)
    np.testing.assert_array_equal(line.get_ydata(), answer.prediction)
    band = axes[0].collections[0].get_paths()[0].vertices[:, 1]
    for end in (answer.prediction - answer.error_hat, answer.prediction + answer.error_hat):
        assert abs(end[:, None] - band).min(axis=1).max() < 1e-9
    (safe,) = axes[0].patches
    ends = moved[answer.safe, 0].min(), moved[answer.safe, 0].max()
    assert (safe.get_x(), safe.get_x() + safe.get_width()) == pytest.approx(ends)


def test_one_output_of_several_is_drawn_with_its_name_and_a_norm_without_a_band():
    (axes, _) = plots.inputs(Figure(), array(two, error_functional=norm_error), np.zeros((1, 2)))
    assert axes.figure.get_supylabel() == "error bound"
    assert not axes.collections
    estimator = array(two)
    axes = plots.inputs(Figure(), estimator, np.zeros(2), output=1, names=["u", "v"])
    assert [panel.get_xlabel() for panel in axes] == ["u", "v"]
    assert axes[0].figure.get_supylabel() == "prediction of output 1"
    assert np.ptp(axes[1].lines[0].get_ydata()) > 100
    answer = estimator.assess(np.zeros((3, 2)))
    left, right = plots.summary(Figure(), answer, output=1, error=answer.error_hat)
    assert left.get_ylabel() == right.get_ylabel() == "error bound of output 1"


def test_the_calibration_shows_each_error_and_the_coverage_of_each_family(tmp_path):
    estimator = array(first)
    figure = Figure(figsize=(10, 7))
    errors, by_distance, by_family, folds = plots.calibration(figure, estimator)
    figure.savefig(tmp_path / "picture.png")
    tuples, bound = estimator.fitted_.tuples, estimator.fitted_.bound
    random, cluster = errors.collections[:2]
    assert len(random.get_offsets()) == len(cluster.get_offsets()) == 80
    covered = tuples.error <= bound(tuples.features)
    for number, line in enumerate(by_family.lines[:2]):
        expected = covered[tuples.family == number].mean()
        assert line.get_ydata()[0] == pytest.approx(float(expected))
    names = [tick.get_text() for tick in by_family.get_xticklabels()]
    assert names == ["RandomFolds", "ClusterFolds"]
    assert len(by_distance.lines[0].get_xdata()) == 10
    assert np.mean(by_distance.lines[0].get_ydata()) == pytest.approx(float(covered.mean()))
    drawn_folds = [n for line in folds.lines for n in line.get_xdata().tolist()]
    assert drawn_folds == [1, 2, 3, 4, 5, 6, 7]
    assert "160 held-out errors from 7 folds" in figure.get_suptitle()


def test_the_calibration_of_several_outputs_of_fields_and_of_land():
    plots.calibration(figure := Figure(), array(two), output=1)
    assert "held-out errors of output 1 from" in figure.get_suptitle()

    def field(x):
        return x[:, 0, None, None] * np.ones((3, 4))

    estimator = array(field, bound_model=TwoLawBound())
    plots.calibration(figure := Figure(), estimator)
    assert "held-out errors of a field from" in figure.get_suptitle()
    x = np.random.default_rng(1).uniform(-1, 1, (80, 2))
    land = np.ma.array(field(x) ** 2, mask=np.arange(4) * np.ones((80, 3, 1)) > 2)
    errors, *_ = plots.calibration(Figure(), estimator.fit(x, land))
    assert np.isfinite(errors.collections[0].get_offsets()).all()
    errors, *_ = plots.calibration(Figure(), estimator.fit(x, RNG.normal(size=(80, 3, 4))))
    fitted = estimator.fitted_
    above = (fitted.tuples.error > fitted.bound(fitted.tuples.features)).mean(axis=(1, 2))
    shown = np.concatenate([points.get_array() for points in errors.collections])
    np.testing.assert_allclose(np.sort(shown), np.sort(above))
    with pytest.raises(IndexError, match="output=2, but 2 were assessed"):
        plots.calibration(Figure(), array(two), output=2)
