"""Scores of a bound and of a prediction that the package does not contain, and the row that most benchmarks write."""

import numpy as np

from benchmarks.record import QUANTILE
from geoq.metrics import correlation, coverage, pinball


def relative_l2(y, prediction):
    """Norm of the error of a prediction divided by the norm of the reference, over all values together."""
    reference = np.asarray(y, dtype=float)
    return float(np.linalg.norm(reference - np.asarray(prediction)) / np.linalg.norm(reference))


def scores(error, bound, allowed, safe):
    """Loss and correlation of a bound, and the coverage of what it allows, of all values and of the safe ones."""

    def of(where=None):
        return {
            "pinball": pinball(error, bound, QUANTILE, where),
            "correlation": correlation(error, bound, where),
            "coverage": coverage(error, allowed, where),
        }

    found, inside = of(), dict.fromkeys(("fraction", "pinball", "correlation", "coverage"))
    if safe is not None:
        inside = {"fraction": float((1.0 * safe).mean())} | of(safe)
    return found | {f"safe_{name}": value for name, value in inside.items()}


def row(about, y, answer, safe=None, seconds=(0.0, 0.0), rows=...):
    """One row of a results file: what it is about, the scores of some rows of an answer, and the seconds of fit and answer.

    The columns ``safe_`` are restricted to the mask ``safe``, and empty without it.
    """
    y, prediction, bound = y[rows], answer.prediction[rows], answer.error_hat[rows]
    safe = None if safe is None else safe[rows]
    return {
        **about,
        **scores(abs(y - prediction), bound, bound, safe),
        "relative_l2": relative_l2(y, prediction),
        "train_seconds": seconds[0],
        "inference_seconds": seconds[1],
    }
