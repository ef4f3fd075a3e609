r"""The safe region of rollouts: a threshold on the support distance of all steps, and a test of initial states."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat
from geoq.checks import check_quantile
from geoq.core.geometry import Features, Space
from geoq.core.tuples import Points, Tuples
from geoq.data.table import Names
from geoq.neighbors import Neighbors
from geoq.quantiles import inverse_cdf_quantile
from geoq.regions.gaps import TINY
from geoq.regions.region import FIELD, SAFE, FittedScores, Region, fit_scores
from geoq.regions.views import Score, TableView

# The number of nearest states, and a deviation that counts as rounding, in standard deviations of a coordinate.
N_NEAREST, ROUNDING = 20, 1e-3


@dataclass(frozen=True)
class RolloutRegion:
    r"""Steps that start at most as far from the data as held-out rollouts were at their farthest step.

    .. math:: \Omega_{safe} = \{u : \Delta d_k(u) \le \widehat Q_{\alpha_{safe}}(\max_n \Delta d_k(\widehat u_n))\}

    The quantile is taken over whole rollouts. A threshold that one step in twenty exceeds would end the supported horizon of
    nearly every rollout of a hundred steps.

    Distances hardly change if a state of many coordinates becomes noisy or is shifted, or if a state leaves an attractor. So an
    initial state with a grid of 16 cells or more must also resemble the data in the scores of fields: its windows, its moments,
    its patterns and its first step. A state with one axis counts as a line of cells. A smaller state, or a small output of a
    state with a long memory, must lie on the ``Surface`` that the data form. Both tests then have the quantile
    :math:`(1 + \alpha_{safe}) / 2`, so that together they exclude at most :math:`1 - \alpha_{safe}` of the held-out rollouts.

    Attributes:
        quantile: alpha_safe, the fraction of the held-out rollouts whose steps are all in the region.

    Example:
        >>> RolloutRegion(quantile=0.9)
        RolloutRegion(quantile=0.9)
    """

    quantile: float = 0.95

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "RolloutRegion.quantile")

    def fit(self, tuples: Tuples) -> "FittedRolloutRegion":
        """Set the threshold from the farthest step of each held-out rollout, and fit the region of initial states."""
        assert tuples.position is not None
        initial, quantile = None, self.quantile
        if tuples.points.inputs[0].size > 1:
            quantile = (1 + self.quantile) / 2
            initial = _initial_states(tuples, quantile)
        rollouts, number = np.unique(tuples.position, return_inverse=True)
        farthest = np.zeros(len(rollouts))
        np.maximum.at(farthest, number, tuples.relation.support_distance)
        return FittedRolloutRegion(float(inverse_cdf_quantile(farthest, quantile)), initial)


def _initial_states(tuples: Tuples, quantile: float) -> FittedScores:
    """The region of initial states, which are the first steps of the rollouts."""
    assert tuples.position is not None
    points, first = _with_next(tuples.points), tuples[np.diff(tuples.position, prepend=-1) > 0]
    # Only inputs and predictions are compared; the points have other rows, so there are no anchors.
    assert first.queries is not None
    inputs = first.queries.inputs
    relation = replace(first.relation, anchors=0 * first.relation.anchors)
    queries = Space(inputs, inputs, inputs)
    first = replace(first, points=points, relation=relation, queries=queries)
    if points.layout.is_table:

        def thresholds(scores: np.ndarray) -> np.ndarray:
            return np.asarray(inverse_cdf_quantile(scores, quantile))

        return fit_scores((Surface(),), points, first, thresholds)
    return Region(FIELD, quantile).fit(first)


def _with_next(points: Points) -> Points:
    """The states that have a next state; a fold leaves in the steps between two of its states."""
    goes_on = ~np.isnan(flat(points.outputs)).any(axis=1)
    number = np.cumsum(goes_on) - 1
    splits = []
    for seen, unseen in points.splits:
        left_in = np.zeros(len(goes_on), dtype=bool)
        left_in[seen] = True
        both = np.append(left_in[:-1] & left_in[1:], False)
        splits.append((number[goes_on & both], number[unseen[goes_on[unseen]]]))
    inputs = points.inputs[goes_on]
    space, error = Space(inputs, inputs, inputs), points.error[goes_on]
    return replace(
        points, space=space, outputs=points.outputs[goes_on], error=error, splits=tuple(splits)
    )


@dataclass(frozen=True)
class FittedRolloutRegion:
    """The largest support distance of a safe step, and the region of initial states; None for states of a single number."""

    threshold: float
    initial: FittedScores | None = None

    def support_score(self, features: Features) -> Float[np.ndarray, " n"]:
        """The support distance divided by its threshold."""
        return np.asarray(features.support_distance / max(self.threshold, TINY))

    def explain(self, features: Features, names: Names | None = None) -> str:
        """Why the initial state of a rollout is safe or not."""
        unlike = self.initial is not None and self.initial.support_score(features)[0] > SAFE
        if unlike:
            assert self.initial is not None
            return self.initial.explain(features, names)
        distance = float(features.support_distance[0])
        return f"its distance to the data is {distance:.3g} (held-out rollouts: at most {self.threshold:.3g})"


@dataclass(frozen=True)
class Surface(Score):
    r"""How far a state of few coordinates is from the surface that the nearest states of the data form.

    .. math:: s(u) = \Bigl(\frac1d \sum_{j=1}^d \frac{(v_j^T (u - c))^2}{\lambda_j + \epsilon^2}\Bigr)^{1/2}

    Here c is the mean of the 20 nearest states of the data, and :math:`\lambda_j, v_j` are the eigenvalues and eigenvectors of
    their covariance, all in standardised coordinates. The states of a dissipative system fill a surface with few dimensions. A
    state off this surface can be near the data, compared with distances in sparse parts of the surface, and still be unlike all
    of them: there :math:`\lambda_j` is small across the surface, and the score is large.

    Attributes:
        states: the states of the data, which ``fit`` sets.
    """

    states: Any = field(default=None, repr=False, compare=False)

    def fit(self, points: TableView) -> "Surface":
        return Surface(points.t)

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.states)

    def __call__(self, queries: TableView) -> Float[np.ndarray, " n"]:
        n_nearest = min(N_NEAREST, len(self.states))
        nearest, score = self._neighbors.nearest(queries.t, n_nearest)[1], np.empty(len(queries))
        for rows in chunks(len(queries), 2 * n_nearest * self.states.shape[1]):
            near = self.states[nearest[rows]]
            centre = near.mean(axis=1, keepdims=True)
            spread = near - centre
            size, axes = np.linalg.eigh(spread.mT @ spread / n_nearest)
            along = ((queries.t[rows, None] - centre) @ axes)[:, 0]
            squares = along**2 / (size.clip(min=0) + ROUNDING**2)
            score[rows] = np.sqrt(squares.mean(axis=1))
        return score

    def explain(self, query: TableView, limit: float) -> str:
        return (
            f"the initial state is off the surface that its {N_NEAREST} nearest states in the data form: it is "
            f"{float(self(query)[0]):.2g} of their standard deviations away (held-out states: at most {limit:.2g})"
        )
