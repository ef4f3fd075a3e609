"""How often the true error exceeds the tolerance within the trusted horizon, and which initial states are safe.

    python -m benchmarks.rollouts.trusted_horizon           # five systems: five minutes on one core
    python -m benchmarks.rollouts.trusted_horizon --small   # one short system

Every seed has its own training trajectory, a surrogate trained on it, and 300 test rollouts from states of other
trajectories on the attractor. "bound alone" is the number of steps that are safe with a bound within the tolerance. "held
out" is ``RolloutAssessment.trusted_horizon``, which is calibrated on held-out rollouts. "same for all" is the plain rule: the 5 %
quantile of the numbers of steps for which held-out rollouts stay within the tolerance. "root mean square" is the tolerance
``Norm(tolerance)`` of systems whose coordinates are cells. "initial states" are test states that are changed: multiplied, smoothed,
noisy, shifted by half a standard deviation, or with their coordinates in random order.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, script
from benchmarks.solvers import kuramoto_sivashinsky, lorenz63, lorenz96, runge_kutta, until
from geoq import RolloutGeoQ
from geoq.parts import Norm

N_FRESH, N_STEPS = 300, 300
METHODS = ("bound alone", "same for all", "held out", "root mean square", "initial states")


def stepping(slope, dt):
    """One step of dt, for a batch of states."""
    return lambda u: runge_kutta(slope, u, dt, n_steps=1)


def rossler_slope(u):
    x, y, z = np.moveaxis(u, -1, 0)
    return np.stack([-y - z, x + 0.2 * y, 0.2 + z * (x - 5.7)], axis=-1)


def pairs(segments):
    """States and next states of all segments."""
    before = np.concatenate([segment[:-1] for segment in segments])
    return before, np.concatenate([segment[1:] for segment in segments])


def train_mlp(segments):
    """A small network for the step's increment."""
    before, after = pairs(segments)
    mean, scale, step_scale = before.mean(0), before.std(0), (after - before).std(0)
    network = MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=150, random_state=0, tol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit((before - mean) / scale, (after - before) / step_scale)
    return lambda x: x + step_scale * network.predict((x - mean) / scale)


def least_squares(design, inputs, targets, ridge):
    """A linear function of the features ``design(x)``."""
    features = design(inputs)
    features = features.reshape(-1, features.shape[-1])
    gram = features.T @ features + ridge * len(features) * np.eye(features.shape[1])
    weights = np.linalg.solve(gram, features.T @ targets)
    return lambda x: design(x) @ weights


def random_features(inputs, targets, n_features=200, ridge=1e-8):
    """Bounded random features and a linear part of the standardised inputs."""
    mean, scale, rng = inputs.mean(0), inputs.std(0), np.random.default_rng(0)
    mixing = rng.standard_normal((inputs.shape[1], n_features)) / np.sqrt(inputs.shape[1])
    offset = rng.standard_normal(n_features)

    def design(x):
        z = (x - mean) / scale
        return np.hstack([np.tanh(z @ mixing + offset), z, np.ones((len(z), 1))])

    return least_squares(design, inputs, targets, ridge)


def train_local(segments):
    """Bounded random features of each variable's neighbours, the same weights for all variables."""
    rng = np.random.default_rng(0)
    mixing, offset = 0.1 * rng.standard_normal((5, 40)), rng.standard_normal(40)

    def design(x):
        near = np.stack([np.roll(x, shift, axis=1) for shift in (2, 1, 0, -1, -2)], axis=2)
        return np.tanh(near @ mixing + offset)

    before, after = pairs(segments)
    return least_squares(design, before, after.ravel(), 1e-8)


def train_global(segments):
    """Bounded random features of the whole field."""
    rng = np.random.default_rng(0)
    mixing, offset = 0.025 * rng.standard_normal((64, 600)), rng.standard_normal(600)
    return least_squares(lambda x: np.tanh(x @ mixing + offset), *pairs(segments), 1e-9)


@dataclass(frozen=True)
class Recipe:
    """Random features for the change of the ``n_new`` newest values; older values are copied."""

    n_new: int
    n_features: int = 200
    ridge: float = 1e-8

    def __call__(self, segments):
        (before, after), n = pairs(segments), self.n_new
        changes = after[:, -n:] - before[:, -n:]
        change = random_features(before, changes, self.n_features, self.ridge)
        return lambda x: np.hstack([x[:, n:], x[:, -n:] + change(x)])


@dataclass(frozen=True)
class System:
    """A dynamical system, its surrogate and the tolerances; ``start(rng, shape)`` draws states before the transient."""

    name: str
    n_coordinates: int
    step: Callable
    start: Callable
    train: Callable
    tolerances: tuple[float, ...]
    n_seeds: int
    n_train: int = 3000
    n_transient: int = 500
    n_fresh: int = N_FRESH

    def load(self, seed):
        """A training trajectory and test trajectories."""
        rng = np.random.default_rng([seed, 2])
        state = self.start(rng, (1 + self.n_fresh, self.n_coordinates))
        for _ in range(self.n_transient):
            state = self.step(state)
        train, truth = [state[:1]], [state[1:]]
        for _ in range(self.n_train - 1):
            train.append(self.step(train[-1]))
        for _ in range(N_STEPS):
            truth.append(self.step(truth[-1]))
        return np.concatenate(train), np.stack(truth, axis=1)


def around(centre, size=1.0):
    return lambda rng, shape: size * rng.standard_normal(shape) + np.array(centre, float)


def long_waves(rng, shape):
    place = 2 * np.pi * np.arange(shape[1]) / shape[1]
    phase, size = rng.uniform(0, 2 * np.pi, (shape[0], 4, 1)), rng.standard_normal
    modes = np.arange(1, 5)[:, None]
    return (size((shape[0], 4, 1)) * np.cos(modes * place + phase)).sum(axis=1)


_L63, _L96 = stepping(lorenz63, 0.02), stepping(lorenz96, 0.05)
_KS = partial(kuramoto_sivashinsky, time=0.25, n_steps=5)
_SPIRAL, _FEATURES = stepping(rossler_slope, 0.1), Recipe(3, n_features=100, ridge=1e-6)
_SYSTEMS = (
    System("Lorenz-63", 3, _L63, around((0, 0, 20), 3), train_mlp, (1.0, 5.0, 15.0), 6),
    System("Roessler", 3, _SPIRAL, around(1, 0.5), _FEATURES, (0.5, 2.0, 5.0), 4),
    System("Lorenz-96, 10 variables", 10, _L96, around(8), train_mlp, (1.0, 4.0, 8.0), 3),
    System("Lorenz-96", 40, _L96, around(8), train_local, (1.0, 3.0, 6.0), 4, 1600),
    System(
        "Kuramoto-Sivashinsky", 64, _KS, long_waves, train_global, (0.5, 1.0, 2.0), 3, 2000, 800
    ),
)
SYSTEMS = {system.name: system for system in _SYSTEMS}
# The systems whose coordinates are cells, and the numbers of changed initial states and of their steps.
ON_A_GRID = ("Lorenz-96", "Kuramoto-Sivashinsky")
N_SHIFTED, N_SHIFTED_STEPS = 200, 20


def shifts(x, size, rng):
    """Changed initial states by the name of the change."""
    return {
        "none": x,
        "moved along the line": np.roll(x, 7, axis=1),
        "smoothed": (np.roll(x, 1, axis=1) + 2 * x + np.roll(x, -1, axis=1)) / 4,
        **{f"multiplied by {factor:g}": factor * x for factor in (0.7, 1.1, 1.5, 3)},
        "shifted": x + 0.5 * size,
        "noise of 0.2": x + 0.2 * size * rng.standard_normal(x.shape),
        "random order": rng.permuted(x, axis=1),
    }


def steps_for_all(held_out, tolerance):
    """The plain rule: a number of steps that 95 % of the held-out rollouts stay within the tolerance."""
    kept = until((held_out.error <= tolerance).all(axis=2))
    kept[kept >= held_out.supported] = N_STEPS
    return np.sort(kept)[int((1 - QUANTILE) * len(kept))]


def shifted_rows(system, seed, geoq, train, x0):
    """Rows of one system and seed: the fraction of safe initial states and their coverage, one per change."""
    size, rng, rows = train.std(), np.random.default_rng(seed), []
    for name, state in shifts(x0[:N_SHIFTED], size, rng).items():
        a, truth = geoq.assess(state, N_SHIFTED_STEPS), [state]
        for _ in range(N_SHIFTED_STEPS):
            truth.append(system.step(truth[-1]))
        error = abs(np.stack(truth[1:], axis=1) - a.prediction)
        error = np.nan_to_num(error, nan=np.inf)
        covered, safe = (error <= a.error_hat).mean(axis=(1, 2)), a.safe[:, 0]
        about = {"method": METHODS[4], "setting": system.name, "origin": name, "seed": seed}
        scores = {
            "safe_fraction": float(safe.mean()),
            "error": float(np.median(error[:, 0].mean(axis=1))),
            "coverage": float(covered.mean()),
            "n_safe": int(safe.sum()),
            "covered_safe": float((covered * safe).sum()),
        }
        rows.append(about | scores)
    return rows


def measure(problem, seed, wanted, *, small=False):
    """Rows of one system and seed: one per tolerance and rule, and one per change of the initial states."""
    del wanted  # all rows come from one fit
    system = SYSTEMS[problem]
    system = replace(system, n_fresh=40) if small else system
    train, truth = system.load(seed)
    geoq = RolloutGeoQ(None, system.train).fit(train, progress=None)
    held_out, rows = geoq.fitted_.held_out, []
    for tolerance in system.tolerances:
        a = geoq.assess(truth[:, 0], N_STEPS, tolerance)
        error = abs(truth[:, 1:] - a.prediction)
        held = until((error <= tolerance).all(axis=2))
        same = np.minimum(steps_for_all(held_out, tolerance), a.supported_horizon)
        alone = until(a.safe & (a.error_hat <= tolerance).all(axis=2))
        found = [(a, held, horizon) for horizon in (alone, same, a.trusted_horizon)]
        if problem in ON_A_GRID:
            b = geoq.assess(truth[:, 0], N_STEPS, Norm(tolerance))
            found.append((b, until(b.trust.tolerance.over(error) <= 1), b.trusted_horizon))
        for method, (a, held, horizon) in zip(METHODS, found, strict=False):
            about = {"method": method, "setting": problem, "seed": seed, "tolerance": tolerance}
            scores = {
                "broken": float((held < horizon).mean()),
                "nominal": a.trust.broken,
                "mean_horizon": float(horizon.mean()),
                "mean_held": float(held.mean()),
                "limit": a.trust.limit,
                "n_apart": a.trust.n_apart,
                "coverage": float((error <= a.error_hat).mean()),
            }
            rows.append(about | scores)
    if system.name in ON_A_GRID:
        rows += shifted_rows(system, seed, geoq, train, truth[:, 0])
    return rows


SEEDS = {name: range(system.n_seeds) for name, system in SYSTEMS.items()}
BENCHMARK = Benchmark(
    "trusted_horizon", list(SYSTEMS), measure, lambda _: METHODS[:3], SEEDS, ("Lorenz-96",)
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
