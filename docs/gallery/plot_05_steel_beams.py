"""
A table with categories, dates and missing values
=================================================

Tests of steel beams. You learn: data frames go in as they are, and a grade of steel that the data do not contain is never safe.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from geoq import GeoQ

rng = np.random.default_rng(0)
n, NUMBERS = 400, ["span", "height", "corrosion"]
beams = pd.DataFrame(
    {
        "span": rng.uniform(2, 8, n),  # m
        "height": rng.uniform(0.1, 0.4, n),  # m
        "grade": rng.choice(["S235", "S275", "S355"], n),
        "cast": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 500, n), unit="D"),
        "corrosion": np.where(rng.random(n) < 0.2, np.nan, rng.uniform(0, 1, n)),
    }
)
strength = beams["grade"].str[1:].astype(float)
load = strength * beams["height"] ** 2 / beams["span"] * (1 - 0.2 * beams["corrosion"].fillna(0.5))


def train(x, y):
    encode = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    columns = make_column_transformer((encode, ["grade"]), ("passthrough", NUMBERS))
    return make_pipeline(columns, HistGradientBoostingRegressor(random_state=0)).fit(x, y).predict


estimator = GeoQ(None, train).fit(beams, load)

# %%
# Four queries: a usual beam, a new grade, a beam that is too long, and one that was cast later than all others.
queries = beams.iloc[[0] * 4].reset_index(drop=True).assign(corrosion=0.3)
queries.loc[1, "grade"] = "S460"
queries.loc[2, "span"] = 12.0
queries.loc[3, "cast"] = pd.Timestamp("2027-01-01")
answer = estimator.assess(queries)
for i in range(4):
    print(answer.reason(i).splitlines()[:2])

figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
names = ["a usual beam", "grade S460", "span 12 m", "cast in 2027"]
for i in range(4):
    color = "C0" if answer.safe[i] else "0.6"
    axes.errorbar(answer.prediction[i], i, xerr=answer.error_hat[i], fmt="o", color=color)
    axes.text(answer.prediction[i], i - 0.2, "safe" if answer.safe[i] else "NOT safe", ha="center")
axes.set(yticks=range(4), yticklabels=names, ylim=(3.6, -0.6))
axes.set(title="Predicted load and its bound", xlabel="load in MN/m")
plt.show()
