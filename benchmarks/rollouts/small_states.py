"""Coverage of each coordinate at each step: small states, and windows of lags.

    python -m benchmarks.rollouts.small_states           # three or four settings: two minutes on one core
    python -m benchmarks.rollouts.small_states --small   # one setting: seconds

The settings are the Lorenz-63 system, windows of 11 and 31 lags of its first coordinate, and windows of 11 lags of the yearly
sunspot numbers. The last setting is left out if statsmodels, which contains the numbers, is not installed. All copied values of
a window have no error, so the newest value is the one of interest.
"""

import argparse
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rollouts.trusted_horizon import (
    Recipe,
    lorenz63_slope,
    stepping,
)
from geoq import RolloutGeoQ

N_TRAIN, N_FRESH, N_TRANSIENT = 3000, 500, 500
N_SEEDS = 2
STARTS = (40, 200)
SHOWN = (1, 2, 3, 5, 10)


@dataclass(frozen=True)
class Setting:
    """A system, the number of lags in a state, and the number of steps."""

    name: str
    n_lags: int
    n_steps: int
    recipe: Recipe
    load: object
    n_seeds: int = N_SEEDS


def windows(series, n_lags):
    """Windows of lags along the first axis but one; the newest value comes last."""
    return np.lib.stride_tricks.sliding_window_view(series, n_lags, axis=-1).copy()


def lorenz(n_times, seed, n=1):
    """Trajectories on the attractor."""
    step, rng = stepping(lorenz63_slope, 0.02), np.random.default_rng(seed)
    states = [3 * rng.standard_normal((n, 3)) + np.array([0, 0, 20.0])]
    for _ in range(N_TRANSIENT + n_times - 1):
        states.append(step(states[-1]))
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


SETTINGS = (
    Setting("Lorenz-63", 1, 60, Recipe(3), whole_states),
    Setting("Lorenz-63, 11 lags of x", 11, 60, Recipe(1), lags),
    Setting("Lorenz-63, 31 lags of x", 31, 60, Recipe(1), lags),
    Setting("sunspots, 11 lags", 11, 15, Recipe(1, 0, 1e-3), sunspots, 1),
)


def measure(setting, seed, n_starts):
    """The row of one setting, seed and number of calibration rollouts per fold."""
    train, truth = setting.load(setting, seed)
    n_steps = setting.n_steps
    geoq = RolloutGeoQ(None, setting.recipe, n_calibration=n_steps, n_starts=n_starts)
    started = time.perf_counter()
    a = geoq.fit(train).assess(truth[:, 0], n_steps)
    seconds = time.perf_counter() - started
    error = abs(a.prediction - truth[:, 1:])
    covered = (error <= a.error_hat).mean(axis=0)
    inexact = (error > 0).any(axis=0)
    newest = covered[:, -setting.recipe.n_new :].min(axis=1)
    return {
        "method": "GeoQ",
        "setting": setting.name,
        "seed": seed,
        "n_starts": n_starts,
        "n_rollouts": len(geoq.calibration_),
        "n_fresh": len(truth),
        **{f"newest_{n}": float(newest[n - 1]) for n in (*SHOWN, n_steps)},
        "newest_last": float(newest[-1]),
        "least": float(covered[inexact].min()),
        "coverage": float(covered[inexact].mean()),
        "largest_copied": float(a.error_hat[:, ~inexact].max(initial=0.0)),
        "seconds": seconds,
    }


def summary(rows):
    """Markdown table of the means over the seeds; the least coverage is the one of the worst seed."""
    steps = "".join(f" step {n} |" for n in SHOWN)
    lines = [
        f"| state | calibration rollouts |{steps} last | all | least of all steps and coordinates |",
        "|---|---|" + "---|" * (len(SHOWN) + 3),
    ]
    for name, n_starts in dict.fromkeys((r["setting"], r["n_starts"]) for r in rows):
        here = [r for r in rows if (r["setting"], r["n_starts"]) == (name, n_starts)]
        keys = (*(f"newest_{n}" for n in SHOWN), "newest_last", "coverage")
        means = " | ".join(f"{np.mean([r[key] for r in here]):.3f}" for key in keys)
        least = min(r["least"] for r in here)
        lines.append(f"| {name} | {here[0]['n_rollouts']} | {means} | {least:.3f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one setting, one seed")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    settings = [s for s in SETTINGS if s.load is not sunspots]
    if importlib.util.find_spec("statsmodels"):
        settings.append(SETTINGS[-1])
    runs = [(s, seed, n) for s in settings for n in STARTS for seed in range(s.n_seeds)]
    if arguments.small:
        runs = [(SETTINGS[1], 0, STARTS[0])]
    rows = [measure(*run) for run in runs]
    print(summary(rows))
    print(record.write("small_states", rows, arguments.out, quantile=QUANTILE))


if __name__ == "__main__":
    main()
