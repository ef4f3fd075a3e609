"""What a report counts: errors and bounds, one row per held-out point, test pair or step of a forecast, as plain arrays."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy.special import ndtri

from geoq.arrays import flat, native
from geoq.bounds.protocol import bounds_of
from geoq.core.agreement import mean_of_each
from geoq.core.assessment import numbers_of
from geoq.core.conformal import checked_pairs
from geoq.data.coordinates import Part
from geoq.data.table import schema_of
from geoq.surrogate import absolute_error, errors_of

# Arrays by name: "error" and "bound" with a row per query and a column per value, nan where an error does not count, and "group":
# rows of one group depend on each other. "first" has the rows of the first of two kinds, such as safe. Where known also "distance",
# in medians of the calibration, "family", "score", "step", and "point", the row of the data.
Rows: TypeAlias = dict[str, np.ndarray]
# At most this many held-out rows, and this many of their values, are read.
MOST_ROWS, MOST_VALUES = 5_000, 2**22
# The level of all intervals, the most bins of distances with their fewest groups, and the bins of an input.
CONFIDENCE, N_BINS, FEWEST, N_PARTS = 0.95, 8, 20, 5


def _rows(error: np.ndarray, bound: np.ndarray, **more: np.ndarray) -> Rows:
    error, bound = flat(error).astype(float), flat(bound).astype(float)
    error = np.where(np.isfinite(bound), error, np.nan)
    return {"group": np.arange(len(bound)), "error": error, "bound": bound, **more}


def held_out(fitted: Any) -> Rows:
    """The held-out errors of the calibration with the bounds that were fitted to them."""
    tuples = fitted.tuples
    some = tuples.subsample(min(MOST_ROWS, max(50, MOST_VALUES // tuples.errors[:1].size)))
    more = {"group": some.group, "family": np.array(fitted.families)[some.family]}
    more["distance"] = some.relation.support_distance / (fitted.typical.support_distance or 1.0)
    more["first"] = some.family == tuples.family[tuples.interpolating][0]
    bound = bounds_of(fitted.bound, some.features)
    return _rows(some.error, bound, point=some.point, **more)


def of_answer(fitted: Any, answer: Any, y: Any = None) -> Rows:
    """The bounds of queries and, given their reference outputs, the errors; raises for outputs of other names or shapes."""
    bound, error = numbers_of(answer.error_hat), np.full(answer.error_hat.shape, np.nan)
    if y is not None:
        error = checked_pairs(fitted, native(answer.asked), y).error
        error = error if fitted.exact is None else np.where(fitted.exact, np.nan, error)
    distance = numbers_of(answer.support_distance) / (fitted.typical.support_distance or 1.0)
    score, safe = numbers_of(answer.support_score), numbers_of(answer.safe) > 0
    return _rows(error, bound, distance=distance, score=score, first=safe)


def of_steps(error: Any, bound: Any, **more: Any) -> Rows:
    """The bounds and the errors along forecasts, one row per step; without flags the first kind is the first half of the steps."""
    n, n_steps = bound.shape[:2]
    step = np.tile(np.arange(n_steps) + 1, n)
    rows = {"first": step <= n_steps / 2, "step": step, "group": np.repeat(np.arange(n), n_steps)}
    error, bound = (numbers_of(part).reshape(n * n_steps, -1) for part in (error, bound))
    return _rows(error, bound, **rows | {name: part.reshape(-1) for name, part in more.items()})


def of_forecasts(answer: Any, y: Any = None) -> Rows:
    """The bounds along forecasts and, given the true states after each step, the errors."""
    error = np.full(answer.error_hat.shape, np.nan)
    if y is not None:
        prediction = np.nan_to_num(numbers_of(answer.prediction))
        error = errors_of(prediction, absolute_error, numbers_of(y), native(y))
    safe = np.logical_and.accumulate(numbers_of(answer.safe) > 0, axis=1)
    score = numbers_of(answer.support_score)
    return of_steps(error, answer.error_hat, first=safe, score=score)


def covered(rows: Rows, where: Any = slice(None), columns: Any = slice(None)) -> list[Any]:
    """The fraction of errors within their bounds, the ends of its interval, and the numbers of values and of independent rows.

    The interval is Wilson's with the number of groups: a mean over the values of a group varies at most as much as one of them.
    """
    error, bound = rows["error"][where][:, columns], rows["bound"][where][:, columns]
    counts = ~np.isnan(error)
    n = len(np.unique(rows["group"][where][counts.any(axis=1)]))
    if not n:
        return [math.nan, math.nan, math.nan, 0, 0]
    p, z = float((error <= bound)[counts].mean()), float(ndtri((1 + CONFIDENCE) / 2))
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + side * width) / (1 + z * z / n) for side in (-1, 1))
    return [p, max(0.0, low), min(1.0, high), int(counts.sum()), n]


def bins_of(rows: Rows) -> list[tuple[str, np.ndarray]]:
    """Bins of the distances with about equally many rows: their ends as a text, and the numbers of their rows."""
    values = rows.get("distance", np.full(len(rows["error"]), np.nan))
    order = np.argsort(values, kind="stable")
    order = order[(np.isfinite(values) & ~np.isnan(rows["error"]).all(axis=1))[order]]
    n_bins = max(1, min(N_BINS, len(np.unique(rows["group"][order])) // FEWEST))
    parts = [part for part in np.array_split(order, n_bins) if len(part)]
    return [(f"{values[p[0]]:.2g} to {values[p[-1]]:.2g} medians", p) for p in parts]


def columns_of(fitted: Any, names: Sequence[str] | None) -> dict[str, tuple[int, np.ndarray, Any]]:
    """For each input of a table that varies: its number, its values in the data as numbers, and its column of the schema."""
    known, inputs, found = fitted.coordinates, fitted.geometry.points.inputs, {}
    if len(known.input_shape) != 1 or fitted.layout.holds(known.input_shape):
        return {}
    own = (fitted.schema or schema_of(np.zeros((1, *known.input_shape)))).named(names)
    for number in np.flatnonzero(known.inputs_that_vary).tolist():
        of = known.input_of == number
        levels, values = (np.flatnonzero(of & known.is_part(p)) for p in (Part.LEVEL, Part.VALUE))
        if len(values):
            column = flat(known.inverse(inputs))[:, values[0]]
        elif len(levels):
            column = known.level[levels][inputs[:, levels].argmax(axis=1)]
        else:
            continue
        name = own[number] if fitted.schema or names else f"input {number}"
        found[name] = number, column, own.columns[number]
    return found


def carriers(rows: Rows, columns: dict[str, Any]) -> list[list[Any]]:
    """The fraction of the variance of the ranks of the errors that lies between bins of each input, without what chance explains.

    With the bin where the errors are largest, and how many times the mean error they are there.
    """
    own = rows["first"] if rows["first"].sum() >= 50 else np.ones(len(rows["first"]), bool)
    size = mean_of_each(rows["error"][own] / np.nanmean(rows["error"], axis=0).clip(1e-300))
    own, size = np.flatnonzero(own)[np.isfinite(size)], size[np.isfinite(size)]
    rank, found = size.argsort().argsort() - (len(size) - 1) / 2, []
    for name, (_, data, column) in columns.items():
        values = data[rows["point"][own]]
        part = np.unique(values, return_inverse=True)[1]
        if part.max() >= N_PARTS:
            cuts = np.quantile(values, np.linspace(0, 1, N_PARTS + 1)[1:-1])
            part = np.unique(np.searchsorted(cuts, values), return_inverse=True)[1]
        n = np.bincount(part)
        whole, between = (rank**2).sum(), (np.bincount(part, rank) ** 2 / n).sum()
        chance = (len(n) - 1) * (whole - between) / max(1, len(rank) - len(n))
        means = np.bincount(part, size) / n
        worst = values[part == means.argmax()]
        text = " to ".join(dict.fromkeys(map(column.text, (worst.min(), worst.max()))))
        ratio = float(means.max() / (size.mean() or 1.0))
        found.append([name, max(0.0, float((between - chance) / whole)), text, ratio])
    return sorted(found, key=lambda row: -row[1])
