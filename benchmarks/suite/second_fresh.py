"""Eight further problems that were written apart from the design of the default, and frozen before any bound was computed on them.

Five of them are hard for smooth interpolants: a shock, noise that grows with the output, fringes that are narrower than the spacing
of the data, a material code with a contact, and outputs with a heavy tail.
"""

import numpy as np

from benchmarks.solvers import runge_kutta
from benchmarks.suite import recipes
from benchmarks.suite.problems import Drawn, OnBox, Problem

# Functions on a box, trained on a part of it.


def traffic_shock(behind, ahead, speed, minutes):
    """Density of cars relative to a jam, some minutes after the end of a road block (Lighthill, Whitham and Richards); km/h."""
    place = np.linspace(-1.5, 1.5, 24)
    columns = behind, ahead, speed, minutes / 60
    behind, ahead, speed, hours = (column[:, None] for column in columns)
    along = place / (speed * hours)
    shock = np.where(along < 1 - behind - ahead, behind, ahead)
    fan = np.clip((1 - along) / 2, np.minimum(ahead, behind), behind)
    return np.where(behind < ahead, shock, fan)


def etalon(wavelength, optical_length=11.0, finesse=8.0):
    """Transmitted fraction of light through two parallel mirrors (Airy); micrometres."""
    phase = 2 * np.pi * optical_length / wavelength
    return 1 / (1 + finesse * np.sin(phase) ** 2)


def heat_exchanger(hot, cold, area, fouling, hot_inlet, cold_inlet):
    """Heat duty in kW of an exchanger with one shell pass, by its number of transfer units; kg/s, m2, m2 K/kW and Celsius."""
    capacity = 4.18 * np.minimum(hot, cold)
    ratio = np.minimum(hot, cold) / np.maximum(hot, cold)
    conductance = area / (1 / (1.5 * hot**0.8) + 1 / (1.2 * cold**0.8) + fouling)
    root = np.sqrt(1 + ratio**2)
    decay = np.exp(-conductance / capacity * root)
    effectiveness = 2 / (1 + ratio + root * (1 + decay) / (1 - decay))
    return effectiveness * capacity * (hot_inlet - cold_inlet)


def projectile(speed, elevation, drag, headwind, crosswind):
    """Range, drift and largest height of a projectile with quadratic drag in wind; m, m/s and degrees."""
    wind = np.stack([-headwind, crosswind, np.zeros_like(speed)])
    angle, zero = np.deg2rad(elevation), np.zeros_like(speed)
    gravity = np.array([0, 0, 9.81])[:, None]

    def slope(state):
        in_air = state[3:] - wind
        slowed = -drag * np.linalg.norm(in_air, axis=0) * in_air
        return np.concatenate([state[3:], slowed - gravity])

    velocity = np.stack([speed * np.cos(angle), zero, speed * np.sin(angle)])
    path = [np.concatenate([np.zeros_like(velocity), velocity])]
    while path[-1][2].max() >= 0:
        path.append(runge_kutta(slope, path[-1], 0.05, 1))
    place = np.array(path)[:, :3]
    column = np.arange(len(speed))
    landing = 1 + (place[1:, 2] < 0).argmax(axis=0)
    before, after = place[landing - 1, :, column], place[landing, :, column]
    passed = (before[:, 2] / (before[:, 2] - after[:, 2]))[:, None]
    ground = before + passed * (after - before)
    return np.column_stack([ground[:, :2], place[:, 2].max(axis=0)])


# Populations of inputs.


def radar_speckle(rng, n, angle, moisture, roughness):
    """Radar echo of bare soil, with multiplicative noise; shifted soils are wetter, rougher and seen at steeper angles."""
    x = np.column_stack([rng.uniform(*ends, n) for ends in (angle, moisture, roughness)])
    cosine = np.cos(np.deg2rad(x[:, 0]))
    root = np.sqrt(3 + 20 * x[:, 1] + 80 * x[:, 1] ** 2)
    reflected = ((root - 1) / (root + 1)) ** 2
    echo = reflected * cosine**4 * (1 - np.exp(-0.65 * x[:, 2] ** 1.8))
    return x, echo * rng.gamma(3.0, 1 / 3.0, n)


# Young's modulus in GPa and expansion in 1e-6/K, in an order without meaning.
# Steel, aluminium, tungsten, copper, invar, magnesium, brass and titanium; copper and brass are not in the training data.
MODULUS = np.array([200, 69, 400, 117, 141, 45, 100, 116])
EXPANSION = np.array([12.0, 23.1, 4.5, 16.6, 1.2, 25.2, 19.0, 8.6])
KNOWN_MATERIALS = (0, 1, 2, 4, 5, 7)


def clamped_bar(rng, n, materials, heating, gap, length):
    """Stress in MPa of a heated bar that closes a gap and presses on an elastic wall; K, mm, m, ratio of the stiffnesses."""
    code = rng.choice(materials, n)
    ranges = heating, gap, length, (0.5, 5.0)
    heat, free, long, ratio = (rng.uniform(*ends, n) for ends in ranges)
    strain = np.maximum(1e-6 * EXPANSION[code] * heat - 1e-3 * free / long, 0)
    stress = 1e3 * MODULUS[code] * strain * ratio / (1 + ratio)
    return np.column_stack([code.astype(float), heat, free, long, ratio]), stress


def queue(rng, n, use, most_servers):
    """Mean waiting time in a queue with several servers (Erlang, with the correction of Allen and Cunneen).

    It grows without limit as the servers become fully used; shifted queues use more of the servers' capacity.
    """
    used = rng.uniform(*use, n)
    servers = rng.integers(1, most_servers, n, endpoint=True)
    service = rng.uniform(1.0, 4.0, n)
    varied = rng.uniform(0.2, 2.0, (2, n))
    x = np.column_stack([used * servers / service, service, servers, *varied])
    waiting = erlang_c(used * servers, servers)
    return x, waiting * service / (servers * (1 - used)) * varied.mean(axis=0)


def erlang_c(load, servers):
    """Probability that an arrival has to wait."""
    blocked = np.ones_like(load)
    for n in range(1, servers.max() + 1):
        longer = load * blocked / (n + load * blocked)
        blocked = np.where(n <= servers, longer, blocked)
    used = load / servers
    return blocked / (1 - used + used * blocked)


def enzyme_cascade(rng, n, spread):
    """Active fraction of the third enzyme of a cascade at ten times, with log-normal Michaelis-Menten rates and constants."""
    median = np.repeat([1.0, 0.4, 0.5, 0.4], 3)
    x = median * np.exp(0.3 * spread * rng.standard_normal((n, 12)))
    on, half_on, off, half_off = x.reshape(n, 4, 3).transpose(1, 2, 0)

    def slope(active):
        signal, idle = np.concatenate([np.ones((1, n)), active[:-1]]), 1 - active
        activated = on * signal * idle / (half_on + idle)
        return activated - off * active / (half_off + active)

    active, curve = np.zeros((3, n)), []
    for _ in range(10):
        active = runge_kutta(slope, active, 0.05, 16)
        curve.append(active[2])
    return x, np.stack(curve, axis=1)


# The problems.

_TRAFFIC = OnBox(traffic_shock, (0, 0, 40, 0.4), (1, 1, 120, 2.4), part=(0.2, 0.8))
_ETALON = OnBox(etalon, (0.3,), (2.5,), part=(0.2, 0.8))
_EXCHANGER = OnBox(
    heat_exchanger, (0.5, 0.5, 2, 0, 60, 5), (4, 4, 12, 0.6, 100, 35), part=(0.25, 0.75)
)
_PROJECTILE = OnBox(projectile, (10, 15, 0, -15, -15), (60, 75, 0.02, 15, 15), part=(0.2, 0.7))
# fmt: off
_RADAR = Drawn(radar_speckle, ((30, 65), (0.03, 0.3), (0.2, 1.6)), ((22, 30), (0.25, 0.36), (1.2, 2.0)),
               ((5, 22), (0.36, 0.55), (1.6, 4.0)), stream=21)
_BAR = Drawn(clamped_bar, (KNOWN_MATERIALS, (20, 160), (0.0, 1.5), (0.5, 2.0)), (KNOWN_MATERIALS, (160, 200), (0, 1.8), (1.0, 2.5)),
             (range(len(MODULUS)), (200, 350), (0, 3.0), (1.0, 4.0)), stream=22)
# fmt: on
_QUEUE = Drawn(queue, ((0.3, 0.94), 8), ((0.94, 0.965), 8), ((0.965, 0.99), 12), stream=23)
_CASCADE = Drawn(enzyme_cascade, (1.0,), (1.5,), (2.5,), stream=24)

_LISTED = (
    Problem("traffic-shock", _TRAFFIC, recipes.short_network, 600),
    Problem("radar-speckle", _RADAR, recipes.pruned_forest, 1200),
    Problem("etalon-fringes", _ETALON, recipes.splines, 120),
    Problem("clamped-bar", _BAR, recipes.mixed_ensemble, 700),
    Problem("queue", _QUEUE, recipes.boosted_trees, 1500),
    Problem("heat-exchanger", _EXCHANGER, recipes.relevant_process, 100),
    Problem("projectile", _PROJECTILE, recipes.kernel_ridge, 400),
    Problem("enzyme-cascade", _CASCADE, recipes.nystroem_ridge, 1500),
)

SECOND_FRESH = {problem.name: problem for problem in _LISTED}
