"""Forced rollouts: an oscillator with a random force, and Lorenz-63 with a parameter of its own in every trajectory.

    python -m benchmarks.rollouts.forced           # two systems, three seeds: a minute on one core
    python -m benchmarks.rollouts.forced --small   # one system, one seed: seconds

Every seed has its own training trajectories and 300 new rollouts per setting. In the shifted settings the force is twice as
large, and the parameter lies outside its range in the data. Random features are the surrogate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.rollouts.trusted_horizon import random_features
from benchmarks.runs import Benchmark, script
from benchmarks.solvers import lorenz63, runge_kutta, until
from geoq import RolloutGeoQ

N_RUNS, N_TIMES, N_FRESH, N_STEPS, N_TRANSIENT = 25, 300, 300, 60, 200
LOW, HIGH = 24.0, 34.0


def duffing(u, f):
    x, v = u[..., 0], u[..., 1]
    return np.stack([v, x - x**3 - 0.3 * v + f[..., 0]], axis=-1)


def lorenz(u, rho):
    return lorenz63(u, rho[..., 0])


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
        states = [np.array(self.start) + rng.standard_normal((len(forcing), len(self.start)))]
        for t in range(forcing.shape[1] - 1):

            def slope(u, f=forcing[:, t]):
                return self.slope(u, f)

            states.append(runge_kutta(slope, states[-1], self.dt, n_steps=1))
        return np.stack(states, axis=1)[:, N_TRANSIENT:], forcing[:, N_TRANSIENT:]


_STRONGER = {"force x 2": partial(random_force, size=2.0)}
_RHO = {"rho from 34 to 36": (34.01, 36.0), "rho from 38 to 40": (38.0, 40.0)}
_RHO = {name: partial(constant, low=low, high=high) for name, (low, high) in _RHO.items()}
_OSCILLATOR, _ATTRACTOR = "Duffing oscillator, random force", "Lorenz-63, rho of each trajectory"
SYSTEMS = {
    _OSCILLATOR: System(_OSCILLATOR, duffing, 0.1, (0.0, 0.0), 0.3, random_force, _STRONGER),
    _ATTRACTOR: System(_ATTRACTOR, lorenz, 0.02, (0.0, 0.0, 25.0), 0.5, constant, _RHO),
}


def train(segments):
    """Random features of the state and the forcing for the change of the state."""
    before = np.concatenate([np.hstack([u[:-1], f[:-1]]) for u, f in segments])
    change = np.concatenate([np.diff(u, axis=0) for u, _ in segments])
    of_both = random_features(before, change, 150)
    return lambda u, f: u + of_both(np.hstack([u, f]))


def measure(problem, seed, wanted, *, small=False):
    """One row for the data's own forcing and one for each shifted forcing."""
    del wanted, small
    system, rng = SYSTEMS[problem], np.random.default_rng([seed, 1])
    forcing = system.forcing(rng, N_RUNS, N_TRANSIENT + N_TIMES)
    states, given = system.trajectories(rng, forcing)
    geoq = RolloutGeoQ(None, train, n_calibration=N_STEPS)
    geoq.fit([*states], forcing=[*given], progress=None)
    rows = []
    for name, draw in {"as in the data": system.forcing, **system.shifts}.items():
        drawn = draw(rng, N_FRESH, N_TRANSIENT + N_STEPS + 1)
        truth, along = system.trajectories(rng, drawn)
        a = geoq.assess(truth[:, 0], N_STEPS, system.tolerance, forcing=along[:, :-1])
        error = abs(truth[:, 1:] - a.prediction)
        covered = error <= a.error_hat
        kept = until((error <= system.tolerance).all(axis=2))
        by_coordinate = covered.mean(axis=(0, 1))
        about = {"method": "GeoQ", "setting": problem, "forcing": name, "seed": seed}
        scores = {
            "least": float(by_coordinate.min()),
            "most": float(by_coordinate.max()),
            "safe": float(a.safe.mean()),
            "safe_coverage": float(covered[a.safe].mean()) if a.safe.any() else None,
            "trusted": float(a.trusted_horizon.mean()),
            "kept": float(kept.mean()),
            "broken": float((a.trusted_horizon > kept).mean()),
        }
        rows.append(about | scores)
    return rows


BENCHMARK = Benchmark(
    "forced", list(SYSTEMS), measure, lambda _: ["GeoQ"], range(3), list(SYSTEMS)[:1]
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
