"""
A field: flow through porous rock
=================================

The pressure of a flow through rock, predicted from the permeability. You learn: the bound is a map that shows where the field is wrong,
and rock that is rougher than the data is not safe.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.sparse import diags_array
from scipy.sparse.linalg import spsolve
from sklearn.linear_model import Ridge

from geoq import GeoQ, RandomFolds, Training
from geoq.parts import FieldBound, FieldFactor


def rocks(n, width, seed):
    noise = np.random.default_rng(seed).normal(size=(n, 24, 24))
    smooth = gaussian_filter(noise, (0, width, width))
    return (0.7 * smooth / smooth.std())[:, None]  # the logarithm of the permeability


def pressure(rock):  # finite volumes; the pressure outside is 0
    k = np.exp(np.pad(rock, 1, mode="edge"))
    right, down = (k[1:-1, :-1] + k[1:-1, 1:]) / 2, (k[:-1, 1:-1] + k[1:, 1:-1]) / 2
    total = right[:, 1:] + right[:, :-1] + down[1:] + down[:-1]
    beside = -np.pad(right[:, 1:-1], ((0, 0), (0, 1))).ravel()[:-1]
    bands = [total.ravel(), beside, beside, -down[1:-1].ravel(), -down[1:-1].ravel()]
    matrix = diags_array(bands, offsets=[0, 1, -1, 24, -24]).tocsc()
    return spsolve(matrix, np.full(24**2, 0.1)).reshape(1, 24, 24)


def train(x, y):
    model = Ridge(30).fit(x.reshape(len(x), -1), y.reshape(len(y), -1))
    return lambda x: model.predict(x.reshape(len(x), -1)).reshape(-1, 1, 24, 24)


x = rocks(200, 3, seed=0)
short = FieldFactor(n_splits=2, training=Training(n_steps=60, batch_size=16))
estimator = GeoQ(None, train, bound_model=FieldBound(short), folds=RandomFolds(5))
estimator.fit(x, np.stack([pressure(r[0]) for r in x]))

new = np.concatenate([rocks(1, 3, seed=1), rocks(1, 1, seed=2)])
answer = estimator.assess(new)
error = abs(np.stack([pressure(r[0]) for r in new]) - answer.prediction)
figure, panels = plt.subplots(2, 4, figsize=(11, 5.4), layout="constrained")
for i, row in enumerate(panels):
    row[0].set(ylabel="safe" if answer.safe[i] else "NOT safe: rougher than the data")
    fields = new[i], answer.prediction[i], error[i], answer.error_hat[i]
    for axes, field, low, high in zip(row, fields, (-2, 0, 0, 0), (2, 6, 1, 1), strict=True):
        figure.colorbar(axes.imshow(field[0], vmin=low, vmax=high), ax=axes, shrink=0.8)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color="k" if answer.safe[i] else "r", lw=1 if answer.safe[i] else 4)
for axes, title in zip(panels[0], ("rock (input)", "pressure", "true error", "bound"), strict=True):
    axes.set_title(title)
print(answer.reason(1))
plt.show()
