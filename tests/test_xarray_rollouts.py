from functools import partial

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from henon import STATES, STEP, analogue, driven
from henon import train_forced as train
from numpy.testing import assert_array_equal

from geoq import RolloutGeoQ
from geoq.parts import Norm
from geoq.xarray import Labelled

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
    return Labelled(small(STEP, analogue)).fit(FIT)


@pytest.fixture(scope="module")
def answer(fitted):
    return fitted.assess(ASKED, 30, TOLERANCE)


def test_the_answers_are_those_of_rollout_geoq_with_steps_lead_times_variables_and_units(
    fitted, answer
):
    plain = small(STEP, analogue).fit(STATES[:700])
    a = plain.assess(STATES[700:720], 30, np.array([0.4, 0.1]))
    for name in ("prediction", "error_hat", "safe", "support_score", "diverged_at"):
        assert_array_equal(answer[name], getattr(a, name))
    assert_array_equal(answer.trusted_horizon, a.trusted_horizon)
    assert_array_equal(answer.bound_over_tolerance, a.bound_over_tolerance)
    norm = plain.assess(STATES[702:703], 30, Norm(np.array([0.4, 0.1])))
    reason = fitted.reason(ASKED.isel(time=2), 30, Norm(TOLERANCE))
    assert reason.splitlines()[1:] == norm.reason(0).splitlines()[1:]
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
    lazy.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as read:
        assert_array_equal(read.error_hat, answer.error_hat)
        assert_array_equal(read.trusted_horizon, answer.trusted_horizon)


def test_initial_states_can_have_any_further_dimensions(fitted, answer):
    one = fitted.assess(ASKED.isel(time=3), 30, TOLERANCE)
    xr.testing.assert_allclose(one, answer.isel(time=3))
    # Variables are matched by name.
    members = ASKED[["v", "u"]].assign(w=ASKED.u).isel(time=slice(6)).expand_dims(member=[1, 2])
    several = fitted.assess(members, 30, TOLERANCE)
    assert several.error_hat.sizes == {"member": 2, "time": 6, "step": 30, "variable": 2}
    assert_array_equal(several.error_hat[1], answer.error_hat[:6])
    assert_array_equal(several.member, [1, 2])


def test_reasons_name_initial_states_by_their_time_and_nan_in_one_does_not_stop_the_others(
    fitted, answer
):
    gap = ASKED.where(ASKED.time != ASKED.time[4])
    for asked in (gap, gap.chunk(time=6)):
        a = fitted.assess(asked, 30, TOLERANCE).compute()
        assert a.error_hat[4].isnull().all()
        assert not a.safe[4].any()
        assert_array_equal(a.error_hat[5:], answer.error_hat[5:])
    assert "is nan" in fitted.reason(gap.isel(time=4), 30)
    reason = fitted.reason(ASKED.isel(time=2), 30, TOLERANCE)
    assert reason.startswith("rollout from time 2020-06-24 12:00:00: trusted for")
    with pytest.raises(ValueError, match="x has 20 queries; select one"):
        fitted.reason(ASKED, 30)


def test_a_loaded_estimator_gives_the_same_answers(fitted, answer, tmp_path):
    fitted.save(tmp_path / "a.geoq")
    loaded = Labelled.load(tmp_path / "a.geoq", surrogate=STEP)
    xr.testing.assert_identical(loaded.assess(ASKED, 30, TOLERANCE), answer)
    plain = RolloutGeoQ.load(tmp_path / "a.geoq", surrogate=STEP)
    assert_array_equal(plain.bound(STATES[700:702], 30), answer.error_hat[:2])
    plain.save(tmp_path / "b.geoq")
    with pytest.raises(ValueError, match="load it with RolloutGeoQ"):
        Labelled.load(tmp_path / "b.geoq", surrogate=STEP)


def test_a_list_and_a_dimension_of_trajectories_are_the_same():
    parts = [dataset(STATES[i : i + 200]) for i in (0, 200, 400)]
    listed = Labelled(small(STEP, analogue)).fit(parts)
    joined = Labelled(small(STEP, analogue), "time", "run")
    joined.fit(xr.concat(parts, pd.Index([1, 2, 3], name="run")))
    xr.testing.assert_identical(listed.assess(ASKED, 30), joined.assess(ASKED, 30))


def test_a_series_of_numbers_and_an_output_have_their_own_dimensions():
    """A window of two lags, of which the newest is bounded; and a single value without any other dimension."""
    series = DATA.u
    single = Labelled(small(lambda x: 0.9 * x, None)).fit(series[:700])
    a = single.assess(series[700:703], 5, 0.5)
    assert a.error_hat.dims == ("time", "step")
    assert a.error_hat.attrs == {"units": "m s-1"}
    windows = series.rolling(time=2).construct("lag").dropna("time")
    windows = windows.assign_coords(lag=[-1, 0])
    lagged = small(lambda x: np.stack([x[:, 1], 0.9 * x[:, 1]], 1), None, output=-1)
    b = Labelled(lagged).fit(windows[:700]).assess(windows[700:703], 5)
    assert b.error_hat.dims == ("time", "step", "lag")
    assert_array_equal(b.lag, [0])


DRIVEN, FORCING = driven(12, 100, seed=0)


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


@pytest.fixture(scope="module")
def forced():
    states, inputs = forced_data()
    return Labelled(small(None, train), trajectory_dim="run").fit(states, forcing=inputs)


def test_a_forcing_is_a_series_selected_by_the_times_of_the_steps(forced, tmp_path):
    states, inputs = forced_data()
    plain = small(None, train).fit([*DRIVEN], forcing=[*FORCING])
    asked = states.isel(time=[10, 40])
    a = forced.assess(asked, 20, 0.3, forcing=inputs)
    for place, start in enumerate((10, 40)):
        along = FORCING[:, start : start + 20]
        b = plain.assess(DRIVEN[:, start], 20, 0.3, forcing=along)
        assert_array_equal(a.error_hat.isel(time=place), b.error_hat)
        assert_array_equal(a.trusted_horizon.isel(time=place), b.trusted_horizon)
    forced.save(tmp_path / "a.geoq")
    loaded = Labelled.load(tmp_path / "a.geoq", surrogate=forced.estimator_.surrogate_)
    lazy = loaded.assess(asked.chunk(run=5), 20, 0.3, forcing=inputs)
    xr.testing.assert_allclose(lazy.compute(), a)
    # Other times in the series and another order change nothing; a missing time is no other time.
    hours = pd.date_range(TIME[0], TIME[99], freq="h")
    finer = inputs.interp(time=hours).isel(time=slice(None, None, -1))
    xr.testing.assert_allclose(forced.assess(asked, 20, 0.3, forcing=finer), a)
    with pytest.raises(ValueError, match="a step starts at 2020-01-05T00"):
        forced.assess(asked, 20, forcing=inputs.drop_isel(time=16))


def test_a_forcing_is_given_per_step_or_as_a_constant_with_scenarios(forced):
    states, inputs = forced_data()
    steps = inputs.force.isel(run=0, time=slice(20), drop=True).rename(time="step")
    scenarios = xr.concat([steps, 0 * steps], pd.Index(["wind", "calm"], name="case"))
    one = xr.Dataset({"force": scenarios.drop_vars("step"), "damping": 0.4})
    start = states.isel(run=3, time=10)
    c = forced.assess(start, 20, forcing=one)
    assert c.error_hat.sizes == {"case": 2, "step": 20, "part": 2}
    assert list(c.case.values) == ["wind", "calm"]
    strong = one.assign(damping=5.0)
    assert not forced.assess(start, 20, forcing=strong).safe.any()
    reason = forced.reason(start, 20, forcing=strong.isel(case=0))
    assert "forcing 1 of step 1 is 5, but" in reason
    constant = xr.Dataset({"force": 0.1, "damping": 0.4})
    calm = xr.Dataset({"force": ("step", np.full(20, 0.1)), "damping": 0.4})
    a, b = (forced.assess(start, 20, forcing=given) for given in (constant, calm))
    xr.testing.assert_identical(a, b)


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: x.isel(time=[*range(50), *range(60, 700)]), "x has a gap after 2020-01-13"),
    (lambda x: x.isel(time=slice(None, None, -1)), r"not in order; .*sortby\('time'\)"),
    (lambda x: x.where(x.time != x.time[3]), "nan"),
    (lambda x: x.rename(time="day"), "no dimension 'time'"),
    (lambda x: [x, x.rename(u="w")], r"has the variables .* also had \['u'\]"),
])  # fmt: skip
def test_unusable_trajectories_raise_before_any_training(change, message):
    def never(segments):
        raise AssertionError

    with pytest.raises(ValueError, match=message):
        Labelled(small(STEP, never)).fit(change(FIT))


def test_the_forcing_of_a_trajectory_is_selected_from_a_longer_series():
    states, inputs = forced_data()
    runs, series = [states[0, :60], states[0, 40:]], inputs.isel(run=0)
    estimator = Labelled(small(None, train, n_calibration=10))
    a = estimator.fit(runs, forcing=series).bound(runs[0][3], 10, forcing=series)
    estimator.fit(runs, forcing=[series.sel(time=run.time) for run in runs])
    xr.testing.assert_identical(a, estimator.bound(runs[0][3], 10, forcing=series))
    with pytest.raises(ValueError, match="forcing has 90 labels from"):
        estimator.fit(runs, forcing=series.isel(time=slice(90)))


def test_months_need_a_forcing_per_step():
    """The time between two months varies, so the times of the steps are unknown."""
    months = pd.date_range("1950-01-01", periods=100, freq="MS")
    states, inputs = (
        part.isel(run=0, drop=True).assign_coords(time=months) for part in forced_data()
    )
    labelled = Labelled(small(None, train, n_calibration=10)).fit(states, forcing=inputs)
    start = states.isel(time=3)
    with pytest.raises(ValueError, match="pass forcing along 'step'"):
        labelled.assess(start, 10, forcing=inputs)
    steps = inputs.isel(time=slice(3, 13)).rename(time="step").drop_vars("step")
    assert "lead_time" not in labelled.assess(start, 10, forcing=steps).coords


@pytest.mark.parametrize(("arguments", "message"), [
    ((ASKED[["u"]], 5), r"x has the variables \['u'\], but fit also had \['v'\]"),
    ((ASKED.u, 5), r"x has dimensions \('time',\), but fit also had \['variable'\]"),
    ((ASKED, 0), "n_steps"),
    ((ASKED,), "n_steps"),
    ((ASKED, 5, {"u": 1.0}), r"tolerance has the variables .* also had \['v'\]"),
    ((ASKED.assign(u=ASKED.u.assign_attrs(units="K")), 5), "the units 'K'"),
])  # fmt: skip
@pytest.mark.parametrize("chunks", [{}, {"time": 5}])
def test_unusable_queries_raise_before_anything_is_computed(fitted, arguments, message, chunks):
    x, *others = arguments
    with pytest.raises((ValueError, TypeError), match=message):
        fitted.assess(x.chunk(chunks) if chunks else x, *others)


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: None, "fit received a forcing with"),
    (lambda f: f[["force"]], r"also had \['damping'\]"),
    (lambda f: f.isel(time=slice(25)), "a step starts at 2020-01-07T06"),
    (lambda f: f.where(f.time != f.time[15]), "forcing.* is nan"),
    (lambda f: f.isel(run=slice(None, None, -1)), "run"),
    (lambda f: f.isel(time=slice(3)).rename(time="step"), "n_steps=20 need"),
])  # fmt: skip
def test_unusable_forcings_of_queries_raise(forced, change, message):
    states, inputs = forced_data()
    with pytest.raises(ValueError, match=message):
        forced.assess(states.isel(time=10), 20, forcing=change(inputs))


def test_arguments_of_the_other_estimator_raise(fitted):
    with pytest.raises(ValueError, match="fit received no forcing"):
        fitted.assess(ASKED, 5, forcing=ASKED.u)
    with pytest.raises(TypeError, match="a RolloutGeoQ with x and forcing"):
        Labelled(small(STEP, None)).fit(FIT, FIT)
    with pytest.raises(TypeError, match=r"Labelled\(<class .*needs a GeoQ with x"):
        Labelled(RolloutGeoQ).fit(FIT, FIT)
    with pytest.raises(TypeError, match="groups"):
        Labelled(small(STEP, None)).fit(FIT, groups=[1])
    assert Labelled(small(None, lambda runs: STEP)).estimate(FIT).n_trainings == 6
