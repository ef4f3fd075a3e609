"""Bounds of transients and of errors that rise and fall, with the course of the forecast and without it.

    python -m benchmarks.rollouts.transients           # Gray-Scott and Mackey-Glass: five minutes on one core
    python -m benchmarks.rollouts.transients --small   # a short series: seconds

Gray-Scott fields of 2 x 64 cells start from pulses, and new rollouts from four states of new transients. Mackey-Glass is an LSTM of 20
lags on a second series, without the companion. "without the course" is the same calibration without the last refinement of the bound.
Losses count steps with a finite bound, and are relative to the quantiles of the held-out errors of each step and eight cells.
"""

import itertools
from dataclasses import replace

import numpy as np
from torch import nn

from benchmarks.record import QUANTILE
from benchmarks.rollouts.small_states import windows
from benchmarks.rollouts.trusted_horizon import least_squares, pairs
from benchmarks.runs import Benchmark, script
from benchmarks.solvers import runge_kutta, until
from geoq import GroupFolds, RolloutGeoQ, Training, TrainNetwork
from geoq.metrics import coverage, pinball
from geoq.parts import MemberGrowth
from geoq.rollout.features import bounds_along
from geoq.rollout.growth import group_quantiles
from geoq.rollout.horizon import HeldOutRollouts

METHODS, TOLERANCES = ("with the course", "without the course"), (0.1, 0.2)


def reaction(w):
    u, v = w[:, 0], w[:, 1]
    spread = np.array([[0.0524], [0.0262]]) * (np.roll(w, 1, 2) + np.roll(w, -1, 2) - 2 * w)
    return spread + np.stack([0.04 * (1 - u) - u * v**2, u * v**2 - 0.1 * v], axis=1)


def gray_scott(rng, n):
    """Trajectories of both concentrations from one to three pulses, every eighth unit of time."""
    centre, width, size = rng.uniform((0, 0.075, 0.6), (np.pi, 0.25, 1.2), (n, 3, 3)).T[..., None]
    size = size * (np.arange(3)[:, None, None] < rng.integers(1, 4, (n, 1)))
    distance = np.sin(np.arange(64) * np.pi / 64 - centre) / width  # on a circle
    height = (size * np.exp(-(distance**2))).sum(axis=0)
    found = [np.stack([(1 - height / 2).clip(0.05), height / 4], axis=1)]
    for _ in range(60):
        found.append(runge_kutta(reaction, found[-1], 1.0, n_steps=8))
    return np.stack(found, axis=1)


def train_near(segments):
    """Bounded random features of the nearest seven cells, the same weights for all cells."""
    (before, after), rng = pairs(segments), np.random.default_rng(0)
    mean, size = (f(before, axis=(0, 2))[:, None] for f in (np.mean, np.std))
    mixing, offset = 0.15 * rng.standard_normal((14, 120)), rng.standard_normal(120)

    def design(x):
        z = ((x - mean) / size).swapaxes(1, 2)
        near = np.concatenate([np.roll(z, shift, axis=1) for shift in range(-3, 4)], axis=2)
        return np.concatenate([np.tanh(near @ mixing + offset), near, 0 * z[..., :1] + 1], axis=2)

    change = least_squares(design, before, (after - before).swapaxes(1, 2).reshape(-1, 2), 1e-3)
    return lambda x: x + change(x).swapaxes(1, 2)


def mackey_glass(rng, n):
    """Windows of a series with the delay 17, nearly standardised, one value per unit of time."""
    x = [1.2 + 0.2 * rng.standard_normal()] * 170
    for _ in range(10 * (n + 300)):
        x.append(0.99 * x[-1] + 0.02 * x[-170] / (1 + x[-170] ** 10))
    return windows((np.array(x[3170::10]) - 0.9) / 0.23, 20)


class Memory(nn.Module):
    """The change of the newest of some lags."""

    def __init__(self):
        super().__init__()
        self.lags, self.change = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x):
        return self.change(self.lags(x[..., None])[0][:, -1])


def train_lags(segments):
    """An LSTM for the change of the newest value; older values are copied."""
    before, after = pairs(segments)
    training = Training(n_steps=500, batch_size=64, learning_rate=5e-3)
    network = TrainNetwork(Memory, training=training)(before, after[:, -1:] - before[:, -1:])
    return lambda x: np.hstack([x[:, 1:], x[:, -1:] + network(x)])


def fitted_and_truth(problem, seed, *, small):
    """A calibration, and the true states of new rollouts."""
    rngs = [np.random.default_rng([seed, i]) for i in range(2)]
    if problem == "Gray-Scott":
        train, new = gray_scott(rngs[0], 40), gray_scott(rngs[1], 60)
        geoq = RolloutGeoQ(None, train_near, n_calibration=30, folds=GroupFolds(5))
        truth = np.concatenate([new[:, t : t + 31] for t in (0, 6, 14, 25)])
        return geoq.fit([*train], progress=None).fitted_, truth
    train, new = mackey_glass(rngs[0], 500 if small else 1500), mackey_glass(rngs[1], 900)
    bound = MemberGrowth(companion=None)
    geoq = RolloutGeoQ(None, train_lags, n_calibration=100, scheme=bound, output=-1)
    truth = np.stack([new[i : i + 101] for i in range(0, len(new) - 100, 3)])
    return geoq.fit(train, progress=None).fitted_, truth


def measure(problem, seed, wanted, *, small=False):
    """A row for each tolerance, with and without the course."""
    fitted, truth = fitted_and_truth(problem, seed, small=small)
    held_out, rows, n_steps = fitted.held_out, [], truth.shape[1] - 1
    n = len(held_out.error)
    plain = group_quantiles(held_out.error, np.full(n_steps, QUANTILE * (n + 1) / n))
    bound = replace(fitted.bound, course=None)
    known = held_out.error, held_out.supported, held_out.start, QUANTILE
    known = bounds_along(bound, fitted.calibration.features), *known
    other = replace(fitted, bound=bound, held_out=HeldOutRollouts.of(*known))
    for method, tolerance in itertools.product(wanted, TOLERANCES):
        chosen = fitted if method == METHODS[0] else other
        a = chosen.assess(truth[:, 0], n_steps, tolerance, None)
        true = fitted.reference.layout.outputs(truth[:, 1:])
        error, bound = (part.reshape(true.shape) for part in (a.prediction, a.error_hat))
        error, usable = abs(true - error), np.isfinite(bound)
        each = bound, np.broadcast_to(plain, error.shape)
        loss, of_plain = (pinball(error, b, QUANTILE, usable) for b in each)
        kept = until((error <= tolerance).all(axis=2))
        about = {"setting": problem, "method": method, "seed": seed, "tolerance": tolerance}
        scores = {
            "loss": loss / of_plain,
            "kept": float(kept.mean()),
            "trusted": float(a.trusted_horizon.mean()),
            "broken": float((a.trusted_horizon > kept).mean()),
            "coverage": coverage(error, bound),
        }
        rows.append(about | scores)
    return rows


NAMES = ["Gray-Scott", "Mackey-Glass"]
BENCHMARK = Benchmark("transients", NAMES, measure, lambda _: METHODS, (20, 21, 22), NAMES[1:])
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
