r"""``propose``: the next simulations, by greedy reduction of the bounds of planned queries.

.. math:: \operatorname{gain}(c) = \sum_q w_q \, s(q) \bigl[g(d(q)) - g(\min(d(q), \lVert z_q - z_c \rVert))\bigr]

The law g and the local factors s are described in ``distances``. Each pick is data for the later ones: the distances are updated, and
nothing is trained. The gain is submodular, so a gain that was computed earlier is an upper limit, and only candidates at the top are computed
again (lazy greedy); the batch reduces the bounds by at least 1 - 1/e of what the best batch of this size would.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist

from geoq.arrays import chunks, native, permutation, to_numbers
from geoq.checks import check_index, check_integer
from geoq.core.fitted import Fitted
from geoq.core.update import extended
from geoq.planning.distances import DistanceLaw, Located, calibration_of

# Gains are computed from at most this many of the queries.
MAX_QUERIES = 5000
# A point of the data is at most this far away, in units of the median distance at which points were held out.
SAME = 1e-9


@dataclass(frozen=True)
class Proposal:
    """The next simulations, in the order of the picks.

    Attributes:
        rows: the rows of the candidates.
        gains: how much each pick lowers the mean bound of the queries; without queries, the bound at each pick.
        bound_before: the mean bound of the queries (of the candidates without queries), with the pending runs as data.
        bound_after: an estimate of this mean after a training with the pending runs and the picks, by the law of the distance.
        safe_before: the fraction of the queries that are safe.
        safe_after: this fraction with pending runs and picks as data.
        random_rows: rows of the queries that were drawn at random, to be simulated as well: an unbiased sample of the plan, for
            ``update`` or ``conformalize``.
    """

    rows: Int[np.ndarray, " n_picks"]
    gains: Float[np.ndarray, " n_picks"]
    bound_before: float
    bound_after: float
    safe_before: float
    safe_after: float
    random_rows: Int[np.ndarray, " n_random"]
    notes: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def reason(self, pick: int) -> str:
        """Why one of the picks was made, in one line."""
        return self.notes[check_index(pick, "pick", len(self))]


def propose(
    estimator: Any,
    candidates: Any,
    n: int,
    *,
    queries: Any = None,
    weights: Any = None,
    pending: Any = None,
    n_random: int = 0,
    random_state: int = 0,
) -> Proposal:
    """Pick the candidates whose simulation lowers the bounds of the planned queries most.

    The bound of a field is its mean over the field. Nothing is trained and nothing is simulated.

    Args:
        estimator: a fitted ``GeoQ`` or ``GeoQRegressor``.
        candidates: inputs that could be simulated, one per row; a row of the data is refused.
        n: how many runs to propose, the random ones included.
        queries: planned queries. Without them each pick is the candidate with the largest bound.
        weights: nonnegative weights of the queries; None means equal weights.
        pending: inputs of runs that are under way; they count as data.
        n_random: how many of the runs are queries that are drawn at random.
        random_state: seed of this draw.

    Returns:
        The proposed candidates, with what they gain.
    """
    fitted = calibration_of(estimator)
    check_integer(n, "n", 1)
    check_integer(n_random, "n_random", 0)
    pool = Located.of(fitted, candidates, "candidates")
    plan = pool if queries is None else Located.of(fitted, queries, "queries")
    n_queries = 0 if queries is None else len(plan)
    law = DistanceLaw.of(fitted)
    _check_counts(len(pool), n_queries, n, n_random)
    _check_new(law, pool, SAME * fitted.typical.support_distance)
    weight = _weights(weights, len(plan), n_queries)
    drawn = np.sort(np.random.default_rng(random_state).permutation(len(plan))[:n_random])
    runs = [] if pending is None else [Located.of(fitted, pending, "pending")]
    runs.append(plan.of_rows(drawn))
    greedy = _Greedy(fitted, law, pool, plan, weight, np.concatenate([run.z for run in runs]))
    before = greedy.mean_bound
    picks = [greedy.pick(alone=queries is None) for _ in range(n - n_random)]
    rows = np.array([row for row, _, _ in picks], dtype=int)
    gains = np.array([gain for _, gain, _ in picks])
    after = _safe_with(fitted, [*runs, pool.of_rows(rows)], plan)
    means = before, greedy.mean_bound, float(weight @ plan.safe), float(weight @ after)
    return Proposal(rows, gains, *means, drawn, tuple(note for _, _, note in picks))


def _check_counts(n_candidates: int, n_queries: int, n: int, n_random: int) -> None:
    """Raise for more runs than there are candidates and queries."""
    if n_random > min(n, n_queries):
        raise ValueError(
            f"n_random={n_random}, but it is a part of the n={n} runs and drawn from {n_queries} queries; choose a smaller one, or "
            "pass queries."
        )
    if n - n_random > n_candidates:
        raise ValueError(
            f"n={n}, but there are {n_candidates} candidates; choose a smaller n, or pass more candidates."
        )


def _check_new(law: DistanceLaw, pool: Located, limit: float) -> None:
    """Raise for candidates that are rows of the data."""
    distance, row = law.nearest(pool.z)
    same = distance <= limit
    if same.any():
        which = int(same.argmax())
        raise ValueError(
            f"candidates[{which}] is row {row[which]} of the data ({same.sum()} candidates are rows of the data); leave them out."
        )


def _safe_with(fitted: Fitted, runs: list[Located], plan: Located) -> Any:
    """Which queries are safe with these runs as data; what the simulations will return has no influence on the flags."""
    for run in runs:
        if len(run):
            error = np.zeros((len(run), *fitted.error.shape[1:]))
            fitted = extended(fitted, run.rows, run.prediction, error)
    return Located.of(fitted, native(plan.rows), "queries").safe


def _weights(weights: Any, n: int, n_queries: int) -> Float[np.ndarray, " n"]:
    """Weights of the queries that sum to 1."""
    if weights is None:
        return np.full(n, 1 / n)
    found = to_numbers(np.asarray(weights), "weights").astype(float)
    if found.shape != (n_queries,) or not (found >= 0).all() or not 0 < found.sum() < np.inf:
        raise ValueError(
            f"weights has shape {found.shape} for {n_queries} queries; pass one finite nonnegative number per query, not all of them 0."
        )
    return found / found.sum()


class _Greedy:
    """The picks of one proposal: distances of queries and candidates, and upper limits of the gains."""

    def __init__(
        self, fitted: Fitted, law: DistanceLaw, pool: Located, plan: Located, weight: Any, runs: Any
    ) -> None:
        self.law, self.pool, self.plan, self.weight = law, pool, plan, weight
        self.typical = max(fitted.typical.support_distance, 1e-300)
        self.distance, self.own = law.nearest(plan.z)[0], law.nearest(pool.z)[0]
        self.factor, self.of_pool = plan.bound / law(self.distance), pool.bound / law(self.own)
        self.some = np.sort(permutation(len(plan))[:MAX_QUERIES])
        for z in runs:
            self._add(z)
        self.heap: list[tuple[float, int, int]] = []
        self.n_picked = 0

    @property
    def mean_bound(self) -> float:
        """The weighted mean of the bounds of the queries, by the law."""
        return float(self.weight @ (self.factor * self.law(self.distance)))

    def gains(self, rows: Any) -> Float[np.ndarray, " n"]:
        """How much these candidates lower the weighted mean."""
        z, now, parts = self.pool.z[rows], self.distance[self.some], []
        scale = (self.weight * self.factor)[self.some] / max(self.weight[self.some].sum(), 1e-300)
        for part in chunks(len(z), len(now)):
            near = np.minimum(now, cdist(z[part], self.plan.z[self.some]))
            parts.append((self.law(now) - self.law(near)) @ scale)
        return np.concatenate(parts)

    def pick(self, *, alone: bool) -> tuple[int, float, str]:
        """The best candidate, its gain and the reason."""
        row, gain = self._largest() if alone else self._best()
        before, far = self.distance.copy(), float(self.own[row])
        self.of_pool[row] = -np.inf
        self._add(self.pool.z[row])
        self.n_picked += 1
        near = self.distance < before
        text = f"run candidate {row}: the nearest data are {far / self.typical:.2g} typical distances away"
        if alone:
            return row, gain, f"{text}, and its bound is {gain:.3g}, the largest one"
        w, bound = self.weight[near], self.factor[near]
        if not w.sum():
            return row, gain, f"{text}; no query is nearer to it than to the data"
        old, new = (
            float(w @ (bound * self.law(d[near])) / w.sum()) for d in (before, self.distance)
        )
        return (
            row,
            gain,
            f"{text}; it is the nearest run of {int(near.sum())} queries, whose mean bound falls from {old:.3g} to {new:.3g}",
        )

    def _largest(self) -> tuple[int, float]:
        """The candidate with the largest bound, and this bound."""
        bound = np.where(np.isinf(self.of_pool), -np.inf, self.of_pool * self.law(self.own))
        row = int(bound.argmax())
        return row, float(bound[row])

    def _best(self) -> tuple[int, float]:
        """The candidate with the largest gain; ties go to the lower row."""
        if not self.n_picked:
            first = self.gains(slice(None))
            self.heap = [(-gain, row, 0) for row, gain in enumerate(first.tolist())]
            heapq.heapify(self.heap)
        while True:
            limit, row, of = heapq.heappop(self.heap)
            if of == self.n_picked:
                return row, -limit
            gain = float(self.gains(np.array([row]))[0])
            heapq.heappush(self.heap, (-gain, row, self.n_picked))

    def _add(self, z: np.ndarray) -> None:
        """A further point of the data."""
        for points, own in ((self.plan.z, self.distance), (self.pool.z, self.own)):
            np.minimum(own, cdist(points, z[None])[:, 0], out=own)
