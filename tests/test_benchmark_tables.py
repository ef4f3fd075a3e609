"""Scores, tables and pictures of the benchmarks by hand, and the laws of the problems that they use."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import markdown, pictures, record, scores
from benchmarks.fields import forms, problems
from benchmarks.fields import table as fields
from benchmarks.suite import one_input, table
from benchmarks.suite.table_problems import Box
from benchmarks.third_party.rivals import PerValue, RegressionScaled, StepRules, conformal_quantile
from benchmarks.third_party.table import best_simple
from benchmarks.timing import Memo, Stopwatch


def rows(method, losses, **other):
    """Rows with some pinball losses, one per seed of the problems a and b."""
    cases = [(problem, seed) for problem in "ab" for seed in (0, 1)]
    about = {"method": method, "coverage": 0.9, "safe_fraction": None} | other
    return [
        about | {"problem": problem, "seed": seed, "pinball": loss}
        for (problem, seed), loss in zip(cases, losses, strict=True)
    ]


# Scores


def test_a_row_has_the_scores_of_all_and_of_safe_queries():
    answer = SimpleNamespace(
        prediction=np.array([1.0, 2.0, 3.0]), error_hat=np.array([1.0, 1.0, 1.0])
    )
    safe = np.array([True, True, False])
    row = scores.row({"seed": 0}, np.array([1.0, 2.5, 6.0]), answer, safe, (2.0, 3.0))
    # The errors are 0, 0.5 and 3; below its bound an error costs 0.05, above it 0.95 of the difference.
    assert row["pinball"] == pytest.approx((0.05 + 0.025 + 1.9) / 3)
    assert row["safe_pinball"] == pytest.approx(0.0375)
    assert (row["coverage"], row["safe_coverage"], row["safe_fraction"]) == (2 / 3, 1, 2 / 3)
    assert row["relative_l2"] == pytest.approx(math.sqrt(9.25 / 43.25))
    assert math.isnan(row["correlation"])  # with a constant bound


def test_false_trust_is_the_fraction_of_safe_queries_above_their_bounds():
    error, label = np.array([[1.0, 3.0], [3.0, 3.0]]), {"inside": np.array([True, True])}
    found = one_input.measures(error, np.full((2, 2), 2.0), np.array([True, False]), label)
    loss = (0.05 * 1 + 3 * 0.95 * 1) / 4
    assert found["inside"] == pytest.approx([0.5, 0.25, 0.25, loss])


def test_a_remembered_result_costs_the_seconds_that_it_took(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("benchmarks.timing.now", lambda: next(clock))
    memo = Memo()
    watch, made = Stopwatch(memo), memo("key", lambda: "made")
    with watch.running():
        assert memo("key", lambda: "again") == made == "made"
    assert watch.seconds == 1 + 5


# Tables


def test_ratios_have_a_geometric_mean_and_students_interval():
    found = markdown.Ratio.of([0.5, 2.0, 0.25])
    # The logarithms are -1, 1 and -2 times log 2; their standard error is 0.882 log 2, and t is 4.303.
    assert found.mean == pytest.approx(2 ** (-2 / 3))
    assert (found.low, found.high) == pytest.approx((0.0454, 8.74), rel=2e-3)
    assert (found.word, found.better, found.n) == ("no clear difference", 2, 3)
    assert markdown.Ratio.of([0.5, 0.51, 0.52]).word == "ahead"
    ours, theirs = rows("GeoQ", (1, 2, 4, 8)), rows("other", (2, 2, 4, 32))
    assert markdown.paired(ours, theirs) == pytest.approx([0.5**0.5, 0.5])
    assert markdown.paired(ours, theirs[:2]) == pytest.approx([0.5**0.5])
    assert markdown.compare(ours, ours) == ""


def test_the_best_rival_is_chosen_on_the_seeds_that_both_have():
    found = rows("GeoQ", (2, 4, 3, 3)) + rows("one", (4, 4, 9, 9)) + rows("two", (1, 8, 6, 6))[1:]
    # Problem a: 6 / 8 of the first rival, and 4 / 8 on the seed of the second.
    ratios = table.over_best_rival(found)
    assert {name: of["GeoQ"] for name, of in ratios.items()} == {"a": 0.75, "b": 0.5}
    losses = table.relative_losses(
        [row | {"shift": shift} for row in found for shift in table.COLUMNS]
    )
    assert losses["GeoQ"]["mild"].mean == pytest.approx(math.sqrt(0.75 * 0.5))


def test_named_methods_are_compared_in_their_best_version_on_paired_seeds():
    every = []
    for shift in table.COLUMNS:
        every += rows("GeoQ", (1, 1, 1, 1), shift=shift)
        every += rows("CV+", (9, 9, 9, 9), shift=shift, coverage=0.7)
        every += rows("CV+ / random folds", (2, 8, 4, 4), shift=shift, coverage=0.8)
    ratio, covered = table.versus(every, "CV+", "mild")
    assert (ratio.mean, ratio.word, covered) == (pytest.approx(4), "behind", 0.8)
    others = [
        r
        for name in table.PUBLIC
        if name not in ("GeoQ", "CV+")
        for shift in table.COLUMNS
        for r in rows(name, (3, 3, 3, 3), shift=shift)
    ]
    text = table.unseen({"rows": every + others})
    assert "| CV+, as in MAPIE | 4.00 (geoq is ahead) | 4.00 (geoq is ahead) |" in text
    assert "| **geoq** | 1 | 1 | 1 | 0.90 | 0.90 | 0.90 |" in text


def test_the_flags_of_one_input_count_cells_and_leave_out_poor_surrogates():
    def case(problem, r2, safe, false_trust):
        labels = {"inside": [safe, 0.0, 0.95, 1.0], "far": [0.0, 0.0, 1.0, 1.0]}
        labels |= {"input 0 1.05": [0.5, false_trust, 0.9, 1.0], "input 0 2.0": [0, 0, 0.9, 1.0]}
        about = {"problem": problem, "method": "GeoQ", "seed": 0, "family": "box", "r2": r2}
        return about | {"harmless": ["input 0 1.05"], "top": 0, "labels": labels}

    known = [case("a", 0.9, 0.98, 0.3), case("b", 0.9, 0.94, 0.0), case("c", 0.2, 0.1, 1.0)]
    text = table.one_input({"rows": known})
    assert "2 cases; left out, because R2 < 0.5: c 0 (0.20)." in text
    cells = "0.960 | 0.940 (b 0) | 0.30 (a 0, input 0 1.05) | 0.00 | 0.250 | 0.50 | 1.000 | 1.000 |"
    assert f"| all | 2 | GeoQ | {cells}" in text


def test_losses_are_divided_by_the_best_of_the_other_methods():
    numbers = {"setting": "inside", "bound": 2.0, "error": 1.0, "fit_over_training": 15.0}
    found = rows("GeoQ", (2, 2, 2, 2), **numbers | {"safe_fraction": 0.8})
    found += rows("split", (4, 4, 1, 1), **numbers) + rows("CV+", (8, 8, 8, 8), **numbers)
    text = table.data_frames({"rows": found})
    assert "| a | 0.50, 0.90, 0.80 | 15 |" in text
    assert "| b | 2.00, 0.90, 0.80 | 15 |" in text
    assert (
        "| split | 1.00 (0.00 to >100) no clear difference | 2 | 0.90 | 0.90 | - | 2.00 |" in text
    )
    simple = [row | {"setting": "A"} for row in rows("per-cell conformal", (4, 4, 4, 4))]
    simple += [row | {"setting": "A"} for row in rows("regression-scaled conformal", (1, 3, 5, 3))]
    assert best_simple([*simple, *found]) == {"A": 3.0}


def test_a_hazard_is_missed_if_many_of_it_are_safe_and_wrong():
    sets = [("inside", 0.95, 1, 0.9, 0.95), ("x", 0.5, 2, 0.3, 0.6), ("y", 0.5, 2, 0.3, 0.95)]
    sets += [("z", 0.97, 0.5, 1.0, 0.97), ("w", 0.97, 3, 0.4, 0.97)]
    names = ("shift", "coverage", "error_ratio", "safe_fraction", "safe_coverage")
    about = {"setting": "P", "n": 60, "method": "R", "design": True, "seed": 0}
    text = fields.summary({"rows": [about | dict(zip(names, s, strict=True)) for s in sets]})
    assert "| of the design | 60 | R | 0.90 | 0.90 | 0.30 | 1 of 2 | 1.00 | 1 |" in text


def test_the_best_number_is_bold_and_older_rows_are_signed():
    found = rows("GeoQ", (1, 1, 1, 1)) + rows("old", (3, 3, 3, 3), run="other machine, commit 1")
    columns = {"loss": markdown.mean("pinball")}
    text = markdown.table("method", markdown.group(found, "method"), columns, best={"loss": min})
    assert markdown.signed(text, found) == (
        "| method | loss |\n|---|---|\n| GeoQ | **1.00** |\n| old † | 3.00 |\n\n† other machine, commit 1."
    )


# Pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_of_the_pages_shows_the_rows_of_its_results_file(name, tmp_path):
    figure, shown = pictures.PICTURES[name]()
    pictures.save(figure, tmp_path / "picture.png", shown)
    drawn = [tmp_path / "picture.png", record.ROOT / "docs" / f"{name}.png"]
    assert [pictures.stored_digest(path) for path in drawn] == 2 * [pictures.digest(shown)]
    assert pictures.digest(shown[1:]) != pictures.digest(shown)


# Problems


def test_the_solvers_of_fields_have_their_laws():
    rng = np.random.default_rng(0)
    # The largest pressure of -lap u = 1 in the unit square is 0.0737.
    pressure = problems.darcy(np.zeros((1, 1, problems.DARCY, problems.DARCY)))
    assert pressure.max() == pytest.approx(0.0737, rel=0.02)
    waves, heat = problems.waves()(rng, 3), problems.heat_fields()(rng, 3)
    assert np.square(problems.schroedinger(waves)).sum() == pytest.approx(np.square(waves).sum())
    assert problems.heat(heat).mean() == pytest.approx(heat.mean())
    flow, line = problems.flows()(rng, 2), problems.burgers_fields()(rng, 3)
    # Transport and diffusion keep the mean of the source, and the decay has the rate 1.
    carried = problems.transport(flow)[:, 0]
    np.testing.assert_allclose(carried.mean((1, 2)), -flow[:, 1].mean((1, 2)), atol=1e-12)
    later = problems.burgers(line)
    np.testing.assert_allclose(later.mean(-1), line.mean(-1), atol=1e-12)
    assert (abs(later).max(-1) <= abs(line).max(-1)).all()
    x = forms.conductivities(rng, 2)
    u = forms.poisson(x)
    assert (u[..., forms.BOUNDARY] == 0).all()
    assert (u[..., ~forms.BOUNDARY] > 0).all()
    np.testing.assert_allclose(forms.poisson(x + math.log(2)), u / 2)


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_every_shift_has_finite_references(name):
    problem, rng = problems.PROBLEMS[name], np.random.default_rng(0)
    for draw in (problem.draw, *problem.shifts.values()):
        assert np.isfinite(problem.solve(draw(rng, 2))).all()


def test_samples_of_a_box_leave_it_by_half_widths():
    box = Box([0.0, 1.0], [4.0, 1e4], log=[1])
    for setting, least, most in (("inside", 0, 1), ("mild", 1, 1.25), ("far", 1.5, 2)):
        x = box.sample(100, setting, np.random.default_rng(0))
        # The inner half: 1 to 3, and 10 to 1000.
        u = abs(np.stack([x[:, 0] - 2, np.log10(x[:, 1]) - 2], axis=1))
        assert least <= u.max(axis=1).min() <= u.max() <= most + 1e-9


def test_simple_bounds_cover_new_samples_and_rules_are_single_numbers_of_steps():
    assert [conformal_quantile(np.arange(1.0, n)[::-1]) for n in (20, 40)] == [19, 38]
    rng = np.random.default_rng(0)
    size = rng.uniform(-2, 2, (600, 1))
    error, means = np.exp(size)[..., None] * abs(rng.normal(size=(600, 1, 30))), []
    for rule in (PerValue, RegressionScaled):
        bound = rule.fit(size[:300], error[:300])(size[300:])
        assert abs((error[300:] <= bound).mean() - 0.95) < 0.02
        means.append(bound.mean())
    assert means[1] < 0.6 * means[0]
    # Rollout i exceeds its tolerance after i steps.
    ratio = (np.arange(100) >= np.arange(1, 101)[:, None]).astype(float) * 2
    assert StepRules.fit(ratio) == StepRules(per_step=5, exceedance=6)
