r"""The default bound for tables: two laws of the error, blended by a resemblance.

.. math:: \log b = (1 - \pi) \log b_{in} + \pi \log b_{out}, \qquad \widehat E = b + \min(O / 4, b)

The law b_in is fitted to the tuples of the interpolating (random) folds, the law b_out to the tuples of all folds, and the
resemblance pi is the probability that a query looks like a point that an extrapolating fold held out. So a query amid the data is
bounded like a point of the random folds, and a query outside like a point of the extrapolating folds.

The features of the laws include the difference between the surrogate and a smoothing spline through the same data. The overhang O
is the change of the output outside the ranges of the inputs, if it kept changing as inside.

This is a departure from the paper in form, not in structure: the bound is still the anchor error plus an increment, and an upper
conditional quantile given geometry, learned from cross-fitted tuples. The anchor error is one of the features of the laws, so the
increment can be negative: an anchor with an unusually large error does not raise the bound by all of it.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import chunks, flat, joined, permutation
from geoq.bounds.climatology import Climatology, FittedClimatology, natural_scale
from geoq.bounds.law import LEVEL, LEVELS, TABLE, Blend, Errors, Law, LawFeatures
from geoq.bounds.resemblance import Resemblance
from geoq.bounds.spline import SmoothingSpline, best_smoothing
from geoq.core.geometry import Features, anchor_mean
from geoq.core.tuples import Points, Tuples
from geoq.data.metric import FittedMetric

# One value per query and output of the surrogate, of which there can be more than errors.
Values: TypeAlias = Float[np.ndarray, " n n_values"]
# Penalty on the slopes: of the law of the interpolating folds, divided by their number of tuples, and of the other law.
RIDGE_INSIDE, RIDGE_OUTSIDE = 15.0, 0.01
# Parts of the tuples for held-out residuals.
N_PARTS = 5
# The fraction of the overhang that is added, and the largest addition as a fraction of the bound.
OVERHANG_FRACTION, MAX_OVERHANG = 0.25, 1.0


@dataclass(frozen=True)
class TwoLawBound:
    """The default bound for scalar and vector errors.

    It has two laws of nine numbers each, a resemblance of four numbers, and a smoothing spline through at most 500 points. It is
    fitted in a fraction of a second, without a training.

    Attributes:
        reference: the natural scale of each output, ``Climatology()``; None leaves it out.

    Example:
        >>> from geoq import GeoQ
        >>> from geoq.parts import Climatology, TwoLawBound
        >>> estimator = GeoQ(lambda x: x[:, 0], None, bound_model=TwoLawBound(reference=Climatology()))
    """

    reference: Climatology | None = None

    def fit(self, tuples: Tuples, quantile: float) -> "FittedTwoLaws":
        """Fit the laws to all levels."""
        points = tuples.points
        z, outputs = _pairs(points)
        smoothing = best_smoothing(z, outputs)
        reference = None
        if self.reference is not None:
            reference = self.reference.fit(points.outputs, quantile)
        bare = FittedTwoLaws(
            quantile,
            _Outputs.of(tuples),
            SmoothingSpline.fit(z, outputs, smoothing),
            smoothing,
            points.metric,
            reference,
        )
        features, of_tuples = tuples.features, _held_out_spline(tuples, smoothing)
        law_features = bare.law_features(features, of_tuples)
        # Errors in units of the natural scale; the bound is multiplied by it at the end.
        natural = natural_scale(features, reference)
        law_features = _over(law_features, natural)
        error = flat(tuples.error).astype(float) / natural
        weight, inner, counted = tuples.weight, tuples.interpolating, tuples.counted
        parts = _parts(tuples.group[inner])
        blend, resemblance = Blend.alone(parts, error.shape[1]), None
        outside: Law | None = None
        if not inner.all():
            resemblance = Resemblance.fit(tuples.relation, inner, weight)
            outside = Law.fit(
                law_features, error, weight, levels=(LEVEL,), ridge=RIDGE_OUTSIDE, counted=counted
            )
            blend = Blend(
                resemblance(tuples.relation)[inner],
                outside(law_features[inner]),
                [outside.shift(level) for level in TABLE],
                parts,
            )
        inside = Law.fit(
            law_features[inner],
            error[inner],
            np.full(len(parts), 1 / len(parts)),
            levels=LEVELS,
            ridge=RIDGE_INSIDE / len(parts),
            blend=blend,
            counted=counted,
        )
        return replace(bare, inside=inside, outside=outside or inside, resemblance=resemblance)


@dataclass(frozen=True)
class FittedTwoLaws:
    """The fitted laws, the resemblance, the spline, and what the features of the laws need of the data.

    ``quantile`` is the level of a bound without a level.
    """

    quantile: float
    outputs: "_Outputs"
    spline: SmoothingSpline
    smoothing: float
    metric: FittedMetric | None
    reference: FittedClimatology | None
    inside: Law | None = None
    outside: Law | None = None
    resemblance: Resemblance | None = None
    has_levels: ClassVar[bool] = True

    def law_features(self, features: Features, spline: Values) -> LawFeatures:
        """The features of the laws; ``spline`` has the values of the spline at the queries."""
        relation = features.relation
        assert relation is not None
        anchor = flat(features.anchor_error).astype(float)
        prediction = flat(features.prediction).astype(float)
        n_outputs = anchor.shape[1]
        departure, variability = self.outputs.spread(relation.near, prediction, n_outputs)
        return LawFeatures(
            distance=relation.support_distance,
            nearest=relation.nearest,
            side=relation.side,
            anchor=anchor,
            held_out=anchor_mean(relation.near, self.outputs.held_out_error),
            departure=departure,
            variability=variability,
            disagreement=_per_output(abs(prediction - spline), n_outputs),
        )

    def __call__(
        self, features: Features, quantile: float | None = None
    ) -> Float[np.ndarray, " n *field"]:
        shape = features.anchor_error.shape
        # The arrays of a chunk fit into the cache.
        parts = [
            self._bound(part, self.spline(_z(part.inputs, self.metric)), quantile)
            for rows in chunks(len(features), 256 * math.prod(shape[1:]))
            for part in (features[rows],)
        ]
        return joined(parts).reshape(shape)

    def at_tuples(self, tuples: Tuples) -> Float[np.ndarray, " n *field"]:
        """The bounds at calibration tuples. The spline of a tuple does not contain the points that its fold held out."""
        spline = _held_out_spline(tuples, self.smoothing)
        return self._bound(tuples.features, spline, None).reshape(tuples.error.shape)

    def _bound(self, features: Features, spline: Values, quantile: float | None) -> Errors:
        own, relation = self.law_features(features, spline), features.relation
        assert self.inside is not None
        assert self.outside is not None
        assert relation is not None
        natural = natural_scale(features, self.reference)
        log = self.inside(own, natural)
        level = self.quantile if quantile is None else quantile
        shift = self.inside.shift(level)
        if self.resemblance is not None:
            pi = self.resemblance(relation)[:, None]
            log += pi * (self.outside(own, natural) - log)
            shift = (1 - pi) * shift + pi * self.outside.shift(level)
        bound = np.exp(log)
        bound += np.minimum(self._overhang(features), MAX_OVERHANG * bound)
        return bound * np.exp(shift) if level != LEVEL else bound

    def _overhang(self, features: Features) -> Errors | float:
        """A part of the overhang, which is added to the bounds of queries outside the ranges of the inputs."""
        metric = self.metric
        if metric is None or metric.sensitivity is None:
            return 0.0
        n_outputs = math.prod(features.anchor_error.shape[1:])
        overhang = metric.overhang(features.inputs)
        return OVERHANG_FRACTION * _per_output(overhang, n_outputs)

    def describe(self) -> str:
        """The fitted laws in two sentences."""
        assert self.inside is not None
        assert self.outside is not None
        return (
            f"Amid the data the bound depends most on {self.inside.describe()}. Outside it depends most on "
            f"{self.outside.describe()}."
        )


@dataclass(frozen=True)
class _Outputs:
    """Outputs and held-out errors of all points, averaged over neighbours by the laws.

    ``deviation`` is the standard deviation of each output.
    """

    outputs: Float[np.ndarray, " n_points n_values"]
    deviation: Float[np.ndarray, " n_values"]
    held_out_error: Float[np.ndarray, " n_points n_outputs"]

    @staticmethod
    def of(tuples: Tuples) -> "_Outputs":
        inner = tuples[tuples.interpolating]
        error = flat(inner.error).astype(float)
        # Points that no interpolating fold holds out keep their observed error, and so do errors that do not count.
        held_out = flat(tuples.points.error).astype(float)
        total, count = np.zeros_like(held_out), np.zeros_like(held_out)
        np.add.at(total, inner.point, np.nan_to_num(error))
        np.add.at(count, inner.point, ~np.isnan(error))
        held_out = np.where(count > 0, total / np.maximum(count, 1), held_out)
        _, outputs = _pairs(tuples.points)
        deviation = outputs.std(axis=0)
        return _Outputs(outputs, np.where(deviation > 0, deviation, 1.0), held_out)

    def spread(
        self, rows: Int[np.ndarray, " n k"], prediction: Values, n_outputs: int
    ) -> tuple[Errors, Errors]:
        """Departure and variability."""
        mean, variance = _moments(self.outputs, rows)
        departure = _per_output(abs(prediction - mean), n_outputs)
        variability = np.sqrt(variance) / self.deviation
        if variability.shape[1] != n_outputs:
            variability = np.sqrt((variability**2).mean(axis=1, keepdims=True))
        return departure, np.broadcast_to(variability, departure.shape)


def _per_output(size: Values, n_outputs: int) -> Errors:
    """One number per error: the sizes themselves, or their norm if the error is not elementwise."""
    if size.shape[1] == n_outputs:
        return size
    norm = np.linalg.norm(size, axis=1, keepdims=True)
    return np.broadcast_to(norm, (len(size), n_outputs))


def _z(inputs: np.ndarray, metric: FittedMetric | None) -> Float[np.ndarray, " n n_inputs"]:
    """Inputs in the coordinates of the metric, in double precision."""
    return flat(inputs if metric is None else metric(inputs)).astype(float)


def _pairs(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The points of the data in the coordinates of the metric, and their outputs without gaps, one row each."""
    outputs = flat(points.outputs).astype(float)
    absent = np.isnan(outputs)
    if absent.any():
        n_present = (~absent).sum(axis=0)
        mean = np.nansum(outputs, axis=0) / np.maximum(n_present, 1)
        outputs = np.where(absent, mean, outputs)
    return _z(points.inputs, points.metric), outputs


def _held_out_spline(tuples: Tuples, smoothing: float) -> Values:
    """For each tuple, the value of the spline through the points that its fold left in."""
    z, outputs = _pairs(tuples.points)
    values = np.empty((len(tuples), outputs.shape[1]))
    for fold in np.unique(tuples.fold):
        train, own = tuples.points.splits[fold][0], tuples.fold == fold
        spline = SmoothingSpline.fit(z[train], outputs[train], smoothing)
        values[own] = spline(z[tuples.point[own]])
    return values


def _moments(
    outputs: Float[np.ndarray, " n_points n_values"], rows: Int[np.ndarray, " n k"]
) -> tuple[Values, Values]:
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


def _parts(group: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Divide the groups at random into ``N_PARTS`` parts; tuples of one group are in the same part."""
    groups, number = np.unique(group, return_inverse=True)
    return (permutation(len(groups)) % N_PARTS)[number]


def _over(features: LawFeatures, natural: np.ndarray) -> LawFeatures:
    """Features in units of the error, divided by the natural scale."""
    in_units = ("anchor", "held_out", "departure", "disagreement")
    divided = {name: getattr(features, name) / natural for name in in_units}
    return replace(features, **divided)
