r"""Quantiles, the pinball loss that they minimise, and conformal ranks.

The paper does not name a definition of the empirical quantile. geoq uses the inverse of the empirical distribution function
everywhere, because it minimises the pinball loss; the interpolating default of ``numpy.quantile`` does not. A value of nan does not
count.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def pinball_loss(value: Any, estimate: Any, quantile: float) -> Any:
    r"""Elementwise pinball loss. Its mean is least where the estimate is the quantile of the values.

    .. math:: \max(\tau (r - g), (\tau - 1) (r - g))
    """
    excess = value - estimate
    return np.maximum(quantile * excess, (quantile - 1) * excess)


def rank(n: int, quantile: float) -> int:
    r"""Rank of the quantile among n sorted values, :math:`\lceil n \tau \rceil`, at least 1."""
    # Rounding turns 0.95 * 20 into 19.000000000000004; the small slack keeps that rank at 19.
    return max(1, math.ceil(n * quantile - 1e-9))


def inverse_cdf_quantile(values: np.ndarray, quantile: float) -> Any:
    r"""Smallest value v such that at least the fraction ``quantile`` of the values is at most v, per column.

    .. math:: \widehat Q_\tau = \inf \{v : \widehat F(v) \ge \tau\}

    A column without values has the quantile nan.

    Example:
        >>> float(inverse_cdf_quantile(np.array([3.0, 1.0, 2.0, 4.0]), 0.5))
        2.0
    """
    if not np.isnan(values).any():
        place = rank(len(values), quantile) - 1
        return np.partition(values, place, axis=0)[place]
    return weighted_quantile(values, np.ones(len(values)), quantile)


def weighted_quantile(values: np.ndarray, weights: np.ndarray, quantile: float) -> Any:
    """Smallest value v such that values of at most v have at least the fraction ``quantile`` of the weight, per column.

    The weights have the shape of the values, or one number per row.
    """
    if weights.ndim < values.ndim:
        weights = weights.reshape(-1, *(1,) * (values.ndim - 1))
    weights = np.where(np.isnan(values), 0.0, weights)
    order = values.argsort(axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    passed = np.take_along_axis(weights, order, axis=0).cumsum(axis=0)
    short = passed < passed[-1:] * quantile * (1 - 1e-12)
    place = short.sum(axis=0, keepdims=True).clip(max=len(values) - 1)
    return np.take_along_axis(ordered, place, axis=0)[0]


def weighted_quantiles(
    values: np.ndarray, weights: np.ndarray, levels: Sequence[float]
) -> np.ndarray:
    """The weighted quantile of one column at several levels."""
    order = values.argsort(kind="stable")
    passed = weights[order].cumsum()
    wanted = passed[-1] * np.asarray(levels) * (1 - 1e-12)
    places = np.searchsorted(passed, wanted).clip(max=len(values) - 1)
    return np.asarray(values[order[places]])


def n_required(quantile: float) -> int:
    """Smallest number of exchangeable errors for which a conformal bound at this level is finite.

    Example:
        >>> n_required(0.95)
        19
    """
    return math.ceil(quantile / (1 - quantile) - 1e-9)


def error_ratios(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Errors divided by their bounds, one row per query; 0 where the error is 0, whatever the bound, and nan where it is nan."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0, error / bound).reshape(len(error), -1)


def conformal_factor(ratio: np.ndarray, quantile: float) -> float:
    r"""Factor on the bounds for which a new row is expected to have at least the fraction ``quantile`` of its values covered.

    .. math:: \min \{\lambda : \textstyle\sum_i \#\{j : r_{ij} > \lambda\} / m_i \le (1 - \tau)(n + 1) - 1\}

    Row i has :math:`m_i` values that are not nan. With one number per row this is split conformal prediction. With several it is
    conformal risk control of the fraction of values that exceed the bound (Angelopoulos et al. 2024). The factor is infinite if
    there are fewer rows than ``n_required(quantile)``.
    """
    n_rows = len(ratio)
    if n_rows < n_required(quantile):
        return math.inf
    present = ~np.isnan(ratio)
    if present.all():
        level = quantile * (n_rows + 1) / n_rows
        return float(inverse_cdf_quantile(ratio.reshape(-1), level))
    n_values, values = present.sum(axis=1, keepdims=True), ratio[present]
    weight = np.broadcast_to(1 / np.maximum(n_values, 1), ratio.shape)[present]
    order = values.argsort(kind="stable")
    # The sum over the larger values, rounded down a little.
    larger = weight.sum() - weight[order].cumsum()
    allowed = (1 - quantile) * (n_rows + 1) - 1 + 1e-9
    return float(values[order][int((larger > allowed).sum())])
