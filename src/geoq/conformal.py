r"""Coverage guarantees: factors on a bound, computed from errors that the bound was not learned from.

.. math:: \widehat E^{(\tau)}(x) = \lambda_{s(x)} \, \widehat E(x), \qquad
    \lambda_s = \widehat Q_\tau\{e_{ij} / \widehat E_j(x_i) : s(x_i) = s\}, \quad s \in \{\text{safe}, \text{not safe}\}
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.increments.protocol import IncrementModel
from geoq.quantiles import (
    check_quantile,
    conformal_factor,
    error_ratios,
    inverse_cdf_quantile,
    n_required,
)
from geoq.safe_region import FittedRegion


@runtime_checkable
class Guarantee(Protocol):
    """What a factor on the bound guarantees for a new row at the level ``quantile``."""

    def n_required(self, quantile: float, /) -> int:
        """The smallest number of rows for which the factor is finite."""

    def factor(self, ratio: Tensor, quantile: float, /) -> float:
        """The smallest sufficient factor, computed from errors divided by their bounds; infinite if there are too few."""


def check_guarantee(guarantee: object) -> None:
    """Refuse objects that are not a guarantee, and classes."""
    if isinstance(guarantee, type) or not isinstance(guarantee, Guarantee):
        raise TypeError(
            f"guarantee={guarantee!r} must be an object with n_required() and factor(), such as guarantee=WholeField(0.9)."
        )


@dataclass(frozen=True)
class ExpectedCoverage:
    """Pointwise: the expected fraction of the values of a new row that are within the bound is at least ``quantile``."""

    def n_required(self, quantile: float) -> int:
        return n_required(quantile)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        return conformal_factor(ratio, quantile)


POINTWISE = ExpectedCoverage()


@dataclass(frozen=True)
class WholeField:
    """Per field: with probability ``confidence``, at least the fraction ``quantile`` of a new field is within the bound.

    This is split conformal prediction of one number per field: the factor that covers this fraction of its values.

    Attributes:
        confidence: the probability for a new field.

    Example:
        >>> geoq.conformalize(x, y, guarantee=WholeField(0.9))  # doctest: +SKIP
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_quantile(self.confidence, "confidence")

    def n_required(self, quantile: float) -> int:
        del quantile
        return n_required(self.confidence)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        of_each = inverse_cdf_quantile(ratio.T, quantile)
        return conformal_factor(of_each[:, None], self.confidence)


@dataclass(frozen=True)
class ConformalFactors:
    """One factor on the bounds of safe queries and one on the bounds of other queries.

    Attributes:
        safe: factor for safe queries.
        unsafe: factor for other queries. If too few of them were set aside, it is the factor for safe queries, but at
            least 1.
    """

    safe: float = 1.0
    unsafe: float = 1.0

    @staticmethod
    def fit(
        ratio: Float[Tensor, " n n_coordinates"],
        safe: Bool[Tensor, " n"],
        quantile: float,
        guarantee: Guarantee = POINTWISE,
    ) -> "ConformalFactors":
        """Compute the factors from pairs that neither the surrogate nor the calibration has seen.

        Raises:
            ValueError: there are too few safe pairs for a finite factor.
        """
        factor = guarantee.factor(ratio[safe], quantile)
        if math.isinf(factor):
            needed, found = guarantee.n_required(quantile), int(safe.sum())
            given = "" if found == len(safe) else f" among the {len(safe)} given"
            what = (
                f"{needed} safe pairs are needed, and there are {found}{given}"
                if found < needed
                else f"more than the fraction {1 - quantile:g} of the safe errors is positive where the bound is zero"
            )
            raise ValueError(
                f"at quantile={quantile} no finite factor exists: {what}; give more pairs, or lower the guarantee."
            )
        unsafe = guarantee.factor(ratio[~safe], quantile)
        return ConformalFactors(
            factor, unsafe if math.isfinite(unsafe) else max(1.0, factor)
        )

    def __call__(
        self, bound: Float[Tensor, " n *field"], safe: Bool[Tensor, " n"]
    ) -> Float[Tensor, " n *field"]:
        factor = torch.where(
            safe, bound.new_tensor(self.safe), bound.new_tensor(self.unsafe)
        )
        return bound * factor.reshape(-1, *(1,) * (bound.ndim - 1))


def levels_of(levels: Any) -> list[float]:
    """Quantile levels as a list of numbers; a single number is refused."""
    if np.ndim(levels) != 1:
        raise TypeError(
            f"levels={levels!r} must be a sequence, for example (0.5, 0.9)."
        )
    # In single precision 0.9 is 0.8999999762, which would be an unexpected key.
    return [
        level if isinstance(level, float) else float(f"{float(level):.7g}")
        for level in levels
    ]


def level_factors(
    ratio: Float[Tensor, " n n_coordinates"],
    safe: Bool[Tensor, " n"],
    levels: Sequence[float],
    quantile: float,
) -> list[ConformalFactors]:
    """Factors that turn a bound at the level ``quantile`` into bounds at other levels.

    The factors increase with the level, so the bounds do not cross.
    """
    for level in levels:
        check_quantile(level, "levels")

    def factor(rows: Tensor, level: float) -> float:
        if not rows.any():
            return 1.0
        values = ratio[rows].reshape(-1)
        own = float(inverse_cdf_quantile(values, quantile))
        # If all errors are zero, or bounds are zero where errors are not, the ratios carry no information.
        if not own or math.isinf(own):
            return 1.0
        return float(inverse_cdf_quantile(values, level)) / own

    return [
        ConformalFactors(factor(safe, level), factor(~safe, level)) for level in levels
    ]


def factors_of(
    calibration: CalibrationSet,
    region: FittedRegion,
    model: IncrementModel,
    levels: Sequence[float],
) -> list[ConformalFactors]:
    """The level factors of a fitted increment model, from its calibration errors."""
    features = calibration.features
    safe = region.contains(region.support_score(features))
    ratio = error_ratios(calibration.error, features.anchor_error + model(features))
    return level_factors(ratio, safe, levels, model.quantile)
