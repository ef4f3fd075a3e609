r"""Quantiles, the pinball loss that they minimise, and conformal ranks.

The paper does not name a definition of the empirical quantile. geoq uses the inverse of the empirical distribution function
everywhere, because it minimises the pinball loss; the interpolating default of ``torch.quantile`` does not.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.settings import is_number


def check_quantile(quantile: Any, name: str) -> None:
    """Refuse anything but a number in the open interval (0, 1)."""
    if not is_number(quantile) or not 0 < quantile < 1:
        raise ValueError(
            f"{name}={quantile!r}, but a quantile level lies strictly between 0 and 1; 0.95 is usual."
        )


def check_fraction(value: Any, name: str) -> None:
    """Refuse anything but a number in the half-open interval (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"{name}={value!r}, but it is a fraction; choose a value above 0 and at most 1."
        )


def pinball_loss(
    value: Float[Tensor, " *shape"], estimate: Float[Tensor, " *shape"], quantile: float
) -> Float[Tensor, " *shape"]:
    r"""Elementwise pinball loss. Its mean is least where the estimate is the quantile of the values.

    .. math:: \max(\tau (r - g), (\tau - 1) (r - g))
    """
    excess = value - estimate
    return torch.maximum(quantile * excess, (quantile - 1) * excess)


def rank(n: int, quantile: float) -> int:
    r"""Rank of the quantile among n sorted values, :math:`\lceil n \tau \rceil`, at least 1.

    Rounding turns 0.95 * 20 into 19.000000000000004; the small slack keeps that rank at 19.
    """
    return max(1, math.ceil(n * quantile - 1e-9))


def inverse_cdf_quantile(
    values: Float[Tensor, " n *shape"], quantile: float
) -> Float[Tensor, " *shape"]:
    r"""Smallest value v such that at least the fraction ``quantile`` of the values is at most v, per coordinate.

    .. math:: \widehat Q_\tau = \inf \{v : \widehat F(v) \ge \tau\}

    Example:
        >>> inverse_cdf_quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.5)
        tensor(2.)
    """
    return values.kthvalue(rank(len(values), quantile), dim=0).values


def weighted_quantile(
    values: Float[Tensor, " n *shape"],
    weights: Float[Tensor, " n *shape"],
    quantile: float,
) -> Float[Tensor, " *shape"]:
    """Smallest value v such that values of at most v have at least the fraction ``quantile`` of the weight, per coordinate."""
    ordered, order = values.sort(dim=0)
    passed = weights.gather(0, order).cumsum(dim=0)
    place = (
        (passed < passed[-1:] * quantile * (1 - 1e-12))
        .sum(dim=0, keepdim=True)
        .clamp(max=len(values) - 1)
    )
    return ordered.gather(0, place)[0]


def n_required(quantile: float) -> int:
    """Smallest number of exchangeable errors for which a conformal bound at this level is finite.

    Example:
        >>> n_required(0.95)
        19
    """
    return math.ceil(quantile / (1 - quantile) - 1e-9)


def error_ratios(
    error: Float[Tensor, " n *field"], bound: Float[Tensor, " n *field"]
) -> Float[Tensor, " n n_coordinates"]:
    """Errors divided by their bounds, one row per query. The ratio is zero where the error is zero, whatever the bound."""
    return torch.where(error == 0, 0, error / bound).reshape(len(error), -1)


def conformal_factor(
    ratio: Float[Tensor, " n n_coordinates"], quantile: float
) -> float:
    r"""Factor on the bounds for which a new row is expected to have at least the fraction ``quantile`` of its values covered.

    .. math:: \text{the } \lceil n_c (n + 1) \tau \rceil \text{-th smallest of } n \cdot n_c \text{ ratios}

    A ratio of nan is absent: the fraction is then a fraction of the values of a row that are present.

    With one number per row this is split conformal prediction. With several it is conformal risk control of the fraction
    of values that exceed the bound (Angelopoulos et al. 2024). The factor is infinite if there are fewer rows than
    ``n_required(quantile)``.
    """
    n_rows = len(ratio)
    if n_rows < n_required(quantile):
        return math.inf
    if ratio.isnan().any():
        return _factor_of_present(ratio, quantile)
    return float(
        inverse_cdf_quantile(ratio.reshape(-1), quantile * (n_rows + 1) / n_rows)
    )


def _factor_of_present(
    ratio: Float[Tensor, " n n_coordinates"], quantile: float
) -> float:
    r"""The conformal factor of rows with different numbers :math:`m_i` of values.

    .. math:: \min \{\lambda : \textstyle\sum_i \#\{j : r_{ij} > \lambda\} / m_i \le (1 - \tau)(n + 1) - 1\}
    """
    present = ~ratio.isnan()
    weight = (1 / present.sum(dim=1, keepdim=True)).double().expand_as(ratio)[present]
    values, order = ratio[present].sort()
    # The sum over the larger values, rounded down a little.
    larger = weight.sum() - weight[order].cumsum(dim=0)
    allowed = (1 - quantile) * (len(ratio) + 1) - 1 + 1e-9
    return float(values[int((larger > allowed).sum())])
