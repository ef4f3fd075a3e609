"""Trajectories of the Henon map, an instant surrogate for them, and estimators that the tests of rollouts share."""

from functools import cache, partial

import numpy as np

from geoq import RolloutGeoQ


def henon(n_states, seed=0):
    """A trajectory on the attractor, in the order of time."""
    x, y = 0.1 * np.random.default_rng(seed).random(2)
    states = []
    for step in range(n_states + 100):
        x, y = 1 - 1.4 * x**2 + y, 0.3 * x
        if step >= 100:
            states.append((x, y))
    return np.array(states)


def analogue(segments):
    """The successor of the nearest training state: instant, bounded, and with errors that grow along a rollout."""
    before = np.concatenate([np.asarray(segment[:-1]) for segment in segments])
    after = np.concatenate([np.asarray(segment[1:]) for segment in segments])

    def step(x):
        flat, stored = np.asarray(x).reshape(len(x), 1, -1), before.reshape(1, len(before), -1)
        answer = after[((flat - stored) ** 2).sum(2).argmin(1)]
        return answer if isinstance(x, np.ndarray) else x.new_tensor(answer)

    return step


STATES = henon(900)
TRAINING, QUERIES = STATES[:700], STATES[700:720]
STEP = analogue([TRAINING])
small = partial(RolloutGeoQ, n_calibration=40, n_starts=20, n_support=5)


@cache
def fitted():
    """The default estimator, fitted once for all tests; do not change it."""
    return small(None, analogue).fit(TRAINING)


def truth_of(states, first, n, n_steps):
    """The true states after n states from the first one on, for each step."""
    return np.stack([states[first + k : first + n + k] for k in range(1, n_steps + 1)], axis=1)


def same_answers(one, other):
    a, b = (estimator.assess(QUERIES, 50, tolerance=0.5) for estimator in (one, other))
    for name in ("error_hat", "support_score", "trusted_horizon"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.trust == b.trust
    assert a.reason(0) == b.reason(0)


# A forced pendulum


def pendulum(state, forcing):
    """One step of a damped pendulum; the second value of the forcing is a constant parameter, the damping."""
    angle, speed = state[..., 0], state[..., 1]
    force, damping = forcing[..., 0], forcing[..., 1]
    speed = speed + 0.2 * (force - np.sin(angle) - damping * speed)
    return np.stack([angle + 0.2 * speed, speed], axis=-1)


def driven(n_trajectories, n_times, seed, *, size=1.0):
    """Trajectories with a random force and their own damping, and the forcing."""
    rng = np.random.default_rng(seed)
    states = rng.uniform(-1, 1, (n_trajectories, n_times, 2))
    forcing = size * rng.uniform(-1, 1, (n_trajectories, n_times, 2))
    forcing[..., 1] = rng.uniform(0.2, 0.6, (n_trajectories, 1))
    for t in range(n_times - 1):
        states[:, t + 1] = pendulum(states[:, t], forcing[:, t])
    return states, forcing


def train_forced(segments):
    """A linear step of the state and the forcing, which errs by the nonlinearity of the sine."""
    before = np.concatenate([np.hstack([s[:-1], f[:-1]]) for s, f in segments])
    after = np.concatenate([s[1:] for s, _ in segments])
    matrix = np.linalg.lstsq(before, after)[0]
    return lambda state, forcing: np.hstack([state, forcing]) @ matrix
