"""Forced rollouts: an oscillator with a random force, and Lorenz-63 with a parameter of its own in every trajectory.

    python -m benchmarks.rollouts.forced           # two systems, three seeds: a minute on one core
    python -m benchmarks.rollouts.forced --small   # one system, one seed: seconds

Every seed has its own training trajectories and 300 new rollouts per setting. In the shifted settings the force is twice as
large, and the parameter lies outside its range in the data. Random features are the surrogate.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rollouts.trusted_horizon import least_squares
from benchmarks.solvers import runge_kutta
from geoq import RolloutGeoQ

N_RUNS, N_TIMES, N_FRESH, N_STEPS, N_TRANSIENT = 25, 300, 300, 60, 200
N_SEEDS = 3
LOW, HIGH = 24.0, 34.0


def duffing(u, f):
    x, v = u[..., 0], u[..., 1]
    return np.stack([v, x - x**3 - 0.3 * v + f[..., 0]], axis=-1)


def lorenz(u, rho):
    x, y, z = np.moveaxis(u, -1, 0)
    change = 10 * (y - x), x * (rho[..., 0] - z) - y, x * y - 8 / 3 * z
    return np.stack(change, axis=-1)


def random_force(rng, n, n_times, size=1.0):
    """A first-order autoregressive process, cut at 1.2."""
    force = np.zeros((n, n_times, 1))
    for t in range(1, n_times):
        noise = 0.5 * np.sqrt(1 - 0.9**2) * rng.standard_normal((n, 1))
        force[:, t] = 0.9 * force[:, t - 1] + noise
    return size * force.clip(-1.2, 1.2)


def constant(rng, n, n_times, low=LOW, high=HIGH):
    return np.repeat(rng.uniform(low, high, (n, 1, 1)), n_times, axis=1)


@dataclass(frozen=True)
class System:
    """A driven system: slope, time step, forcing in the data, shifted forcing and tolerance."""

    name: str
    slope: Callable
    dt: float
    start: tuple[float, ...]
    tolerance: float
    forcing: Callable
    shifts: dict[str, Callable]

    def trajectories(self, rng, forcing):
        """States after the transient, and their forcing."""
        states = [
            np.array(self.start) + rng.standard_normal((len(forcing), len(self.start)))
        ]
        for t in range(forcing.shape[1] - 1):

            def slope(u, f=forcing[:, t]):
                return self.slope(u, f)

            states.append(runge_kutta(slope, states[-1], self.dt, n_steps=1))
        return np.stack(states, axis=1)[:, N_TRANSIENT:], forcing[:, N_TRANSIENT:]


SYSTEMS = (
    System(
        "Duffing oscillator, random force",
        duffing,
        0.1,
        (0.0, 0.0),
        0.3,
        random_force,
        {"force x 2": lambda rng, n, n_times: random_force(rng, n, n_times, 2.0)},
    ),
    System(
        "Lorenz-63, rho of each trajectory",
        lorenz,
        0.02,
        (0.0, 0.0, 25.0),
        0.5,
        constant,
        {
            "rho from 34 to 36": lambda *size: constant(*size, 34.01, 36.0),
            "rho from 38 to 40": lambda *size: constant(*size, 38.0, 40.0),
        },
    ),
)


def train(segments):
    """Random features of the state and the forcing for the change of the state."""
    before = np.concatenate([np.hstack([u[:-1], f[:-1]]) for u, f in segments])
    change = np.concatenate([np.diff(u, axis=0) for u, _ in segments])
    mean, scale, rng = before.mean(0), before.std(0), np.random.default_rng(0)
    mixing = rng.standard_normal((before.shape[1], 150)) / np.sqrt(before.shape[1])
    offset = rng.standard_normal(150)

    def design(x):
        z = (x - mean) / scale
        return np.hstack([np.tanh(z @ mixing + offset), z, np.ones((len(z), 1))])

    weights = least_squares(design(before), change, 1e-8)
    return lambda u, f: u + design(np.hstack([u, f])) @ weights


def measure(system, seed):
    """One row for the data's own forcing and one for each shifted forcing."""
    rng = np.random.default_rng([seed, 1])
    forcing = system.forcing(rng, N_RUNS, N_TRANSIENT + N_TIMES)
    states, given = system.trajectories(rng, forcing)
    geoq = RolloutGeoQ(None, train, n_calibration=N_STEPS)
    geoq.fit([*states], forcing=[*given])
    rows = []
    for name, draw in {"as in the data": system.forcing, **system.shifts}.items():
        drawn = draw(rng, N_FRESH, N_TRANSIENT + N_STEPS + 1)
        truth, along = system.trajectories(rng, drawn)
        a = geoq.assess(truth[:, 0], N_STEPS, system.tolerance, forcing=along[:, :-1])
        error = abs(truth[:, 1:] - a.prediction)
        covered = error <= a.error_hat
        kept = (~(error > system.tolerance).any(axis=2)).cumprod(axis=1).sum(axis=1)
        by_coordinate = covered.mean(axis=(0, 1))
        rows.append(
            {
                "method": "GeoQ",
                "setting": system.name,
                "forcing": name,
                "seed": seed,
                "coverage": float(covered.mean()),
                "least": float(by_coordinate.min()),
                "most": float(by_coordinate.max()),
                "safe": float(a.safe.mean()),
                "safe_coverage": float(covered[a.safe].mean())
                if a.safe.any()
                else None,
                "supported": float(a.supported_horizon.mean()),
                "trusted": float(a.trusted_horizon.mean()),
                "kept": float(kept.mean()),
                "broken": float((a.trusted_horizon > kept).mean()),
            }
        )
    return rows


def summary(rows):
    """Markdown table of the means over the seeds; coverage of the coordinates from the least to the largest."""
    lines = [
        "| system | forcing | coverage of the coordinates | safe steps | coverage in safe steps | trusted steps | steps within the tolerance | broken |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting, forcing in dict.fromkeys((r["setting"], r["forcing"]) for r in rows):
        here = [r for r in rows if (r["setting"], r["forcing"]) == (setting, forcing)]
        mean = {
            key: np.mean([r[key] for r in here]) for key in here[0] if key in NUMBERS
        }
        inside = [r["safe_coverage"] for r in here if r["safe_coverage"] is not None]
        safe = f"{np.mean(inside):.3f}" if inside else "-"
        lines.append(
            f"| {setting} | {forcing} | {mean['least']:.3f} to {mean['most']:.3f} | {mean['safe']:.3f} | {safe} | {mean['trusted']:.1f} | "
            f"{mean['kept']:.1f} | {mean['broken']:.3f} |"
        )
    return "\n".join(lines)


NUMBERS = ("least", "most", "safe", "trusted", "kept", "broken")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one system, one seed")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    runs = [(system, seed) for system in SYSTEMS for seed in range(N_SEEDS)]
    if arguments.small:
        runs = runs[:1]
    rows = [row for run in runs for row in measure(*run)]
    print(summary(rows))
    print(record.write("forced", rows, arguments.out, quantile=QUANTILE))


if __name__ == "__main__":
    main()
