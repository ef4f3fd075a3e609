"""The second opinion beside the surrogate: which of them has the smaller held-out errors, and an alarm for training rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree

from geoq.arrays import flat, permutation
from geoq.checks import warn
from geoq.core.tuples import Tuples

# ``fit`` warns if the held-out errors of the process are below this fraction of the surrogate's.
CLEARLY = 0.5
# The alarm mixes the inputs of at most this many rows with the inputs of their nearest rows.
N_MIXED = 200
# It rings if the surrogate is this many times as far from the process there as from the outputs at the rows, and farther than the
# process expects.
MUCH_LARGER = 2.0


@dataclass(frozen=True)
class SecondOpinion:
    """What a Gaussian process through the data predicts at queries, in the shape of the predictions.

    Attributes:
        prediction: its prediction.
        deviation: its standard deviation.
    """

    prediction: Float[Any, " n *output"]
    deviation: Float[Any, " n *output"]


def compared(tuples: Tuples, names: Sequence[str] | None) -> tuple[str, bool] | None:
    """Mean errors of process and surrogate in a sentence, and whether the process is clearly the better model.

    Both are errors at the held-out points of the interpolating folds, of the output for which the process is the best beside the
    surrogate. None without a process, or if the surrogate predicts something else than the outputs.
    """
    inner = tuples[tuples.interpolating]
    outputs, predictions = inner.points.outputs, inner.predictions
    if inner.opinion is None or outputs.shape[1:] != predictions.shape[1:]:
        return None
    truth = flat(outputs).astype(float)[inner.point]
    counts = ~np.isnan(truth).all(axis=0)
    if not counts.any():
        return None
    answers = flat(predictions)[inner.row].astype(float), inner.opinion.mean
    surrogate, process = (np.nanmean(abs(each - truth)[:, counts], axis=0) for each in answers)
    j, of = int((process / np.maximum(surrogate, 1e-300)).argmin()), ""
    if len(surrogate) > 1:
        known = names if names is not None and len(names) == len(surrogate) else None
        of = f" of output {j if known is None else known[j]}"
    text = (
        f"A Gaussian process through the same data has a mean held-out error{of} of {process[j]:.2g}, the surrogate "
        f"{surrogate[j]:.2g}"
    )
    return text, bool(process[j] < CLEARLY * surrogate[j])


def mixed_rows(
    inputs: Float[np.ndarray, " n *inputs"], z: Float[np.ndarray, " n d"], n: int = N_MIXED
) -> Float[np.ndarray, " m *inputs"]:
    """Some rows with half of their inputs from the row that is nearest in z; means of both rows for single inputs and fields."""
    chosen = np.sort(permutation(len(z))[:n])
    near = cKDTree(z).query(z[chosen], 2)[1]
    one, two = (
        inputs[rows] for rows in (chosen, np.where(near[:, 0] == chosen, near[:, 1], near[:, 0]))
    )
    if one[0].size == 1 or inputs.ndim > 2:
        return 0.6 * one + 0.4 * two  # no ties, as midpoints would have
    swapped = permutation(one[0].size).reshape(one.shape[1:]) % 2 == 0
    return np.where(swapped, two, one)


def warn_of_training_rows(
    at_rows: Float[np.ndarray, " n p"],
    between: Float[np.ndarray, " m p"],
    deviation: Float[np.ndarray, " m p"],
) -> None:
    """Warn if the surrogate is right at the rows and far from the process between them, as it is after a training on them.

    Args:
        at_rows: the errors of the surrogate at the rows.
        between: its distance from the process between the rows.
        deviation: the deviation of the process there, without the noise of a measurement.
    """
    with warnings.catch_warnings(action="ignore"):  # of outputs without values
        own = np.nanmedian(at_rows, axis=0)
    far = np.median(between, axis=0)
    certain = np.median(between / np.maximum(deviation, 1e-300), axis=0) > 1
    ratio = np.where(certain & ~np.isnan(own), far / np.maximum(own, 1e-300), 0.0)
    j = int(ratio.argmax())
    if ratio[j] > MUCH_LARGER:
        warn(
            f"the median error of the surrogate at the rows is {own[j]:.2g}, but between the rows it is {far[j]:.2g} away from a "
            "Gaussian process through them. With train_surrogate=None the surrogate must never have seen x and y; if it was "
            "trained on them, the bounds are far too small: pass rows that it was not trained on, or a function "
            "train_surrogate(x, y). If the surrogate is new to these rows and so accurate, ignore this warning."
        )
