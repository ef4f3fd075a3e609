"""
A network, trained 15 times at once
===================================

``TrainNetwork`` trains the networks of all folds together. You learn: what the 15 trainings of a small network cost, and how the bound
follows its error.
"""

import time
from functools import partial

import matplotlib.pyplot as plt
import torch

from geoq import MLP, GeoQ, Training, TrainNetwork

torch.manual_seed(0)
x = 2 * torch.rand(300, 2) - 1


def simulator(x):
    return (torch.sin(4 * x[:, :1]) * torch.exp(x[:, 1:])).float()


recipe = TrainNetwork(partial(MLP, 2, 1, hidden=(64, 64)), training=Training(n_steps=600))
recipe(x[:20], simulator(x[:20]))  # the first training loads libraries
started = time.perf_counter()
network = recipe(x, simulator(x))
one = time.perf_counter() - started
started = time.perf_counter()
estimator = GeoQ(network, recipe).fit(x, simulator(x))
together = time.perf_counter() - started

grid = torch.linspace(-1.4, 1.4, 80)
queries = torch.cartesian_prod(grid, grid)
answer = estimator.assess(queries)
error = abs(simulator(queries) - answer.prediction).detach()
widths = (3, 3, 3, 1.6)
figure, panels = plt.subplots(1, 4, figsize=(12, 3.4), width_ratios=widths, layout="constrained")
style = {"extent": (-1.4, 1.4, -1.4, 1.4), "origin": "lower", "vmin": -4, "vmax": 1}
maps = {"true error": error, "bound": answer.error_hat}
for axes, (name, values) in zip(panels, maps.items(), strict=False):
    shown = axes.imshow(values.log10().reshape(80, 80).T, **style)
    axes.set(title=name, xlabel="input 0")
figure.colorbar(shown, ax=panels[:2], label="power of ten")
panels[2].contourf(grid, grid, answer.safe.reshape(80, 80).T, (0.5, 1), colors="lightblue")
panels[2].set(title="safe (blue)", xlabel="input 0")
panels[0].set(ylabel="input 1")
for axes in panels[:3]:
    axes.plot(*x.T, "w." if axes is not panels[2] else "k.", ms=1)
panels[3].bar(["one", "15 one\nby one", "geoq"], [one, 15 * one, together])
panels[3].set(title="seconds")
plt.show()
