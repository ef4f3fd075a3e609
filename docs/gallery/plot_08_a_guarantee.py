"""
A guarantee, tested a thousand times
====================================

``conformalize`` turns the bound into a guarantee. You learn: over many sets of pairs set aside the mean coverage is just above 95 %, while
one set can be lucky or unlucky.
"""

import copy

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import Ridge

from geoq import GeoQ

rng = np.random.default_rng(0)


def sample(n):
    x = rng.uniform(-1, 1, size=(n, 2))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] ** 2 + 0.1 * rng.standard_t(3, size=n)


def train(x, y):
    return Ridge().fit(x, y).predict


fitted = GeoQ(None, train).fit(*sample(150))
x_new, y_new = sample(4000)
raw = fitted.assess(x_new)
error = abs(y_new - raw.prediction)[raw.safe]
print("without conformalize:", (error <= raw.error_hat[raw.safe]).mean().round(3))

# %%
# One factor multiplies the bounds of all safe queries. Each of a thousand sets of 100 pairs gives its own factor.
coverage = []
for _ in range(1000):
    estimator = copy.copy(fitted).conformalize(*sample(100))
    factor = estimator.fitted_.conformal.safe
    coverage.append((error <= factor * raw.error_hat[raw.safe]).mean())

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.hist(coverage, bins=40, color="C0", alpha=0.6)
axes.axvline(np.mean(coverage), color="C3", label=f"mean: {np.mean(coverage):.3f}")
axes.axvline(0.95, color="k", ls="--", label="guaranteed: 0.95")
axes.set(title="1000 sets of 100 pairs set aside", ylabel="number of sets")
axes.set(xlabel="fraction of the errors of new safe queries within the bound")
axes.legend(frameon=False)
plt.show()
