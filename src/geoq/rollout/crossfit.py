"""Cross-fitted rollouts: errors of rollouts that start from states which the surrogate of the fold has not seen."""

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import take, to_tensor
from geoq.coordinates import Coordinates
from geoq.crossfit import CalibrationPoints
from geoq.fold_plan import FoldPlan
from geoq.folds import ClusterFolds, Folds
from geoq.geometry import Embedding, Geometry
from geoq.increments.climatology import Climatology
from geoq.representation import Representation, Standardization
from geoq.rollout.features import ReferenceStates, RolloutCalibration, RolloutFeatures
from geoq.rollout.fold_rollouts import FreshRollouts, TrainedRollouts
from geoq.rollout.output import Output
from geoq.rollout.runaways import DataRange
from geoq.rollout.trajectories import Trajectories
from geoq.training.checkpoint import FinishedFolds
from geoq.training.fold_surrogates import Fold, fold_predictions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutProblem:
    """The trajectories, their embedding, and the settings that the folds and the deployed surrogate have in common.

    Attributes:
        trajectories: the states of all trajectories.
        embedding: phi and nu of these states.
        normalization: nu, fitted to these states.
        representation: phi. None means nu.
        data_range: the range of the data; a rollout outside it has diverged.
        quantile: tau, the quantile level of the climatology.
        n_anchors: k_a, the number of anchors that displacements are measured from.
        n_support: k, the number of states that the support distance averages over.
        output: the part of the state that is bounded.
        state: the shape of a state without its forcing.
    """

    trajectories: Trajectories
    embedding: Embedding
    normalization: Standardization
    representation: Representation | None
    data_range: DataRange
    quantile: float
    n_anchors: int
    n_support: int
    output: Output
    state: tuple[int, ...]

    def steps(self, plan: FoldPlan) -> CalibrationPoints:
        """The states that have a next state, and these next states; a fold leaves in the steps between two of its states."""
        number, n_values = self.trajectories.number, math.prod(self.state)

        def own(rows: Tensor) -> Tensor:
            """The states of rows of states with their forcing, which comes last."""
            return rows.flatten(start_dim=1)[:, :n_values].reshape(-1, *self.state)

        goes_on = number[1:] == number[:-1]
        before = torch.as_tensor(
            np.flatnonzero(goes_on), device=self.embedding.z.device
        )
        states = own(to_tensor(self.trajectories.states, "trajectories"))
        mean, scale = (
            own(part[None])[0]
            for part in (self.normalization.mean, self.normalization.scale)
        )
        no = torch.zeros_like(mean, dtype=torch.bool)
        splits = []
        for kept, held_out in plan.splits:
            left_in = np.zeros(len(number), dtype=bool)
            left_in[kept] = True
            first = np.flatnonzero(left_in[:-1] & left_in[1:] & goes_on)
            rows = held_out[np.isin(held_out, np.flatnonzero(goes_on))]
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

        All states are denser than the states that a fold leaves in, so the distance to the nearest k of them would be smaller
        than the distances that the bound was fitted to. The nearest k of a random part of the states are on average as far as
        the nearest k / p of all states, where p is the fraction of this part.
        The states that ``ClusterFolds`` leave in are not such a part, so k stays as it is.
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
        geometry = Geometry(
            self.embedding[rows], n_anchors=self.n_anchors, n_support=self.n_support
        )
        values = self.output(states.to(self.normalization.mean)[:, None])[:, 0]
        climatology = Climatology().fit(values, self.quantile)
        return ReferenceStates(geometry, climatology, self.output)

    def features(
        self, states: Float[Tensor, " n n_times *state"], reference: ReferenceStates
    ) -> RolloutFeatures:
        """Features along rollouts relative to the reference states; the first state of a rollout is the initial one."""
        like = self.trajectories.states
        return reference.features(states, self.normalization, self.representation, like)


def cross_fit_rollouts(
    problem: RolloutProblem,
    plan: FoldPlan,
    starts: list[np.ndarray],
    *,
    fold_rollouts: FreshRollouts | TrainedRollouts,
    checkpoint: FinishedFolds | None = None,
) -> RolloutCalibration:
    """Roll out the surrogate of every fold from held-out states, and compute errors and features.

    Args:
        problem: the trajectories and the settings.
        plan: the folds.
        starts: for each fold, the held-out rows that its rollouts start from.
        fold_rollouts: the source of the rollouts.
        checkpoint: keeps the rollouts of finished folds.

    Returns:
        The rollouts of all folds. Features are relative to the states that the fold leaves in.
    """
    trajectories, device = problem.trajectories, problem.embedding.z.device
    truth = to_tensor(trajectories.states, "trajectories")
    ahead = torch.arange(1, fold_rollouts.n_steps + 1, device=device)
    folds = [
        Fold(number, len(starts), torch.as_tensor(kept), torch.as_tensor(first))
        for number, ((kept, _), first) in enumerate(
            zip(plan.splits, starts, strict=True)
        )
    ]
    features: dict[int, RolloutFeatures] = {}
    errors: dict[int, Tensor] = {}
    for number, rolled in fold_predictions(
        fold_rollouts, trajectories.states, trajectories.number, folds, checkpoint
    ):
        fold = folds[number]
        reference = problem.reference_states(fold.training_rows.to(device))
        inside = problem.data_range.cut(rolled.to(device))
        features[number] = problem.features(inside, reference)
        rows = fold.evaluated_rows.to(device)[:, None] + ahead
        prediction = features[number].prediction
        error = problem.output(truth[rows].to(prediction) - prediction).abs()
        errors[number] = error.nan_to_num(nan=torch.inf)
        logger.info("%s: mean error %.4g at the last step", fold, error[:, -1].mean())

    def per_rollout(numbers: list[int]) -> Tensor:
        counts = torch.tensor([len(first) for first in starts])
        return torch.tensor(numbers).repeat_interleave(counts).to(device)

    # Sorted, because folds can finish in any order.
    return RolloutCalibration(
        features=RolloutFeatures.cat([features[number] for number in sorted(features)]),
        error=torch.cat([errors[number] for number in sorted(errors)]),
        start=torch.as_tensor(np.concatenate(starts), device=device),
        fold=per_rollout(list(range(len(starts)))),
        family=per_rollout(list(plan.family)),
        trajectory=torch.as_tensor(
            trajectories.number[np.concatenate(starts)], device=device
        ),
        steps=problem.steps(plan),
    )
