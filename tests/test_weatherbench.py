import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks.record import load
from benchmarks.tables import render
from benchmarks.weather import (
    activity,
    bounds,
    forecast,
    information,
    layout,
    scores,
    tables,
    weatherbench,
)
from benchmarks.weather import data as weather_data
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures

xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")

ROOT = Path(__file__).parents[1]
N_STEPS, N_LAT, N_LON = 160, 4, 8


def autoregression(n_steps, *shape, coefficient=0.9, seed=0):
    noise = np.random.default_rng(seed).standard_normal((n_steps, *shape))
    states = [noise[0]]
    for kick in noise[1:]:
        states.append(coefficient * states[-1] + kick * math.sqrt(1 - coefficient**2))
    return np.array(states, dtype=np.float32)


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def dataset(names, hours, n_steps, n_lat=N_LAT, start="2020-01-01", seed=0):
    """Fields of the named channels, ``hours`` apart."""
    values = autoregression(n_steps, len(names), n_lat, N_LON, seed=seed)
    step = np.timedelta64(hours, "h")
    coordinates = {
        "time": np.datetime64(start, "ns") + step * np.arange(n_steps),
        "lat": np.linspace(-80, 80, n_lat),
        "lon": np.arange(N_LON) * 360 / N_LON,
    }
    fields = {
        name: (("time", "lat", "lon"), values[:, i]) for i, name in enumerate(names)
    }
    return xarray.Dataset(fields, coordinates)


def write(data, path, engine="h5netcdf"):
    path.parent.mkdir(parents=True, exist_ok=True)
    data.to_netcdf(path, engine=engine)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run on a plain file, with its pictures."""
    folder = tmp_path_factory.mktemp("weather")
    write(dataset(("msl", "vo850"), 6, N_STEPS), folder / "data" / "states.nc")
    command = [sys.executable, "-m", "benchmarks.weather.weatherbench", "--small"]
    command += ["--data", folder / "data", "--out", folder / "weather_era5.json"]
    command += ["--pictures", folder]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=600)
    return folder, command


# Reading.


def test_plain_files_give_the_states_of_all_variables(tmp_path):
    data = dataset(("msl", "vo850", "t"), 6, 12)
    write(data, tmp_path / "all.nc")
    weather = weather_data.load(tmp_path)
    assert weather.names == ("msl", "vo850", "t")
    assert weather.values.dtype == np.float32
    np.testing.assert_array_equal(weather.values[:, 1], data.vo850.values)
    np.testing.assert_array_equal(weather.lat, data.lat.values)


def test_weatherbench_folders_give_every_sixth_hour_of_all_years(tmp_path):
    """Three variables under their short names, yearly files in either netCDF format, a level of one kind or another."""
    short = {"geopotential_500": "z", "temperature_850": "t", "2m_temperature": "t2m"}
    whole = {}
    for number, (folder, name) in enumerate(short.items()):
        data = dataset((name,), 1, 72, start="2015-12-30", seed=number)
        whole[folder] = data[name].values
        if name == "z":
            data = data.assign_coords(level=500)
        if name == "t":
            data = data.expand_dims(level=[850])
        for year, rows in ((2016, slice(48, 72)), (2015, slice(0, 48))):
            engine = "scipy" if year == 2015 else "h5netcdf"
            part = data.isel(time=rows)
            write(part, tmp_path / folder / f"{name}_{year}.nc", engine)
    weather = weather_data.load(tmp_path)
    assert weather.names == tuple(short)
    assert weather.values.shape == (12, 3, N_LAT, N_LON)
    for channel, folder in enumerate(short):
        np.testing.assert_array_equal(weather.values[:, channel], whole[folder][::6])


def test_files_in_the_layout_of_the_archive_are_read(tmp_path):
    """Yearly files with the archive's names, grid, level coordinates and units; 36 hours across the end of a year."""
    rng = np.random.default_rng(0)
    time = np.datetime64("1979-12-31T06", "ns") + np.timedelta64(1, "h") * np.arange(36)
    fields = rng.standard_normal((3, 36, 32, 64)).astype(np.float32)
    for variable, values in zip(layout.ARCHIVE, fields, strict=True):
        layout.write_variable(tmp_path, variable, time, values)
    written = sorted(f.relative_to(tmp_path).as_posix() for f in tmp_path.glob("*/*"))
    assert "geopotential_500/geopotential_500hPa_1979_5.625deg.nc" in written
    assert "2m_temperature/2m_temperature_1980_5.625deg.nc" in written
    weather = weather_data.load(tmp_path)
    assert weather.names == weather_data.WEATHERBENCH
    np.testing.assert_array_equal(weather.values, fields[:, ::6].transpose(1, 0, 2, 3))
    np.testing.assert_array_equal(weather.time, time[::6])
    assert weather.lat[0] == -87.1875
    assert weather.lon[-1] == 354.375


def test_hourly_fields_keep_the_six_hourly_ones():
    time = np.datetime64("2020-01-01", "ns") + np.timedelta64(6, "h") * np.arange(3)
    values = np.random.default_rng(0).standard_normal((3, 2, 2))
    hours, fields = layout.hourly(time, values)
    assert len(hours) == len(fields) == 13
    np.testing.assert_array_equal(fields[::6], values)
    np.testing.assert_allclose(fields[3], values[:2].mean(axis=0))


def test_a_period_and_variables_can_be_chosen(tmp_path):
    data = dataset(("a", "b"), 6, 40)
    write(data, tmp_path / "all.nc")
    weather = weather_data.load(tmp_path, ("b",), start="2020-01-03", days=2)
    np.testing.assert_array_equal(weather.values[:, 0], data.b.values[8:16])


def test_the_message_about_missing_data_explains_how_to_get_them(tmp_path):
    command = [sys.executable, "-m", "benchmarks.weather.weatherbench"]
    answer = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert answer.returncode == 1
    assert "no data given" in answer.stderr
    assert "mediatum.ub.tum.de/1524895" in answer.stderr
    with pytest.raises(ValueError, match="holds no netCDF files; pass a folder"):
        weather_data.load(tmp_path)


def test_unusable_data_are_refused(tmp_path):
    good = dataset(("a", "b"), 6, 12)
    holed = good.copy(deep=True)
    holed.b[3, 2, 1] = np.nan
    for name, parts, words in (
        ("holes", [holed], "b has 1 missing value"),
        ("gap", [good.isel(time=[0, 1, 2, 5, 6])], "1 gaps in time, the first after"),
        (
            "grids",
            [good[["a"]], dataset(("c",), 6, 12, n_lat=6)],
            "c and a have different lat coordinates",
        ),
        ("times", [good[["a"]], good[["b"]].isel(time=slice(0, 9))], "different time"),
    ):
        for number, part in enumerate(parts):
            write(part, tmp_path / name / f"{number}.nc")
        with pytest.raises(ValueError, match=words):
            weather_data.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"variables \['q'\] are not in"):
        weather_data.load(tmp_path / "gap", ("q",))


def test_several_levels_in_a_file_are_refused(tmp_path):
    data = dataset(("t",), 6, 4).expand_dims(level=[500, 850])
    write(data, tmp_path / "temperature" / "t.nc")
    with pytest.raises(ValueError, match="select one of them first"):
        weather_data.load(tmp_path)


# Windows.


def test_ninety_days_have_the_origins_of_55_65_and_75_days():
    assert [step / 4 for step in weather_data.origins(360, 40)] == [55, 65, 75]
    values = np.random.default_rng(0).random((360, 1, 2, 2), dtype=np.float32)
    counts = [
        (len(data.x), len(data.x_test))
        for origin in weather_data.origins(360, 40)
        for data in [weather_data.split(values, origin, 3, 40)]
    ]
    assert counts == [(178, 40), (218, 40), (258, 21)]


def test_test_targets_come_after_all_training_states():
    """States are their own time step here."""
    values = np.arange(360, dtype=np.float32).reshape(360, 1, 1, 1)
    for origin in weather_data.origins(360, 40):
        data = weather_data.split(values, origin, 3, 40)
        step = (origin - 1) * torch.cat([data.x, data.y], dim=1)[:, :, 0, 0, 0]
        assert_close(step[0], torch.arange(43.0), rtol=0, atol=1e-3)
        assert step.max() == origin - 1
        targets = (origin - 1) * data.y_test
        assert targets.min() >= origin
        assert (origin - 1) * data.x_test.max() < 360


def test_training_states_fill_the_unit_interval_in_each_channel():
    values = autoregression(100, 2, 4, 4) * np.array([1, 1000])[:, None, None]
    data = weather_data.split(values.astype(np.float32), 80, 3, 8)
    assert_close(data.states.amin(dim=(0, 2, 3)), torch.zeros(2))
    assert_close(data.states.amax(dim=(0, 2, 3)), torch.ones(2))


def test_only_clusters_train_on_held_out_targets():
    from geoq import ClusterFolds, TemporalFolds

    settings = weatherbench.Settings()
    points = autoregression(178, 5, coefficient=0.98)
    blocks = [*TemporalFolds(5, gap=settings.gap).split(points)]
    assert weatherbench.shared_targets(blocks, settings.n_leads) == 0
    for seen, held_out in blocks:
        apart = np.abs(seen[:, None] - held_out).min()
        assert apart >= settings.n_past + settings.n_leads
    clusters = [*ClusterFolds(5).split(points)]
    assert weatherbench.shared_targets(clusters, settings.n_leads) > 0.5


# The surrogate.


def test_a_turned_globe_gets_the_turned_forecast():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = forecast.GlobeUNet(3, 4, (4, 8, 8, 8)).eval()
    field = 10 * uniform(2, 3, 8, 32)
    turned = network(field.roll(8, dims=3))
    assert_close(turned, network(field).roll(8, dims=3))
    assert not torch.allclose(turned, network(field), atol=1e-3)


def test_damped_persistence_finds_the_coefficient_of_an_autoregression():
    values = autoregression(4000, 1, 4, 4, coefficient=0.8)
    data = weather_data.split(values, 3900, 3, 4)
    frame = forecast.Anomalies().fit(data.x, data.y)
    expected = 0.8 ** torch.arange(1.0, 5.0)
    assert_close(frame.damping[:, 0, 0, 0], expected, rtol=0, atol=0.02)


def test_the_direct_form_starts_from_the_channel_mean():
    data = weather_data.split(autoregression(60, 2, 4, 4), 50, 3, 4)
    frame = forecast.Direct().fit(data.x, data.y)
    guess = frame.states(frame.first_guess(data.x))
    mean = data.y.mean(dim=(0, 1, 3, 4))[:, None, None]
    assert_close(guess, mean.expand_as(data.y))


def test_a_forecast_learns_and_repeats_itself():
    data = weather_data.split(autoregression(80, 1, 8, 8), 70, 3, 4)
    recipe = forecast.TrainForecast(forecast.Direct(), 40, 0, (8, 8))
    first, again = (recipe(data.x, data.y)(data.x) for _ in range(2))
    assert_close(first, again)
    other = recipe.with_seed(1)(data.x, data.y)(data.x)
    assert not torch.allclose(other, first)
    untrained = data.y.mean(dim=(0, 1, 3, 4), keepdim=True)
    assert (first - data.y).square().mean() < (untrained - data.y).square().mean()


def test_too_few_windows_to_stop_by_are_refused():
    data = weather_data.split(autoregression(40, 1, 8, 8), 30, 3, 8)
    recipe = forecast.TrainForecast(forecast.Direct(), 4)
    with pytest.raises(ValueError, match="20 windows leave none to train on"):
        forecast.chosen_steps(recipe, data.x, data.y, gap=16, check_every=2, patience=1)


# Scores.


def test_which_day_is_zero_for_a_static_bound_and_one_for_the_error_itself():
    error = uniform(6, 4, 2, 3, 5).double()
    static = uniform(4, 2, 3, 5, seed=1).expand_as(error).double()
    assert scores.which_day(error, static) == 0
    assert scores.which_day(error, error) == pytest.approx(1)
    assert scores.which_day(error, 7 * error + static) == pytest.approx(1)


def test_area_weights_have_mean_one_and_favour_the_equator():
    weights = scores.area_weights(torch.tensor([-60.0, 0.0, 60.0]))
    assert_close(weights, torch.tensor([0.75, 1.5, 0.75], dtype=torch.float64))


def test_scores_of_a_field_by_hand():
    """One value of eight is missed, at the last lead of the second forecast, on 60 degrees."""
    error = torch.zeros(2, 2, 1, 2, 1)
    error[1, 1, 0, 1, 0] = 3.0
    bound = torch.ones_like(error)
    line = scores.scores(error, bound, torch.tensor([0.0, 60.0]), 0.95)
    assert line["field_least"] == pytest.approx(0.75)
    assert line["field_fraction_90"] == pytest.approx(0.5)
    assert line["coverage_q1"] == 1
    assert line["area_coverage"] == pytest.approx(1 - 1 / 8 * 0.5 / 0.75)
    missed, kept = 0.95 * 2, 0.05
    expected = (4 * 4 / 3 * kept + 2 / 3 * (3 * kept + missed)) / 8
    assert line["area_pinball"] == pytest.approx(expected)


def test_skill_is_one_for_the_truth_and_zero_for_the_reference():
    y = uniform(3, 8, 1, 2, 2)
    assert set(scores.skill(y, y, 0 * y).values()) == {1.0}
    assert set(scores.skill(y, 0 * y, 0 * y).values()) == {0.0}


# Bounds.


def test_the_quantile_by_lead_and_channel_covers_its_fraction_in_each():
    error = uniform(20, 3, 2, 4, 5) * torch.arange(1.0, 4.0)[:, None, None, None]
    level = bounds.by_lead_and_channel(error)
    assert level.shape == (3, 2, 1, 1)
    covered = (error <= level).double().mean(dim=(0, 3, 4))
    assert_close(covered, torch.full((3, 2), 0.95, dtype=torch.float64))


def test_held_out_windows_have_no_state_in_common_with_those_of_the_fit():
    row, none = torch.arange(40), torch.zeros(40, 1)
    features = GeometricFeatures(none, none[:, 0], none, none, none)
    calibration = CalibrationSet(features, none, row, row // 10, 0 * row)
    for mine, others in bounds.by_fold(calibration):
        assert len(mine) + len(others) == 40
    in_time = replace(calibration, position=row, reach=6)
    for mine, others in bounds.by_fold(in_time):
        assert (mine[:, None] - others).abs().min() == 7


def test_a_neighbourhood_goes_round_the_globe_and_ends_at_the_poles():
    field = torch.zeros(1, 3, 4)
    field[0, 0, 0] = 6.0
    mean = activity.neighbourhood_mean(field, 3)
    assert_close(mean[0, 0], torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert_close(mean[0, 2], torch.zeros(4))


def held_out(error_of, n_windows=60, n_leads=2):
    """Tuples of three folds whose error is a function of (noise, activity of the day)."""
    inputs = uniform(n_windows, 3, 2, 4, 8, seed=1)
    inputs *= 0.2 + uniform(n_windows, 1, 1, 1, 1, seed=2)
    pace = (inputs[:, -1] - inputs[:, -2]).abs().mean(dim=(1, 2, 3))
    noise = 0.2 + uniform(n_windows, n_leads, 2, 4, 8, seed=3)
    error = error_of(noise, pace.view(-1, 1, 1, 1, 1))
    row = torch.zeros(n_windows)
    features = GeometricFeatures(row[:, None], row, error, error, inputs)
    rows = torch.arange(n_windows)
    calibration = CalibrationSet(features, error, rows, rows // 20, 0 * rows)
    cells = 0.5 + uniform(2, 4, 8, seed=4).expand(n_windows, -1, -1, -1)
    seen = bounds.Seen(features, error, cells, cells, torch.zeros(4))
    return bounds.Tuples(seen, calibration)


def test_activity_finds_errors_that_grow_with_the_pace_of_the_day():
    tuples = held_out(lambda noise, pace: noise * pace)
    static = bounds.PerLeadAndCell()
    bound = activity.Activity(static).fit(tuples).bound(tuples.seen)
    assert scores.which_day(tuples.error.double(), bound.double()) > 0.5
    assert (tuples.error <= bound).double().mean() >= 0.95


def test_activity_has_no_effect_where_it_predicts_nothing():
    tuples = held_out(lambda noise, _pace: noise)
    static = bounds.PerLeadAndCell()
    bound = activity.Activity(static).fit(tuples).bound(tuples.seen)
    alone = static.fit(tuples).bound(tuples.seen)
    assert (bound / alone - 1).abs().mean() < 0.05


def test_a_blend_uses_the_deviation_where_errors_follow_it():
    plain = held_out(lambda noise, _pace: noise)
    follows = held_out(lambda noise, _pace: noise * plain.seen.spread[:, None])
    blend = bounds.Blend().fit(follows)
    assert (blend.weight_ <= 0.5).all()
    bound = blend.bound(follows.seen)
    assert (follows.error <= bound).double().mean() == pytest.approx(0.95, abs=0.02)
    unrelated = held_out(lambda noise, _pace: noise / plain.seen.spread[:, None])
    assert (bounds.Blend().fit(unrelated).weight_ >= 0.5).all()


# The whole run.


def assert_pooled(rows):
    """The loss and the coverage of a forecast are the means over its four quarters."""
    for row in rows:
        for name in ("pinball", "coverage"):
            quarters = [row[f"{name}_q{q}"] for q in range(1, 5)]
            assert row[name] == pytest.approx(np.mean(quarters), rel=1e-5)


@pytest.mark.parametrize("name", ["weather_era5", "weather_era5_direct"])
def test_the_published_losses_are_the_means_of_their_quarters(name):
    assert_pooled(load(name)["rows"])


def test_a_small_run_measures_every_method(results):
    record = json.loads((results[0] / "weather_era5.json").read_text())
    measured = [(r["form"], r["folds"], r["method"]) for r in record["rows"]]
    expected = {
        (form, kind, name)
        for form in ("anomalies", "direct")
        for kind, methods in weatherbench.METHODS.items()
        for name in methods
    }
    assert set(measured) == expected
    assert len(measured) == len(expected)
    for row in record["rows"]:
        assert row["setting"] == f"{row['form']}, {row['folds']}"
    assert_pooled(record["rows"])
    assert {line["form"] for line in record["surrogates"]} == {"anomalies", "direct"}
    shared = {line["folds"]: line["shared_targets"] for line in record["leaks"]}
    assert shared["blocks"] == 0
    assert shared["clusters"] > 0


def test_a_rerun_measures_nothing_again(results):
    folder, command = results
    file, parts = folder / "weather_era5.json", folder / "weather_era5-parts"
    before = {path: path.read_text() for path in (file, *parts.glob("*.json"))}
    again = subprocess.run(
        command[:-2], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == str(file)
    assert all(path.read_text() == text for path, text in before.items())


def test_the_run_draws_every_picture(results):
    drawn = {path.name for path in results[0].glob("*.png")}
    tasks = ("anomalies-148-0", "direct-148-0")
    expected = {
        f"weather-{p}-{t}.png" for p in ("maps", "growth", "safe") for t in tasks
    }
    expected |= {f"weather-quarters-{form}.png" for form in ("anomalies", "direct")}
    assert drawn == expected


def test_the_tables_name_the_stand_in(results):
    page = render("weather_era5", folder=results[0])
    assert "**Clusters and blocks: ERA5 stand-in (msl, vo850), direct**" in page
    assert "| Horizon x climatology |" in page
    assert "the paper |" not in page
    assert "WeatherBench" not in page
    assert "python -m benchmarks.weather.weatherbench" in page


def test_ratios_compare_the_same_origin_and_seed():
    def rows(*losses):
        return [
            {"origin": n, "seed": 0, "pinball": loss} for n, loss in enumerate(losses)
        ]

    compared = tables.compared
    assert compared(rows(1, 4), rows(2, 2, 5)) == ["1.000 (0.50 to 2.00)", "1 of 2"]


def test_the_information_study_reads_held_out_errors():
    values = autoregression(N_STEPS, 2, N_LAT, N_LON)
    weather = weather_data.Weather(
        values,
        ("a", "b"),
        np.arange(N_STEPS),
        np.linspace(-80, 80, N_LAT),
        np.arange(N_LON),
    )
    task = weatherbench.Task("anomalies", 148, 0)
    case = weatherbench.make_case(task, weather, weatherbench.SMALL)
    lines = information.study(case)
    assert {line["lead_hours"] for line in lines} == {6, 12, 24, 48}
    assert {"ensemble spread", "tendency over 12 h"} <= {r["feature"] for r in lines}
    assert "| anchor error |" in information.table(lines)
