r"""A log-linear law of the error: an upper quantile that is an exponential of eight features.

.. math:: b_j(x) = s_j \exp\bigl(a(\tau) + \theta \cdot \tilde\varphi_j(x)\bigr)

The law is fitted by linear quantile regression of the logarithm of the error, which is possible because a quantile commutes with
the logarithm. Fitting the error itself would let the few largest errors determine the slopes.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.archive import state_of
from geoq.arrays import functions_of, own_arrays
from geoq.increments.quantile_regression import fit_line
from geoq.increments.resemblance import logarithms
from geoq.quantiles import weighted_quantile

# One value per tuple and output: as a matrix, and as one vector.
Errors: TypeAlias = Float[Tensor, " n n_outputs"]
Vector: TypeAlias = Float[Tensor, " n_values"]
# Scales, slopes beyond the edge and the bound of a law are fitted at this level; other levels are shifts of it.
LEVEL = 0.95
# The slopes of the law of the interpolating folds minimise the pinball losses of these levels together.
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Levels at which intercepts are stored; between them the intercept is linear in the logit of the level.
TABLE = tuple(sorted({*(i / 100 for i in range(1, 100)), 0.975, 0.985, 0.995, 0.999}))
LOGITS = tuple(math.log(level / (1 - level)) for level in TABLE)
# The logarithm of the distance may exceed the range of the calibration tuples by this much; no other feature may.
REACH = math.log(3)
# A law is fitted to at most this many values (tuples times outputs).
MAX_VALUES = 200_000
# Added to the errors, in units of their scale, before the logarithm.
MIN_ERROR = 1e-4

MIN_SCALE = 1e-300
# Smallest weight of a tuple for the intercepts of a blend.
MIN_INSIDE = 0.02

# Features that have one value per query, and features that have one value per query and output.
PER_QUERY = ("distance", "nearest", "side")
PER_OUTPUT = ("anchor", "held_out", "departure", "variability", "disagreement")
NAMES = PER_QUERY + PER_OUTPUT
# Added before the logarithm, in units of the scale of the errors.
_ADDED = {"anchor": 0.05, "held_out": 0.02, "departure": 0.05, "disagreement": 0.1}
_MIN_VARIABILITY = 0.02
# Words for ``describe``.
WORDS = {
    "distance": "the distance to the data",
    "nearest": "the distance to the nearest point",
    "side": "the one-sidedness of the nearest points",
    "anchor": "the observed error of the anchor",
    "held_out": "the held-out errors of the nearest points",
    "departure": "the difference between the prediction and the nearest outputs",
    "variability": "the variation of the nearest outputs",
    "disagreement": "the difference between the prediction and a spline through the data",
}


@dataclass(frozen=True)
class LawFeatures:
    """The eight features of a law.

    Attributes:
        distance: mean distance to the k nearest points.
        nearest: distance to the nearest point.
        side: length of the mean displacement to the k nearest points, divided by ``distance``.
        anchor: observed error of the anchors.
        held_out: mean held-out error of the k nearest points.
        departure: absolute difference between the prediction and the mean output of the k nearest points.
        variability: standard deviation of the outputs of the k nearest points, in units of their deviation in the data.
        disagreement: absolute difference between the prediction and a smoothing spline through the data.
    """

    distance: Float[Tensor, " n"]
    nearest: Float[Tensor, " n"]
    side: Float[Tensor, " n"]
    anchor: Errors
    held_out: Errors
    departure: Errors
    variability: Errors
    disagreement: Errors

    def __len__(self) -> int:
        return len(self.distance)

    def __getitem__(self, rows: Tensor | slice) -> "LawFeatures":
        return LawFeatures(*(part[rows] for part in vars(self).values()))

    def arrays(self) -> dict[str, Any]:
        """The features by name, as NumPy arrays if they are tensors of the CPU."""
        own = vars(self)
        return dict(zip(own, own_arrays(*own.values()), strict=True))

    def column(
        self, name: str, scale: Tensor | None = None, outputs: Tensor | None = None
    ) -> Tensor:
        """One feature as it enters the law: one value per query, or one for each of some outputs (None: all) of a query."""
        if name in ("distance", "nearest"):
            own: Tensor = logarithms(self.distance, self.nearest)[NAMES.index(name)]
            return own
        values: Tensor = vars(self)[name]
        if name == "side":
            return values
        values = values if outputs is None else values.gather(1, outputs)
        if name == "variability":
            return (values + _MIN_VARIABILITY).log()
        assert scale is not None
        return (values / scale + _ADDED[name]).log()


@dataclass(frozen=True)
class Blend:
    """The other law of a blend, at the tuples that a law is fitted to.

    It has the weight ``pi``, its logarithm at the level 0.95, and its shift at each level of ``TABLE``. Residuals are held out by
    ``parts`` of the tuples.
    """

    pi: Float[Tensor, " n"]
    logarithm: Errors
    shifts: Sequence[float]
    parts: Int[Tensor, " n"]

    @staticmethod
    def alone(parts: Int[Tensor, " n"], n_outputs: int) -> "Blend":
        """No other law."""
        zeros = torch.zeros(len(parts), n_outputs, device=parts.device).double()
        return Blend(zeros[:, 0], zeros, [0.0] * len(TABLE), parts)


@dataclass(frozen=True)
class Law:
    """A fitted law; the features are standardised and limited to the range of the calibration tuples.

    Attributes:
        scale: s_j, the quantile of the errors of each output.
        mean: mean of each feature.
        deviation: standard deviation of each feature.
        low: smallest standardised value of each feature.
        high: largest standardised value of each feature.
        slopes: theta.
        table: the intercept a at each level of ``TABLE``.
    """

    scale: Float[Tensor, " n_outputs"]
    mean: Float[Tensor, " 8"]
    deviation: Float[Tensor, " 8"]
    low: Float[Tensor, " 8"]
    high: Float[Tensor, " 8"]
    slopes: Float[Tensor, " 8"]
    table: Float[Tensor, " n_levels"]

    @staticmethod
    def fit(
        features: LawFeatures,
        error: Errors,
        weight: Float[Tensor, " n"],
        *,
        levels: tuple[float, ...],
        ridge: float,
        blend: "Blend | None" = None,
        counted: Int[Tensor, " n_counted"] | None = None,
    ) -> "Law":
        """Fit the law to the features, errors and weights of calibration tuples.

        The slopes minimise the pinball losses of all ``levels`` together, with the penalty ``ridge``. With a ``blend`` the
        intercepts are set for the blended bound, from held-out residuals; without it they come from the regression. The law is
        fitted to the outputs ``counted``; None means all outputs.
        """
        scale = _scale(error, weight)
        outputs = _random_outputs(len(error), error.shape[1], counted)
        own, chosen = scale, error
        if outputs is not None:
            outputs = outputs.to(error.device)
            own, chosen = scale[outputs], error.gather(1, outputs)
        columns = [features.column(name, own, outputs) for name in NAMES]
        columns = [c[:, None] if c.ndim == 1 else c for c in columns]
        phi = torch.stack([c.expand(chosen.shape).reshape(-1) for c in columns], dim=1)
        mean, deviation = phi.mean(dim=0), phi.std(dim=0, correction=0) + 1e-9
        phi = (phi - mean) / deviation
        target = (chosen / own + MIN_ERROR).log().reshape(-1)
        per_value = weight[:, None].expand_as(chosen).reshape(-1)
        line = fit_line(phi, target, per_value, levels, ridge)
        if blend is None:
            residual = target - phi @ line.slopes
            table = _weighted_intercepts(residual, per_value)
            here = line.intercepts[levels.index(LEVEL)]
            table = table + here - table[TABLE.index(LEVEL)]
        else:
            part = blend.parts[:, None].expand(chosen.shape).reshape(-1)
            residual = _held_out_residuals(phi, target, per_value, part, levels, ridge)
            other = blend.logarithm
            other = other if outputs is None else other.gather(1, outputs)
            other = (other - own.log()).reshape(-1) - (target - residual)
            table = _blended_intercepts(residual, other, blend)
        low, high = phi.amin(dim=0), phi.amax(dim=0)
        high[0] += REACH / deviation[0]
        return Law(scale, mean, deviation, low, high, line.slopes, table)

    @cached_property
    def _numbers(self) -> tuple[Any, ...]:
        """Scale, slopes and limits of the features before they are standardised, and the constant at the level 0.95."""
        parts = own_arrays(*state_of(self).values())
        scale, mean, deviation, low, high, slopes, _ = parts
        slope, low, high = (
            slopes / deviation,
            low * deviation + mean,
            high * deviation + mean,
        )
        constant = self.intercept(LEVEL) - float((slope * mean).sum())
        columns = (part.reshape(-1, 1, 1) for part in (slope, low, high))
        return scale, *columns, constant

    def __call__(self, features: dict[str, Any], natural: Any = 1.0) -> Any:
        """Log b of each output at the level 0.95, given ``LawFeatures.arrays``; ``natural`` multiplies the scale."""
        scale, slope, low, high, constant = self._numbers
        xp, scale = functions_of(scale), scale * natural

        def term(place: int, column: Any) -> Any:
            xp.maximum(column, low[place], out=column)
            xp.minimum(column, high[place], out=column)
            column *= slope[place]
            return column

        logs = logarithms(features["distance"], features["nearest"])
        shared = [*logs, 1 * features["side"]]
        total = xp.log(scale) + constant
        for place, column in enumerate(shared):
            total = total + term(place, column[:, None])
        for place, name in enumerate(PER_OUTPUT, start=len(PER_QUERY)):
            values = features[name]
            if name == "variability":
                column = values + _MIN_VARIABILITY
            else:
                column = values / scale
                column += _ADDED[name]
            total += term(place, xp.log(column, out=column))
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
        if level == LEVEL:
            return 0.0
        return self.intercept(level) - self.intercept(LEVEL)

    def describe(self) -> str:
        """The features that change the bound most, as factors between one deviation below and one above the mean."""
        factors = (2 * self.slopes).exp().tolist()
        order = sorted(range(len(NAMES)), key=lambda i: -abs(math.log(factors[i])))
        parts = [f"{WORDS[NAMES[i]]} (x {factors[i]:.2g})" for i in order[:3]]
        return ", ".join(parts)


def _scale(error: Errors, weight: Float[Tensor, " n"]) -> Float[Tensor, " n_outputs"]:
    """The quantile of the errors of each output; the mean if the quantile is zero, and a tiny number if all are zero."""
    quantile = weighted_quantile(error, weight[:, None].expand_as(error), LEVEL)
    scale = torch.where(quantile > 0, quantile, error.mean(dim=0))
    return torch.where(scale > 0, scale, MIN_SCALE)


def _held_out_residuals(
    phi: Float[Tensor, " n_values n_columns"],
    target: Vector,
    weight: Vector,
    part: Int[Tensor, " n_values"],
    levels: tuple[float, ...],
    ridge: float,
) -> Vector:
    """Residuals under slopes that were fitted without the part of the tuple; the residuals of the fit would be too small."""
    residual = torch.empty_like(target)
    for number in part.unique():
        own = part == number
        other = fit_line(phi[~own], target[~own], weight[~own], levels, ridge)
        residual[own] = target[own] - phi[own] @ other.slopes
    return residual


def _blended_intercepts(
    residual: Vector, other: Vector, blend: Blend
) -> Float[Tensor, " n_levels"]:
    r"""The intercept a at each level of ``TABLE`` for which the blended bound covers the tuples at that level.

    .. math:: e \le s \, e^{(1 - \pi) (a + \theta \cdot \varphi)} \, b_{out}^{\pi} \iff a \ge r + \frac{\pi}{1 - \pi} (r - o)

    Here r is the residual of the law, and o is the logarithm of the other law minus the law without its intercept. The tuples have
    the weights 1 - pi, since a has hardly any effect where pi is near 1.
    """
    n_rows = len(blend.pi)
    pi = blend.pi[:, None].expand(n_rows, len(residual) // n_rows).reshape(-1)
    weight = (1 - pi).clamp(min=MIN_INSIDE)
    ratio = pi / weight
    table = [
        _weighted_intercepts(
            residual + ratio * (residual - other - shift),
            weight,
            (min(level * (n_rows + 1) / n_rows, 1.0),),
        )
        for level, shift in zip(TABLE, blend.shifts, strict=True)
    ]
    return torch.cat(table).cummax(dim=0).values


def _weighted_intercepts(
    residual: Vector, weight: Vector, levels: Sequence[float] = TABLE
) -> Float[Tensor, " n_levels"]:
    """The weighted quantile of the residuals at each level."""
    order = residual.argsort(stable=True)
    passed = weight[order].cumsum(dim=0)
    wanted = passed[-1] * passed.new_tensor(levels) * (1 - 1e-12)
    places = torch.searchsorted(passed, wanted).clamp(max=len(residual) - 1)
    return residual[order[places]]


def _random_outputs(
    n_rows: int, n_outputs: int, counted: Int[Tensor, " n_counted"] | None
) -> Int[Tensor, " n n_chosen"] | None:
    """The counted outputs for each tuple, or a subset of them if they would be too many values; None means all outputs."""
    counted = torch.arange(n_outputs) if counted is None else counted
    n_counted = len(counted)
    if n_rows * n_counted <= MAX_VALUES:
        return None if n_counted == n_outputs else counted.expand(n_rows, -1)
    n_chosen = max(1, MAX_VALUES // n_rows)
    rng = np.random.default_rng(0)
    start = torch.from_numpy(rng.integers(n_counted, size=(n_rows, 1)))
    chosen = (start + torch.arange(n_chosen) * n_counted // n_chosen) % n_counted
    return counted[chosen]
