"""A companion of the surrogate: a second model of one step, ridge regression on random features of the same data."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat, to_numbers
from geoq.checks import check_integer
from geoq.data.coordinates import Coordinates
from geoq.rollout.series import Series

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
        self,
        series: Series,
        nu: Coordinates,
        n_values: int,
        splits: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> list["RidgeStep"]:
        """A companion for what each fold leaves in, and then one for all states; none for large states."""
        if nu.scale.size > MOST_NUMBERS:
            return []
        kept, held_out = splits[len(splits) // 2]
        before, after = series.pairs(held_out)

        def error(setting: tuple[float, float]) -> float:
            gap = flat(
                (after - self._fitted(*series.pairs(kept), nu, n_values, *setting)(before))
                / nu.scale
            )
            return float(np.nan_to_num(gap[:, :n_values] ** 2, nan=np.inf).mean())

        chosen = min(product(SCALES, RIDGES), key=error)
        every = [own for own, _ in splits] + [np.arange(len(series))]
        return [self._fitted(*series.pairs(rows), nu, n_values, *chosen) for rows in every]

    def _fitted(
        self,
        before: np.ndarray,
        after: np.ndarray,
        nu: Coordinates,
        n_values: int,
        scale: float,
        ridge: float,
    ) -> "RidgeStep":
        chosen = np.linspace(0, len(before) - 1, min(len(before), MOST_PAIRS)).round().astype(int)
        before, rng = before[chosen], np.random.default_rng(0)
        change = flat(after[chosen] - before)[:, :n_values].astype(float)
        n_varying = int((~nu.constant).sum())
        size = n_varying, min(self.n_features, max(20, len(before) // 3))
        mixing = scale * rng.standard_normal(size) / np.sqrt(max(1, n_varying))
        model = RidgeStep(nu, mixing, rng.uniform(-1, 1, size[1]), np.zeros((0, n_values)))
        phi, unit = model.features(before), change.std(axis=0) + 1e-300
        gram = phi.T @ phi + ridge * len(phi) * np.eye(phi.shape[1])
        weights = np.linalg.solve(gram, phi.T @ (change / unit)) * unit
        return RidgeStep(nu, mixing, model.offset, weights)


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
