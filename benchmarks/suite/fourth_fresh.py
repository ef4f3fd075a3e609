"""Eight more problems, frozen before any bound was computed on them.

They have the layout of problems.py: ``FOURTH_FRESH["rotor"].data(seed)``, ``.recipe(seed)`` and ``.folds``. One has kinks, one
a jump, one a pole, one noise that depends on the place, one an input over two decades, one inputs on a curved surface, one many
inputs of which few matter, and one few data with repeated measurements.
"""

import numpy as np
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.svm import SVR

from benchmarks.solvers import runge_kutta
from benchmarks.suite.problems import N_TEST, OnBox, Problem, scaled
from benchmarks.suite.recipes import Network, Regressor
from geoq import Training

# Recipes.


def rectified_network(seed):
    """A network of scikit-learn with two layers of 50 rectified nodes."""

    def make(state):
        network = MLPRegressor(hidden_layer_sizes=(50, 50), random_state=state)
        return make_pipeline(StandardScaler(), network)

    return Regressor(make, seed)


def field_forest(seed):
    """A random forest with at least five points in each leaf."""

    def make(state):
        return RandomForestRegressor(80, min_samples_leaf=5, random_state=state)

    return Regressor(make, seed)


def rotor_process(seed):
    """A Gaussian process with a length scale for each of four inputs."""
    kernel = ConstantKernel() * RBF(np.ones(4)) + WhiteKernel(1e-3)
    steps = StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True)
    return Regressor(lambda _: clone(make_pipeline(*steps)), seed)


def tolerant_vectors(seed):
    """A support vector machine that ignores residuals below 0.03."""
    steps = StandardScaler(), SVR(C=10.0, epsilon=0.03, gamma=0.15)
    return Regressor(lambda _: clone(make_pipeline(*steps)), seed)


def wide_network(seed):
    """A fully connected network with a layer of 96 nodes before one of 32."""
    training = Training(n_steps=1200, batch_size=50, patience=5)
    return Network((96, 32), training).with_seed(seed)


def shallow_boosting(seed):
    """Boosted trees with at most eight leaves each."""

    def make(state):
        return HistGradientBoostingRegressor(max_leaf_nodes=8, random_state=state)

    return Regressor(make, seed)


def response_surface(seed):
    """All monomials up to the second degree, with a penalty chosen by leaving one out."""
    steps = StandardScaler(), PolynomialFeatures(2), RidgeCV(np.logspace(-3, 3, 13))
    return Regressor(lambda _: clone(make_pipeline(*steps)), seed)


def stiff_kernel_ridge(seed):
    """Kernel ridge regression with a penalty for noisy data."""
    steps = StandardScaler(), KernelRidge(kernel="rbf", alpha=0.1, gamma=0.06)
    return Regressor(lambda _: clone(make_pipeline(*steps)), seed)


# Functions on a box, trained on the part from 0.3 to 0.7 of each side.


def home_battery(panel, capacity, power, base, evening, cloud):
    """Energy bought and sold in kWh on the second of two equal days, by a house with a solar panel and a battery.

    The battery takes every surplus and covers every lack until it is full, empty or at its largest power, which makes
    kinks. Inputs are the peak power of the panel in kW, the capacity of the battery in kWh and its largest power in kW, the
    constant and the additional evening consumption in kW, and the fraction of sunlight that clouds take in the afternoon.
    "mild" houses are up to 0.2 of the training range outside it in at least one input, "strong" ones 0.2 to 0.75.
    """
    stored, bought, sold = (np.zeros_like(panel) for _ in range(3))
    for hour in range(48):
        clock = hour % 24 + 0.5
        sun = max(np.sin(np.pi * (clock - 6) / 12), 0.0) ** 1.3
        solar = panel * sun * (1 - cloud * (clock > 13))
        surplus = solar - base - evening * (17 < clock < 22)
        charged = np.clip(surplus, 0, np.minimum(power, (capacity - stored) / 0.95))
        drained = np.clip(-surplus, 0, np.minimum(power, stored))
        stored = stored + 0.95 * charged - drained
        bought += (hour >= 24) * np.maximum(-surplus - drained, 0)
        sold += (hour >= 24) * np.maximum(surplus - charged, 0)
    return np.stack([bought, sold], axis=1)


def snap_through(load, rise, half_span, stiffness, spring):
    """Displacement of the top of a shallow arch of two bars, in cm, as the load grows slowly; it jumps when the arch snaps.

    Inputs are the final load in kN, the height of the top in cm, its horizontal distance from a support in m, Young's
    modulus times cross section of a bar in MN, and the stiffness of a vertical spring under the top in kN/m. "mild" arches
    are up to 0.2 of the training range outside it in at least one input, "strong" ones 0.2 to 0.75.
    """
    rise, half_span = 0.01 * rise[:, None], half_span[:, None]
    way = rise * np.linspace(0, 6, 1500)
    length, rest = np.hypot(half_span, rise - way), np.hypot(half_span, rise)
    bars = 2e3 * stiffness[:, None] * (1 / length - 1 / rest) * (rise - way)
    force = bars + spring[:, None] * way
    row, after = np.arange(len(load)), (force >= load[:, None]).argmax(axis=1)
    low, high = force[row, after - 1], force[row, after]
    return 100 * rise[:, 0] * 6 / 1499 * (after - (high - load) / (high - low))


def plankton(*parameters):
    """Plants in a lake at five times of a spring, by a model of nutrient, plants, grazers and dead matter.

    Of its twelve parameters, grazing and growth explain most of the variance. "mild" lakes are up to 0.2 of the training
    range outside it in at least one parameter, "strong" ones 0.2 to 0.75.
    """
    growth, half, loss, grazing, half_grazing, use = parameters[:6]
    grazer_loss, decay, sinking, mixing, deep, shade = parameters[6:]

    def slope(state):
        nutrient, plant, grazer, dead = state
        grown = growth * nutrient / (half + nutrient) * plant / (1 + shade * plant)
        eaten = grazing * plant**2 / (half_grazing**2 + plant**2) * grazer
        lost, died = loss * plant, grazer_loss * grazer
        fed = decay * dead + mixing * (deep - nutrient)
        settled = (1 - use) * eaten + lost + died - (decay + sinking) * dead
        plants = grown - eaten - lost - mixing * plant
        return np.stack([fed - grown, plants, use * eaten - died, settled])

    start = np.array([4.0, 0.2, 0.15, 0.1])
    state, curve = np.repeat(start[:, None], len(growth), axis=1), []
    for _ in range(5):
        state = runge_kutta(slope, state, 0.1, 70)
        curve.append(state[1])
    return np.stack(curve, axis=1)


# Populations of inputs.


def shifted(population, n_train, n_test, inside, mild, strong, **training):
    """Scaled data; ``population`` maps a size and the arguments of a region to pairs."""
    pairs = {"train": population(n_train, *inside, **training)}
    regions = {"interpolation": inside, "mild": mild, "strong": strong}
    pairs |= {name: population(n_test, *region) for name, region in regions.items()}
    return scaled(pairs)


def around(rng, n, low, high, most=0.0, least=-1.0):
    """Uniform points in a box widened by ``most`` of its sides, farther than ``least`` from it in some coordinate."""
    low, high = np.array(low), np.array(high)
    unit = rng.uniform(-most, 1 + most, (40 * n, len(low)))
    outside = abs(unit - 0.5).max(axis=1) - 0.5
    return low + (high - low) * unit[outside > least][:n]


def crop_yield(seed, n_train, n_test=N_TEST):
    """Yield of wheat in t/ha, with noise that is about eight times as large on dry sand as on wet loam.

    Inputs are nitrogen in kg/ha, rain in mm, mean temperature, the fraction of sand and the day of sowing. "mild" fields
    are up to 0.15 of the training range outside it in at least one input, "strong" ones 0.15 to 0.5.
    """
    rng = np.random.default_rng([seed, 41])
    low, high = (80, 250, 11, 0.3, 25), (200, 600, 19, 0.7, 65)

    def population(n, *region):
        x = around(rng, n, low, high, *region)
        nitrogen, rain, celsius, sand, day = x.T
        dry = 1 / (1 + np.exp((rain * (1 - 0.5 * sand) - 300) / 45))
        warm = np.exp(-(((celsius - 15) / 6) ** 2) - ((day - 40) / 50) ** 2)
        fed = 1 - np.exp(-0.012 * (nitrogen + 30))
        luck = (0.15 + 1.6 * sand * dry) * rng.standard_normal(n)
        return x, np.maximum(11 * warm * fed * (1 - 0.75 * dry) + luck, 0)

    return shifted(population, n_train, n_test, (), (0.15, 0.0), (0.5, 0.15))


def rotor(seed, n_train, n_test=N_TEST):
    """Whirl of a shaft in micrometres without damping, which grows without limit as the speed approaches the critical speed.

    Inputs are the speed and the critical speed in Hz, the eccentricity of the disc and the bow of the shaft in micrometres;
    the whirl is measured with 2 % noise. Training shafts run at 0.2 to 0.88 of the critical speed, "mild" ones at 0.88 to
    0.93. "strong" ones run at 0.93 to 0.985 of it and are up to 1.6 times as eccentric as any in the training data.
    """
    rng = np.random.default_rng([seed, 42])

    def population(n, least, most, eccentricity=(5, 30)):
        share, critical = rng.uniform(least, most, n), rng.uniform(40, 100, n)
        offset, bow = rng.uniform(*eccentricity, n), rng.uniform(0, 15, n)
        whirl = (offset * share**2 + bow) / (1 - share**2)
        x = np.column_stack([share * critical, critical, offset, bow])
        return x, whirl * (1 + 0.02 * rng.standard_normal(n))

    far = (0.93, 0.985, (30, 48))
    return shifted(population, n_train, n_test, (0.2, 0.88), (0.88, 0.93), far)


def settling(seed, n_train, n_test=N_TEST):
    """Velocity in mm/s of grains that sink in water (Ferguson and Church 2004).

    Inputs are the diameter, log-uniform from 0.03 to 3 mm, the excess density relative to water, the temperature and the
    drag coefficient of large grains. "mild" grains are up to 0.1 of the training range outside it in at least one input,
    "strong" ones 0.1 to 0.4; for the diameter these are fractions of the two decades.
    """
    rng = np.random.default_rng([seed, 43])
    low, high = (np.log10(0.03), 1.0, 12, 0.5), (np.log10(3), 2.2, 28, 1.1)

    def population(n, *region):
        x = around(rng, n, low, high, *region)
        x[:, 0] = 10 ** x[:, 0]
        diameter, excess, celsius, drag = x.T
        viscosity = 1.79e-6 / (1 + 0.0337 * celsius + 0.00022 * celsius**2)
        weight = 9.81 * excess * (1e-3 * diameter) ** 2
        inertia = np.sqrt(0.75 * drag * weight * 1e-3 * diameter)
        return x, 1e3 * weight / (18 * viscosity + inertia)

    return shifted(population, n_train, n_test, (), (0.1, 0.0), (0.4, 0.1))


def engine(seed, n_train, n_test=N_TEST):
    """Nitrogen oxides and soot of a diesel engine relative to their limits, as decimal logarithms with noise of 0.02.

    Inputs are the speed in 1000/min, the fuel per stroke in mg, and four set values: boost pressure in bar, fraction of
    recirculated exhaust, start of injection in degrees and rail pressure in 100 bar. The control unit sets these by speed
    and fuel, with 1 % of scatter, so the data lie close to a curved surface of two dimensions. "mild" set values are moved
    off the surface by 0.05 to 0.15 of their ranges in a random direction; "strong" ones are drawn independently of speed
    and fuel, over their whole ranges.
    """
    rng = np.random.default_rng([seed, 44])
    low, high = np.array([1.2, 0.0, -3.0, 3.5]), np.array([2.5, 0.4, 8.0, 15.5])

    def population(n, move):
        speed, fuel = rng.uniform(1, 3.5, n), rng.uniform(8, 45, n)
        boost = 1.1 + 1.4 * (1 - np.exp(-fuel * speed / 50))
        recirculated = 0.4 * np.exp(-((fuel / 28) ** 2) - (speed - 2) ** 2 / 3)
        start = 3 + 3 * (speed - 2.2) - 4 * np.sin(fuel / 12)
        rail = 4 + 0.2 * fuel + 3 * np.tanh(speed - 2)
        values = move(np.column_stack([boost, recirculated, start, rail]))
        values[:, 1] = np.maximum(values[:, 1], 0)
        boost, recirculated, start, rail = values.T
        fresh = 450 * boost / (1 + 0.04 * (speed - 2) ** 2) * (1 - recirculated)
        excess = fresh / (14.5 * fuel)
        flame = 2.1 + 0.35 / (0.5 + excess) - 1.1 * recirculated + 0.02 * start
        soot = 0.8 * np.exp(-0.8 * (excess - 1)) - 0.06 * rail + 1.6 * recirculated
        y = np.column_stack([3.7 - 8.5 / flame, soot - 0.04 * start - 0.15 * speed])
        x = np.column_stack([speed, fuel, values])
        return x, y + 0.02 * rng.standard_normal(y.shape)

    def scattered(values):
        return values + 0.01 * (high - low) * rng.standard_normal(values.shape)

    def moved(values):
        way = rng.standard_normal(values.shape)
        way /= abs(way).max(axis=1, keepdims=True)
        return values + (high - low) * way * rng.uniform(0.05, 0.15, (len(way), 1))

    moves = [scattered], [moved], [lambda values: rng.uniform(low, high, values.shape)]
    return shifted(population, n_train, n_test, *moves)


def concrete(seed, n_train, n_test=N_TEST):
    """Strength of concrete in MPa: 50 mixes with three cylinders each, whose strengths scatter by 4 % and 1 MPa.

    Inputs are the ratio of water to cement, the age in days, the temperature of curing, the fraction of silica fume and the
    volume of paste. "interpolation" queries are other mixes with one cylinder each; "mild" mixes are up to 0.15 of the
    training range outside it in at least one input, "strong" ones 0.15 to 0.5.
    """
    rng = np.random.default_rng([seed, 45])
    low, high = (0.38, 15, 12, 0.03, 0.26), (0.6, 43, 28, 0.09, 0.34)

    def population(n, *region, n_cylinders=1):
        mixes = around(rng, n, low, high, *region)
        x = mixes[np.arange(n) % -(-n // n_cylinders)]
        ratio, days, celsius, fume, paste = x.T
        age = days * np.exp(0.045 * (celsius - 20))
        final = 140 * 0.1 ** (ratio / (1 + 2 * fume)) * (1 - 30 * (paste - 0.3) ** 2)
        strength = final * np.exp(0.25 * (1 - np.sqrt(28 / age)))
        scatter = rng.standard_normal((2, n))
        return x, strength * (1 + 0.04 * scatter[0]) + scatter[1]

    regions = (), (0.15, 0.0), (0.5, 0.15)
    return shifted(population, n_train, n_test, *regions, n_cylinders=3)


# The problems.


def _on_box(function, low, high):
    return OnBox(function, low, high, part=(0.3, 0.7), margin=0.08)


_BATTERY = _on_box(home_battery, (0, 0, 0, 0, 0, 0), (11, 14, 6, 1.2, 3, 1))
_SNAP = _on_box(snap_through, (0.5, 4, 0.7, 4, 0), (8, 16, 1.4, 16, 25))
_PLANKTON = _on_box(
    plankton,
    (0.3, 0.3, 0.04, 0.1, 0.7, 0.25, 0.03, 0.03, 0.02, 0.01, 3, 0.1),
    (1.1, 0.9, 0.08, 0.9, 1.1, 0.35, 0.07, 0.09, 0.10, 0.03, 7, 0.3),
)

_LISTED = (
    Problem("home-battery", _BATTERY, rectified_network, 500),
    Problem("crop-yield", crop_yield, field_forest, 900),
    Problem("rotor", rotor, rotor_process, 250),
    Problem("settling", settling, tolerant_vectors, 300),
    Problem("engine", engine, wide_network, 600),
    Problem("snap-through", _SNAP, shallow_boosting, 800),
    Problem("plankton", _PLANKTON, response_surface, 400),
    Problem("concrete-repeats", concrete, stiff_kernel_ridge, 150),
)

FOURTH_FRESH = {problem.name: problem for problem in _LISTED}
