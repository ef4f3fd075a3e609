"""A safe rule for states on an attractor: how far a state is from the plane through its nearest states in the data.

The states of a dissipative system fill a surface of few dimensions. A state off this surface can be near the data, compared with the
distances in sparse parts of the surface, and still be unlike any of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors

# Deviations from a plane below this many standard deviations of a coordinate count as rounding.
ROUNDING = 1e-3
ROWS = 1000
MEANING = (
    "at most as far from the planes through the nearest states as held-out rollouts were",
    "farther from the plane through the nearest states than held-out rollouts were; the bound is a guess",
)


@dataclass(frozen=True)
class Planes:
    """Distances of standardised states to local planes, relative to the deviations of the nearest states from the plane."""

    states: np.ndarray
    n_axes: int
    n_neighbors: int

    def __call__(self, queries):
        search = NearestNeighbors(n_neighbors=self.n_neighbors).fit(self.states)
        return np.concatenate(
            [
                self._ratio(queries[first : first + ROWS], search)
                for first in range(0, len(queries), ROWS)
            ]
        )

    def _ratio(self, queries, search):
        near = self.states[search.kneighbors(queries, return_distance=False)]
        centre = near.mean(axis=1)
        away, spread = queries - centre, near - centre[:, None]
        # Principal axes of the neighbours from their products: there are fewer neighbours than coordinates.
        size, mix = np.linalg.eigh(spread @ spread.swapaxes(1, 2))
        along = np.einsum("nkq,nkd,nd->nq", mix[..., -self.n_axes :], spread, away)
        squares = (along**2 / size[:, -self.n_axes :].clip(1e-30)).sum(axis=1)
        off = np.sqrt(((away**2).sum(axis=1) - squares).clip(0))
        usual = size[:, : -self.n_axes].clip(0).sum(axis=1) / self.n_neighbors
        return off / (np.sqrt(usual) + ROUNDING * np.sqrt(queries.shape[1]))


@dataclass(frozen=True)
class PlaneRegion:
    """States that are at most as far off the local planes as held-out rollouts were at their farthest step.

    Attributes:
        n_axes: the dimension of the planes, less than the number of coordinates.
        n_neighbors: the number of states that define a plane.
        quantile: the fraction of the held-out rollouts whose steps are all in the region.
    """

    n_axes: int = 3
    n_neighbors: int = 20
    quantile: float = 0.95

    def fit(self, calibration):
        """Score each held-out rollout against the states that its fold left in."""
        states = calibration.data.inputs.flatten(start_dim=1).numpy()
        score = torch.zeros(len(calibration), dtype=torch.float64)
        for fold in calibration.fold.unique().tolist():
            own = calibration.fold == fold
            left_in, _ = calibration.data.splits[fold]
            score[own] = self._scored(states[left_in], calibration.features[own])
        rollout = calibration.group.unique(return_inverse=True)[1]
        farthest = torch.zeros(int(rollout.max()) + 1, dtype=torch.float64)
        farthest.scatter_reduce_(0, rollout, score, "amax")
        return FittedPlanes(self, states, float(farthest.quantile(self.quantile)))

    def _scored(self, states, features):
        planes = Planes(states, self.n_axes, self.n_neighbors)
        return torch.from_numpy(planes(features.inputs.flatten(start_dim=1).numpy()))


@dataclass(frozen=True)
class FittedPlanes:
    """The states of the data and the threshold."""

    rule: PlaneRegion
    states: np.ndarray
    threshold: float
    meaning: tuple[str, str] = MEANING

    def support_score(self, features):
        return self.rule._scored(self.states, features)

    def contains(self, support_score):
        return support_score <= self.threshold
