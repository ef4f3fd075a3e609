r"""The default increment for tables: two laws of the error, blended by a resemblance.

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

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.archive import state_of, with_prefix, without_prefix
from geoq.arrays import (
    chunks,
    functions_of,
    joined,
    own_arrays,
    permutation,
    rows_of,
)
from geoq.checks import warn
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures, anchor_mean
from geoq.increments.climatology import (
    Climatology,
    Reference,
    check_reference,
    check_reference_shapes,
    fit_reference,
    natural_scale,
    reference_from_state,
    reference_state,
)
from geoq.increments.edge import counted_coordinates
from geoq.increments.law import LEVEL, LEVELS, TABLE, Blend, Errors, Law, LawFeatures
from geoq.increments.resemblance import Resemblance
from geoq.increments.shapes import MIN_GRID_SIZE, Shapes
from geoq.increments.spline import SmoothingSpline, best_smoothing
from geoq.metric import FittedMetric
from geoq.quantiles import check_quantile

# One value per query and output of the surrogate, of which there can be more than errors.
Values: TypeAlias = Float[Tensor, " n n_values"]
# Penalty on the slopes: of the law of the interpolating folds, divided by their number of tuples, and of the other law.
RIDGE_INSIDE, RIDGE_OUTSIDE = 15.0, 0.01
# Parts of the tuples for held-out residuals.
N_PARTS = 5
# The fraction of the overhang that is added, and the largest addition as a fraction of the bound.
OVERHANG_FRACTION, MAX_OVERHANG = 0.25, 1.0


@dataclass
class TwoLawIncrement:
    """The default increment model for scalar and vector errors.

    It has two laws of nine numbers each, a resemblance of four numbers, and a smoothing spline through at most 500 points. It is
    fitted in a fraction of a second, without a training.

    Attributes:
        quantile: tau, the level of the conditional quantile.
        reference: the natural scale of each output, such as ``Climatology()``; None leaves it out.

    Example:
        >>> from geoq import GeoQ, TwoLawIncrement
        >>> geoq = GeoQ(lambda x: x[:, 0], None, increment_model=TwoLawIncrement(quantile=0.9))
    """

    quantile: float = LEVEL
    reference: Reference | None = None
    uses_neighborhood: ClassVar[bool] = True
    may_be_negative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_reference(self.reference)

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse a reference for errors that are not elementwise, and warn of errors on a grid."""
        shape = shapes.error
        if len(shape) >= 2 and min(shape[-2:]) >= MIN_GRID_SIZE:
            warn(
                f"an error has shape {shape}, which may be a field on a grid; TwoLawIncrement treats its values as "
                f"{math.prod(shape)} unrelated outputs. If it is a field, pass increment_model=FieldScaleIncrement(); if not, "
                "flatten y to one row per sample."
            )
        check_reference_shapes(self.reference, shapes)

    def fit(self, calibration: CalibrationSet) -> "TwoLawIncrement":
        assert calibration.data is not None
        self.reference_ = fit_reference(self.reference, calibration, self.quantile)
        self.metric_ = calibration.data.metric
        self.points_ = _Points.of(calibration)
        points, outputs = _pairs(calibration)
        smoothing = best_smoothing(points, outputs)
        self.spline_ = SmoothingSpline.fit(points, outputs, smoothing)
        held_out = _held_out_spline(calibration, smoothing)
        # Errors in units of the natural scale; the bound is multiplied by it at the end.
        features = self._law_features(calibration.features, held_out)
        natural = natural_scale(calibration.features, self.reference_)
        error = calibration.error.reshape(len(calibration), -1).double()
        weight, inner = calibration.weight.double(), calibration.interpolating
        features, error = _over(features, natural), error / natural
        counted = counted_coordinates(calibration)
        parts = _parts(calibration.group[inner])
        blend, self.resemblance_ = Blend.alone(parts, error.shape[1]), None
        if not inner.all():
            self.resemblance_ = Resemblance.fit(calibration.features, inner, weight)
            self.outside_ = Law.fit(
                features,
                error,
                weight,
                levels=(LEVEL,),
                ridge=RIDGE_OUTSIDE,
                counted=counted,
            )
            blend = Blend(
                torch.as_tensor(self.resemblance_(calibration.features))[inner],
                torch.as_tensor(self.outside_(features[inner].arrays())),
                [self.outside_.shift(level) for level in TABLE],
                parts,
            )
        self.inside_ = Law.fit(
            features[inner],
            error[inner],
            error.new_full((len(parts),), 1 / len(parts)),
            levels=LEVELS,
            ridge=RIDGE_INSIDE / len(parts),
            blend=blend,
            counted=counted,
        )
        if inner.all():
            self.outside_ = self.inside_
        return self

    def _law_features(self, features: GeometricFeatures, spline: Values) -> LawFeatures:
        """The features of the laws, in double precision; ``spline`` has the values of the spline at the queries."""
        neighborhood = features.neighborhood
        assert neighborhood is not None
        rows, n = neighborhood.rows, len(features)
        points = self.points_
        anchor = features.anchor_error.reshape(n, -1).double()
        prediction = features.prediction.reshape(n, -1).double()
        n_outputs = anchor.shape[1]
        departure, variability = points.spread(rows, prediction, n_outputs)
        return LawFeatures(
            distance=features.support_distance.double(),
            nearest=neighborhood.nearest.double(),
            side=neighborhood.side.double(),
            anchor=anchor,
            held_out=anchor_mean(rows, points.held_out_error),
            departure=departure,
            variability=variability,
            disagreement=_per_output((prediction - spline).abs_(), n_outputs),
        )

    def at_tuples(self, calibration: CalibrationSet) -> Tensor:
        """The increments at calibration tuples. The spline of a tuple does not contain the points that its fold held out."""
        features = calibration.features
        spline = _held_out_spline(calibration, best_smoothing(*_pairs(calibration)))
        increments = self._increment(features, spline)
        return increments.reshape(calibration.error.shape).to(features.support_distance)

    def __call__(self, features: GeometricFeatures) -> Tensor:
        shape = features.anchor_error.shape
        # A GPU needs large arrays, the cache of a CPU small ones.
        n_arrays = 8 if features.anchor_error.is_cuda else 256
        slices = chunks(len(features), n_arrays * math.prod(shape[1:]))
        parts = [
            self._increment(part, self.spline_(_z(part.inputs, self.metric_)))
            for part in (features[rows] for rows in slices)
        ]
        return joined(parts).reshape(shape).to(features.support_distance)

    def _increment(self, features: GeometricFeatures, spline: Values) -> Errors:
        own = self._law_features(features, spline).arrays()
        xp = functions_of(own["anchor"])
        natural: Any = 1.0
        if self.reference_ is not None:
            (natural,) = own_arrays(natural_scale(features, self.reference_))
        bound, pi = self.inside_(own, natural), 0.0
        if self.resemblance_ is not None:
            pi = self.resemblance_(features)[:, None]
            step = self.outside_(own, natural)
            step -= bound
            step *= pi
            bound += step
        bound = xp.exp(bound, out=bound)
        self._add_overhang(bound, features)
        shifts = [law.shift(self.quantile) for law in (self.inside_, self.outside_)]
        if any(shifts):
            bound = bound * xp.exp((1 - pi) * shifts[0] + pi * shifts[1])
        bound -= own["anchor"]
        return torch.as_tensor(bound)

    def _add_overhang(self, bound: Any, features: GeometricFeatures) -> None:
        """Add a part of the overhang to the bounds of queries outside the ranges of the inputs."""
        metric = self.metric_
        if metric is None or metric.sensitivity is None:
            return
        inputs = features.inputs.to(metric.low)
        rows = metric.outside(inputs).any(dim=1).nonzero()[:, 0]
        if not len(rows):
            return
        overhang = _per_output(metric.overhang(inputs[rows]).double(), bound.shape[1])
        overhang, rows = own_arrays(OVERHANG_FRACTION * overhang, rows)
        own = bound[rows]
        bound[rows] = own + functions_of(own).minimum(overhang, MAX_OVERHANG * own)

    def at_level(self, quantile: float) -> "TwoLawIncrement":
        """The same laws at another quantile level; a higher level never has a smaller bound."""
        check_quantile(quantile, "levels")
        other = copy.copy(self)
        other.quantile = quantile
        return other

    def describe(self) -> str:
        """The fitted laws in two sentences."""
        return (
            f"Amid the data the bound depends most on {self.inside_.describe()}. Outside it depends most on "
            f"{self.outside_.describe()}."
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and fitted numbers, for a file."""
        arrays = {
            **with_prefix("spline.", state_of(self.spline_)),
            **with_prefix("inside.", state_of(self.inside_)),
            **with_prefix("outside.", state_of(self.outside_)),
            **with_prefix("points.", state_of(self.points_)),
            **reference_state(self.reference_),
        }
        if self.resemblance_ is not None:
            arrays |= with_prefix("resemblance.", state_of(self.resemblance_))
        if self.metric_ is not None:
            arrays |= with_prefix("metric.", self.metric_.state())
        return {"quantile": self.quantile}, arrays

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor]
    ) -> "TwoLawIncrement":
        """The fitted model that ``state`` described."""
        reference = reference_from_state(arrays)
        model = TwoLawIncrement(
            settings["quantile"], None if reference is None else Climatology()
        )
        model.reference_ = reference
        model.spline_ = SmoothingSpline(**without_prefix("spline.", arrays))
        model.inside_ = Law(**without_prefix("inside.", arrays))
        model.outside_ = Law(**without_prefix("outside.", arrays))
        model.points_ = _Points(**without_prefix("points.", arrays))
        resemblance = without_prefix("resemblance.", arrays)
        model.resemblance_ = Resemblance(**resemblance) if resemblance else None
        metric = without_prefix("metric.", arrays)
        model.metric_ = FittedMetric.from_state(metric) if metric else None
        return model


@dataclass(frozen=True)
class _Points:
    """What the laws use of the points of the data; ``deviation`` is the standard deviation of each output."""

    outputs: Float[Tensor, " n_points n_values"]
    deviation: Float[Tensor, " n_values"]
    held_out_error: Float[Tensor, " n_points n_outputs"]

    @staticmethod
    def of(calibration: CalibrationSet) -> "_Points":
        assert calibration.data is not None
        error = calibration.error.reshape(len(calibration), -1).double()
        observed = calibration.data.error
        # Points that no interpolating fold holds out keep their observed error.
        held_out = observed.reshape(len(observed), -1).double().clone()
        inner = calibration.interpolating
        point = calibration.point[inner]
        count = point.bincount(minlength=len(held_out)).double()
        total = torch.zeros_like(held_out).index_add_(0, point, error[inner])
        known = count > 0
        held_out[known] = total[known] / count[known, None]
        outputs = calibration.data.outputs
        outputs = outputs.reshape(len(outputs), -1).to(held_out)
        deviation = outputs.std(dim=0, correction=0)
        return _Points(outputs, torch.where(deviation > 0, deviation, 1.0), held_out)

    def spread(
        self, rows: Int[Tensor, " n k"], prediction: Values, n_outputs: int
    ) -> tuple[Tensor, Tensor]:
        """Departure and variability."""
        mean, variance = _moments(self.outputs, rows)
        departure = _per_output((prediction - mean).abs_(), n_outputs)
        variability = variance.sqrt_().div_(self.deviation)
        if variability.shape[1] != n_outputs:
            variability = variability.square().mean(dim=1, keepdim=True).sqrt()
        return departure, variability.expand(-1, n_outputs)


def _per_output(size: Values, n_outputs: int) -> Errors:
    """One number per error: the sizes themselves, or their norm if the error is not elementwise."""
    if size.shape[1] == n_outputs:
        return size
    norm: Tensor = torch.linalg.vector_norm(size, dim=1, keepdim=True)
    return norm.expand(-1, n_outputs)


def _z(inputs: Tensor, metric: FittedMetric | None) -> Float[Tensor, " n n_inputs"]:
    """Inputs in the coordinates of the metric, in double precision."""
    z = inputs if metric is None else metric(inputs)
    return z.reshape(len(z), -1).double()


def _pairs(calibration: CalibrationSet) -> tuple[Tensor, Tensor]:
    """The points of the data in the coordinates of the metric, and their outputs, one row each."""
    data = calibration.data
    assert data is not None
    points = _z(data.inputs, data.metric)
    return points, data.outputs.reshape(len(data.outputs), -1).to(points)


def _held_out_spline(calibration: CalibrationSet, smoothing: float) -> Values:
    """For each tuple, the value of the spline through the points that its fold left in."""
    data = calibration.data
    assert data is not None
    points, outputs = _pairs(calibration)
    queries = _z(calibration.features.inputs, data.metric)
    values = outputs.new_empty(len(calibration), outputs.shape[1])
    for fold in calibration.fold.unique().tolist():
        train = torch.from_numpy(data.splits[fold][0]).to(outputs.device)
        own = calibration.fold == fold
        spline = SmoothingSpline.fit(points[train], outputs[train], smoothing)
        values[own] = spline(queries[own])
    return values


def _moments(
    outputs: Float[Tensor, " n_points n_values"], rows: Int[Tensor, " n k"]
) -> tuple[Values, Values]:
    """Mean and variance; one neighbour at a time, so that no array (queries, k, outputs) is needed."""
    values, columns = own_arrays(outputs, rows.T)
    # Differences from the nearest neighbour, which is one of the k, keep the digits of a small variance.
    first = rows_of(values, columns[0])
    total, squares, k = 0 * first, 0 * first, len(columns)
    for column in columns[1:]:
        gap = rows_of(values, column)
        gap -= first
        total += gap
        gap *= gap
        squares += gap
    total /= k
    squares /= k
    return torch.as_tensor(first + total), torch.as_tensor(squares - total * total)


def _parts(group: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Divide the groups at random into ``N_PARTS`` parts; tuples of one group are in the same part."""
    groups, number = group.unique(return_inverse=True)
    order = permutation(len(groups))
    parts: Tensor = (order % N_PARTS).to(group.device)[number]
    return parts


def _over(features: LawFeatures, natural: Tensor) -> LawFeatures:
    """Features in units of the error, divided by the natural scale."""
    in_units = ("anchor", "held_out", "departure", "disagreement")
    divided = {name: vars(features)[name] / natural for name in in_units}
    return LawFeatures(**{**vars(features), **divided})
