"""
Is my surrogate the problem?
============================

``fit`` compares your model with a Gaussian process through the same data. You learn: if the second opinion is much better, replace the
model; a bound cannot make it better.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import RandomForestRegressor

from geoq import GeoQ

rng = np.random.default_rng(0)


def beam(x):  # deflection of a beam: load, length, stiffness
    return x[:, 0] * x[:, 1] ** 3 / x[:, 2]


def train(x, y):
    return RandomForestRegressor(50, random_state=0).fit(x, y).predict


x = rng.uniform((1, 1, 2), (3, 2, 4), size=(200, 3))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    estimator = GeoQ(None, train).fit(x, beam(x))
print(caught[0].message)

# %%
# The same queries, answered by the forest and by the process.
new = rng.uniform((1, 1, 2), (3, 2, 4), size=(150, 3))
answer = estimator.assess(new)
opinion = answer.second_opinion

figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
width = 1.96 * opinion.deviation
for axes, prediction, bound, name in (
    (panels[0], answer.prediction, answer.error_hat, "your forest, with its bound"),
    (panels[1], opinion.prediction, width, "the second opinion, with two deviations"),
):
    axes.errorbar(beam(new), prediction, bound, fmt=".", ecolor="0.6", ms=4)
    axes.axline((0, 0), slope=1, color="k", lw=0.8)
    axes.set(title=name, xlabel="true deflection")
panels[0].set(ylabel="predicted deflection")
plt.show()
