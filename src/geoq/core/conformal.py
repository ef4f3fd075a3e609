r"""``GeoQ.conformalize``: factors on a bound, computed from errors that the bound was not learned from.

.. math:: \widehat E^{(\tau)}(x) = \lambda_{s(x)} \, \widehat E(x), \qquad
    \lambda_s = \widehat Q_\tau\{e_{ij} / \widehat E_j(x_i) : s(x_i) = s\}, \quad s \in \{\text{safe}, \text{not safe}\}
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import flat, native, per_row, take, to_numbers
from geoq.checks import check_finite, check_object, check_quantile, is_number, shortened, warn
from geoq.core.geometry import Relation
from geoq.data.masks import outputs_with_nan
from geoq.data.table import Table, check_same_order, listed, output_names, output_rows
from geoq.quantiles import conformal_factor, error_ratios, inverse_cdf_quantile, n_required
from geoq.surrogate import errors_of, on_scale

if TYPE_CHECKING:
    from geoq.core.fitted import Fitted


# A pair is at a calibration point if their distance is at most this fraction of the typical distance to an anchor, and has
# its output if all values differ by at most this fraction of the largest output.
SAME_POINT, SAME_VALUE = 1e-6, 1e-9
# Most pairs are rounded pairs of ``fit`` if they are so near: this fraction of the typical distance, and of the deviation of y.
ROUNDED, MOST = (1e-2, 1e-3), 0.5
# A factor below or above this one is far from 1.
FAR = 5.0
# An input that was measured several times is compared with at most this many calibration points.
MAX_REPEATS = 20


@dataclass(frozen=True)
class WholeField:
    """Per field: with probability ``confidence``, at least the fraction ``quantile`` of a new field is within the bound.

    This is split conformal prediction of one number per field: the factor that covers this fraction of its values.

    Attributes:
        confidence: the probability for a new field.

    Example:
        >>> estimator.conformalize(x, y, guarantee=WholeField(0.9))  # doctest: +SKIP
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_quantile(self.confidence, "confidence", "probability")

    def factor(self, ratio: Float[np.ndarray, " n n_values"], quantile: float) -> float:
        """The smallest sufficient factor for errors divided by their bounds; infinite if there are too few rows."""
        if not len(ratio):
            return math.inf
        of_each = inverse_cdf_quantile(ratio.T, quantile)
        return conformal_factor(of_each[:, None], self.confidence)


@dataclass(frozen=True)
class ConformalFactors:
    """One factor on the bounds of safe queries, and one on the bounds of other queries.

    If too few of the others were set aside, theirs is the factor for safe queries, but at least 1. ``n_pairs`` counts the pairs that were
    set aside; 0 before ``conformalize``. ``n_safe`` and ``n_unsafe`` count the queries behind each factor, verified ones as well;
    ``lift`` is the smallest factor that is used, from ``update``.
    """

    safe: float = 1.0
    unsafe: float = 1.0
    n_pairs: int = 0
    n_safe: int = 0
    n_unsafe: int = 0
    lift: float = 0.0

    @property
    def used(self) -> tuple[float, float]:
        """The factors of other queries and of safe ones."""
        return max(self.unsafe, self.lift), max(self.safe, self.lift)

    @staticmethod
    def fit(
        ratio: Float[np.ndarray, " n n_values"],
        safe: Bool[np.ndarray, " n"],
        quantile: float,
        guarantee: WholeField | None,
    ) -> "ConformalFactors":
        """The factors from pairs that neither the surrogate nor the calibration has seen; raises for too few safe pairs."""
        factor_of = conformal_factor if guarantee is None else guarantee.factor
        factor = factor_of(ratio[safe], quantile)
        if math.isinf(factor):
            needed = n_required(quantile if guarantee is None else guarantee.confidence)
            found = int(safe.sum())
            given = "" if found == len(safe) else f" among the {len(safe)} given"
            what = (
                f"{needed} safe pairs are needed, and there are {found}{given}"
                if found < needed
                else f"more than the fraction {1 - quantile:g} of the safe errors is positive where the bound is zero"
            )
            raise ValueError(
                f"at quantile={quantile} no finite factor exists: {what}; give more pairs, or lower the guarantee."
            )
        unsafe = factor_of(ratio[~safe], quantile)
        factors = [factor, unsafe if math.isfinite(unsafe) else max(1.0, factor)]
        if not all(factors):
            warn(
                f"the fraction {quantile:g} of the errors of the pairs is 0, so the conformal factor would be 0 and all bounds 0; "
                "the factor 1 is used. Check that the surrogate was not trained on these pairs."
            )
        n_safe = int(safe.sum())
        counts = len(safe), n_safe, len(safe) - n_safe
        return ConformalFactors(factors[0] or 1.0, factors[1] or 1.0, *counts)

    def __call__(
        self, bound: Float[np.ndarray, " n *field"], safe: Bool[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n *field"]:
        factor = np.where(safe, *self.used[::-1]).astype(bound.dtype)
        return bound * per_row(factor, bound)


def guarantee_of(estimator: Any) -> str:
    """What the repr of an estimator adds after ``conformalize``; nothing before."""
    n = getattr(getattr(getattr(estimator, "fitted_", None), "conformal", None), "n_pairs", 0)
    return f", conformalized with {n} pairs" * (n > 0)


def levels_of(levels: Any) -> list[float]:
    """Quantile levels as a list of numbers; raises for a single number."""
    if np.ndim(levels) != 1:
        raise TypeError(
            f"levels={shortened(levels)} must be a sequence of numbers; pass for example (0.5, 0.9)."
        )
    found = []
    for level in levels:
        number = level.item() if hasattr(level, "item") else level
        # In single precision 0.9 is 0.8999999762, which would be an unexpected key.
        is_single = is_number(number) and not isinstance(level, float)
        found.append(float(f"{float(number):.7g}") if is_single else level)
        check_quantile(found[-1], "levels")
    return found


def level_factors(
    ratio: Float[np.ndarray, " n n_values"],
    safe: Bool[np.ndarray, " n"],
    levels: Sequence[float],
    quantile: float,
) -> list[ConformalFactors]:
    """Factors that turn a bound at the level ``quantile`` into bounds at other levels.

    The factors increase with the level, so the bounds do not cross.
    """

    def factor(rows: np.ndarray, level: float) -> float:
        values = ratio[rows].reshape(-1)
        values = values[~np.isnan(values)]
        if not len(values):
            return 1.0
        own = float(inverse_cdf_quantile(values, quantile))
        # If all errors are zero, or bounds are zero where errors are not, the ratios carry no information.
        if not own or math.isinf(own):
            return 1.0
        return float(inverse_cdf_quantile(values, level)) / own

    return [ConformalFactors(factor(safe, level), factor(~safe, level)) for level in levels]


def conformalized(fitted: "Fitted", x: Any, y: Any, guarantee: WholeField | None) -> "Fitted":
    """The same calibration with factors from pairs that neither surrogate nor calibration has seen."""
    if guarantee is not None:
        check_object(guarantee, WholeField, "guarantee", "WholeField(0.9)")
    pairs = pairs_aside(fitted, x, y)
    ratio = error_ratios(pairs.error, pairs.answer["error_hat"])
    factors = ConformalFactors.fit(ratio, pairs.answer["safe"], fitted.quantile, guarantee)
    if not 1 / FAR <= factors.safe <= FAR:
        why = (
            "far smaller than at held-out points. Probably the surrogate was trained on these pairs, or fold surrogates are much "
            "worse than the deployed surrogate"
            if factors.safe < 1
            else "far larger than at held-out points. Probably the pairs come from another distribution, or their units, dtype or "
            "columns differ from the ones of fit"
        )
        warn(
            f"the conformal factor is {factors.safe:.3g}, so the errors of the pairs are {why}; check the pairs before you use the "
            "bounds."
        )
    # The guarantee is for the bound, so the interval is the prediction plus and minus the bound again.
    return replace(fitted, conformal=factors, tails=None)


def pairs_aside(fitted: "Fitted", x: Any, y: Any) -> "CheckedPairs":
    """Pairs that neither surrogate nor calibration has seen and that have an error, with bounds without factors."""
    if not getattr(fitted.bound, "scalable", True):
        raise TypeError(
            f"{type(fitted.bound).__name__} cannot be conformalized: its bound is one of two values, and a factor on it does not "
            "raise its coverage; choose a higher quantile, or compare several quantile levels with bounds(x, levels)."
        )
    pairs = checked_pairs(replace(fitted, conformal=ConformalFactors()), x, y)
    check_new(fitted, pairs)
    _warn_of_wrong_exact(fitted, pairs.error)
    if fitted.exact is not None:
        pairs = pairs._replace(error=np.where(fitted.exact, np.nan, pairs.error))
    ratio = error_ratios(pairs.error, pairs.answer["error_hat"])
    return pairs.of_rows(np.flatnonzero(~np.isnan(ratio).all(axis=1)))


class CheckedPairs(NamedTuple):
    """Pairs of the user with the errors of the surrogate and the answers there."""

    queries: Any
    outputs: np.ndarray
    error: np.ndarray
    answer: dict[str, np.ndarray]

    def of_rows(self, rows: np.ndarray) -> "CheckedPairs":
        """Some of the pairs."""
        parts = {name: values[rows] for name, values in self.answer.items()}
        return CheckedPairs(take(self.queries, rows), self.outputs[rows], self.error[rows], parts)


def checked_pairs(fitted: "Fitted", x: Any, y: Any) -> CheckedPairs:
    """The pairs as numbers; raises for pairs that are unusable."""
    queries, given = fitted.rows_of(x), _named(output_rows(y), fitted.output_names)
    check_same_order(queries, given)
    outputs = _finite_outputs(fitted, given)
    if len(outputs) != len(queries):
        raise ValueError(
            f"x has {len(queries)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    answer, lost = fitted.parts_of(queries)
    if lost.any():
        row = int(lost.argmax())
        raise ValueError(
            f"pair {row} of {len(queries)} has no bound: {fitted.why_lost(queries, row, None)}."
        )
    # A cell that the surrogate has masked has no bound, so its error does not count.
    prediction = np.nan_to_num(answer["prediction"])
    error = errors_of(prediction, fitted.error_functional, outputs, native(given))
    # The outputs of the data are on the scale of the error, too.
    return CheckedPairs(queries, on_scale(outputs, fitted.error_functional), error, answer)


def _finite_outputs(fitted: "Fitted", y: Any) -> np.ndarray:
    """The outputs as numbers, nan in masked cells; raises for other values that are not finite."""
    masked = isinstance(y, np.ma.MaskedArray)
    outputs = outputs_with_nan(y) if masked else to_numbers(y, "y").copy()
    cells = None if fitted.mask is None else fitted.mask.cells
    if cells is None or outputs.shape[1:] != cells.shape:
        cells = np.zeros(outputs.shape[1:], dtype=bool)
    if not masked:
        way_out = "remove or impute these pairs, or mask cells that have no value"
        check_finite(np.where(cells, 0, outputs), "y", way_out)
    outputs[:, cells] = np.nan
    return outputs


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


def check_new(fitted: "Fitted", pairs: CheckedPairs, most: float = MOST) -> None:
    """Raise for a pair that equals one of the calibration in x and y, or if more than ``most`` of the pairs do up to rounding.

    A repeated x with another y is a new measurement.
    """
    x, outputs, error, answer = pairs
    limit = ROUNDED[0] * fitted.typical.distance
    near = np.flatnonzero(answer["anchor_distance"][:, 0] <= limit)
    if not len(near):
        return
    n_anchors = min(MAX_REPEATS, len(fitted.geometry.points))
    wide = replace(fitted, geometry=replace(fitted.geometry, n_anchors=n_anchors))
    parts: list[Any] = [part[1].relation for part in wide.views(take(x, near))]
    relation = Relation.cat(parts)
    anchors, distance = relation.anchors, relation.anchor_distance
    # A file without tuples keeps the observed errors of the calibration points, but not their outputs.
    known, given = (
        (fitted.error, error) if fitted.tuples is None else (fitted.tuples.points.outputs, outputs)
    )
    known, given = np.nan_to_num(flat(known)), np.nan_to_num(flat(given))[near]
    gap = abs(known[anchors] - given[:, None]).max(axis=2)
    same = (gap <= SAME_VALUE * abs(known).max()) & (distance <= SAME_POINT * limit / ROUNDED[0])
    if not same.any():
        scale = max(float(known.std()), float(np.max(fitted.typical.error)))
        rounded = (gap <= ROUNDED[1] * scale) & (distance <= limit)
        same = rounded & (rounded.any(axis=1).sum() > most * len(x))
    if same.any():
        row, place = np.argwhere(same)[0]
        raise ValueError(
            f"{int(same.any(axis=1).sum())} of {len(x)} pairs equal pairs of fit up to rounding (x[{near[row]}] and its y are row "
            f"{anchors[row, place]} of the data of fit), so their errors are smaller than at new inputs; pass "
            "pairs that neither the surrogate nor fit has received."
        )


def _warn_of_wrong_exact(fitted: "Fitted", error: np.ndarray) -> None:
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
