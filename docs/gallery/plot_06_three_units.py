"""
Three outputs in three units
============================

One model predicts the deflection, the stress and the frequency of a beam. You learn: every output has its own bound in its own unit, and
one flag for the query.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq import GeoQ

rng = np.random.default_rng(0)
UNITS = {"deflection": "mm", "stress": "MPa", "frequency": "Hz"}


def simulate(x):
    load, span, height = (x[name] for name in x)
    y = pd.DataFrame(
        {
            "deflection": 0.02 * load * span**3 / height**3,
            "stress": 0.3 * load * span / height**2,
            "frequency": 900 * height / span**2,
        }
    )
    y.attrs["units"] = UNITS
    return y


def sample(n):
    low, high = (5, 2, 0.2), (20, 5, 0.5)
    return pd.DataFrame(rng.uniform(low, high, (n, 3)), columns=["load", "span", "height"])


def train(x, y):
    model = make_pipeline(StandardScaler(), KNeighborsRegressor(5, weights="distance"))
    return model.fit(x, y.to_numpy()).predict


x, new = sample(300), sample(300)
estimator = GeoQ(None, train).fit(x, simulate(x))
answer = estimator.assess(new)
print(answer.reason(0))

error = abs(simulate(new).to_numpy() - answer.prediction)
figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
for j, (axes, (name, unit)) in enumerate(zip(panels, UNITS.items(), strict=True)):
    axes.loglog(error[:, j], answer.error_hat[:, j], ".", alpha=0.6)
    axes.axline((1, 1), (2, 2), color="k", lw=0.8, label="bound = error")
    covered = (error[:, j] <= answer.error_hat[:, j]).mean()
    axes.set(title=f"{name}: {covered:.0%} within the bound", xlabel=f"true error in {unit}")
    axes.set(ylabel=f"bound in {unit}")
panels[0].legend(frameon=False)
plt.show()
