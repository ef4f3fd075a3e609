"""
A training that takes six hours
===============================

``estimate`` measures one training before you start all of them. You learn: 8 trainings give nearly the bound of 15, and 5 are enough only
if all queries are amid the data.
"""

# %%
# A simulation of a long training; ``checkpoint="folder"`` of ``fit`` keeps every finished fold, so that an interrupted run continues.
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from geoq import CombinedFolds, GeoQ, NestedFolds, RandomFolds, default_folds

warnings.filterwarnings("ignore", "A Gaussian process")  # example 3 is about this
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, size=(250, 2))
y = np.sin(4 * x[:, 0]) * (1 + x[:, 1])


def train(x, y):
    time.sleep(0.05)  # six hours
    return ExtraTreesRegressor(30, random_state=0).fit(x, y).predict


SCHEMES = {
    "15 trainings, the default": default_folds(),
    "8 trainings": CombinedFolds(RandomFolds(5), NestedFolds(3, smallest=1 / 6)),
    "5 trainings, random folds": RandomFolds(5),
}
along = np.column_stack([np.linspace(-1, 2.5, 300), np.full(300, 0.5)])
model = train(x, y)
error = abs(np.sin(4 * along[:, 0]) * 1.5 - model(along))

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.semilogy(along[:, 0], error, "k-", lw=0.8, label="true error")
for (name, folds), dashes in zip(SCHEMES.items(), ("-", "--", ":"), strict=True):
    estimator = GeoQ(model, train, folds=folds)
    print(name, "|", estimator.estimate(x, y))
    axes.semilogy(along[:, 0], estimator.fit(x, y).bound(along), dashes, label=f"bound, {name}")
axes.axvspan(-1, 1, color="C0", alpha=0.1, label="data")
axes.set(title="What fewer trainings cost", xlabel="input 0", ylabel="error", ylim=(1e-3, 10))
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
plt.show()
