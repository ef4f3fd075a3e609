"""
One input, one gap
==================

A network imitates a noisy experiment that has no data between 1.2 and 1.9. You learn: the bound has the size of the noise where there are
data, and the flag changes where they end.
"""

# %%
# The data, and a function that trains the model. geoq calls it without a part of the data, to measure errors at points that the model has
# not seen.
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq import GeoQ

warnings.filterwarnings("ignore", "lbfgs")  # the network needs no full convergence
rng = np.random.default_rng(0)


def experiment(x):
    return np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=len(x))


def train(x, y):
    network = MLPRegressor(
        hidden_layer_sizes=(20, 20), solver="lbfgs", max_iter=300, random_state=0
    )
    return make_pipeline(StandardScaler(), network).fit(x, y).predict


x = np.concatenate([rng.uniform(0, 1.2, 50), rng.uniform(1.9, 3, 50)])[:, None]
y = experiment(x)
estimator = GeoQ(None, train).fit(x, y)

# %%
# Queries everywhere, also in the gap and outside.
at = np.linspace(-0.4, 3.4, 400)[:, None]
answer = estimator.assess(at)
print(answer.reason(int(abs(at[:, 0] - 1.55).argmin()), names=["load"]))

figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.5), layout="constrained")
band = answer.prediction - answer.error_hat, answer.prediction + answer.error_hat
upper.fill_between(at[:, 0], *band, fc="0.85", hatch="///", ec="0.6", label="bound, not safe")
upper.fill_between(at[:, 0], *band, where=answer.safe, color="lightblue", label="bound, safe")
upper.plot(at, np.sin(3 * at), "k-", label="truth without noise")
upper.plot(at, answer.prediction, "C1--", label="model")
upper.plot(x, y, "k.", ms=4, label="data")
upper.set(title="A model with its bound", ylabel="output", ylim=(-2.5, 2.5))
lower.semilogy(at, abs(experiment(at) - answer.prediction), ".", color="0.5", label="true error")
lower.semilogy(at, answer.error_hat, "C3-", label="bound")
lower.set(xlabel="input", ylabel="error", ylim=(1e-3, 5))
for axes in (upper, lower):
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
plt.show()
