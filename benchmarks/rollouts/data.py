"""Snapshots of the Kuramoto-Sivashinsky equation, and the recipe of the network that steps it."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.solvers import kuramoto_sivashinsky
from geoq import MLP, Training, TrainRollout

LENGTH, N_POINTS, INNER_STEP, TRANSIENT = 22.0, 64, 0.05, 200.0
HIDDEN, N_ENCODER_LAYERS = (128, 128, 16, 128, 128), 3


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are the paper's."""

    n_train: int = 4000
    n_calibration: int = 300
    n_test: int = 600
    n_starts: int = 40
    initial_states: tuple[int, ...] = tuple(range(0, 800, 80))
    n_gp_searched: int = 800
    n_gp_starts: int = 10
    n_gp_samples: int = 20
    n_passes: int = 20
    n_members: int = 5
    training: Training = field(default_factory=lambda: Training(n_steps=5000, patience=30))
    fine_tuning: Training = field(
        default_factory=lambda: Training(n_steps=500, learning_rate=3e-4, check_every=50)
    )
    increment_training: Training | None = None
    n_member_jobs: int = 3


_SIZES = {"n_train": 400, "n_calibration": 30, "n_test": 60, "n_starts": 5, "n_member_jobs": 1}
_SIZES |= {"n_gp_searched": 60, "n_gp_starts": 5, "n_gp_samples": 4, "n_passes": 4, "n_members": 2}
_SIZES["increment_training"] = Training(n_steps=20, batch_size=16, check_every=10)
SMALL = Settings(
    **_SIZES,
    initial_states=(0, 10, 20),
    training=Training(n_steps=40, check_every=20),
    fine_tuning=Training(n_steps=10, check_every=10),
)


def later(u, time, step=INNER_STEP, length=LENGTH):
    """States after a time, computed with steps of about ``step``."""
    return kuramoto_sivashinsky(u, time, max(1, round(time / step)), length)


def snapshots(dt, seed, n_snapshots):
    """A trajectory on the attractor; it starts from random long waves, and the transient is dropped."""
    rng = np.random.default_rng([seed, 1])
    place = 2 * np.pi * np.arange(N_POINTS) / N_POINTS
    state = 0
    for mode in range(1, 5):
        state += rng.standard_normal() * np.cos(mode * place + rng.uniform(0, 2 * np.pi))
    states = [later(state, TRANSIENT)]
    for _ in range(n_snapshots - 1):
        states.append(later(states[-1], dt))
    return np.array(states)


@dataclass(frozen=True)
class Data:
    """Training snapshots, later initial states, and the true rollouts from these."""

    train: np.ndarray
    x0: np.ndarray
    truth: np.ndarray


def load(dt, seed, settings):
    n_required = settings.n_train + settings.initial_states[-1] + settings.n_test + 1
    u = snapshots(dt, seed, n_required)
    train = u[: settings.n_train]
    u = (u - train.min()) / (train.max() - train.min())
    first = settings.n_train + np.array(settings.initial_states)
    ahead = first[:, None] + np.arange(1, settings.n_test + 1)
    return Data(u[: settings.n_train], u[first], u[ahead])


def network(dropout=0.0):
    sizes = {"hidden": HIDDEN, "n_encoder_layers": N_ENCODER_LAYERS}
    return MLP(N_POINTS, N_POINTS, **sizes, dropout=dropout)


def recipe_of(settings, seed, dropout=0.0):
    training = replace(settings.training, random_state=seed)
    make = partial(network, dropout)
    return TrainRollout(make, training=training, fine_tuning=settings.fine_tuning)
