"""The solver against exact solutions and laws; and the data set that it makes."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks.richtmyer_meshkov import data, euler, riemann

ROOT = Path(__file__).parents[1]


def centres(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def advance(solver, primitive, duration, courant=0.5, fastest=3.0):
    n_steps = math.ceil(duration * fastest / courant / solver.spacing)
    state = solver.conserved(primitive)
    for _ in range(n_steps):
        state = solver.step(state, duration / n_steps)
    return state


def errors(left, right, n, duration=0.2):
    """Mean errors of density, velocity and pressure of two gases that a wall at x = 1/2 kept apart."""
    x = centres(n).expand(1, 2, n)
    z = (x > 0.5).double()

    def both(name):
        return (1 - z) * getattr(left, name) + z * getattr(right, name)

    rho, u, p = both("density"), both("velocity"), both("pressure")
    solver = euler.Euler((left.gamma, right.gamma), 1 / n)
    start = (1 - z) * rho, z * rho, u, torch.zeros_like(u), p, z
    m1, m2, u, _, p, _ = solver.primitive(advance(solver, start, duration))
    speed = (centres(n).numpy() - 0.5) / duration
    exact = torch.as_tensor(riemann.solution(left, right, speed))
    return (torch.stack([m1 + m2, u, p])[:, 0, 0] - exact).abs().mean(dim=1)


def sod():
    return riemann.Gas(1.0, 0.0, 1.0, 1.4), riemann.Gas(0.125, 0.0, 0.1, 1.4)


def test_the_exact_solution_of_sod_is_the_published_one():
    """Toro 2009, chapter 4, test 1."""
    pressure, velocity = riemann.contact(*sod())
    assert pressure == pytest.approx(0.30313, abs=5e-6)
    assert velocity == pytest.approx(0.92745, abs=5e-6)
    density = riemann.solution(*sod(), np.array([0.9, 0.95]))[0]
    assert density == pytest.approx([0.42632, 0.26557], abs=5e-6)


def test_exact_waves_obey_the_jump_conditions_and_the_invariants():
    """A shock into the second gas, a fan into the first: mass, momentum and energy flux; entropy and u + 2c/(g-1)."""
    left, right = riemann.Gas(2.0, 0.3, 5.0, 1.4), riemann.Gas(4.0, -0.2, 1.0, 1.09)
    _, velocity = riemann.contact(left, right)
    speeds = np.linspace(-4, 4, 8001)
    rho, u, p = riemann.solution(left, right, speeds)
    fan = (speeds < velocity) & (rho < left.density)
    assert p[fan] / rho[fan] ** 1.4 == pytest.approx(left.pressure / 2**1.4)
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


def orders(left, right):
    """Observed orders of the mean errors of density, velocity and pressure, and the errors on the finer grid."""
    coarse, fine = (errors(left, right, n) for n in (80, 320))
    return torch.log2(coarse / fine) / 2, fine


def test_sod_converges_to_the_exact_solution():
    """A limited scheme has order one at shocks, less at contacts."""
    order, error = orders(*sod())
    assert (error < torch.tensor([0.003, 0.005, 0.002])).all()
    assert (order > 0.7).all()
    assert (order < 1.2).all()


def test_two_gases_converge_to_the_exact_solution():
    left, right = riemann.Gas(1.0, 0.0, 3.0, 1.4), riemann.Gas(5.0, 0.0, 1.0, 1.09)
    order, error = orders(left, right)
    assert (error < torch.tensor([0.07, 0.005, 0.01])).all()
    assert (order > 0.6).all()
    assert (order < 1.2).all()


def box(n, seed=0, batch=2):
    """A random state of two mixed gases on a periodic square, with shocks to come."""
    generator = torch.Generator().manual_seed(seed)

    def random(low, high):
        field = torch.rand(batch, n, n, generator=generator, dtype=torch.float64)
        return low + (high - low) * field

    z = random(0, 1)
    return (
        (1 - z) * random(1, 2),
        z * random(4, 6),
        random(-1, 1),
        random(-1, 1),
        random(1, 3),
        z,
    )


def test_the_flux_is_hllc_as_in_the_textbook():
    """Toro 2009, section 10.4: F, or F + S (U* - U) of the side the contact leaves; some waves are supersonic."""
    solver = euler.Euler((1.4, 1.09), 1.0)
    m1, m2, u, v, p, z = box(24)
    left, right = ((m1[i], m2[i], 4 * u[i], v[i], p[i], z[i]) for i in (0, 1))
    slow, fast, contact = solver.wave_speeds(left, right)

    def one_side(w, wave):
        m1, m2, u, v, p, z = w
        rho, state = m1 + m2, torch.stack(solver.conserved(w))
        flux = u * state + p * torch.stack([0 * u, 0 * u, 1 + 0 * u, 0 * u, u, 0 * u])
        squeezed = (wave - u) / (wave - contact)
        energy = state[4] + (contact - u) * (rho * contact + p / (wave - u))
        star = torch.stack([m1, m2, rho * contact, rho * v, energy, z]) * squeezed
        return flux, flux + wave * (star - state)

    before, behind = one_side(left, slow)
    after, ahead = one_side(right, fast)
    subsonic = torch.where(contact >= 0, behind, ahead)
    expected = torch.where(slow > 0, before, torch.where(fast < 0, after, subsonic))
    found = torch.stack(solver.flux(left, right)[:6])
    assert (slow > 0).any()
    assert (fast < 0).any()
    assert ((slow < 0) & (contact > 0)).any()
    assert ((fast > 0) & (contact < 0)).any()
    assert_close(found, expected)


def test_mass_of_each_gas_momentum_and_energy_are_conserved():
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


def test_an_interface_that_only_moves_keeps_pressure_and_velocity_constant():
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


def test_a_mirrored_start_has_a_mirrored_future():
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


def test_x_and_y_are_alike():
    solver = euler.Euler((1.4, 1.09), 1 / 24, ghosts_x=euler.periodic)
    m1, m2, u, v, p, z = box(24)
    state = solver.step(solver.conserved((m1, m2, u, v, p, z)), 0.004)
    turned = (m1.mT, m2.mT, v.mT, u.mT, p.mT, z.mT)
    other = solver.step(solver.conserved(turned), 0.004)
    for a, b in zip(state, (other[i] for i in (0, 1, 3, 2, 4, 5)), strict=True):
        assert_close(a, b.mT, atol=1e-13, rtol=1e-13)


def test_smooth_waves_converge_with_second_order():
    """Density and volume fraction carried once round; the limiter flattens their extrema, which costs a little."""

    def error(n):
        x = centres(n).expand(1, 2, n)
        wave, one = 0.5 + 0.25 * torch.sin(2 * math.pi * x), torch.ones_like(x)
        solver = euler.Euler((1.4, 1.09), 1 / n, ghosts_x=euler.periodic)
        start = (1 - wave, 5 * wave, one, 0 * one, one, wave)
        return float((advance(solver, start, 1.0)[5] - wave).abs().mean())

    assert 1.6 < math.log2(error(32) / error(64)) < 2.4


def test_a_small_mode_grows_as_in_richtmyers_theory():
    """da/dt = k dV A a: jump of the interface's velocity, and Atwood number and amplitude behind the shock.

    The rate builds up while the transmitted shock is within a wavelength, so it is measured after that.
    """
    tube = data.Tube(shape=(48, 96), shock=0.9)
    amplitude, k = 0.005, 2 * math.pi
    mode = torch.cos(k * centres(48)) * 2 / 48
    state = tube.start([lambda y: amplitude * np.cos(k * y)], "cpu", torch.float64)
    amplitudes = []
    for _ in range(tube.n_snapshots + 1):
        amplitudes.append(-float(mode @ state[5][0].sum(dim=1)) * tube.spacing)
        for _ in range(tube.steps_between_snapshots):
            state = tube.solver.step(state, tube.time_step)
    assert amplitudes[0] == pytest.approx(amplitude, rel=1e-3)
    rate = (amplitudes[12] - amplitudes[6]) / (tube.duration / 2)

    shocked, air, heavy = tube.gases
    pressure, at_rest = riemann.contact(shocked, heavy)
    assert at_rest == pytest.approx(0, abs=1e-12)
    jump = -heavy.velocity
    light, dense = shocked.density_at(pressure), heavy.density_at(pressure)
    compressed = amplitude * (1 - jump / (tube.mach * air.sound))
    richtmyer = k * jump * (dense - light) / (dense + light) * compressed
    assert rate == pytest.approx(richtmyer, rel=0.2)


SHAPE = (16, 32)


@pytest.fixture(scope="module")
def simulations():
    return data.simulate(5, SHAPE, seed=3, batch=5)


def test_the_chosen_time_step_is_stable():
    tube = data.Tube(shape=(32, 64))
    interfaces = [data.interface(0, i) for i in range(8)]
    state = tube.start(interfaces, "cpu", torch.float32)
    for _ in range(tube.n_steps // 20):
        for _ in range(20):
            state = tube.solver.step(state, tube.time_step)
        assert 0.6 < tube.solver.courant(state, tube.time_step) < 1
        assert ((state[5] >= -1e-6) & (state[5] <= 1 + 1e-6)).all()


def test_an_interface_has_the_chosen_size_and_clears_the_shock():
    tube, y = data.Tube(), np.arange(240) / 240
    for index in range(50):
        displacement = data.interface(0, index)(y)
        assert 0.02 <= np.sqrt((displacement**2).mean()) <= 0.05
        assert abs(displacement).max() < tube.interface - tube.shock
        assert displacement.mean() == pytest.approx(0, abs=1e-12)


def test_volume_fractions_are_areas():
    """The interface x = 1 + y / 4 crosses one column of 4 x 8 cells, from its left to its right end."""
    tube = data.Tube(shape=(4, 8))
    (fraction,) = tube.fraction([lambda y: y / 4])
    for row in range(4):
        assert float(fraction[row, 4]) == pytest.approx(1 - (row + 0.5) / 4)
    assert (fraction[:, :4] == 0).all()
    assert (fraction[:, 5:] == 1).all()


def test_the_start_is_the_displaced_interface_and_the_rest_follows(simulations):
    assert simulations.u0.shape == (5, *SHAPE)
    assert simulations.u.shape == (5, 12, *SHAPE)
    assert simulations.u.dtype == np.uint8
    assert set(np.unique(simulations.u)) == {0, 1}
    assert simulations.u0.mean() == pytest.approx(0.5, abs=0.05)
    assert (simulations.u[..., 0] == 0).all()
    assert (simulations.u[..., -1] == 1).all()


def test_the_same_seed_gives_the_same_bits_in_any_number_and_batch(simulations):
    fewer = data.simulate(3, SHAPE, seed=3, batch=2)
    np.testing.assert_array_equal(fewer.u0, simulations.u0[:3])
    np.testing.assert_array_equal(fewer.u, simulations.u[:3])
    assert data.checksum(data.simulate(1, SHAPE, seed=4)) != data.checksum(
        data.simulate(1, SHAPE, seed=3)
    )


def test_a_file_gives_back_what_was_simulated(simulations, tmp_path):
    path = tmp_path / "rmi.npz"
    data.save(path, data.packed(simulations), simulations.seed, simulations.tube)
    loaded = data.load(path)
    np.testing.assert_array_equal(loaded.u0, simulations.u0)
    np.testing.assert_array_equal(loaded.u, simulations.u)
    assert loaded.seed == 3
    assert loaded.tube == simulations.tube
    assert data.checksum(loaded) == str(np.load(path)["checksum"])


def test_a_changed_file_is_refused(simulations, tmp_path):
    path = tmp_path / "rmi.npz"
    data.save(path, data.packed(simulations), simulations.seed, simulations.tube)
    arrays = dict(np.load(path))
    arrays["bits"][2, 3, 4, 1] ^= 8
    np.savez_compressed(path, **arrays)
    with pytest.raises(
        ValueError, match=r"rmi\.npz was changed: its bits have checksum"
    ):
        data.load(path)


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "rmi.npz"
    command = [sys.executable, "-m", "benchmarks.richtmyer_meshkov.data", "--small"]
    command += ["--n", "3", "--batch", "1", "--out", str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline().startswith("1 of 3")
        first.kill()
    assert not path.exists()
    second = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "1 of 3" not in second.stdout
    assert "3 of 3" in second.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["rmi.npz"]
    whole = data.checksum(data.simulate(3, data.SMALL_SHAPE))
    assert data.checksum(data.load(path)) == whole
    assert whole in second.stdout
