"""Time integration of the differential equations that several benchmarks use."""

import numpy as np


def etdrk4(u, *, length, linear, dt, n_steps):
    """Solve u_t = L u - u u_x on a periodic interval by exponential time differencing (Kassam and Trefethen 2005).

    Args:
        u: initial fields, one per row.
        length: length of the interval.
        linear: symbol of L, a function of the wave number.
        dt: time step.
        n_steps: number of steps.
    """
    n_points = u.shape[-1]
    wave = 2 * np.pi * np.fft.rfftfreq(n_points, length / n_points)
    symbol = dt * linear(wave)
    kept = np.arange(len(wave)) < n_points / 3
    advection = -0.5j * wave * kept
    # The formulas of the coefficients cancel near zero, so each is a mean over a circle around the symbol.
    circle = np.exp(1j * np.pi * (np.arange(32) + 0.5) / 32)
    z = symbol[:, None] + circle

    def mean(values):
        return dt * values.mean(axis=1).real

    half = mean((np.exp(z / 2) - 1) / z)
    first = mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    middle = mean((2 + z + np.exp(z) * (z - 2)) / z**3)
    last = mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)
    whole_step, half_step = np.exp(symbol), np.exp(symbol / 2)

    def nonlinear(v):
        return advection * np.fft.rfft(np.fft.irfft(v, n_points) ** 2)

    v = np.fft.rfft(u)
    for _ in range(n_steps):
        n_v = nonlinear(v)
        a = half_step * v + half * n_v
        n_a = nonlinear(a)
        b = half_step * v + half * n_a
        n_b = nonlinear(b)
        c = half_step * a + half * (2 * n_b - n_v)
        v = whole_step * v + first * n_v + 2 * middle * (n_a + n_b)
        v = v + last * nonlinear(c)
    return np.fft.irfft(v, n_points)


def runge_kutta(slope, x, dt, n_steps):
    """States of x' = slope(x) after some steps of the classical Runge-Kutta method of fourth order."""
    for _ in range(n_steps):
        k1 = slope(x)
        k2 = slope(x + dt / 2 * k1)
        k3 = slope(x + dt / 2 * k2)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + slope(x + dt * k3))
    return x


def lorenz63(state, rho=28):
    """The slope of the Lorenz system; rho is a number or one number per state."""
    x, y, z = np.moveaxis(state, -1, 0)
    return np.stack([10 * (y - x), x * (rho - z) - y, x * y - 8 / 3 * z], axis=-1)


def lorenz96(state, forcing=8.0):
    """The slope of variables on a circle."""
    ahead, behind = np.roll(state, -1, axis=-1), np.roll(state, 1, axis=-1)
    return (ahead - np.roll(state, 2, axis=-1)) * behind - state + forcing


def kuramoto_sivashinsky(u, time, n_steps, length=22.0):
    """States of the Kuramoto-Sivashinsky equation some time later."""

    def linear(wave):
        return wave**2 - wave**4

    return etdrk4(u, length=length, linear=linear, dt=time / n_steps, n_steps=n_steps)


def until(holds):
    """Number of steps before the condition first fails."""
    return np.where(holds.all(axis=1), holds.shape[1], (~holds).argmax(axis=1))
