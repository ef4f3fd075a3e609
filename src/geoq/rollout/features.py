"""Features along rollouts, which need no reference states of the future, and the calibration rollouts with their errors."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.arrays import Array, restore, to_tensor
from geoq.coordinates import CHANGED
from geoq.crossfit import CalibrationPoints, CalibrationSet
from geoq.geometry import Embedding, GeometricFeatures, Geometry
from geoq.increments.climatology import FittedClimatology
from geoq.representation import Representation, Standardization
from geoq.rollout.output import Output
from geoq.rollout.trajectories import PerStep, States
from geoq.surrogate import evaluate


@dataclass(frozen=True)
class RolloutFeatures:
    r"""Geometric features along rollouts: the features of state n - 1 determine the bound of step n, n = 1, ..., N.

    Attributes:
        along: one row per step, rollout after rollout: the features
            :math:`\psi(\widehat u_0), \ldots, \psi(\widehat u_{N-1})` of the states that the steps start from, and the
            predictions :math:`\widehat u_1, \ldots, \widehat u_N` that they end at.
        climatology: :math:`C_j(\widehat u_{n,j})`, the climatology of the output of these predictions.
        alive: whether a rollout has not diverged, up to and including this step.
    """

    along: GeometricFeatures
    climatology: Float[Tensor, " n n_steps *output"]
    alive: Bool[Tensor, " n n_steps"]

    def __len__(self) -> int:
        return len(self.alive)

    @property
    def n_steps(self) -> int:
        """The number of steps of each rollout."""
        return self.alive.shape[1]

    @property
    def support_distance(self) -> PerStep:
        """Support distance (eq:dd) of the state that each step starts from; infinite after the rollout has diverged."""
        return self.along.support_distance.reshape(self.alive.shape)

    @property
    def displacement(self) -> Float[Tensor, " n n_steps *z"]:
        """Displacement (eq:dz) of the state that each step starts from; zero after the rollout has diverged."""
        return _per_step(self.along.displacement, self.alive)

    @property
    def prediction(self) -> Float[Tensor, " n n_steps *state"]:
        """The states that the steps end at; nan after the rollout has diverged."""
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
    """The states that features are relative to: all states for a query, the states that a fold leaves in for the calibration."""

    geometry: Geometry
    climatology: FittedClimatology
    output: Output

    @cached_property
    def constant(self) -> Bool[Tensor, " *state"]:
        """Which coordinates have a single value in these states."""
        points = self.geometry.points.normalized
        return points.amin(dim=0) == points.amax(dim=0)

    def changes(
        self, x0: Array, normalization: Standardization, n_values: int
    ) -> dict[int, str]:
        """The initial states that change a constant one of their first ``n_values`` coordinates, and which, by their rows."""
        if not self.constant.any():
            return {}
        mean, states = normalization.mean, to_tensor(x0, "x0").to(normalization.mean)
        apart = (normalization(states) - self.geometry.points.normalized[0]).abs()
        allowed = torch.where(mean == 0, 0.0, CHANGED)
        changed = (self.constant & (apart > allowed)).flatten(start_dim=1)[:, :n_values]
        texts = {}
        for row in changed.any(dim=1).nonzero()[:, 0].tolist():
            place = changed[row].long().argmax()
            value, constant = states[row].flatten()[place], mean.flatten()[place]
            where = ", ".join(map(str, np.unravel_index(int(place), mean.shape)))
            texts[row] = (
                f"coordinate {where} of the initial state is {value:.4g}, but it is {constant:.4g} in all the data, so its "
                "effect is unknown"
            )
        return texts

    def features(self, states: States, embed: "Embed") -> RolloutFeatures:
        """Features along rollouts, given their states, the initial state first."""
        before, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
        alive = before.isfinite().flatten(start_dim=1).all(dim=1)
        queries = embed(before[alive])
        relation = self.geometry.relate(queries)

        def fill(values: Tensor, otherwise: float) -> Tensor:
            """One row per step, with a constant for the steps of diverged rollouts."""
            filled = values.new_full((len(before), *values.shape[1:]), otherwise)
            filled[alive] = values
            return filled

        along = GeometricFeatures(
            displacement=fill(relation.displacement, 0.0),
            support_distance=fill(relation.support_distance, torch.inf),
            anchor_error=relation.support_distance.new_zeros(len(before)),
            prediction=after.to(queries.z),
            inputs=fill(queries.normalized, 0.0),
        )
        reached = states[:, 1:].isfinite().flatten(start_dim=2).all(dim=2)
        values = self.output(states[:, 1:]).flatten(start_dim=2)
        values = values.to(self.climatology.table).nan_to_num()
        climatology = self.climatology(values).unflatten(2, self.output.shape)
        return RolloutFeatures(along, climatology, reached)


@dataclass(frozen=True)
class Embed:
    """Phi and nu of states; phi is nu if ``representation`` is None, and receives arrays of the kind of ``like``."""

    normalization: Standardization
    representation: Representation | None
    like: Array

    def __call__(self, states: Tensor) -> Embedding:
        normalized = self.normalization(states.to(self.normalization.mean))
        if self.representation is None:
            return Embedding(z=normalized, normalized=normalized)
        own = restore(states, self.like)
        z = evaluate(self.representation, own, "representation")
        return Embedding(z.to(normalized), normalized)


@dataclass(frozen=True)
class RolloutCalibration:
    """Rollouts of the fold surrogates from states that they have not seen, and their errors, one row per rollout.

    Attributes:
        features: the features along the rollouts, relative to the states that the fold leaves in.
        error: the absolute errors of the output; infinite from the step at which a rollout diverges.
        start: the row of the data that a rollout starts from.
        fold: the fold that holds out this row, counted from 0.
        family: the fold scheme that the fold belongs to.
        trajectory: the trajectory that a rollout starts from, counted from 0.
        steps: the states of the data that have a next state, and these next states, both without forcing.
    """

    features: RolloutFeatures
    error: Float[Tensor, " n n_steps *output"]
    start: Int[Tensor, " n"]
    fold: Int[Tensor, " n"]
    family: Int[Tensor, " n"]
    trajectory: Int[Tensor, " n"]
    steps: CalibrationPoints

    def __len__(self) -> int:
        return len(self.error)

    @property
    def n_steps(self) -> int:
        """The calibration horizon."""
        return self.features.n_steps

    @property
    def tuples(self) -> CalibrationSet:
        """The steps as calibration tuples, for the safe region; the steps of one rollout are one group.

        A rollout that diverges has only its first step here, which starts from a true state: on the way out it passes states
        that are far from the data, and they would enlarge the safe region.
        """
        alive = self.features.alive
        step = torch.arange(self.n_steps, device=alive.device)
        kept = ((alive[:, -1:] | (step == 0)) & alive[:, :1]).flatten()

        def each_step(numbers: Tensor) -> Tensor:
            return numbers.repeat_interleave(self.n_steps)[kept]

        return CalibrationSet(
            features=self.features.along[kept],
            error=self.error.flatten(0, 1)[kept],
            # The last state of each trajectory has no next state, so it is not a row of ``steps``.
            point=((self.start - self.trajectory)[:, None] + step).flatten()[kept],
            fold=each_step(self.fold),
            family=each_step(self.family),
            position=each_step(torch.arange(len(self), device=alive.device)),
            reach=0,
            data=self.steps,
        )
