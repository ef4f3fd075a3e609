"""Pictures of a fitted estimator: along each input, and of its calibration."""

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from matplotlib.dates import num2date
from matplotlib.figure import Figure

from geoq import ClusterFolds, CombinedFolds, GeoQ, RandomFolds, norm_error, plots

RNG = np.random.default_rng(0)
N = 90
COLUMNS = {
    "temp": RNG.uniform(-1, 1, N),
    "conc": 10 ** RNG.uniform(-4, 1, N),
    "site": RNG.choice(["north", "south"], N),
    "count": RNG.integers(0, 9, N),
    "day": [dt.datetime(2024, 1, 1) + dt.timedelta(days=i) for i in range(N)],
    "fixed": np.full(N, 3.0),
}
X = pd.DataFrame(COLUMNS)
BOTH = CombinedFolds(RandomFolds(4), ClusterFolds(3))


def model(x: Any) -> np.ndarray:
    return np.sin(3 * np.asarray(x["temp"])) + 0.1 * (np.asarray(x["site"]) == "north")


def table(make: Any = pd.DataFrame) -> GeoQ:
    x = make(COLUMNS)
    y = model(x) + 0.1 * np.log10(COLUMNS["conc"])
    return GeoQ(model, None, folds=RandomFolds(5)).fit(x, y)


def array(surrogate: Any, n_inputs: int = 2, **settings: Any) -> GeoQ:
    x = np.random.default_rng(1).uniform(-1, 1, (80, n_inputs))
    geoq = GeoQ(surrogate, None, **({"folds": BOTH} | settings))
    return geoq.fit(x, 1.1 * surrogate(x) + 0.1 * surrogate(x) ** 2)


def first(x: Any) -> Any:
    return x[:, 0]


def two(x: Any) -> np.ndarray:
    return x[:, :2] * [1.0, 100.0]


def drawn(figure: Figure, tmp_path: Any) -> None:
    figure.savefig(tmp_path / "picture.png")  # fails if a label cannot be drawn


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame])
def test_each_column_that_varies_has_a_panel_with_its_name(
    make: Any, tmp_path: Any
) -> None:
    geoq = table(make)
    figure = Figure(figsize=(11, 6))
    axes = plots.inputs(figure, geoq, make(COLUMNS)[:1])
    drawn(figure, tmp_path)
    names = [panel.get_xlabel() for panel in axes]
    assert names == ["temp", "conc", "site", "count", "day"]
    temp, conc, site, count, day = axes
    assert conc.get_xscale() == "log"
    assert [tick.get_text() for tick in site.get_xticklabels()] == ["north", "south"]
    steps = count.lines[0].get_xdata()
    np.testing.assert_array_equal(steps, np.round(steps))
    assert num2date(day.get_xlim()[1]).year == 2024
    (ticks,) = (line for line in temp.lines if line.get_label() == "calibration points")
    np.testing.assert_allclose(ticks.get_xdata(), np.sort(COLUMNS["temp"]))


def test_a_panel_shows_the_answers_at_its_queries() -> None:
    geoq = array(first)
    axes = plots.inputs(Figure(), geoq, [0.3, -0.2])
    line = axes[0].lines[0]
    moved = np.stack([line.get_xdata(), np.full(len(line.get_xdata()), -0.2)], axis=1)
    answer = geoq.assess(moved)
    np.testing.assert_array_equal(line.get_ydata(), answer.prediction)
    band = axes[0].collections[0].get_paths()[0].vertices[:, 1]
    for end in (
        answer.prediction - answer.error_hat,
        answer.prediction + answer.error_hat,
    ):
        assert np.isin(end, band).all()
    (safe,) = axes[0].patches
    low, high = safe.get_x(), safe.get_x() + safe.get_width()
    assert (low, high) == pytest.approx(
        (moved[answer.safe, 0].min(), moved[answer.safe, 0].max())
    )


def test_one_output_of_several_is_drawn_with_its_name() -> None:
    geoq = array(two)
    axes = plots.inputs(Figure(), geoq, np.zeros(2), output=1, names=["u", "v"])
    assert [panel.get_xlabel() for panel in axes] == ["u", "v"]
    assert axes[0].get_ylabel() == "prediction of output 1"
    assert np.ptp(axes[1].lines[0].get_ydata()) > 100
    (left,) = plots.summary(Figure(), geoq.assess(np.zeros((3, 2))), output=1)
    assert left.get_ylabel() == "error bound of output 1"


def test_an_error_that_joins_outputs_has_a_bound_and_no_band() -> None:
    geoq = array(two, error_functional=norm_error)
    (axes, _) = plots.inputs(Figure(), geoq, np.zeros((1, 2)))
    assert axes.get_ylabel() == "error bound"
    assert not axes.collections


def test_tensors_and_many_inputs_are_drawn() -> None:
    x = torch.rand(80, 15, generator=torch.Generator().manual_seed(0)).double()
    geoq = GeoQ(lambda x: x[:, 14], None, folds=RandomFolds(4)).fit(x, x[:, 14] ** 2)
    axes = plots.inputs(Figure(), geoq, x[0])
    assert len(axes) == 12
    assert axes[-1].get_xlabel() == "input 14"


@pytest.mark.parametrize(
    ("x0", "message"),
    [
        (np.zeros((2, 2)), r"x0 has shape \(2, 2\), but one query of 2 inputs"),
        (np.zeros(3), r"x0 has shape \(1, 3\), but one query of 2 inputs"),
    ],
)
def test_anything_but_one_query_is_refused(x0: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.inputs(Figure(), array(first), x0)


def test_fields_and_constant_inputs_have_no_panels() -> None:
    x = RNG.normal(size=(40, 5, 6))
    geoq = GeoQ(lambda x: x.mean(axis=(1, 2)), None, folds=RandomFolds(4))
    geoq.fit(x, x.mean(axis=(1, 2)) ** 2)
    with pytest.raises(ValueError, match=r"shape \(5, 6\), but plots.inputs draws tab"):
        plots.inputs(Figure(), geoq, x[:1])


def test_the_calibration_shows_each_error_and_the_coverage_of_each_family(
    tmp_path: Any,
) -> None:
    geoq = array(first)
    figure = Figure(figsize=(10, 7))
    errors, by_distance, by_family, folds = plots.calibration(figure, geoq)
    drawn(figure, tmp_path)
    tuples = geoq.calibration_
    random, cluster = errors.collections[:2]
    assert len(random.get_offsets()) == len(cluster.get_offsets()) == 80
    bound = tuples.features.anchor_error + geoq.increment_model_.at_tuples(tuples)
    covered = (tuples.error <= bound).double()
    for number, line in enumerate(by_family.lines[:2]):
        expected = covered[tuples.family == number].mean()
        assert line.get_ydata()[0] == pytest.approx(float(expected))
    names = [tick.get_text() for tick in by_family.get_xticklabels()]
    assert names == ["RandomFolds", "ClusterFolds"]
    assert len(by_distance.lines[0].get_xdata()) == 10
    assert np.mean(by_distance.lines[0].get_ydata()) == pytest.approx(
        float(covered.mean())
    )
    drawn_folds = [n for line in folds.lines for n in line.get_xdata().tolist()]
    assert drawn_folds == [1, 2, 3, 4, 5, 6, 7]
    assert "160 held-out errors from 7 folds" in figure.get_suptitle()


def test_a_loaded_calibration_is_refused_because_it_has_no_folds(tmp_path: Any) -> None:
    geoq = array(first)
    geoq.save(tmp_path / "a.geoq")
    loaded = type(geoq).load(tmp_path / "a.geoq", surrogate=geoq.surrogate_)
    with pytest.raises(ValueError, match="draw it before save"):
        plots.calibration(Figure(), loaded)


def test_the_calibration_of_several_outputs_and_of_fields() -> None:
    figure = Figure()
    plots.calibration(figure, array(two), output=1)
    assert "held-out errors of output 1 from" in figure.get_suptitle()

    def field(x: Any) -> np.ndarray:
        return x[:, 0, None, None] * np.ones((3, 4))

    plots.calibration(figure := Figure(), array(field))
    assert "held-out errors of a field from" in figure.get_suptitle()
    with pytest.raises(ValueError, match="output=2, but the outputs are 0 to 1"):
        plots.calibration(Figure(), array(two), output=2)
