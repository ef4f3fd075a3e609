r"""Members of a forecast: rollouts from the same initial state, with held-out errors of single steps added at every step.

.. math:: u^m_0 = u, \quad u^m_{n+1} = G(u^m_n) \pm r_i \Bigl(\frac{\Delta d(\widehat u_n)}{\Delta d(u_i)}\Bigr)^\alpha

Here G is a model of one step, the surrogate or a companion, and r_i its signed error at a held-out state u_i. Errors grow with
the support distance (eq:dd): :math:`\alpha` is the slope of :math:`\log |r_i|` on :math:`\log \Delta d(u_i)`. Errors of
consecutive steps are alike, so a member receives runs of errors at consecutive states. All forecasts receive the same errors,
so that an answer does not depend on the other rows of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat, restore
from geoq.data.coordinates import Coordinates
from geoq.neighbors import Neighbors
from geoq.rollout.companion import RidgeStep
from geoq.rollout.features import Reference
from geoq.rollout.series import DataRange, PerStep, Rollouts, Series, roll_out
from geoq.surrogate import answers_of

# The support distances of rows along rollouts.
Distance: TypeAlias = Callable[[Rollouts], PerStep]
# The number of consecutive errors that a member receives, and of states after each start whose errors are measured.
BLOCK, N_MEASURED = 5, 20
LEAST = 1e-12


def distance_to(points: np.ndarray, nu: Coordinates, n_support: int) -> Distance:
    """The support distance from these points in the coordinates nu; infinite for rows that are nan."""
    known = Neighbors(flat(points))

    def distance(rows: Rollouts) -> PerStep:
        each = rows.reshape(-1, *rows.shape[2:])
        found, usable = np.full(len(each), np.inf), np.isfinite(flat(each)).all(axis=1)
        found[usable] = known.nearest(flat(nu(each[usable])), n_support)[0].mean(axis=1)
        return found.reshape(rows.shape[:2])

    return distance


@dataclass(frozen=True)
class Noise:
    """What is added to each member at each step at a support distance of 1, and the exponent of this distance."""

    unit: Float[np.ndarray, " n_members n_steps n_values"]
    exponent: float

    @staticmethod
    def of(errors: np.ndarray, distance: PerStep, n_members: int, n_steps: int) -> "Noise":
        """Random runs of errors for each member; two members that follow one another have opposite noise."""
        size, distance = np.sqrt((errors**2).mean(axis=2)), distance.clip(min=LEAST)
        known, x = size > 0, np.log(distance)
        varies = known.any() and np.ptp(x[known]) > 1e-6
        slope = np.polyfit(x[known], np.log(size[known]), 1)[0] if varies else 0.0
        exponent, (n, width), rng = (
            min(max(float(slope), 0.0), 3.0),
            size.shape,
            np.random.default_rng(0),
        )
        block = min(BLOCK, width)
        draws = -(-n_members // 2), -(-n_steps // block), 1
        row, first = rng.integers(n, size=draws), rng.integers(width - block + 1, size=draws)
        unit = (errors / distance[..., None] ** exponent)[row, first + np.arange(block)]
        runs = rng.choice([-1.0, 1.0], size=(*draws, 1)) * unit
        pairs = np.stack([runs, -runs], axis=1).reshape(2 * draws[0], draws[1] * block, -1)
        return Noise(pairs[:n_members, :n_steps], exponent)


@dataclass(frozen=True)
class Source:
    """A model that simulates members; None is the surrogate.

    ``step_error`` is the quadratic mean of the held-out errors of single steps, in standard deviations, and ``furthest`` the
    largest support distance that the noise grows up to.
    """

    model: RidgeStep | None
    noise: Noise
    step_error: float
    furthest: float

    def members(
        self, step: Any, rows: Rollouts, distance: PerStep, reference: Reference, like: Any
    ) -> Float[np.ndarray, " 2 n n_steps n_outputs"]:
        """What the members say of the outputs of forecasts, see ``simulate``; the surrogate is ``step``."""
        step, own = (step, True) if self.model is None else (self.model, False)
        along = distance[:, ::BLOCK].clip(max=self.furthest)
        found = simulate(step, rows, self.noise, along, reference.range, like, own=own)
        return np.stack([reference.layout.outputs(part) for part in found])


@dataclass(frozen=True)
class Held:
    """Held-out rollouts: the data, the rows they start from, their range, the number of values of a state and of members."""

    series: Series
    start: np.ndarray
    range: DataRange
    n_values: int
    n_members: int

    def measured(self, n_steps: int) -> np.ndarray:
        """The rows at which errors of single steps are measured."""
        return self.start[:, None] + np.arange(min(n_steps, N_MEASURED))

    def members(
        self, step: Any, rolled: Rollouts, distance: Distance, *, own: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Signed errors of single steps of a model that has not seen these states, and what its members say of the rollouts.

        The noise of these members are the same errors: a fold can be computed where the errors of other folds are not known.
        """
        n_steps, row = rolled.shape[1] - 1, rolled.shape[2:]
        places, rows = self.measured(n_steps), self.series.rows
        single = roll_out(step, self.series.native(places.reshape(-1)), 1, np.inf)[:, 1]
        errors = rows[places + 1] - single.reshape(*places.shape, *row)
        known = finite(errors, self.n_values)
        noise, inside = (
            Noise.of(known, distance(rows[places]), self.n_members, n_steps),
            self.range.cut(rolled),
        )
        along = distance(inside[:, :n_steps:BLOCK])
        return errors, simulate(step, inside, noise, along, self.range, self.series.like, own=own)


def finite(errors: np.ndarray, n_values: int) -> np.ndarray:
    """The errors of the first values of rows; an error that is not finite counts as none."""
    errors = errors.reshape(*errors.shape[:2], -1)[..., :n_values]
    return np.where(np.isfinite(errors), errors, 0.0)


def simulate(
    step: Any,
    rows: Rollouts,
    noise: Noise,
    distance: Float[np.ndarray, " n n_blocks"],
    around: DataRange,
    like: Any,
    *,
    own: bool,
) -> Float[np.ndarray, " 2 n n_steps *row"]:
    """What members say of forecasts: the distance of their mean from the forecast, and their standard deviation.

    If they are of the forecast's ``own`` model, it is zero and their mean distance from the forecast. Both are 0 after the
    forecast has diverged, where its rows are nan. The distances are from every ``BLOCK``-th row. The rows contain the
    initial ones and the forcing. Members stay within the range of the data, extended by its width.
    """
    n, n_times, *row = rows.shape
    n_members, n_known, n_values = noise.unit.shape
    base = rows.reshape(n, n_times, -1)
    edges = (around.least - around.width).reshape(-1), (around.most + around.width).reshape(-1)
    found = np.zeros((2, n, n_times - 1, base.shape[2]))
    alive, u = np.arange(n), base[:, 0].repeat(n_members, axis=0)
    for t in range(min(n_times - 1, n_known)):
        still = np.isfinite(base[alive, t + 1]).all(axis=1)
        alive, u = alive[still], u[still.repeat(n_members)]
        if not len(alive):
            break
        after = answers_of(step, restore(u.reshape(-1, *row), like), "surrogate")
        forecast, each = base[alive, None, t + 1], after.reshape(len(alive), n_members, -1)
        size = (distance[alive, t // BLOCK] ** noise.exponent)[:, None, None]
        added = each[..., :n_values] + size * noise.unit[:, t]
        given = np.broadcast_to(forecast, each.shape)[..., n_values:]
        each = np.concatenate([added, given], axis=2)
        each = np.where(np.isnan(each), forecast, each).clip(*edges)
        each = np.where(np.isinf(each), forecast, each).astype(rows.dtype)
        u = each.reshape(-1, base.shape[2])
        if own:
            found[1, alive, t] = abs(each - forecast).mean(axis=1)
        else:
            found[:, alive, t] = abs(each.mean(axis=1) - forecast[:, 0]), each.std(axis=1)
    return found.reshape(2, n, n_times - 1, *row)
