"""
Stress on a finite-element mesh
===============================

The stress around a hole in a plate, at the nodes of a mesh. You learn: ``domain=Mesh(nodes)`` is all that a mesh needs, and the bound is
large where the stress is concentrated. ``plots.fields`` leaves the hole empty.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.neighbors import KNeighborsRegressor

from geoq import GeoQ, Mesh, Training, plots
from geoq.parts import FieldBound, FieldFactor

warnings.filterwarnings("ignore", "A regression on the same fields")  # example 3 is about this
rng = np.random.default_rng(0)
radius = 0.2 + 0.8 * np.sort(rng.random(500)) ** 1.3
turn = 2.4 * np.arange(500)
nodes = np.column_stack([radius * np.cos(turn), radius * np.sin(turn)])


def stress(x):
    """Kirsch's solution for two loads in MPa and the direction of the first one."""
    first, second, angle = x.T[:, :, None]
    a = (0.2 / radius) ** 2
    both, apart = (first + second) / 2, (first - second) / 2
    hoop = both * (1 + a) - apart * (1 + 3 * a**2) * np.cos(2 * (turn - angle))
    return hoop[:, None]


def train(x, y):
    model = KNeighborsRegressor(6, weights="distance").fit(x / [1, 1, 0.5], y[:, 0])
    return lambda x: model.predict(x / [1, 1, 0.5])[:, None]


def sample(n):
    return rng.uniform((1, -0.5, 0), (2, 0.5, 1.5), size=(n, 3))


x, new = sample(200), sample(1)
bound = FieldBound(FieldFactor(training=Training(n_steps=100, batch_size=16)))  # a short training
answer = GeoQ(None, train, domain=Mesh(nodes), bound_model=bound).fit(x, stress(x)).assess(new)

error = abs(stress(new) - answer.prediction)
plots.fields(plt.figure(figsize=(11, 3.6)), answer, 0, error=error)
plt.show()
