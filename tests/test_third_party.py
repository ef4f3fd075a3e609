"""The third-party cases: their simple bounds, tables and messages, without the packages of other developers."""

import json

import numpy as np
import pytest
import torch

from benchmarks.record import RESULTS
from benchmarks.third_party import packages, recurrent, table
from benchmarks.third_party.rivals import (
    PerValue,
    RegressionScaled,
    StepRules,
    conformal_quantile,
    summaries,
    until,
)
from geoq import RolloutGeoQ


def test_missing_packages_are_named_with_the_install_command(monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", {"no_such_module": "no-such-package"})
    with pytest.raises(SystemExit, match=r"no-such-package cannot .*third-party"):
        packages.check_installed()


def test_the_conformal_quantile_is_an_order_statistic():
    values = np.arange(1.0, 20.0)[::-1]
    assert conformal_quantile(values) == 19
    assert conformal_quantile(np.arange(1.0, 40.0)) == 38


def test_simple_bounds_cover_new_samples_and_the_scaled_one_is_smaller():
    rng = np.random.default_rng(0)
    size = rng.uniform(-2, 2, 600)
    error = np.exp(size)[:, None, None] * abs(rng.normal(size=(600, 1, 30)))
    features = size[:, None]
    found = {}
    for rule in (PerValue, RegressionScaled):
        bound = rule.fit(features[:300], error[:300])(features[300:])
        assert abs((error[300:] <= bound).mean() - 0.95) < 0.02
        found[rule] = bound.mean()
    assert found[RegressionScaled] < 0.6 * found[PerValue]


def test_summaries_have_one_row_per_sample():
    fields = np.random.default_rng(0).normal(size=(5, 2, 8, 6))
    assert summaries(fields, fields[:, :1]).shape == (5, 2 * 6 + 6)


def test_rules_of_rollouts_are_single_numbers_of_steps():
    # Rollout i exceeds its tolerance after i steps.
    ratio = (np.arange(100) >= np.arange(1, 101)[:, None]).astype(float) * 2
    assert until(ratio <= 1).tolist() == list(range(1, 101))
    rules = StepRules.fit(ratio)
    assert rules.exceedance == 6
    assert rules.per_step == 5


def test_a_gru_is_a_step_with_memory_that_can_be_calibrated():
    torch.set_num_threads(1)
    angle = 0.3 * np.arange(500)
    series = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    model = recurrent.train_gru(series[:250], n_hidden=8, n_steps=40, window=15)
    geoq = RolloutGeoQ(model, None, output=model.output, n_calibration=10)
    geoq.fit(model.states(series[200:])[50:], progress=None)
    assert geoq.bound(model.states(series[:20])[-2:], n_steps=5).shape == (2, 5, 2)


def test_the_echo_state_network_takes_the_steps_of_reservoirpy():
    nodes = pytest.importorskip("reservoirpy.nodes")
    recipe = recurrent.EchoState(2, n_units=20)
    series = np.random.default_rng(0).normal(size=(30, 2))
    states = recipe.states(series, n_warm=0)
    memory = nodes.Reservoir(20, **recipe.weights(), seed=0).run(series)
    np.testing.assert_allclose(states[1:, 2:], memory[:-1])


ROWS = [
    {"kind": "field", "setting": "A", "seed": 0, "method": method, "pinball": loss,
     "coverage": 0.9, "least_coverage": 0.8, "whole": 0.7, "cost": 2.0}
    for method, loss in (("per-cell conformal", 4.0), ("GeoQ", 1.0), ("GeoQ, 5 folds", 3.0))
]  # fmt: skip


def test_losses_are_relative_to_the_best_simple_bound():
    lines = table.bounds(ROWS).splitlines()
    assert lines[3].startswith("|  | **GeoQ** | 0.25 | 0.900 | 0.900 | 0.80 | 0.70 |")
    assert table.best_simple(ROWS, "A") == 4.0


@pytest.fixture(scope="module")
def rows():
    return json.loads((RESULTS / "third_party.json").read_text())["rows"]


def test_the_results_contain_all_cases_and_three_seeds(rows):
    settings = {r["setting"] for r in rows}
    systems = ("Lorenz", "Rossler", "Halvorsen")
    assert settings == {"Darcy", "Burgers", "Sunspots", "El Nino"} | {
        f"{system}, {model}" for system in systems for model in ("ESN", "GRU")
    }
    seeds = {(r["setting"], r["seed"]) for r in rows}
    assert len(seeds) == 3 * len(settings)


def test_the_picture_is_drawn_from_the_results(rows, tmp_path):
    table.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
