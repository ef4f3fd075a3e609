"""Eight more problems that were written apart from the design of the default, and frozen before any bound was computed on them.

Two are noisy, two have a jump or a singularity, and two have kinks.
"""

import numpy as np
from scipy.special import lambertw

from benchmarks.solvers import runge_kutta
from benchmarks.suite import recipes
from benchmarks.suite.problems import Drawn, OnBox, Problem

# Functions on a box, trained on a part of it.


def magnetisation(coupling, anisotropy):
    """Spontaneous magnetisation of the square Ising model (Onsager, Yang); it is singular at the critical coupling."""
    product = np.sinh(2 * coupling) * np.sinh(2 * anisotropy * coupling)
    return np.clip(1 - product**-2.0, 0, None) ** 0.125


def pipe(velocity, diameter, viscosity, roughness):
    """Logarithm of the friction loss in a pipe, which jumps where the flow becomes turbulent (Swamee and Jain 1976).

    The velocity is in m/s, the diameter in m, the roughness in mm, and the viscosity is the decimal logarithm of m2/s.
    """
    reynolds = velocity * diameter / 10**viscosity
    rough = 1e-3 * roughness / (3.7 * diameter)
    turbulent = 0.25 / np.log10(rough + 5.74 / reynolds**0.9) ** 2
    friction = np.where(reynolds < 2300, 64 / reynolds, turbulent)
    return np.log10(friction * velocity**2 / (2 * 9.81 * diameter))


def nozzle(upstream, downstream, temperature, diameter):
    """Flow of air through a nozzle in g/s, choked below a critical ratio of the pressures (de Saint-Venant); bar, K and mm."""
    gamma, gas = 1.4, 287.0
    critical = (2 / (gamma + 1)) ** (gamma / (gamma - 1))
    ratio = np.clip(downstream / upstream, critical, 1)
    expansion = ratio ** (2 / gamma) - ratio ** ((gamma + 1) / gamma)
    area = np.pi / 4 * (1e-3 * diameter) ** 2
    speed = np.sqrt(2 * gamma / (gamma - 1) / (gas * temperature) * expansion)
    return 1e3 * area * 1e5 * upstream * speed


def solar_cell(light, celsius, series, ideality):
    """Current of a solar cell at 16 voltages, by the model of one diode and Lambert's function; full suns, Celsius, ohm."""
    voltage = np.linspace(0, 0.75, 16)
    columns = light, celsius, series, ideality
    light, celsius, series, ideality = (column[:, None] for column in columns)
    kelvin = celsius + 273.15
    thermal = ideality * 8.617e-5 * kelvin
    generated = 3.5 * light * (1 + 5e-4 * (celsius - 25))
    gap = 1.12 / 8.617e-5 * (1 / 298.15 - 1 / kelvin)
    saturation = 1e-6 * (kelvin / 298.15) ** 3 * np.exp(gap / ideality)
    exponent = (voltage + series * (generated + saturation)) / thermal
    inside = series * saturation / thermal * np.exp(exponent)
    return generated + saturation - thermal / series * lambertw(inside).real


def melting(ice, ice_celsius, water, water_celsius, heat):
    """Final temperature of ice, water (kg) and supplied heat (kJ) in an insulated vessel; it stays at 0 while ice melts."""
    total = ice + water
    # Enthalpy in kJ relative to water at 0 degrees.
    enthalpy = ice * (2.1 * ice_celsius - 334) + 4.18 * water * water_celsius + heat
    frozen = (enthalpy + 334 * total) / (2.1 * total)
    liquid = enthalpy / (4.18 * total)
    return np.minimum(frozen, 0) + np.maximum(liquid, 0)


# Populations of inputs.


def drug(rng, n, spread):
    """Concentration of a swallowed drug in the blood at eight times, with two compartments and 10 % noise of each value."""
    median = np.array([100.0, 1.2, 0.25, 0.5, 0.3, 20.0])
    x = median * np.exp(0.25 * spread * rng.standard_normal((n, 6)))
    dose, absorbed, eliminated, out, back, volume = x.T

    def slope(state):
        gut, blood, tissue = state
        exchange, into = out * blood - back * tissue, absorbed * gut
        return np.stack([-into, into - eliminated * blood - exchange, exchange])

    state, curve = np.stack([dose, 0 * dose, 0 * dose]), []
    for _ in range(8):
        state = runge_kutta(slope, state, 0.05, 20)
        curve.append(state[1] / volume)
    exact = np.stack(curve, axis=1)
    return x, exact * (1 + 0.1 * rng.standard_normal(exact.shape))


def double_pendulum(rng, n, least, most):
    """Angles and angular velocities of a double pendulum after 0.4 s; arms of 1 m with equal masses."""
    unit = rng.uniform(-most, most, (40 * n, 4))
    start = (np.array([0.9, 0.9, 1.5, 1.5]) * unit[abs(unit).max(axis=1) > least])[:n]

    def slope(state):
        a, b, va, vb = np.moveaxis(state, -1, 0)
        gravity, sine, cosine = 9.81, np.sin(a - b), np.cos(a - b)
        below = 3 - np.cos(2 * (a - b))
        pulled = -3 * gravity * np.sin(a) - gravity * np.sin(a - 2 * b)
        turn_a = (pulled - 2 * sine * (vb**2 + va**2 * cosine)) / below
        turn_b = 2 * sine * (2 * va**2 + 2 * gravity * np.cos(a) + vb**2 * cosine) / below
        return np.stack([va, vb, turn_a, turn_b], axis=-1)

    return start, runge_kutta(slope, start, 0.01, 40)


def ladder(rng, n, spread):
    """Gain in decibels of a low-pass ladder of five resistors and five capacitors at eight frequencies."""
    frequency = 2j * np.pi * np.logspace(1.5, 4, 8)
    x = np.exp(0.2 * spread * rng.standard_normal((n, 10)))
    resistance, capacity = 1e3 * x[:, :5], 1e-7 * x[:, 5:]
    # Voltage and current at the open end are 1 and 0; going back, each stage adds a capacitor and a resistor.
    voltage = np.ones((n, 8), dtype=complex)
    current = np.zeros_like(voltage)
    for stage in reversed(range(5)):
        current = current + frequency * capacity[:, [stage]] * voltage
        voltage = voltage + resistance[:, [stage]] * current
    return x, -20 * np.log10(abs(voltage))


# The problems.

_ISING = OnBox(magnetisation, (0.2, 0.4), (0.9, 1.6), part=(0.15, 0.75))
_PIPE = OnBox(pipe, (0.1, 0.01, -6.5, 0), (2, 0.1, -3.5, 1), part=(0.2, 0.8))
_NOZZLE = OnBox(nozzle, (2, 0.5, 250, 2), (10, 8, 450, 10), part=(0.2, 0.7), noise=0.05)
_SOLAR = OnBox(solar_cell, (0.1, -10, 0.005, 1), (1.2, 80, 0.06, 2), part=(0.25, 0.75))
_MELTING = OnBox(melting, (0.1, -40, 0.1, 0, 0), (2, 0, 2, 60, 400), part=(0.2, 0.8))
_DRUG = Drawn(drug, (1.0,), (1.5,), (2.2,), stream=31)
_PENDULUM = Drawn(double_pendulum, (0, 1), (1, 1.3), (1.3, 2.2), stream=32)
_LADDER = Drawn(ladder, (1.0,), (1.5,), (2.5,), stream=33)

_LISTED = (
    Problem("ising", _ISING, recipes.nearest_neighbours, 300),
    Problem("pipe", _PIPE, recipes.network, 600),
    Problem("nozzle-noisy", _NOZZLE, recipes.noisy_process, 150),
    Problem("solar-cell", _SOLAR, recipes.random_forest, 400),
    Problem("melting", _MELTING, recipes.boosted_trees, 400),
    Problem("drug-noisy", _DRUG, recipes.network, 500),
    Problem("double-pendulum", _PENDULUM, recipes.network, 800),
    Problem("ladder", _LADDER, recipes.quadratic_ridge, 250),
)

THIRD_FRESH = {problem.name: problem for problem in _LISTED}
