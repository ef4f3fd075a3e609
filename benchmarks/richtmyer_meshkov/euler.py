"""Two gases in the plane: the compressible Euler equations in the five-equation form of Allaire and others (2002).

A state is a tuple of six tensors (batch, y, x), conserved

    z1 rho1, z2 rho2, rho u, rho v, E, z        with  p = (E - rho |u|^2 / 2) / G,  G = (1 - z) / (gamma1 - 1) + z / (gamma2 - 1)

or primitive (u, v and p in the middle), where z = z2 = 1 - z1 is the volume fraction of the second gas. The mass of each
gas, momentum and energy obey conservation laws. z is advected, with the velocity that the masses are transported with,
so that p and u stay constant across an interface that only moves.

Space: MUSCL on the primitive variables with the monotonized central limiter, and the HLLC flux; both directions at once.
Time: Heun's method, the strong-stability-preserving Runge-Kutta method of order two. The time step is a number chosen
beforehand, so that a step never waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Ghosts = Callable[[Tensor, int], Tensor]
Y, X = 1, 2


def outflow(field, axis):
    """Two ghost cells at each end that repeat the last cell: waves leave."""
    n = field.shape[axis]
    first, last = field.narrow(axis, 0, 1), field.narrow(axis, n - 1, 1)
    return torch.cat([first, first, field, last, last], axis)


def periodic(field, axis):
    """Two ghost cells at each end that continue the field from its other end."""
    n = field.shape[axis]
    return torch.cat([field.narrow(axis, n - 2, 2), field, field.narrow(axis, 0, 2)], axis)


@dataclass(frozen=True)
class Euler:
    """The equations on square cells; by default waves leave in x, the tube's direction, and y is periodic."""

    gammas: tuple[float, float]
    spacing: float
    ghosts_x: Ghosts = outflow
    ghosts_y: Ghosts = periodic

    def conserved(self, primitive):
        m1, m2, u, v, _, z = primitive
        rho = m1 + m2
        return m1, m2, rho * u, rho * v, self._energy(primitive), z

    def primitive(self, conserved):
        m1, m2, mu, mv, energy, z = conserved
        rho = m1 + m2
        u, v = mu / rho, mv / rho
        p = (energy - 0.5 * (mu * u + mv * v)) / self._stiffness(z)
        return m1, m2, u, v, p, z

    def step(self, state, dt):
        """The conserved state one time step later."""
        middle = [a + dt * rate for a, rate in zip(state, self._rates(state), strict=True)]
        rates = self._rates(tuple(middle))
        return tuple(
            0.5 * (a + b + dt * rate) for a, b, rate in zip(state, middle, rates, strict=True)
        )

    def courant(self, conserved, dt):
        """Largest Courant number of a state, both directions added; Heun's method wants at most 1."""
        m1, m2, u, v, p, z = self.primitive(conserved)
        speed = abs(u) + abs(v) + 2 * self._sound(m1 + m2, p, z)
        return float(speed.max()) * dt / self.spacing

    def _stiffness(self, z):
        """G = 1 / (gamma - 1) of the mixture."""
        first, second = (1 / (gamma - 1) for gamma in self.gammas)
        return first + z * (second - first)

    def _energy(self, primitive):
        m1, m2, u, v, p, z = primitive
        return p * self._stiffness(z) + 0.5 * (m1 + m2) * (u * u + v * v)

    def _sound(self, rho, p, z):
        return torch.sqrt((1 + 1 / self._stiffness(z)) * p / rho)

    def _rates(self, conserved):
        """Time derivatives of the conserved state."""
        m1, m2, u, v, p, z = self.primitive(conserved)
        x = self._rates_along((m1, m2, u, v, p, z), X, self.ghosts_x)
        y = self._rates_along((m1, m2, v, u, p, z), Y, self.ghosts_y)
        y = (y[0], y[1], y[3], y[2], y[4], y[5])
        return tuple(a + b for a, b in zip(x, y, strict=True))

    def _rates_along(self, w, axis, ghosts):
        """What the fluxes along one axis change; the third of the primitive variables is the velocity along it."""
        n, z = w[0].shape[axis], w[5]
        faces = [sides(ghosts(field, axis), axis) for field in w]
        left, right = zip(*faces, strict=True)
        *flux, velocity = self.flux(left, right)

        def net(face):
            return (face.narrow(axis, 0, n) - face.narrow(axis, 1, n)) / self.spacing

        m1, m2, mu, mv, energy, advected = [net(face) for face in flux]
        return m1, m2, mu, mv, energy, advected - z * net(velocity)

    def flux(self, left, right):
        """HLLC: fluxes of the six variables, and the velocity that transports masses and volume fraction."""
        slow, fast, contact = self.wave_speeds(left, right)
        upwind = contact >= 0
        m1, m2, u, v, p, z = [torch.where(upwind, a, b) for a, b in zip(left, right, strict=True)]
        # A wave that runs with the flow leaves the flux of the state behind it, which is what speed zero gives here.
        wave = torch.where(upwind, slow.clamp(max=0), fast.clamp(min=0))
        rho, energy = m1 + m2, self._energy((m1, m2, u, v, p, z))
        velocity = contact * (wave - u) / (wave - contact)
        pressure = p + rho * (wave - u) * (contact - u)
        work = contact * (wave * pressure - u * p) / (wave - contact)
        return (
            velocity * m1,
            velocity * m2,
            velocity * rho * contact + pressure,
            velocity * rho * v,
            velocity * energy + work,
            velocity * z,
            velocity,
        )

    def wave_speeds(self, left, right):
        """Davis's estimates of the outer waves, and the contact between them."""
        rho_l, u_l, p_l = left[0] + left[1], left[2], left[4]
        rho_r, u_r, p_r = right[0] + right[1], right[2], right[4]
        c_l, c_r = self._sound(rho_l, p_l, left[5]), self._sound(rho_r, p_r, right[5])
        slow = torch.minimum(u_l - c_l, u_r - c_r)
        fast = torch.maximum(u_l + c_l, u_r + c_r)
        mass_l, mass_r = rho_l * (u_l - slow), rho_r * (fast - u_r)
        contact = (p_l - p_r + mass_l * u_l + mass_r * u_r) / (mass_l + mass_r)
        return slow, fast, contact


def sides(field, axis):
    """Values on the left and right of every face, from a field with two ghost cells at each end."""
    n = field.shape[axis]
    difference = field.narrow(axis, 1, n - 1) - field.narrow(axis, 0, n - 1)
    back, ahead = difference.narrow(axis, 0, n - 2), difference.narrow(axis, 1, n - 2)
    half = 0.5 * limited(back, ahead)
    inner = field.narrow(axis, 1, n - 2)
    left, right = inner + half, inner - half
    return left.narrow(axis, 0, n - 3), right.narrow(axis, 1, n - 3)


def limited(back, ahead):
    """The monotonized central slope: zero at extrema, otherwise central but at most twice either difference."""
    steepest = 2 * torch.minimum(abs(back), abs(ahead))
    central = 0.5 * (back + ahead)
    slope = torch.clamp(central, -steepest, steepest)
    return torch.where(back * ahead > 0, slope, torch.zeros_like(slope))
