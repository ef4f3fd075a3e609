r"""Coverage guarantees: factors on a bound, computed from errors that the bound was not learned from.

.. math:: \widehat E^{(\tau)}(x) = \lambda_{s(x)} \, \widehat E(x), \qquad
    \lambda_s = \widehat Q_\tau\{e_{ij} / \widehat E_j(x_i) : s(x_i) = s\}, \quad s \in \{\text{safe}, \text{not safe}\}
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.arrays import Rows, nonzero_counts, take, to_tensor
from geoq.checks import check_number, check_pairs, shortened, warn
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.protocol import (
    IncrementModel,
    MayBeNegative,
    NotConformalizable,
    increments_of,
)
from geoq.masks import present_pairs, without, without_absent
from geoq.quantiles import (
    check_quantile,
    conformal_factor,
    error_ratios,
    inverse_cdf_quantile,
    n_required,
)
from geoq.regions.safe_region import FittedRegion, flags_of
from geoq.settings import check_object
from geoq.surrogate import errors_of, evaluate

if TYPE_CHECKING:
    from geoq.estimator import GeoQ

# A pair is at a calibration point if their distance is at most this fraction of the typical distance to an anchor, and has
# its output if all values differ by at most this fraction of the largest output.
SAME_POINT, SAME_VALUE = 1e-6, 1e-9
# An input that was measured several times is compared with at most this many calibration points.
MAX_REPEATS = 20


@runtime_checkable
class Guarantee(Protocol):
    """What a factor on the bound guarantees for a new row at the level ``quantile``."""

    def n_required(self, quantile: float, /) -> int:
        """The smallest number of rows for which the factor is finite."""

    def factor(self, ratio: Tensor, quantile: float, /) -> float:
        """The smallest sufficient factor; infinite if there are too few rows.

        It is computed from errors divided by their bounds, which are nan where a value is absent.
        """


@dataclass(frozen=True)
class ExpectedCoverage:
    """Pointwise: the expected fraction of the values of a new row that are within the bound is at least ``quantile``."""

    def n_required(self, quantile: float) -> int:
        return n_required(quantile)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        return conformal_factor(ratio, quantile)


POINTWISE = ExpectedCoverage()


@dataclass(frozen=True)
class WholeField:
    """Per field: with probability ``confidence``, at least the fraction ``quantile`` of a new field is within the bound.

    This is split conformal prediction of one number per field: the factor that covers this fraction of its values.

    Attributes:
        confidence: the probability for a new field.

    Example:
        >>> geoq.conformalize(x, y, guarantee=WholeField(0.9))  # doctest: +SKIP
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_quantile(self.confidence, "confidence")

    def n_required(self, quantile: float) -> int:
        del quantile
        return n_required(self.confidence)

    def factor(
        self, ratio: Float[Tensor, " n n_coordinates"], quantile: float
    ) -> float:
        if ratio.isnan().any():
            of_each = torch.stack(
                [inverse_cdf_quantile(row[~row.isnan()], quantile) for row in ratio]
            )
        else:
            of_each = inverse_cdf_quantile(ratio.T, quantile)
        return conformal_factor(of_each[:, None], self.confidence)


@dataclass(frozen=True)
class ConformalFactors:
    """One factor on the bounds of safe queries and one on the bounds of other queries.

    Attributes:
        safe: factor for safe queries.
        unsafe: factor for other queries. If too few of them were set aside, it is the factor for safe queries, but at
            least 1.
        n_pairs: number of the pairs that were set aside; 0 before ``conformalize``.
    """

    safe: float = 1.0
    unsafe: float = 1.0
    n_pairs: int = 0

    @staticmethod
    def fit(
        ratio: Float[Tensor, " n n_coordinates"],
        safe: Bool[Tensor, " n"],
        quantile: float,
        guarantee: Guarantee = POINTWISE,
    ) -> "ConformalFactors":
        """The factors from pairs that neither the surrogate nor the calibration has seen; too few safe pairs are refused."""
        factor = guarantee.factor(ratio[safe], quantile)
        if math.isinf(factor):
            needed, found = guarantee.n_required(quantile), int(safe.sum())
            given = "" if found == len(safe) else f" among the {len(safe)} given"
            what = (
                f"{needed} safe pairs are needed, and there are {found}{given}"
                if found < needed
                else f"more than the fraction {1 - quantile:g} of the safe errors is positive where the bound is zero"
            )
            raise ValueError(
                f"at quantile={quantile} no finite factor exists: {what}; give more pairs, or lower the guarantee."
            )
        unsafe = guarantee.factor(ratio[~safe], quantile)
        return ConformalFactors(
            _positive(factor, quantile),
            _positive(unsafe, quantile) if math.isfinite(unsafe) else max(1.0, factor),
            len(safe),
        )

    def __call__(
        self, bound: Float[Tensor, " n *field"], safe: Bool[Tensor, " n"]
    ) -> Float[Tensor, " n *field"]:
        of_safe, of_others = bound.new_tensor([self.safe, self.unsafe])
        factor = torch.where(safe, of_safe, of_others)
        return bound * factor.reshape(-1, *(1,) * (bound.ndim - 1))

    def increment(
        self,
        model: IncrementModel,
        features: GeometricFeatures,
        safe: Bool[Tensor, " n"],
    ) -> Float[Tensor, " n *field"]:
        """The increments of a model, with the factors on the bound."""
        increment = increments_of(model, features)
        if self.safe == self.unsafe == 1:
            return increment
        scaled = self(features.anchor_error + increment, safe)
        increment = scaled - features.anchor_error
        signed = isinstance(model, MayBeNegative) and model.may_be_negative
        return increment if signed else increment.clamp(min=0)


def _positive(factor: float, quantile: float) -> float:
    """The factor, or 1 in place of 0: a bound of zero everywhere is of no use."""
    if factor > 0:
        return factor
    warn(
        f"the fraction {quantile:g} of the errors of the pairs is 0, so the conformal factor would be 0 and all bounds 0; the "
        "factor 1 is used. Check that the surrogate was not trained on these pairs."
    )
    return 1.0


def factors_from_pairs(
    geoq: "GeoQ", x: Rows, y: Rows, guarantee: Guarantee
) -> ConformalFactors:
    """The conformal factors of a fitted GeoQ, from pairs that neither surrogate nor calibration has seen; see ``conformalize``."""
    check_object(guarantee, Guarantee, "guarantee", "WholeField(0.9)")
    y, absent = present_pairs(geoq.mask_, y)
    check_pairs(x, y)
    model = geoq.increment_model_
    if isinstance(model, NotConformalizable):
        raise TypeError(
            f"{type(model).__name__} cannot be conformalized: {model.why_not_conformalizable}."
        )
    plain = copy.copy(geoq)
    plain.conformal_factors_, plain.mask_ = ConformalFactors(), None
    assessment = plain.assess(x)
    if assessment.gaps is not None:
        row = int(assessment.gaps.rows[0])
        raise ValueError(
            f"pair {row} of {len(x)} has no bound: {assessment.gaps.explain(row)}."
        )
    prediction = evaluate(geoq.surrogate_, x, "surrogate")
    prediction = without_absent(prediction, to_tensor(y, "y"), absent)
    error = errors_of(prediction, geoq.error_functional, y)
    bound, safe, distance = (
        to_tensor(part, "assessment")
        for part in (assessment.error_hat, assessment.safe, assessment.anchor_distance)
    )
    error = error.to(bound)
    near = distance[:, 0] <= SAME_POINT * geoq.calibration_.typical_distance
    if near.any():
        _refuse_pairs_of_fit(geoq, x, y, error, near.nonzero()[:, 0])
    _warn_of_wrong_exact(geoq, error)
    if absent is not None and absent.shape == error.shape:
        error = error.masked_fill(absent, torch.nan)  # does not count
    ratio, safe = without(geoq.exact_, error_ratios(error, bound)), safe.bool()
    if absent is not None:
        some = ~ratio.isnan().all(dim=1)
        ratio, safe = ratio[some], safe[some]
    return ConformalFactors.fit(ratio, safe, model.quantile, guarantee)


def exact_of(
    calibration: CalibrationSet, model: IncrementModel
) -> Bool[Tensor, " *field"] | None:
    """The coordinates whose bound is 0, because all their errors are; None if there are none.

    A model of errors with two values has none: the smaller value is 0 and usual.
    """
    if calibration.data is None or isinstance(model, NotConformalizable):
        return None
    return calibration.data.exact


def _warn_of_wrong_exact(geoq: "GeoQ", error: Float[Tensor, " n *field"]) -> None:
    """Warn of errors in coordinates whose bound is 0, because all errors of ``fit`` are 0 there."""
    if geoq.exact_ is None:
        return
    wrong = geoq.exact_ & (nonzero_counts(error) > 0)
    if wrong.any():
        place = ", ".join(map(str, wrong.nonzero()[0].tolist()))
        warn(
            f"the surrogate is wrong at output [{place}] of these pairs ({int(wrong.sum())} such outputs), but all errors there "
            "are 0 in the data of fit, so the bound is 0 and no guarantee covers these outputs; call fit with data in which "
            "they vary."
        )


def _refuse_pairs_of_fit(
    geoq: "GeoQ", x: Rows, y: Rows, error: Tensor, rows: Int[Tensor, " n_rows"]
) -> None:
    """Refuse pairs that equal a calibration pair in x and y; a repeated x with another y is a new measurement."""
    wider = copy.copy(geoq)
    n_anchors = min(MAX_REPEATS, len(geoq.geometry_.points))
    wider.geometry_ = replace(geoq.geometry_, n_anchors=n_anchors)
    nearest = wider.assess(take(x, rows))
    anchors = to_tensor(nearest.anchors, "anchors").long()
    distance = to_tensor(nearest.anchor_distance, "anchor_distance")
    data = geoq.calibration_.data
    # A file keeps the observed errors of the calibration points, but not their outputs.
    if data is not None:
        known, given = data.outputs, to_tensor(take(y, rows), "y")
    else:
        known, given = geoq.error_, error[rows]
    allowed = SAME_VALUE * known.abs().max()
    near = distance <= SAME_POINT * geoq.calibration_.typical_distance
    for place in range(n_anchors):
        gap = (known[anchors[:, place]] - given.to(known)).reshape(len(rows), -1)
        near[:, place] &= (gap.abs() <= allowed).all(dim=1)
    same = near.any(dim=1)
    if same.any():
        first = int(same.nonzero()[0, 0])
        place = int(near[first].nonzero()[0, 0])
        raise ValueError(
            f"{int(same.sum())} of {len(x)} pairs equal pairs of fit (x[{int(rows[first])}] and its y are row "
            f"{int(anchors[first, place])} of the data of fit), so their errors are smaller than at new inputs; pass "
            "pairs that neither the surrogate nor fit has received."
        )


def levels_of(levels: Any) -> list[float]:
    """Quantile levels as a list of numbers; a single number is refused."""
    if np.ndim(levels) != 1:
        raise TypeError(
            f"levels={shortened(levels)} must be a sequence of numbers; pass for example (0.5, 0.9)."
        )
    for level in levels:
        number = level.item() if isinstance(level, Tensor) else level
        check_number(number, "levels", "quantile levels such as (0.5, 0.9)")
    # In single precision 0.9 is 0.8999999762, which would be an unexpected key.
    return [
        level if isinstance(level, float) else float(f"{float(level):.7g}")
        for level in levels
    ]


def level_factors(
    ratio: Float[Tensor, " n n_coordinates"],
    safe: Bool[Tensor, " n"],
    levels: Sequence[float],
    quantile: float,
) -> list[ConformalFactors]:
    """Factors that turn a bound at the level ``quantile`` into bounds at other levels.

    The factors increase with the level, so the bounds do not cross.
    """
    for level in levels:
        check_quantile(level, "levels")

    def factor(rows: Tensor, level: float) -> float:
        if not rows.any():
            return 1.0
        values = ratio[rows].reshape(-1)
        own = float(inverse_cdf_quantile(values, quantile))
        # If all errors are zero, or bounds are zero where errors are not, the ratios carry no information.
        if not own or math.isinf(own):
            return 1.0
        return float(inverse_cdf_quantile(values, level)) / own

    return [
        ConformalFactors(factor(safe, level), factor(~safe, level)) for level in levels
    ]


def factors_of(
    calibration: CalibrationSet,
    region: FittedRegion,
    model: IncrementModel,
    levels: Sequence[float],
    exact: Bool[Tensor, " *field"] | None = None,
) -> list[ConformalFactors]:
    """The level factors of a fitted increment model, from its calibration errors without the exact coordinates."""
    features = calibration.features
    _, safe = flags_of(region, features)
    bound = features.anchor_error + increments_of(model, features)
    ratio = without(exact, error_ratios(calibration.error, bound))
    return level_factors(ratio, safe, levels, model.quantile)
