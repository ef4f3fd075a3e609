r"""Coverage guarantees: factors on a bound, computed from errors that the bound was not learned from.

.. math:: \widehat E^{(\tau)}(x) = \lambda_{s(x)} \, \widehat E(x), \qquad
    \lambda_s = \widehat Q_\tau\{e_{ij} / \widehat E_j(x_i) : s(x_i) = s\}, \quad s \in \{\text{safe}, \text{not safe}\}
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import per_row
from geoq.checks import check_quantile, is_number, shortened, warn
from geoq.quantiles import conformal_factor, inverse_cdf_quantile, n_required


@runtime_checkable
class Guarantee(Protocol):
    """What a factor on the bound guarantees for a new row at the level ``quantile``."""

    def n_required(self, quantile: float, /) -> int:
        """The smallest number of rows for which the factor is finite."""

    def factor(self, ratio: np.ndarray, quantile: float, /) -> float:
        """The smallest sufficient factor; infinite if there are too few rows.

        It is computed from errors divided by their bounds, which are nan where an error does not count.
        """


@dataclass(frozen=True)
class ExpectedCoverage:
    """Pointwise: the expected fraction of the values of a new row that are within the bound is at least ``quantile``."""

    def n_required(self, quantile: float) -> int:
        return n_required(quantile)

    def factor(self, ratio: Float[np.ndarray, " n n_values"], quantile: float) -> float:
        return conformal_factor(ratio, quantile)


@dataclass(frozen=True)
class WholeField:
    """Per field: with probability ``confidence``, at least the fraction ``quantile`` of a new field is within the bound.

    This is split conformal prediction of one number per field: the factor that covers this fraction of its values.

    Attributes:
        confidence: the probability for a new field.

    Example:
        >>> estimator.conformalize(x, y, guarantee=WholeField(0.9))  # doctest: +SKIP
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_quantile(self.confidence, "confidence")

    def n_required(self, quantile: float) -> int:
        del quantile
        return n_required(self.confidence)

    def factor(self, ratio: Float[np.ndarray, " n n_values"], quantile: float) -> float:
        if not len(ratio):
            return math.inf
        of_each = inverse_cdf_quantile(ratio.T, quantile)
        return conformal_factor(of_each[:, None], self.confidence)


@dataclass(frozen=True)
class ConformalFactors:
    """One factor on the bounds of safe queries and one on the bounds of other queries.

    Attributes:
        safe: factor for safe queries.
        unsafe: factor for other queries. If too few of them were set aside, it is the factor for safe queries, but at
            least 1.
        n_pairs: number of the pairs that were set aside; 0 before ``conformalize``.
    """

    safe: float = 1.0
    unsafe: float = 1.0
    n_pairs: int = 0

    @staticmethod
    def fit(
        ratio: Float[np.ndarray, " n n_values"],
        safe: Bool[np.ndarray, " n"],
        quantile: float,
        guarantee: Guarantee,
    ) -> "ConformalFactors":
        """The factors from pairs that neither the surrogate nor the calibration has seen; raises for too few safe pairs."""
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
            _positive(factor, quantile),
            _positive(unsafe, quantile) if math.isfinite(unsafe) else max(1.0, factor),
            len(safe),
        )

    def __call__(
        self, bound: Float[np.ndarray, " n *field"], safe: Bool[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n *field"]:
        if self.safe == self.unsafe == 1:
            return bound
        factor = np.where(safe, self.safe, self.unsafe).astype(bound.dtype)
        return bound * per_row(factor, bound)


def _positive(factor: float, quantile: float) -> float:
    """The factor, or 1 in place of 0: a bound of zero everywhere is of no use."""
    if factor > 0:
        return factor
    warn(
        f"the fraction {quantile:g} of the errors of the pairs is 0, so the conformal factor would be 0 and all bounds 0; the "
        "factor 1 is used. Check that the surrogate was not trained on these pairs."
    )
    return 1.0


def levels_of(levels: Any) -> list[float]:
    """Quantile levels as a list of numbers; raises for a single number."""
    if np.ndim(levels) != 1:
        raise TypeError(
            f"levels={shortened(levels)} must be a sequence of numbers; pass for example (0.5, 0.9)."
        )
    found = []
    for level in levels:
        number = level.item() if hasattr(level, "item") else level
        if not is_number(number):
            raise TypeError(
                f"levels={shortened(level)} is a {type(level).__name__}, but a number is needed; pass quantile levels such as "
                "(0.5, 0.9)."
            )
        # In single precision 0.9 is 0.8999999762, which would be an unexpected key.
        found.append(level if isinstance(level, float) else float(f"{float(number):.7g}"))
        check_quantile(found[-1], "levels")
    return found


def level_factors(
    ratio: Float[np.ndarray, " n n_values"],
    safe: Bool[np.ndarray, " n"],
    levels: Sequence[float],
    quantile: float,
) -> list[ConformalFactors]:
    """Factors that turn a bound at the level ``quantile`` into bounds at other levels.

    The factors increase with the level, so the bounds do not cross.
    """

    def factor(rows: np.ndarray, level: float) -> float:
        values = ratio[rows].reshape(-1)
        values = values[~np.isnan(values)]
        if not len(values):
            return 1.0
        own = float(inverse_cdf_quantile(values, quantile))
        # If all errors are zero, or bounds are zero where errors are not, the ratios carry no information.
        if not own or math.isinf(own):
            return 1.0
        return float(inverse_cdf_quantile(values, level)) / own

    return [ConformalFactors(factor(safe, level), factor(~safe, level)) for level in levels]
