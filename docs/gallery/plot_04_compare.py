"""
Conformal prediction, an ensemble, a Gaussian process and geoq
==============================================================

Four ways to bound the error of one network, on the same data. You learn: all of them cover queries amid the data; they differ where the
data end.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor, kernels
from sklearn.neural_network import MLPRegressor

from geoq import GeoQ

warnings.filterwarnings("ignore", "lbfgs|A Gaussian")


def simulator(x):
    return np.sin(2 * x[:, 0]) * np.cosh(x[:, 1]) + abs(x[:, 2])


def train(x, y, seed=0):
    network = MLPRegressor(hidden_layer_sizes=(30, 30), solver="lbfgs", random_state=seed)
    return network.fit(x, y).predict


rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, size=(200, 3))
y = simulator(x)
new = rng.uniform(-1, 1, size=(5000, 3)) * np.repeat([1, 2], [1000, 4000])[:, None]
outside = np.maximum(abs(new) - 1, 0).max(axis=1)

# %%
# Split conformal prediction, as MAPIE does it: one width for all queries, from a fifth of the data.
model = train(x[:160], y[:160])
width = np.sort(abs(y[160:] - model(x[160:])))[int(np.ceil(0.95 * 41)) - 1]
within = {"conformal prediction": abs(simulator(new) - model(new)) <= width}
members = np.array([train(x, y, seed)(new) for seed in range(5)])
within["ensemble of 5"] = abs(simulator(new) - members.mean(0)) <= 1.96 * members.std(0, ddof=1)
kernel = kernels.ConstantKernel() * kernels.RBF([1.0] * 3) + kernels.WhiteKernel(1e-4)
mean, deviation = GaussianProcessRegressor(kernel).fit(x, y).predict(new, return_std=True)
within["Gaussian process"] = abs(simulator(new) - mean) <= 1.96 * deviation
answer = GeoQ(None, train).fit(x, y).assess(new)
within["geoq"] = abs(simulator(new) - answer.prediction) <= answer.error_hat

figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
bins = np.ceil(6 * outside)  # 0 is inside the box of the data
for name, marker in zip(within, "so^D", strict=True):
    covered = [within[name][bins == b].mean() for b in range(7)]
    axes.plot(range(7), covered, marker=marker, label=name)
axes.axhline(0.95, color="k", lw=0.8, ls="--")
axes.set(title="Do the bounds hold?", ylabel="fraction of errors within the bound", ylim=(0, 1.02))
axes.set_xticks(range(7), ["inside", *(f"up to {b}/6" for b in range(1, 7))])
axes.set(xlabel="distance from the box of the data, in halves of its side")
axes.legend(frameon=False)
plt.show()
