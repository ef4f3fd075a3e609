"""
A driven pendulum, driven too hard
==================================

A forecast with a given force at each step. You learn: from the first step with a force that the data do not contain, no step is safe.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from geoq import RolloutGeoQ

rng = np.random.default_rng(1)


def simulate(start, force):
    states = [start]
    for push in force:
        angle, speed = states[-1]
        speed = 0.98 * speed + 0.2 * (push - np.sin(angle))
        states.append(np.array([angle + 0.2 * speed, speed]))
    return np.array(states)


def train_step(segments):  # a list of pairs: states and forces
    now = np.concatenate([np.hstack([u[:-1], f[:-1]]) for u, f in segments])
    soon = np.concatenate([u[1:] for u, f in segments])
    model = make_pipeline(PolynomialFeatures(3), Ridge(1e-5)).fit(now, soon)
    return lambda states, force: model.predict(np.hstack([states, force]))


slow, shift = rng.uniform(0.1, 0.5, (20, 1)), rng.uniform(0, 6, (20, 1))
forces = 0.3 * np.sin(slow * np.arange(120) + shift)
swings = [simulate(rng.normal(0, 0.3, 2), force[:-1]) for force in forces]
estimator = RolloutGeoQ(None, train_step, n_calibration=60)
estimator.fit(swings, forcing=[*forces[:, :, None]])

# %%
# The second force is the first one until step 30, and three times as large from then on.
start, usual = np.array([0.2, 0.0]), 0.3 * np.sin(0.25 * np.arange(60))
both = np.stack([usual, usual * np.where(np.arange(60) < 30, 1, 3)])
forecast = estimator.assess(np.stack([start, start]), 60, tolerance=0.3, forcing=both[:, :, None])
print(forecast.reason(1))

figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for i, axes in enumerate(panels):
    truth, angle = simulate(start, both[i])[1:, 0], forecast.prediction[i, :, 0]
    steps, bound = np.arange(1, 61), forecast.error_hat[i, :, 0]
    axes.fill_between(steps, angle - bound, angle + bound, color="C1", alpha=0.25, label="bound")
    axes.plot(steps, truth, "k-", label="truth")
    axes.plot(steps, angle, "C1--", label="forecast")
    axes.axvspan(1, forecast.trusted_horizon[i], color="C0", alpha=0.1, label="trusted")
    axes.set(xlabel="step", title=("usual force", "three times the force after step 30")[i])
    axes.legend(frameon=False, loc="lower left")
panels[0].set(ylabel="angle", ylim=(-3, 3))
plt.show()
