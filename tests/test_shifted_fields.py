"""The benchmark of shifted fields: its solvers, and a small run."""

import math

import numpy as np
import pytest

from benchmarks.fields import table
from benchmarks.fields.bounds import SMALL as SMALL_BOUNDS
from benchmarks.fields.bounds import rows_of as rows_of_bounds
from benchmarks.fields.forms import BOUNDARY, FORMS, conductivities, poisson
from benchmarks.fields.problems import (
    DARCY,
    FRESH,
    PROBLEMS,
    darcy,
    heat,
    heat_fields,
    schroedinger,
    waves,
)
from benchmarks.fields.run import SMALL, rows_of

RNG = np.random.default_rng(0)


def test_darcy_flow_through_a_uniform_square():
    """The largest pressure of -lap u = 1 in the unit square is 0.0737."""
    pressure = darcy(np.zeros((1, 1, DARCY, DARCY)))
    assert pressure.max() == pytest.approx(0.0737, rel=0.02)


def test_waves_keep_their_norm():
    x = waves()(RNG, 3)
    assert np.square(schroedinger(x)).sum() == pytest.approx(np.square(x).sum())


def test_heat_flow_keeps_the_mean():
    x = heat_fields()(RNG, 3)
    assert heat(x).mean() == pytest.approx(x.mean())


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_every_shift_has_finite_references(problem):
    for draw in problem.shifts.values():
        x = draw(RNG, 2)
        assert x.shape[1:] == problem.draw(RNG, 1).shape[1:]
        assert np.isfinite(problem.solve(x)).all()


def test_a_small_run_compares_both_regions_on_every_set():
    rows = rows_of(FRESH[0], 0, SMALL)
    assert len(rows) == 2 * (1 + len(FRESH[0].shifts))
    assert all(math.isfinite(row["coverage"]) for row in rows)
    assert "| new | 40 | field region |" in table.summary(rows)


def test_twice_the_conductivity_halves_the_solution_on_the_mesh():
    x = conductivities(RNG, 2)
    u = poisson(x)
    assert (u[..., BOUNDARY] == 0).all()
    assert (u[..., ~BOUNDARY] > 0).all()
    assert poisson(x + math.log(2)) == pytest.approx(u / 2)


def test_a_small_run_compares_bounds_on_the_same_errors():
    rows = rows_of_bounds(FORMS[0], 0, SMALL_BOUNDS)
    assert {"per cell", "regression", "GeoQ (x, p)"} <= {row["method"] for row in rows}
    assert all(math.isfinite(row["pinball"]) for row in rows)
    assert all(0.8 < row["coverage"] <= 1 for row in rows)
