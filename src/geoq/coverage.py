r"""Coverage that is promised: factors on a bound, read off errors that the bound did not learn from.

.. math:: \widehat E^{(\tau)}(x) = \lambda_{s(x)} \, \widehat E(x), \qquad
    \lambda_s = \widehat Q_\tau\{e_{ij} / \widehat E_j(x_i) : s(x_i) = s\}, \quad s \in \{\text{safe}, \text{not safe}\}
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.increment import check_quantile, inverse_cdf_quantile


def n_needed(quantile: float) -> int:
    """The fewest exchangeable errors that promise a finite bound at this level."""
    return math.ceil(quantile / (1 - quantile) - 1e-9)


def conformal_level(ratio: Float[Tensor, " n n_coordinates"], quantile: float) -> float:
    r"""The factor under which a fresh row is expected to have at least the share ``quantile`` of its values.

    .. math:: \text{the } \lceil n_c (n + 1) \tau \rceil \text{-th smallest of } n \cdot n_c \text{ ratios}

    For one number per row this is split conformal prediction; for many it is conformal risk control (Angelopoulos et al.
    2024) of the share that is missed. Infinite where the rows are too few to tell.
    """
    n_rows = len(ratio)
    if n_rows < n_needed(quantile):
        return math.inf
    return float(
        inverse_cdf_quantile(ratio.reshape(-1), quantile * (n_rows + 1) / n_rows)
    )


def ratios(
    error: Float[Tensor, " n *field"], bound: Float[Tensor, " n *field"]
) -> Float[Tensor, " n n_coordinates"]:
    """Errors over their bounds, one row per query; zero where nothing is wrong, whatever the bound."""
    return torch.where(error == 0, 0, error / bound).reshape(len(error), -1)


@runtime_checkable
class Promise(Protocol):
    """What a factor on the bound shall ensure for a fresh row, at the level ``quantile``."""

    def n_needed(self, quantile: float, /) -> int:
        """The fewest rows that can promise it."""

    def factor(self, ratio: Tensor, quantile: float, /) -> float:
        """The least factor that does, from errors over their bounds; infinite where it cannot be told."""


@dataclass(frozen=True)
class ExpectedShare:
    """Pointwise: of the values of a fresh row the share ``quantile`` is expected to be within the bound."""

    def n_needed(self, quantile: float) -> int:
        return n_needed(quantile)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        return conformal_level(ratio, quantile)


POINTWISE = ExpectedShare()


@dataclass(frozen=True)
class WholeField:
    """Field by field: with the probability ``confidence`` a fresh field has at least the share ``quantile`` within it.

    Split conformal prediction of one number per field: the factor that this share of its values needs.
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_quantile(self.confidence, "confidence")

    def n_needed(self, quantile: float) -> int:
        del quantile
        return n_needed(self.confidence)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        of_each = inverse_cdf_quantile(ratio.T, quantile)
        return conformal_level(of_each[:, None], self.confidence)


@dataclass(frozen=True)
class Finish:
    """One factor on the bounds of safe queries and one on those of the others.

    Attributes:
        safe: factor of safe queries.
        unsafe: factor of the others; where there were too few of them to tell, that of the safe ones, but 1 at least.
    """

    safe: float = 1.0
    unsafe: float = 1.0

    @staticmethod
    def fit(
        ratio: Float[Tensor, " n n_coordinates"],
        safe: Bool[Tensor, " n"],
        quantile: float,
        promise: Promise = POINTWISE,
    ) -> "Finish":
        """Read the factors off pairs that neither the surrogate nor the calibration has seen."""
        factor = promise.factor(ratio[safe], quantile)
        if math.isinf(factor):
            needed, found = promise.n_needed(quantile), int(safe.sum())
            given = "" if found == len(safe) else f" among the {len(safe)} given"
            what = (
                f"it takes {needed} safe pairs, and there are {found}{given}"
                if found < needed
                else f"more than the share {1 - quantile:g} of the safe errors is positive where the bound is zero"
            )
            raise ValueError(
                f"at quantile={quantile} no finite factor can be promised: {what}; give more pairs, or promise less."
            )
        unsafe = promise.factor(ratio[~safe], quantile)
        return Finish(factor, unsafe if math.isfinite(unsafe) else max(1.0, factor))

    def __call__(
        self, bound: Float[Tensor, " n *field"], safe: Bool[Tensor, " n"]
    ) -> Float[Tensor, " n *field"]:
        factor = torch.where(
            safe, bound.new_tensor(self.safe), bound.new_tensor(self.unsafe)
        )
        return bound * factor.reshape(-1, *(1,) * (bound.ndim - 1))


def level_factors(
    ratio: Float[Tensor, " n n_coordinates"],
    safe: Bool[Tensor, " n"],
    levels: Sequence[float],
    quantile: float,
) -> list[Finish]:
    """What turns a bound of level ``quantile`` into bounds of other levels; they grow with the level, so none cross."""
    for level in levels:
        check_quantile(level, "levels")

    def factor(rows: Tensor, level: float) -> float:
        if not rows.any():
            return 1.0
        values = ratio[rows].reshape(-1)
        own = float(inverse_cdf_quantile(values, quantile))
        # Nothing to go by where nothing is wrong, or where errors meet bounds of zero.
        if not own or math.isinf(own):
            return 1.0
        return float(inverse_cdf_quantile(values, level)) / own

    return [Finish(factor(safe, level), factor(~safe, level)) for level in levels]
