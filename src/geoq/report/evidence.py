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
    known = {"error": np.where(np.isfinite(bound), error, np.nan), "bound": bound}
    return {"group": np.arange(len(bound)), **known, **more}


def held_out(fitted: Any) -> Rows:
    """The held-out errors of the calibration with the bounds that were fitted to them."""
    tuples = fitted.tuples
    most = min(MOST_ROWS, max(50, MOST_VALUES // flat(tuples.errors[:1]).size))
    some = tuples.subsample(most)
    return _rows(
        some.error,
        bounds_of(fitted.bound, some.features),
        group=some.group,
        distance=some.relation.support_distance / (fitted.typical.support_distance or 1.0),
        family=np.array(fitted.families)[some.family],
        first=some.family == tuples.family[tuples.interpolating][0],
        point=some.point,
    )


def of_answer(fitted: Any, answer: Any, y: Any = None) -> Rows:
    """The bounds of queries and, given their reference outputs, the errors; raises for outputs of other names or shapes."""
    bound, error = numbers_of(answer.error_hat), np.full(answer.error_hat.shape, np.nan)
    if y is not None:
        error = checked_pairs(fitted, native(answer.asked), y).error
        error = error if fitted.exact is None else np.where(fitted.exact, np.nan, error)
    distance = numbers_of(answer.support_distance) / (fitted.typical.support_distance or 1.0)
    score, safe = numbers_of(answer.support_score), numbers_of(answer.safe) > 0
    return _rows(error, bound, distance=distance, score=score, first=safe)


def of_steps(error: Any, bound: Any, safe: Any, distance: Any = None) -> Rows:
    """The bounds and the errors along forecasts, one row per step; without flags the first kind is the first half of the steps."""
    n, n_steps = bound.shape[:2]
    step = np.tile(np.arange(n_steps) + 1, n)
    first = step <= n_steps / 2 if safe is None else safe.reshape(-1)
    rows = {"first": first, "step": step, "group": np.repeat(np.arange(n), n_steps)}
    if distance is not None:
        rows["distance"] = distance.reshape(-1) / np.median(distance[np.isfinite(distance)])
    return _rows(*(numbers_of(part).reshape(n * n_steps, -1) for part in (error, bound)), **rows)


def of_forecasts(answer: Any, y: Any = None) -> Rows:
    """The bounds along forecasts and, given the true states after each step, the errors."""
    error = np.full(answer.error_hat.shape, np.nan)
    if y is not None:
        prediction = np.nan_to_num(numbers_of(answer.prediction))
        error = errors_of(prediction, absolute_error, numbers_of(y), native(y))
    supported = np.logical_and.accumulate(numbers_of(answer.safe) > 0, axis=1)
    score = numbers_of(answer.support_score).reshape(-1)
    return of_steps(error, answer.error_hat, supported) | {"score": score}


def covered(rows: Rows, where: Any = slice(None), columns: Any = slice(None)) -> list[Any]:
    """The fraction of errors within their bounds, the ends of its interval, and the numbers of values and of independent rows.

    The interval is Wilson's with the number of groups. It is not too narrow, because a mean over the values of a group varies at most
    as much as one of them.
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


def in_bins(rows: Rows, name: str, text: str) -> list[list[Any]]:
    """The coverage in bins of a quantity with about equally many rows; ``text`` has places for both ends of a bin."""
    values = rows[name]
    finite = np.flatnonzero(np.isfinite(values) & ~np.isnan(rows["error"]).all(axis=1))
    n_bins = max(1, min(N_BINS, len(np.unique(rows["group"][finite])) // FEWEST))
    order = finite[np.argsort(values[finite], kind="stable")]
    parts = [part for part in np.array_split(order, n_bins) if len(part)]
    return [[text.format(values[p[0]], values[p[-1]]), *covered(rows, p)] for p in parts]


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
    """How much of the variation of the errors each input explains, where they are largest, and how many times the mean they are there.

    It is the fraction of the variance of their ranks that lies between bins of the input, without what chance explains.
    """
    own = rows["first"] if rows["first"].sum() >= 50 else np.ones(len(rows["first"]), bool)
    size = mean_of_each(rows["error"][own] / np.nanmean(rows["error"], axis=0).clip(1e-300))
    own, size = np.flatnonzero(own)[np.isfinite(size)], size[np.isfinite(size)]
    rank, found = size.argsort().argsort() - (len(size) - 1) / 2, []
    for name, (_, data, column) in columns.items():
        values = data[rows["point"][own]]
        distinct, part = np.unique(values, return_inverse=True)
        if len(distinct) > N_PARTS:
            cuts = np.quantile(values, np.linspace(0, 1, N_PARTS + 1)[1:-1])
            part = np.searchsorted(np.unique(cuts), values)
        members = [part == p for p in np.unique(part)]
        whole, between = (rank**2).sum(), sum(m.sum() * rank[m].mean() ** 2 for m in members)
        chance = (len(members) - 1) * (whole - between) / max(1, len(rank) - len(members))
        worst = max(members, key=lambda m: float(size[m].mean()))
        ends = dict.fromkeys(column.text(f(values[worst])) for f in (np.min, np.max))
        ratio = float(size[worst].mean() / (size.mean() or 1.0))
        found.append([name, max(0.0, float((between - chance) / whole)), " to ".join(ends), ratio])
    return sorted(found, key=lambda row: -row[1])
