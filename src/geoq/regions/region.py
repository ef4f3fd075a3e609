r"""The safe region: several scores of a query, each with its own threshold.

.. math:: S(x) = \max_k s_k(x) / t_k, \qquad \Omega_{safe} = \{x : S(x) \le 1\}

A score compares a query with the points of the data from one side. Each held-out point of the interpolating folds is scored against
the points that its fold left in, and the thresholds contain nearly the fraction ``quantile`` of them in all scores together. This is
a departure from the paper, whose single score is the distance in the space of the features psi, see ``PaperRegion``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat
from geoq.checks import check_integer, check_quantile
from geoq.core.geometry import Features, Space
from geoq.core.tuples import Points, Tuples
from geoq.data.coordinates import Part, spread
from geoq.data.table import Names
from geoq.neighbors import Neighbors
from geoq.quantiles import inverse_cdf_quantile, rank
from geoq.regions.field_scores import Answers, Moments, Patterns, Windows
from geoq.regions.table_scores import (
    EachCombination,
    EachInput,
    EachPair,
    PrincipalAxes,
    SupportDistance,
    Surface,
    Unexplained,
)
from geoq.regions.views import TINY, FieldView, TableView, View

# Thresholds from the scores of held-out points and the quantile level.
Thresholds: TypeAlias = Callable[[np.ndarray, float], np.ndarray]
# The largest ratio of a score to its threshold in the safe region; it is larger than 1 because of rounding.
SAFE = 1 + 1e-9
# The scores that are used unless the user chooses others; with more inputs than ``MAX_INPUTS`` the scores ``WIDE``.
MAX_INPUTS = 64
TABLE = EachInput(), PrincipalAxes(), EachPair(10), Unexplained()
WIDE = EachInput(), SupportDistance()
FIELD = Windows(), Moments(), Patterns(), Answers()
# At most this many held-out fields set the thresholds.
N_SCORED = 1000
# With this confidence the region contains the fraction ``quantile`` - 0.02 of the queries that resemble the calibration points.
CONFIDENCE, SLACK = 0.9, 0.02
# The paper's K_safe, used where the folds leave enough points.
USUAL_NEIGHBORS = 20


@runtime_checkable
class SafeRegion(Protocol):
    """A rule of the safe region: ``Region``, ``PaperRegion``, ``RolloutRegion`` or one of the user.

    ``fit`` returns the fitted region; a rule of geoq returns itself with what it has found, in fields that are None before. Then
    ``support_score(features)`` returns one number per query, at most 1 if the query is safe, and ``explain(features, names)`` states
    why one query is safe or not.
    """

    def fit(self, tuples: Tuples, /) -> Any: ...


@dataclass(frozen=True)
class Region:
    """Queries that resemble the held-out points of the interpolating folds, in every score.

    The support score is the largest ratio of a score to its threshold.

    Attributes:
        scores: the scores, such as ``(EachInput(), EachPair())`` of ``geoq.parts``; None means the scores of the domain.
        quantile: alpha_safe, the fraction of the held-out points that the region contains, nearly.

    Example:
        >>> Region(quantile=0.9)
        Region(scores=None, quantile=0.9)
    """

    scores: tuple[Any, ...] | None = None
    quantile: float = 0.95
    view: Any = field(default=None, repr=False, compare=False)
    thresholds: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "Region.quantile")

    def fit(self, tuples: Tuples) -> "Region":
        """Set the thresholds from the held-out points, and fit the scores to all points."""
        inner = tuples[tuples.interpolating]
        if _are_fields(tuples.points):
            inner = inner[:: math.ceil(len(inner) / N_SCORED)]
        return self.fit_to(tuples.points, inner, joint_thresholds)

    def fit_to(self, points: Points, held_out: Tuples, thresholds_of: Thresholds) -> "Region":
        """Fit the scores to all points, and set their thresholds from the scores of held-out points in their folds."""
        scores = self.scores or default_scores(points)
        view: Any = FieldView.of(points) if _are_fields(points) else TableView.of(points)

        def in_fold(fold: int) -> Float[np.ndarray, " n n_scores"]:
            left_in = view[points.splits[fold][0]]
            queries = left_in.of_queries(held_out[held_out.fold == fold].features)
            if isinstance(queries, TableView):
                queries = queries[queries.known_to(left_in)]
                if queries.t.shape[1] > MAX_INPUTS:
                    left_in, queries = left_in.as_new(queries)
            return _scores([score.fit(left_in) for score in scores], queries)

        found = [in_fold(fold) for fold in dict.fromkeys(held_out.fold.tolist())]
        fitted = tuple(score.fit(view) for score in scores)
        least = [max(score.least, TINY) for score in fitted]
        thresholds = thresholds_of(np.concatenate(found), self.quantile).clip(least)
        return replace(self, scores=fitted, view=view[:0], thresholds=thresholds)

    def with_points(self, points: Points) -> "Region":
        """The same thresholds, with scores that compare queries with these points."""
        view: Any = FieldView.of(points) if _are_fields(points) else TableView.of(points)
        scores = tuple(score.fit(view) for score in self.scores or ())
        return replace(self, scores=scores, view=view[:0])

    def _ratios(self, queries: View) -> Float[np.ndarray, " n n_scores"]:
        return _scores(self.scores or (), queries) / self.thresholds

    def support_score(self, features: Features) -> Float[np.ndarray, " n"]:
        return np.asarray(self._ratios(self.view.of_queries(features)).max(axis=1))

    def support_map(self, features: Features) -> np.ndarray | None:
        """The support score of one query at its cells, by the windows with the larger ratio; None without windows."""
        query, scores = self.view.of_queries(features), self.scores or ()
        windows = [k for k, score in enumerate(scores) if isinstance(score, Windows)]
        if not windows:
            return None
        k = max(windows, key=self._ratios(query)[0].__getitem__)
        return np.asarray(scores[k].on_cells(query)[0] / self.thresholds[k])

    def explain(self, features: Features, names: Names | None = None) -> str:
        """Why one query is safe or not: the first score that names an input, or the one with the largest ratio."""
        query, scores = self.view.of_queries(features, names), self.scores or ()
        ratios = self._ratios(query)[0]
        if ratios.max() <= SAFE:
            each = (score for score in scores if isinstance(score, EachInput))
            return next(filter(None, (s.explain_inside(query) for s in each)), str(query.inside))
        specific = np.array([score.is_specific for score in scores]) & (ratios > SAFE)
        which = int(specific.argmax() if specific.any() else ratios.argmax())
        return str(scores[which].explain(query, float(self.thresholds[which])))


def _are_fields(points: Points) -> bool:
    """Whether scores see fields; rows of a table otherwise."""
    return points.layout.holds(points.inputs.shape[1:])


def default_scores(points: Points) -> tuple[Any, ...]:
    """The scores of a table or of a field; the support distance alone for representations of the user."""
    if _are_fields(points):
        return FIELD
    if points.metric is None or points.coordinates.constant.all():
        return (SupportDistance(),)
    if math.prod(points.coordinates.input_shape) > MAX_INPUTS:
        return WIDE
    levels = points.coordinates.is_part(Part.LEVEL) & points.coordinates.varies
    n_categories = len(np.unique(points.coordinates.input_of[levels]))
    return (*TABLE, EachCombination()) if n_categories > 1 else TABLE


def _scores(scores: Sequence[Any], queries: View) -> Float[np.ndarray, " n n_scores"]:
    """The scores of all queries, one column each."""
    parts = [np.zeros((0, len(scores)))]
    for rows in chunks(len(queries), queries.row_numbers):
        some = queries[rows]
        parts.append(np.stack([score(some) for score in scores], axis=1))
    return np.concatenate(parts)


def joint_thresholds(held_out: Float[np.ndarray, " n n_scores"], quantile: float) -> np.ndarray:
    """Thresholds of several scores which nearly the fraction ``quantile`` of new rows does not exceed in any score.

    The ratio of a row is taken to the thresholds of the other rows. Otherwise the largest scores would be their own thresholds,
    and a new row would exceed one of them too often. Without held-out rows every threshold is 0.
    """
    from scipy.stats import binom  # here: a slow import

    n, n_scores = held_out.shape
    if not n:
        return np.zeros(n_scores)
    level = 1 - (1 - quantile) / n_scores
    ordered = np.sort(held_out, axis=0).clip(min=TINY)
    if n == 1:
        return ordered[0]
    place = min(rank(n, level), n - 1) - 1
    # Without row i, the score of this rank is the next one if row i is below it.
    below = held_out <= ordered[place]
    without = np.where(below, ordered[place + 1], ordered[place])
    ratio = np.sort((held_out / without).max(axis=1))
    confident = int(binom.ppf(CONFIDENCE, n, max(0.0, quantile - SLACK))) + 1
    place_c = min(max(rank(n + 1, quantile), confident), n) - 1
    return np.asarray(ordered[min(rank(n, level), n) - 1] * ratio[place_c])


@dataclass(frozen=True)
class PaperRegion:
    r"""The paper's safe region: features whose mean distance to the nearest calibration features is not unusual.

    .. math:: \Omega_{safe} = \{\psi : S(\psi) \le \tau_{safe}\}

    Attributes:
        n_neighbors: K_safe, the number of calibration features that the support score averages over. None means the paper's
            20, or as many as there are independent calibration tuples.
        quantile: alpha_safe, the fraction of the calibration tuples that the region contains.
    """

    n_neighbors: int | None = None
    quantile: float = 0.95
    mean: Any = field(default=None, repr=False, compare=False)
    scale: Any = field(default=None, repr=False, compare=False)
    cloud: Any = field(default=None, repr=False, compare=False)
    threshold: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "PaperRegion.quantile")
        if self.n_neighbors is not None:
            check_integer(self.n_neighbors, "n_neighbors", 1)

    def check_neighbors(self, n_independent: int) -> None:
        """Raise for more neighbours than a calibration tuple has independent others."""
        needed = self.n_neighbors or 1
        if needed > n_independent:
            raise ValueError(
                f"PaperRegion(n_neighbors={needed}), but a calibration point has only {n_independent} others that are "
                "independent of it; lower n_neighbors or the gap, or give more data."
            )

    def fit(self, tuples: Tuples) -> "PaperRegion":
        r"""Standardise the calibration features, and set the threshold from their leave-one-out scores.

        .. math:: \tau_{safe} = \widehat Q_{\alpha_{safe}}(\{S_{cal}(\psi_i)\})  (eq:safe_threshold_loo)

        This is a departure from the paper for dependent data: all tuples within reach in time, or of the same group, are left
        out. Otherwise the nearest neighbours of a forecast window are the windows six hours before and after it, and no new
        window is safe.
        """
        n_neighbors = self.n_neighbors or min(USUAL_NEIGHBORS, tuples.n_independent)
        psi = tuples.features.flat
        mean, scale = spread(psi)
        cloud = (psi - mean) / scale
        bare = replace(self, n_neighbors=n_neighbors, mean=mean, scale=scale, cloud=cloud)
        threshold = inverse_cdf_quantile(bare.leave_one_out(tuples), self.quantile)
        return replace(bare, threshold=float(threshold))

    def leave_one_out(self, tuples: Tuples) -> Float[np.ndarray, " n"]:
        r"""Support score of each calibration feature among the others.

        .. math:: S_{cal}(\psi_i) = \frac{1}{K_{safe}}
            \sum_{\psi_j \in \mathcal N_{T, K_{safe}}^{\Psi_{cal} \setminus \{\psi_i\}}(\psi_i)} d_T(\psi_i, \psi_j)
            (eq:safe_score_calibration_loo)
        """
        assert self.n_neighbors is not None
        found = Neighbors(self.cloud).nearest_other(self.n_neighbors, tuples.position, tuples.reach)
        return np.asarray(found.mean(axis=1))

    def support_score(self, features: Features) -> Float[np.ndarray, " n"]:
        r"""Mean standardised distance to the nearest calibration features, divided by the threshold.

        .. math:: S(\psi) = \frac{1}{K_{safe}} \sum_{\psi_j \in \mathcal N_{T, K_{safe}}(\psi)} d_T(\psi, \psi_j)
            (eq:safe_score_standardized)
        """
        assert self.n_neighbors is not None
        psi = (features.flat - self.mean) / self.scale
        score = Neighbors(self.cloud).nearest(psi, self.n_neighbors)[0].mean(axis=1)
        return np.asarray(score / max(self.threshold, TINY))

    def explain(self, features: Features, names: Names | None = None) -> str:
        """Whether the calibration contains similar features."""
        del names
        few = "too few " if float(self.support_score(features)[0]) > SAFE else ""
        return f"the calibration contains {few}similar features psi"


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
    threshold: Any = field(default=None, repr=False, compare=False)
    initial: Region | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "RolloutRegion.quantile")

    def fit(self, tuples: Tuples) -> "RolloutRegion":
        """Set the threshold from the farthest step of each held-out rollout, and fit the region of initial states."""
        assert tuples.position is not None
        initial, quantile = None, self.quantile
        if tuples.points.inputs[0].size > 1:
            quantile = (1 + self.quantile) / 2
            initial = _initial_states(tuples, quantile)
        rollouts, number = np.unique(tuples.position, return_inverse=True)
        farthest = np.zeros(len(rollouts))
        np.maximum.at(farthest, number, tuples.relation.support_distance)
        threshold = float(inverse_cdf_quantile(farthest, quantile))
        return replace(self, threshold=threshold, initial=initial)

    def support_score(self, features: Features) -> Float[np.ndarray, " n"]:
        return np.asarray(features.support_distance / max(self.threshold, TINY))

    def explain(self, features: Features, names: Names | None = None) -> str:
        """Why the initial state of a rollout is safe or not."""
        if self.initial is not None and self.initial.support_score(features)[0] > SAFE:
            return self.initial.explain(features, names)
        distance = float(features.support_distance[0])
        return f"its distance to the data is {distance:.3g} (held-out rollouts: at most {self.threshold:.3g})"


def _initial_states(tuples: Tuples, quantile: float) -> Region:
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
        return Region((Surface(),), quantile).fit_to(points, first, inverse_cdf_quantile)
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
