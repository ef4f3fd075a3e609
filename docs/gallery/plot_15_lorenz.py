"""
How long can I trust a forecast?
================================

A model of the Lorenz equations forecasts from its own output. You learn: the trusted horizon is the number of steps for which a forecast
keeps a tolerance, known before the truth is.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.integrate import solve_ivp
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from geoq import RolloutGeoQ
from geoq.parts import Relative


def lorenz(_, u):
    return 10 * (u[1] - u[0]), u[0] * (28 - u[2]) - u[1], u[0] * u[1] - 8 / 3 * u[2]


times = np.arange(0, 150, 0.05)
states = solve_ivp(lorenz, (0, 150), (1, 1, 20), t_eval=times, rtol=1e-8).y.T[100:]


def train_step(segments):  # cubic polynomials for one step of 0.05
    now = np.concatenate([segment[:-1] for segment in segments])
    soon = np.concatenate([segment[1:] for segment in segments])
    model = make_pipeline(StandardScaler(), PolynomialFeatures(3), Ridge(1e-3)).fit(now, soon - now)
    return lambda u: u + model.predict(u)


estimator = RolloutGeoQ(None, train_step, n_calibration=100).fit(states[:2000])
starts = np.arange(2000, 2780, 10)
forecast = estimator.assess(states[starts], n_steps=100, tolerance=Relative(0.5))
print(forecast.reason(0))

truth = np.stack([states[s + 1 : s + 101] for s in starts])
wrong = (abs(truth - forecast.prediction) > forecast.tolerance).any(axis=2)
held = np.where(wrong.any(axis=1), wrong.argmax(axis=1), 100)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
steps, bound = 0.05 * np.arange(1, 101), forecast.error_hat[0, :, 0]
left.plot(steps, truth[0, :, 0], "k-", label="truth")
around = forecast.prediction[0, :, 0]
left.plot(steps, around, "C1--", label="forecast")
left.fill_between(steps, around - bound, around + bound, color="C1", alpha=0.2, label="bound")
left.axvline(0.05 * forecast.trusted_horizon[0], color="C0", label="trusted up to here")
left.set(title="One forecast", xlabel="time", ylabel="first coordinate", ylim=(-40, 40))
left.legend(frameon=False, ncols=2)
right.plot(0.05 * held, 0.05 * forecast.trusted_horizon, "C0o", alpha=0.4)
right.fill_between([0, 5], [0, 5], 5, color="C3", alpha=0.1, label="trusted too long")
right.set(title="78 forecasts", xlabel="time within the tolerance", ylabel="trusted time")
right.set(xlim=(0, 5.1), ylim=(0, 5.1))
right.legend(frameon=False)
plt.show()
