from functools import partial

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from henon import STATES, STEP, analogue
from numpy.testing import assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from test_rollout_forcing import FORCING, train
from test_rollout_forcing import STATES as DRIVEN

from geoq import RolloutGeoQ
from geoq.xarray import XarrayGeoQ, XarrayRolloutGeoQ

small = partial(RolloutGeoQ, n_calibration=20, n_starts=20, n_support=5)
TIME = pd.date_range("2020-01-01", periods=len(STATES), freq="6h")
TOLERANCE = {"u": 0.4, "v": 0.1}


def dataset(states, time=TIME):
    """Two variables with units and the coordinates of a netCDF file."""
    data = xr.Dataset(
        {
            "u": ("time", states[:, 0], {"units": "m s-1", "long_name": "wind"}),
            "v": ("time", states[:, 1], {"units": "K"}),
        },
        {"time": time[: len(states)], "station": "Jena"},
        {"Conventions": "CF-1.8"},
    )
    return data.assign_coords(month=data.time.dt.month)


DATA = dataset(STATES)
FIT, ASKED = DATA.isel(time=slice(700)), DATA.isel(time=slice(700, 720))


@pytest.fixture(scope="module")
def fitted():
    return XarrayRolloutGeoQ(small(STEP, analogue)).fit(FIT)


@pytest.fixture(scope="module")
def answer(fitted):
    return fitted.assess(ASKED, 30, TOLERANCE)


def test_the_answers_are_the_answers_of_rollout_geoq_to_plain_arrays(answer):
    plain = small(STEP, analogue).fit(STATES[:700])
    a = plain.assess(STATES[700:720], 30, np.array([0.4, 0.1]))
    for name in ("prediction", "error_hat", "safe", "support_score", "diverged_at"):
        assert_array_equal(answer[name], getattr(a, name))
    assert_array_equal(answer.trusted_horizon, a.trusted_horizon)
    assert answer.attrs["trust"] == str(a.trust)
    assert answer.attrs["threshold"] == a.threshold


def test_answers_have_steps_lead_times_variables_units_and_the_coordinates_of_x0(
    answer,
):
    assert answer.error_hat.dims == ("time", "step", "variable")
    assert answer.safe.dims == ("time", "step")
    assert answer.trusted_horizon.dims == ("time",)
    assert_array_equal(answer.step, np.arange(1, 31))
    assert answer.lead_time[3] == np.timedelta64(24, "h")
    assert answer.valid_time[2, 3] == ASKED.time[2] + np.timedelta64(24, "h")
    assert_array_equal(answer["units"], ["m s-1", "K"])
    assert_array_equal(answer.month, ASKED.month)
    assert answer.station == "Jena"
    v = answer.error_hat.sel(variable="v")
    assert v.dims == ("time", "step")
    assert v.units == "K"


def test_chunks_of_initial_states_give_a_lazy_answer(fitted, answer, tmp_path):
    lazy = fitted.assess(ASKED.chunk(time=6), 30, TOLERANCE)
    assert lazy.error_hat.chunksizes["time"] == (6, 6, 6, 2)
    xr.testing.assert_allclose(lazy.compute(), answer)
    lazy.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as read:
        assert_array_equal(read.trusted_horizon, answer.trusted_horizon)


def test_initial_states_can_have_any_further_dimensions(fitted, answer):
    one = fitted.assess(ASKED.isel(time=3), 30, TOLERANCE)
    xr.testing.assert_allclose(one, answer.isel(time=3))
    members = ASKED.isel(time=slice(6)).expand_dims(member=[1, 2])
    several = fitted.assess(members, 30, TOLERANCE)
    assert several.error_hat.sizes == {
        "member": 2,
        "time": 6,
        "step": 30,
        "variable": 2,
    }
    assert_array_equal(several.error_hat[1], answer.error_hat[:6])
    assert_array_equal(several.member, [1, 2])


def test_variables_are_matched_by_name(fitted, answer):
    more = ASKED[["v", "u"]].assign(w=ASKED.u)
    xr.testing.assert_identical(fitted.assess(more, 30, TOLERANCE), answer)


def test_nan_in_one_initial_state_does_not_stop_the_others(fitted, answer):
    gap = ASKED.where(ASKED.time != ASKED.time[4])
    for asked in (gap, gap.chunk(time=6)):
        a = fitted.assess(asked, 30, TOLERANCE).compute()
        assert a.error_hat[4].isnull().all()
        assert not a.safe[4].any()
        assert_array_equal(a.error_hat[5:], answer.error_hat[5:])
    assert "is nan" in fitted.reason(gap.isel(time=4), 30)


def test_the_reason_names_the_initial_state_by_its_time(fitted):
    reason = fitted.reason(ASKED.isel(time=2), 30, TOLERANCE)
    assert reason.startswith("rollout from time 2020-06-24T12:00")
    with pytest.raises(ValueError, match=r"several initial states along \['time'\]"):
        fitted.reason(ASKED, 30)


def test_a_loaded_estimator_gives_the_same_answers(fitted, answer, tmp_path):
    fitted.save(tmp_path / "a.geoq")
    loaded = XarrayRolloutGeoQ.load(tmp_path / "a.geoq", surrogate=STEP)
    xr.testing.assert_identical(loaded.assess(ASKED, 30, TOLERANCE), answer)
    plain = RolloutGeoQ.load(tmp_path / "a.geoq", surrogate=STEP)
    assert_array_equal(plain.bound(STATES[700:702], 30), answer.error_hat[:2])
    plain.save(tmp_path / "b.geoq")
    with pytest.raises(ValueError, match="not saved by an XarrayRolloutGeoQ"):
        XarrayRolloutGeoQ.load(tmp_path / "b.geoq", surrogate=STEP)


def test_a_list_and_a_dimension_of_trajectories_are_the_same():
    parts = [dataset(STATES[i : i + 200]) for i in (0, 200, 400)]
    listed = XarrayRolloutGeoQ(small(STEP, analogue)).fit(parts)
    joined = XarrayRolloutGeoQ(small(STEP, analogue), "time", "run")
    joined.fit(xr.concat(parts, pd.Index([1, 2, 3], name="run")))
    for one, other in ((listed, joined),):
        xr.testing.assert_identical(one.assess(ASKED, 30), other.assess(ASKED, 30))


def test_a_series_of_numbers_and_an_output_have_their_own_dimensions():
    """A window of two lags, of which the newest is bounded; and a single value without any other dimension."""
    series = DATA.u
    single = XarrayRolloutGeoQ(small(lambda x: 0.9 * x, None)).fit(series[:700])
    a = single.assess(series[700:703], 5, 0.5)
    assert a.error_hat.dims == ("time", "step")
    assert a.error_hat.attrs == {"long_name": "error bound", "units": "m s-1"}
    windows = series.rolling(time=2).construct("lag").dropna("time")
    windows = windows.assign_coords(lag=[-1, 0])
    lagged = small(lambda x: np.stack([x[:, 1], 0.9 * x[:, 1]], 1), None, output=-1)
    b = XarrayRolloutGeoQ(lagged).fit(windows[:700]).assess(windows[700:703], 5)
    assert b.error_hat.dims == ("time", "step", "lag")
    assert_array_equal(b.lag, [0])


def forced_data():
    """Trajectories along ``run`` with a force that varies in time and a damping that belongs to the run."""
    states = xr.DataArray(
        DRIVEN,
        {"time": TIME[:100], "run": np.arange(12), "part": ["angle", "speed"]},
        ("run", "time", "part"),
    )
    force = (("run", "time"), FORCING[..., 0], {"units": "N"})
    inputs = xr.Dataset({"force": force, "damping": ("run", FORCING[:, 0, 1])})
    return states, inputs.assign_coords(time=states.time, run=states.run)


def test_a_forcing_is_given_by_series_by_steps_or_as_a_constant(tmp_path):
    states, inputs = forced_data()
    geoq = XarrayRolloutGeoQ(small(None, train), trajectory_dim="run")
    geoq.fit(states, forcing=inputs)
    plain = small(None, train).fit([*DRIVEN], forcing=[*FORCING])
    asked = states.isel(time=[10, 40])
    a = geoq.assess(asked, 20, 0.3, forcing=inputs)
    for place, start in enumerate((10, 40)):
        along = FORCING[:, start : start + 20]
        b = plain.assess(DRIVEN[:, start], 20, 0.3, forcing=along)
        assert_array_equal(a.error_hat.isel(time=place), b.error_hat)
        assert_array_equal(a.trusted_horizon.isel(time=place), b.trusted_horizon)
    geoq.save(tmp_path / "a.geoq")
    loaded = XarrayRolloutGeoQ.load(
        tmp_path / "a.geoq", surrogate=geoq.geoq_.surrogate_
    )
    lazy = loaded.assess(asked.chunk(run=5), 20, 0.3, forcing=inputs)
    xr.testing.assert_allclose(lazy.compute(), a)
    steps = inputs.force.isel(run=0, time=slice(20), drop=True).rename(time="step")
    scenarios = xr.concat([steps, 0 * steps], pd.Index(["wind", "calm"], name="case"))
    one = xr.Dataset({"force": scenarios.drop_vars("step"), "damping": 0.4})
    c = geoq.assess(states.isel(run=3, time=10), 20, forcing=one)
    assert c.error_hat.sizes == {"case": 2, "step": 20, "part": 2}
    assert list(c.case.values) == ["wind", "calm"]
    strong = one.assign(damping=5.0)
    assert not geoq.assess(states.isel(run=3, time=10), 20, forcing=strong).safe.any()
    assert "forcing 1 of step 1 is 5, but" in geoq.reason(
        states.isel(run=3, time=10), 20, forcing=strong.isel(case=0)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.isel(time=[*range(50), *range(60, 700)]),
            "a gap along 'time' betw",
        ),
        (lambda x: x.isel(time=slice(None, None, -1)), "not in order along 'time'"),
        (lambda x: x.where(x.time != x.time[3]), r"nan at time 2020-01-01 18.* split"),
        (lambda x: x.chunk(time=50), r"chunked, .* trajectories.compute\(\)"),
        (lambda x: x.rename(time="day"), "needs the dimension of time, 'time'"),
        (lambda x: x.expand_dims(step=2), "none named 'step'"),
        (lambda x: [x, x.rename(u="w")], r"has the variables .* also had \['u'\]"),
        (lambda x: [x, x.expand_dims("member")], "pass several trajectories as a list"),
        (lambda x: [x, x.assign(u=x.u.assign_attrs(units="knots"))], "units 'knots'"),
        (lambda x: [], "empty list"),
        (
            lambda x: x.assign(date=("time", x.time.values)),
            r"\['date'\], which are not numbers; .*trajectories\[\['u', 'v'\]\]",
        ),
        (lambda x: x.to_dataarray().values, "must be a DataArray or a Dataset, got"),
    ],
)
def test_unusable_trajectories_are_refused_before_any_training(change, message):
    def never(segments):
        raise AssertionError

    with pytest.raises((ValueError, TypeError), match=message):
        XarrayRolloutGeoQ(small(STEP, never)).fit(change(FIT))


def test_the_forcing_of_a_trajectory_is_selected_from_a_longer_series():
    states, inputs = forced_data()
    runs = [states.isel(run=0, time=slice(60)), states.isel(run=0, time=slice(40, 100))]
    series = inputs.isel(run=0)
    one, other = (
        XarrayRolloutGeoQ(small(None, train, n_calibration=10)).fit(runs, forcing=given)
        for given in (series, [series.sel(time=run.time) for run in runs])
    )
    a, b = (g.bound(runs[0].isel(time=3), 10, forcing=series) for g in (one, other))
    xr.testing.assert_identical(a, b)
    with pytest.raises(ValueError, match="forcing and trajectories differ along"):
        one.fit(runs, forcing=series.isel(time=slice(90)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ASKED[["u"]], 5), r"x0 has the variables \['u'\], but fit also had \['v'\]"),
        (
            (ASKED.u, 5),
            r"x0 has dimensions \('time',\), but it also had \['variable'\]",
        ),
        ((ASKED, 0), "n_steps"),
        ((ASKED, 5, {"u": 1.0}), r"tolerance has the variables .* also had \['v'\]"),
        ((ASKED, 5, ASKED * 0 + 1), r"leave \['time'\] out"),
        ((ASKED, 5, -1.0), "positive"),
        ((ASKED.rename(time="step"), 5), "x0 has a dimension 'step'"),
        ((ASKED.assign(u=ASKED.u.assign_attrs(units="K")), 5), "the units 'K'"),
    ],
)
@pytest.mark.parametrize("chunks", [{}, {"time": 5}])
def test_unusable_queries_are_refused_before_anything_is_computed(
    fitted, arguments, message, chunks
):
    x0, *others = arguments
    lazy = x0.chunk(chunks) if chunks and "time" in x0.dims else x0
    with pytest.raises((ValueError, TypeError), match=message):
        fitted.assess(lazy, *others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: None, "forcing=None, but fit received a forcing"),
        (lambda f: f[["force"]], r"also had \['damping'\]"),
        (
            lambda f: f.isel(time=slice(25)),
            r"needs 20 times from there on; pass a longer",
        ),
        (lambda f: f.where(f.time != f.time[15]), r"forcing is nan at .*fill it"),
        (
            lambda f: f.isel(run=slice(None, None, -1)),
            "labels from 11 to 0 along 'run'",
        ),
        (
            lambda f: f.isel(time=slice(3)).rename(time="step"),
            "has 3 steps, but n_steps",
        ),
    ],
)
def test_unusable_forcings_of_queries_are_refused(change, message):
    states, inputs = forced_data()
    geoq = XarrayRolloutGeoQ(small(None, train), trajectory_dim="run")
    geoq.fit(states, forcing=inputs)
    with pytest.raises(ValueError, match=message):
        geoq.assess(states.isel(time=10), 20, forcing=change(inputs))


def test_other_mistakes_are_refused(fitted):
    with pytest.raises(TypeError, match=r"geoq.xarray.XarrayRolloutGeoQ"):
        XarrayGeoQ(small(STEP, None), "time")
    with pytest.raises(ValueError, match="fit received no forcing"):
        fitted.assess(ASKED, 5, forcing=ASKED.u)
    copy = clone(fitted).set_params(time_dim="day")
    assert copy.get_params()["time_dim"] == "day"
    with pytest.raises(NotFittedError):
        copy.assess(ASKED, 5)
