"""The solvers of the benchmarks against exact solutions and laws; the simulations and the operator that learns them."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import PACKAGE, fresh
from torch.nn import functional
from torch.testing import assert_close

from benchmarks import solvers
from benchmarks.richtmyer_meshkov import data, euler, fourier_operator, operator_training, riemann
from benchmarks.rollouts.data import SMALL, later, load, snapshots

SOD = riemann.Gas(1.0, 0.0, 1.0, 1.4), riemann.Gas(0.125, 0.0, 0.1, 1.4)
TWO_GASES = riemann.Gas(1.0, 0.0, 3.0, 1.4), riemann.Gas(5.0, 0.0, 1.0, 1.09)
GAMMAS = 1.4, 1.09


def centres(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def advance(solver, primitive, duration, n_steps):
    state = solver.conserved(primitive)
    for _ in range(n_steps):
        state = solver.step(state, duration / n_steps)
    return state


def errors(left, right, n, duration=0.2):
    """Mean errors of density, velocity and pressure of two gases that a wall at x = 1/2 kept apart."""
    z = (centres(n).expand(1, 2, n) > 0.5).double()
    names = ("density", "velocity", "pressure")
    rho, u, p = ((1 - z) * getattr(left, name) + z * getattr(right, name) for name in names)
    solver = euler.Euler((left.gamma, right.gamma), 1 / n)
    start = (1 - z) * rho, z * rho, u, torch.zeros_like(u), p, z
    state = advance(solver, start, duration, math.ceil(6 * duration * n))
    m1, m2, u, _, p, _ = solver.primitive(state)
    exact = riemann.solution(left, right, (centres(n).numpy() - 0.5) / duration)
    return (torch.stack([m1 + m2, u, p])[:, 0, 0] - torch.as_tensor(exact)).abs().mean(dim=1)


def box(n=24, seed=0, batch=2):
    """A random state of two mixed gases on a periodic square, with shocks to come."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([(0, 1), (1, 2), (4, 6), (-1, 1), (-1, 1), (1, 3)]).double().T
    field = torch.rand(batch, n, n, 6, generator=generator, dtype=torch.float64)
    z, first, second, u, v, p = (low + (high - low) * field).unbind(-1)
    return (1 - z) * first, z * second, u, v, p, z


# Compressible gases


def test_the_exact_solution_of_sod_is_the_published_one():
    """Toro 2009, chapter 4, test 1."""
    assert riemann.contact(*SOD) == pytest.approx((0.30313, 0.92745), abs=5e-6)
    density = riemann.solution(*SOD, np.array([0.9, 0.95]))[0]
    assert density == pytest.approx([0.42632, 0.26557], abs=5e-6)


@pytest.mark.parametrize(
    ("gases", "most"), [(SOD, (0.003, 0.005, 0.002)), (TWO_GASES, (0.08, 0.005, 0.01))]
)
def test_the_solver_converges_to_the_exact_solution(gases, most):
    """A limited scheme has order one at shocks, less at contacts."""
    coarse, fine = (errors(*gases, n) for n in (50, 200))
    order = torch.log2(coarse / fine) / 2
    assert (fine < torch.tensor(most)).all()
    assert 0.6 < order.min() < order.max() < 1.2


def test_mass_of_each_gas_momentum_and_energy_are_conserved():
    solver = euler.Euler(GAMMAS, 1 / 24, ghosts_x=euler.periodic)
    start, state = solver.conserved(box()), advance(solver, box(), 0.2, 50)
    for before, after in zip(start[:5], state[:5], strict=True):
        change = (after - before).sum(dim=(1, 2)) / before.abs().sum(dim=(1, 2))
        assert change.abs().max() < 1e-13
    assert (state[4] - start[4]).abs().max() > 0.1


def test_an_interface_that_only_moves_keeps_pressure_and_velocity_constant():
    """A round drop of the heavy gas, carried diagonally through a quarter of a periodic square."""
    x, y = centres(32), centres(32)[:, None]
    inside = ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.09).double()[None]
    one = torch.ones_like(inside)
    solver = euler.Euler(GAMMAS, 1 / 32, ghosts_x=euler.periodic)
    start = (1 - inside, 5 * inside, 0.7 * one, -0.4 * one, one, inside)
    m1, m2, u, v, p, z = solver.primitive(advance(solver, start, 0.25, 48))
    for field, expected in ((u, 0.7), (v, -0.4), (p, 1.0), (m1, 1 - z), (m2, 5 * z)):
        assert_close(field, expected * one, atol=1e-12, rtol=0)
    assert (z - inside).abs().max() > 0.5


def test_a_small_mode_grows_as_in_richtmyers_theory_with_stable_steps():
    """da/dt = k dV A a: jump of the interface's velocity, and Atwood number and amplitude behind the shock.

    The rate builds up while the transmitted shock is within a wavelength, so it is measured after that.
    """
    tube = data.Tube(shape=(48, 96), shock=0.9)
    amplitude, k, amplitudes = 0.005, 2 * math.pi, []
    mode = torch.cos(k * centres(48)) * 2 / 48
    state = tube.start([lambda y: amplitude * np.cos(k * y)], "cpu", torch.float64)
    for _ in range(tube.n_snapshots + 1):
        amplitudes.append(-float(mode @ state[5][0].sum(dim=1)) * tube.spacing)
        assert 0.6 < tube.solver.courant(state, tube.time_step) < 1
        for _ in range(tube.steps_between_snapshots):
            state = tube.solver.step(state, tube.time_step)
    assert amplitudes[0] == pytest.approx(amplitude, rel=1e-3)
    rate = (amplitudes[12] - amplitudes[6]) / (tube.duration / 2)
    shocked, air, heavy = tube.gases
    pressure, at_rest = riemann.contact(shocked, heavy)
    assert at_rest == pytest.approx(0, abs=1e-12)
    light, dense, jump = shocked.density_at(pressure), heavy.density_at(pressure), -heavy.velocity
    compressed = amplitude * (1 - jump / (tube.mach * air.sound))
    assert rate == pytest.approx(k * jump * (dense - light) / (dense + light) * compressed, rel=0.2)


# The simulations


def test_simulations_depend_on_the_seed_alone_and_a_file_gives_them_back(tmp_path):
    made, fewer = (data.simulate(n, (16, 32), 3, batch=batch) for n, batch in ((4, 4), (3, 2)))
    assert (made.u0.shape, made.u.shape) == ((4, 16, 32), (4, 12, 16, 32))
    np.testing.assert_array_equal(fewer.fields, made.fields[:3])
    assert data.simulate(3, (16, 32), 4).checksum != fewer.checksum
    made.save(tmp_path / "rmi.npz")
    loaded = data.load(tmp_path / "rmi.npz")
    np.testing.assert_array_equal(loaded.fields, made.fields)
    assert (loaded.seed, loaded.tube) == (3, made.tube)
    loaded.bits[2, 3, 4, 1] ^= 8
    replace(loaded, bits=loaded.bits).save(tmp_path / "other.npz")
    changed, own = (dict(np.load(tmp_path / name)) for name in ("other.npz", "rmi.npz"))
    np.savez_compressed(tmp_path / "rmi.npz", **own | {"bits": changed["bits"]})
    with pytest.raises(ValueError, match=r"rmi\.npz was changed: its bits have checksum"):
        data.load(tmp_path / "rmi.npz")


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "rmi.npz"
    command = [sys.executable, "-m", "benchmarks.richtmyer_meshkov.data", "--small"]
    command += ["--n", "2", "--batch", "1", "--out", str(path)]
    how = {"cwd": PACKAGE.parents[1], "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **how) as first:
        assert first.stdout.readline().startswith("1 of 2")
        first.kill()
    assert not path.exists()
    second = subprocess.run(command, capture_output=True, check=True, **how)
    assert "1 of 2" not in second.stdout
    assert "2 of 2" in second.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["rmi.npz"]
    whole = data.simulate(2, data.SMALL_SHAPE).checksum
    assert data.load(path).checksum == whole
    assert whole in second.stdout


# The operator that learns them

SIZE = (16, 32)
TINY = {"n_times": 2, "width": 8, "modes": (4, 4), "n_blocks": 2, "n_projection": 8}
OPERATOR = partial(fourier_operator.FourierOperator, **TINY, internal=SIZE)


def interfaces(n, size=(15, 30)):
    """Heavy gas to the right of a wavy line that grows with time, at the start and at two later times."""
    phase, amplitude = torch.rand(2, n, 1, 1, generator=torch.Generator().manual_seed(0))
    line = torch.sin(torch.arange(size[0])[:, None] * (2 * torch.pi / size[0]) + 6.3 * phase)
    line = torch.stack([(1 + time) * 3 * amplitude * line for time in range(3)], 1)
    heavy = (torch.arange(size[1]) > size[1] / 2 + line).byte()
    return heavy[:, 0], heavy[:, 1:]


@pytest.mark.parametrize(("size", "modes"), [(SIZE, (4, 6)), ((15, 21), (3, 5)), ((8, 9), (4, 4))])
def test_the_matrix_products_are_the_truncated_fft(size, modes):
    layer = fresh(fourier_operator.SpectralConvolution, 5, modes, size)
    fields = torch.randn(3, *size, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.arange(modes[0]), torch.arange(-modes[0], 0)])
    spectrum, mixed = torch.fft.rfft2(fields, dim=(1, 2)), 0j * torch.fft.rfft2(fields, dim=(1, 2))
    weight = torch.complex(*layer.weight).view(2 * modes[0], modes[1], 5, 5)
    product = torch.einsum("nyxi,yxio->nyxo", spectrum[:, rows, : modes[1]], weight)
    mixed[:, rows, : modes[1]] = product
    expected = torch.fft.irfft2(mixed, s=size, dim=(1, 2)).flatten(0, 1)
    assert_close(layer(fields.flatten(0, 1)), expected, rtol=1e-5, atol=1e-5)


def test_training_learns_how_an_interface_grows_and_a_file_keeps_the_network(tmp_path):
    u0, u = interfaces(24)
    how = {"n_epochs": 20, "batch_size": 4, "learning_rate": 1e-2, "compiled": False}
    training = operator_training.OperatorTraining(make_network=OPERATOR, **how)
    short = operator_training.TrainOperator(replace(training, n_epochs=1), device="cpu")
    trained = operator_training.TrainOperator(training, device="cpu")(u0, u)
    untrained = operator_training.OperatorSurrogate(fresh(OPERATOR))
    before, after = (
        functional.binary_cross_entropy(f(u0), u.float()) for f in (untrained, trained)
    )
    assert after < before / 5
    one, same, other = (short.with_seed(seed)(u0, u)(u0) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    fourier_operator.save(trained.network, tmp_path / "operator.pt")
    loaded = fourier_operator.load(tmp_path / "operator.pt")
    answer = operator_training.OperatorSurrogate(loaded)(u0.numpy())
    np.testing.assert_array_equal(answer, trained(u0).numpy())


# Dynamical systems

# The solution from u(0) = cos(x/16) (1 + sin(x/16)), L = 32 pi, at x = 2 pi, 4 pi, ..., 16 pi: the trajectory published
# with PDE-FIND (Rudy and others 2017, github.com/snagcliffs/PDE-FIND, Datasets/kuramoto_sivishinky.mat).
PUBLISHED = {
    20.0: "0.5951208045 0.8106338555 1.1219484634 0 -1.1219484634 -0.8106338555 -0.5951208045 -0.4131803808",
    100.0: "-2.4463139911 -0.9376915255 -0.5380012177 0 0.5380012177 0.9376915254 2.4463139911 0.9825671699",
}


@pytest.mark.parametrize(("time", "tolerance"), [(20.0, 1e-6), (100.0, 1e-4)])
def test_the_kuramoto_sivashinsky_equation_meets_a_published_trajectory(time, tolerance):
    place = 32 * np.pi * np.arange(1, 257) / 256
    start = np.cos(place / 16) * (1 + np.sin(place / 16))
    state = later(start, time, step=0.02, length=32 * np.pi)
    expected = [float(value) for value in PUBLISHED[time].split()]
    np.testing.assert_allclose(state[15:128:16], expected, rtol=0, atol=tolerance)


def test_snapshots_agree_with_a_refined_step_and_both_time_steps_sample_one_trajectory():
    slow, fast = (snapshots(dt, 0, n) for dt, n in ((0.25, 3), (0.05, 11)))
    np.testing.assert_allclose(slow, fast[::5], rtol=0, atol=1e-9)
    # Over ten units of time, after which chaos has not yet spread the difference.
    coarse, fine = (later(slow[0], 10.0, step=step) for step in (0.05, 0.005))
    assert abs(fine - slow[0]).max() > 1
    np.testing.assert_allclose(coarse, fine, rtol=0, atol=1e-4)


def test_training_states_fill_the_unit_interval_and_tests_come_after():
    known = load(0.25, 1, SMALL)
    assert (known.train.min(), known.train.max()) == (0, 1)
    n_train, first = len(known.train), list(SMALL.initial_states)
    whole = snapshots(0.25, 1, n_train + first[-1] + 3)
    low, high = whole[:n_train].min(), whole[:n_train].max()
    after = (whole[n_train:] - low) / (high - low)
    np.testing.assert_allclose(known.x0, after[first])
    np.testing.assert_allclose(known.truth[0, :2], after[1:3])


def test_lorenz_96_has_its_energy_law_and_lorenz_63_its_fixed_points():
    """The products of Lorenz-96 keep the energy, the rest damps and drives it; steps of Runge and Kutta have order 4."""
    x = np.random.default_rng(0).normal(size=(5, 40))
    power = (x * solvers.lorenz96(x)).sum(axis=1)
    np.testing.assert_allclose(power, (8 * x - x**2).sum(axis=1))
    shifted = solvers.lorenz96(np.roll(x, 7, axis=1))
    np.testing.assert_array_equal(shifted, np.roll(solvers.lorenz96(x), 7, axis=1))
    side = math.sqrt(8 / 3 * 27)
    points = np.array([[0, 0, 0], [side, side, 27], [-side, -side, 27]])
    np.testing.assert_allclose(solvers.lorenz63(points), 0, atol=1e-12)
    exact, *found = (solvers.runge_kutta(solvers.lorenz96, x, 0.4 / n, n) for n in (400, 10, 20))
    one, other = (abs(state - exact).max() for state in found)
    assert 3.5 < math.log2(one / other) < 4.5
