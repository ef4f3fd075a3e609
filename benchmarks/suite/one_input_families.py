"""Families of data in which a query can be new although it is not far: ridges, clusters, holes, categories, constants.

``ONE_INPUT`` has these problems and the boxes of one_input_problems.py.
"""

import numpy as np

from benchmarks.suite.one_input_problems import BOXES, Problem, cube, squares, waves


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
        [
            10 ** rng.uniform(-4, 4, n),
            10 ** rng.uniform(-2, 2, n),
            rng.uniform(-1, 1, (n, 2)),
        ]
    )


def log_function(x):
    a = np.log10(np.maximum(x[:, 0], 1e-12))
    return (
        np.tanh(a)
        + 0.1 * a**2
        + 0.5 * np.log10(np.maximum(x[:, 1], 1e-12)) * x[:, 2]
        + x[:, 3]
    )


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
        x[:, 0] * x[:, 5]
        + np.sin(3 * x[:, 1])
        + x[:, 2] ** 2
        + 0.5 * x[:, 3]
        + 2 * (x[:, 5] - 1.5)
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
        [(smooth**2).mean(axis=1), np.tanh(x[:, 8] + x[:, 30]), x[:, 40] * x[:, 10]],
        axis=1,
    )


FAMILIES = {
    "ridge": Problem(
        "ridge",
        300,
        ridge_sample,
        lambda x: (
            x[:, 0]
            + 2 * (x[:, 0] - x[:, 1]) ** 2
            + np.sin(2 * x[:, 2])
            + x[:, 3] * x[:, 4]
        ),
        (0, 2, 4),
        {"off ridge": off_ridge},
    ),
    "ridge-2": Problem(
        "ridge",
        200,
        ridge_sample,
        lambda x: np.exp(x[:, 1]) + 3 * abs(x[:, 2] + x[:, 3]) + x[:, 4],
        (0, 1, 2, 3, 4),
        {"off ridge": off_ridge},
    ),
    "clusters": Problem(
        "clusters",
        300,
        clusters_sample,
        lambda x: np.sin(2 * x[:, 0]) + x[:, 1] ** 2 + 0.5 * x[:, 2] + 0.1 * x[:, 3],
        (0, 1, 2, 3),
        {"gap": gap},
    ),
    "hole-2": Problem(
        "hole",
        400,
        hole_sample(2, 2, 0.5),
        bump,
        (0, 1),
        {"hole": hole_inside(2, 2, 0.5)},
    ),
    "hole-2-of-4": Problem(
        "hole",
        500,
        hole_sample(4, 2, 0.5),
        bump,
        (0, 1, 2, 3),
        {"hole": hole_inside(4, 2, 0.5)},
    ),
    "hole-3": Problem(
        "hole",
        500,
        hole_sample(3, 3, 0.7),
        bump,
        (0, 1, 2),
        {"hole": hole_inside(3, 3, 0.7)},
    ),
    "log": Problem(
        "log",
        400,
        log_sample,
        log_function,
        (0, 1, 2, 3),
        {"below": below},
        logs=(0, 1),
    ),
    "categories": Problem(
        "categories",
        400,
        category_sample,
        category_function,
        (4, 5, 6),
        {
            "no category": new_category(0),
            "two categories": new_category(2),
            "new code": new_code,
        },
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
        "repeats",
        500,
        cube(4),
        lambda x: squares(np.pad(x, ((0, 0), (0, 1)))) + x[:, 0],
        (0, 1, 2, 3),
        {},
        noise=0.1,
        repeats=5,
    ),
    "repeats-60": Problem(
        "repeats", 300, cube(3), waves, (0, 1, 2), {}, noise=0.15, repeats=5
    ),
    "field": Problem(
        "field",
        400,
        modes((1, 2, 3, 4)),
        field_function,
        (),
        {
            "new modes": modes((5, 6, 7)),
            "twice": modes((1, 2, 3, 4), 2.0),
            "four times": modes((1, 2, 3, 4), 4.0),
        },
    ),
}


ONE_INPUT = BOXES | FAMILIES
