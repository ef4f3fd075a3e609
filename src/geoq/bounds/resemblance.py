r"""The resemblance: the probability that a query looks like a point that an extrapolating fold held out.

.. math:: \operatorname{logit} \pi(x) = c_0 + c_1 \log \Delta d(x) + c_2 \log(d_1(x) + \varepsilon) + c_3 \, \mathrm{side}(x)

Held-out points of random folds lie amid the other points; held-out points of cluster and nested folds do not. A logistic regression
on the two distances and the one-sidedness of the nearest points separates the two kinds, with half of the total weight on each.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from geoq.core.geometry import Relation

# Added to the distance to the nearest point before the logarithm.
MIN_NEAREST = 1e-3
MIN_DISTANCE = 1e-9


def logarithms(distance: np.ndarray, nearest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the support distance and of the distance to the nearest point."""
    return np.log(distance + MIN_DISTANCE), np.log(nearest + MIN_NEAREST)


def _columns(relation: Relation) -> Float[np.ndarray, " n 3"]:
    logs = logarithms(relation.support_distance, relation.nearest)
    return np.stack([*logs, relation.side], 1)


@dataclass(frozen=True)
class Resemblance:
    """A fitted logistic regression with a ridge penalty of 1 on the standardised slopes."""

    mean: Float[np.ndarray, " 3"]
    deviation: Float[np.ndarray, " 3"]
    coefficients: Float[np.ndarray, " 4"]

    @staticmethod
    def fit(
        relation: Relation, interpolating: Bool[np.ndarray, " n"], weight: Float[np.ndarray, " n"]
    ) -> "Resemblance":
        """Fit to calibration tuples, of which some come from the interpolating folds."""
        from sklearn.linear_model import LogisticRegression  # here: a slow import

        columns = _columns(relation)
        mean, deviation = columns.mean(axis=0), columns.std(axis=0) + 1e-9
        inner, outer = weight[interpolating].sum(), weight[~interpolating].sum()
        half = 0.5 * weight / np.where(interpolating, inner, outer) * len(weight)
        model = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-10)
        model.fit((columns - mean) / deviation, ~interpolating, sample_weight=half)
        coefficients = np.concatenate([model.coef_[0], model.intercept_])
        return Resemblance(mean, deviation, coefficients)

    def __call__(self, relation: Relation) -> Float[np.ndarray, " n"]:
        """The probability pi of each query."""
        x = (_columns(relation) - self.mean) / self.deviation
        logit = x @ self.coefficients[:3] + self.coefficients[3]
        return 0.5 + 0.5 * np.tanh(logit / 2)
