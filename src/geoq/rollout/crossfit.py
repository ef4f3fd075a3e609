"""Cross-fitted rollouts: errors of rollouts that start from states which the surrogate of the fold has not seen."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from geoq.arrays import take, to_tensor
from geoq.coordinates import Coordinates
from geoq.crossfit import CalibrationPoints
from geoq.fold_plan import FoldPlan
from geoq.folds import ClusterFolds, Folds
from geoq.geometry import Embedding, Geometry
from geoq.increments.climatology import Climatology
from geoq.rollout.features import (
    Embed,
    ReferenceStates,
    RolloutCalibration,
    RolloutFeatures,
)
from geoq.rollout.fold_rollouts import FoldRollouts
from geoq.rollout.output import Output
from geoq.rollout.runaways import DataRange
from geoq.rollout.trajectories import Trajectories, without_forcing
from geoq.training.checkpoint import FinishedFolds
from geoq.training.fold_surrogates import Fold, fold_predictions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutProblem:
    """The trajectories, their embedding, and the settings that the folds and the deployed surrogate have in common.

    ``quantile`` is the quantile level of the climatology, and ``state`` the shape of a state without its forcing.
    """

    trajectories: Trajectories
    embed: Embed
    embedding: Embedding
    data_range: DataRange
    quantile: float
    n_anchors: int
    n_support: int
    output: Output
    state: tuple[int, ...]

    def steps(self, plan: FoldPlan) -> CalibrationPoints:
        """The states that have a next state, and these next states; a fold leaves in the steps between two of its states."""
        own = partial(without_forcing, state=self.state)
        number, nu = self.trajectories.number, self.embed.normalization
        goes_on = number[1:] == number[:-1]
        going = np.flatnonzero(goes_on)
        before = torch.as_tensor(going, device=self.embedding.z.device)
        states = own(to_tensor(self.trajectories.states, "trajectories"))
        mean, scale = (own(part[None])[0] for part in (nu.mean, nu.scale))
        no = torch.zeros_like(mean, dtype=torch.bool)
        splits = []
        for kept, held_out in plan.splits:
            left_in = np.zeros(len(number), dtype=bool)
            left_in[kept] = True
            first = np.flatnonzero(left_in[:-1] & left_in[1:] & goes_on)
            rows = held_out[np.isin(held_out, going)]
            splits.append((first - number[first], rows - number[rows]))
        return CalibrationPoints(
            inputs=own(self.embedding.normalized)[before],
            outputs=states[before + 1],
            error=states.new_zeros(1).expand(len(before), *self.state),
            splits=tuple(splits),
            metric=None,
            coordinates=Coordinates(mean, scale, no, states.amin(0) == states.amax(0)),
            exact=self.output.left_out(self.state).to(before.device),
        )

    def all_states(self, plan: FoldPlan, folds: Folds) -> ReferenceStates:
        """All states, which the features of queries are relative to.

        The nearest k of a random part of the states, such as those that a fold leaves in, are on average as far as the nearest
        k / p of all states, where p is the fraction of this part. ``ClusterFolds`` do not leave such a part, so k stays as it is.
        """
        n = len(self.trajectories)
        n_kept = np.mean([len(kept) for kept, _ in plan.splits])
        is_part = not isinstance(folds, ClusterFolds)
        n_support = round(self.n_support * (n / n_kept if is_part else 1))
        rows = torch.arange(n, device=self.embedding.z.device)
        return replace(self, n_support=n_support).reference_states(rows)

    def reference_states(self, rows: Tensor) -> ReferenceStates:
        """The geometry and the climatology of these rows of the states."""
        states = to_tensor(take(self.trajectories.states, rows), "trajectories")
        states = states.to(self.embed.normalization.mean)
        geometry = Geometry(self.embedding[rows], self.n_anchors, self.n_support)
        values = self.output(states[:, None])[:, 0]
        climatology = Climatology().fit(values, self.quantile)
        return ReferenceStates(geometry, climatology, self.output)


def cross_fit_rollouts(
    problem: RolloutProblem,
    plan: FoldPlan,
    starts: list[np.ndarray],
    *,
    fold_rollouts: FoldRollouts,
    checkpoint: FinishedFolds | None,
) -> RolloutCalibration:
    """Roll out the surrogate of every fold from its held-out rows ``starts``, and compute errors and features.

    The features are relative to the states that the fold leaves in.
    """
    trajectories, device = problem.trajectories, problem.embedding.z.device
    truth = to_tensor(trajectories.states, "trajectories")
    ahead = torch.arange(1, fold_rollouts.n_steps + 1, device=device)
    kept = [torch.as_tensor(rows) for rows, _ in plan.splits]
    folds = [
        Fold(number, len(starts), kept[number], torch.as_tensor(first))
        for number, first in enumerate(starts)
    ]
    features: dict[int, RolloutFeatures] = {}
    errors: dict[int, Tensor] = {}
    for number, rolled in fold_predictions(
        fold_rollouts, trajectories.states, trajectories.number, folds, checkpoint
    ):
        fold = folds[number]
        reference = problem.reference_states(fold.training_rows.to(device))
        inside = problem.data_range.cut(rolled.to(device))
        features[number] = reference.features(inside, problem.embed)
        rows = fold.evaluated_rows.to(device)[:, None] + ahead
        prediction = features[number].prediction
        error = problem.output(truth[rows].to(prediction) - prediction).abs()
        errors[number] = error.nan_to_num(nan=torch.inf)
        logger.info("%s: mean error %.4g at the last step", fold, error[:, -1].mean())

    def per_rollout(numbers: list[int]) -> Tensor:
        counts = torch.tensor([len(first) for first in starts])
        return torch.tensor(numbers).repeat_interleave(counts).to(device)

    rows_of_all = np.concatenate(starts)
    # Sorted, because folds can finish in any order.
    return RolloutCalibration(
        features=RolloutFeatures.cat([features[number] for number in sorted(features)]),
        error=torch.cat([errors[number] for number in sorted(errors)]),
        start=torch.as_tensor(rows_of_all, device=device),
        fold=per_rollout(list(range(len(starts)))),
        family=per_rollout(list(plan.family)),
        trajectory=torch.as_tensor(trajectories.number[rows_of_all], device=device),
        steps=problem.steps(plan),
    )
