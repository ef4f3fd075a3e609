import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import KDTree

from benchmarks import record, rerun, solvers, tables
from benchmarks.costs import tables as cost_tables
from benchmarks.rivals import RememberedTraining
from benchmarks.suite import (
    ablation,
    confirmation,
    defaults,
    fresh,
    problems,
    recipes,
    second_fresh,
    table,
    third_fresh,
)
from benchmarks.suite.methods import methods, shortened

ROOT = Path(__file__).parents[1]
ROW = {"method", "setting", "seed", "pinball", "correlation", "coverage"}
ROW |= {"safe_fraction", "safe_pinball", "safe_correlation", "safe_coverage"}
ROW |= {"relative_l2", "train_seconds", "inference_seconds"}
SCRIPTS = {"forrester": "forrester", "defaults": "suite.defaults"}
# The problems that the small run takes, on each of which a method has a row per shift and one for all of them.
SHIFTS = {"interpolation", "mild", "strong", "all"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The small run of each script, both at once; a folder of their files, and what they printed."""
    folder = tmp_path_factory.mktemp("results")
    running = {
        script: subprocess.Popen(
            small_run(module, folder / f"{script}.json"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script, module in SCRIPTS.items()
    }
    printed = {}
    for script, process in running.items():
        printed[script], complaint = process.communicate(timeout=600)
        assert process.returncode == 0, complaint
    return folder, printed


def small_run(module, file):
    """Command of a small run that writes a results file."""
    return [sys.executable, "-m", f"benchmarks.{module}", "--small", "--out", file]


def rows_of(results, script):
    return json.loads((results[0] / f"{script}.json").read_text())["rows"]


# Methods whose predictions are not the surrogate's.
OWN_SURROGATES = ("Split conformal", "Deep ensemble", "MC dropout", "GP (", "MAPIE")
OWN_SURROGATES += ("GeoQ (paper, linear latent)",)


def assert_one_surrogate(rows):
    """All other methods bound the errors of one surrogate: their relative errors are equal."""
    errors = {}
    for row in rows:
        if not f"{row['method']} (".startswith(OWN_SURROGATES):
            key = row.get("problem"), row.get("shift"), row["seed"]
            errors.setdefault(key, set()).add(row["relative_l2"])
    assert errors
    assert all(len(found) == 1 for found in errors.values())


def assert_all_is_the_mean_of_the_shifts(rows):
    by_case = {}
    for row in rows:
        key = row["problem"], row["seed"], row["method"]
        by_case.setdefault(key, {})[row["shift"]] = row["coverage"], row["pinball"]
    for case in by_case.values():
        together = case.pop("all")
        np.testing.assert_allclose(together, np.mean(list(case.values()), 0), rtol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_small_run_bounds_the_errors_of_one_surrogate(results, script):
    rows = rows_of(results, script)
    assert all(row.keys() >= ROW for row in rows)
    assert {"GeoQ", "GeoQ (paper)", "Deep ensemble"} <= {r["method"] for r in rows}
    assert_one_surrogate(rows)


@pytest.mark.parametrize("name", [*tables.SUITE_SETS, "forrester"])
def test_the_published_rows_bound_the_errors_of_one_surrogate(name):
    rows = record.load(name)["rows"]
    assert_one_surrogate(rows)
    if name != "forrester":
        assert_all_is_the_mean_of_the_shifts(rows)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tables_render_a_small_run(results, script):
    page = tables.render(script, "GeoQ", folder=results[0])
    assert "| GeoQ |" in page
    assert "| kNN-distance conformal |" in page


def test_every_method_is_measured_on_every_shift(results):
    rows = rows_of(results, "defaults")
    measured = {(r["problem"], r["shift"], r["method"]) for r in rows}
    names = {r["problem"] for r in rows}
    methods = {r["method"] for r in rows}
    assert len(names) == 2
    assert sum(m.startswith("GeoQ") for m in methods) == 5
    for ending in (" / random folds", " / family weights"):
        assert sum(m.endswith(ending) for m in methods) == 9
    # Two baselines need a network, and one of the two problems has none.
    only_networks = {m for m in methods if m.startswith("MC dropout")}
    assert len(methods - only_networks) == 5 + 3 * 9 + 5
    assert len(only_networks) == 2
    assert measured == {
        (p, s, m)
        for p in names
        for s in SHIFTS
        for m in methods - (only_networks if p == "burgers" else set())
    }
    assert not any(row["held_back"] for row in rows)


def test_the_score_of_all_queries_is_the_mean_over_the_shifts(results):
    assert_all_is_the_mean_of_the_shifts(rows_of(results, "defaults"))


def test_the_summary_is_that_of_the_rows_in_the_file(results):
    assert table.summary(rows_of(results, "defaults")) in results[1]["defaults"]


def test_a_rerun_keeps_what_the_same_code_has_measured(results):
    file = results[0] / "defaults.json"
    before = file.read_text()
    command = small_run("suite.defaults", file)
    again = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert file.read_text() == before
    assert again.stdout == results[1]["defaults"][-len(again.stdout) :]


def test_the_ablation_measures_every_ingredient_on_every_shift(tmp_path):
    file = tmp_path / "ablation.json"
    command = small_run("suite.ablation", file)
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows = json.loads(file.read_text())["rows"]
    dropped = {r["method"] for r in rows if r["part"] == "ingredients"}
    rules = {r["method"] for r in rows if r["part"] == "safe rules"}
    assert {(r["method"], r["shift"]) for r in rows} == {
        *((variant, shift) for variant in dropped for shift in SHIFTS),
        *((rule, "all") for rule in rules),
    }
    # One problem has no standard error.
    assert "| all of it | 1.00 | one problem | 1.00 | 1.00 | 1.00 |" in printed
    assert all(f"| {name} |" in printed for name in dropped | rules)


def three_outputs(a, b):
    return np.stack([np.sin(4 * a) + b**2, 5 * abs(a - b), a * b + np.cos(6 * b)], 1)


@pytest.mark.slow
def test_every_ingredient_of_the_ablation_changes_a_bound():
    """On a problem with several outputs, whose errors differ in scale."""
    box = problems.OnBox(three_outputs, (0, 0), (1, 2), part=(0.2, 0.7))
    problem = problems.Problem("three outputs", box, recipes.linear_ridge, 100)
    data = problem.make(0, 100, 20)
    recipe = RememberedTraining(problem.recipe(0))
    queries = np.concatenate([x for x, _ in data.tests.values()])
    variants = ablation.fitted_variants(problem, data, recipe(data.x, data.y), recipe)
    bounds = {name: geoq.bound(queries) for name, geoq in variants}
    default = bounds.pop(ablation.ALL)
    same = [n for n, bound in bounds.items() if np.allclose(bound, default, rtol=1e-3)]
    assert not same


def test_ratios_are_to_the_best_rival_and_ours_are_no_rivals():
    losses = {
        "GeoQ": (1.0, 3.0),
        "GeoQ (paper)": (0.5, 0.5),
        "A / random folds": (2.0, 2.0),
        "A": (5.0, 3.0),
        "B": (9.0, 9.0),
    }
    rows = [
        {
            "problem": "p",
            "method": method,
            "shift": "all",
            "seed": seed,
            "pinball": value,
        }
        for method, values in losses.items()
        for seed, value in enumerate(values)
    ]
    expected = {"GeoQ": 1.0, "GeoQ (paper)": 0.25, "A": 2.0, "B": 4.5}
    expected["A / random folds"] = 1.0
    assert table.error_ratios(rows) == {"p": expected}


def test_a_rival_without_some_seeds_is_compared_on_the_seeds_that_it_has():
    losses = {
        "GeoQ": {0: 1.0, 1: 8.0},
        "A": {0: 2.0, 1: 4.0},
        "B": {1: 2.0},
    }
    rows = [
        {"problem": "p", "method": m, "shift": "all", "seed": seed, "pinball": value}
        for m, by_seed in losses.items()
        for seed, value in by_seed.items()
    ]
    # GeoQ over A is 9 / 6, and GeoQ over B on seed 1 is 8 / 2.
    assert table.error_ratios(rows) == {"p": {"GeoQ": 4.0, "A": 2.0, "B": 1.0}}
    assert table.named("B", rows) == "B"
    other = [{**rows[0], "problem": "q"}]
    assert table.named("B", rows + other) == "B, 1 problem"


def test_ahead_means_more_than_two_standard_errors_over_the_problems():
    for ratios, word in (
        ((0.5, 0.8, 0.6), "ahead"),
        ((0.5, 1.5, 0.9), "level"),
        ((2.0, 1.3, 1.9), "behind"),
        ((0.5,), "level"),
    ):
        compared = table.Comparison.of(ratios)
        assert compared.word == word
        logarithms = np.log(ratios)
        np.testing.assert_allclose(compared.ratio, np.exp(logarithms.mean()))
        if len(ratios) > 1:
            error = logarithms.std(ddof=1) / np.sqrt(len(ratios))
            expected = np.exp(logarithms.mean() + 2 * error)
            np.testing.assert_allclose(compared.high, expected)


def test_a_paired_comparison_uses_the_problems_that_have_both_methods():
    losses = {
        ("p", "GeoQ"): (1.0, 4.0),
        ("p", "A"): (2.0, 2.0),
        ("q", "GeoQ"): (3.0, 3.0),
        ("q", "A"): (1.0, 1.0),
        ("r", "GeoQ"): (9.0, 9.0),
    }
    rows = [
        {"problem": p, "method": m, "shift": "mild", "seed": seed, "pinball": value}
        for (p, m), values in losses.items()
        for seed, value in enumerate(values)
    ]
    # The ratio of p is 1, the geometric mean of 1/2 and 2, and that of q is 3.
    assert table.paired(rows, "A", "mild").ratio == pytest.approx(3**0.5)
    assert table.paired(rows, "B", "mild") is None


def test_the_levels_of_a_small_run_do_not_cross(results):
    rows = [r for r in rows_of(results, "defaults") if r["method"] == "GeoQ"]
    for row in rows:
        covered = list(row["coverage_by_level"].values())
        assert len(covered) == len(defaults.LEVELS)
        assert covered == sorted(covered)
    assert "| 0.99 |" in results[1]["defaults"]


def test_the_large_ensemble_has_as_many_trainings_as_the_default():
    problem = problems.PROBLEMS["branin"]
    x = problem.make(0, 60, 8).x
    remembered = RememberedTraining(problem.recipe(0))
    found = methods(problem, abs, remembered, len(x), 0)
    n_trainings = len(list(found["GeoQ"].folds.split(x)))
    assert found["Deep ensemble (15 members)"].n_members == n_trainings == 15


def test_longest_problems_start_first():
    names = defaults.in_order(defaults.SUITE)
    assert sorted(names) == sorted(defaults.SUITE)
    assert names[0] == "kuramoto-sivashinsky"
    assert set(defaults.LONGEST) <= defaults.EVERY.keys()


def test_every_problem_is_determined_by_its_seed():
    for problem in defaults.EVERY.values():
        first, again, other = (problem.make(seed, 42, 8) for seed in (3, 3, 4))
        assert first.x.dtype == first.y.dtype == np.float64
        assert len(first.x) == len(first.y) == 42
        np.testing.assert_array_equal(first.x, again.x)
        np.testing.assert_array_equal(first.y, again.y)
        assert not np.array_equal(first.x, other.x)
        assert tuple(first.tests) == problems.SHIFTS
        for shift, (x, y) in first.tests.items():
            assert x.shape == (8, *first.x.shape[1:])
            assert y.shape == (8, *first.y.shape[1:])
            np.testing.assert_array_equal(x, again.tests[shift][0])
            np.testing.assert_array_equal(y, again.tests[shift][1])


def test_every_surrogate_is_determined_by_its_seed():
    every = defaults.EVERY.values()
    recipes = {problem.recipe: problem for problem in every}
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
    # Support vector regression draws a number from the global generator and does not use it.
    np.random.set_state(state)  # noqa: NPY002


def test_outputs_are_in_units_of_the_training_data():
    for problem in defaults.EVERY.values():
        y = problem.make(0, 300, 8).y
        assert abs(y.mean()) < 0.1
        assert abs(y.std() - 1) < 0.1


def test_the_sets_have_no_problem_in_common():
    assert len(problems.PROBLEMS) == 12
    assert len(confirmation.CONFIRMATION) == 8
    assert len(defaults.SUITE) == 20
    assert len(fresh.FRESH) == 8
    assert len(second_fresh.SECOND_FRESH) == 8
    assert len(third_fresh.THIRD_FRESH) == 8
    assert len(defaults.EVERY) == 44


def test_shifted_queries_are_farther_from_the_training_data():
    for problem in defaults.SUITE.values():
        data = problem.make(0, 300, 200)
        scale = data.x.std(axis=0)
        points = KDTree(data.x / scale)
        distance = [points.query(x / scale)[0].mean() for x, _ in data.tests.values()]
        assert distance[0] < distance[1] < distance[2], problem.name


def test_shifted_queries_lie_outside_the_training_box():
    box = problems.PROBLEMS["borehole"].make
    data = box(0, 500, 200)
    low, high = np.array(box.low), np.array(box.high)

    def outside(x):
        unit = (x - low) / (high - low)
        return np.maximum(box.part[0] - unit, unit - box.part[1]).max(axis=1)

    assert outside(data.x).max() <= 0
    assert outside(data.tests["interpolation"][0]).max() <= 0
    mild, strong = outside(data.tests["mild"][0]), outside(data.tests["strong"][0])
    assert mild.min() > 0
    assert mild.max() <= box.margin + 1e-12
    assert strong.min() > box.margin


def test_the_hole_of_the_clustered_design_is_empty():
    data = problems.clustered_ishigami(0, 500, 200)
    assert np.linalg.norm(data.x, axis=1).min() > problems.HOLE
    assert np.linalg.norm(data.tests["mild"][0], axis=1).max() < problems.HOLE


def test_the_survey_leaves_gaps_between_its_tracks():
    data = confirmation.surveyed_franke(0, 400, 200)
    between, outside = data.tests["mild"][0], data.tests["strong"][0]
    assert KDTree(data.x).query(between)[0].min() > confirmation.GAP
    assert max(data.x.max(), between.max()) < confirmation.AREA
    assert outside.max(axis=1).min() > confirmation.AREA


def test_the_kuramoto_sivashinsky_solver_agrees_with_a_refined_step():
    place = 2 * np.pi * np.arange(64) / 64
    start = np.cos(place + 1) + np.sin(2 * place) + np.cos(3 * place + 2)
    attractor = problems.ks_step(start, n_steps=400)
    reference = problems.ks_step(attractor, dt=problems.KS_DT / 2000, n_steps=2000)
    one, many, twice_as_many = (
        abs(problems.ks_step(attractor, problems.KS_DT / n, n) - reference).max()
        for n in (1, 32, 64)
    )
    assert abs(reference - attractor).max() > 1e-2
    assert one < 1e-3
    assert twice_as_many < many / 12  # of fourth order, once the stiff waves allow it


def test_a_linear_wave_of_the_solver_decays_as_it_should():
    place = 2 * np.pi * np.arange(32) / 32
    wave = 1e-9 * np.cos(3 * place)
    after = solvers.etdrk4(
        wave, length=2 * np.pi, linear=lambda k: -0.1 * k**2, dt=0.05, n_steps=20
    )
    np.testing.assert_allclose(after, np.exp(-0.9) * wave, rtol=0, atol=1e-16)


def changed_source(tmp_path, monkeypatch, change):
    """The fingerprint of a small package before and after a change of its second module."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "first.py").write_text("import math\nfrom benchmarks import second\n")
    file = package / "second.py"
    file.write_text('"""Doc."""\n\n\ndef f(x):\n    """Twice."""\n    return 2 * x\n')
    (package / "third.py").write_text("y = 1\n")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    before = record.source("benchmarks.first")
    change(package)
    return before, record.source("benchmarks.first")


def replaced(name, old, new):
    def change(package):
        file = package / name
        file.write_text(file.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        replaced("second.py", '"""Twice."""', '"""Two times x."""'),
        replaced("second.py", '"""Doc."""', '"""Doc."""  # a comment'),
        replaced("third.py", "1", "2"),
    ],
    ids=["docstring", "comment", "module that is not imported"],
)
def test_prose_and_other_modules_do_not_change_the_source(
    tmp_path, monkeypatch, change
):
    before, after = changed_source(tmp_path, monkeypatch, change)
    assert after == before


def test_code_of_an_imported_module_changes_the_source(tmp_path, monkeypatch):
    change = replaced("second.py", "2 * x", "3 * x")
    before, after = changed_source(tmp_path, monkeypatch, change)
    assert after != before


def test_a_name_that_a_package_exports_leads_to_the_module_that_defines_it():
    tree = ast.parse("from geoq import GeoQ\nfrom benchmarks.suite import problems\n")
    assert record._imported_modules(tree) == [
        "geoq.estimator",
        "benchmarks.suite.problems",
    ]


def test_the_cost_of_calibration_and_assessment_is_measured(tmp_path):
    """The whole script, tiny: rows and the tables made of them."""
    file = tmp_path / "cost.json"
    command = small_run("costs.cost", file)
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    result = json.loads(file.read_text())
    calibrated = [row for row in result["rows"] if row["form"] != "folds alone"]
    assert {row["problem"] for row in calibrated} == {
        "forrester",
        "kuramoto-sivashinsky",
        "kuramoto-sivashinsky, rollouts",
    }
    for row in calibrated:
        assert row["device"] == "cpu"
        over = row["calibration_seconds"] / row["training_seconds"]
        assert row["calibration_over_training"] == pytest.approx(over, rel=1e-4)
        if "rollouts" not in row["problem"]:
            assert row["assessment_over_prediction"].keys() == {"1", "100", "10000"}
    (alone,) = [row for row in result["rows"] if row["form"] == "folds alone"]
    assert alone["together_over_training"] > 0
    assert alone["one_by_one_over_training"] > 0
    assert result["growth"]["slopes"].keys() == {"fit_seconds", "assess_1000_seconds"}
    assert "| forrester | paper | 10 | 1 |" in cost_tables.cost(result)
    assert "| shared trainings |" in cost_tables.quality(result)


# Results files.


@pytest.mark.parametrize(
    "file", sorted(record.RESULTS.glob("*.json")), ids=lambda file: file.stem
)
def test_rows_of_a_results_file_have_one_commit(file):
    result = json.loads(file.read_text())
    assert not any("commit" in row for row in result.get("rows", []))
    parts = [part for part in result.values() if isinstance(part, dict)]
    for commit in [result["commit"], *(p["commit"] for p in parts if "commit" in p)]:
        assert re.fullmatch(r"[0-9a-f]{7,40}", commit)
    # A file of rows that another run adds names its commit.
    _, _, other = file.stem.partition("@")
    assert result["commit"].startswith(other)


def test_every_results_file_can_be_measured_again():
    files = {file.stem.split("@")[0] for file in record.RESULTS.glob("*.json")}
    assert {run.file for run in rerun.RUNS} >= files
    modules = {run.command.split()[0].replace(".", "/") for run in rerun.RUNS}
    folder = record.RESULTS.parent
    assert [name for name in modules if not (folder / f"{name}.py").exists()] == []
    here = [run for run in rerun.RUNS if run.machine == "two-cores"]
    assert sum(run.minutes for run in here) <= 60
    # The parts of a file that are measured separately have commits of their own.
    assert all(run.commit() for run in rerun.RUNS if run.part)


def test_rows_of_another_commit_are_added_where_the_newest_run_has_none(tmp_path):
    for name, commit, loss in (("toy", "new", 1.0), ("toy@old", "old", 2.0)):
        seeds = (0,) if commit == "new" else (0, 1)
        rows = [{"method": "a", "setting": "", "seed": s, "loss": loss} for s in seeds]
        head = {"commit": commit, "machine": "2 cores", "device": "H200"}
        (tmp_path / f"{name}.json").write_text(record.as_text(head, rows))
    rows = tables.load("toy", tmp_path)["rows"]
    assert [(r["seed"], r["loss"], r.get("run")) for r in rows] == [
        (0, 1.0, None),
        (1, 2.0, "2 cores, H200, commit old"),
    ]


def test_a_file_that_would_mix_commits_is_refused(tmp_path):
    file = tmp_path / "mixed.json"
    with pytest.raises(ValueError, match=r"mixed.json would mix rows of the commits"):
        record.write("mixed", [{"seed": 0, "commit": "earlier"}, {"seed": 1}], file)
    assert not file.exists()


def test_a_file_has_the_commit_of_its_rows_and_a_part_has_its_own(tmp_path):
    rows = [{"seed": 0, "commit": "earlier"}, {"seed": 1, "commit": "earlier"}]
    file = record.write(
        "one", rows, tmp_path / "one.json", quality=record.part(rows=[])
    )
    result = json.loads(file.read_text())
    assert result["commit"] == "earlier"
    assert result["quality"] == {"commit": record.COMMIT, "rows": []}
    assert result["rows"] == [{"seed": 0}, {"seed": 1}]


@pytest.mark.parametrize("commit", ["4c9db4b+changes", "unknown"])
def test_published_results_name_a_commit_that_contains_their_code(
    tmp_path, monkeypatch, commit
):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    rows = [{"seed": 0, "commit": commit}]
    for refused in (
        lambda: record.write("one", rows),
        lambda: record.write("one", rows, tmp_path / "other.json"),
        lambda: record.write(
            "one", [{"seed": 0, "commit": "4c9db4b"}], quality=rows[0]
        ),
    ):
        with pytest.raises(ValueError, match=r"commit the changes first .* --out"):
            refused()
    assert not list(tmp_path.iterdir())
    assert record.write("one", rows, small=True).parent == tmp_path
    elsewhere = tmp_path / "elsewhere" / "one.json"
    assert json.loads(record.write("one", rows, elsewhere).read_text())["rows"]


def test_a_row_of_a_method_with_untrained_networks_is_left_out_and_listed(
    tmp_path, capsys
):
    course = {"best_step": 0, "first_loss": 1.0}
    line = {"method": "GeoQ (paper)", "setting": "", "seed": 0, "trainings": [course]}
    one_trained = line | {"trainings": [course, course | {"best_step": 50}]}

    def written(*rows, **extra):
        file = record.write("one", list(rows), tmp_path / "one.json", **extra)
        return json.loads(file.read_text())

    file = written(line, one_trained)
    assert file["rows"] == [one_trained]
    assert file["untrained"] == [{"method": "GeoQ (paper)", "setting": "", "seed": 0}]
    assert "left out, no step lowered the held-out loss" in capsys.readouterr().out
    assert written(line, small=True)["rows"] == [line]
    assert "untrained" not in written(one_trained)
