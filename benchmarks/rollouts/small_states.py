"""Coverage of each coordinate at each step: small states, and windows of lags.

    python -m benchmarks.rollouts.small_states           # three or four settings: two minutes on one core
    python -m benchmarks.rollouts.small_states --small   # one setting: seconds

The settings are the Lorenz-63 system, windows of 11 and 31 lags of its first coordinate, and windows of 11 lags of the yearly
sunspot numbers. The last setting is left out if statsmodels, which contains the numbers, is not installed. All copied values of
a window have no error, so the newest value is the one of interest.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollouts.trusted_horizon import Recipe, around
from benchmarks.runs import Benchmark, script
from benchmarks.solvers import lorenz63, runge_kutta
from geoq import RolloutGeoQ

N_TRAIN, N_FRESH, N_TRANSIENT = 3000, 500, 500
STARTS = (40, 200)
SHOWN = (1, 2, 3, 5, 10)


@dataclass(frozen=True)
class Setting:
    """A system, the number of lags in a state, and the number of steps."""

    n_lags: int
    n_steps: int
    recipe: Recipe
    load: object
    n_seeds: int = 2


def windows(series, n_lags):
    """Windows of lags along the first axis but one; the newest value comes last."""
    return np.lib.stride_tricks.sliding_window_view(series, n_lags, axis=-1).copy()


def lorenz(n_times, seed, n=1):
    """Trajectories on the attractor."""
    states = [around((0, 0, 20), 3)(np.random.default_rng(seed), (n, 3))]
    for _ in range(N_TRANSIENT + n_times - 1):
        states.append(runge_kutta(lorenz63, states[-1], 0.02, 1))
    return np.stack(states[N_TRANSIENT:], axis=1)


def whole_states(setting, seed):
    train = lorenz(N_TRAIN, [seed, 1])[0]
    return train, lorenz(setting.n_steps + 1, [seed, 2], N_FRESH)


def lags(setting, seed):
    n_times = setting.n_steps + setting.n_lags
    train, fresh = lorenz(N_TRAIN, [seed, 1])[0], lorenz(n_times, [seed, 2], N_FRESH)
    return windows(train[:, 0], setting.n_lags), windows(fresh[..., 0], setting.n_lags)


def sunspots(setting, seed):
    """The first 220 years for the fit, rollouts in the other years."""
    del seed
    folder = Path(importlib.util.find_spec("statsmodels").submodule_search_locations[0])
    file = folder / "datasets" / "sunspots" / "sunspots.csv"
    numbers = np.loadtxt(file, delimiter=",", skiprows=1, usecols=1)
    states = windows(numbers, setting.n_lags)
    fresh = states[220 - setting.n_lags :]
    starts = range(len(fresh) - setting.n_steps)
    rollouts = [fresh[start : start + setting.n_steps + 1] for start in starts]
    return states[: 220 - setting.n_lags], np.stack(rollouts)


SETTINGS = {
    "Lorenz-63": Setting(1, 60, Recipe(3), whole_states),
    "Lorenz-63, 11 lags of x": Setting(11, 60, Recipe(1), lags),
    "Lorenz-63, 31 lags of x": Setting(31, 60, Recipe(1), lags),
    "sunspots, 11 lags": Setting(11, 15, Recipe(1, 0, 1e-3), sunspots, 1),
}


def measure(problem, seed, wanted, *, small=False):
    """The rows of one setting and seed: one per number of calibration rollouts of a fold."""
    del wanted
    return [row(problem, seed, n_starts) for n_starts in (STARTS[:1] if small else STARTS)]


def row(problem, seed, n_starts):
    setting = SETTINGS[problem]
    train, truth = setting.load(setting, seed)
    n_steps = setting.n_steps
    geoq = RolloutGeoQ(None, setting.recipe, n_calibration=n_steps, n_starts=n_starts)
    a = geoq.fit(train, progress=None).assess(truth[:, 0], n_steps)
    error = abs(a.prediction - truth[:, 1:])
    covered = (error <= a.error_hat).mean(axis=0)
    inexact = (error > 0).any(axis=0)
    newest = covered[:, -setting.recipe.n_new :].min(axis=1)
    return {
        "method": "GeoQ",
        "setting": problem,
        "seed": seed,
        "n_starts": n_starts,
        "n_rollouts": len(geoq.fitted_.calibration),
        **{f"newest_{n}": float(newest[n - 1]) for n in (*SHOWN, n_steps)},
        "newest_last": float(newest[-1]),
        "least": float(covered[inexact].min()),
        "coverage": float(covered[inexact].mean()),
    }


SEEDS = {name: range(setting.n_seeds) for name, setting in SETTINGS.items()}
NAMES = list(SETTINGS)
BENCHMARK = Benchmark("small_states", NAMES, measure, lambda _: ["GeoQ"], SEEDS, NAMES[1:2])
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
