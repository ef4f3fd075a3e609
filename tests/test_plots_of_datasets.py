"""Answers of the xarray interfaces are drawn with their labels."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from geoq import GeoQ, RandomFolds, RolloutGeoQ, plots
from geoq.xarray import XarrayGeoQ, XarrayRolloutGeoQ

DAY = np.timedelta64(1, "D")


@pytest.mark.parametrize("lazy", [False, True])
def test_answers_in_a_dataset_are_drawn_like_plain_answers(lazy):
    """Maps have the coordinates of the grid, rows have their labels, and land is left blank."""
    rng = np.random.default_rng(0)
    grid = {"time": np.arange(60) * DAY, "lat": [10.0, 0.0], "lon": [0.0, 5.0, 10.0]}
    x = xr.DataArray(rng.uniform(size=(60, 2, 3)), grid, ("time", "lat", "lon"))
    y = (x**2).where(x.lon < 10)
    geoq = XarrayGeoQ(GeoQ(np.sqrt, None, folds=RandomFolds(5)), "time").fit(x, y)
    queries = x.isel(time=slice(5))
    answer = geoq.assess(queries.chunk(time=2) if lazy else queries)
    plain = geoq.geoq_.assess(queries.values)
    error = abs(y.isel(time=slice(5)) - answer.prediction)
    error = error.transpose("lon", ...)
    drawn, bound, true = plots.fields(Figure(), answer, 1, error=error)
    assert "% within the bound" in true.get_title()
    assert_allclose(drawn.images[0].get_array().filled(np.nan), answer.prediction[1])
    assert_allclose(bound.images[0].get_extent(), (-2.5, 12.5, 15, -5))
    assert (bound.get_xlabel(), bound.get_ylabel()) == ("lon", "lat")
    assert "time 1 days" in drawn.figure.get_suptitle()
    (left,) = plots.summary(Figure(), answer.isel(lon=[0, 1]))
    assert f"{plain.safe.sum()} of 5 queries safe" in left.get_title()


def test_rollouts_in_a_dataset_are_drawn_like_plain_rollouts():
    angle = 0.2 * np.arange(300)
    waves = xr.Dataset({"u": ("t", np.cos(angle)), "v": ("t", np.sin(angle))})
    matrix = np.array([[0.98, 0.2], [-0.2, 0.98]])
    geoq = RolloutGeoQ(lambda x: x @ matrix, None, n_calibration=20)
    labelled = XarrayRolloutGeoQ(geoq, "t").fit(waves)
    for tolerance in (0.3, {"u": 0.3, "v": 0.2}, None):
        starts = waves.isel(t=[3, 7]).expand_dims(member=["a", "b"])
        answer = labelled.assess(starts, 10, tolerance)
        largest = labelled._tolerance(tolerance)
        states = np.stack([np.cos(angle), np.sin(angle)], axis=1)[[3, 7]]
        plain = labelled.geoq_.assess(states, 10, largest)
        ours, theirs = Figure(), Figure()
        (panel,) = plots.rollouts(ours, answer, [3])
        (expected,) = plots.rollouts(theirs, plain, [1])
        assert len(panel.lines) == len(expected.lines)
        for one, other in zip(panel.lines, expected.lines, strict=True):
            assert_allclose(one.get_ydata(), other.get_ydata())
        title = expected.get_title().replace("rollout 1", "member b, t 1")
        assert panel.get_title().split() == title.split()
