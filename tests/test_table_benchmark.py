"""The benchmark of tables: its settings, its rows and its summary, without the packages of the rivals."""

import numpy as np
import pytest

from benchmarks.suite import tables
from benchmarks.suite.table_problems import Box, diabetes


def test_the_shifted_column_of_a_data_set_is_outside_the_training_data():
    problem = diabetes(0)
    edge = problem.train.x["bmi"].max()
    assert (problem.queries["mild"].x["bmi"] > edge).all()
    assert problem.queries["far"].x["bmi"].min() > problem.queries["mild"].x["bmi"].max()  # fmt: skip
    inside = problem.queries["inside"].x.index
    assert not inside.intersection(problem.train.x.index).size


@pytest.mark.parametrize(
    ("setting", "least", "most"), [("inside", 0, 1), ("mild", 1, 1.25), ("far", 1.5, 2)]
)
def test_samples_of_a_box_leave_it_by_half_widths(setting, least, most):
    box = Box(np.array([0.0, 1.0]), np.array([4.0, 1e4]), np.array([False, True]))
    x = box.sample(100, setting, np.random.default_rng(0))
    # The inner half: 1 to 3, and 10 to 1000.
    u = np.stack([x[:, 0] - 2, np.log10(x[:, 1]) - 2], axis=1)
    assert len(x) == 100
    assert abs(u).max(axis=1).min() >= least
    assert abs(u).max() <= most + 1e-9


def row(method, setting, loss, **other):
    numbers = {"coverage": 0.9, "bound": 2.0, "error": 1.0}
    numbers["fit_over_training"] = 15.0
    flag = {"safe_fraction": 0.8 if method == tables.OURS else None}
    return {"problem": "a", "method": method, "setting": setting, "seed": 0, "pinball": loss} | numbers | flag | other  # fmt: skip


def test_the_summary_divides_by_the_best_rival():
    rows = [
        row("GeoQ", "inside", 2.0),
        row("MAPIE split", "inside", 4.0),
        row("MAPIE CV+", "inside", 1.0),
    ]
    text = tables.summary(rows)
    assert "| a | 2.00, 0.90, 0.80 | 15 |" in text
    assert "| MAPIE split | 1 | 2.00 | 0.90 | 0.90 | - | 2.00 |" in text


def test_geoq_answers_all_settings_of_a_problem(monkeypatch):
    monkeypatch.setattr(tables, "METHODS", {tables.OURS: tables.geoq})
    monkeypatch.setattr(tables, "PROBLEMS", {"diabetes": quick})
    rows = tables.run("diabetes", 0)
    assert [r["setting"] for r in rows] == ["mild", "far", "inside"]
    assert all(0 < r["coverage"] <= 1 for r in rows)


def quick(seed):
    problem = diabetes(seed)
    problem.model[-1].set_params(n_estimators=5)
    return problem
