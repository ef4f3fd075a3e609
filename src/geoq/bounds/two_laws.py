r"""The default bound for tables: laws of the error amid the data and outside, with and without a second opinion.

.. math:: \log b = (1 - w) \log b^0 + w \log b^q, \qquad
    \log b^\cdot = (1 - \pi) \log b^\cdot_{in} + \pi \log b^\cdot_{out}, \qquad
    \widehat E = b + (1 - w (1 - \sqrt\lambda)) \min(O / 2, 2 b)

The laws b_in are fitted to the tuples of the interpolating (random) folds, the laws b_out to the tuples of all folds, and the
resemblance pi is the probability that a query looks like a point that an extrapolating fold held out. So a query amid the data is
bounded like a point of the random folds, and a query outside like a point of the extrapolating folds.

The laws b^q are in units of q, the error that a Gaussian process through the same data expects, and the laws b^0 do without it. The
weight w is large where the laws with q have the smaller losses on the folds. Where they give the smaller bound, w is multiplied by
the fraction of the variance that the data explain to the process. The overhang O is the change of the output outside the ranges of
the inputs, if it kept changing as inside. It counts less where the process has data near the query: lambda is the fraction of its
deviation that the data leave.

As in the paper, the bound is the anchor error plus an increment, and an upper conditional quantile given geometry, learned from
cross-fitted tuples. Here the anchor error is one of the features, so the increment can be negative.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import chunks, flat, joined, permutation
from geoq.bounds.climatology import Climatology, FittedClimatology, natural_scale
from geoq.bounds.fields import Bounds, Values
from geoq.bounds.law import (
    LEVEL,
    LEVELS,
    LOGITS,
    MIN_ERROR,
    NAMES,
    RIDGE_INSIDE,
    TABLE,
    WITHOUT_OPINION,
    Errors,
    Law,
    LawFeatures,
    exceeding,
)
from geoq.core.geometry import Features, Relation, anchor_mean
from geoq.core.tuples import Points, Tuples
from geoq.data.masks import filled_with_means
from geoq.data.metric import FittedMetric
from geoq.quantiles import pinball_loss, weighted_quantiles

# Penalty on the slopes of the law of all folds.
RIDGE_OUTSIDE = 0.01
# The weights of the laws with and without the process are inversely proportional to this power of their losses on the folds.
POWER = 3.0
# Parts of the tuples for held-out residuals.
N_PARTS = 5
# The fraction of the overhang that is added, and the largest addition as a multiple of the bound.
OVERHANG_FRACTION, MAX_OVERHANG = 0.5, 2.0
# Added to the support distance, the distance to the nearest point and the variability before the logarithm.
MIN_DISTANCE, MIN_NEAREST, MIN_VARIABILITY = 1e-9, 1e-3, 0.02


@dataclass(frozen=True)
class TwoLawBound:
    """The default bound for scalar and vector errors, fitted in a fraction of a second without a training.

    Attributes:
        reference: the natural scale of each output, ``Climatology()``; None leaves it out.

    Example:
        >>> from geoq import GeoQ
        >>> from geoq.parts import Climatology, TwoLawBound
        >>> estimator = GeoQ(lambda x: x[:, 0], None, bound_model=TwoLawBound(reference=Climatology()))
    """

    reference: Climatology | None = None
    uses_opinion: ClassVar[bool] = True

    def fit(self, tuples: Tuples, quantile: float) -> "FittedTwoLaws":
        """Fit the laws to all levels."""
        points, features, inner = tuples.points, tuples.features, tuples.interpolating
        reference, known = None, Known.of(tuples)
        if self.reference is not None:
            reference = self.reference.fit(points.outputs, quantile)
        # Errors in units of the natural scale; the bound is multiplied by it at the end.
        natural = natural_scale(features, reference)
        own = known.law_features(features, natural)
        error = flat(tuples.error).astype(float) / natural
        resemblance = None if inner.all() else Resemblance.fit(tuples)
        pi = resemblance(tuples.relation) if resemblance else np.zeros(len(error))
        laws, plain = (
            LawPair.fit((*names, *[*own][len(NAMES) :]), own, error, pi, tuples)
            for names in (NAMES, WITHOUT_OPINION)
        )
        trust = _trust((laws, plain), own, error, tuples)
        fitted = FittedTwoLaws(
            quantile, known, points.metric, reference, laws, plain, resemblance, trust
        )
        return fitted.recalibrated(tuples[inner])


def _geometry(relation: Relation) -> Float[np.ndarray, " n 3"]:
    """Logarithms of the support distance and of the distance to the nearest point, and the one-sidedness."""
    distance = np.log(relation.support_distance + MIN_DISTANCE)
    nearest = np.log(relation.nearest + MIN_NEAREST)
    return np.stack([distance, nearest, relation.side], 1)


@dataclass(frozen=True)
class Resemblance:
    r"""The probability that a query looks like a point that an extrapolating fold held out.

    .. math:: \operatorname{logit} \pi(x) = c_0 + c_1 \log \Delta d(x) + c_2 \log(d_1(x) + \varepsilon) + c_3 \, \mathrm{side}(x)

    Held-out points of random folds lie amid the other points; held-out points of cluster and nested folds do not. A logistic
    regression with a ridge penalty of 1 on the standardised slopes separates them, with half of the total weight on each kind.
    """

    mean: Float[np.ndarray, " 3"]
    deviation: Float[np.ndarray, " 3"]
    coefficients: Float[np.ndarray, " 4"]

    @staticmethod
    def fit(tuples: Tuples) -> "Resemblance":
        """Fit to calibration tuples, of which some come from the interpolating folds."""
        from sklearn.linear_model import LogisticRegression  # here: a slow import

        columns, inner, weight = _geometry(tuples.relation), tuples.interpolating, tuples.weight
        mean, deviation = columns.mean(axis=0), columns.std(axis=0) + 1e-9
        of_kind = np.where(inner, weight[inner].sum(), weight[~inner].sum())
        half = 0.5 * weight / of_kind * len(weight)
        model = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-10)
        model.fit((columns - mean) / deviation, ~inner, sample_weight=half)
        return Resemblance(mean, deviation, np.append(model.coef_[0], model.intercept_))

    def __call__(self, relation: Relation) -> Float[np.ndarray, " n"]:
        """The probability pi of each query."""
        x = (_geometry(relation) - self.mean) / self.deviation
        logit = x @ self.coefficients[:3] + self.coefficients[3]
        return 0.5 + 0.5 * np.tanh(logit / 2)


@dataclass(frozen=True)
class LawPair:
    """The law of the interpolating folds and the law of all folds, blended by the resemblance pi."""

    inside: Law
    outside: Law

    @staticmethod
    def fit(
        names: tuple[str, ...], features: LawFeatures, error: Errors, pi: np.ndarray, tuples: Tuples
    ) -> "LawPair":
        """Fit both laws with these features."""
        inner, outside = tuples.interpolating, None
        fit: Any = partial(Law.fit, names, counted=tuples.counted)
        own, n_own = {name: values[inner] for name, values in features.items()}, inner.sum()
        other, shifts = np.zeros((n_own, error.shape[1])), np.zeros(len(TABLE))
        if n_own < len(inner):
            outside = fit(features, error, tuples.weight, levels=(LEVEL,), ridge=RIDGE_OUTSIDE)
            other, shifts = outside(own), outside.table - outside.intercept(LEVEL)
        # Tuples of one group are in the same part.
        groups, number = np.unique(tuples.group[inner], return_inverse=True)
        parts = (permutation(len(groups)) % N_PARTS)[number]
        blend, weight = (pi[inner], other, shifts, parts), np.full(n_own, 1 / n_own)
        ridge = RIDGE_INSIDE / n_own
        inside = fit(own, error[inner], weight, levels=LEVELS, ridge=ridge, blend=blend)
        return LawPair(inside, outside or inside)

    def __call__(self, features: LawFeatures, pi: Any) -> Errors:
        """Log b of each output at the level 0.95."""
        log = self.inside(features)
        if self.outside is self.inside:
            return log
        return log + pi * (self.outside(features) - log)

    def shifts(self, level: float) -> tuple[float, ...]:
        """The differences between log b at a level and at 0.95, amid the data and outside."""
        laws = self.inside, self.outside
        return tuple(law.intercept(level) - law.intercept(LEVEL) for law in laws)


def _trust(
    both: tuple[LawPair, LawPair], features: LawFeatures, error: Errors, tuples: Tuples
) -> tuple[float, float]:
    """The weight w of the first law against the plain one, amid the data and outside.

    Each fold compares the pinball losses of both laws. The logarithms of the ratios are averaged over the interpolating folds, and
    over the other folds.
    """
    counted, scale = tuples.counted, both[0].outside.scale
    losses = []
    for pair in both:
        loss = pinball_loss(error, np.exp(pair.outside(features)), LEVEL)
        losses.append(loss[:, counted] / scale[counted])
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for fold in np.unique(tuples.fold):
        rows = tuples.fold == fold
        one, other = (max(float(np.nanmean(loss[rows])), 1e-300) for loss in losses)
        ratios[bool(tuples.interpolating[rows][0])].append(math.log(one / other))
    amid, outside = (ratios[place] or ratios[not place] for place in (True, False))
    weights = [0.5 - 0.5 * math.tanh(POWER * sum(own) / len(own) / 2) for own in (amid, outside)]
    return weights[0], weights[1]


@dataclass(frozen=True)
class FittedTwoLaws:
    """The fitted laws with the process and without; ``shift`` calibrates the pooled bound amid the data, and ``lower`` the levels below 0.95."""

    quantile: float
    known: "Known"
    metric: FittedMetric | None
    reference: FittedClimatology | None
    laws: LawPair
    plain: LawPair
    resemblance: Resemblance | None
    trust: tuple[float, float]
    shift: float = 0.0
    lower: Float[np.ndarray, " n_lower"] | None = None
    has_levels: ClassVar[bool] = True

    def recalibrated(self, tuples: Tuples) -> "FittedTwoLaws":
        """The same bound, which covers the tuples of the interpolating folds at the level 0.95 and at the levels of ``TABLE`` below it."""
        features, counted = tuples.features, tuples.counted
        # A bound without a metric has no overhang.
        bound = replace(self, metric=None)._bound(features, LEVEL)[:, counted]
        error = flat(tuples.error)[:, counted].astype(float)
        scale = self.laws.inside.scale[counted] * natural_scale(features, self.reference)
        ratio = np.log((error + MIN_ERROR * scale) / bound)
        weight = np.broadcast_to(1 - self._pi(features), ratio.shape)
        present = ~np.isnan(ratio)
        levels = [exceeding(level, len(tuples)) for level in TABLE if level <= LEVEL]
        found = weighted_quantiles(ratio[present], weight[present], levels)
        return replace(self, shift=float(found[-1]), lower=found - found[-1])

    def with_points(self, points: Points, error: np.ndarray) -> "FittedTwoLaws":
        """The same laws with other last points; these have held-out errors, as the surrogate was not trained on them."""
        outputs = filled_with_means(flat(points.outputs).astype(float))
        of_fit = self.known.held_out_error[: len(outputs) - len(error)]
        held_out = np.concatenate([of_fit, error.reshape(-1, of_fit.shape[1]).astype(float)])
        return replace(self, known=replace(self.known, outputs=outputs, held_out_error=held_out))

    def __call__(self, features: Features, quantile: float | None = None) -> Bounds:
        shape, level = features.anchor_error.shape, quantile or self.quantile
        # The arrays of a chunk fit into the cache.
        rows = chunks(len(features), 256 * math.prod(shape[1:]))
        return joined([self._bound(features[part], level) for part in rows]).reshape(shape)

    def _pi(self, features: Features) -> Any:
        relation: Any = features.relation
        return 0.0 if self.resemblance is None else self.resemblance(relation)[:, None]

    def _bound(self, features: Features, level: float) -> Errors:
        natural, pi = natural_scale(features, self.reference), self._pi(features)
        own, opinion = self.known.law_features(features, natural), features.opinion
        assert opinion is not None
        log = self.plain(own, pi)
        step = self.laws(own, pi) - log
        weight = (1 - pi) * self.trust[0] + pi * self.trust[1]
        # A bound below the bound of the other laws needs a process with data near the query.
        left = opinion.left[:, None]
        weight = np.where(step < 0, weight * (1 - left**2), weight)
        bound = natural * np.exp(log + weight * step + (1 - pi) * self.shift)
        if self.metric is not None and self.metric.sensitivity is not None:
            size = _per_output(self.metric.overhang(features.inputs), bound.shape[1])
            # Where the process has data near the query, q contains the overhang.
            unknown = 1 - weight * (1 - np.sqrt(left))
            bound += unknown * np.minimum(OVERHANG_FRACTION * size, MAX_OVERHANG * bound)
        pairs = zip(self.laws.shifts(level), self.plain.shifts(level), strict=True)
        inside, outside = (weight * one + (1 - weight) * other for one, other in pairs)
        if level < LEVEL and self.lower is not None:
            inside = np.interp(math.log(level / (1 - level)), LOGITS[: len(self.lower)], self.lower)
        return bound * np.exp((1 - pi) * inside + pi * outside)

    def describe(self) -> str:
        """The fitted laws in three sentences."""
        amid, outside = (100 * weight for weight in self.trust)
        return (
            f"Amid the data the bound depends most on {self.laws.inside.describe()}. Outside it depends most on "
            f"{self.laws.outside.describe()}. The laws with the Gaussian process have the weight {amid:.0f} % amid the data and "
            f"{outside:.0f} % outside."
        )


@dataclass(frozen=True)
class Known:
    """What the features of the laws need of the data; the range is the largest deviation that a process may expect."""

    outputs: Float[np.ndarray, " n_points n_values"]
    deviation: Float[np.ndarray, " n_values"]
    held_out_error: Float[np.ndarray, " n_points n_outputs"]
    range: Float[np.ndarray, " n_values"]

    @staticmethod
    def of(tuples: Tuples) -> "Known":
        inner = tuples[tuples.interpolating]
        error = flat(inner.error).astype(float)
        # Points that no interpolating fold holds out keep their observed error, and so do errors that do not count.
        held_out = flat(tuples.points.error).astype(float)
        total, count = np.zeros_like(held_out), np.zeros_like(held_out)
        np.add.at(total, inner.point, np.nan_to_num(error))
        np.add.at(count, inner.point, ~np.isnan(error))
        held_out = np.where(count > 0, total / np.maximum(count, 1), held_out)
        outputs = filled_with_means(flat(tuples.points.outputs).astype(float))
        deviation = outputs.std(axis=0)
        spread = np.where(deviation > 0, deviation, 1.0)
        return Known(outputs, spread, held_out, np.ptp(outputs, axis=0))

    def law_features(self, features: Features, natural: Any) -> LawFeatures:
        r"""The features of the laws; those in units of the error are divided by ``natural``.

        The expected error is the root mean square of the error under the process, :math:`q = \sqrt{(F - m)^2 + v}`.
        """
        relation, opinion = features.relation, features.opinion
        assert relation is not None
        assert opinion is not None
        anchor, prediction = (
            flat(part).astype(float) for part in (features.anchor_error, features.prediction)
        )
        n_outputs = anchor.shape[1]
        mean, variance = _moments(self.outputs, relation.near)
        variability = np.sqrt(variance) / self.deviation
        if variability.shape[1] != n_outputs:
            variability = np.sqrt((variability**2).mean(axis=1, keepdims=True))
        expected = np.hypot(prediction - opinion.mean, np.minimum(opinion.deviation, self.range))
        distance, nearest, side = _geometry(relation).T[:, :, None]
        user = () if features.user is None else features.user.T
        return {
            "distance": distance,
            "nearest": nearest,
            "side": side,
            "anchor": anchor / natural,
            "held_out": anchor_mean(relation.near, self.held_out_error) / natural,
            "departure": _per_output(abs(prediction - mean), n_outputs) / natural,
            "variability": np.log(variability + MIN_VARIABILITY),
            "expected": _per_output(expected, n_outputs) / natural,
            **{f"feature {j} of the user": column[:, None] for j, column in enumerate(user)},
        }


def _per_output(size: Values, n_outputs: int) -> Errors:
    """One number per error: the sizes themselves, or their norm if the error is not elementwise."""
    if size.shape[1] == n_outputs:
        return size
    norm = np.linalg.norm(size, axis=1, keepdims=True)
    return np.broadcast_to(norm, (len(size), n_outputs))


def _moments(outputs: np.ndarray, rows: Int[np.ndarray, " n k"]) -> tuple[Values, Values]:
    """Mean and variance; one neighbour at a time, so that no array (queries, k, outputs) is needed."""
    # Differences from the nearest neighbour, which is one of the k, keep the digits of a small variance.
    first = outputs[rows[:, 0]]
    total, squares, k = 0 * first, 0 * first, rows.shape[1]
    for column in rows.T[1:]:
        gap = outputs[column] - first
        total += gap
        squares += gap * gap
    total /= k
    return first + total, (squares / k - total * total).clip(min=0)
