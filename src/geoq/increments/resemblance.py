r"""The resemblance: the probability that a query looks like a point that an extrapolating fold held out.

.. math:: \operatorname{logit} \pi(x) = c_0 + c_1 \log \Delta d(x) + c_2 \log(d_1(x) + \varepsilon) + c_3 \, \mathrm{side}(x)

Held-out points of random folds lie amid the other points; held-out points of cluster and nested folds do not. A logistic regression
on the two distances and the one-sidedness of the nearest points separates the two kinds, with half of the total weight on each.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.arrays import functions_of, own_arrays
from geoq.geometry import GeometricFeatures

# Added to the distance to the nearest point before the logarithm.
MIN_NEAREST = 1e-3
MIN_DISTANCE = 1e-9
MAX_STEPS, SETTLED = 50, 1e-10


def logarithms(distance: Any, nearest: Any) -> tuple[Any, Any]:
    """Logarithms of the support distance and of the distance to the nearest point, of tensors or NumPy arrays."""
    xp = functions_of(distance)
    return xp.log(distance + MIN_DISTANCE), xp.log(nearest + MIN_NEAREST)


def columns_of(features: GeometricFeatures) -> Any:
    """Logarithms of the two distances, and the one-sidedness: a tensor, or a NumPy array on the CPU."""
    assert features.neighborhood is not None
    distance, nearest, side = own_arrays(
        features.support_distance.double(),
        features.neighborhood.nearest.double(),
        features.neighborhood.side.double(),
    )
    return functions_of(side).stack([*logarithms(distance, nearest), side], 1)


@dataclass(frozen=True)
class Resemblance:
    """A fitted logistic regression; ``Resemblance.fit`` finds it by Newton's method with a ridge penalty of 1."""

    mean: Float[Tensor, " 3"]
    deviation: Float[Tensor, " 3"]
    coefficients: Float[Tensor, " 4"]

    @staticmethod
    def fit(
        features: GeometricFeatures,
        interpolating: Bool[Tensor, " n"],
        weight: Float[Tensor, " n"],
    ) -> "Resemblance":
        """Fit to calibration tuples, of which some come from the interpolating folds."""
        columns, weight = torch.as_tensor(columns_of(features)), weight.double()
        mean = columns.mean(dim=0)
        deviation = columns.std(dim=0, correction=0) + 1e-9
        x = torch.cat(
            [(columns - mean) / deviation, torch.ones_like(columns[:, :1])], dim=1
        )
        outside = (~interpolating).double()
        total = torch.where(
            interpolating, weight[interpolating].sum(), weight[~interpolating].sum()
        )
        w = 0.5 * weight / total * len(x)
        penalty = x.new_tensor([1.0, 1.0, 1.0, 0.0])

        def loss(theta: Tensor) -> float:
            z = x @ theta
            fit = (w * (torch.nn.functional.softplus(z) - outside * z)).sum()
            return float(fit + 0.5 * (penalty * theta**2).sum())

        theta, value = x.new_zeros(4), float("inf")
        for _ in range(MAX_STEPS):
            before = loss(theta)
            p = torch.sigmoid(x @ theta)
            gradient = x.T @ (w * (p - outside)) + penalty * theta
            curvature = (x * (w * p * (1 - p))[:, None]).T @ x
            step = torch.linalg.solve(curvature + torch.diag(penalty + 1e-9), gradient)
            length = 1.0
            while (value := loss(theta - length * step)) > before and length > 1e-4:
                length /= 2
            theta = theta - length * step
            if before - value <= SETTLED * abs(before):
                break
        return Resemblance(mean, deviation, theta)

    def __call__(self, features: GeometricFeatures) -> Any:
        """The probability pi of each query: a tensor, or a NumPy array on the CPU."""
        mean, deviation, coefficients = own_arrays(*vars(self).values())
        x = (columns_of(features) - mean) / deviation
        logit = x @ coefficients[:3] + coefficients[3]
        return 0.5 + 0.5 * functions_of(logit).tanh(logit / 2)
