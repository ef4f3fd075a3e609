"""Rollouts of the fold surrogates: sources of fold predictions in which a prediction is a whole rollout.

``fold_predictions`` in ``training/fold_surrogates.py`` runs the folds, keeps their predictions in a checkpoint and distributes
them over workers. It passes two arrays to a source, inputs x and reference outputs y, and was written for pairs. Rollouts use
the same function with other arrays. The first array contains the states of all trajectories, one row per state. The second
array contains the number of the trajectory of each state; it is needed to cut the states into contiguous segments for the
training. The rows ``fold.evaluated_rows`` are the held-out states that the rollouts of the fold start from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

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
class FreshRollouts:
    """One training per fold on the segments that it leaves in, together if the recipe supports it, then the rollouts.

    Attributes:
        train_surrogate: the user's recipe.
        n_steps: the number of steps of the rollouts.
        limit: the largest absolute value of each coordinate; a rollout beyond it has diverged.
        n_weights: the number of weights of the deployed surrogate, which determines the number of threads.
        n_forcing: the number of values at the end of a state that are given at every step.
        first: keeps the surrogate of the first fold while the next one is trained.
    """

    train_surrogate: TrainStepper
    n_steps: int
    limit: Float[Tensor, " *state"]
    n_weights: int | None = None
    n_forcing: int = 0
    first: FirstFold = field(default_factory=FirstFold, repr=False, compare=False)
    pretrained: ClassVar[bool] = False

    def jobs(
        self, states: Array, number: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        del number
        recipe = self.train_surrogate
        if not isinstance(recipe, TrainSteppersTogether):
            return one_by_one(folds)
        with add_note_on_error(f"while calling {type(recipe).__name__}.n_together"):
            n_together = recipe.n_together(states)
        return in_jobs(folds, n_together, n_workers)

    def predictions(
        self, states: Array, number: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        with threads_for(self.n_weights, states):
            surrogates = trained(
                self.train_surrogate,
                Trajectories(states, np.asarray(number)),
                [fold.training_rows for fold in folds],
                describe_folds(folds),
            )
        self.first.check()
        rollouts = [
            rolled_out(surrogate, states, fold, self)
            for surrogate, fold in zip(surrogates, folds, strict=True)
        ]

        values = slice(-self.n_forcing or None)  # without the forcing of the next step

        def first_step(states: Array) -> Tensor:
            return roll_out(surrogates[0], states, 1, self.limit)[:, 1, values]

        starts = take(states, folds[0].evaluated_rows)
        self.first.keep(first_step, starts, rollouts[0][:, 1, values], REMEDY)
        return rollouts


@dataclass(frozen=True)
class TrainedRollouts:
    """Rollouts of fold surrogates that were trained elsewhere.

    Attributes:
        folds: the surrogates, in the order of the folds.
        n_steps: the number of steps of the rollouts.
        limit: the largest absolute value of each coordinate; a rollout beyond it has diverged.
        n_forcing: the number of values at the end of a state that are given at every step.
    """

    folds: TrainedFolds
    n_steps: int
    limit: Float[Tensor, " *state"]
    n_forcing: int = 0
    pretrained: ClassVar[bool] = True

    def jobs(
        self, states: Array, number: Array, folds: Sequence[Fold], n_workers: int
    ) -> list[list[int]]:
        return self.folds.jobs(states, number, folds, n_workers)

    def predictions(
        self, states: Array, number: Array, folds: Sequence[Fold]
    ) -> list[Float[Tensor, " _ n_times *state"]]:
        del number
        surrogates = self.folds.surrogates
        return [
            rolled_out(surrogates[fold.number], states, fold, self) for fold in folds
        ]


def rolled_out(
    surrogate: Surrogate,
    states: Array,
    fold: Fold,
    settings: FreshRollouts | TrainedRollouts,
) -> Float[Tensor, " n_starts n_times *state"]:
    """The rollouts of the fold from the states ``fold.evaluated_rows``."""
    with add_note_on_error(f"while rolling out the surrogate of {fold}"):
        rows, n_steps = fold.evaluated_rows, settings.n_steps
        forcing = forcing_from(states, rows, n_steps, settings.n_forcing)
        return roll_out(surrogate, take(states, rows), n_steps, settings.limit, forcing)


def trained(
    train_surrogate: TrainStepper,
    trajectories: Trajectories,
    subsets: Sequence[Tensor],
    what: str,
) -> list[Surrogate]:
    """Train a surrogate on each subset of the states, together if the recipe supports it.

    Args:
        train_surrogate: the recipe.
        trajectories: all states.
        subsets: for each surrogate, the rows that it is trained on; they are cut into contiguous segments.
        what: the name of these surrogates in the note on an error.
    """
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


def source_of_rollouts(
    geoq: "RolloutGeoQ", n_folds: int
) -> FreshRollouts | TrainedRollouts:
    """The source of the fold rollouts: the recipe, the surrogates of the folds, or the deployed surrogate."""
    recipe, forcing = geoq.train_surrogate, geoq.forcing_
    if recipe is None:
        # The deployed surrogate has seen none of these data, so it serves as the surrogate of every fold.
        recipe = TrainedFolds([geoq.surrogate_] * n_folds)
    recipe, n_steps, limit = forcing.recipe(recipe), geoq.n_calibration, geoq.limit_
    if isinstance(recipe, TrainedFolds):
        return TrainedRollouts(recipe, n_steps, limit, forcing.n_forcing)
    size = n_weights(geoq.surrogate_)
    return FreshRollouts(recipe, n_steps, limit, size, forcing.n_forcing)


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
