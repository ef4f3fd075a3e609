"""
Where the flag fails, and the remedy
====================================

A waiting line breaks down where three inputs reach a limit. You learn: make a combination that you know to be critical an input.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import RandomForestRegressor

from geoq import GeoQ

warnings.filterwarnings("ignore", "A Gaussian process")  # example 3 is about this
rng = np.random.default_rng(0)


def load_of(x):  # of arrivals, service time and servers
    return x[:, 0] * x[:, 1] / x[:, 2]


def waiting(x):
    return x[:, 1] * load_of(x) / (1 - load_of(x))


def sample(n, low, high):
    x = rng.uniform((1, 1, 4), (4, 4, 12), size=(200 * n, 3))
    return x[(load_of(x) > low) & (load_of(x) < high)][:n]


def train(x, y):
    return RandomForestRegressor(50, random_state=0).fit(x, y).predict


x, results = sample(400, 0, 0.8), {}
COLUMNS = {
    "three inputs": np.asarray,
    "with the load as an input": lambda x: np.column_stack([x, load_of(x)]),
}
for name, inputs in COLUMNS.items():
    estimator = GeoQ(None, train).fit(inputs(x), waiting(x))
    for low in (0.6, 0.7, 0.8, 0.85, 0.9, 0.95):
        new = sample(300, low, low + 0.04)
        answer = estimator.assess(inputs(new))
        missed = answer.safe & (abs(waiting(new) - answer.prediction) > answer.error_hat)
        results.setdefault(name, []).append((low + 0.02, answer.safe.mean(), missed.mean()))

figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for axes, (name, rows) in zip(panels, results.items(), strict=True):
    load, safe, missed = np.transpose(rows)
    axes.plot(load, safe, "C0o-", label="called safe")
    axes.plot(load, missed, "C3s--", label="called safe, but error above the bound")
    axes.axvspan(0, 0.8, color="C0", alpha=0.1, label="data")
    axes.set(title=name, xlabel="load of the servers", xlim=(0.58, 1))
panels[0].set(ylabel="fraction of the queries", ylim=(0, 1))
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()
