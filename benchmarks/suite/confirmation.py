"""Eight further problems, which were not used for the design of the default.

They have the form of the problems of problems.py. Only the errors of the surrogates were inspected while they were written, not any
bound.
"""

import numpy as np
from scipy.spatial import KDTree

from benchmarks.solvers import runge_kutta
from benchmarks.suite.problems import (
    IN_TIME,
    N_TEST,
    OnBox,
    Problem,
    one_step,
    populations,
    scaled,
    trajectory,
)
from benchmarks.suite.recipes import (
    boosted_trees,
    kernel_ridge,
    network,
    network_of_increments,
    noisy_process,
    quadratic_ridge,
    random_forest,
)

# Functions on a box, trained on a part of it.


def robot_arm(*angles_and_lengths):
    """Reach of an arm of four segments, each turned against the one before (An and Owen 2001)."""
    angle = np.cumsum(angles_and_lengths[:4], axis=0)
    length = np.array(angles_and_lengths[4:])
    return np.hypot((length * np.cos(angle)).sum(axis=0), (length * np.sin(angle)).sum(axis=0))


def cantilever(modulus, sideways, downwards, width, thickness, length=100):
    """Displacement of a beam's tip under two loads (Wu et al. 2001); inches, pounds."""
    load = np.hypot(downwards / thickness**2, sideways / width**2)
    return 4 * length**3 / (modulus * width * thickness) * load


def hartmann(*x):
    """Minus four Gaussian wells in six dimensions (Dixon and Szegö 1978)."""
    depth = np.array([1.0, 1.2, 3.0, 3.2])
    steepness = np.array(
        [
            [10, 3, 17, 3.5, 1.7, 8],
            [0.05, 10, 17, 0.1, 8, 14],
            [3, 3.5, 1.7, 10, 17, 8],
            [17, 8, 0.05, 10, 0.1, 14],
        ]
    )
    centre = np.array(
        [
            [0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886],
            [0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991],
            [0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650],
            [0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381],
        ]
    )
    offset = np.stack(x, axis=-1)[:, None] - centre
    return -np.exp(-(steepness * offset**2).sum(axis=-1)) @ depth


def spilled_pollutant(mass, diffusion, place, time):
    """Concentrations in a channel after two spills, at three places and 16 times (Bliznyuk et al. 2008)."""
    s, t = np.meshgrid([0.5, 1.5, 2.5], np.linspace(3.75, 60, 16), indexing="ij")
    s, t = s.ravel(), t.ravel()
    mass, diffusion, place, time = (column[:, None] for column in (mass, diffusion, place, time))

    def spill(distance, since):
        spread = 4 * diffusion * np.where(since > 0, since, np.inf)
        return mass / np.sqrt(np.pi * spread) * np.exp(-(distance**2) / spread)

    return np.sqrt(4 * np.pi) * (spill(s, t) + spill(s - place, t - time))


# Random inputs instead of a box.


def sulfur(seed, n_train, n_test=N_TEST):
    """Logarithm of the radiative forcing by sulfate aerosols, a product of nine log-normal factors.

    They are transmittance (squared), clear sky, land that does not reflect (squared), backscattering, scattering
    efficiency, its growth with humidity, emissions, yield and lifetime, with the uncertainties of Charlson et al. 1992
    and Tatang et al. 1997. Shifted populations have 1.4 and 2 times the spread, in logarithms.
    """
    rng = np.random.default_rng([seed, 1])
    median = np.array([0.76, 0.39, 0.85, 0.3, 5.0, 1.7, 71.0, 0.5, 5.5])
    uncertainty = np.array([1.2, 1.1, 1.1, 1.3, 1.4, 1.2, 1.15, 1.5, 1.5])
    power = np.array([2, 1, 2, 1, 1, 1, 1, 1, 1])

    def population(n_points, spread):
        x = median * uncertainty ** (spread * rng.standard_normal((n_points, 9)))
        return x, np.log(x) @ power

    return populations(population, n_train, n_test, inside=(1.0,), mild=(1.4,), strong=(2.0,))


# An irregular design.

AREA, GAP = 0.7, 0.03


def surveyed_franke(seed, n_train, n_test=N_TEST):
    """Franke's surface along six straight tracks through an area; "mild" is between them, "strong" outside the area."""
    rng = np.random.default_rng([seed, 1])
    start, end = AREA * rng.uniform(size=(2, 6))

    def tracks(n_points):
        track, way = rng.integers(6, size=n_points), rng.uniform(size=n_points)
        across = start[track] + way * (end - start)[track]
        x = np.stack([AREA * way, across], axis=1)
        return np.where(track[:, None] % 2, x, x[:, ::-1])

    train = tracks(n_train)
    inside = rng.uniform(0, AREA, size=(8 * n_test, 2))
    anywhere = rng.uniform(size=(8 * n_test, 2))
    points = {
        "train": train,
        "interpolation": tracks(n_test),
        "mild": inside[KDTree(train).query(inside)[0] > GAP][:n_test],
        "strong": anywhere[anywhere.max(axis=1) > AREA + GAP][:n_test],
    }

    def franke(a, b):
        a, b = 9 * a, 9 * b
        return (
            0.75 * np.exp(-((a - 2) ** 2 + (b - 2) ** 2) / 4)
            + 0.75 * np.exp(-((a + 1) ** 2) / 49 - (b + 1) / 10)
            + 0.5 * np.exp(-((a - 7) ** 2 + (b - 3) ** 2) / 4)
            - 0.2 * np.exp(-((a - 4) ** 2) - (b - 7) ** 2)
        )

    return scaled({name: (x, franke(*x.T)) for name, x in points.items()})


# A one-step map and a map of fields.


def lorenz63(seed, n_train, n_test=N_TEST):
    """The state after 0.05 time units. Successive states of the data are two such steps apart.

    Shifted states are pushed off the attractor at random, by 0.2 and 0.6 of its standard deviation in each coordinate.
    """
    rng = np.random.default_rng([seed, 1])

    def slope(state):
        x, y, z = np.moveaxis(state, -1, 0)
        return np.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], axis=-1)

    def after(state, n_steps=1):
        return runge_kutta(slope, state, 0.01, 5 * n_steps)

    start = after(np.array([1.0, 1.0, 25.0]) + rng.standard_normal(3), n_steps=400)
    train, test = trajectory(lambda state: after(state, 2), start, n_train, n_test, n_between=50)
    push = rng.standard_normal((2, *test.shape)) * train.std(axis=0)
    states = {"train": train, "interpolation": test}
    states |= {"mild": test + 0.2 * push[0], "strong": test + 0.6 * push[1]}
    return one_step(after, states)


def darcy(seed, n_train, n_test=N_TEST):
    """From a random log-permeability k to the pressure u of -(exp(k) u')' = 1 on the unit interval, zero at its ends.

    The m-th cosine of k weighs (m + 1)^-2 in training, (m + 1)^-1 and 1 in the rougher fields of the shifts.
    """
    rng = np.random.default_rng([seed, 1])
    place = np.linspace(0, 1, 129)
    modes = np.arange(8)

    def fields(n_fields, decay):
        weights = rng.standard_normal((n_fields, 8)) / (modes + 1.0) ** decay
        return 0.5 * weights @ np.cos(np.pi * modes[:, None] * place)

    def integral(values):
        """From 0 up to each place, by the trapezoidal rule."""
        steps = (values[:, 1:] + values[:, :-1]) / (2 * 128)
        return np.pad(np.cumsum(steps, axis=1), ((0, 0), (1, 0)))

    def pressure(k):
        resistance, moment = integral(np.exp(-k)), integral(place * np.exp(-k))
        flux = moment[:, -1:] / resistance[:, -1:]  # at 0; makes u(1) = 0
        return flux * resistance - moment

    def pairs(n_fields, decay):
        k = fields(n_fields, decay)
        return k[:, 2::4], pressure(k)[:, 2::4]

    return populations(pairs, n_train, n_test, inside=(2.0,), mild=(1.0,), strong=(0.0,))


# The problems.

_ROBOT = OnBox(robot_arm, (0,) * 8, (2 * np.pi,) * 4 + (1,) * 4, part=(0.25, 0.75))
_CANTILEVER = OnBox(
    cantilever, (2.5e7, 200, 700, 2, 2), (3.3e7, 800, 1300, 4, 4), part=(0.25, 0.75)
)
_HARTMANN = OnBox(hartmann, (0,) * 6, (1,) * 6, part=(0.2, 0.8), noise=0.1)
_POLLUTANT = OnBox(
    spilled_pollutant, (7, 0.02, 0.01, 30.01), (13, 0.12, 3, 30.295), part=(0.25, 0.75)
)

_LISTED = (
    Problem("robot-arm", _ROBOT, network, 800),
    Problem("sulfur", sulfur, boosted_trees, 800),
    Problem("cantilever-small", _CANTILEVER, quadratic_ridge, 80),
    Problem("hartmann-noisy", _HARTMANN, noisy_process, 500),
    Problem("franke-tracks", surveyed_franke, random_forest, 400),
    Problem("spilled-pollutant", _POLLUTANT, kernel_ridge, 400),
    Problem("lorenz-63", lorenz63, network_of_increments, 500, IN_TIME),
    Problem("darcy", darcy, network, 500),
)

CONFIRMATION = {problem.name: problem for problem in _LISTED}
