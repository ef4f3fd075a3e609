"""The second model beside the surrogate: which has the smaller held-out errors; and alarms for surrogates that were trained on the data."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree

from geoq.arrays import chunks, few_threads, flat, permutation
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.bounds.two_laws import TwoLawBound
from geoq.checks import warn
from geoq.core.tuples import Tuples
from geoq.data.companion import field_opinion
from geoq.data.coordinates import Coordinates
from geoq.data.domain import MAX_COLUMNS
from geoq.data.masks import filled_with_means
from geoq.data.process import Process, second_opinion
from geoq.quantiles import pinball_loss

# ``fit`` warns if the held-out errors of the process are below this fraction of the surrogate's.
CLEARLY = 0.5
# A companion of fields is used if its held-out error is at most this many times the surrogate's. It is fitted if each fold leaves in
# this many pairs, and if the outputs times the number of folds have at most this many numbers.
CLOSE, MIN_COMPANION, MAX_COMPANION = 2.0, 20, 2**24
# The bound of tables is used for fields of a few parameters if its loss is below this fraction: a learned factor lowers the other one, too.
SHARPER = 0.8
# Features of the user are used below this fraction of the loss. They are logarithms if their middle spans this factor.
USEFUL, MIDDLE = 0.98, 3.0
# The alarm mixes the inputs of at most this many rows with the inputs of their nearest rows.
N_MIXED = 200
# It rings if the surrogate is this many times as far from the process there as from the outputs at the rows, and farther than the
# process expects.
MUCH_LARGER = 2.0
# A root mean squared error below this fraction of the standard deviation of y is as small as at training points.
IMPLAUSIBLE = 1e-5


def with_second_opinion(tuples: Tuples, model: Any) -> Tuples:
    """The tuples with what a second model predicts; without it if the bound does not use it, or if its errors are too large."""
    points = tuples.points
    outputs = filled_with_means(points.outputs.astype(float))
    z, splits = flat(points.space.normalized).astype(float), points.splits
    known = points.coordinates
    if points.layout.is_table or getattr(model, "uses_opinion", False):
        process, opinion = second_opinion(z, flat(outputs), splits)
        return replace(tuples, points=replace(points, process=process), opinion=opinion)
    usable = getattr(model, "uses_companion", False) and points.metric is not None
    usable &= tuples.predictions.shape[1:] == tuples.field_shape == outputs.shape[1:]
    usable &= tuples.position is None and known.column is None and not known.log.any()
    usable &= min(len(left_in) for left_in, _ in splits) >= MIN_COMPANION
    if not usable or len(splits) * outputs.size > MAX_COMPANION:
        return tuples
    weight = getattr(points.metric, "weight", None)
    units = known.mean.astype(float), known.scale.astype(float) / (1 if weight is None else weight)
    with few_threads(0):  # small matrices: threads would wait for each other
        companion, opinion = field_opinion(z, units, outputs, points.layout, splits)
    found = replace(tuples, points=replace(points, process=companion), opinion=opinion)
    comparison = compared(found, None)
    return tuples if comparison is None or comparison[1] > CLOSE else found


def for_parameters(plain: Tuples, usual: Tuples, how: Any) -> Tuples:
    """For fields that depend on a few parameters: the tuples with a Gaussian process if ``TwoLawBound`` has a clearly smaller held-out loss.

    Both bounds are fitted to half of the points and compared on the other half, ``FieldBound`` without its learned factor.
    """
    points, n_values = plain.points, len(plain.points.splits) * plain.points.outputs.size
    usable = how.bound_model is None and points.layout.on_cells and points.metric is not None
    usable &= plain.predictions.shape[1:] == plain.field_shape == points.outputs.shape[1:]
    if not usable or points.coordinates.mean.size > MAX_COLUMNS or n_values > MAX_COMPANION:
        return usual
    sharper, losses = with_second_opinion(plain, TwoLawBound()), []
    for model, own in ((FieldBound(factor=NoFactor()), usual), (TwoLawBound(), sharper)):
        losses.append(held_out_losses(model, own, how.quantile).sum())
    return sharper if losses[1] < SHARPER * losses[0] else usual


def held_out_losses(
    model: Any, tuples: Tuples, quantile: float, size: Any = 1.0
) -> Float[np.ndarray, " n"]:
    """The weighted loss of each tuple, in units of ``size``, under a bound that is fitted to the other half of the points."""
    half = permutation(int(tuples.group.max()) + 1)[tuples.group] % 2 == 0
    missed = np.zeros(len(tuples))
    for out in (half, ~half):
        bound = model.fit(tuples[~out], quantile)(tuples[out].features)
        loss = np.nan_to_num(pinball_loss(tuples[out].error, bound, quantile))
        missed[out] = (flat(loss) / size).mean(axis=1)
    return tuples.weight * missed


def with_user_features(tuples: Tuples, numbers: Any, how: Any) -> Tuples:
    """The tuples with the features of the user if these lower the held-out loss of the bound, for fields without its learned factor."""
    if numbers is None:
        return tuples
    points, inner, size = tuples.points, tuples.interpolating, np.ones(1)
    numbers = numbers[tuples.row]
    user: Any = Coordinates.fit(numbers, logarithms=True, middle=MIDDLE)
    found, model = replace(tuples, user=user(numbers)), how.bound_for(points.layout)
    if how.bound_model is None and isinstance(points.process, Process):
        model = TwoLawBound()
    if isinstance(model, FieldBound):
        model = replace(model, factor=NoFactor())
    elif points.layout.is_table:  # outputs can have different units
        size = flat(filled_with_means(tuples.error)).mean(axis=0).clip(min=1e-300)
    one, other = (held_out_losses(model, part, how.quantile, size) for part in (found, tuples))
    places = [rows for rows in (inner, ~inner) if rows.any()]
    ratios = [float(one[rows].sum() / max(other[rows].sum(), 1e-300)) for rows in places]
    if max(ratios) >= USEFUL:
        found, user = tuples, None
    return replace(found, points=replace(points, user=user, user_loss=(ratios[0], ratios[-1])))


def compared(tuples: Tuples, names: Sequence[str] | None) -> tuple[str, float] | None:
    """Mean errors of the second model and of the surrogate in a sentence, and their ratio.

    Both are errors at the held-out points of the interpolating folds, of the whole field, or of the output for which the second model
    is the best beside the surrogate. None without a second model, or if the surrogate predicts something else than the outputs.
    """
    inner = tuples[tuples.interpolating]
    outputs, predictions = inner.points.outputs, inner.predictions
    process, opinion = inner.points.process, inner.opinion
    if process is None or opinion is None or outputs.shape[1:] != predictions.shape[1:]:
        return None
    truth = flat(outputs).astype(float)[inner.point]
    counts = ~np.isnan(truth).all(axis=0)
    if not counts.any():
        return None
    answers = flat(predictions)[inner.row].astype(float), opinion.mean
    errors = [np.nanmean(abs(each - truth)[:, counts], axis=0) for each in answers]
    if not inner.points.layout.is_table:
        errors = [error.mean(keepdims=True) for error in errors]
    surrogate, second = errors
    j, of = int((second / np.maximum(surrogate, 1e-300)).argmin()), ""
    if len(surrogate) > 1:
        known = names if names is not None and len(names) == len(surrogate) else None
        of = f" of output {j if known is None else known[j]}"
    text = (
        f"{process.words} has a mean held-out error{of} of {second[j]:.2g}, the surrogate "
        f"{surrogate[j]:.2g}"
    )
    return text, float(second[j] / max(surrogate[j], 1e-300))


def calibration_text(fitted: Any) -> str:
    """The data, the folds and the mean errors in words."""
    n, tuples, kind = len(fitted.error), fitted.tuples, fitted.layout.described()
    if tuples is None:
        return f"{n} {kind}; the file was saved without the calibration tuples."
    comparison = compared(tuples, fitted.output_names)
    also = "" if comparison is None else f" {comparison[0]}."
    inner = tuples[tuples.interpolating]
    counted = inner.error[~np.isnan(inner.error)]
    held_out = float(counted.mean()) if counted.size else 0.0
    scheme = fitted.families[int(inner.family[0])]
    by_folds = f", and of the fold surrogates at held-out points of {scheme} it is {held_out:.3g}"
    if (loss := tuples.points.user_loss) is not None:
        unused = "" if fitted.user is not None else ", so the bound does not use them"
        also += (
            f" The held-out loss with the features of the user is {loss[0]:.2f} of the loss without them amid the data and "
            f"{loss[1]:.2f} outside{unused}."
        )
    return (
        f"{n} {kind}, held out {len(tuples)} times in all by {int(tuples.fold.max()) + 1} folds. The mean error of the deployed "
        f"surrogate at these points is {float(fitted.error_size.mean()):.3g}{by_folds if tuples.anchor_errors is not None else ''}.{also}"
    )


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

    ``at_rows`` are its errors at the rows, ``between`` its distances from the process between the rows, and ``deviation`` is the deviation of
    the process there, without the noise of a measurement.
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


def warn_if_trained_on(prediction: np.ndarray, y: np.ndarray) -> bool:
    """Warn if the errors are as small as only the errors at training points are; returns whether they are."""
    if prediction.shape != y.shape:
        return False
    squares = np.zeros(y.shape[1:])
    for rows in chunks(len(y), squares.size):
        gap = prediction[rows].astype(float) - y[rows]
        squares += np.nansum(gap * gap, axis=0)
    with warnings.catch_warnings(action="ignore"):  # of cells without values
        deviation = np.nanstd(y, axis=0)
        ratio = np.asarray(np.sqrt(squares / len(y)) / deviation)[deviation > 0]
    implausible = ratio.size > 0 and float(ratio.max()) < IMPLAUSIBLE
    if implausible:
        warn(
            f"the errors of the surrogate are {float(ratio.max()):.1g} of the standard deviation of y, as small as at points "
            "that a surrogate was trained on. With train_surrogate=None it must never have seen x and y; otherwise the bounds are "
            "far too small. Pass points that it was not trained on, or a function train_surrogate(x, y). If the surrogate is new "
            "to these points and so accurate, ignore this warning."
        )
    return implausible
