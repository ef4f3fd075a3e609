"""Features along rollouts, which need no reference states of the future, and the held-out rollouts with their errors."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import flat, restore
from geoq.bounds.climatology import FittedClimatology
from geoq.checks import shortened
from geoq.core.geometry import Features, Geometry, Relation, Space, displacement
from geoq.core.tuples import Points, Tuples
from geoq.data.coordinates import Coordinates
from geoq.rollout.series import DataRange, PerStep, Places, Rollouts, RowLayout, Values
from geoq.surrogate import answers_of


@dataclass(frozen=True)
class RolloutFeatures:
    r"""Features along rollouts: the features of state n - 1 determine the bound of step n, n = 1, ..., N.

    Attributes:
        z: phi of the states that the steps start from, one row per step; nan after the rollout has diverged.
        inputs: these states in the coordinates that the safe region compares.
        relation: these states related to the data; the distances are infinite after the rollout has diverged.
        prediction: the states that the steps end at; nan from the step at which the rollout diverges.
        climatology: :math:`C_j(\widehat u_{n,j})`, the climatology of the bounded coordinates of these states.
        alive: whether a rollout has not diverged, up to and including this step.
        change: the norm of the change of the state in this step, in standard deviations; nan from the step at which it diverges.
        points: the data in the coordinates of the geometry.
        members: what the members of each source say, see ``Source.members``; empty without members.
    """

    z: Float[np.ndarray, " n_rows *z"]
    inputs: Float[np.ndarray, " n_rows *compared"]
    relation: Relation
    prediction: Float[np.ndarray, " n n_steps *state"]
    climatology: Values
    alive: Bool[np.ndarray, " n n_steps"]
    change: PerStep
    points: Space
    members: tuple[Any, ...] = ()

    @property
    def n_steps(self) -> int:
        return int(self.alive.shape[1])

    @property
    def support_distance(self) -> PerStep:
        """Support distance (eq:dd) of the state that each step starts from; infinite after the rollout has diverged."""
        return self.relation.support_distance.reshape(self.alive.shape)

    @property
    def displacement(self) -> Float[np.ndarray, " n n_steps *z"]:
        """Displacement (eq:dz) of the state that each step starts from; nan after the rollout has diverged."""
        found = displacement(self.z, self.relation.anchors, self.points.z)
        return found.reshape(*self.alive.shape, *found.shape[1:])

    def at(self, rows: np.ndarray) -> Features:
        """The features of some steps, for a safe region."""
        relation = self.relation[rows]
        return Features(
            displacement(self.z[rows], relation.anchors, self.points.z),
            relation.support_distance,
            np.zeros(len(relation)),
            self.prediction[rows // self.n_steps, rows % self.n_steps],
            self.inputs[rows],
            relation,
        )

    @staticmethod
    def cat(parts: "list[RolloutFeatures]") -> "RolloutFeatures":
        joined: dict[str, Any] = {"relation": Relation.cat([part.relation for part in parts])}
        for name in ("z", "inputs", "prediction", "climatology", "alive", "change"):
            joined[name] = np.concatenate([getattr(part, name) for part in parts])
        if all(part.inputs is part.z for part in parts):
            joined["inputs"] = joined["z"]
        members = zip(*(part.members for part in parts), strict=True)
        joined["members"] = tuple(np.concatenate(own, axis=1) for own in members)
        return replace(parts[0], **joined)


@dataclass(frozen=True)
class Reference:
    """What features are relative to: all states for a query, the states that a fold leaves in for the calibration."""

    layout: RowLayout
    coordinates: Coordinates
    range: DataRange
    geometry: Geometry
    climatology: FittedClimatology

    def features(self, rows: Rollouts, phi: Any, like: Any) -> RolloutFeatures:
        """Features along rollouts; phi receives arrays of the kind of ``like``."""
        shape, inside = (len(rows), rows.shape[1] - 1), self.range.cut(rows)
        before, after = (p.reshape(-1, *rows.shape[2:]) for p in (inside[:, :-1], inside[:, 1:]))
        known = np.isfinite(flat(before)).all(axis=1)
        space = embed(before[known], self.coordinates, self.layout, phi, like)
        relation = vars(self.geometry.relate(space)).values()
        z = _filled(space.z, known, np.nan)
        moved = flat(self.coordinates(after[known]) - space.normalized)[:, : self.layout.n_values]
        return RolloutFeatures(
            z,
            z if space.inputs is space.z else _filled(space.inputs, known, np.nan),
            Relation(*(_filled(part, known, np.inf) for part in relation)),
            self.layout.states(after).reshape(*shape, *self.layout.state),
            self.climatology(np.nan_to_num(self.layout.outputs(inside[:, 1:])).astype(float)),
            np.isfinite(flat(after)).all(axis=1).reshape(shape),
            _filled(np.linalg.norm(moved, axis=1), known, np.nan).reshape(shape),
            self.geometry.points,
        )


def embed(rows: np.ndarray, nu: Coordinates, layout: RowLayout, phi: Any, like: Any) -> Space:
    """Phi and nu of rows; phi is nu if there is no representation."""
    normalized = z = nu(rows)
    if phi is not None:
        z = answers_of(layout.representation(phi), restore(rows, like), "representation")
    return Space(z, normalized, layout.compared(normalized))


def _filled(values: np.ndarray, known: np.ndarray, missing: float) -> np.ndarray:
    """Rows for all steps, given the rows of the steps that start before the rollout diverges."""
    if known.all():
        return values
    fill = missing if values.dtype.kind == "f" else 0
    filled = np.full((len(known), *values.shape[1:]), fill, values.dtype)
    filled[known] = values
    return filled


@dataclass(frozen=True)
class RolloutCalibration:
    """Rollouts of the fold surrogates from states that they have not seen, and their errors, one row per rollout.

    Attributes:
        features: the features along the rollouts, relative to the states that the fold leaves in.
        error: the absolute errors of the bounded coordinates; nan from the step at which a rollout diverges.
        start: the row of the data that a rollout starts from.
        fold: the fold that holds out this row, counted from 0.
        family: the fold scheme that the fold belongs to.
        points: all rows of the data with the states after them.
        sources: the sources of the members of queries: the surrogate and a companion.
    """

    features: RolloutFeatures
    error: Values
    start: Places
    fold: Places
    family: Places
    points: Points
    sources: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.error)

    @property
    def n_steps(self) -> int:
        """The calibration horizon."""
        return self.features.n_steps

    @property
    def n_numbers(self) -> int:
        return self.features.z.size + self.error.size

    @property
    def steps(self) -> Tuples:
        """The steps as calibration tuples, for the safe region; the steps of one rollout are one group.

        A rollout that diverges has only its first step here: on the way out it passes states that are far from the data.
        """
        features, n_steps = self.features, self.n_steps
        alive, is_first = features.alive, np.arange(n_steps) == 0
        kept = np.flatnonzero((alive[:, -1:] | is_first) & alive[:, :1])
        rollout = kept // n_steps
        return Tuples(
            relation=features.relation[kept],
            point=self.start[rollout] + kept % n_steps,
            fold=self.fold[rollout],
            family=self.family[rollout],
            row=kept,
            errors=self.error.reshape(len(alive) * n_steps, -1),
            anchor_errors=None,
            predictions=features.prediction.reshape(-1, *features.prediction.shape[2:]),
            points=self.points,
            position=rollout,
            queries=Space(features.z, features.z, features.inputs)[kept],
        )


def bounds_along(bound: Any, features: RolloutFeatures) -> Values:
    """The bounds of a fitted scheme, infinite from the step at which a rollout diverges."""
    found, shape = bound(features), features.climatology.shape
    if not isinstance(found, np.ndarray) or found.shape != shape or (found < 0).any():
        raise ValueError(
            f"{type(bound).__name__} returned {shortened(found)}; return nonnegative numbers, an array of shape {shape}."
        )
    return np.where(features.alive[..., None] & ~np.isnan(found), found, np.inf)


def scores_along(region: Any, features: RolloutFeatures) -> PerStep:
    """The support score of each step; infinite from the step at which a rollout diverges.

    A region of whole rollouts, which has a region of initial states, gives the largest score so far: a bound rests on all steps before.
    """
    alive, initial = features.alive, getattr(region, "initial", None)
    score = np.full(alive.shape, np.inf)
    if alive.any():
        score[alive] = region.support_score(features.at(np.flatnonzero(alive)))
    kept = np.flatnonzero(alive[:, 0])
    if initial is not None and len(kept):
        unlike = initial.support_score(features.at(kept * features.n_steps))
        score[kept, 0] = np.maximum(score[kept, 0], unlike)
    return np.maximum.accumulate(score, axis=1) if hasattr(region, "initial") else score
