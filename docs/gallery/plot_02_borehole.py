"""
Eight inputs, one out of range
==============================

The flow through a borehole has eight inputs. You learn: the reason names the one input that left its range, and by how much.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import RandomForestRegressor

from geoq import GeoQ, plots

NAMES = ["well radius", "influence", "T upper", "head upper"]
NAMES += ["T lower", "head lower", "length", "K"]
LOW = np.array([0.05, 100, 63070, 990, 63.1, 700, 1120, 9855])
HIGH = np.array([0.15, 50000, 115600, 1110, 116, 820, 1680, 12045])


def borehole(x):
    radius, influence, upper, head_upper, lower, head_lower, length, conductivity = x.T
    log = np.log(influence / radius)
    leak = 2 * length * upper / (log * radius**2 * conductivity)
    return 2 * np.pi * upper * (head_upper - head_lower) / (log * (1 + leak + upper / lower))


def train(x, y):
    return RandomForestRegressor(50, random_state=0).fit(x, y).predict


x = np.random.default_rng(0).uniform(LOW, HIGH, size=(300, 8))
estimator = GeoQ(None, train).fit(x, borehole(x))

# %%
# A well that is twice as wide as all wells of the data. Nobody notices it in the prediction of the forest, which is constant out there.
query = (LOW + HIGH) / 2
wide = query.copy()
wide[0] = 0.3
answer = estimator.assess(np.array([query, wide]))
print(answer.reason(1, names=NAMES))
print("true errors:", abs(borehole(np.array([query, wide])) - answer.prediction).round(1))

# %%
# The prediction and its bound along each input, while the others stay in the middle.
figure = plt.figure(figsize=(11, 6.5))
plots.inputs(figure, estimator, query, names=NAMES)
for axes in figure.axes:
    axes.locator_params(axis="x", nbins=4)
plt.show()
