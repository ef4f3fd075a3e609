"""Scores of a bound and of a prediction that the package does not contain, and the row that most benchmarks write."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.record import QUANTILE
from geoq.metrics import correlation, coverage, pinball


def relative_l2(y: Any, prediction: Any) -> float:
    """Norm of the error of a prediction divided by the norm of the reference, over all values together."""
    reference = np.asarray(y, dtype=float)
    return float(np.linalg.norm(reference - np.asarray(prediction)) / np.linalg.norm(reference))


@dataclass(frozen=True)
class CoverageBin:
    """Coverage of the rows whose score lies in (lower, upper]; the first bin also contains ``lower``."""

    lower: float
    upper: float
    count: int
    coverage: float


def coverage_by_bin(error: Any, bound: Any, score: Any, n_bins: int) -> list[CoverageBin]:
    """Coverage in bins of the support score, in ascending order, that contain about the same number of rows.

    Equal scores are in the same bin, so repeated scores may give fewer bins.
    """
    covered = (np.asarray(error) <= np.asarray(bound)).reshape(len(score), -1).mean(axis=1)
    ranks = np.ceil(np.arange(1, n_bins + 1) * len(score) / n_bins).astype(int)
    upper = np.unique(np.sort(score)[ranks - 1])
    lower = np.concatenate([[np.min(score)], upper[:-1]])
    bins = np.searchsorted(upper, score)
    return [
        CoverageBin(low, high, int((bins == b).sum()), float(covered[bins == b].mean()))
        for b, (low, high) in enumerate(zip(lower.tolist(), upper.tolist(), strict=True))
    ]


def coverage_by_lead(error: Any, bound: Any, axis: int = 1) -> np.ndarray:
    """Coverage at each lead time, or at each index of another axis."""
    covered = np.moveaxis(np.asarray(error) <= np.asarray(bound), axis, 0)
    return np.asarray(covered.reshape(len(covered), -1).mean(axis=1))


def row(
    method: str,
    *,
    setting: str = "",
    seed: int,
    y: np.ndarray,
    prediction: np.ndarray,
    bound: np.ndarray,
    safe: np.ndarray | None = None,
    train_seconds: float = 0.0,
    inference_seconds: float = 0.0,
) -> dict[str, Any]:
    """One row of a results file; the columns ``safe_`` are restricted to the mask ``safe``, and empty without it."""
    error = abs(y - prediction)
    inside = {
        "fraction": lambda: float(np.mean(safe)),
        "pinball": lambda: pinball(error, bound, QUANTILE, safe),
        "correlation": lambda: correlation(error, bound, safe),
        "coverage": lambda: coverage(error, bound, safe),
    }
    return {
        "method": method,
        "setting": setting,
        "seed": seed,
        "pinball": pinball(error, bound, QUANTILE),
        "correlation": correlation(error, bound),
        "coverage": coverage(error, bound),
        **{f"safe_{name}": None if safe is None else make() for name, make in inside.items()},
        "relative_l2": relative_l2(y, prediction),
        "train_seconds": train_seconds,
        "inference_seconds": inference_seconds,
    }
