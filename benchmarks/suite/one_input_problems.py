"""Problems for the safe region: one input leaves its range at a time, and families of data that distance alone misses.

A problem has training pairs and queries with labels:

    "inside"            400 queries distributed as the data
    "far"               200 queries, every input 2.5 to 4 half-widths from the centre
    "input j u"         50 queries, input j at u half-widths on either side, the others inside
    "special NAME"      200 queries in a hole, off a ridge, in a gap, with an unseen category, ...
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.suite.problems import borehole, otl_circuit, piston

WIDTHS = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
N_CELL, N_INSIDE, N_FAR, N_SPECIAL = 50, 400, 200, 200


@dataclass(frozen=True)
class Queries:
    """Inputs of queries, and the label of each."""

    x: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class Problem:
    """A problem of one of the families.

    Attributes:
        family: box, ridge, clusters, hole, log, categories, constant, repeats or field.
        n: number of training pairs.
        sample: maps a generator and a number to inputs with the distribution of the data.
        function: maps inputs to outputs.
        movable: inputs that leave their range one at a time.
        special: other queries by name, each a function of a generator and a number.
        logs: inputs whose half-widths are measured in logarithms.
        noise: standard deviation of the noise, relative to the standard deviation of the outputs.
        repeats: how often each input is observed.
    """

    family: str
    n: int
    sample: Callable
    function: Callable
    movable: tuple[int, ...]
    special: dict[str, Callable]
    logs: tuple[int, ...] = ()
    noise: float = 0.0
    repeats: int = 1

    def data(self, seed):
        """Training inputs and outputs, queries and their outputs; outputs are in units of the training deviation."""
        rng = np.random.default_rng([seed, 7])
        x = self.sample(rng, self.n // self.repeats)
        if self.repeats > 1:
            x = np.repeat(x, self.repeats, axis=0)[rng.permutation(len(x) * self.repeats)]
        queries = self.queries(rng, x)
        y, query_y = self.function(x), self.function(queries.x)
        mean, deviation = y.mean(axis=0), y.std()

        def observe(values):
            return (values - mean) / deviation + self.noise * rng.standard_normal(values.shape)

        return x, observe(y), queries, observe(query_y)

    def queries(self, rng, x):
        parts, labels = [self.sample(rng, N_INSIDE)], ["inside"] * N_INSIDE
        far = self.sample(rng, N_FAR)
        for j in self.movable:
            sign = rng.choice([-1.0, 1.0], N_FAR)
            far[:, j] = self._moved(x[:, j], sign * rng.uniform(2.5, 4, N_FAR), j)
        if self.movable:
            parts.append(far)
            labels += ["far"] * N_FAR
        for j in self.movable:
            for u in WIDTHS:
                cell = self.sample(rng, N_CELL)
                cell[:, j] = self._moved(x[:, j], u * rng.choice([-1.0, 1.0], N_CELL), j)
                parts.append(cell)
                labels += [f"input {j} {u}"] * N_CELL
        for name, make in self.special.items():
            parts.append(make(rng, N_SPECIAL))
            labels += [f"special {name}"] * N_SPECIAL
        return Queries(np.concatenate(parts), np.array(labels))

    def _moved(self, column, u, j):
        """Values u half-widths from the centre of the column's range."""
        values = np.log(column) if j in self.logs else column
        low, high = values.min(), values.max()
        moved = (low + high) / 2 + u * (high - low) / 2
        return np.exp(moved) if j in self.logs else moved


# Boxes [-1, 1]^d.


def cube(d):
    return lambda rng, n: rng.uniform(-1, 1, (n, d))


def box(d, function, n=400, noise=0.0):
    return Problem("box", n, cube(d), function, tuple(range(d)), {}, noise=noise)


def weak_linear(x):
    return (
        4 * x[:, 0]
        + 2 * x[:, 1]
        + x[:, 2]
        + 0.5 * x[:, 3]
        + 0.1 * x[:, 4]
        + 1.5 * x[:, 0] * x[:, 1]
    )


def waves(x):
    return (
        np.sin(np.pi * x[:, 0])
        + 2 * np.sin(np.pi * x[:, 1] / 2) ** 2
        + 0.5 * x[:, 2] ** 4 * np.sin(np.pi * x[:, 0])
    )


def sobol_g(x):
    a = np.array([0, 0.5, 1, 2, 5, 9, 50, 99])
    return np.prod((abs(2 * x) + a) / (1 + a), axis=1)


def product(x):
    return np.exp(x[:, 0]) * np.cos(2 * x[:, 1]) + x[:, 2] * x[:, 3]


def welch(x):
    x = x / 2
    return (
        5 * x[:, 11] / (1 + x[:, 0] + 1.5)
        + 5 * (x[:, 3] - x[:, 19]) ** 2
        + x[:, 4]
        + 40 * x[:, 18] ** 3
        - 5 * x[:, 18]
        + 0.05 * x[:, 1]
        + 0.08 * x[:, 2]
        - 0.03 * x[:, 5]
        + 0.03 * x[:, 6]
        - 0.09 * x[:, 8]
        - 0.01 * x[:, 9]
        - 0.07 * x[:, 10]
        + 0.25 * x[:, 12] ** 2
        - 0.04 * x[:, 13]
        + 0.06 * x[:, 14]
        - 0.01 * x[:, 16]
        - 0.03 * x[:, 17]
    )


def squares(x):
    return (x**2) @ np.array([3, 2, 1, 0.5, 0.1])


def inert_friedman(x):
    a = (x + 1) / 2
    return (
        10 * np.sin(np.pi * a[:, 0] * a[:, 1])
        + 20 * (a[:, 2] - 0.5) ** 2
        + 10 * a[:, 3]
        + 5 * a[:, 4]
    )


def oscillator(x):
    # With 0.2 all six parameters are positive up to four half-widths.
    k, m, c, force, time, start = (1 + 0.2 * x).T
    omega = np.sqrt(k / m)
    return start * np.exp(-0.3 * c * time) * np.cos(2 * omega * time) + force / k


def saturating(x):
    slope = 3.0 / np.arange(1, 13)
    return np.tanh(x @ slope) + 0.3 * np.tanh(2 * x[:, 0] - x[:, 1])


def ripples(x):
    a = np.linspace(1, 0.05, 15)
    return x @ a + np.sin(2 * x) @ a[::-1] * 0.5 + np.cos(3 * x[:, 0] * x[:, 14])


def rational(x):
    return (1 + x[:, 0]) / (1.5 + x[:, 1]) + 0.5 * x[:, 2] / (1.3 + x[:, 3] * x[:, 2])


def physical(function, low, high, widths):
    """The function of a physical box; the cube is its middle, and the box has this many times the width of the cube."""
    low, high = np.array(low, float), np.array(high, float)
    return lambda x: function(*(low + (high - low) * (x + widths) / (2 * widths)).T)


BOXES = {
    "weak-linear": box(6, weak_linear),
    "waves": box(3, waves),
    "sobol-g": box(8, sobol_g, 500),
    "product": box(4, product, 300),
    "welch": box(20, welch, 500),
    "squares": box(5, squares),
    "squares-noisy": box(5, squares, noise=0.1),
    "inert-friedman": box(10, inert_friedman, 500),
    "oscillator": box(6, oscillator, 300),
    "saturating": box(12, saturating, 500),
    "ripples": box(15, ripples, 500),
    "rational": box(4, rational, 150),
    "otl-middle": box(
        6, physical(otl_circuit, (50, 25, 0.5, 1.2, 0.25, 50), (150, 70, 3, 2.5, 1.2, 300), 2), 300
    ),
    # The cube is a quarter of these boxes: queries at four half-widths stay in the domain of their roots and logarithms.
    "piston-middle": box(
        7,
        physical(
            piston,
            (30, 0.005, 0.002, 1000, 9e4, 290, 340),
            (60, 0.02, 0.01, 5000, 11e4, 296, 360),
            4,
        ),
        400,
    ),
    "borehole-middle": box(
        8,
        physical(
            borehole,
            (0.05, 100, 63070, 990, 63.1, 700, 1120, 9855),
            (0.15, 5e4, 115600, 1110, 116, 820, 1680, 12045),
            4,
        ),
        400,
    ),
}


# Families in which a query can be new although it is not far.


def ridge_sample(rng, n):
    x = rng.uniform(-1, 1, (n, 5))
    x[:, 1] = x[:, 0] + 0.05 * rng.standard_normal(n)
    x[:, 3] = -x[:, 2] + 0.5 * x[:, 0] + 0.05 * rng.standard_normal(n)
    return x


def off_ridge(rng, n):
    x = ridge_sample(rng, n)
    x[:, 1] = np.where(
        x[:, 0] > 0, x[:, 0] - rng.uniform(0.5, 1, n), x[:, 0] + rng.uniform(0.5, 1, n)
    )
    return x


def clusters_sample(rng, n):
    side = rng.choice([-1.0, 1.0], (n, 1))
    return side * 1.5 + rng.uniform(-1, 1, (n, 4)) * 0.6


def gap(rng, n):
    return rng.uniform(-0.5, 0.5, (n, 1)) + 0.3 * rng.uniform(-1, 1, (n, 4))


def hole_sample(d, of, radius):
    def sample(rng, n):
        x = rng.uniform(-1, 1, (20 * n, d))
        return x[np.linalg.norm(x[:, :of], axis=1) > radius][:n]

    return sample


def hole_inside(d, of, radius):
    def sample(rng, n):
        x = rng.uniform(-1, 1, (200 * n, d))
        return x[np.linalg.norm(x[:, :of], axis=1) < 0.8 * radius][:n]

    return sample


def bump(x):
    return (
        x[:, 0]
        + np.sin(2 * x[:, 1])
        + 2 * np.exp(-4 * (x[:, :2] ** 2).sum(axis=1))
        + 0.3 * x[:, -1]
    )


def log_sample(rng, n):
    return np.column_stack(
        [10 ** rng.uniform(-4, 4, n), 10 ** rng.uniform(-2, 2, n), rng.uniform(-1, 1, (n, 2))]
    )


def log_function(x):
    a = np.log10(np.maximum(x[:, 0], 1e-12))
    return np.tanh(a) + 0.1 * a**2 + 0.5 * np.log10(np.maximum(x[:, 1], 1e-12)) * x[:, 2] + x[:, 3]


def below(rng, n):
    x = log_sample(rng, n)
    x[:, 0] = 10 ** rng.uniform(-7, -5, n)
    return x


def category_sample(rng, n):
    kind = rng.integers(3, size=n)
    code = rng.choice([0.0, 1.0, 2.0, 4.0], n)
    return np.column_stack([np.eye(3)[kind], code, rng.uniform(-1, 1, (n, 3))])


def category_function(x):
    return (
        x[:, :3] @ np.array([0, 1.5, -1])
        + np.sin(1.3 * x[:, 3])
        + x[:, 4] * (1 + x[:, 0])
        + x[:, 5] ** 2
        + 2 * (x[:, :3].sum(axis=1) - 1)
        + 0.2 * x[:, 6]
    )


def new_category(total):
    def sample(rng, n):
        x = category_sample(rng, n)
        x[:, :3] = 0.0
        if total:
            x[:, :2] = 1.0
        return x

    return sample


def new_code(rng, n):
    x = category_sample(rng, n)
    x[:, 3] = rng.choice([3.0, 5.0, -1.0], n)
    return x


def constant_sample(rng, n):
    return np.column_stack([rng.uniform(-1, 1, (n, 5)), np.full(n, 1.5)])


def constant_function(x):
    return (
        x[:, 0] * x[:, 5] + np.sin(3 * x[:, 1]) + x[:, 2] ** 2 + 0.5 * x[:, 3] + 2 * (x[:, 5] - 1.5)
    )


def changed_constant(rng, n):
    x = constant_sample(rng, n)
    x[:, 5] = 1.5 + rng.choice([-1, 1], n) * rng.uniform(0.05, 1, n)
    return x


PLACE = np.arange(64) / 64


def modes(which, size=1.0):
    def sample(rng, n):
        weight = size * rng.standard_normal((2, n, len(which))) / np.array(which)
        angle = 2 * np.pi * np.array(which)[:, None] * PLACE
        return weight[0] @ np.cos(angle) + weight[1] @ np.sin(angle)

    return sample


def field_function(x):
    smooth = (x + np.roll(x, 1, axis=1) + np.roll(x, -1, axis=1)) / 3
    return np.stack(
        [(smooth**2).mean(axis=1), np.tanh(x[:, 8] + x[:, 30]), x[:, 40] * x[:, 10]], axis=1
    )


def ridge_function(x):
    curved = 2 * (x[:, 0] - x[:, 1]) ** 2
    return x[:, 0] + curved + np.sin(2 * x[:, 2]) + x[:, 3] * x[:, 4]


def ridge_2_function(x):
    return np.exp(x[:, 1]) + 3 * abs(x[:, 2] + x[:, 3]) + x[:, 4]


def clusters_function(x):
    return np.sin(2 * x[:, 0]) + x[:, 1] ** 2 + 0.5 * x[:, 2] + 0.1 * x[:, 3]


def repeats_function(x):
    return squares(np.pad(x, ((0, 0), (0, 1)))) + x[:, 0]


def hole(n, d, of, radius):
    """Points of a cube without a ball in some of its inputs; the special queries are in the ball."""
    special = {"hole": hole_inside(d, of, radius)}
    return Problem("hole", n, hole_sample(d, of, radius), bump, tuple(range(d)), special)


LOW_MODES = (1, 2, 3, 4)
OFF_RIDGE = {"off ridge": off_ridge}
NEW_FIELDS = {
    "new modes": modes((5, 6, 7)),
    "twice": modes(LOW_MODES, 2.0),
    "four times": modes(LOW_MODES, 4.0),
}
NEW_CATEGORIES = {
    "no category": new_category(0),
    "two categories": new_category(2),
    "new code": new_code,
}
FAMILIES = {
    "ridge": Problem("ridge", 300, ridge_sample, ridge_function, (0, 2, 4), OFF_RIDGE),
    "ridge-2": Problem("ridge", 200, ridge_sample, ridge_2_function, tuple(range(5)), OFF_RIDGE),
    "clusters": Problem(
        "clusters", 300, clusters_sample, clusters_function, (0, 1, 2, 3), {"gap": gap}
    ),
    "hole-2": hole(400, 2, 2, 0.5),
    "hole-2-of-4": hole(500, 4, 2, 0.5),
    "hole-3": hole(500, 3, 3, 0.7),
    "log": Problem(
        "log", 400, log_sample, log_function, (0, 1, 2, 3), {"below": below}, logs=(0, 1)
    ),
    "categories": Problem(
        "categories", 400, category_sample, category_function, (4, 5, 6), NEW_CATEGORIES
    ),
    "constant": Problem(
        "constant",
        300,
        constant_sample,
        constant_function,
        (0, 1, 2, 3, 4),
        {"changed": changed_constant},
    ),
    "repeats": Problem(
        "repeats", 500, cube(4), repeats_function, (0, 1, 2, 3), {}, noise=0.1, repeats=5
    ),
    "repeats-60": Problem("repeats", 300, cube(3), waves, (0, 1, 2), {}, noise=0.15, repeats=5),
    "field": Problem("field", 400, modes(LOW_MODES), field_function, (), NEW_FIELDS),
}
ONE_INPUT = BOXES | FAMILIES
