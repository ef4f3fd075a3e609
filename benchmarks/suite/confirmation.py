"""Eight further problems, which were not used for the design of the default.

Only the errors of the surrogates were inspected while they were written, not any bound.
"""

import numpy as np
from scipy.spatial import KDTree

from benchmarks import solvers
from benchmarks.suite import recipes
from benchmarks.suite.problems import IN_TIME, Drawn, OnBox, Problem, one_step, scaled, trajectory

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
    # fmt: off
    steepness = np.array([[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14],
                          [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]])
    centre = np.array([[0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886], [0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991],
                       [0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650], [0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381]])
    # fmt: on
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


def sulfur(rng, n_points, spread):
    """Logarithm of the radiative forcing by sulfate aerosols, a product of nine log-normal factors (Charlson et al. 1992)."""
    # Transmittance, clear sky, dark land, backscattering, scattering, its growth with humidity, emissions, yield, lifetime.
    median = np.array([0.76, 0.39, 0.85, 0.3, 5.0, 1.7, 71.0, 0.5, 5.5])
    uncertainty = np.array([1.2, 1.1, 1.1, 1.3, 1.4, 1.2, 1.15, 1.5, 1.5])
    x = median * uncertainty ** (spread * rng.standard_normal((n_points, 9)))
    return x, np.log(x) @ np.array([2, 1, 2, 1, 1, 1, 1, 1, 1])


# An irregular design.

AREA, GAP = 0.7, 0.03


def surveyed_franke(seed, n_train, n_test=400):
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


def lorenz63(seed, n_train, n_test=400):
    """The state after 0.05 time units; shifted states are pushed off the attractor by 0.2 and 0.6 of its standard deviation."""
    rng = np.random.default_rng([seed, 1])

    def after(state, n_steps=1):
        return solvers.runge_kutta(solvers.lorenz63, state, 0.01, 5 * n_steps)

    start = after(np.array([1.0, 1.0, 25.0]) + rng.standard_normal(3), n_steps=400)
    train, test = trajectory(lambda state: after(state, 2), start, n_train, n_test, n_between=50)
    push = rng.standard_normal((2, *test.shape)) * train.std(axis=0)
    states = {"train": train, "interpolation": test}
    states |= {"mild": test + 0.2 * push[0], "strong": test + 0.6 * push[1]}
    return one_step(after, states)


def darcy(rng, n_fields, decay):
    """From a log-permeability k to the pressure u of -(exp(k) u')' = 1, zero at the ends; fields of the shifts are rougher."""
    place, modes = np.linspace(0, 1, 129), np.arange(8)
    weights = rng.standard_normal((n_fields, 8)) / (modes + 1.0) ** decay
    k = 0.5 * weights @ np.cos(np.pi * modes[:, None] * place)

    def integral(values):
        """From 0 up to each place, by the trapezoidal rule."""
        steps = (values[:, 1:] + values[:, :-1]) / (2 * 128)
        return np.pad(np.cumsum(steps, axis=1), ((0, 0), (1, 0)))

    resistance, moment = integral(np.exp(-k)), integral(place * np.exp(-k))
    flux = moment[:, -1:] / resistance[:, -1:]  # at 0; makes u(1) = 0
    pressure = flux * resistance - moment
    return k[:, 2::4], pressure[:, 2::4]


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
    Problem("robot-arm", _ROBOT, recipes.network, 800),
    Problem("sulfur", Drawn(sulfur, (1.0,), (1.4,), (2.0,)), recipes.boosted_trees, 800),
    Problem("cantilever-small", _CANTILEVER, recipes.quadratic_ridge, 80),
    Problem("hartmann-noisy", _HARTMANN, recipes.noisy_process, 500),
    Problem("franke-tracks", surveyed_franke, recipes.random_forest, 400),
    Problem("spilled-pollutant", _POLLUTANT, recipes.kernel_ridge, 400),
    Problem("lorenz-63", lorenz63, recipes.network_of_increments, 500, IN_TIME),
    Problem("darcy", Drawn(darcy, (2.0,), (1.0,), (0.0,)), recipes.network, 500),
)

CONFIRMATION = {problem.name: problem for problem in _LISTED}
