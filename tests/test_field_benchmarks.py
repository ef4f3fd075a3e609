"""The field benchmarks, Richtmyer-Meshkov and weather: data, folds, simple bounds and scores."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import fresh
from made import made_tuples
from scipy import ndimage
from torch.testing import assert_close

from benchmarks import record
from benchmarks.richtmyer_meshkov import bounds, methods, run
from benchmarks.richtmyer_meshkov.study import Settings, Study
from benchmarks.rollouts.trusted_horizon import METHODS, measure
from benchmarks.weather import bounds as weather_bounds
from benchmarks.weather import case, forecast, scores
from benchmarks.weather import data as weather
from benchmarks.weather.weatherbench import shared_targets
from geoq import ClusterFolds, TemporalFolds, Training, parts


def toy_study(n_train=30, n_test=8):
    """Truths that are drawn with the predicted probabilities, so that these are right on average."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(n_train + n_test, 12, 10, 14))
    modes = ("wrap", "wrap", "wrap", "nearest")
    noise = ndimage.gaussian_filter(noise, (0, 0, 3, 3), mode=modes)
    p = torch.from_numpy(1 / (1 + np.exp(-30 * noise))).float()
    y = torch.from_numpy(rng.random(p.shape) < p.numpy()).float()
    study = SimpleNamespace(y=y[:n_train], cross_fit=p[:n_train], y_test=y[n_train:], p=p[n_train:])
    study.held_out_by_time = lambda: zip(study.y.unbind(1), study.cross_fit.unbind(1), strict=True)
    study.remembered = lambda key, answer: answer()
    study.distance = bounds.interface_distance(study.p)
    study.cross_fit_distance = bounds.interface_distance(study.cross_fit)
    return study


# Richtmyer-Meshkov: simulations, folds and networks


def test_folds_and_networks_keep_the_test_cluster_out(tmp_path, monkeypatch):
    cluster = np.repeat(np.arange(11), 10)
    name = "benchmarks.richtmyer_meshkov.study.clusters_of"
    monkeypatch.setattr(name, lambda u0, n: cluster)
    number = np.arange(110, dtype=np.uint8)[:, None, None]
    u0, u = np.tile(number, (1, 2, 3)), np.zeros((110, 12, 2, 3), dtype=np.uint8)
    data = SimpleNamespace(u0=u0, u=u, checksum="")
    for seed in (0, 1):
        study = Study.of(Settings(), seed, tmp_path, data, "cpu")
        assert set(cluster[study.x_test[:, 0, 0].int().numpy()]) == {seed}
        seen = cluster[study.x[:, 0, 0].int().numpy()]
        assert seed not in seen
        np.testing.assert_array_equal(np.unique(seen)[study.fold], seen)
    with pytest.raises(SystemExit, match="seed 11, but only 11 of 11 clusters"):
        Study.of(Settings(), 11, tmp_path, data, "cpu")
    trainings = study.trainings
    folds = [trainings[name][0] for name in study.fold_names]
    assert [len(rows) for rows in folds] == [90] * 10
    assert all(n not in study.fold[rows] for n, rows in enumerate(folds))
    for names, n_rows in ((study.members, 100), (study.split_members, 80)):
        rows, seeds = zip(*(trainings[name] for name in names), strict=True)
        assert (len(set(seeds)), {len(own) for own in rows}) == (10, {n_rows})
    assert not np.intersect1d(rows[0], study.kept_apart).size


def test_a_rerun_measures_only_what_is_missing_with_the_same_networks(tmp_path, capsys):
    words = ["--small", "--device", "cpu", "--work", str(tmp_path), "--out", str(tmp_path / "rows")]
    rows = record.read(run.main([*words, "--methods", "binary: Zero*"]))["rows"]
    zero = rows[1]
    assert zero["coverage"] == pytest.approx(1 - zero["wrong_cells"], abs=1e-6)
    assert zero["pinball"] == pytest.approx(0.95 * zero["wrong_cells"], 1e-5)
    assert (zero["recall"], zero["safe_fraction"]) == (0, None)
    networks = {file: file.stat().st_mtime_ns for file in tmp_path.glob("seed-0*/*.pt")}
    assert {"deployed", *(f"fold-{n}" for n in range(3))} == {file.stem for file in networks}
    capsys.readouterr()
    again = record.read(run.main([*words, "--methods", "binary: Zero*", "*: Static per cell"]))
    out = capsys.readouterr().out
    assert (out.count("pinball"), out.count("network ")) == (2, 0)
    measured = [(row["setting"], row["method"]) for row in again["rows"] if "method" in row]
    assert measured[0] == ("binary", "Zero bound")
    assert {setting for setting, _ in measured[1:]} == {"binary", "probability"}
    assert all(file.stat().st_mtime_ns == time for file, time in networks.items())


# Richtmyer-Meshkov: bounds


def test_the_level_and_the_chance_of_a_bin_are_those_of_its_errors():
    """Twenty errors 0.01, ..., 0.20 in bin 0: the 19th. Bin 1 is a wrong cell in four, bin 2 one in thirty, bin 3 empty."""
    error = torch.cat([torch.arange(1, 21) / 100, torch.tensor([0.0, 1, 0, 0]), torch.zeros(30)])
    error[-1] = 1
    bins = torch.cat([torch.zeros(20), torch.ones(4), torch.full((30,), 2.0)]).int()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(error)))
    for fewest, of_one in ((1, 1.0), (10, 0.2)):
        found = bounds.quantile_by_bin(error[order], bins[order], 4, fewest=fewest)
        assert_close(found, torch.tensor([0.19, of_one, 0.0, 0.2]))
    wrong, bins = torch.tensor([1.0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    for fewest, of_one in ((3, 1.0), (4, 4 / 7)):
        found = bounds.fraction_by_bin(wrong, bins, 2, fewest=fewest)
        assert_close(found, torch.tensor([0.25, of_one]))


def test_simple_bounds_are_the_quantiles_that_they_stand_for():
    study = toy_study()
    error = (study.y - study.cross_fit).abs().numpy()
    for method, axes in ((bounds.static, 0), (bounds.static_column, (0, 2))):
        expected = np.quantile(error, 0.95, axis=axes, method="inverted_cdf")
        found = method(study, bounds.PROBABILITY).bound[0]
        assert_close(found if axes == 0 else found[:, 0], torch.from_numpy(expected))
    both = {"bins_of": bounds.by_distance_and_doubt}
    one, other = (f(study, bounds.BINARY, **both) for f in (bounds.binned, bounds.binned_chance))
    assert_close(one.bound, other.bound)
    scale = torch.linspace(0.01, 0.2, 50)
    assert (bounds.best_factor(4 * scale, scale), bounds.best_factor(0 * scale, scale)) == (4, 0)


def test_the_penalty_lowers_the_bound_of_the_background_also_beside_cells_without_errors():
    rng = np.random.default_rng(0)
    error = (rng.random((24, 2, 6, 8)) > 0.8).astype(np.float32)
    error[:, :, :2] = np.nan
    inputs = rng.normal(size=(24, 6, 8)).astype(np.float32)
    tuples = made_tuples(error, inputs, distance=np.ones(24), domain=methods.Grid(2))
    how = {"widths": (4, 8), "training": Training(n_steps=60, batch_size=8, check_every=20)}
    plain = parts.NormScaledFieldBound(**how).fit(tuples, 0.95)
    penalised = methods.BackgroundPenalty(**how, penalty=0.5).fit(tuples, 0.95)
    assert penalised.training.first_loss > penalised.training.best_loss > 0
    lower, usual = (fitted(tuples.features)[error == 0].mean() for fitted in (penalised, plain))
    assert lower < 0.9 * usual


# Weather


def autoregression(n_steps, *shape, coefficient=0.9):
    noise = np.random.default_rng(0).standard_normal((n_steps, *shape))
    for before, now in pairwise(noise):
        now *= math.sqrt(1 - coefficient**2)
        now += coefficient * before
    return noise.astype(np.float32)


def write(path, names, hours=6, n_steps=12, n_lat=4, start="2020-01-01"):
    """A file of the named variables, and its fields."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    time = np.datetime64(start, "ns") + np.timedelta64(hours, "h") * np.arange(n_steps)
    fields = autoregression(n_steps, len(names), n_lat, 8)
    known = {"time": time, "lat": np.linspace(-80, 80, n_lat), "lon": 45.0 * np.arange(8)}
    named = {name: (("time", "lat", "lon"), fields[:, i]) for i, name in enumerate(names)}
    path.parent.mkdir(parents=True, exist_ok=True)
    xarray.Dataset(named, known).to_netcdf(path, engine="h5netcdf")
    return fields


def test_folders_of_yearly_files_give_every_sixth_hour(tmp_path):
    for folder in (*weather.WEATHERBENCH, "unused"):
        for year, start, n in ((2016, "2016-01-01", 24), (2015, "2015-12-30", 48)):
            fields = write(tmp_path / folder / f"x_{year}.nc", ("x",), 1, n, start=start)
    loaded = weather.load(tmp_path)
    assert (loaded.names, loaded.values.shape) == (weather.WEATHERBENCH, (12, 3, 4, 8))
    np.testing.assert_array_equal(loaded.values[:8, 0], fields[::6, 0])


def test_test_targets_come_after_all_training_states():
    """States are their own time step here."""
    values = np.arange(360, dtype=np.float32).reshape(360, 1, 1, 1)
    assert [step / 4 for step in weather.origins(360, 40)] == [55, 65, 75]
    for origin in weather.origins(360, 40):
        data = weather.split(values, origin, 3, 40)
        assert (data.states.min(), data.states.max()) == (0, 1)
        step = (origin - 1) * torch.cat([data.x, data.y], dim=1)[:, :, 0, 0, 0]
        assert_close(step[0], torch.arange(43.0), rtol=0, atol=1e-3)
        assert step.max() == origin - 1
        assert ((origin - 1) * data.y_test).min() >= origin


def test_only_clusters_train_on_held_out_targets():
    settings, points = case.Settings(), autoregression(178, 5, coefficient=0.98)
    blocks = [*TemporalFolds(5, gap=settings.gap).split(points)]
    assert shared_targets(blocks, settings.n_leads) == 0
    for seen, held_out in blocks:
        assert abs(seen[:, None] - held_out).min() >= settings.n_past + settings.n_leads
    assert shared_targets([*ClusterFolds(5).split(points)], settings.n_leads) > 0.5
    row, none = np.arange(40), np.zeros((40, 1))
    tuples = made_tuples(none, none, distance=none[:, 0], fold=row // 10, position=row, reach=6)
    for mine, others in weather_bounds.HeldOut(None, tuples, none).by_fold():
        assert abs(mine[:, None] - others).min() == 7


def test_a_turned_globe_gets_the_turned_forecast_and_damping_is_that_of_the_process():
    network = fresh(forecast.GlobeUNet, 3, 4, (4, 8, 8, 8))
    field = 10 * torch.rand(2, 3, 8, 32, generator=torch.Generator().manual_seed(0))
    assert_close(network(field.roll(8, dims=3)), network(field).roll(8, dims=3))
    data = weather.split(autoregression(4000, 1, 4, 4, coefficient=0.8), 3900, 3, 4)
    damping = forecast.Anomalies().fit(data.x, data.y).damping[:, 0, 0, 0]
    assert_close(damping, 0.8 ** torch.arange(1.0, 5.0), rtol=0, atol=0.02)


def test_scores_of_a_field_by_hand():
    """One value of sixteen is missed, at the last lead of the second forecast, on 60 degrees."""
    error = np.zeros((2, 4, 1, 2, 1))
    error[1, 3, 0, 1, 0] = 3.0
    line = scores.scores(error, np.ones_like(error), np.array([0.0, 60.0]), 0.95)
    found = [line[name] for name in ("field_least", "field_fraction_90", "coverage_q1")]
    assert found == [0.875, 0.5, 1]
    assert line["area_coverage"] == pytest.approx(1 - 1 / 16 * 0.5 / 0.75)
    expected = (8 * 4 / 3 * 0.05 + 2 / 3 * (7 * 0.05 + 0.95 * 2)) / 16
    assert line["area_pinball"] == pytest.approx(expected)
    noise = np.random.default_rng(0).random((6, 4, 2, 3, 5))
    static = np.broadcast_to(noise[:1], noise.shape)
    assert scores.which_day(noise, static) == 0
    assert scores.which_day(noise, 7 * noise + static) == pytest.approx(1)
    assert set(scores.skill(noise, noise, 0 * static).values()) == {1.0}
    covered = (noise <= weather_bounds.by_lead_and_channel(noise)).mean(axis=(0, 3, 4))
    np.testing.assert_allclose(covered, np.ceil(0.95 * 90) / 90)


# Rollouts


def test_lorenz_96_keeps_its_horizons_and_changed_states_are_not_safe():
    rows = measure("Lorenz-96", 0, METHODS, small=True)
    horizons = {(row["method"], row["tolerance"]): row for row in rows if "tolerance" in row}
    for tolerance in (3.0, 6.0):
        alone, held_out = (horizons[name, tolerance] for name in ("bound alone", "held out"))
        assert held_out["broken"] < min(0.15, alone["broken"])
        assert abs(held_out["coverage"] - 0.95) < 0.04
    safe = {row["origin"]: row["safe_fraction"] for row in rows if "origin" in row}
    assert min(safe["none"], safe["moved along the line"]) > 0.85
    assert (
        max(safe[name] for name in ("multiplied by 1.5", "multiplied by 3", "random order")) < 0.1
    )
