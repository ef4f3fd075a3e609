"""
An optimum that exists
======================

A cubic polynomial falls outside its data. You learn: the optimiser of the surrogate runs there, and the search ends at a simulated value.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from geoq import GeoQ
from geoq.planning import TrustRegionSearch


def simulate(x):
    hole = np.exp(-((x - 0.6) ** 2).sum(axis=1) / 0.01)
    return np.sqrt(((x - 0.5) ** 2).sum(axis=1) + 0.01) - 0.3 * hole


def train(x, y):
    return make_pipeline(PolynomialFeatures(3), Ridge(1e-6)).fit(x, y).predict


x = np.random.default_rng(0).uniform(0.25, 0.75, size=(40, 2))
estimator = GeoQ(None, train).fit(x, simulate(x))
model, box = estimator.surrogate_, [(0, 1), (0, 1)]
ends = [minimize(lambda q: model(q[None])[0], s, bounds=box, method="COBYQA").x for s in x[:4]]
fooled = min(ends, key=lambda q: model(q[None])[0])

# %%
# Each run of the simulator is data for the bound, so the region grows where the surrogate is verified.
search = TrustRegionSearch(estimator, lambda y: y, box)
asked = []
while not search.done and len(asked) < 25:
    asked.append(search.ask())
    search.tell(asked[-1], simulate(asked[-1][None])[0])
print("search", search.best[0].round(3), round(search.best[2], 3), "after", len(asked), "runs")
print("surrogate", fooled.round(3), "predicts", round(model(fooled[None])[0], 3), end=" ")
print("and the simulator returns", round(simulate(fooled[None])[0], 3))

at = np.stack(np.meshgrid(*[np.linspace(0, 1, 80)] * 2), -1)
answer = estimator.assess(at.reshape(-1, 2))
figure, axes = plt.subplots(figsize=(6.5, 5.6), layout="constrained")
colours = axes.contourf(*at.T, simulate(at.reshape(-1, 2)).reshape(80, 80).T, 15)
safe = answer.safe.reshape(80, 80).T
axes.contourf(*at.T, safe, [-0.5, 0.5], colors="none", hatches=["///"])
axes.plot(*x.T, "o", color="w", mec="0.5", ms=5, label="data")
axes.plot(*np.array(asked).T, "o-", color="C3", mfc="none", zorder=4, label="asked, in order")
axes.plot(*search.best[0], "*", color="C1", ms=15, label="best simulated value")
axes.plot(*fooled, "X", color="k", ms=10, clip_on=False, label="optimum of the surrogate")
axes.set(xlabel="input 0", ylabel="input 1")
figure.legend(loc="outside lower center", ncols=2)
figure.colorbar(colours, label="simulator; hatched: not safe before the search")
plt.show()
