"""Field problems with shifted inputs. The reference solver answers shifted inputs too, so their true errors are known.

The first four problems were used for the design of the region. The other three were not: see benchmarks/looks.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter1d
from scipy.sparse import csc_matrix, diags
from scipy.sparse.linalg import spsolve

from benchmarks.solvers import etdrk4, kuramoto_sivashinsky, lorenz96, runge_kutta


@dataclass(frozen=True)
class Problem:
    """Inputs ``draw(rng, n)`` of the data, shifted inputs, their reference outputs, and the sizes of the surrogate."""

    name: str
    draw: Callable
    shifts: dict[str, Callable]
    solve: Callable
    n_steps: int = 1000
    n_modes: int = 12
    in_time: bool = True  # the output is a later state on a periodic grid
    design: bool = True  # the region was designed with this problem in view


def random_fields(rng, n, grid, smoothness, turning=3.0):
    """Gaussian fields with the spectrum (k^2 + turning^2)^(-smoothness), standard deviation 1 on average, periodic."""
    waves = np.meshgrid(*(np.fft.fftfreq(m, 1 / m) for m in grid), indexing="ij")
    power = (sum(k**2 for k in waves) + turning**2) ** (-smoothness / 2)
    power.flat[0] = 0
    axes = tuple(range(1, 1 + len(grid)))
    white = np.fft.fftn(rng.normal(size=(n, *grid)), axes=axes)
    fields = np.fft.ifftn(white * power, axes=axes).real
    return fields / np.sqrt((power**2).mean())


def scaled(draw, factor):
    return lambda rng, n: factor * draw(rng, n)


def noisy(draw, size):
    """White noise with a fraction of the deviation of the fields."""

    def shifted(rng, n):
        x = draw(rng, n)
        return x + size * x.std() * rng.normal(size=x.shape)

    return shifted


def smoothed(draw, width=1.5):
    return lambda rng, n: gaussian_filter1d(draw(rng, n), width, mode="wrap")


def mirrored(draw):
    return lambda rng, n: draw(rng, n)[..., ::-1].copy()


# Darcy flow -div(exp(x) grad u) = 1 in the unit square, u = 0 on the boundary.
DARCY = 16


def darcy_fields(smoothness=3.5, contrast=0.8, size=DARCY):
    def draw(rng, n):
        # A window of a larger periodic field, which is not periodic itself.
        wide = random_fields(rng, n, (2 * size, 2 * size), smoothness)
        return contrast * wide[:, None, :size, :size]

    return draw


def two_valued(rng, n):
    return 0.8 * np.sign(darcy_fields()(rng, n))


def darcy(x):
    return np.stack([_pressure(np.exp(field[0])) for field in x])[:, None]


def _pressure(a):
    """Finite volumes with harmonic means between cells, and half a cell to the boundary."""
    n = len(a)
    vertical = 2 / (1 / a[1:] + 1 / a[:-1])
    horizontal = 2 / (1 / a[:, 1:] + 1 / a[:, :-1])
    centre = np.zeros_like(a)
    centre[1:] += vertical
    centre[:-1] += vertical
    centre[:, 1:] += horizontal
    centre[:, :-1] += horizontal
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        centre[edge] += 2 * a[edge]
    right = np.zeros_like(a)
    right[:, :-1] = horizontal
    beside, above = -right.ravel()[:-1], -vertical.ravel()
    matrix = diags([centre.ravel(), beside, beside, above, above], [0, 1, -1, n, -n])
    return spsolve(csc_matrix(matrix), np.full(n * n, 1 / n**2)).reshape(n, n)


# Burgers' equation u_t = 0.02 u_xx - u u_x until t = 0.6 on a periodic interval.
LINE = 64


def burgers_fields(smoothness=3.0, amplitude=1.0):
    return lambda rng, n: amplitude * random_fields(rng, n, (LINE,), smoothness)[:, None]


def burgers_steps(rng, n):
    return np.sign(burgers_fields()(rng, n))


def burgers(x, viscosity=0.02):
    return etdrk4(x, length=2 * np.pi, linear=lambda k: -viscosity * k**2, dt=0.005, n_steps=120)


# Kuramoto-Sivashinsky: states on the attractor, one step of 0.5.
def ks(x, time=0.5):
    return kuramoto_sivashinsky(x, time, round(time / 0.05))


def ks_states(rng, n):
    return ks(random_fields(rng, n, (LINE,), 2.0)[:, None], 150.0)


# Lorenz-96 with 40 variables and forcing 8, one step of 0.1.
def l96(x, time=0.1, forcing=8.0):
    return runge_kutta(lambda u: lorenz96(u, forcing), x, 0.025, round(time / 0.025))


def l96_states(forcing=8.0):
    return lambda rng, n: l96(forcing + rng.normal(size=(n, 1, 40)), 15.0, forcing)


def white(rng, n):
    return 2.3 + 3.6 * rng.normal(size=(n, 1, 40))


# Not used for the design. Nonlinear Schroedinger equation i u_t = -u_xx / 2 + |u|^2 u, real and imaginary part, until t = 0.3.
def waves(smoothness=3.0, amplitude=1.0):
    def draw(rng, n):
        parts = [random_fields(rng, n, (LINE,), smoothness) for _ in range(2)]
        return amplitude * np.stack(parts, axis=1)

    return draw


def one_part(rng, n):
    """Waves without an imaginary part."""
    return waves()(rng, n) * np.array([[1.0], [0.0]])


def schroedinger(x, time=0.3, n_steps=60):
    dt, wave = time / n_steps, np.fft.fftfreq(LINE, 1 / LINE)
    free = np.exp(-0.5j * wave**2 * dt)
    u = x[:, 0] + 1j * x[:, 1]
    for _ in range(n_steps):
        u = u * np.exp(-0.5j * dt * abs(u) ** 2)
        u = np.fft.ifft(free * np.fft.fft(u))
        u = u * np.exp(-0.5j * dt * abs(u) ** 2)
    return np.stack([u.real, u.imag], axis=1)


# Not used for the design. Steady transport v . grad c - 0.05 lap c = s in a periodic square, v = (d/dy, -d/dx) of a stream
# function, with decay; inputs are the stream function and the source.
PLANE = 16


def flows(flow=3.0, source=3.0, speed=0.3):
    def draw(rng, n):
        stream = speed * random_fields(rng, n, (PLANE, PLANE), flow)
        return np.stack([stream, random_fields(rng, n, (PLANE, PLANE), source)], axis=1)

    return draw


def _difference(axis):
    """Central differences on the periodic square, as a matrix."""
    one = np.roll(np.eye(PLANE), 1, axis=1) - np.roll(np.eye(PLANE), -1, axis=1)
    one *= PLANE / (4 * np.pi)
    same = np.eye(PLANE)
    return np.kron(one, same) if axis == 0 else np.kron(same, one)


def transport(x):
    down, right = _difference(0), _difference(1)
    spread = 0.05 * (down @ down + right @ right) - np.eye(PLANE**2)
    solved = []
    for stream, source in x.reshape(len(x), 2, -1):
        carried = (right @ stream)[:, None] * down - (down @ stream)[:, None] * right
        solved.append(np.linalg.solve(carried - spread, source))
    return np.stack(solved).reshape(len(x), 1, PLANE, PLANE)


# Not used for the design. Heat flow u_t = div((1 + u^2) grad u) in a periodic cube, until t = 0.02.
CUBE = 8


def heat_fields(smoothness=4.0, amplitude=1.0):
    return lambda rng, n: amplitude * random_fields(rng, n, (CUBE, CUBE, CUBE), smoothness)[:, None]


def blob(rng, n):
    """One hot place on a field that is too weak."""
    x = 0.3 * heat_fields()(rng, n)
    x[:, :, 4:6, 4:6, 4:6] += 3.0
    return x


def heat(x, time=0.02, n_steps=80):
    size = (2 * np.pi / CUBE) ** 2
    for _ in range(n_steps):
        change = np.zeros_like(x)
        for axis in (2, 3, 4):
            ahead = np.roll(x, -1, axis)
            flow = (1 + (x**2 + ahead**2) / 2) * (ahead - x)
            change += flow - np.roll(flow, 1, axis)
        x = x + time / n_steps * change / size
    return x


def shifts(make, sizes, **more):
    """Shifted inputs by name: the arguments of ``make``, and functions; underscores of names stand for spaces."""
    made = {name: make(*of) for name, of in sizes.items()}
    return made | {name.replace("_", " "): draw for name, draw in more.items()}


def multiples(draw, *factors):
    return {f"x {factor:g}": scaled(draw, factor) for factor in factors}


# fmt: off
_WAVES = {"rougher": (2.0,), "smoother": (4.0,), "amplitude x 1.4": (3.0, 1.4), "amplitude x 0.6": (3.0, 0.6)}
_FLOWS = {"rougher flow": (2.0,), "rougher source": (3.0, 2.0), "smoother": (4.0, 4.0),
          "flow x 2": (3.0, 3.0, 0.6), "flow x 0.5": (3.0, 3.0, 0.15)}
_HEAT = {"rougher": (2.5,), "smoother": (6.0,), "amplitude x 1.5": (4.0, 1.5), "amplitude x 0.5": (4.0, 0.5)}
_DARCY = {"rougher": (2.0,), "smoother": (5.0,)}
_BURGERS = {"rougher": (1.8,), "smoother": (4.5,), "amplitude x 1.5": (3.0, 1.5), "amplitude x 0.6": (3.0, 0.6)}
# fmt: on
_CONTRASTS = {f"contrast x {f:g}": scaled(darcy_fields(), f) for f in (1.8, 1.3, 0.5)}
_DARCY = shifts(darcy_fields, _DARCY, **_CONTRASTS, two_values=two_valued)
_WAVES = shifts(waves, _WAVES, noisy=noisy(waves(), 0.2), no_imaginary_part=one_part)
_FLOWS = shifts(flows, _FLOWS, noisy=noisy(flows(), 0.2))
_HEAT = shifts(heat_fields, _HEAT, noisy=noisy(heat_fields(), 0.3), hot_place=blob)
_BURGERS = shifts(burgers_fields, _BURGERS, steps=burgers_steps)
_KS = multiples(ks_states, 1.3, 1.1, 0.7) | {"smoothed": smoothed(ks_states, 3.0)}
_KS |= {"noisy": noisy(ks_states, 0.2), "mirrored": mirrored(ks_states)}
_L96 = multiples(l96_states(), 1.3, 0.7) | {"smoothed": smoothed(l96_states(), 1.0)}
_L96 |= {"noisy": noisy(l96_states(), 0.3), "white noise": white, "forcing 12": l96_states(12.0)}
_L96["mirrored"] = mirrored(l96_states())
_NEW, _STEADY = {"design": False}, {"n_modes": 4, "in_time": False}
FRESH = (
    Problem("Schroedinger", waves(), _WAVES, schroedinger, **_NEW),
    Problem("Transport", flows(), _FLOWS, transport, 400, **_STEADY, **_NEW),
    Problem("Heat in a cube", heat_fields(), _HEAT, heat, 100, 2, **_NEW),
)
_DARCY["noisy"], _BURGERS["noisy"] = noisy(darcy_fields(), 0.2), noisy(burgers_fields(), 0.2)
DESIGN = (
    Problem("Darcy", darcy_fields(), _DARCY, darcy, 250, **_STEADY),
    Problem("Burgers", burgers_fields(), _BURGERS, burgers),
    Problem("Kuramoto-Sivashinsky", ks_states, _KS, ks),
    Problem("Lorenz-96", l96_states(), _L96, l96),
)

PROBLEMS = {problem.name: problem for problem in DESIGN + FRESH}
