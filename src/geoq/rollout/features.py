"""What is known along rollouts before the truth is, and what the folds' rollouts have shown."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.arrays import Array, restore
from geoq.crossfit import CalibrationSet
from geoq.geometry import Embedding, GeometricFeatures, Geometry
from geoq.increments.climatology import FittedClimatology
from geoq.representation import Representation, Standardization
from geoq.surrogate import evaluate


@dataclass(frozen=True)
class RolloutFeatures:
    r"""Geometry along rollouts: the features of step n - 1 drive the error of step n, n = 1, ..., n_steps.

    ``along`` holds :math:`\psi(\widehat u_0), \ldots, \psi(\widehat u_{N-1})` of each rollout, rollout after rollout, and
    as predictions :math:`\widehat u_1, \ldots, \widehat u_N`; ``climatology`` is :math:`C_j(\widehat u_{n,j})` of these.
    ``alive`` says which of the predictions are finite.
    """

    along: GeometricFeatures
    climatology: Float[Tensor, " n n_steps *state"]
    alive: Bool[Tensor, " n n_steps"]

    def __len__(self) -> int:
        return len(self.alive)

    @property
    def n_steps(self) -> int:
        """Steps of each rollout."""
        return self.alive.shape[1]

    @property
    def support_distance(self) -> Float[Tensor, " n n_steps"]:
        """Distance to the data of the state that each step starts from; infinite after the rollout has diverged."""
        return self.along.support_distance.reshape(self.alive.shape)

    @property
    def displacement(self) -> Float[Tensor, " n n_steps *z"]:
        """Displacement from the anchors of the state that each step starts from; zero after the rollout has diverged."""
        return _per_step(self.along.displacement, self.alive)

    @property
    def prediction(self) -> Float[Tensor, " n n_steps *state"]:
        """States that the steps end at."""
        return _per_step(self.along.prediction, self.alive)

    @staticmethod
    def cat(parts: "list[RolloutFeatures]") -> "RolloutFeatures":
        """The rollouts of all parts, in order."""
        return RolloutFeatures(
            GeometricFeatures.cat([part.along for part in parts]),
            torch.cat([part.climatology for part in parts]),
            torch.cat([part.alive for part in parts]),
        )


def _per_step(rows: Tensor, alive: Tensor) -> Tensor:
    return rows.reshape(*alive.shape, *rows.shape[1:])


@dataclass(frozen=True)
class ReferenceStates:
    """The states that rollouts are related to: all of them at inference, what a fold leaves in when calibrating."""

    geometry: Geometry
    climatology: FittedClimatology

    def features(
        self,
        states: Float[Tensor, " n n_times *state"],
        normalization: Standardization,
        representation: Representation | None,
        like: Array,
    ) -> RolloutFeatures:
        """Features along rollouts whose states start with the initial one; ``like`` is the user's kind of array."""
        before, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
        alive = before.isfinite().flatten(start_dim=1).all(dim=1)
        queries = embed(before[alive], normalization, representation, like)
        relation = self.geometry.relate(queries)

        def everywhere(values: Tensor, otherwise: float) -> Tensor:
            filled = values.new_full((len(before), *values.shape[1:]), otherwise)
            filled[alive] = values
            return filled

        along = GeometricFeatures(
            displacement=everywhere(relation.displacement, 0.0),
            support_distance=everywhere(relation.support_distance, torch.inf),
            anchor_error=relation.support_distance.new_zeros(len(before)),
            prediction=after.to(queries.z),
            inputs=everywhere(queries.normalized, 0.0),
        )
        ends = states[:, 1:].flatten(start_dim=2).to(self.climatology.table)
        reached = ends.isfinite().all(dim=2)
        climatology = self.climatology(ends.nan_to_num()).unflatten(2, states.shape[2:])
        return RolloutFeatures(along, climatology, reached)


def embed(
    states: Tensor,
    normalization: Standardization,
    representation: Representation | None,
    like: Array,
) -> Embedding:
    """Phi and nu of the states."""
    normalized = normalization(states.to(normalization.mean))
    if representation is None:
        return Embedding(z=normalized, normalized=normalized)
    z = evaluate(representation, restore(states, like), "representation")
    return Embedding(z.to(normalized), normalized)


@dataclass(frozen=True)
class RolloutCalibration:
    """Rollouts of the folds' surrogates from states that they had not seen, and their errors; rollouts are the units.

    ``error`` is infinite from the step on at which a rollout diverged. ``start`` is the row of the data that a rollout
    starts at, ``fold`` the fold that held it out, ``family`` the scheme that the fold belongs to.
    """

    features: RolloutFeatures
    error: Float[Tensor, " n n_steps *state"]
    start: Int[Tensor, " n"]
    fold: Int[Tensor, " n"]
    family: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.error)

    @property
    def n_steps(self) -> int:
        """The calibration horizon."""
        return self.features.n_steps

    @property
    def tuples(self) -> CalibrationSet:
        """Every step as a tuple of its own, for the safe region; tuples of one rollout depend on each other."""
        alive = self.features.alive.flatten()
        step = torch.arange(self.n_steps, device=alive.device)

        def each_step(numbers: Tensor) -> Tensor:
            return numbers.repeat_interleave(self.n_steps)[alive]

        return CalibrationSet(
            features=self.features.along[alive],
            error=self.error.flatten(0, 1)[alive],
            point=(self.start[:, None] + step).flatten()[alive],
            fold=each_step(self.fold),
            family=each_step(self.family),
            position=each_step(torch.arange(len(self), device=alive.device)),
            reach=0,
        )
