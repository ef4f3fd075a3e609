"""
A network with a memory
=======================

An echo state network forecasts a chaotic series. You learn: value and memory together are the state, and the bound refers to the value.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import Ridge

from geoq import RolloutGeoQ
from geoq.parts import Relative, WithMemory

rng = np.random.default_rng(0)
series = [0.5] * 20  # the Mackey-Glass equation, in steps of 1
for _ in range(4000):
    delayed = series[-18]
    series.append(series[-1] + 0.2 * delayed / (1 + delayed**10) - 0.1 * series[-1])
series = np.array(series[200::2])[:, None]

# %%
# The reservoir is fixed; only the readout is trained, on the first part of the series.
links, entry = rng.normal(size=(80, 80)), rng.uniform(-1, 1, (1, 80))
links *= 0.9 / abs(np.linalg.eigvals(links)).max()


def remember(values, memory):
    return np.tanh(values @ entry + memory @ links)


memory, seen = np.zeros((1, 80)), []
for value in series[:899]:
    memory = remember(value[None], memory)
    seen.append(memory[0])
readout = Ridge(1e-5).fit(np.array(seen)[50:], series[51:900] - series[50:899])


def step(values, memory):
    memory = remember(values, memory)
    return values + readout.predict(memory).reshape(-1, 1), memory


network = WithMemory(step, n_values=1, n_memory=80)
states = network.states(series)[900:]  # the network has not seen this part
estimator = RolloutGeoQ(network, None, output=network.output, n_calibration=60).fit(states[:700])
forecast = estimator.assess(states[800:801], n_steps=60, tolerance=Relative(0.5))
print(forecast.reason(0))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
steps, value, bound = np.arange(1, 61), forecast.prediction[0, :, 0], forecast.error_hat[0, :, 0]
axes.fill_between(steps, value - bound, value + bound, color="C1", alpha=0.25, label="bound")
axes.plot(steps, series[1701:1761], "k-", label="truth")
axes.plot(steps, value, "C1--", label="forecast")
axes.axvspan(1, forecast.trusted_horizon[0], color="C0", alpha=0.1, label="trusted")
axes.set(title="A chaotic series, forecast by a network with memory", xlabel="step", ylabel="value")
axes.legend(frameon=False)
plt.show()
