"""The exact solution of the Riemann problem between two ideal gases of different gamma (Toro 2009, chapter 4)."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq


@dataclass(frozen=True)
class Gas:
    """A uniform state of an ideal gas."""

    density: float
    velocity: float
    pressure: float
    gamma: float

    @property
    def sound(self):
        return (self.gamma * self.pressure / self.density) ** 0.5

    def velocity_change(self, pressure):
        """What a wave into this gas adds to its speed to reach a pressure: shock or rarefaction."""
        g, p, c = self.gamma, self.pressure, self.sound
        if pressure > p:
            mass = (self.density * ((g + 1) * pressure + (g - 1) * p) / 2) ** 0.5
            return (pressure - p) / mass
        return 2 * c / (g - 1) * ((pressure / p) ** ((g - 1) / (2 * g)) - 1)

    def density_at(self, pressure):
        """Density behind a wave that reaches a pressure."""
        ratio, g = pressure / self.pressure, self.gamma
        if ratio > 1:
            small = (g - 1) / (g + 1)
            return self.density * (ratio + small) / (small * ratio + 1)
        return self.density * ratio ** (1 / g)

    def behind_shock(self, mach):
        """This gas after a shock of a Mach number has run through it to the right."""
        g = self.gamma
        pressure = self.pressure * (1 + 2 * g / (g + 1) * (mach**2 - 1))
        velocity = self.velocity + self.velocity_change(pressure)
        return Gas(self.density_at(pressure), velocity, pressure, g)


def contact(left, right):
    """Pressure and velocity between the two outer waves."""

    def gap(pressure):
        change = left.velocity_change(pressure) + right.velocity_change(pressure)
        return change + right.velocity - left.velocity

    highest = max(left.pressure, right.pressure)
    while gap(highest) < 0:
        highest *= 2
    pressure = brentq(gap, 1e-12 * highest, highest, xtol=1e-14, rtol=1e-14)
    return pressure, left.velocity - left.velocity_change(pressure)


def solution(left, right, speed):
    """Density, velocity and pressure along x / t = speed, stacked."""
    pressure, velocity = contact(left, right)
    behind = _one_side(left, pressure, velocity, speed)
    mirrored = Gas(right.density, -right.velocity, right.pressure, right.gamma)
    ahead = _one_side(mirrored, pressure, -velocity, -speed)
    ahead = ahead * np.array([1, -1, 1])[:, None]
    return np.where(speed < velocity, behind, ahead)


def _one_side(gas, pressure, velocity, speed):
    """The left of the contact: the gas, its shock or fan, and what lies behind."""
    g, c = gas.gamma, gas.sound
    density = gas.density_at(pressure)
    outer = np.array([gas.density, gas.velocity, gas.pressure])[:, None]
    inner = np.array([density, velocity, pressure])[:, None]
    if pressure > gas.pressure:
        flux = density * velocity - gas.density * gas.velocity
        return np.where(speed < flux / (density - gas.density), outer, inner)
    tail = velocity - (g * pressure / density) ** 0.5
    sound = 2 / (g + 1) * (c + (g - 1) / 2 * (gas.velocity - speed))
    ratio = np.clip(sound / c, 1e-12, None) ** (2 / (g - 1))
    fan = np.array([gas.density * ratio, speed + sound, gas.pressure * ratio**g])
    return np.where(speed < gas.velocity - c, outer, np.where(speed < tail, fan, inner))
