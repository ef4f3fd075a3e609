"""Cross-fitted rollouts: how errors grow where a surrogate had not seen the state it started from."""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import take, to_tensor
from geoq.folds import FoldPlan
from geoq.geometry import Embedding, Geometry
from geoq.increments.climatology import Climatology
from geoq.representation import Representation, Standardization
from geoq.rollout.features import ReferenceStates, RolloutCalibration, RolloutFeatures
from geoq.rollout.fold_rollouts import FreshRollouts, TrainedRollouts
from geoq.rollout.trajectories import Trajectories
from geoq.training.checkpoint import Checkpoint
from geoq.training.fold_surrogates import Fold, fold_predictions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutProblem:
    """The trajectories as the geometry sees them, and the settings that folds and deployment share."""

    trajectories: Trajectories
    embedding: Embedding
    normalization: Standardization
    representation: Representation | None
    limit: Float[Tensor, " *state"]
    quantile: float
    n_anchors: int
    n_support: int

    def reference_states(self, rows: Tensor) -> ReferenceStates:
        """These states as the cloud that rollouts are related to, and their climatology."""
        states = to_tensor(take(self.trajectories.states, rows), "trajectories")
        geometry = Geometry(
            self.embedding[rows], n_anchors=self.n_anchors, n_support=self.n_support
        )
        climatology = Climatology().fit(
            states.to(self.normalization.mean), self.quantile
        )
        return ReferenceStates(geometry, climatology)

    def forecast(
        self,
        states: Float[Tensor, " n n_times *state"],
        around: ReferenceStates,
    ) -> RolloutFeatures:
        """Features along rollouts whose states start with the initial one."""
        like = self.trajectories.states
        return around.features(states, self.normalization, self.representation, like)


def cross_fit_rollouts(
    scene: RolloutProblem,
    plan: FoldPlan,
    starts: list[np.ndarray],
    *,
    fold_rollouts: FreshRollouts | TrainedRollouts,
    checkpoint: Checkpoint | None = None,
) -> RolloutCalibration:
    """Rollouts of every fold's surrogate from held-out states, with features relative to the states left in."""
    trajectories, device = scene.trajectories, scene.embedding.z.device
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
        around = scene.reference_states(fold.seen.to(device))
        features[number] = one = scene.forecast(rolled.to(device), around)
        rows = fold.asked.to(device)[:, None] + ahead
        error = (truth[rows].to(one.prediction) - one.prediction).abs()
        errors[number] = error.nan_to_num(nan=torch.inf)
        logger.info("%s: mean error %.4g at the last step", fold, error[:, -1].mean())

    def per_rollout(numbers: list[int]) -> Tensor:
        counts = torch.tensor([len(first) for first in starts])
        return torch.tensor(numbers).repeat_interleave(counts).to(device)

    # Folds may be finished in any order.
    return RolloutCalibration(
        features=RolloutFeatures.cat([features[number] for number in sorted(features)]),
        error=torch.cat([errors[number] for number in sorted(errors)]),
        start=torch.as_tensor(np.concatenate(starts), device=device),
        fold=per_rollout(list(range(len(starts)))),
        family=per_rollout(list(plan.family)),
    )
