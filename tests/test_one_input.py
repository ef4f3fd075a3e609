import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.suite import one_input
from benchmarks.suite.one_input_families import ONE_INPUT
from benchmarks.suite.one_input_problems import WIDTHS
from benchmarks.suite.runs import finished

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The rows of a small run, and what it printed."""
    file = tmp_path_factory.mktemp("results") / "one_input.json"
    command = [sys.executable, "-m", "benchmarks.suite.one_input", "--small"]
    printed = subprocess.run(
        [*command, "--seed-list", "3", "--out", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(file.read_text())["rows"], printed


def test_a_small_run_measures_every_rule_at_every_label(small):
    rows, _ = small
    assert {(r["problem"], r["seed"]) for r in rows} == {("hole-2", 3), ("constant", 3)}
    for row in rows:
        queries = ONE_INPUT[row["problem"]].data(3)[2]
        assert row["rules"].keys() == {"GeoQ", "GeoQ (DistanceRegion)"}
        for measures in row["rules"].values():
            assert measures.keys() == set(queries.label)
            for safe, false_trust, coverage, pinball in measures.values():
                assert 0 <= false_trust <= min(safe, 1 - coverage) + 1e-6
                assert pinball >= 0


def test_the_rules_of_a_case_have_the_same_bounds(small):
    for row in small[0]:
        bounds = [
            {label: measures[2:] for label, measures in rule.items()}
            for rule in row["rules"].values()
        ]
        assert bounds[0] == bounds[1]


def test_the_summary_is_that_of_the_rows_in_the_file(small):
    rows, printed = small
    assert one_input.summary(rows) in printed


@pytest.mark.parametrize("name", ONE_INPUT)
def test_the_outputs_are_finite_and_determined_by_the_seed(name):
    problem = ONE_INPUT[name]
    x, y, queries, query_y = problem.data(1)
    again = problem.data(1)
    assert len(x) == len(y) == problem.n
    assert len(queries.x) == len(queries.label) == len(query_y)
    assert np.isfinite(y).all()
    assert np.isfinite(query_y).all()
    np.testing.assert_array_equal(x, again[0])
    np.testing.assert_array_equal(query_y, again[3])


@pytest.mark.parametrize("name", ["waves", "log", "ridge"])
def test_one_input_leaves_its_range_and_the_others_stay_inside(name):
    problem = ONE_INPUT[name]
    x, _, queries, _ = problem.data(0)
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


def test_the_hole_is_empty_and_its_queries_are_in_it():
    x, _, queries, _ = ONE_INPUT["hole-3"].data(0)
    inside = queries.x[queries.label == "special hole"]
    assert len(inside) == 200
    assert np.linalg.norm(x, axis=1).min() > 0.7 > np.linalg.norm(inside, axis=1).max()


def case(name, r2, safe, false_trust):
    cells = {
        "inside": [safe, 0.0, 0.95, 1.0],
        "far": [0.0, 0.0, 1.0, 1.0],
        "input 0 1.05": [0.5, false_trust, 0.9, 1.0],
        "input 0 2.0": [0.0, 0.0, 0.9, 1.0],
    }
    return {
        "problem": name,
        "surrogate": "gbr",
        "seed": 0,
        "family": "box",
        "r2": r2,
        "harmless": ["input 0 1.05"],
        "top": 0,
        "rules": {"GeoQ": cells},
    }


def test_the_summary_names_the_worst_cell_and_leaves_out_untrained_surrogates():
    rows = [case("a", 0.9, 0.98, 0.3), case("b", 0.9, 0.94, 0.0)]
    text = one_input.summary([*rows, case("c", 0.2, 0.1, 1.0)])
    assert "2 cases; left out, because R2 < 0.5: c-gbr 0 (0.20)." in text
    worst = "0.30 (a-gbr 0, input 0 1.05) | 0.00 (a-gbr 0, input 0 2.0)"
    line = (
        f"| GeoQ | 0.960 | 0.940 | b-gbr 0 | {worst} | 0.250 | 0.50 | 1.000 | 1.000 |"
    )
    assert line in text


def half(number):
    return 1 / number


def test_a_case_that_fails_does_not_end_the_others(capsys):
    assert list(finished(half, [(0,), (2,)])) == [0.5]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_no_case_starts_after_the_limit(capsys):
    assert list(finished(half, [(1,), (2,)], minutes=0)) == []
    assert "not started: [(1,), (2,)]" in capsys.readouterr().out
