"""The scripts of the benchmarks at small size, their problems, and the results files."""

import importlib
import math

import numpy as np
import pytest
from scipy.spatial import KDTree

from benchmarks import record, runs, tables
from benchmarks.runs import Benchmark
from benchmarks.suite import SHIFTS, defaults
from benchmarks.suite.methods import shortened
from benchmarks.suite.one_input_problems import ONE_INPUT, WIDTHS

# Small runs have few data on purpose.
quiet = pytest.mark.filterwarnings("ignore")
# The module of each script, and the tables that its small run renders.
# fmt: off
SCRIPTS = {
    "suite.defaults": ("defaults", "kinds"), "suite.ablation": ("ablation",), "suite.one_input": ("one_input",),
    "suite.designs": ("designs", "exchange"), "suite.features": ("features",), "suite.decades": ("decades",),
    "rollouts.transients": ("transients",),
    "suite.tables": ("tables",), "forrester": ("forrester",), "rollouts.kuramoto_sivashinsky": ("kuramoto_sivashinsky",),
    "rollouts.ablation": ("kuramoto_sivashinsky_ablation",), "rollouts.trusted_horizon": ("trusted_horizon",),
    "rollouts.forced": ("forced",), "rollouts.small_states": ("small_states",), "fields.run": ("fields",),
    "fields.bounds": ("fields_bounds",), "third_party.run": ("third_party",), "weather.weatherbench": ("weather_era5",),
    "richtmyer_meshkov.run": ("richtmyer_meshkov",), "costs.cost": ("cost",), "costs.memory": ("memory",),
    "costs.speed": ("speed",), "costs.serving": ("serving",), "monitor.run": ("monitor",),
    "planning.propose": ("propose",), "planning.optimise": ("optimise",),
    "planning.folds": ("matched_folds",), "planning.guarantees": ("planned_guarantees",),
}
# fmt: on
OWN_SURROGATES = ("Split conformal", "Deep ensemble", "MC dropout", "GP (", "MAPIE")


def states_of_the_globe(folder):
    """A short series of two variables in the layout of the stand-in for reanalysis data."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    values = np.random.default_rng(0).normal(size=(140, 2, 4, 8)).astype(np.float32)
    time = np.datetime64("2020-01-01", "ns") + np.timedelta64(6, "h") * np.arange(140)
    coordinates = {"time": time, "lat": np.linspace(-80, 80, 4), "lon": 45.0 * np.arange(8)}
    values /= abs(values).max(axis=(1, 2, 3), keepdims=True)
    fields = {n: (("time", "lat", "lon"), values[:, i]) for i, n in enumerate(("msl", "vo850"))}
    folder.mkdir()
    xarray.Dataset(fields, coordinates).to_netcdf(folder / "a.nc", engine="h5netcdf")
    return folder


@quiet
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_small_run_writes_rows_that_the_tables_render(script, tmp_path, capsys):
    state = np.random.get_state()  # noqa: NPY002
    words, names = ["--small"], SCRIPTS[script]
    if script == "third_party.run":
        for package in ("neuralop", "reservoirpy", "dysts", "statsmodels"):
            pytest.importorskip(package)
    if script == "weather.weatherbench":
        words += ["--data", str(states_of_the_globe(tmp_path / "data"))]
    if script == "richtmyer_meshkov.run":
        words += ["--work", str(tmp_path / "work"), "--device", "cpu"]
    file = record.path_of(names[0], tmp_path)
    module = importlib.import_module(f"benchmarks.{script}")
    module.main([*words, "--out", str(file)])
    rows = record.read(file)["rows"]
    assert "Traceback" not in capsys.readouterr().out  # of a case that failed
    assert rows
    losses = [row["pinball"] for row in rows if row.get("pinball") is not None]
    assert all(math.isfinite(loss) and loss >= 0 for loss in losses)
    for name in names:
        assert tables.render(name, tmp_path).count("|") > 20
    assert_one_surrogate(rows if script in ("suite.defaults", "forrester") else [])
    # Support vector regression and MAPIE draw from the global generator.
    np.random.set_state(state)  # noqa: NPY002


def assert_one_surrogate(rows):
    """In each run, all methods but those with surrogates of their own bound the errors of one surrogate."""
    errors = {}
    for row in rows:
        if not f"{row['method']} (".startswith(OWN_SURROGATES):
            key = row.get("problem"), row.get("shift"), row["seed"], row.get("run")
            errors.setdefault(key, set()).add(round(row["relative_l2"], 6))
    assert all(len(found) == 1 for found in errors.values())


@pytest.mark.parametrize("name", ["defaults", "fresh", "second_fresh", "third_fresh", "forrester"])
def test_the_published_rows_bound_the_errors_of_one_surrogate(name):
    rows = [r for r in record.load(name)["rows"] if "linear latent" not in r["method"]]
    assert_one_surrogate(rows)
    by_case = {}
    for row in rows:
        key = row["problem"], row["seed"], row["method"]
        by_case.setdefault(key, {})[row.get("shift")] = row["coverage"], row["pinball"]
    for case in by_case.values():
        if "all" in case:
            together = case.pop("all")
            np.testing.assert_allclose(together, np.mean(list(case.values()), 0), rtol=1e-5)


# The skeleton

CALLS = []


def toy(problem, seed, wanted, *, small=False):
    CALLS.append((problem, seed, tuple(wanted)))
    if problem == "broken":
        raise ZeroDivisionError
    return [{"method": m, "setting": problem, "seed": seed, "loss": len(m)} for m in wanted]


TOY = Benchmark("toy", ("a", "b", "broken"), toy, lambda _: ["one", "two"], (0, 1), ("b",))


def run_toy(tmp_path, *words):
    CALLS.clear()
    asked = runs.parser_of("Toy.").parse_args([*words, "--out", str(tmp_path / "toy.json.gz")])
    return record.read(runs.run(TOY, asked))["rows"]


def test_a_run_measures_what_the_file_lacks(tmp_path, capsys):
    run_toy(tmp_path, "--problems", "b", "--methods", "two")
    assert CALLS == [("b", 0, ("two",)), ("b", 1, ("two",))]
    rows = run_toy(tmp_path, "--seeds", "0")
    assert CALLS == [("a", 0, ("one", "two")), ("b", 0, ("one",)), ("broken", 0, ("one", "two"))]
    # A case that fails does not end the others, and rows are in the order of the problems.
    assert "ZeroDivisionError" in capsys.readouterr().out
    found = [f"{r['setting']} {r['seed']} {r['method']}" for r in rows]
    assert found == ["a 0 one", "a 0 two", "b 0 two", "b 0 one", "b 1 two"]


def test_small_runs_unknown_names_and_the_limit(tmp_path, capsys):
    run_toy(tmp_path, "--small")
    assert CALLS == [("b", 0, ("one", "two"))]
    for words in (("--problems", "c"), ("--methods", "three")):
        with pytest.raises(SystemExit, match=r"c does not exist|three matches no method"):
            run_toy(tmp_path, *words)
    run_toy(tmp_path, "--seeds", "1", "--minutes", "0")
    assert "not started: [('a', 1), ('b', 1), ('broken', 1)]" in capsys.readouterr().out


def test_other_code_begins_a_new_file_and_the_older_rows_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "path_of", lambda name, folder=tmp_path: folder / f"{name}.json.gz")

    def measured(code, *words):
        monkeypatch.setattr(record, "COMMIT", code * 40)
        monkeypatch.setattr(record, "source", lambda: code)
        runs.run(TOY, runs.parser_of("Toy.").parse_args(["--seeds", "0", *words]))

    measured("a")
    with pytest.raises(SystemExit):
        measured("b", "--problems", "c")
    measured("b", "--minutes", "0")  # neither sets the results of other code aside
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json.gz"]
    measured("b", "--methods", "one")
    rows = record.load("toy", tmp_path)["rows"]
    found = [f"{r['setting']} {r['method']} {r.get('run', '')[-2:]}" for r in rows]
    assert found == ["a one ", "b one ", "a two aa", "b two aa"]


# Results files


def test_published_results_have_one_commit_that_contains_their_code(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for commit in ("4c9db4b+changes", "unknown"):
        rows = [{"seed": 0, "commit": commit}]
        with pytest.raises(ValueError, match=r"commit the changes first .* --out"):
            record.write("one", rows, tmp_path / "one.json.gz")
        assert record.write("one", rows, tmp_path / "one.json.gz", small=True).is_file()
        assert record.read(record.write("one", rows, tmp_path / "deep" / "one.json.gz"))["rows"]
    with pytest.raises(ValueError, match=r"mixed.json.gz would mix rows of the commits"):
        record.write("mixed", [{"seed": 0, "commit": "earlier"}, {"seed": 1}])


def test_equal_rows_give_equal_bytes_and_nan_becomes_null(tmp_path):
    content = {"commit": "a", "rows": [{"seed": 0, "loss": 0.123456789, "none": math.nan}]}
    for name in ("one", "two"):
        record.save(content, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert record.read(tmp_path / "one")["rows"] == [{"seed": 0, "loss": 0.1234568, "none": None}]


def test_a_row_of_a_method_with_untrained_networks_is_left_out_and_listed(tmp_path):
    course = {"best_step": 0, "first_loss": 1.0}
    line = {"method": "GeoQ (paper)", "setting": "", "seed": 0, "trainings": [course]}
    one_trained = line | {"trainings": [course, course | {"best_step": 50}]}

    def written(*rows, **extra):
        return record.read(record.write("one", list(rows), tmp_path / "one.json.gz", **extra))

    file = written(line, one_trained)
    assert file["rows"] == [one_trained]
    assert file["untrained"] == [{"method": "GeoQ (paper)", "setting": "", "seed": 0}]
    assert written(line, small=True)["rows"] == [line]
    assert "untrained" not in written(one_trained)


# Problems of the suite


def test_every_problem_is_determined_by_its_seed():
    assert len(defaults.EVERY) == 52
    for problem in defaults.EVERY.values():
        first, again, other = (problem.make(seed, 42, 8) for seed in (3, 3, 4))
        assert first.x.dtype == first.y.dtype == np.float64
        assert len(first.x) == len(first.y) == 42
        np.testing.assert_array_equal(first.x, again.x)
        np.testing.assert_array_equal(first.y, again.y)
        assert not np.array_equal(first.x, other.x)
        assert tuple(first.tests) == SHIFTS
        for shift, (x, y) in first.tests.items():
            assert x.shape == (8, *first.x.shape[1:])
            assert y.shape == (8, *first.y.shape[1:])
            np.testing.assert_array_equal(x, again.tests[shift][0])
            np.testing.assert_array_equal(y, again.tests[shift][1])


@quiet
def test_every_surrogate_is_determined_by_its_seed():
    recipes = {problem.recipe: problem for problem in defaults.EVERY.values()}
    state = np.random.get_state()  # noqa: NPY002
    for recipe, problem in recipes.items():
        data = problem.make(0, 60, 8)
        queries = data.tests["strong"][0]
        first, again, other = (
            shortened(seeded)(data.x, data.y)(queries)
            for seeded in (recipe(1), recipe(1), recipe(1).with_seed(2))
        )
        assert first.shape == data.tests["strong"][1].shape
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
    np.random.set_state(state)  # noqa: NPY002


def test_shifted_queries_are_farther_from_the_training_data():
    for problem in defaults.SUITE.values():
        data = problem.make(0, 300, 200)
        scale = data.x.std(axis=0)
        points = KDTree(data.x / scale)
        distance = [points.query(x / scale)[0].mean() for x, _ in data.tests.values()]
        assert distance[0] < distance[1] < distance[2], problem.name


@pytest.mark.parametrize("name", ONE_INPUT)
def test_one_input_leaves_its_range_and_the_others_stay_inside(name):
    problem = ONE_INPUT[name]
    (x, y, queries, query_y), again = problem.data(1), problem.data(1)
    assert len(x) == len(y) == problem.n
    assert np.isfinite(y).all()
    assert np.isfinite(query_y).all()
    np.testing.assert_array_equal(query_y, again[3])
    for j in problem.movable:
        column, moved = x[:, j], queries.x[:, j]
        if j in problem.logs:
            column, moved = np.log(column), np.log(moved)
        low, high = column.min(), column.max()
        u = abs(moved - (low + high) / 2) / ((high - low) / 2)
        for width in WIDTHS:
            own = queries.label == f"input {j} {width}"
            assert own.sum() == 50
            np.testing.assert_allclose(u[own], width)
