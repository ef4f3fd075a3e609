"""Metrics of a bound: pinball loss, coverage and correlation.

They take arrays or tensors of any shape, one row per sample. ``where`` is a boolean mask of the rows, of rows and lead times,
or of single values, such as the safe flags. Values of nan and masked values do not count; a metric of no values is nan.
"""

import math
from typing import Any

import numpy as np

from geoq.checks import check_quantile
from geoq.core.assessment import numbers_of
from geoq.quantiles import pinball_loss


def pinball(error: Any, error_hat: Any, quantile: float, where: Any = None) -> float:
    r"""Mean pinball loss, in the unit of the error; it is smallest if the bound is the quantile of the error.

    .. math:: \operatorname{mean} \max(\tau (E - \widehat E), (\tau - 1) (E - \widehat E))

    Example:
        An error above its bound costs 0.9 of the difference, an error below its bound 0.1 of it:

        >>> round(pinball(np.array([3.0, 0.0]), np.array([1.0, 1.0]), 0.9), 6)
        0.95
    """
    check_quantile(quantile, "quantile")
    values, bounds = _selected(error, error_hat, where)
    return float(pinball_loss(values, bounds, quantile).mean()) if len(values) else math.nan


def coverage(error: Any, error_hat: Any, where: Any = None) -> float:
    r"""Fraction of the errors that do not exceed their bound.

    .. math:: \operatorname{mean} 1[E \le \widehat E]

    Example:
        >>> error, error_hat = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
        >>> round(coverage(error, error_hat), 3)
        0.667
        >>> coverage(error, error_hat, where=np.array([True, True, False]))
        1.0
    """
    values, bounds = _selected(error, error_hat, where)
    return float((values <= bounds).mean()) if len(values) else math.nan


def correlation(error: Any, error_hat: Any, where: Any = None) -> float:
    """Pearson correlation of errors and bounds; nan if one of them is constant.

    Example:
        >>> round(correlation(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 9.0])), 6)
        1.0
    """
    pair = np.stack(_selected(error, error_hat, where))
    if pair.shape[1] < 2 or not np.isfinite(pair).all() or (np.ptp(pair, axis=1) == 0).any():
        return math.nan
    return float(np.corrcoef(pair)[0, 1])


def _selected(error: Any, error_hat: Any, where: Any) -> tuple[np.ndarray, np.ndarray]:
    """The values of both arrays that count and are selected by the mask."""
    values, bounds = (numbers_of(part).astype(float) for part in (error, error_hat))
    if values.shape != bounds.shape or not values.ndim:
        raise ValueError(
            f"error has shape {values.shape} and error_hat has {bounds.shape}, but they are compared value by value; give both "
            "the same shape, one row per sample."
        )
    mask = np.ones(len(values), dtype=bool) if where is None else numbers_of(where)
    if mask.dtype != bool or mask.shape != values.shape[: mask.ndim] or not mask.ndim:
        raise ValueError(
            f"where has dtype {mask.dtype} and shape {mask.shape}, but the values have shape {values.shape}; pass a boolean mask "
            "with one entry per row, or per value."
        )
    values, bounds = values[mask].reshape(-1), bounds[mask].reshape(-1)
    counts = ~(np.isnan(values) | np.isnan(bounds))
    return values[counts], bounds[counts]
