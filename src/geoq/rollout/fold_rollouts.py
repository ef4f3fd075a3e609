"""Rollouts of the fold surrogates: sources of fold predictions in which a prediction is a whole rollout.

``fold_predictions`` in ``training/fold_surrogates.py`` passes two arrays to a source: here the states of all trajectories, and the
number of the trajectory of each state. The rollouts of a fold start from the held-out states ``fold.evaluated_rows``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, take
from geoq.checks import TRAINED, add_note_on_error, check_callable
from geoq.fold_plan import FoldPlan
from geoq.probing import FirstFold
from geoq.rollout.forcing import ForcedStep
from geoq.rollout.memory import REMEDY
from geoq.rollout.trajectories import (
    TrainStepper,
    TrainSteppersTogether,
    Trajectories,
    forcing_from,
    roll_out,
)
from geoq.surrogate import Surrogate
from geoq.training.checkpoint import Checkpoint, FinishedFolds, folds_id
from geoq.training.fold_surrogates import (
    Fold,
    TrainedFolds,
    describe_folds,
    in_jobs,
    is_pretrained,
    one_by_one,
)
from geoq.training.progress import stage
from geoq.training.progress import trained as report_training
from geoq.training.recipe_id import array_id
from geoq.training.threads import n_weights, threads_for

if TYPE_CHECKING:
    from geoq.rollout.estimator import RolloutGeoQ


@dataclass(frozen=True)
class FoldRollouts:
    """Rollouts of the fold surrogates, which a recipe trains on the segments that each fold leaves in, or which are given.

    A rollout beyond ``limit`` has diverged. The last ``n_forcing`` values of a state are given at every step. ``n_weights`` of the
    deployed surrogate determines the number of threads, and ``first`` keeps the surrogate of the first fold for a check.
    """

    recipe: TrainStepper | TrainedFolds
    n_steps: int
    limit: Float[Tensor, " *state"]
    n_weights: int | None
    n_forcing: int
    first: FirstFold = field(default_factory=FirstFold, repr=False, compare=False)

    @property
    def pretrained(self) -> bool:
        """Whether the surrogates are given."""
        return isinstance(self.recipe, TrainedFolds)

    def jobs(
        self, states: Array, number: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        recipe = self.recipe
        if isinstance(recipe, TrainedFolds):
            return recipe.jobs(states, number, folds, n_workers)
        if not isinstance(recipe, TrainSteppersTogether):
            return one_by_one(folds)
        with add_note_on_error(f"while calling {type(recipe).__name__}.n_together"):
            n_together = recipe.n_together(states)
        return in_jobs(folds, n_together, n_workers)

    def predictions(
        self, states: Array, number: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        if isinstance(self.recipe, TrainedFolds):
            given = self.recipe.surrogates
            return [self._rolled_out(given[f.number], states, f) for f in folds]
        trajectories = Trajectories(states, np.asarray(number))
        subsets = [fold.training_rows for fold in folds]
        with threads_for(self.n_weights, states):
            surrogates = trained(
                self.recipe, trajectories, subsets, describe_folds(folds)
            )
        self.first.check()
        rollouts = [
            self._rolled_out(surrogate, states, fold)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]
        values = slice(-self.n_forcing or None)  # without the forcing of the next step

        def first_step(states: Array) -> Tensor:
            return roll_out(surrogates[0], states, 1, self.limit)[:, 1, values]

        starts = take(states, folds[0].evaluated_rows)
        self.first.keep(first_step, starts, rollouts[0][:, 1, values], REMEDY)
        return rollouts

    def _rolled_out(
        self, surrogate: Surrogate, states: Array, fold: Fold
    ) -> Float[Tensor, " n_starts n_times *state"]:
        """The rollouts of the fold from the states ``fold.evaluated_rows``."""
        rows, n_steps = fold.evaluated_rows, self.n_steps
        with add_note_on_error(f"while rolling out the surrogate of {fold}"):
            forcing = forcing_from(states, rows, n_steps, self.n_forcing)
            return roll_out(surrogate, take(states, rows), n_steps, self.limit, forcing)


def trained(
    train_surrogate: TrainStepper,
    trajectories: Trajectories,
    subsets: Sequence[Tensor],
    what: str,
) -> list[Surrogate]:
    """Train a surrogate on each subset of the rows, together if the recipe supports it; errors get a note with ``what``."""
    kept = [rows.numpy() for rows in subsets]
    with add_note_on_error(f"while training {what}"):
        if len(kept) > 1 and isinstance(train_surrogate, TrainSteppersTogether):
            runs = [trajectories.runs(rows) for rows in kept]
            surrogates = list(train_surrogate.train_many(trajectories.states, runs))
        else:
            surrogates = [train_surrogate(trajectories.segments(rows)) for rows in kept]
        for surrogate in surrogates:
            check_callable(surrogate, TRAINED)
    return surrogates


def deployed_surrogate(geoq: "RolloutGeoQ", trajectories: Trajectories) -> Surrogate:
    """The surrogate of the user, or one that is trained on all trajectories."""
    if geoq.surrogate is not None:
        return geoq.surrogate
    recipe, rows = geoq.forcing_.recipe(geoq.train_surrogate), len(trajectories)
    what = "the deployed surrogate on all trajectories"
    with stage("deployed surrogate"):
        found = trained(recipe, trajectories, [torch.arange(rows)], what)[0]
    report_training("deployed surrogate")
    return found.surrogate if isinstance(found, ForcedStep) else found


def source_of_rollouts(geoq: "RolloutGeoQ", n_folds: int) -> FoldRollouts:
    """The rollouts of the recipe, of the surrogates of the folds, or of the deployed surrogate."""
    recipe, forcing = geoq.train_surrogate, geoq.forcing_
    if recipe is None:
        # The deployed surrogate has seen none of these data, so it serves as the surrogate of every fold.
        recipe = TrainedFolds([geoq.surrogate_] * n_folds)
    return FoldRollouts(
        forcing.recipe(recipe),
        geoq.n_calibration,
        geoq.limit_,
        n_weights(geoq.surrogate_),
        forcing.n_forcing,
    )


def open_checkpoint(
    geoq: "RolloutGeoQ",
    place: str | Path | Checkpoint | None,
    trajectories: Trajectories,
    plan: FoldPlan,
    starts: list[np.ndarray],
) -> FinishedFolds | None:
    """The checkpoint in the folder; refused if it belongs to other trajectories, folds or settings."""
    # There is nothing to keep if nothing is trained.
    if place is None or is_pretrained(geoq.train_surrogate):
        return None
    facts = {
        "trajectories": array_id(trajectories.states),
        "lengths": str(np.bincount(trajectories.number).tolist()),
        "folds": folds_id(plan),
        "starts": array_id(np.concatenate(starts)),
        "n_calibration": str(geoq.n_calibration),
    }
    callables = {"train_surrogate": geoq.train_surrogate}
    return Checkpoint.of(place).open(facts, callables)
