"""Cross-fitted calibration data: errors at points that the surrogate of a fold has not seen (lines 5-11)."""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq import masks
from geoq.arrays import Rows, converted, in_chunks, permutation, take, to_tensor
from geoq.checks import add_note_on_error
from geoq.fold_plan import FoldPlan
from geoq.folds import count_independent
from geoq.geometry import (
    Embedding,
    Gathered,
    GeometricFeatures,
    Geometry,
    Neighborhood,
    anchor_error,
    assembled,
    gathers,
    mean_over_channels,
    similar_points,
)
from geoq.metric import AnyCoordinates, FittedMetric
from geoq.probing import warn_of_failed_folds
from geoq.representation import Standardization
from geoq.scratch import empty_like_rows
from geoq.surrogate import ErrorFunctional
from geoq.training.checkpoint import FinishedFolds
from geoq.training.fold_surrogates import Fold, FoldSurrogates, fold_predictions

logger = logging.getLogger(__name__)

N_IN_SAMPLE = 256
# The typical error is computed from at most this many tuples.
N_TYPICAL = 128


@dataclass(frozen=True)
class CalibrationPoints:
    """The points of the data, as increment models and safe regions may use them when they are fitted.

    Attributes:
        inputs: the coordinates T(x) of all points, or nu(x) without a metric.
        outputs: the reference outputs.
        error: the observed errors of the deployed surrogate.
        splits: the training rows and the held-out rows of each fold.
        metric: the metric of the geometry; None for a representation of the user.
        coordinates: the standardisation of the inputs.
        exact: the coordinates of the error in which all errors are zero; None if there are none. For rollouts, the coordinates
            of the state that are not bounded.
    """

    inputs: Float[Tensor, " n_points *coordinates"]
    outputs: Float[Tensor, " n_points *output"]
    error: Float[Tensor, " n_points *field"]
    splits: tuple[tuple[np.ndarray, np.ndarray], ...]
    metric: FittedMetric | None
    coordinates: AnyCoordinates | None = None
    exact: Bool[Tensor, " *field"] | None = None


@gathers("error")
@dataclass(frozen=True)
class CalibrationSet:
    r"""Calibration tuples :math:`(\psi_i, r_i^{cf})` of all folds; nested folds give several tuples per point.

    Attributes:
        features: the features of the held-out points relative to the points that their fold left in.
        error: their errors, made by the surrogate of the fold.
        point: the row of the data that a tuple comes from.
        fold: the fold that held the point out, counted from 0.
        family: the fold scheme that the fold belongs to.
        position: for dependent points, the group or the time of the point. Two tuples depend on each other if their
            positions differ by at most ``reach``.
        reach: see ``position``.
        data: the points that the tuples come from. None in an estimator that was loaded from a file.
    """

    features: GeometricFeatures
    error: Float[Tensor, " n *field"]
    point: Int[Tensor, " n"]
    fold: Int[Tensor, " n"]
    family: Int[Tensor, " n"]
    position: Int[Tensor, " n"] | None = None
    reach: int = 0
    data: "CalibrationPoints | None" = None

    def __len__(self) -> int:
        return len(self.point)

    def __getitem__(self, rows: slice | Tensor) -> "CalibrationSet":
        return assembled(
            CalibrationSet,
            features=self.features[rows],
            error=self.stored_error[rows],
            point=self.point[rows],
            fold=self.fold[rows],
            family=self.family[rows],
            position=None if self.position is None else self.position[rows],
            reach=self.reach,
            data=self.data,
        )

    def subsample(self, n_rows: int) -> "CalibrationSet":
        """All tuples, or a random sample of ``n_rows`` of them if there are more."""
        if len(self) <= n_rows:
            return self
        order = permutation(len(self))
        return self[order[:n_rows].sort().values.to(self.point.device)]

    @property
    def stored_error(self) -> Tensor | Gathered:
        """The errors; gathered rows are not read."""
        stored: Tensor | Gathered = vars(self)["_error"]
        return stored

    @property
    def field_shape(self) -> tuple[int, ...]:
        """The shape of the error of one tuple."""
        stored = self.stored_error
        values = stored.values if isinstance(stored, Gathered) else stored
        return tuple(values.shape[1:])

    def errors(
        self, rows: Tensor, columns: slice | Tensor
    ) -> Float[Tensor, " n_rows n_columns"]:
        """The errors of some tuples in some coordinates of the flattened field."""
        stored = self.stored_error
        if not isinstance(stored, Gathered):
            return stored.reshape(len(stored), -1)[:, columns][rows]
        assert stored.point is not None
        values = stored.values
        some = values.reshape(len(values), -1)[:, columns]
        return some[stored.point[rows]].to(stored.dtype)

    @property
    def increment(self) -> Float[Tensor, " n *field"]:
        r"""The part of the error that the anchors do not explain.

        .. math:: r_i^{cf} = [e_i^{cf} - \overline e_{k_a, i}^{cf}]_+  (eq:anchor_increment)
        """
        return (self.error - self.features.anchor_error).clamp(min=0)

    @property
    def weight(self) -> Float[Tensor, " n"]:
        """Weights of the tuples. They sum to 1, and every family of folds has the same total weight."""
        count = self.family.bincount()[self.family] * len(self.family.unique())
        weight: Tensor = 1 / count.to(self.stored_error.dtype)
        return weight

    @property
    def interpolating(self) -> Bool[Tensor, " n"]:
        """Mask of the family of folds with the smallest median support distance, normally the random folds."""
        distance = self.features.support_distance
        by_family = {
            float(distance[self.family == family].median()): family
            for family in self.family.unique()
        }
        return torch.eq(self.family, by_family[min(by_family)])

    @property
    def group(self) -> Int[Tensor, " n"]:
        """The group of each tuple: tuples of one group come from one point, one group of points or one stretch of time.

        Neighbouring stretches of time touch, so a split by groups separates dependent times nearly, but not completely.
        """
        if self.position is None:
            return self.point
        return self.position // (self.reach + 1)

    @property
    def n_independent(self) -> int:
        """The number of tuples that are independent of the tuple with the fewest independent ones."""
        position = None if self.position is None else self.position.cpu().numpy()
        return count_independent(position, self.reach, len(self))

    def independent_of(self, held_out: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Mask of the tuples that are not held out and do not depend on a held-out stretch of time."""
        independent = ~held_out
        if self.position is not None:
            own = self.position[held_out]
            before = self.position < own.min() - self.reach
            independent &= before | (self.position > own.max() + self.reach)
        return independent

    @cached_property
    def typical_distance(self) -> float:
        """Median length of the displacements."""
        return float(self.features.distance.median())

    @cached_property
    def typical_support_distance(self) -> float:
        """Median support distance."""
        return float(self.features.support_distance.median())

    @cached_property
    def typical_error(self) -> Float[Tensor, " n_channels"]:
        """Median held-out error of each output, or of each channel of a field, in the family that interpolates."""
        tuples = self[self.interpolating].subsample(N_TYPICAL)
        return mean_over_channels(tuples.error).median(dim=0).values

    @cached_property
    def standardization(self) -> Standardization:
        """T, fitted to the calibration features; the increment model and the safe region use it (line 11)."""
        return Standardization.fit(self.features.flat)


@dataclass(frozen=True)
class Observations:
    """The user's pairs, the inputs in the coordinates of the geometry, and the errors of the deployed surrogate.

    If y is masked in some samples only, ``absent`` is true in these cells. Recipes receive ``training_y``.
    """

    x: Rows
    y: Rows
    embedding: Embedding
    error: Float[Tensor, " n *field"]
    prediction: Float[Tensor, " n *output"]
    metric: FittedMetric | None
    coordinates: AnyCoordinates | None
    absent: Bool[Tensor, " n *output"] | None
    training_y: Rows

    def points(self, plan: FoldPlan, errors: list[Tensor]) -> CalibrationPoints:
        """The points as increment models and safe regions may use them; ``errors`` are all errors of the points."""
        return CalibrationPoints(
            inputs=self.embedding.coordinates,
            outputs=to_tensor(self.y, "y"),
            error=self.error,
            splits=plan.splits,
            metric=self.metric,
            coordinates=self.coordinates,
            exact=masks.exact_coordinates(errors),
        )


def cross_fit(
    data: Observations,
    plan: FoldPlan,
    *,
    fold_surrogates: FoldSurrogates | None,
    error_functional: ErrorFunctional,
    geometry: Geometry,
    checkpoint: FinishedFolds | None = None,
) -> CalibrationSet:
    """Features and errors of every held-out point of all folds (lines 6-10).

    Line 8 is computed in two parts. The neighbours of all folds are found before line 7, because they determine the points at
    which a fold surrogate is evaluated; only predictions are kept, never the fold surrogates themselves. Without a source of fold
    surrogates, all errors are the errors of the deployed surrogate, which has not seen the data.
    """
    # Line 8, first part: the anchors and features of the held-out points.
    numbers = range(len(plan.splits))
    held_out = [_HeldOut.relate(data, n, plan, geometry) for n in numbers]
    point, anchors = (
        torch.cat([getattr(part, name) for part in held_out])
        for name in ("unseen", "anchors")
    )
    z, absent, errors = data.embedding.z, data.absent, [data.error]
    donors = None if absent is None else similar_points(geometry)
    error: Tensor | Gathered
    of_anchors: Tensor | Gathered
    if fold_surrogates is None:
        # Tuples of one point share its fields.
        of_points = masks.from_donors(data.error, absent, donors)
        error = Gathered(of_points, z.dtype, point)
        of_anchors = Gathered(data.error, z.dtype, None, anchors)
        prediction = Gathered(data.prediction, z.dtype, point)
    else:
        tuples = _predicted(
            data, held_out, fold_surrogates, error_functional, checkpoint
        )
        error, of_anchors = tuples.error, tuples.anchor_error
        if donors is not None and absent is not None:
            rows = masks.donors_of_tuples(donors, point, plan)
            error = masks.from_donors(error, absent[point], rows)
        errors.append(error)
        every = torch.arange(len(point), device=z.device)
        prediction = Gathered(tuples.prediction, z.dtype, every)
    neighborhoods = [h.neighborhood.parts for h in held_out if h.neighborhood]
    parts = [
        Gathered(z, z.dtype, point, anchors),
        torch.cat([part.support_distance for part in held_out]),
        of_anchors,
        prediction,
        Gathered(data.embedding.coordinates, z.dtype, point),
        *(torch.cat(column) for column in zip(*neighborhoods, strict=True)),
    ]
    position, dependence = None, plan.dependence
    if dependence is not None:
        position = torch.as_tensor(dependence.position[plan.point], device=z.device)
    # Line 10: the tuples of all folds together. Line 11, T, is computed when it is needed.
    return assembled(
        CalibrationSet,
        features=GeometricFeatures.of(parts),
        error=error,
        point=point,
        fold=torch.as_tensor(plan.per_tuple(numbers), device=z.device),
        family=torch.as_tensor(plan.per_tuple(plan.family), device=z.device),
        position=position,
        reach=0 if dependence is None else dependence.reach,
        data=data.points(plan, errors),
    )


def _predicted(
    data: Observations,
    held_out: "list[_HeldOut]",
    fold_surrogates: FoldSurrogates,
    error_functional: ErrorFunctional,
    checkpoint: FinishedFolds | None,
) -> "_FoldTuples":
    """The predictions and errors of the fold surrogates at the held-out points of all folds."""
    # The tuples of all folds are written into one place: concatenating fields would take twice the memory.
    ends = np.cumsum([len(part.unseen) for part in held_out])
    place: _FoldTuples | None = None
    mean_error = np.empty((2, len(held_out)))
    folds = [part.fold for part in held_out]
    # Line 7: train the fold surrogates, or obtain their predictions.
    for number, prediction in fold_predictions(
        fold_surrogates, data.x, data.training_y, folds, checkpoint
    ):
        part = held_out[number]
        # Line 8, second part: the errors of the held-out points and of their anchors.
        tuples = part.tuples(data, prediction, error_functional)
        place = tuples.room_for(int(ends[-1])) if place is None else place
        place.put(tuples, int(ends[number]))
        mean_error[:, number] = float(tuples.error.mean()), tuples.in_sample
        logger.info(
            "%s: mean error %.4g held out, %.4g in sample",
            part.fold,
            *mean_error[:, number],
        )
    assert place is not None
    warn_of_failed_folds(*mean_error)
    return place


class _FoldTuples(NamedTuple):
    """Errors, anchor errors and predictions of the tuples of a fold, and the mean error of its surrogate in sample."""

    error: Tensor
    anchor_error: Tensor
    prediction: Tensor
    in_sample: float

    def room_for(self, n: int) -> "_FoldTuples":
        """Empty arrays for n tuples of this shape."""
        error, of_anchors, prediction = (empty_like_rows(part, n) for part in self[:3])
        return _FoldTuples(error, of_anchors, prediction, 0.0)

    def put(self, other: "_FoldTuples", end: int) -> None:
        """Copy the tuples of another fold into the rows before ``end``."""
        for own, theirs in zip(self[:3], other[:3], strict=True):
            own[end - len(theirs) : end] = theirs


@dataclass(frozen=True)
class _HeldOut:
    """The held-out points of a fold, related to the points that it left in (line 8).

    The surrogate of the fold is evaluated at the held-out points, at the points that serve as anchors, and at a few more of
    its training points. ``anchors`` are rows of the data, ``places`` their places among the evaluated anchors.
    """

    fold: Fold
    support_distance: Float[Tensor, " n_unseen"]
    neighborhood: Neighborhood | None
    unseen: Int[Tensor, " n_unseen"]
    anchors: Int[Tensor, " n_unseen n_anchors"]
    places: Int[Tensor, " n_unseen n_anchors"]
    n_used: int

    @staticmethod
    def relate(
        data: Observations, number: int, plan: FoldPlan, geometry: Geometry
    ) -> "_HeldOut":
        device = data.embedding.z.device
        seen, unseen = (
            torch.as_tensor(rows, device=device) for rows in plan.splits[number]
        )
        left_in = replace(geometry, points=data.embedding[seen])
        relation = left_in.relate(data.embedding[unseen])
        neighborhood = relation.neighborhood
        if neighborhood is not None:
            # The rows of the data, not of the fold.
            rows = seen[neighborhood.rows].to(torch.int32)
            neighborhood = replace(neighborhood, rows=rows)
        used, places = relation.anchors.unique(return_inverse=True)
        few = seen[:: max(1, len(seen) // N_IN_SAMPLE)]
        asked = torch.cat([unseen, seen[used], few])
        return _HeldOut(
            Fold(number, len(plan.splits), seen.cpu(), asked.cpu()),
            relation.support_distance,
            neighborhood,
            unseen,
            seen[relation.anchors],
            places,
            len(used),
        )

    def tuples(
        self, data: Observations, prediction: Tensor, error_functional: ErrorFunctional
    ) -> _FoldTuples:
        """Errors and predictions of the held-out points, given the predictions of the fold surrogate."""
        rows, n_unseen = self.fold.evaluated_rows, len(self.unseen)
        y, z = take(data.y, rows), data.embedding.z
        absent = None if data.absent is None else data.absent[rows]
        with add_note_on_error(f"while evaluating the surrogate of {self.fold}"):
            error = masks.fold_errors(prediction, error_functional, y, absent, n_unseen)
        held_out, of_anchors, in_sample = converted(error, z).tensor_split(
            [n_unseen, n_unseen + self.n_used]
        )
        return _FoldTuples(
            held_out,
            # In-sample on purpose: at deployment anchor errors are observed, query errors are not.
            in_chunks(
                lambda part: anchor_error(self.places[part], of_anchors),
                n_unseen,
                of_anchors[:1],
            ),
            prediction[:n_unseen].to(z.device),
            float(in_sample.mean()),
        )
