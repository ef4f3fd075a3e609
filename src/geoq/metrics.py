"""Metrics of a bound: pinball loss, coverage and correlation; and the relative error of a prediction.

Metrics take NumPy arrays or torch tensors of any shape with one row per sample. Most of them accept ``where``, a boolean
mask of the rows, of rows and lead times, or of single values, for example the mask of safe queries. A metric of no
values is nan; nan among the values is refused.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, to_tensor
from geoq.checks import check_count, check_number
from geoq.quantiles import check_quantile, pinball_loss


def pinball(
    error: Array, error_hat: Array, quantile: float, where: Array | None = None
) -> float:
    r"""Mean pinball loss, in the unit of the error; it is smallest if the bound is the quantile of the error.

    .. math:: \operatorname{mean} \max(\tau (E - \widehat E), (\tau - 1) (E - \widehat E))

    Args:
        error: Observed errors :math:`E`.
        error_hat: Their bounds :math:`\widehat E`, in the same shape.
        quantile: Quantile level :math:`\tau`, between 0 and 1.
        where: Boolean mask of the values to include; None includes all.

    Example:
        An error above its bound costs 0.9 of the difference, an error below its bound 0.1 of it:

        >>> round(pinball(np.array([3.0, 0.0]), np.array([1.0, 1.0]), 0.9), 6)
        0.95
    """
    check_quantile(quantile, "quantile")
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    return float(pinball_loss(values, estimates, quantile).mean())


def coverage(error: Array, error_hat: Array, where: Array | None = None) -> float:
    r"""Fraction of the errors that do not exceed their bound.

    .. math:: \operatorname{mean} 1[E \le \widehat E]

    Args:
        error: Observed errors :math:`E`.
        error_hat: Their bounds :math:`\widehat E`, in the same shape.
        where: Boolean mask of the values to include; None includes all.

    Example:
        >>> error, error_hat = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
        >>> round(coverage(error, error_hat), 3)
        0.667
        >>> safe = np.array([True, True, False])
        >>> coverage(error, error_hat, where=safe)
        1.0
    """
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    return float((values <= estimates).double().mean())


def correlation(error: Array, error_hat: Array, where: Array | None = None) -> float:
    """Pearson correlation of errors and bounds; nan if one of them is constant, as the bound of split conformal prediction is.

    Args:
        error: Observed errors.
        error_hat: Their bounds, in the same shape.
        where: Boolean mask of the values to include; None includes all.

    Example:
        >>> error, error_hat = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 9.0])
        >>> round(correlation(error, error_hat), 6)
        1.0
    """
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    if len(values) < 2 or any(
        bool((part == part[0]).all()) for part in (values, estimates)
    ):
        return math.nan
    return float(torch.corrcoef(torch.stack([values, estimates]))[0, 1])


def relative_l2(y: Array, y_hat: Array, where: Array | None = None) -> float:
    r"""Norm of the error of a prediction divided by the norm of the reference, over all values together.

    .. math:: \|y - \widehat y\|_2 / \|y\|_2

    Args:
        y: Reference values.
        y_hat: Predictions, in the same shape.
        where: Boolean mask of the values to include; None includes all.

    Example:
        >>> y = np.array([[3.0, 0.0], [0.0, 4.0]])
        >>> relative_l2(y, y + 0.5)
        0.2
    """
    reference, prediction = _selected(y, y_hat, where, names=("y", "y_hat"))
    return float((reference - prediction).norm() / reference.norm())


@dataclass(frozen=True)
class CoverageBin:
    """Coverage of the rows whose score lies in (lower, upper]; the first bin also contains ``lower``.

    Attributes:
        lower: Lower end of the bin.
        upper: Upper end of the bin.
        count: Number of scores in the bin.
        coverage: Fraction of the errors in the bin that do not exceed their bound.
    """

    lower: float
    upper: float
    count: int
    coverage: float


def coverage_by_bin(
    error: Array, error_hat: Array, score: Array, n_bins: int
) -> list[CoverageBin]:
    """Coverage in bins of the support score, in ascending order, that contain about the same number of rows.

    Args:
        error: Observed errors.
        error_hat: Their bounds, in the same shape.
        score: One score per row, or per row and lead time.
        n_bins: Largest number of bins. Equal scores are in the same bin, so repeated scores may give fewer bins.

    Example:
        >>> error, error_hat = np.array([0.1, 0.2, 0.9, 0.3]), np.full(4, 0.5)
        >>> score = np.array([1.0, 2.0, 4.0, 3.0])
        >>> for bin in coverage_by_bin(error, error_hat, score, n_bins=2):
        ...     print(bin)
        CoverageBin(lower=1.0, upper=2.0, count=2, coverage=1.0)
        CoverageBin(lower=2.0, upper=4.0, count=2, coverage=0.5)
    """
    check_count(n_bins, "n_bins")
    values, estimates = _pair(error, error_hat, names=("error", "error_hat"))
    scores = to_tensor(score, "score").to(values)
    _check_leading(scores, values, "score")
    _check_known(values, estimates, ("error", "error_hat"))
    _check_known(scores, scores, ("score", "score"))
    # More bins than scores would be empty.
    n_bins = min(n_bins, max(1, scores.numel()))
    covered = (values <= estimates).double()
    if not scores.numel():
        return []
    # One coverage per score: the mean over the values of its row.
    covered = covered.reshape(scores.numel(), -1).mean(dim=1)
    flat = scores.flatten()
    ranks = (torch.arange(1, n_bins + 1) * len(flat) / n_bins).ceil().long()
    upper = flat.sort().values[ranks.to(flat.device) - 1].unique()
    lower = torch.cat([flat.min()[None], upper[:-1]])
    bins = torch.searchsorted(upper, flat)
    return [
        CoverageBin(
            float(low),
            float(high),
            int((bins == b).sum()),
            float(covered[bins == b].mean()),
        )
        for b, (low, high) in enumerate(zip(lower, upper, strict=True))
    ]


def coverage_by_lead(
    error: Array, error_hat: Array, axis: int = 1
) -> Float[np.ndarray, " n_leads"]:
    """Coverage at each lead time, or at each index of another axis.

    The coverage over all lead times can hide that it decreases with the lead time.

    Args:
        error: Observed errors.
        error_hat: Their bounds, in the same shape.
        axis: Axis of the lead times.

    Example:
        >>> error = np.array([[0.1, 0.4, 0.9], [0.2, 0.6, 0.8]])
        >>> coverage_by_lead(error, np.full((2, 3), 0.5)).tolist()
        [1.0, 0.5, 0.0]
    """
    values, estimates = _pair(error, error_hat, names=("error", "error_hat"))
    check_number(axis, "axis", "the number of an axis, such as 1")
    if not -values.ndim <= axis < values.ndim:
        raise ValueError(
            f"axis={axis}, but error has {values.ndim} dimensions; choose one of its axes."
        )
    _check_known(values, estimates, ("error", "error_hat"))
    covered = (values <= estimates).double().movedim(axis, 0)
    return covered.reshape(len(covered), -1).mean(dim=1).cpu().numpy()


def _pair(
    first: Array, second: Array, *, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Two arrays as tensors of float64, checked for equal shapes."""
    left = to_tensor(first, names[0]).double()
    right = to_tensor(second, names[1]).to(left)
    if left.shape != right.shape:
        raise ValueError(
            f"{names[0]} has shape {tuple(left.shape)} and {names[1]} has {tuple(right.shape)}, "
            "but they are compared value by value; give both the same shape."
        )
    if not left.ndim:
        raise ValueError(
            f"{names[0]} is a single number, but it needs one row per sample; pass an array."
        )
    return left, right


def _selected(
    first: Array, second: Array, where: Array | None, *, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """The values of two arrays where the mask is true."""
    left, right = _pair(first, second, names=names)
    if where is None:
        _check_known(left, right, names)
        return left.flatten(), right.flatten()
    mask = torch.as_tensor(where, device=left.device)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"where has dtype {mask.dtype}, but it must be a boolean mask; pass an array of dtype bool."
        )
    _check_leading(mask, left, "where")
    left, right = left[mask], right[mask]
    _check_known(left, right, names)
    return left.flatten(), right.flatten()


def _check_known(left: Tensor, right: Tensor, names: tuple[str, str]) -> None:
    """Refuse nan, which is neither covered nor exceeded."""
    for values, name in zip((left, right), names, strict=True):
        if not (missing := values.isnan()).any():
            continue
        where = ", ".join(str(int(i)) for i in missing.nonzero()[0])
        raise ValueError(
            f"{name}[{where}] is nan ({int(missing.sum())} of {values.numel()} values), for example because the query has no "
            "answer or the error is unknown; leave these values out of all arrays, or out of where."
        )


def _check_leading(part: Tensor, whole: Tensor, name: str) -> None:
    """Raise unless an array has the shape of the leading axes of another."""
    if not part.ndim or part.shape != whole.shape[: part.ndim]:
        raise ValueError(
            f"{name} has shape {tuple(part.shape)}, but the values have shape {tuple(whole.shape)}; "
            f"pass {name} with one entry per row, or per value."
        )
