"""The solver against exact solutions and laws; and the data set that it makes."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def euler(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import euler

    return euler


@pytest.fixture
def riemann(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import riemann

    return riemann


@pytest.fixture
def data(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import richtmyer_meshkov_data

    return richtmyer_meshkov_data


def centres(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def advance(solver, primitive, duration, courant=0.5, fastest=3.0):
    n_steps = math.ceil(duration * fastest / courant / solver.spacing)
    state = solver.conserved(primitive)
    for _ in range(n_steps):
        state = solver.step(state, duration / n_steps)
    return state


def shock_tube(solver, left, right, n, duration):
    """Primitive state of two gases that a wall at x = 1/2 kept apart; four rows, all the same."""
    x = centres(n).expand(1, 4, n)
    z = (x > 0.5).double()

    def both(name):
        return torch.where(x > 0.5, getattr(right, name), getattr(left, name))

    rho, u, p = both("density"), both("velocity"), both("pressure")
    start = ((1 - z) * rho, z * rho, u.double(), torch.zeros_like(x), p.double(), z)
    return solver.primitive(advance(solver, start, duration))


def density_error(euler, riemann, left, right, n, duration):
    solver = euler.Euler((left.gamma, right.gamma), 1 / n)
    m1, m2, u, v, p, z = (w[0] for w in shock_tube(solver, left, right, n, duration))
    speed = (centres(n).numpy() - 0.5) / duration
    exact = torch.as_tensor(riemann.solution(left, right, speed))
    found = torch.stack([(m1 + m2)[0], u[0], p[0]])
    assert_close(v, torch.zeros_like(v))
    assert_close((m1 + m2)[0], (m1 + m2)[3])
    return (found - exact).abs().mean(dim=1)


def sod(riemann):
    return riemann.Gas(1.0, 0.0, 1.0, 1.4), riemann.Gas(0.125, 0.0, 0.1, 1.4)


def test_the_exact_solution_of_sod_is_the_published_one(riemann):
    """Toro 2009, table 4.3, test 1."""
    pressure, velocity = riemann.contact(*sod(riemann))
    assert pressure == pytest.approx(0.30313, abs=5e-6)
    assert velocity == pytest.approx(0.92745, abs=5e-6)
    density = riemann.solution(*sod(riemann), np.array([0.9, 0.95]))[0]
    assert density == pytest.approx([0.42632, 0.26557], abs=5e-6)


def test_exact_waves_obey_the_jump_conditions_and_the_invariants(riemann):
    """A shock into the second gas, a fan into the first: mass, momentum and energy flux; entropy and u + 2c/(g-1)."""
    left, right = riemann.Gas(2.0, 0.3, 5.0, 1.4), riemann.Gas(4.0, -0.2, 1.0, 1.09)
    _, velocity = riemann.contact(left, right)
    speeds = np.linspace(-4, 4, 8001)
    rho, u, p = riemann.solution(left, right, speeds)
    fan = (speeds < velocity) & (rho < left.density)
    assert_close(torch.tensor(p[fan] / rho[fan] ** 1.4), torch.full((fan.sum(),), left.pressure / 2**1.4).double())
    c = np.sqrt(1.4 * p[fan] / rho[fan])
    assert u[fan] + 5 * c == pytest.approx(left.velocity + 5 * left.sound)
    jump = np.flatnonzero(np.diff(p))[-1]
    shock = (rho[jump] * u[jump] - 4 * -0.2) / (rho[jump] - 4)
    assert speeds[jump] < shock < speeds[jump + 1]

    def flux(rho, u, p):
        moving = u - shock
        enthalpy = 1.09 / 0.09 * p / rho + moving**2 / 2
        return [rho * moving, rho * moving**2 + p, enthalpy]

    assert flux(rho[jump], u[jump], p[jump]) == pytest.approx(flux(4.0, -0.2, 1.0))


def test_sod_converges_to_the_exact_solution(euler, riemann):
    coarse, fine = (density_error(euler, riemann, *sod(riemann), n, 0.2) for n in (75, 300))
    order = torch.log2(coarse / fine) / 2
    assert (fine < torch.tensor([0.002, 0.004, 0.002])).all()
    assert (order > 0.7).all()
    assert (order < 1.2).all()


def test_two_gases_converge_to_the_exact_solution(euler, riemann):
    left, right = riemann.Gas(1.0, 0.0, 3.0, 1.4), riemann.Gas(5.0, 0.0, 1.0, 1.09)
    coarse, fine = (density_error(euler, riemann, left, right, n, 0.2) for n in (75, 300))
    order = torch.log2(coarse / fine) / 2
    print(coarse, fine, order)
    assert (order > 0.6).all()
    assert (order < 1.2).all()


def box(n, seed=0, batch=2):
    """A random state of two mixed gases on a periodic square, with shocks to come."""
    generator = torch.Generator().manual_seed(seed)

    def random(low, high):
        field = torch.rand(batch, n, n, generator=generator, dtype=torch.float64)
        return low + (high - low) * field

    z = random(0, 1)
    return (1 - z) * random(1, 2), z * random(4, 6), random(-1, 1), random(-1, 1), random(1, 3), z


def test_mass_of_each_gas_momentum_and_energy_are_conserved(euler):
    solver = euler.Euler((1.4, 1.09), 1 / 24, ghosts_x=euler.periodic)
    start = solver.conserved(box(24))
    state = start
    for _ in range(50):
        state = solver.step(state, 0.004)
    for before, after in zip(start[:5], state[:5], strict=True):
        scale = before.abs().sum(dim=(1, 2))
        change = (after - before).sum(dim=(1, 2)) / scale
        assert_close(change, torch.zeros_like(change), atol=1e-13, rtol=0)
    assert (state[4] - start[4]).abs().max() > 0.1


def test_an_interface_that_only_moves_keeps_pressure_and_velocity_constant(euler):
    """A round drop of the heavy gas, carried diagonally once through a quarter of a periodic square."""
    n = 32
    x, y = centres(n), centres(n)[:, None]
    inside = ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.09).double()[None]
    one = torch.ones_like(inside)
    solver = euler.Euler((1.4, 1.09), 1 / n, ghosts_x=euler.periodic)
    start = (1 - inside, 5 * inside, 0.7 * one, -0.4 * one, one, inside)
    m1, m2, u, v, p, z = solver.primitive(advance(solver, start, 0.25))
    for field, value in [(u, 0.7), (v, -0.4), (p, 1.0)]:
        assert_close(field, value * one, atol=1e-12, rtol=0)
    assert_close(m1, 1 - z, atol=1e-12, rtol=0)
    assert_close(m2, 5 * z, atol=1e-12, rtol=0)
    assert (z - inside).abs().max() > 0.5


def test_a_mirrored_start_has_a_mirrored_future(euler):
    solver = euler.Euler((1.4, 1.09), 1 / 24)
    m1, m2, u, v, p, z = box(24)

    def after(*primitive):
        state = solver.conserved(primitive)
        for _ in range(30):
            state = solver.step(state, 0.004)
        return solver.primitive(state)

    state = after(m1, m2, u, v, p, z)
    upside_down = after(*(w.flip(1) for w in (m1, m2, u, -v, p, z)))
    reversed_ = after(*(w.flip(2) for w in (m1, m2, -u, v, p, z)))
    for i, (a, b, c) in enumerate(zip(state, upside_down, reversed_, strict=True)):
        assert_close(a, (-1) ** (i == 3) * b.flip(1), atol=1e-11, rtol=1e-11)
        assert_close(a, (-1) ** (i == 2) * c.flip(2), atol=1e-11, rtol=1e-11)


def test_x_and_y_are_alike(euler):
    solver = euler.Euler((1.4, 1.09), 1 / 24, ghosts_x=euler.periodic)
    m1, m2, u, v, p, z = box(24)
    state = solver.step(solver.conserved((m1, m2, u, v, p, z)), 0.004)
    turned = (m1.mT, m2.mT, v.mT, u.mT, p.mT, z.mT)
    other = solver.step(solver.conserved(turned), 0.004)
    for a, b in zip(state, (other[i] for i in (0, 1, 3, 2, 4, 5)), strict=True):
        assert_close(a, b.mT, atol=1e-13, rtol=1e-13)


def test_smooth_waves_converge_with_second_order(euler):
    """Density and volume fraction carried once round; the limiter flattens their extrema, so the mean error counts."""

    def error(n):
        x = centres(n).expand(1, 4, n)
        wave, one = 0.5 + 0.25 * torch.sin(2 * math.pi * x), torch.ones_like(x)
        solver = euler.Euler((1.4, 1.09), 1 / n, ghosts_x=euler.periodic)
        start = (1 - wave, 5 * wave, one, 0 * one, one, wave)
        return float((advance(solver, start, 1.0)[5] - wave).abs().mean())

    order = math.log2(error(32) / error(64))
    assert 1.8 < order < 2.7


def test_a_small_mode_grows_as_richtmyer_says(data, riemann):
    """da/dt = k dV A a: jump of the interface's velocity, and Atwood number and amplitude behind the shock."""
    tube = data.Tube(shape=(48, 96), shock=0.9)
    amplitude, k = 0.01, 2 * math.pi
    fraction = tube.fraction(lambda y: amplitude * np.cos(k * y))[None]
    state = tube.start(fraction, "cpu", torch.float64)
    mode = torch.cos(k * centres(48)) * 2 / 48

    def measured(state):
        return -float(mode @ state[5][0].sum(dim=1)) * tube.spacing

    amplitudes = [measured(state)]
    for _ in range(3):
        for _ in range(tube.steps_between_snapshots):
            state = tube.solver.step(state, tube.time_step)
        amplitudes.append(measured(state))
    print(amplitudes)
    assert amplitudes[0] == pytest.approx(amplitude, rel=1e-3)
    rate = 0

    shocked, air, heavy = tube.gases
    pressure, _ = riemann.contact(shocked, heavy)
    jump = -heavy.velocity
    light, dense = shocked.density_at(pressure), heavy.density_at(pressure)
    compressed = amplitude * (1 - jump / (tube.mach * air.sound))
    richtmyer = k * jump * (dense - light) / (dense + light) * compressed
    print(richtmyer, np.diff(amplitudes) / (tube.duration / 12))
    assert rate == pytest.approx(richtmyer, rel=0.2)
