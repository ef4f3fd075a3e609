"""Twelve problems besides the paper's: functions, designs with holes, few or noisy data, one-step maps and fields.

A problem has training pairs, three test sets and a recipe for its surrogate. All arrays are NumPy float64 and are
determined by the seed:

    problem = PROBLEMS["branin"]
    data = problem.data(seed=0)                 # data.x, data.y, data.tests["interpolation" | "mild" | "strong"]
    surrogate = problem.recipe(seed=0)(data.x, data.y)

Inputs keep their physical units. Outputs are centred and divided by the standard deviation of all training outputs together. The
default was designed with these twelve problems.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import solvers
from benchmarks.suite import recipes
from geoq import TemporalFolds

N_TEST = 400


@dataclass(frozen=True)
class Data:
    """Training pairs and test pairs by shift."""

    x: np.ndarray
    y: np.ndarray
    tests: dict[str, tuple[np.ndarray, np.ndarray]]


# Functions on a box, trained on a part of it.


@dataclass(frozen=True)
class OnBox:
    """A function of the columns of the inputs on a box, with training points in a smaller box and queries around it."""

    function: Callable[..., np.ndarray]
    low: tuple[float, ...]
    high: tuple[float, ...]
    part: tuple[float, float]  # the ends of the training box, as fractions of each side
    margin: float = 0.1  # the largest distance of "mild" queries from the training box, likewise
    noise: float = 0.0  # of all outputs, relative to their standard deviation

    def __call__(self, seed, n_train, n_test=N_TEST):
        rng = np.random.default_rng([seed, 1])
        low, high = self.part
        units = {
            "train": low + (high - low) * latin_hypercube(rng, n_train, len(self.low)),
            "interpolation": self._around(rng, n_test, 0.0),
            "mild": self._around(rng, n_test, self.margin, least=0.0),
            "strong": self._around(rng, n_test, 1.0, least=self.margin),
        }
        pairs = {name: self._observed(unit) for name, unit in units.items()}
        return scaled(pairs, noise=self.noise, rng=rng)

    def _around(self, rng, n_points, most, least=-1.0):
        """Uniform points in the training box widened by ``most``, farther than ``least`` from it in some coordinate."""
        low, high = max(self.part[0] - most, 0.0), min(self.part[1] + most, 1.0)
        found = np.empty((0, len(self.low)))
        while len(found) < n_points:
            unit = rng.uniform(low, high, size=(4 * n_points, len(self.low)))
            outside = np.maximum(self.part[0] - unit, unit - self.part[1]).max(axis=1)
            found = np.concatenate([found, unit[outside > least]])
        return found[:n_points]

    def _observed(self, unit):
        low, high = np.array(self.low), np.array(self.high)
        x = low + (high - low) * unit
        return x, self.function(*x.T)


def latin_hypercube(rng, n_points, n_columns):
    """Points of the unit cube with one point in each of ``n_points`` slices along every axis."""
    slices = rng.random((n_points, n_columns)).argsort(axis=0)
    return (slices + rng.random(slices.shape)) / n_points


def scaled(pairs, *, noise=0.0, rng=None):
    """Data with standardised outputs, optionally with noise."""
    x, y = pairs.pop("train")
    mean, deviation = y.mean(), y.std()

    def observe(y):
        exact = (y - mean) / deviation
        return exact + noise * rng.standard_normal(y.shape) if noise else exact

    y = observe(y)
    return Data(x, y, {shift: (points, observe(v)) for shift, (points, v) in pairs.items()})


@dataclass(frozen=True)
class Drawn:
    """Random inputs: ``draw(rng, n, *settings)`` returns inputs and outputs, with the settings of each population."""

    draw: Callable[..., tuple[np.ndarray, np.ndarray]]
    inside: tuple[Any, ...]
    mild: tuple[Any, ...]
    strong: tuple[Any, ...]
    stream: int = 1
    noise: float = 0.0

    def __call__(self, seed, n_train, n_test=N_TEST):
        rng = np.random.default_rng([seed, self.stream])
        given = {"train": self.inside, "interpolation": self.inside}
        given |= {"mild": self.mild, "strong": self.strong}
        sizes = {"train": n_train}
        pairs = {name: self.draw(rng, sizes.get(name, n_test), *of) for name, of in given.items()}
        return scaled(pairs, noise=self.noise, rng=rng)


def branin(a, b):
    squared = (b - 5.1 / (4 * np.pi**2) * a**2 + 5 / np.pi * a - 6) ** 2
    return squared + 10 * (1 - 1 / (8 * np.pi)) * np.cos(a) + 10


def otl_circuit(rb1, rb2, rf, rc1, rc2, beta):
    gain = beta * (rc2 + 9)
    vb1 = 12 * rb2 / (rb1 + rb2)
    return ((vb1 + 0.74) * gain + 11.35 * rf + 0.74 * rf * gain / rc1) / (gain + rf)


def borehole(rw, r, tu, hu, tl, hl, length, kw):
    log = np.log(r / rw)
    resistance = 1 + 2 * length * tu / (log * rw**2 * kw) + tu / tl
    return 2 * np.pi * tu * (hu - hl) / (log * resistance)


def wing_weight(sw, wfw, aspect, sweep, q, taper, thickness, load, wdg, wp):
    cosine = np.cos(np.deg2rad(sweep))
    wing = 0.036 * sw**0.758 * wfw**0.0035 * (aspect / cosine**2) ** 0.6 * q**0.006 * taper**0.04
    return wing * (100 * thickness / cosine) ** -0.3 * (load * wdg) ** 0.49 + sw * wp


def camel(a, b):
    return (4 - 2.1 * a**2 + a**4 / 3) * a**2 + a * b + (4 * b**2 - 4) * b**2


def piston(mass, surface, v0, k, p0, ambient, t0):
    force = p0 * surface + 19.62 * mass - k * v0 / surface
    gas = p0 * v0 / t0 * ambient
    volume = surface / (2 * k) * (np.sqrt(force**2 + 4 * k * gas) - force)
    return 2 * np.pi * np.sqrt(mass / (k + surface**2 * gas / volume**2))


def friedman(a, b, c, d, e):
    return 10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e


def advected_pulse(velocity, diffusivity, width, n_points=32):
    """Exact solution of advection and diffusion of a Gaussian pulse on the unit circle, at time 1."""
    place = np.arange(n_points) / n_points - 0.3
    distance = place - velocity[:, None]
    images = distance[..., None] + np.arange(-3, 4)
    variance = (width**2 + 2 * diffusivity)[:, None]
    pulse = np.exp(-(images**2) / (2 * variance[..., None])).sum(axis=-1)
    return width[:, None] / np.sqrt(variance) * pulse


# Irregular designs.

HOLE = 1.4


def clustered_ishigami(seed, n_train, n_test=N_TEST):
    """Ishigami's function on twelve clusters around a hole; "mild" is inside the hole, "strong" outside the box."""
    rng = np.random.default_rng([seed, 1])
    centres = rng.uniform(-0.8 * np.pi, 0.8 * np.pi, size=(12, 3))

    def clusters(n_points):
        x = centres[rng.integers(len(centres), size=8 * n_points)]
        x = x + 0.6 * rng.standard_normal(x.shape)
        kept = (abs(x).max(axis=1) < np.pi) & (np.linalg.norm(x, axis=1) > HOLE)
        return x[kept][:n_points]

    direction = rng.standard_normal((n_test, 3))
    radius = 0.9 * HOLE * rng.uniform(size=(n_test, 1)) ** (1 / 3)
    around = rng.uniform(-1.4 * np.pi, 1.4 * np.pi, size=(8 * n_test, 3))
    points = {
        "train": clusters(n_train),
        "interpolation": clusters(n_test),
        "mild": radius * direction / np.linalg.norm(direction, axis=1, keepdims=True),
        "strong": around[abs(around).max(axis=1) > 1.1 * np.pi][:n_test],
    }

    def ishigami(a, b, c):
        return np.sin(a) + 7 * np.sin(b) ** 2 + 0.1 * c**4 * np.sin(a)

    return scaled({name: (x, ishigami(*x.T)) for name, x in points.items()})


def ks_step(u, n_steps=1):
    """States of the Kuramoto-Sivashinsky equation some steps later."""
    return solvers.kuramoto_sivashinsky(u, 0.25 * n_steps, n_steps)


def kuramoto_sivashinsky(seed, n_train, n_test=N_TEST):
    """One step; the training states are one time unit apart, and shifted states are states of the attractor times 1.3 and 2."""
    rng = np.random.default_rng([seed, 1])
    place = 2 * np.pi * np.arange(64) / 64
    start = 0
    for mode in range(1, 5):
        start += rng.standard_normal() * np.cos(mode * place + rng.uniform(0, 2 * np.pi))
    state = ks_step(start, n_steps=800)
    train, test = trajectory(partial(ks_step, n_steps=4), state, n_train, n_test, n_between=50)
    states = {"train": train, "interpolation": test, "mild": 1.3 * test, "strong": 2.0 * test}
    return one_step(ks_step, states)


def lorenz96(seed, n_train, n_test=N_TEST):
    """One step of 40 variables with forcing 8; shifted states come from the attractors of forcing 10 and 14."""
    rng = np.random.default_rng([seed, 1])

    def after(x, forcing=8.0, n_steps=1):
        return solvers.runge_kutta(partial(solvers.lorenz96, forcing=forcing), x, 0.05, n_steps)

    def along(forcing, n_first, n_second):
        state = after(forcing + rng.standard_normal(40), forcing, n_steps=400)
        step = partial(after, forcing=forcing, n_steps=4)
        return trajectory(step, state, n_first, n_second, n_between=50)

    train, test = along(8.0, n_train, n_test)
    states = {"train": train, "interpolation": test}
    for shift, forcing in (("mild", 10.0), ("strong", 14.0)):
        states[shift], _ = along(forcing, n_test, 1)
    return one_step(after, states)


def trajectory(step, state, n_first, n_second, *, n_between):
    """Two consecutive parts of one trajectory."""
    states = [state]
    for _ in range(n_first + n_between + n_second - 1):
        states.append(step(states[-1]))
    return np.array(states[:n_first]), np.array(states[-n_second:])


def one_step(step, states):
    """Pairs of states and next states, both standardised by the training states."""
    mean, deviation = states["train"].mean(), states["train"].std()
    pairs = {
        name: ((u - mean) / deviation, (step(u) - mean) / deviation) for name, u in states.items()
    }
    return Data(*pairs.pop("train"), pairs)


def burgers(rng, n_fields, height):
    """From a smooth random field to the later solution of Burgers' equation; shifted fields are 1.5 and 3 times as large."""
    modes, place = np.arange(1, 6), 2 * np.pi * np.arange(128) / 128
    waves = np.cos(modes[:, None] * place), np.sin(modes[:, None] * place)
    weights = rng.standard_normal((2, n_fields, 5)) / modes
    u = 0.5 * height * (weights[0] @ waves[0] + weights[1] @ waves[1])
    how = {"length": 2 * np.pi, "linear": lambda wave: -0.1 * wave**2}
    return u[:, ::4], solvers.etdrk4(u, **how, dt=0.01, n_steps=50)[:, ::4]


# The suite.


@dataclass(frozen=True)
class Problem:
    """A problem by its name; ``make(seed, n_train, n_test)`` gives its data, ``recipe(seed)`` the recipe of its surrogate."""

    name: str
    make: Callable[..., Data]
    recipe: Callable[[int], Any]
    n_train: int
    folds: Any = None  # for data in the order of time; None means the default folds

    def data(self, seed):
        return self.make(seed, self.n_train)


_BRANIN = OnBox(branin, (-5, 0), (10, 15), part=(0.1, 0.65))
# fmt: off
_OTL = OnBox(otl_circuit, (50, 25, 0.5, 1.2, 0.25, 50), (150, 70, 3, 2.5, 1.2, 300), part=(0.25, 0.75))
_BOREHOLE = OnBox(borehole, (0.05, 100, 63070, 990, 63.1, 700, 1120, 9855), (0.15, 50000, 115600, 1110, 116, 820, 1680, 12045),
                  part=(0.2, 0.7))
_WING = OnBox(wing_weight, (150, 220, 6, -10, 16, 0.5, 0.08, 2.5, 1700, 0.025), (200, 300, 10, 10, 45, 1, 0.18, 6, 2500, 0.08),
              part=(0.3, 0.8))
_CAMEL = OnBox(camel, (-2, -1), (2, 1), part=(0.2, 0.75))
_PISTON = OnBox(piston, (30, 0.005, 0.002, 1000, 90000, 290, 340), (60, 0.02, 0.01, 5000, 110000, 296, 360),
                part=(0.25, 0.75), noise=0.1)
# fmt: on
_PULSE = OnBox(advected_pulse, (0, 1e-4, 0.04), (0.6, 5e-3, 0.12), part=(0.25, 0.75))
_FRIEDMAN = OnBox(friedman, (0,) * 5, (1,) * 5, part=(0.0, 0.6))

IN_TIME = TemporalFolds(5, gap=10)
_LISTED = (
    Problem("branin", _BRANIN, recipes.network, 400),
    Problem("otl-circuit", _OTL, recipes.boosted_trees, 600),
    Problem("borehole", _BOREHOLE, recipes.network, 800),
    Problem("wing-weight", _WING, recipes.random_forest, 600),
    Problem("ishigami-clusters", clustered_ishigami, recipes.network, 600),
    Problem("camel-small", _CAMEL, recipes.gaussian_process, 60),
    Problem("piston-noisy", _PISTON, recipes.boosted_trees, 800),
    Problem(
        "kuramoto-sivashinsky", kuramoto_sivashinsky, recipes.network_of_increments, 400, IN_TIME
    ),
    Problem("lorenz-96", lorenz96, recipes.network_of_increments, 500, IN_TIME),
    Problem("advected-pulse", _PULSE, recipes.network, 400),
    Problem("burgers", Drawn(burgers, (1.0,), (1.5,), (3.0,)), recipes.linear_ridge, 400),
    Problem("friedman", _FRIEDMAN, recipes.kernel_ridge, 500),
)

PROBLEMS = {problem.name: problem for problem in _LISTED}
