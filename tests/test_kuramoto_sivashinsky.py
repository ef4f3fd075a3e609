import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import paper_numbers, tables
from benchmarks.rollouts import ablation
from benchmarks.rollouts.data import SMALL, later, load, snapshots
from benchmarks.rollouts.gaussian_process import StepProcess
from benchmarks.rollouts.methods import ScaledPerStep
from geoq.baselines.bound import Bound

ROOT = Path(__file__).parents[1]
SPREADS = ("GP, noise 1e-10", "MC dropout", "Deep ensemble")
METHODS = {
    "GeoQ",
    "GeoQ (blocks and clusters)",
    "GeoQ (clusters)",
    "GeoQ (geometry off)",
    "GeoQ (paper)",
    "GeoQ (paper, capped)",
    "One number per horizon",
    "One number per horizon (clusters)",
    "Horizon x climatology",
    "Horizon x climatology (clusters)",
    *SPREADS,
    "GP",
    *(f"{name}, scaled per step" for name in SPREADS),
    "Conformal (per coordinate)",
    "Conformal (per step and coordinate)",
}
# The solution from u(0) = cos(x/16) (1 + sin(x/16)), L = 32 pi, at x = 2 pi, 4 pi, ..., 16 pi: the trajectory published
# with PDE-FIND (Rudy and others 2017, github.com/snagcliffs/PDE-FIND, Datasets/kuramoto_sivishinky.mat).
PUBLISHED = {
    20.0: "0.5951208045 0.8106338555 1.1219484634 0 -1.1219484634 -0.8106338555 -0.5951208045 -0.4131803808",
    100.0: "-2.4463139911 -0.9376915255 -0.5380012177 0 0.5380012177 0.9376915254 2.4463139911 0.9825671699",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run with its pictures."""
    folder = tmp_path_factory.mktemp("results")
    file = folder / "kuramoto_sivashinsky.json"
    script = "benchmarks.rollouts.kuramoto_sivashinsky"
    command = [sys.executable, "-m", script, "--small"]
    command += ["--out", file, "--pictures", folder]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=600)
    return folder, command


def test_a_small_run_writes_a_row_per_method_and_time_step(results):
    rows = json.loads((results[0] / "kuramoto_sivashinsky.json").read_text())["rows"]
    measured = [(row["setting"], row["method"]) for row in rows]
    assert len(measured) == len(set(measured))
    assert {m for _, m in measured} == METHODS
    assert {s for s, _ in measured} == {"dt=0.25", "dt=0.05"}
    by_name = {(r["setting"], r["method"]): r for r in rows}
    for setting in ("dt=0.25", "dt=0.05"):
        # Bounds of level 0.95 need a calibration: few and short trainings agree with each other more than with the truth.
        for name in SPREADS:
            raw, scaled = (
                by_name[setting, f"{name}{end}"]["coverage"]
                for end in ("", ", scaled per step")
            )
            assert raw < 0.8
            assert scaled > 0.85
        total, cut = (
            by_name[setting, f"GeoQ (paper{end})"] for end in ("", ", capped")
        )
        assert cut["coverage"] < total["coverage"]
        assert cut["pinball"] < total["pinball"]
        assert len(total["trainings"]) == 5


def test_a_rerun_measures_nothing_again(results):
    file = results[0] / "kuramoto_sivashinsky.json"
    before = file.read_text()
    again = subprocess.run(
        results[1], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == str(file)
    assert file.read_text() == before


def test_the_small_run_draws_every_picture(results):
    drawn = {path.name for path in results[0].glob("*.png")}
    assert drawn == {
        f"kuramoto-sivashinsky-{name}-{dt}.png"
        for name in ("default", "paper", "horizons")
        for dt in ("0.25", "0.05")
    }


def test_the_tables_show_the_horizon_beside_the_paper(results):
    page = tables.render("kuramoto_sivashinsky", "GeoQ", folder=results[0])
    assert "**Along the horizon (dt=0.05)**" in page
    assert "| coverage, quarter 4 |" in page
    assert "0.019 / 0.490 / 0.868 / 0.484" in page


def test_the_ablation_varies_one_choice_at_a_time():
    surrogate = SimpleNamespace(encoder=np.tanh)
    choices = ablation.choices(surrogate, 0, SMALL)
    default, *others = choices.values()
    for change in others:
        assert sum(change[name] != default[name] for name in default) == 1
    paper = paper_numbers.PAPER["kuramoto_sivashinsky_ablation"]
    assert list(choices)[: len(paper)] == list(paper)
    assert {ablation.part_of(name) for name in choices} == set(ablation.PARTS)


@pytest.mark.parametrize(("time", "tolerance"), [(20.0, 1e-6), (100.0, 1e-4)])
def test_the_solver_meets_a_published_trajectory(time, tolerance):
    place = 32 * np.pi * np.arange(1, 257) / 256
    start = np.cos(place / 16) * (1 + np.sin(place / 16))
    state = later(start, time, step=0.02, length=32 * np.pi)
    expected = [float(value) for value in PUBLISHED[time].split()]
    np.testing.assert_allclose(state[15:128:16], expected, rtol=0, atol=tolerance)


def test_the_snapshots_agree_with_a_refined_step():
    """Over ten units of time, after which chaos has not yet spread the difference."""
    state = snapshots(0.25, seed=3, n_snapshots=1)[0]
    coarse, fine = (later(state, 10.0, step=step) for step in (0.05, 0.005))
    assert abs(fine - state).max() > 1
    np.testing.assert_allclose(coarse, fine, rtol=0, atol=1e-4)


def test_both_time_steps_sample_one_trajectory():
    slow, fast = (snapshots(dt, 0, n) for dt, n in ((0.25, 3), (0.05, 11)))
    np.testing.assert_allclose(slow, fast[::5], rtol=0, atol=1e-9)


def test_training_states_fill_the_unit_interval_and_tests_come_after():
    data = load(0.25, 1, SMALL)
    assert data.train.min() == 0
    assert data.train.max() == 1
    n_train, first = len(data.train), SMALL.initial_states
    whole = snapshots(0.25, 1, n_train + first[-1] + 3)
    low, high = whole[:n_train].min(), whole[:n_train].max()
    after = (whole[n_train:] - low) / (high - low)
    np.testing.assert_allclose(data.x0, after[list(first)])
    np.testing.assert_allclose(data.truth[0, :2], after[1:3])


def test_each_choice_of_the_ablation_changes_the_bound():
    """The losses of every two choices differ by more than a thousandth, as a sum or as a capped sum."""
    parts = ablation.PARTS
    rows = [r for part in parts for r in ablation.ablate(0.25, 0, SMALL, part)]
    sums, cuts = (
        {r["method"]: r["pinball"] for r in rows if r["setting"] == f"{name}, dt=0.25"}
        for name in ("sum", "capped sum")
    )
    assert len(sums) == len(cuts) == 15
    assert [
        (first, second)
        for first, second in combinations(sums, 2)
        if np.allclose(sums[first], sums[second], rtol=1e-3, atol=0)
        and np.allclose(cuts[first], cuts[second], rtol=1e-3, atol=0)
    ] == []
    # The bounds of the sum exceed the climatology, so that the cap lowers the loss.
    assert all(cuts[name] < 0.9 * sums[name] for name in sums)
    n_steps = {r["method"]: r["n_steps"] for r in rows}
    assert n_steps["initial weights"] == 0
    assert n_steps["trained for a fixed number of steps"] == SMALL.n_fixed


def test_the_process_interpolates_a_smooth_step_and_is_unsure_far_from_the_data():
    random = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, generator=random, dtype=torch.double)
    process = StepProcess().fit(x, torch.sin(x + x.roll(1, dims=1)))
    query = torch.rand(50, 3, generator=random, dtype=torch.double)
    mean, deviation = process(query)
    error = (mean - torch.sin(query + query.roll(1, dims=1))).abs()
    assert float(error.max()) < 1e-3
    assert float((error <= 1.96 * deviation).double().mean()) > 0.8
    assert float(process(query + 3)[1].min()) > 100 * float(deviation.max())
    # Known hyper-parameters replace the search.
    half = StepProcess(known=process.found_).fit(
        x[::2], torch.sin(x + x.roll(1, 1))[::2]
    )
    assert half.found_ == process.found_
    assert StepProcess(known=(9.0, 1e-3, 1.0)).fit(x, x).length_ == 9.0


class Persistence:
    """A baseline that predicts the initial state at every step, with the spread 1."""

    def predict(self, x0):
        prediction = np.repeat(x0[:, None], 12, axis=1)
        return Bound(prediction, np.ones_like(prediction))


def test_the_factor_of_each_step_is_the_quantile_of_the_held_out_errors():
    states = np.random.default_rng(0).standard_normal((500, 3)).cumsum(axis=0)
    settings = replace(SMALL, n_calibration=10, n_starts=40)
    scaled = ScaledPerStep(
        Persistence(), lambda _, runs: [Persistence()] * len(runs), settings
    )
    scaled.fit(states[:-1], states[1:])
    starts = np.arange(488)
    error = abs(states[starts[:, None] + np.arange(1, 13)] - states[starts][:, None])
    covered = (error <= scaled.predict(states[starts]).error_hat).mean(axis=(0, 2))
    assert (abs(covered[:10] - 0.95) < 0.03).all()
    assert scaled.factor_[9] > 2 * scaled.factor_[0]
    np.testing.assert_allclose(
        scaled.predict(states[:1]).error_hat[0, 9:, 0], scaled.factor_[9]
    )
