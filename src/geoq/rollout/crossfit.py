"""Cross-fitted rollouts: how errors grow where a surrogate had not seen the state it started from."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from geoq.climatology import Climatology
from geoq.folds import FoldPlan
from geoq.geometry import Embedding, Geometry
from geoq.representation import Representation, Standardization
from geoq.rollout.features import RolloutCalibration, RolloutFeatures, Surroundings
from geoq.rollout.trajectories import TrainStepper, Trajectories, roll_out
from geoq.surrogate import Surrogate, check_callable, take, to_tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scene:
    """The trajectories as the geometry sees them, and the settings that folds and deployment share."""

    trajectories: Trajectories
    embedding: Embedding
    normalization: Standardization
    representation: Representation | None
    limit: Float[Tensor, " *state"]
    quantile: float
    n_anchors: int
    n_support: int

    def surroundings(self, rows: Tensor) -> Surroundings:
        """These states as the cloud that rollouts are related to, and their climatology."""
        states = to_tensor(take(self.trajectories.states, rows), "trajectories")
        geometry = Geometry(
            self.embedding[rows], n_anchors=self.n_anchors, n_support=self.n_support
        )
        climatology = Climatology.fit(states.to(self.normalization.mean), self.quantile)
        return Surroundings(geometry, climatology)

    def forecast(
        self, surrogate: Surrogate, rows: Tensor, n_steps: int, around: Surroundings
    ) -> RolloutFeatures:
        """Features along the surrogate's rollouts from these rows of the data."""
        x0 = take(self.trajectories.states, rows)
        states = roll_out(surrogate, x0, n_steps, self.limit)
        return around.features(states, self.normalization, self.representation, x0)


def cross_fit_rollouts(
    scene: Scene,
    plan: FoldPlan,
    starts: list[np.ndarray],
    *,
    train_surrogate: TrainStepper,
    n_steps: int,
) -> RolloutCalibration:
    """Rollouts of every fold's surrogate from held-out states, with features relative to the states left in."""
    trajectories, device = scene.trajectories, scene.embedding.z.device
    truth = to_tensor(trajectories.states, "trajectories")
    ahead = torch.arange(1, n_steps + 1, device=device)
    features, errors = [], []
    # disable=None: a bar on a terminal, silence elsewhere
    for number, ((kept, _), first) in enumerate(
        zip(tqdm(plan.splits, desc="folds", disable=None), starts, strict=True), start=1
    ):
        if not len(first):
            continue
        where = f"fold {number} of {len(plan.splits)}"
        fold_surrogate = trained(
            train_surrogate, trajectories, kept, f"the surrogate of {where}"
        )
        rows = torch.as_tensor(first, device=device)
        around = scene.surroundings(torch.as_tensor(kept, device=device))
        with noting(f"while rolling out the surrogate of {where}"):
            fold = scene.forecast(fold_surrogate, rows, n_steps, around)
        error = (
            truth[rows[:, None] + ahead].to(fold.prediction) - fold.prediction
        ).abs()
        features.append(fold)
        errors.append(error.nan_to_num(nan=torch.inf))
        logger.info("%s: mean error %.4g at the last step", where, error[:, -1].mean())

    def per_rollout(numbers: list[int]) -> Tensor:
        counts = torch.tensor([len(first) for first in starts])
        return torch.tensor(numbers).repeat_interleave(counts).to(device)

    return RolloutCalibration(
        features=RolloutFeatures.cat(features),
        error=torch.cat(errors),
        start=torch.as_tensor(np.concatenate(starts), device=device),
        fold=per_rollout(list(range(len(starts)))),
        family=per_rollout(list(plan.family)),
    )


def trained(
    train_surrogate: TrainStepper,
    trajectories: Trajectories,
    rows: np.ndarray,
    what: str,
) -> Surrogate:
    """A surrogate trained on the contiguous pieces of these rows."""
    with noting(f"while training {what}"):
        surrogate = train_surrogate(trajectories.segments(rows))
        check_callable(surrogate, "the trained surrogate")
    return surrogate


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Exceptions of user code keep their type and gain a note."""
    try:
        yield
    except Exception as exc:
        exc.add_note(note)
        raise
