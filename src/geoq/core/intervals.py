r"""Intervals around predictions: known limits of the outputs, and one factor for each side where the errors are lopsided.

.. math:: [\widehat F(x) - f^- \widehat E(x), \; \widehat F(x) + f^+ \widehat E(x)]

Both factors are 1 unless the largest held-out errors of an output have clearly one sign. Then :math:`f^-` and :math:`f^+` are the quantiles
of the signed errors, divided by their bounds, that leave out the same fraction on both sides. They hold for safe queries: outside the data an error
can have either sign.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logit

from geoq.arrays import flat, per_row
from geoq.bounds.law import LEVELS, exceeding
from geoq.bounds.protocol import bounds_of
from geoq.core.tuples import Tuples
from geoq.quantiles import inverse_cdf_quantile, n_required
from geoq.surrogate import ELEMENTWISE, log_error, on_scale

# The signs of this fraction of the errors, the largest in units of their bounds, are compared. They are clearly of one kind if their sum
# exceeds this number of its standard deviations.
LARGEST, CLEARLY = 0.1, 3.0


def limits_of(limits: Any, outputs: np.ndarray, error_functional: Any) -> Any:
    """The limits (low, high) as arrays; raises unless they bound each output and all outputs lie within them."""
    if limits is None:
        return None
    if error_functional not in ELEMENTWISE:
        raise ValueError(
            f"limits={limits!r} are limits of each output, but error_functional={getattr(error_functional, '__name__', error_functional)} is "
            "no difference of outputs; use error_functional=absolute_error, or leave limits out."
        )
    try:
        low, high = (
            np.asarray(absent if end is None else end, dtype=float)
            for end, absent in zip(limits, (-np.inf, np.inf), strict=True)
        )
        ends = [np.broadcast_to(end, outputs.shape[1:]) for end in (low, high)]
        if isinstance(limits, str) or not (ends[0] < ends[1]).all():
            raise ValueError("a low limit is not below its high limit")
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"limits={limits!r} must be a pair (low, high) with low < high, of numbers, of arrays of shape {outputs.shape[1:]}, or None for no "
            "limit; pass for example limits=(0, 100)."
        ) from exc
    beyond = np.argwhere((outputs < ends[0]) | (outputs > ends[1]))
    if len(beyond):
        name = f"y[{', '.join(map(str, beyond[0]))}]"
        raise ValueError(
            f"limits={limits!r}, but {name} is {outputs[tuple(beyond[0])]:.4g}; pass limits that all outputs respect."
        )
    # A logarithm has no negative argument.
    return np.maximum(low, 0.0) if error_functional is log_error else low, high


@dataclass(frozen=True)
class Tails:
    """The factors of both sides at some levels, for each output; 1 for outputs whose errors are not lopsided."""

    levels: tuple[float, ...]
    below: Float[np.ndarray, " n_levels n_outputs"]
    above: Float[np.ndarray, " n_levels n_outputs"]

    @staticmethod
    def of(tuples: Tuples, bound: Any, how: Any) -> "Tails | None":
        """The factors from held-out errors; None if no output has lopsided errors, or if the bound has no levels."""
        inner = tuples[tuples.interpolating]
        quantile, usable = how.quantile, how.error_functional in ELEMENTWISE
        scaled = getattr(bound, "has_levels", False) and getattr(bound, "scalable", True)
        if not (usable and scaled and inner.points.layout.is_table):
            return None
        error = flat(inner.points.outputs)[inner.point] - flat(inner.predictions)[inner.row]
        features, levels = inner.features, tuple(sorted({*LEVELS, quantile}))
        shares = {level: flat(bounds_of(bound, features, level)) for level in levels}
        chosen = _lopsided(error / shares[quantile].clip(min=1e-300), inner.group)
        n = len(inner)
        if not chosen.any():
            return None
        below, above = np.ones((2, len(levels), error.shape[1]))
        for place, level in enumerate(levels):
            if n < n_required((1 + level) / 2):
                continue  # too few errors for a tail
            ratio = error[:, chosen] / shares[level][:, chosen].clip(min=1e-300)
            each = exceeding((1 + level) / 2, n)
            for factor, signed in ((below, -ratio), (above, ratio)):
                factor[place, chosen] = inverse_cdf_quantile(signed, each).clip(min=0)
        return Tails(levels, below, above)

    def __call__(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """The factors of both sides at any level: linear between the levels, in the logarithm of the odds."""
        known, wanted = logit(self.levels), logit(level)
        factors = ([np.interp(wanted, known, c) for c in f.T] for f in (self.below, self.above))
        below, above = map(np.array, factors)
        return below, above


def _lopsided(ratio: Float[np.ndarray, " n p"], group: np.ndarray) -> np.ndarray:
    """Which outputs have largest errors of clearly one sign; the errors of one group count together."""
    size = np.nan_to_num(abs(ratio))
    large = size > np.quantile(size, 1 - LARGEST, axis=0)
    signs = np.where(large, np.sign(np.nan_to_num(ratio)), 0.0)
    number = np.unique(group, return_inverse=True)[1]
    total = np.zeros((number.max() + 1, ratio.shape[1]))
    np.add.at(total, number, signs)
    return np.asarray(abs(total.sum(axis=0)) > CLEARLY * np.sqrt((total**2).sum(axis=0)))


def interval(
    fitted: Any, prediction: np.ndarray, bound: np.ndarray, safe: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the intervals around predictions with these bounds, in the unit of the outputs."""
    below, above = bound, bound
    if fitted.tails is not None:
        factors = (factor.reshape(bound.shape[1:]) for factor in fitted.tails(level))
        own = per_row(np.asarray(safe, dtype=bool), bound)
        below, above = (
            np.where(own, bound * factor, bound).astype(bound.dtype) for factor in factors
        )
    if fitted.error_functional is log_error:
        ends = prediction * np.exp(-below), prediction * np.exp(above)
    else:
        ends = prediction - below, prediction + above
    if fitted.limits is None:
        return ends
    lower, upper = (end.clip(*fitted.limits).astype(end.dtype) for end in ends)
    return lower, upper


def within_limits(fitted: Any, prediction: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The bounds, at most the distance of the prediction, which is on the scale of its error, to the farther limit."""
    if fitted.limits is None:
        return bound
    ends = (on_scale(end, fitted.error_functional) for end in fitted.limits)
    low, high = (abs(end - prediction) for end in ends)
    return np.minimum(bound, np.maximum(low, high)).astype(bound.dtype)
