"""Cross-fitted calibration data: what the error did where a surrogate had not seen the answer (lines 5-11)."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from geoq.folds import FoldPlan
from geoq.geometry import Embedding, GeometricFeatures, Geometry, anchor_error
from geoq.representation import Standardization
from geoq.surrogate import (
    Array,
    ErrorFunctional,
    Surrogate,
    TrainSurrogate,
    check_callable,
    observe,
    take,
)

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
    train_surrogate: TrainSurrogate,
    error_functional: ErrorFunctional,
    n_anchors: int,
    n_support: int,
) -> CalibrationSet:
    """Features and errors of every held-out point, fold after fold (lines 6-10)."""
    folds = []
    # disable=None: a bar on a terminal, silence elsewhere
    for number, split in enumerate(
        tqdm(plan.splits, desc="folds", disable=None), start=1
    ):
        seen, unseen = (
            torch.as_tensor(rows, device=data.embedding.z.device) for rows in split
        )
        where = f"fold {number} of {len(plan.splits)}"
        fold_surrogate = _train(train_surrogate, data, seen, where)
        geometry = Geometry(
            data.embedding[seen], n_anchors=n_anchors, n_support=n_support
        )

        def observed(
            rows: Tensor, surrogate: Surrogate = fold_surrogate, where: str = where
        ) -> tuple[Tensor, Tensor]:
            return _observe(surrogate, error_functional, data, rows, where)

        folds.append(_held_out(data, geometry, seen, unseen, observed))
        logger.info(
            "%s: mean error %.4g held out, %.4g in sample",
            where,
            folds[-1].error.mean(),
            folds[-1].in_sample.mean(),
        )
    _check_family([fold.error for fold in folds], [fold.in_sample for fold in folds])

    def on_device(numbers: np.ndarray) -> Tensor:
        return torch.as_tensor(numbers, device=data.embedding.z.device)

    dependence = plan.dependence
    return CalibrationSet(
        features=GeometricFeatures.cat([fold.features for fold in folds]),
        error=torch.cat([fold.error for fold in folds]),
        point=on_device(plan.point),
        fold=on_device(plan.per_tuple(range(len(plan.splits)))),
        family=on_device(plan.per_tuple(plan.family)),
        position=None
        if dependence is None
        else on_device(dependence.position[plan.point]),
        reach=0 if dependence is None else dependence.reach,
    )


class _Fold(NamedTuple):
    features: GeometricFeatures
    error: Tensor
    in_sample: Tensor


def _held_out(
    data: Observations,
    geometry: Geometry,
    seen: Int[Tensor, " n_seen"],
    unseen: Int[Tensor, " n_unseen"],
    observed: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> _Fold:
    """Errors and features of a fold's held-out points relative to the points it left in (line 8)."""
    queries = data.embedding[unseen]
    relation = geometry.relate(queries)
    prediction, error = observed(unseen)
    # In-sample on purpose: at deployment anchor errors are observed, query errors are not. Only points that serve as
    # anchors are asked for.
    used, anchors = relation.anchors.unique(return_inverse=True)
    baseline = anchor_error(anchors, observed(seen[used])[1])
    features = GeometricFeatures(
        relation.displacement,
        relation.support_distance,
        baseline,
        prediction,
        queries.normalized,
    )
    _, in_sample = observed(seen[:: max(1, len(seen) // N_IN_SAMPLE)])
    return _Fold(features, error, in_sample)


def _train(
    train_surrogate: TrainSurrogate, data: Observations, rows: Tensor, where: str
) -> Surrogate:
    try:
        fold_surrogate = train_surrogate(take(data.x, rows), take(data.y, rows))
        check_callable(fold_surrogate, "the trained surrogate")
    except Exception as exc:
        exc.add_note(f"while training the surrogate of {where}")
        raise
    return fold_surrogate


def _observe(
    surrogate: Surrogate,
    error_functional: ErrorFunctional,
    data: Observations,
    rows: Tensor,
    where: str,
) -> tuple[Tensor, Tensor]:
    try:
        prediction, error = observe(
            surrogate, error_functional, take(data.x, rows), take(data.y, rows)
        )
    except Exception as exc:
        exc.add_note(f"while evaluating the surrogate of {where}")
        raise
    z = data.embedding.z
    return prediction.to(z.device, z.dtype), error.to(z.device, z.dtype)


def _check_family(
    held_out_errors: list[Tensor], in_sample_errors: list[Tensor]
) -> None:
    """Warn of fold surrogates that did not train: one dead network poisons every bound."""
    held_out = np.array([float(error.mean()) for error in held_out_errors])
    in_sample = np.array([float(error.mean()) for error in in_sample_errors])
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
        warnings.warn(
            f"mean errors out of family with the other folds' ({typical_out:.3g} held out, {typical_in:.3g} in "
            f"sample): {listed} of {len(held_out)}. A training that failed poisons every bound; "
            "train longer or with another seed, and fit again.",
            stacklevel=4,
        )
