"""
A model that I cannot train again
=================================

Only the model is at hand, and some new simulations. You learn: how many simulations that the model has not seen make a bound useful.
"""

# %%
# The model was trained somewhere else; here it is a formula with a wrong exponent.
import warnings

import matplotlib.pyplot as plt
import numpy as np

from geoq import GeoQ

warnings.filterwarnings("ignore", "A Gaussian process")  # example 3 is about this


def simulator(x):
    smooth = x[:, 0] ** 1.5 * np.exp(-x[:, 1]) + 0.3 * np.sin(5 * x[:, 2])
    return smooth + 0.1 * rng.normal(size=len(x))


def model(x):
    return x[:, 0] ** 1.4 * (1.02 - x[:, 1] + x[:, 1] ** 2 / 2.6)


rng = np.random.default_rng(0)
sizes = [20, 40, 80, 160, 320]
covered, size_of_bound = np.empty((5, 6)), np.empty((5, 6))
new = rng.uniform(0.1, 1.5, size=(2000, 3))
error = abs(simulator(new) - model(new))
for i, n in enumerate(sizes):
    for repeat in range(6):
        x = rng.uniform(0.1, 1.5, size=(n, 3))
        bound = GeoQ(model, None).fit(x, simulator(x)).bound(new)
        covered[i, repeat] = (error <= bound).mean()
        size_of_bound[i, repeat] = bound.mean()

# %%
# ``None`` in place of a function that trains: no model is trained, so ``fit`` takes a second. The simulations must be new for the model.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
left.semilogx(sizes, covered, "C0.")
left.semilogx(sizes, covered.mean(axis=1), "C0-", label="mean of 6 sets")
left.axhline(0.95, color="k", ls="--", lw=0.8, label="quantile level")
left.set(title="Fraction of errors within the bound", xlabel="simulations", ylim=(0.5, 1.02))
right.semilogx(sizes, size_of_bound, "C3.")
right.semilogx(sizes, size_of_bound.mean(axis=1), "C3-", label="mean bound")
right.axhline(error.mean(), color="k", ls=":", label="mean true error")
right.set(title="Size of the bound", xlabel="simulations", ylim=(0, None))
for axes in (left, right):
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.legend(frameon=False)
plt.show()
