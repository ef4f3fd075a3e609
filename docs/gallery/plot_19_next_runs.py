"""
200 runs and a plan
===================

A study will ask for the upper right corner, where few of 200 simulations are. You learn: twenty proposed runs make the corner safe before
anything is trained again; a new fit with them makes the bounds small, and here too small: measure the coverage before you rely on it.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from geoq import GeoQ
from geoq.planning import propose

rng = np.random.default_rng(0)


def simulate(x):
    return np.sin(5 * x[:, 0]) * np.cos(3 * x[:, 1]) + 2 * (x[:, 0] - 0.9) ** 2 + x[:, 1] / 2


def train(x, y):
    return ExtraTreesRegressor(random_state=0).fit(x, y).predict


x = rng.beta(1.2, 2.5, size=(200, 2))
estimator = GeoQ(None, train).fit(x, simulate(x))
plan, candidates = rng.uniform(0.6, 1, size=(300, 2)), rng.uniform(0.5, 1, size=(1000, 2))

# %%
# Sixteen runs that lower the bounds of the plan most, and four of the plan at random, which measure the coverage there.
found = propose(estimator, candidates, 20, queries=plan, n_random=4)
print(found.reason(0))
runs = np.concatenate([candidates[found.rows], plan[found.random_rows]])
before, after = estimator.assess(plan), estimator.update(runs, simulate(runs)).assess(plan)
every = np.concatenate([x, runs])
again = GeoQ(None, train).fit(every, simulate(every)).assess(plan)
for when, answer in (("before", before), ("update", after), ("new fit", again)):
    covered = abs(answer.prediction - simulate(plan)) <= answer.error_hat
    print(f"{when}: mean bound {answer.error_hat.mean():.2f}, coverage {covered.mean():.2f}")

# %%
# The colour is the bound. Crosses are queries of the plan that are not safe.
figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", sharey=True)
for axes, answer, when in zip(panels, (before, after), ("before", "after"), strict=True):
    axes.plot(*x.T, ".", color="0.6", ms=3, label="data")
    for rows, marker, name in ((answer.safe, "o", "plan, safe"), (~answer.safe, "x", "not safe")):
        colour = {"c": answer.error_hat[rows], "cmap": "viridis_r", "label": name}
        dots = axes.scatter(*plan[rows].T, marker=marker, vmin=0, vmax=1.2, s=24, **colour)
    axes.set(title=f"{when}: {answer.safe.mean():.0%} of the plan is safe", xlabel="input 0")
panels[1].plot(*runs.T, "o", mec="k", mfc="none", ms=7, label="new runs")
panels[0].set(ylabel="input 1")
figure.colorbar(dots, ax=panels, label="bound at planned queries")
figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()
