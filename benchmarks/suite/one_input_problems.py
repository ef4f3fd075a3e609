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

from benchmarks.suite.problems import PROBLEMS

WIDTHS = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
N_CELL, N_INSIDE, N_FAR, N_SPECIAL = 50, 400, 200, 200


@dataclass(frozen=True)
class Queries:
    """Inputs of queries, and the label of each."""

    x: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class Problem:
    """A problem of one of the families; ``sample(rng, n)`` draws inputs, and ``function`` maps them to outputs."""

    family: str
    n: int
    sample: Callable
    function: Callable
    movable: tuple[int, ...]  # inputs that leave their range one at a time
    special: dict[str, Callable]  # other queries, each like ``sample``
    logs: tuple[int, ...] = ()  # inputs whose half-widths are measured in logarithms
    noise: float = 0.0  # relative to the standard deviation of the outputs
    repeats: int = 1  # how often each input is observed

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
        parts = [("inside", self.sample(rng, N_INSIDE))]
        far = self.sample(rng, N_FAR)
        for j in self.movable:
            sign = rng.choice([-1.0, 1.0], N_FAR)
            far[:, j] = self._moved(x[:, j], sign * rng.uniform(2.5, 4, N_FAR), j)
        parts += [("far", far)] * bool(self.movable)
        for j in self.movable:
            for u in WIDTHS:
                cell = self.sample(rng, N_CELL)
                cell[:, j] = self._moved(x[:, j], u * rng.choice([-1.0, 1.0], N_CELL), j)
                parts.append((f"input {j} {u}", cell))
        parts += [(f"special {name}", of(rng, N_SPECIAL)) for name, of in self.special.items()]
        labels = np.repeat([label for label, _ in parts], [len(points) for _, points in parts])
        return Queries(np.concatenate([points for _, points in parts]), labels)

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


def physical(name, d, n, widths):
    """A physical function of the suite; the cube is the middle of its box, which has this many times the width of the cube."""
    of = PROBLEMS[name].make
    low, high = np.array(of.low, float), np.array(of.high, float)
    return box(d, lambda x: of.function(*(low + (high - low) * (x + widths) / (2 * widths)).T), n)


def weak_linear(x):
    return x[:, :5] @ np.array([4, 2, 1, 0.5, 0.1]) + 1.5 * x[:, 0] * x[:, 1]


def waves(x):
    a, b, c = x.T
    return np.sin(np.pi * a) + 2 * np.sin(np.pi * b / 2) ** 2 + 0.5 * c**4 * np.sin(np.pi * a)


def sobol_g(x):
    a = np.array([0, 0.5, 1, 2, 5, 9, 50, 99])
    return np.prod((abs(2 * x) + a) / (1 + a), axis=1)


def product(x):
    return np.exp(x[:, 0]) * np.cos(2 * x[:, 1]) + x[:, 2] * x[:, 3]


# The linear terms of Welch's function, by input.
_WELCH = {1: 0.05, 2: 0.08, 4: 1, 5: -0.03, 6: 0.03, 8: -0.09, 9: -0.01, 10: -0.07, 13: -0.04}
_WELCH |= {14: 0.06, 16: -0.01, 17: -0.03, 18: -5}


def welch(x):
    x = x / 2
    curved = 5 * x[:, 11] / (2.5 + x[:, 0]) + 5 * (x[:, 3] - x[:, 19]) ** 2 + 40 * x[:, 18] ** 3
    return curved + 0.25 * x[:, 12] ** 2 + x[:, [*_WELCH]] @ np.array([*_WELCH.values()])


def squares(x):
    return (x**2) @ np.array([3, 2, 1, 0.5, 0.1])


def inert_friedman(x):
    a, b, c, d, e = ((x + 1) / 2).T[:5]
    return 10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e


def oscillator(x):
    # With 0.2 all six parameters are positive up to four half-widths.
    k, m, c, force, time, start = (1 + 0.2 * x).T
    omega = np.sqrt(k / m)
    return start * np.exp(-0.3 * c * time) * np.cos(2 * omega * time) + force / k


def saturating(x):
    return np.tanh(x @ (3.0 / np.arange(1, 13))) + 0.3 * np.tanh(2 * x[:, 0] - x[:, 1])


def ripples(x):
    a = np.linspace(1, 0.05, 15)
    return x @ a + np.sin(2 * x) @ a[::-1] * 0.5 + np.cos(3 * x[:, 0] * x[:, 14])


def rational(x):
    return (1 + x[:, 0]) / (1.5 + x[:, 1]) + 0.5 * x[:, 2] / (1.3 + x[:, 3] * x[:, 2])


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
    "otl-middle": physical("otl-circuit", 6, 300, 2),
    # The cube is a quarter of these boxes: queries at four half-widths stay in the domain of their roots and logarithms.
    "piston-middle": physical("piston-noisy", 7, 400, 4),
    "borehole-middle": physical("borehole", 8, 400, 4),
}


# Families in which a query can be new although it is not far.


def ridge_sample(rng, n):
    x = rng.uniform(-1, 1, (n, 5))
    x[:, 1] = x[:, 0] + 0.05 * rng.standard_normal(n)
    x[:, 3] = -x[:, 2] + 0.5 * x[:, 0] + 0.05 * rng.standard_normal(n)
    return x


def off_ridge(rng, n):
    x = ridge_sample(rng, n)
    down, up = x[:, 0] - rng.uniform(0.5, 1, n), x[:, 0] + rng.uniform(0.5, 1, n)
    x[:, 1] = np.where(x[:, 0] > 0, down, up)
    return x


def clusters_sample(rng, n):
    side = rng.choice([-1.0, 1.0], (n, 1))
    return side * 1.5 + rng.uniform(-1, 1, (n, 4)) * 0.6


def gap(rng, n):
    return rng.uniform(-0.5, 0.5, (n, 1)) + 0.3 * rng.uniform(-1, 1, (n, 4))


def ring(d, of, low, high, factor=20):
    """Points of a cube whose first inputs have a norm in a range."""

    def sample(rng, n):
        x = rng.uniform(-1, 1, (factor * n, d))
        norm = np.linalg.norm(x[:, :of], axis=1)
        return x[(norm > low) & (norm < high)][:n]

    return sample


def bump(x):
    near = 2 * np.exp(-4 * (x[:, :2] ** 2).sum(axis=1))
    return x[:, 0] + np.sin(2 * x[:, 1]) + near + 0.3 * x[:, -1]


def log_sample(rng, n):
    powers = 10 ** rng.uniform(-4, 4, n), 10 ** rng.uniform(-2, 2, n)
    return np.column_stack([*powers, rng.uniform(-1, 1, (n, 2))])


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
    kind, (code, a, b, c) = x[:, :3], x[:, 3:].T
    of_kind = kind @ np.array([0, 1.5, -1]) + 2 * (kind.sum(axis=1) - 1)
    return of_kind + np.sin(1.3 * code) + a * (1 + x[:, 0]) + b**2 + 0.2 * c


def new_category(row):
    """Rows with another code of the category than the three of the data."""

    def sample(rng, n):
        x = category_sample(rng, n)
        x[:, :3] = row
        return x

    return sample


def new_code(rng, n):
    x = category_sample(rng, n)
    x[:, 3] = rng.choice([3.0, 5.0, -1.0], n)
    return x


def constant_sample(rng, n):
    return np.column_stack([rng.uniform(-1, 1, (n, 5)), np.full(n, 1.5)])


def constant_function(x):
    a, b, c, d, _, last = x.T
    return a * last + np.sin(3 * b) + c**2 + 0.5 * d + 2 * (last - 1.5)


def changed_constant(rng, n):
    x = constant_sample(rng, n)
    x[:, 5] = 1.5 + rng.choice([-1, 1], n) * rng.uniform(0.05, 1, n)
    return x


def modes(which, size=1.0):
    """Waves on a circle of 64 places with random weights."""

    def sample(rng, n):
        weight = size * rng.standard_normal((2, n, len(which))) / np.array(which)
        angle = 2 * np.pi * np.array(which)[:, None] * (np.arange(64) / 64)
        return weight[0] @ np.cos(angle) + weight[1] @ np.sin(angle)

    return sample


def field_function(x):
    smooth = (x + np.roll(x, 1, axis=1) + np.roll(x, -1, axis=1)) / 3
    parts = (smooth**2).mean(axis=1), np.tanh(x[:, 8] + x[:, 30]), x[:, 40] * x[:, 10]
    return np.stack(parts, axis=1)


def ridge_function(x):
    curved = 2 * (x[:, 0] - x[:, 1]) ** 2
    return x[:, 0] + curved + np.sin(2 * x[:, 2]) + x[:, 3] * x[:, 4]


def ridge_2_function(x):
    return np.exp(x[:, 1]) + 3 * abs(x[:, 2] + x[:, 3]) + x[:, 4]


def clusters_function(x):
    return np.sin(2 * x[:, 0]) + x[:, 1] ** 2 + 0.5 * x[:, 2] + 0.1 * x[:, 3]


def repeats_function(x):
    return squares(np.pad(x, ((0, 0), (0, 1)))) + x[:, 0]


def family(name, n, sample, function, movable, noise=0.0, logs=(), repeats=1, **special):
    """A problem; the names of special queries have underscores for spaces."""
    special = {key.replace("_", " "): of for key, of in special.items()}
    return Problem(name, n, sample, function, tuple(movable), special, logs, noise, repeats)


def hole(n, d, of, radius):
    """Points of a cube without a ball in some of its inputs; the special queries are in the ball."""
    inside = ring(d, of, -1, 0.8 * radius, 200)
    return family("hole", n, ring(d, of, radius, np.inf), bump, range(d), hole=inside)


_FIELDS = {"new_modes": modes((5, 6, 7)), "twice": modes((1, 2, 3, 4), 2.0)}
_FIELDS["four_times"] = modes((1, 2, 3, 4), 4.0)
_CATEGORIES = {"no_category": new_category(0.0), "two_categories": new_category((1.0, 1.0, 0.0))}
_CATEGORIES["new_code"] = new_code
_CONSTANT = family(
    "constant", 300, constant_sample, constant_function, range(5), changed=changed_constant
)
FAMILIES = {
    "ridge": family("ridge", 300, ridge_sample, ridge_function, (0, 2, 4), off_ridge=off_ridge),
    "ridge-2": family("ridge", 200, ridge_sample, ridge_2_function, range(5), off_ridge=off_ridge),
    "clusters": family("clusters", 300, clusters_sample, clusters_function, range(4), gap=gap),
    "hole-2": hole(400, 2, 2, 0.5),
    "hole-2-of-4": hole(500, 4, 2, 0.5),
    "hole-3": hole(500, 3, 3, 0.7),
    "log": family("log", 400, log_sample, log_function, range(4), logs=(0, 1), below=below),
    "categories": family(
        "categories", 400, category_sample, category_function, (4, 5, 6), **_CATEGORIES
    ),
    "constant": _CONSTANT,
    "repeats": family("repeats", 500, cube(4), repeats_function, range(4), noise=0.1, repeats=5),
    "repeats-60": family("repeats", 300, cube(3), waves, range(3), noise=0.15, repeats=5),
    "field": family("field", 400, modes((1, 2, 3, 4)), field_function, (), **_FIELDS),
}
ONE_INPUT = BOXES | FAMILIES
