"""
Which cells are wrong?
======================

A model predicts where a plume of smoke is: yes or no in each cell. You learn: ``expected_error`` is a map of the probability that a cell
is wrong.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.neighbors import KNeighborsRegressor

from geoq import GeoQ, RandomFolds, Training
from geoq.parts import IndicatorBound

rng = np.random.default_rng(0)
down, along = np.mgrid[0:1:20j, 0:2:40j]


def plume(x):  # strength, wind and turbulence of the source
    strength, wind, turbulence = x.T[:, :, None, None]
    width = 0.03 + turbulence * along
    drift = 0.5 + 0.2 * np.sin(3 * along + wind)
    thickness = strength / width * np.exp(-(((down - drift) / width) ** 2) / 2)
    return (thickness > 3)[:, None].astype(float)


def train(x, y):
    low, high = np.array([0.2, 0, 0.05]), np.array([1, 3, 0.2])
    nearest = KNeighborsRegressor(4, weights="distance")
    nearest.fit((x - low) / (high - low), y.reshape(len(y), -1))
    shape = (-1, 1, *down.shape)
    return lambda x: (nearest.predict((x - low) / (high - low)) > 0.5).astype(float).reshape(shape)


def sample(n):
    return rng.uniform((0.2, 0, 0.05), (1, 3, 0.2), size=(n, 3))


x = sample(250)
cells = IndicatorBound(widths=(16,), training=Training(n_steps=250, batch_size=16))
estimator = GeoQ(None, train, bound_model=cells, folds=RandomFolds(5)).fit(x, plume(x))

new = sample(3)
answer, probability = estimator.assess(new), estimator.expected_error(new)
wrong = abs(plume(new) - answer.prediction)
figure, panels = plt.subplots(3, 3, figsize=(10, 5.6), layout="constrained")
for i, row in enumerate(panels):
    for axes, field in zip(row, (answer.prediction[i], probability[i], wrong[i]), strict=True):
        shown = axes.imshow(field[0], vmin=0, vmax=1, cmap="magma_r", origin="lower")
        axes.set(xticks=[], yticks=[])
for axes, name in zip(panels[0], ("prediction", "probability of error", "errors"), strict=True):
    axes.set(title=name)
figure.colorbar(shown, ax=panels, label="no (0) to yes (1)")
plt.show()
