r"""Members of a forecast: rollouts from the same initial state, with held-out errors of single steps added at every step.

.. math:: u^m_0 = u, \quad u^m_{n+1} = G(u^m_n) \pm r_i \Bigl(\frac{\Delta d(\widehat u_n)}{\Delta d(u_i)}\Bigr)^\alpha

Here G is a model of one step, the surrogate or a companion, and r_i its signed error at a held-out state u_i. Errors grow with
the support distance (eq:dd): :math:`\alpha` is the slope of :math:`\log |r_i|` on :math:`\log \Delta d(u_i)`. Errors of
consecutive steps are alike, so a member receives runs of errors at consecutive states. All forecasts receive the same errors,
so that an answer does not depend on the other rows of its batch. The companion is a second model of one step, ridge regression
on random features of the same data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat, restore, to_numbers
from geoq.checks import check_integer
from geoq.data.coordinates import Coordinates
from geoq.rollout.features import Reference
from geoq.rollout.series import DataRange, PerStep, Rollouts, Series, Values
from geoq.surrogate import answers_of

# The number of consecutive errors that a member receives, and of states after each start whose errors are measured.
BLOCK, N_MEASURED = 5, 20
LEAST = 1e-12
# The scales of the random weights and the ridges to choose from, and the largest number of pairs of states of a fit.
SCALES, RIDGES, MOST_PAIRS = (0.3, 1.0, 3.0), (1e-10, 1e-8, 1e-6), 10000
# Rows of more numbers have no companion.
MOST_NUMBERS = 200


@dataclass(frozen=True)
class RandomFeatures:
    r"""A companion that predicts the change of a state in one step with ridge regression on random features.

    .. math:: u' - u \approx W [\tanh(A z + b), z, 1], \quad z = \nu(u)

    The scale of A and the ridge are chosen by the errors of single steps on a held-out fold. All fits take seconds. A state
    with more than 200 values, or values of the forcing, has no companion.

    Attributes:
        n_features: the largest number of random features; a third of the number of states if that is less.

    Example:
        >>> RandomFeatures(n_features=300)
        RandomFeatures(n_features=300)
    """

    n_features: int = 1000

    def __post_init__(self) -> None:
        check_integer(self.n_features, "n_features", 1)

    def fit(
        self, series: Series, nu: Coordinates, n_values: int, splits: Sequence[tuple[Any, Any]]
    ) -> list["RidgeStep"]:
        """A companion for what each fold leaves in, and then one for all states; none for large states."""
        if nu.scale.size > MOST_NUMBERS:
            return []
        n_varying = int((~nu.constant).sum())

        def fitted(rows: np.ndarray, scale: float, ridge: float) -> RidgeStep:
            before, after = series.pairs(rows)
            kept = np.linspace(0, len(before) - 1, min(len(before), MOST_PAIRS)).round().astype(int)
            before, after, rng = before[kept], after[kept], np.random.default_rng(0)
            change = flat(after - before)[:, :n_values].astype(float)
            size = n_varying, min(self.n_features, max(20, len(before) // 3))
            mixing = scale * rng.standard_normal(size) / np.sqrt(max(1, n_varying))
            model = RidgeStep(nu, mixing, rng.uniform(-1, 1, size[1]), np.zeros((0, n_values)))
            phi, unit = model.features(before), change.std(axis=0) + 1e-300
            gram = phi.T @ phi + ridge * len(phi) * np.eye(phi.shape[1])
            weights = np.linalg.solve(gram, phi.T @ (change / unit)) * unit
            return replace(model, weights=weights)

        left_in, held_out = splits[len(splits) // 2]
        before, after = series.pairs(held_out)

        def error(setting: tuple[float, float]) -> float:
            gap = flat((after - fitted(left_in, *setting)(before)) / nu.scale)
            return float(np.nan_to_num(gap[:, :n_values] ** 2, nan=np.inf).mean())

        chosen = min(product(SCALES, RIDGES), key=error)
        every = *(own for own, _ in splits), np.arange(len(series))
        return [fitted(rows, *chosen) for rows in every]


@dataclass(frozen=True)
class RidgeStep:
    """A fitted companion: a step of rows, which leaves the forcing as it is."""

    nu: Coordinates
    mixing: Float[np.ndarray, " n_varying n_features"]
    offset: Float[np.ndarray, " n_features"]
    weights: Float[np.ndarray, " n_all n_values"]

    def features(self, rows: Float[np.ndarray, " n *row"]) -> Float[np.ndarray, " n n_all"]:
        """The random features of rows, their coordinates and 1."""
        z = flat(self.nu(rows))[:, ~self.nu.constant.reshape(-1)].astype(float)
        return np.hstack([np.tanh(z @ self.mixing + self.offset), z, np.ones((len(z), 1))])

    def __call__(self, rows: Any) -> Float[np.ndarray, " n *row"]:
        numbers = to_numbers(rows, "rows")
        after = flat(numbers).astype(float)
        after[:, : self.weights.shape[1]] += self.features(numbers) @ self.weights
        return after.reshape(numbers.shape)


@dataclass(frozen=True)
class Noise:
    """What is added to each member at each step at a support distance of 1, and the exponent of this distance."""

    unit: Float[np.ndarray, " n_members n_steps n_values"]
    exponent: float

    @staticmethod
    def of(errors: Values, distance: PerStep, n_members: int, n_steps: int) -> "Noise":
        """Random runs of errors for each member; two members that follow one another have opposite noise."""
        size, distance = np.sqrt((errors**2).mean(axis=2)), distance.clip(min=LEAST)
        known, x = size > 0, np.log(distance)
        varies = known.any() and np.ptp(x[known]) > 1e-6
        slope = np.polyfit(x[known], np.log(size[known]), 1)[0] if varies else 0.0
        exponent = min(max(float(slope), 0.0), 3.0)
        (n, width), rng = size.shape, np.random.default_rng(0)
        block = min(BLOCK, width)
        draws = -(-n_members // 2), -(-n_steps // block), 1
        row, first = rng.integers(n, size=draws), rng.integers(width - block + 1, size=draws)
        unit = (errors / distance[..., None] ** exponent)[row, first + np.arange(block)]
        runs = rng.choice([-1.0, 1.0], size=(*draws, 1)) * unit
        pairs = np.stack([runs, -runs], axis=1).reshape(2 * draws[0], draws[1] * block, -1)
        return Noise(pairs[:n_members, :n_steps], exponent)


@dataclass(frozen=True)
class Source:
    """A model that simulates members, or None for the surrogate, with its quadratic mean error of a step in standard deviations.

    The noise grows up to the support distance ``furthest``.
    """

    model: RidgeStep | None
    noise: Noise
    step_error: float
    furthest: float

    def members(
        self, step: Any, rows: Rollouts, distance: PerStep, reference: Reference, like: Any
    ) -> Float[np.ndarray, " 2 n n_steps n_outputs"]:
        """What the members say of the outputs of forecasts, see ``simulate``; the surrogate is ``step``."""
        own, model = self.model is None, self.model or step
        along = distance[:, ::BLOCK].clip(max=self.furthest)
        found = simulate(model, rows, self.noise, along, reference.range, like, own=own)
        return np.stack([reference.layout.outputs(part) for part in found])


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
