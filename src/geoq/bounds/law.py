r"""A log-linear law of the error: an upper quantile that is an exponential of a few features.

.. math:: b_j(x) = s_j u_j(x) \exp\bigl(a(\tau) + \theta \cdot \tilde\varphi_j(x)\bigr)

The unit u is the error q that a second opinion expects, or 1 in a law without it. The law is fitted by linear quantile regression of
the logarithm of the error, which is possible because a quantile commutes with the logarithm. Fitting the error itself would let the
few largest errors determine the slopes. An error of nan does not count.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from geoq.bounds.regression import fit_line
from geoq.bounds.resemblance import logarithms
from geoq.quantiles import weighted_quantile, weighted_quantiles

# One value per tuple and output: as a matrix, and as one vector.
Errors: TypeAlias = Float[np.ndarray, " n n_outputs"]
Vector: TypeAlias = Float[np.ndarray, " n_values"]
# Scales and slopes are fitted at this level, or at LEVELS together; other levels are shifts of it.
LEVEL = 0.95
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Levels at which intercepts are stored; between them the intercept is linear in the logit of the level.
TABLE = tuple(sorted({*(i / 100 for i in range(1, 100)), 0.975, 0.985, 0.995, 0.999}))
LOGITS = tuple(math.log(level / (1 - level)) for level in TABLE)
# The logarithm of the distance may exceed the range of the calibration tuples by this much; no other feature may.
REACH = math.log(3)
# A law is fitted to at most this many values (tuples times outputs).
MAX_VALUES = 200_000
# Added to the errors, in units of their scale, before the logarithm.
MIN_ERROR = 1e-5
MIN_SCALE = 1e-300
# Smallest weight of a tuple for the intercepts of a blend.
MIN_INSIDE = 0.02
# Added to features in units of the scale of the errors, before the logarithm; the variability is a ratio.
ADDED = {"anchor": 0.05, "held_out": 0.02, "departure": 0.05, "variability": 0.02, "expected": 1e-3}
WORDS = {
    "distance": "the distance to the data",
    "nearest": "the distance to the nearest point",
    "side": "the one-sidedness of the nearest points",
    "anchor": "the observed error of the anchor",
    "held_out": "the held-out errors of the nearest points",
    "departure": "the difference between the prediction and the nearest outputs",
    "variability": "the variation of the nearest outputs",
    "expected": "the error that a Gaussian process through the data expects",
}
NAMES = tuple(WORDS)
WITHOUT_OPINION = NAMES[:-1]


@dataclass(frozen=True)
class LawFeatures:
    """The features of a law, one value per query or one per query and output.

    Attributes:
        distance: mean distance to the k nearest points.
        nearest: distance to the nearest point.
        side: length of the mean displacement to the k nearest points, divided by ``distance``.
        anchor: observed error of the anchors.
        held_out: mean held-out error of the k nearest points.
        departure: absolute difference between the prediction and the mean output of the k nearest points.
        variability: standard deviation of the outputs of the k nearest points, in units of their deviation in the data.
        expected: q, the root mean square of the error under a Gaussian process through the data.
    """

    distance: Float[np.ndarray, " n"]
    nearest: Float[np.ndarray, " n"]
    side: Float[np.ndarray, " n"]
    anchor: Errors
    held_out: Errors
    departure: Errors
    variability: Errors
    expected: Errors

    def __getitem__(self, rows: np.ndarray | slice) -> "LawFeatures":
        return LawFeatures(*(getattr(self, part.name)[rows] for part in fields(self)))

    def column(self, name: str, scale: np.ndarray, outputs: np.ndarray | None = None) -> np.ndarray:
        """One feature as it enters the law, with one column per output (None: all of them) or a single column."""
        if name in ("distance", "nearest"):
            logs = logarithms(self.distance, self.nearest)
            return logs[name == "nearest"][:, None]
        values: np.ndarray = getattr(self, name)
        if name == "side":
            return values[:, None]
        values = values if outputs is None else np.take_along_axis(values, outputs, 1)
        return np.log((values if name == "variability" else values / scale) + ADDED[name])


@dataclass(frozen=True)
class Blend:
    """The other law of a blend, at the tuples that a law is fitted to.

    It has the weight ``pi``, its logarithm at the level 0.95, and its shift at each level of ``TABLE``. Residuals are held out by
    ``parts`` of the tuples.
    """

    pi: Float[np.ndarray, " n"]
    logarithm: Errors
    shifts: Sequence[float]
    parts: Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Law:
    """A fitted law; the features are standardised and limited to the range of the calibration tuples.

    Attributes:
        names: the features.
        scale: s_j, the quantile of the errors of each output.
        mean: mean of each feature.
        deviation: standard deviation of each feature.
        low: smallest standardised value of each feature.
        high: largest standardised value of each feature.
        slopes: theta.
        table: the intercept a at each level of ``TABLE``.
    """

    names: tuple[str, ...]
    scale: Float[np.ndarray, " n_outputs"]
    mean: Float[np.ndarray, " n_features"]
    deviation: Float[np.ndarray, " n_features"]
    low: Float[np.ndarray, " n_features"]
    high: Float[np.ndarray, " n_features"]
    slopes: Float[np.ndarray, " n_features"]
    table: Float[np.ndarray, " n_levels"]

    @staticmethod
    def fit(
        names: tuple[str, ...],
        features: LawFeatures,
        error: Errors,
        weight: Float[np.ndarray, " n"],
        *,
        levels: tuple[float, ...],
        ridge: float,
        counted: Int[np.ndarray, " n_counted"],
        blend: "Blend | None" = None,
    ) -> "Law":
        """Fit the law to the features, errors and weights of calibration tuples.

        The slopes minimise the pinball losses of all ``levels`` together, with the penalty ``ridge``. With a ``blend`` the
        intercepts are set for the blended bound, from held-out residuals; without it they come from the regression. The law is
        fitted to the outputs ``counted``.
        """
        scale = _scale(error, weight)
        outputs = _random_outputs(len(error), error.shape[1], counted)
        own, chosen = scale, error
        if outputs is not None:
            own, chosen = scale[outputs], np.take_along_axis(error, outputs, 1)
        present = ~np.isnan(chosen)

        def values(columns: np.ndarray) -> np.ndarray:
            """One value for each error that counts."""
            return np.broadcast_to(columns, chosen.shape)[present]

        columns = [features.column(name, own, outputs) for name in names]
        phi = np.stack([values(column) for column in columns], 1)
        mean, deviation = phi.mean(axis=0), phi.std(axis=0) + 1e-9
        # In units of q, so that the penalty draws the bound to a multiple of q.
        unit = phi[:, names.index("expected")] if "expected" in names else 0.0
        phi = (phi - mean) / deviation
        target = values(np.log(chosen / own + MIN_ERROR)) - unit
        per_value = values(weight[:, None])
        line = fit_line(phi, target, per_value, levels, ridge)
        if blend is None:
            table = weighted_quantiles(target - phi @ line.slopes, per_value, TABLE)
            here = line.intercepts[levels.index(LEVEL)]
            table = table + here - table[TABLE.index(LEVEL)]
        else:
            parts = values(blend.parts[:, None])
            residual = _held_out_residuals(phi, target, per_value, parts, levels, ridge)
            other = blend.logarithm
            other = other if outputs is None else np.take_along_axis(other, outputs, 1)
            other = values(other - np.log(own)) - unit - (target - residual)
            table = _blended_intercepts(residual, other, values(blend.pi[:, None]), blend)
        low, high = phi.min(axis=0), phi.max(axis=0)
        high[0] += REACH / deviation[0]
        return Law(names, scale, mean, deviation, low, high, line.slopes, table)

    @cached_property
    def _numbers(self) -> tuple[Any, ...]:
        """Slopes and limits of the features before they are standardised, and the constant at the level 0.95."""
        slope = self.slopes / self.deviation
        low, high = (end * self.deviation + self.mean for end in (self.low, self.high))
        constant = self.intercept(LEVEL) - float((slope * self.mean).sum())
        return slope, low, high, constant

    def __call__(self, features: LawFeatures, natural: Any = 1.0) -> Errors:
        """Log b of each output at the level 0.95; ``natural`` multiplies the scale."""
        slope, low, high, constant = self._numbers
        scale = self.scale * natural
        total: np.ndarray = np.log(scale) + constant
        for place, name in enumerate(self.names):
            column = features.column(name, scale)
            term = slope[place] * column.clip(low[place], high[place])
            total = total + (term + column if name == "expected" else term)
        return total

    def intercept(self, level: float) -> float:
        """The intercept at any level: linear in the logit between the levels of ``TABLE``, and constant beyond them."""
        here = math.log(level / (1 - level))
        here = min(max(here, LOGITS[0]), LOGITS[-1])
        above = min(max(bisect_left(LOGITS, here), 1), len(LOGITS) - 1)
        part = (here - LOGITS[above - 1]) / (LOGITS[above] - LOGITS[above - 1])
        low, high = self.table[above - 1], self.table[above]
        return float(low + part * (high - low))

    def shift(self, level: float) -> float:
        """The difference between the intercepts at a level and at 0.95."""
        return 0.0 if level == LEVEL else self.intercept(level) - self.intercept(LEVEL)

    def describe(self) -> str:
        """The features that change the bound most, as factors between one deviation below and one above the mean."""
        slopes = self.slopes + self.deviation * np.array([n == "expected" for n in self.names])
        factors = np.exp(2 * slopes).tolist()
        order = sorted(range(len(factors)), key=lambda i: -abs(math.log(factors[i])))
        return ", ".join(f"{WORDS[self.names[i]]} (x {factors[i]:.2g})" for i in order[:3])


def _scale(error: Errors, weight: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n_outputs"]:
    """The quantile of the errors of each output; the mean if the quantile is zero, and a tiny number if all are zero."""
    some = ~np.isnan(error).all(axis=0)
    scale = np.zeros(error.shape[1])
    quantile = weighted_quantile(error[:, some], weight, LEVEL)
    scale[some] = np.where(quantile > 0, quantile, np.nanmean(error[:, some], axis=0))
    return np.where(scale > 0, scale, MIN_SCALE)


def _held_out_residuals(
    phi: Float[np.ndarray, " n_values n_columns"],
    target: Vector,
    weight: Vector,
    part: Int[np.ndarray, " n_values"],
    levels: tuple[float, ...],
    ridge: float,
) -> Vector:
    """Residuals under slopes that were fitted without the part of the tuple; the residuals of the fit would be too small."""
    residual = np.empty_like(target)
    for number in np.unique(part):
        own = part == number
        other = fit_line(phi[~own], target[~own], weight[~own], levels, ridge)
        residual[own] = target[own] - phi[own] @ other.slopes
    return residual


def _blended_intercepts(
    residual: Vector, other: Vector, pi: Vector, blend: Blend
) -> Float[np.ndarray, " n_levels"]:
    r"""The intercept a at each level of ``TABLE`` for which the blended bound covers the tuples at that level.

    .. math:: e \le s \, e^{(1 - \pi) (a + \theta \cdot \varphi)} \, b_{out}^{\pi} \iff a \ge r + \frac{\pi}{1 - \pi} (r - o)

    Here r is the residual of the law, and o is the logarithm of the other law minus the law without its intercept. The tuples have
    the weights 1 - pi, since a has hardly any effect where pi is near 1.
    """
    n_rows = len(blend.pi)
    weight = (1 - pi).clip(min=MIN_INSIDE)
    ratio = pi / weight
    table = [
        weighted_quantiles(
            residual + ratio * (residual - other - shift), weight, (exceeding(level, n_rows),)
        )
        for level, shift in zip(TABLE, blend.shifts, strict=True)
    ]
    return np.maximum.accumulate(np.concatenate(table))


def exceeding(level: float, n_rows: int) -> float:
    """The level of a quantile of n values that a further value does not exceed with the probability ``level``."""
    return min(level * (n_rows + 1) / n_rows, 1.0)


def _random_outputs(
    n_rows: int, n_outputs: int, counted: Int[np.ndarray, " n_counted"]
) -> Int[np.ndarray, " n n_chosen"] | None:
    """The counted outputs for each tuple, or a subset of them if they would be too many values; None means all outputs."""
    n_counted = len(counted)
    if n_rows * n_counted <= MAX_VALUES:
        return None if n_counted == n_outputs else np.broadcast_to(counted, (n_rows, n_counted))
    n_chosen = max(1, MAX_VALUES // n_rows)
    start = np.random.default_rng(0).integers(n_counted, size=(n_rows, 1))
    chosen = (start + np.arange(n_chosen) * n_counted // n_chosen) % n_counted
    return counted[chosen]
