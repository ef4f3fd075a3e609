"""Rows of the rollouts on three systems of dysts, forecast by an echo state network and by a GRU.

``make_trajectory(resample=True)`` of dysts chooses a time step that depends on the number of points, so that two trajectories
of different lengths are two different maps. Here the equations of dysts are integrated with one fixed time step.
"""

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.record import QUANTILE
from benchmarks.solvers import runge_kutta, until
from benchmarks.third_party.recurrent import EchoState, train_gru
from benchmarks.third_party.rivals import StepRules, conformal_quantile
from geoq import RolloutGeoQ
from geoq.metrics import pinball

FULL = {"train": 3000, "fresh": 300, "steps": 150, "gru_steps": 600, "starts": 100}
SMALL = {"train": 400, "fresh": 10, "steps": 10, "gru_steps": 2, "starts": 10}
N_WARM, POINTS_PER_PERIOD = 100, 40
# Tolerances in standard deviations of each coordinate.
TOLERANCES = (0.2, 1.0)
OURS, PER_STEP, EXCEEDANCE = "GeoQ", "per-step quantiles", "exceedance quantile"
RULES = {"per_step": PER_STEP, "exceedance": EXCEEDANCE}


@dataclass(frozen=True)
class ChaosCase:
    """A system of ``dysts.flows`` and the model that forecasts it."""

    system: str
    model: str

    @property
    def name(self):
        return f"{self.system}, {self.model}"


CHAOS_CASES = tuple(
    ChaosCase(system, model)
    for system in ("Lorenz", "Rossler", "Halvorsen")
    for model in ("ESN", "GRU")
)


@dataclass(frozen=True)
class Flow:
    """Equations of dysts with a fixed time step, in standard deviations of the attractor."""

    slope: object
    dt: float
    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, name):
        import dysts.flows

        model = getattr(dysts.flows, name)()
        slope, dt = slope_of(model), model.period / POINTS_PER_PERIOD
        states = integrate(slope, np.asarray(model.ic)[None], dt, 5000)[0, 500:]
        return cls(slope, dt, states.mean(axis=0), states.std(axis=0))

    def on_attractor(self, rng, n, n_times):
        """Standardised trajectories after a transient."""
        start = self.mean + 0.3 * self.scale * rng.standard_normal((n, len(self.mean)))
        states = integrate(self.slope, start, self.dt, 500 + n_times)[:, 500:]
        return (states - self.mean) / self.scale


def slope_of(model):
    """The right-hand side for a batch of states."""
    values = [model.params[name] for name in sorted(model.params)]
    return lambda u: np.stack(type(model)._rhs(*u.T, 0.0, *values), axis=-1)


def integrate(slope, start, dt, n_times):
    states = [start]
    for _ in range(n_times - 1):
        states.append(runge_kutta(slope, states[-1], dt / 4, n_steps=4))
    return np.stack(states, axis=1)


def measure(case, seed, sizes):
    """All rows of one case and seed."""
    flow, rng = Flow.of(case.system), np.random.default_rng([seed, 3])
    n_train, n_steps = sizes["train"] + N_WARM, sizes["steps"]
    series = flow.on_attractor(rng, 2, n_train)
    model, train, states, known, training = trained(case, seed, sizes, series)
    settings = {"n_calibration": n_steps, "n_starts": sizes["starts"], "output": model.output}
    geoq = RolloutGeoQ(model, train, **settings)
    started = time.process_time()
    geoq.fit(known, progress=None)
    fitting = time.process_time() - started

    def fresh(trajectories):
        """States at the start of the forecasts, after the warm-up, and the truth."""
        first = np.stack([states(part[: N_WARM + 1])[0] for part in trajectories])
        return first, trajectories[:, N_WARM + 1 :]

    n_times = N_WARM + 1 + n_steps
    start, truth = fresh(flow.on_attractor(rng, sizes["fresh"], n_times))
    spent = {"cost": fitting / training, "training_seconds": training}
    rows = [row | spent for row in rollout_rows(geoq, start, truth, TOLERANCES)]
    return [row | {"setting": case.name, "seed": seed} for row in rows]


def trained(case, seed, sizes, series):
    """The model, its recipe, the function from a series to states, the calibration states, and the seconds of the training."""
    started = time.process_time()
    if case.model == "ESN":
        # The reservoir is fixed and the readout is trained again for each fold.
        recipe = EchoState(series.shape[2], seed=seed)
        known = recipe.states(series[0], N_WARM)
        model = recipe([known])
        seconds = time.process_time() - started
        return model, recipe, lambda s: recipe.states(s, N_WARM), known, seconds
    # The memory of a GRU means something else after each training, so it is calibrated on another series.
    model = train_gru(series[0], n_steps=sizes["gru_steps"], seed=seed)
    seconds = time.process_time() - started

    def states(values):
        return model.states(values)[N_WARM:]

    return model, None, states, states(series[1]), seconds


def rollout_rows(geoq, start, truth, tolerances):
    """Rows of the bounds and, for each tolerance, of the horizons of GeoQ and of two simple rules."""
    n_steps = truth.shape[1]
    answer = geoq.assess(start, n_steps)
    error = abs(answer.prediction - truth)
    held_out = geoq.fitted_.held_out.error.reshape(-1, n_steps, *truth.shape[2:])
    per_step = np.broadcast_to(conformal_quantile(held_out), error.shape)
    # After a rollout has diverged, the bound of GeoQ is infinite: these values are left out of both losses.
    finite = np.isfinite(answer.error_hat) & np.isfinite(error)
    rows = [
        {"method": OURS, **bound_scores(error, answer.error_hat, answer.safe, finite)},
        {"method": PER_STEP, **bound_scores(error, per_step, None, finite)},
    ]
    for tolerance in tolerances:
        kept = until((error <= tolerance).reshape(*error.shape[:2], -1).all(axis=2))
        ratio = (held_out / tolerance).reshape(*held_out.shape[:2], -1).max(axis=2)
        rules = StepRules.fit(ratio)
        trusted = geoq.assess(start, n_steps, tolerance).trusted_horizon
        simple = {m: np.full(len(kept), getattr(rules, rule)) for rule, m in RULES.items()}
        horizons = {OURS: trusted} | simple
        about = {"kind": "horizon", "tolerance": tolerance}
        rows += [{"method": m} | about | horizon_scores(kept, h) for m, h in horizons.items()]
    return rows


def horizon_scores(kept, horizon):
    """For how long rollouts stay within the tolerance, for how long they are trusted, and how often this is too long."""
    means = {"kept": kept.mean(), "trusted": horizon.mean(), "broken": (kept < horizon).mean()}
    return {name: float(value) for name, value in means.items()}


def bound_scores(error, bound, safe, finite):
    """Loss and coverage. A rollout counts as safe if its first step is; safe steps have only safe steps before them."""
    within = error <= bound
    by_rollout = within.reshape(len(within), -1).mean(axis=1)
    found = {
        "kind": "rollout",
        "pinball": pinball(error[finite], bound[finite], QUANTILE),
        "coverage": float(within.mean()),
        "least_coverage": float(within.mean(axis=(0, 1)).min()),
        "whole": float((by_rollout >= QUANTILE).mean()),
        "diverged": float((~finite).any(axis=(1, 2)).mean()),
    }
    if safe is not None:
        supported = np.logical_and.accumulate(safe, axis=1)
        found["safe_fraction"] = float(safe[:, 0].mean())
        known = supported.any()
        found["safe_coverage"] = float(within[supported].mean()) if known else None
    return found
