"""Pairs that neither surrogate nor calibration has seen: ``GeoQ.conformalize``."""

from dataclasses import replace
from typing import Any

import numpy as np

from geoq.arrays import flat, native, take, to_numbers
from geoq.checks import check_finite, check_object, warn
from geoq.core.conformal import ConformalFactors, Guarantee
from geoq.core.fitted import Fitted
from geoq.data.masks import outputs_with_nan
from geoq.data.table import Table, check_same_order, listed, output_names, output_rows
from geoq.quantiles import error_ratios
from geoq.surrogate import errors_of

# A pair is at a calibration point if their distance is at most this fraction of the typical distance to an anchor, and has
# its output if all values differ by at most this fraction of the largest output.
SAME_POINT, SAME_VALUE = 1e-6, 1e-9
# Most pairs are rounded pairs of ``fit`` if they are so near: this fraction of the typical distance, and of the deviation of y.
ROUNDED, MOST = (1e-2, 1e-3), 0.5
# A factor below or above this one is far from 1.
FAR = 5.0
# An input that was measured several times is compared with at most this many calibration points.
MAX_REPEATS = 20


def conformalized(fitted: Fitted, x: Any, y: Any, guarantee: Guarantee) -> Fitted:
    """The same calibration with factors from pairs that neither surrogate nor calibration has seen."""
    check_object(guarantee, Guarantee, "guarantee", "WholeField(0.9)")
    if not getattr(fitted.bound, "scalable", True):
        raise TypeError(
            f"{type(fitted.bound).__name__} cannot be conformalized: its bound is one of two values, and a factor on it does not "
            "raise its coverage; choose a higher quantile, or compare several quantile levels with bounds(x, levels)."
        )
    queries, given = fitted.rows_of(x), _named(output_rows(y), fitted.output_names)
    check_same_order(queries, given)
    masked = isinstance(given, np.ma.MaskedArray)
    outputs = outputs_with_nan(given) if masked else to_numbers(given, "y").copy()
    cells = None if fitted.mask is None else fitted.mask.cells
    if cells is None or outputs.shape[1:] != cells.shape:
        cells = np.zeros(outputs.shape[1:], dtype=bool)
    if not masked:
        way_out = "remove or impute these pairs, or mask cells that have no value"
        check_finite(np.where(cells, 0, outputs), "y", way_out)
    outputs[:, cells] = np.nan
    if len(outputs) != len(queries):
        raise ValueError(
            f"x has {len(queries)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    answer, lost = replace(fitted, conformal=ConformalFactors()).parts_of(queries)
    if lost.any():
        row = int(lost.argmax())
        raise ValueError(
            f"pair {row} of {len(queries)} has no bound: {fitted.why_lost(queries, row, None)}."
        )
    # A cell that the surrogate has masked has no bound, so its error does not count.
    prediction = np.nan_to_num(answer["prediction"])
    error = errors_of(prediction, fitted.error_functional, outputs, native(given))
    _check_new(fitted, queries, outputs, error, answer)
    _warn_of_wrong_exact(fitted, error)
    if fitted.exact is not None:
        error = np.where(fitted.exact, np.nan, error)
    ratio = error_ratios(error, answer["error_hat"])
    counts = ~np.isnan(ratio).all(axis=1)
    safe = answer["safe"][counts]
    factors = ConformalFactors.fit(ratio[counts], safe, fitted.quantile, guarantee)
    _warn_if_far(factors.safe)
    return replace(fitted, conformal=factors)


def _named(y: Any, known: tuple[str, ...] | None) -> Any:
    """The outputs in the order of ``fit``; raises for other names."""
    given = output_names(y)
    if known is None or given is None or given == known:
        return y
    if sorted(given) != sorted(known):
        raise ValueError(
            f"y has the outputs {listed(given)}, but fit received {listed(known)}; pass the same outputs in the same units."
        )
    order = [given.index(name) for name in known]
    return Table(y.native[[y.native.columns[j] for j in order]], y.array[:, order])


def _check_new(
    fitted: Fitted, x: Any, outputs: np.ndarray, error: np.ndarray, answer: dict[str, np.ndarray]
) -> None:
    """Raise for a pair that equals one of the calibration in x and y, or for most pairs if they do up to rounding.

    A repeated x with another y is a new measurement.
    """
    limit = ROUNDED[0] * fitted.typical.distance
    near = np.flatnonzero(answer["anchor_distance"][:, 0] <= limit)
    if not len(near):
        return
    n_anchors = min(MAX_REPEATS, len(fitted.geometry.points))
    wider = replace(fitted.geometry, n_anchors=n_anchors)
    wide, _ = replace(fitted, geometry=wider).parts_of(take(x, near))
    anchors = wide["anchors"]
    # A file without tuples keeps the observed errors of the calibration points, but not their outputs.
    known, given = (
        (fitted.error, error) if fitted.tuples is None else (fitted.tuples.points.outputs, outputs)
    )
    known, given = np.nan_to_num(flat(known)), np.nan_to_num(flat(given))[near]
    gap = abs(known[anchors] - given[:, None]).max(axis=2)
    distance = wide["anchor_distance"]
    same = (gap <= SAME_VALUE * abs(known).max()) & (distance <= SAME_POINT * limit / ROUNDED[0])
    if not same.any():
        scale = max(float(known.std()), float(np.max(fitted.typical.error)))
        rounded = (gap <= ROUNDED[1] * scale) & (distance <= limit)
        same = rounded & (rounded.any(axis=1).sum() > MOST * len(x))
    if same.any():
        row, place = np.argwhere(same)[0]
        raise ValueError(
            f"{int(same.any(axis=1).sum())} of {len(x)} pairs equal pairs of fit up to rounding (x[{near[row]}] and its y are row "
            f"{anchors[row, place]} of the data of fit), so their errors are smaller than at new inputs; pass "
            "pairs that neither the surrogate nor fit has received."
        )


def _warn_if_far(factor: float) -> None:
    """Warn of a factor that no chance explains."""
    if 1 / FAR <= factor <= FAR:
        return
    why = (
        "far smaller than at held-out points. Probably the surrogate was trained on these pairs, or fold surrogates are much worse "
        "than the deployed surrogate"
        if factor < 1
        else "far larger than at held-out points. Probably the pairs come from another distribution, or their units, dtype or columns "
        "differ from the ones of fit"
    )
    warn(
        f"the conformal factor is {factor:.3g}, so the errors of the pairs are {why}; check the pairs before you use the bounds."
    )


def _warn_of_wrong_exact(fitted: Fitted, error: np.ndarray) -> None:
    """Warn of errors in cells whose bound is 0, because all errors of ``fit`` are 0 there."""
    if fitted.exact is None:
        return
    wrong = fitted.exact & (np.nan_to_num(error) != 0).any(axis=0)
    if wrong.any():
        place = ", ".join(map(str, np.argwhere(wrong)[0].tolist()))
        warn(
            f"the surrogate is wrong at output [{place}] of these pairs ({int(wrong.sum())} such outputs), but all errors there "
            "are 0 in the data of fit, so the bound is 0 and no guarantee covers these outputs; call fit with data in which "
            "they vary."
        )
