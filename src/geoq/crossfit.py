"""Cross-fitted calibration data: what the error did where a surrogate had not seen the answer (lines 5-11)."""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.checkpoint import Checkpoint
from geoq.fold_surrogates import Fold, FoldSurrogates, fold_predictions
from geoq.folds import FoldPlan
from geoq.geometry import (
    Embedding,
    GeometricFeatures,
    Geometry,
    Relation,
    anchor_error,
)
from geoq.representation import Standardization
from geoq.surrogate import Array, ErrorFunctional, errors_of, noting, take, warn

logger = logging.getLogger(__name__)

# A fold surrogate this many times worse than its fellows, on what it saw and on what it did not, has failed to train:
# extrapolation alone spoils only the second.
OUT_OF_FAMILY = 5.0
N_IN_SAMPLE = 256


@dataclass(frozen=True)
class CalibrationSet:
    r"""Tuples :math:`(\psi_i, r_i^{cf})` of all folds; nested folds give several tuples per point.

    ``point`` is the row of the data a tuple comes from, ``fold`` the fold that held it out, counted from 0, and
    ``family`` the scheme that the fold belongs to. Where points depend on each other, tuples do whose positions differ
    by no more than the reach.
    """

    features: GeometricFeatures
    error: Float[Tensor, " n *field"]
    point: Int[Tensor, " n"]
    fold: Int[Tensor, " n"]
    family: Int[Tensor, " n"]
    position: Int[Tensor, " n"] | None = None
    reach: int = 0

    def __len__(self) -> int:
        return len(self.error)

    def __getitem__(self, rows: Int[Tensor, " n_rows"]) -> "CalibrationSet":
        return CalibrationSet(
            features=self.features[rows],
            error=self.error[rows],
            point=self.point[rows],
            fold=self.fold[rows],
            family=self.family[rows],
            position=None if self.position is None else self.position[rows],
            reach=self.reach,
        )

    def some(self, n_rows: int) -> "CalibrationSet":
        """All tuples, or so many drawn at random."""
        if len(self) <= n_rows:
            return self
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        return self[order[:n_rows].sort().values.to(self.error.device)]

    @property
    def increment(self) -> Float[Tensor, " n *field"]:
        r"""What the anchors did not explain.

        .. math:: r_i^{cf} = [e_i^{cf} - \overline e_{k_a, i}^{cf}]_+  (eq:anchor_increment)
        """
        return (self.error - self.features.anchor_error).clamp(min=0)

    @property
    def weight(self) -> Float[Tensor, " n"]:
        """Weights of the tuples that add up to 1, each family of folds having the same share."""
        count = self.family.bincount()[self.family]
        weight: Tensor = 1 / (count * len(self.family.unique())).to(self.error.dtype)
        return weight

    @property
    def interpolating(self) -> Bool[Tensor, " n"]:
        """Tuples of the family of folds that keeps held-out points nearest to the others, random folds if there are."""
        distance = self.features.support_distance
        by_family = {
            float(distance[self.family == family].median()): family
            for family in self.family.unique()
        }
        return torch.eq(self.family, by_family[min(by_family)])

    @property
    def unit(self) -> Int[Tensor, " n"]:
        """Tuples of one unit belong together: they come from one point, one group or one stretch of time.

        Neighbouring stretches still touch, so that a split by units separates dependent times nearly, not fully.
        """
        return (
            self.point if self.position is None else self.position // (self.reach + 1)
        )

    def apart_from(self, held_out: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Tuples that are neither held out nor, along time, within reach of the stretch that is."""
        apart = ~held_out
        if self.position is not None:
            mine = self.position[held_out]
            before = self.position < mine.min() - self.reach
            apart &= before | (self.position > mine.max() + self.reach)
        return apart

    @cached_property
    def typical_distance(self) -> float:
        """Median length of the displacements."""
        return float(self.features.distance.median())

    @cached_property
    def typical_support_distance(self) -> float:
        """Median support distance."""
        return float(self.features.support_distance.median())

    @cached_property
    def standardization(self) -> Standardization:
        """T: fitted on the calibration features, read by the increment model and by the safe region (line 11)."""
        return Standardization.fit(self.features.flat)


@dataclass(frozen=True)
class Observations:
    """The user's pairs, and the inputs as the geometry sees them."""

    x: Array
    y: Array
    embedding: Embedding

    def __len__(self) -> int:
        return len(self.embedding)


def cross_fit(
    data: Observations,
    plan: FoldPlan,
    *,
    fold_surrogates: FoldSurrogates,
    error_functional: ErrorFunctional,
    n_anchors: int,
    n_support: int,
    checkpoint: Checkpoint | None = None,
) -> CalibrationSet:
    """Features and errors of every held-out point of all folds (lines 6-10)."""
    held_out = [
        _HeldOut.relate(data, number, plan, n_anchors, n_support)
        for number in range(len(plan.splits))
    ]
    # Fold by fold into one place: fields of all folds beside their concatenation would take twice the memory.
    ends = np.cumsum([len(part.unseen) for part in held_out])
    place: _Observed | None = None
    mean_error = np.empty((2, len(held_out)))
    for number, prediction in fold_predictions(
        fold_surrogates, data.x, data.y, [part.fold for part in held_out], checkpoint
    ):
        part = held_out[number]
        observed = part.observed(data, prediction, error_functional)
        place = observed.room_for(int(ends[-1])) if place is None else place
        place.put(observed, int(ends[number]))
        mean_error[:, number] = float(observed.error.mean()), observed.in_sample
        logger.info(
            "%s: mean error %.4g held out, %.4g in sample",
            part.fold,
            *mean_error[:, number],
        )
    assert place is not None
    _check_family(*mean_error)

    def on_device(numbers: np.ndarray) -> Tensor:
        return torch.as_tensor(numbers, device=data.embedding.z.device)

    dependence = plan.dependence
    return CalibrationSet(
        features=place.features,
        error=place.error,
        point=on_device(plan.point),
        fold=on_device(plan.per_tuple(range(len(plan.splits)))),
        family=on_device(plan.per_tuple(plan.family)),
        position=None
        if dependence is None
        else on_device(dependence.position[plan.point]),
        reach=0 if dependence is None else dependence.reach,
    )


class _Observed(NamedTuple):
    """A fold's tuples, and the mean error on what its surrogate was trained on."""

    features: GeometricFeatures
    error: Tensor
    in_sample: float

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (*self.features.parts, self.error)

    def room_for(self, n: int) -> "_Observed":
        """Place for so many tuples of this kind."""
        *features, error = (part.new_empty(n, *part.shape[1:]) for part in self.parts)
        return _Observed(GeometricFeatures(*features), error, 0.0)

    def put(self, other: "_Observed", end: int) -> None:
        """The tuples of another in the rows that end here."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine[end - len(theirs) : end] = theirs


@dataclass(frozen=True)
class _HeldOut:
    """The held-out points of a fold, related to the points it left in (line 8).

    The fold's surrogate is asked about the held-out points, about those that serve as anchors, and about a few more
    that it was trained on.
    """

    fold: Fold
    relation: Relation
    unseen: Int[Tensor, " n_unseen"]
    anchors: Int[Tensor, " n_unseen n_anchors"]
    n_used: int

    @staticmethod
    def relate(
        data: Observations, number: int, plan: FoldPlan, n_anchors: int, n_support: int
    ) -> "_HeldOut":
        device = data.embedding.z.device
        seen, unseen = (
            torch.as_tensor(rows, device=device) for rows in plan.splits[number]
        )
        geometry = Geometry(
            data.embedding[seen], n_anchors=n_anchors, n_support=n_support
        )
        relation = geometry.relate(data.embedding[unseen])
        used, anchors = relation.anchors.unique(return_inverse=True)
        few = seen[:: max(1, len(seen) // N_IN_SAMPLE)]
        asked = torch.cat([unseen, seen[used], few])
        fold = Fold(number, len(plan.splits), seen.cpu(), asked.cpu())
        return _HeldOut(fold, relation, unseen, anchors, len(used))

    def observed(
        self, data: Observations, prediction: Tensor, error_functional: ErrorFunctional
    ) -> _Observed:
        """Errors and features of the held-out points, given what the surrogate predicts where it was asked."""
        with noting(f"while evaluating the surrogate of {self.fold}"):
            error = errors_of(
                prediction, error_functional, take(data.y, self.fold.asked)
            )
        z, n_unseen = data.embedding.z, len(self.unseen)
        held_out, of_anchors, in_sample = error.to(z.device, z.dtype).tensor_split(
            [n_unseen, n_unseen + self.n_used]
        )
        features = GeometricFeatures(
            self.relation.displacement,
            self.relation.support_distance,
            # In-sample on purpose: at deployment anchor errors are observed, query errors are not.
            anchor_error(self.anchors, of_anchors),
            prediction[:n_unseen].to(z.device, z.dtype, copy=True),
            data.embedding.normalized[self.unseen],
        )
        # A copy, so that what the anchors and the sample needed is freed.
        return _Observed(features, held_out.clone(), float(in_sample.mean()))


def _check_family(
    held_out: Float[np.ndarray, " n_folds"], in_sample: Float[np.ndarray, " n_folds"]
) -> None:
    """Warn of fold surrogates that did not train: one dead network poisons every bound."""
    typical_out, typical_in = np.median(held_out), np.median(in_sample)
    failed = (held_out > OUT_OF_FAMILY * typical_out) & (
        in_sample > OUT_OF_FAMILY * typical_in
    )
    # Beside interpolators, whose errors are zero, every error would look out of family.
    if not typical_in or not typical_out:
        return
    if failed.any():
        listed = ", ".join(
            f"fold {fold + 1} ({held_out[fold]:.3g} held out, {in_sample[fold]:.3g} in sample)"
            for fold in np.flatnonzero(failed)
        )
        warn(
            f"mean errors out of family with the other folds' ({typical_out:.3g} held out, {typical_in:.3g} in "
            f"sample): {listed} of {len(held_out)}. A training that failed poisons every bound; "
            "train longer or with another seed, and fit again."
        )
