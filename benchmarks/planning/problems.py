"""Functions on the unit cube with their minima, and surrogates that train in milliseconds."""

from typing import NamedTuple

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from benchmarks.suite import problems as natural

# fmt: off
SIX = np.array([
    [10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14],
])
CENTRES = 1e-4 * np.array([
    [1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
    [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381],
])
# fmt: on


def hartmann(x):
    d = x.shape[1]
    exponent = (SIX[:, :d] * (x[:, None] - CENTRES[:, :d]) ** 2).sum(axis=2)
    return -(np.array([1, 1.2, 3, 3.2]) * np.exp(-exponent)).sum(axis=1)


def rosenbrock(x):
    z = 4 * x - 2
    return (100 * (z[:, 1:] - z[:, :-1] ** 2) ** 2 + (1 - z[:, :-1]) ** 2).sum(axis=1)


def forrester(x):
    return (6 * x[:, 0] - 2) ** 2 * np.sin(12 * x[:, 0] - 4)


def front(x):
    return np.tanh(8 * (x[:, 0] + 0.5 * x[:, 1] - 0.8)) + 0.3 * x[:, 1]


def well(x):
    """A cone with a narrow well inside the data; outside them polynomials fall below both."""
    r = ((x - 0.5) ** 2).sum(axis=1)
    return np.sqrt(r + 0.01) - 0.3 * np.exp(-((x - 0.6) ** 2).sum(axis=1) / 0.01)


class Problem(NamedTuple):
    """A function, its number of inputs, its smallest value, and how much of each input the data cover."""

    function: object
    d: int
    minimum: float
    covered: tuple = (0.0, 1.0)


PROBLEMS = {
    "Forrester": Problem(forrester, 1, -6.020740),
    "Branin": Problem(lambda x: natural.branin(15 * x[:, 0] - 5, 15 * x[:, 1]), 2, 0.397887),
    "front": Problem(front, 2, -1.0),
    "camel": Problem(lambda x: natural.camel(4 * x[:, 0] - 2, 2 * x[:, 1] - 1), 2, -1.031628),
    "Rosenbrock 2": Problem(rosenbrock, 2, 0.0),
    "Hartmann 4": Problem(hartmann, 4, -3.729841),
    "Friedman": Problem(lambda x: natural.friedman(*x.T), 5, 0.0),
    "Rosenbrock 5": Problem(rosenbrock, 5, 0.0),
    "Hartmann 6": Problem(hartmann, 6, -3.322368),
    "false well": Problem(well, 2, -0.132213, (0.25, 0.75)),
}


def trees(x, y):
    return ExtraTreesRegressor(30, random_state=0).fit(x, y).predict


def kernel(x, y):
    model = make_pipeline(StandardScaler(), KernelRidge(kernel="rbf", gamma=0.5, alpha=0.01))
    centre = y.mean()
    fitted = model.fit(x, y - centre)
    return lambda q: fitted.predict(q) + centre


def cubic(x, y):
    return make_pipeline(PolynomialFeatures(3), Ridge(1e-6)).fit(x, y).predict


SURROGATES = {"trees": trees, "kernel ridge": kernel, "cubic": cubic}
