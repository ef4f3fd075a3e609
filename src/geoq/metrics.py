"""How good a bound is: pinball loss, coverage, correlation, and where each of them fails.

Every metric takes arrays of any shape, of either kind, and ``where=``: a boolean mask over the rows, over rows and
lead times, or over single values. The safe region is such a mask, not a second evaluator. Over nothing a metric is nan.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, to_tensor
from geoq.quantiles import check_quantile, pinball_loss


def pinball(
    error: Array,
    error_hat: Array,
    quantile: float,
    where: Array | None = None,
) -> float:
    r"""Mean pinball loss; least where the bound is the quantile of the error.

    .. math:: \operatorname{mean} \max(\tau (E - \widehat E), (\tau - 1) (E - \widehat E))
    """
    check_quantile(quantile, "quantile")
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    return float(pinball_loss(values, estimates, quantile).mean())


def coverage(
    error: Array,
    error_hat: Array,
    where: Array | None = None,
) -> float:
    r"""Share of the errors that do not exceed their bound.

    .. math:: \operatorname{mean} 1[E \le \widehat E]
    """
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    return float((values <= estimates).double().mean())


def correlation(
    error: Array,
    error_hat: Array,
    where: Array | None = None,
) -> float:
    """Pearson correlation of errors and bounds; nan where either is constant, as a conformal bound is."""
    values, estimates = _selected(error, error_hat, where, names=("error", "error_hat"))
    if len(values) < 2 or any(
        bool((part == part[0]).all()) for part in (values, estimates)
    ):
        return math.nan
    return float(torch.corrcoef(torch.stack([values, estimates]))[0, 1])


def relative_l2(
    y: Array,
    y_hat: Array,
    where: Array | None = None,
) -> float:
    r"""Norm of the error in units of the norm of the reference, over all values at once.

    .. math:: \|y - \widehat y\|_2 / \|y\|_2
    """
    reference, prediction = _selected(y, y_hat, where, names=("y", "y_hat"))
    return float((reference - prediction).norm() / reference.norm())


@dataclass(frozen=True)
class CoverageBin:
    """Coverage of the rows whose score lies in (lower, upper]; the first bin contains its lower end as well."""

    lower: float
    upper: float
    count: int
    coverage: float


def coverage_by_bin(
    error: Array,
    error_hat: Array,
    score: Array,
    n_bins: int,
) -> list[CoverageBin]:
    """Coverage in bins of the support score that hold about equally many rows.

    Equal scores share a bin, so there are fewer bins than asked for where scores repeat.
    """
    if n_bins < 1:
        raise ValueError(f"n_bins={n_bins}, but it counts bins; choose 1 or more.")
    values, estimates = _pair(error, error_hat, names=("error", "error_hat"))
    scores = to_tensor(score, "score").to(values)
    _check_leading(scores, values, "score")
    covered = (values <= estimates).double()
    if not scores.numel():
        return []
    # One coverage per score: a row's mean over its field.
    covered = covered.reshape(scores.numel(), -1).mean(dim=1)
    flat = scores.flatten()
    ranks = (torch.arange(1, n_bins + 1) * len(flat) / n_bins).ceil().long().clamp(
        min=1
    ) - 1
    upper = flat.sort().values[ranks.to(flat.device)].unique()
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
    """Coverage at each place along one axis, lead times for rollouts: pooled coverage hides how it drifts."""
    values, estimates = _pair(error, error_hat, names=("error", "error_hat"))
    if not -values.ndim <= axis < values.ndim:
        raise ValueError(
            f"axis={axis}, but error has {values.ndim} dimensions; choose one of them."
        )
    covered = (values <= estimates).double().movedim(axis, 0)
    return covered.reshape(len(covered), -1).mean(dim=1).cpu().numpy()


def roc_area(score: Array, positive: Array) -> float:
    r"""Area under the ROC curve: how well the score tells the positive cases from the others.

    .. math:: P(s^+ > s^-) + \tfrac12 P(s^+ = s^-)

    For a support score the positive cases are those whose error exceeds what was promised. nan if all are of one kind.
    """
    scores, truth = _pair(score, positive, names=("score", "positive"))
    scores, is_positive = scores.flatten(), truth.flatten() > 0
    n_positive = int(is_positive.sum())
    n_negative = len(scores) - n_positive
    if not n_positive or not n_negative:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    midrank = counts.cumsum(0) - (counts - 1) / 2
    rank_sum = float(midrank[place][is_positive].double().sum())
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def _pair(
    first: Array, second: Array, *, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    left = to_tensor(first, names[0]).double()
    right = to_tensor(second, names[1]).to(left)
    if left.shape != right.shape:
        raise ValueError(
            f"{names[0]} has shape {tuple(left.shape)} and {names[1]} has {tuple(right.shape)}; "
            "they are compared value by value, so reshape one of them."
        )
    if not left.ndim:
        raise ValueError(f"{names[0]} is a single number; pass one row per sample.")
    return left, right


def _selected(
    first: Array, second: Array, where: Array | None, *, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    left, right = _pair(first, second, names=names)
    if where is None:
        return left.flatten(), right.flatten()
    mask = torch.as_tensor(where, device=left.device)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"where has dtype {mask.dtype}, but it must be a boolean mask; compare it to something first."
        )
    _check_leading(mask, left, "where")
    return left[mask].flatten(), right[mask].flatten()


def _check_leading(part: Tensor, whole: Tensor, name: str) -> None:
    if not part.ndim or part.shape != whole.shape[: part.ndim]:
        raise ValueError(
            f"{name} has shape {tuple(part.shape)}, but error has {tuple(whole.shape)}; "
            f"give one value per row, or per value, of it."
        )
