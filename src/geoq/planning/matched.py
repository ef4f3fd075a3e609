r"""Folds that resemble a plan: held-out points are as far from what their fold keeps as planned queries are from the data.

.. math:: W = \int_0^\infty |F_{held out}(d) - F_{planned}(d)| \, \mathrm{d}d

F are the distributions of the distances to the nearest point, and the scheme with the least W is used, after the idea of Linnenbrink et al.
(2024), "kNNDM CV: k-fold nearest-neighbour distance matching cross-validation". Their candidates are random folds and merged clusters;
here slabs and nested folds are candidates as well.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import few_threads, permutation
from geoq.checks import check_fraction, check_integer
from geoq.core.folds import (
    CombinedFolds,
    GroupFolds,
    Groups,
    NestedFolds,
    Points,
    RandomFolds,
    Split,
    Splits,
    check_fold_count,
    distinct_rows,
)
from geoq.neighbors import Neighbors, sketch

logger = logging.getLogger(__name__)

# Distances are compared at this many queries and held-out points, K-means is fitted to this many places and makes at most this many
# clusters.
N_COMPARED, N_CLUSTERED, MOST_CLUSTERS = 2_000, 5_000, 300
# Fields are compared by this many random combinations of their numbers, which keep ratios of distances up to about 12 %.
MOST_NUMBERS = 64
# The fractions of the data in the smallest subset of nested folds, which has at least this number of points.
SMALLEST, FEWEST_LEFT = (0.7, 0.5, 1 / 3, 1 / 6, 0.08), 20
Candidate = tuple[str, list[Split]]


@dataclass(frozen=True)
class MatchedFolds:
    """The folds, of several schemes, whose held-out points are about as far from the other points as the planned queries are.

    Candidates are random folds, K-means clusters in several numbers, merged to folds of about equal size, slabs across the principal axis
    and towards the planned queries, nested folds, and random and nested folds together. The least Wasserstein distance between the
    distributions of the distances to the nearest point wins. Rows with equal inputs, or of one group, are held out together. Folds are
    drawn before the surrogate is asked, so distances are measured between standardised inputs.

    Attributes:
        n_folds: number of folds.
        max_share: the largest fraction of the points that a fold of merged clusters holds out.
        n_tried: how many numbers of clusters are tried.
        random_state: seed of the random folds and of K-means.

    Example:
        >>> import numpy as np
        >>> from geoq import GeoQ
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(100, 2))
        >>> estimator = GeoQ(lambda x: x[:, 0], None, folds=MatchedFolds())
        >>> estimator = estimator.fit(x, x[:, 0] ** 2, planned=1.3 * x)
    """

    n_folds: int = 5
    max_share: float = 0.5
    n_tried: int = 15
    random_state: int = 0

    def __post_init__(self) -> None:
        check_fraction(self.max_share, "MatchedFolds.max_share")
        check_integer(self.n_tried, "MatchedFolds.n_tried", 1)
        check_integer(self.random_state, "MatchedFolds.random_state")

    def split(
        self, points: Points, y: None = None, groups: Groups = None, queries: Any = None
    ) -> Splits:
        del y
        if queries is None:
            raise ValueError(
                "folds=MatchedFolds() compares folds with planned queries, but fit received none; call fit(x, y, planned=xq), or "
                "choose other folds."
            )
        compared = self._compared(points, queries, groups)
        name, (distance, splits) = min(compared.items(), key=lambda item: item[1][0])
        logger.info("MatchedFolds: %s, Wasserstein distance %.3g", name, distance)
        return splits

    def compare(self, points: Points, queries: Points, groups: Groups = None) -> dict[str, float]:
        """The Wasserstein distance of each candidate, by its name; ``split`` uses the first one with the least distance."""
        return {name: w for name, (w, _) in self._compared(points, queries, groups).items()}

    def _compared(
        self, points: Points, queries: Points, groups: Groups
    ) -> dict[str, tuple[float, list[Split]]]:
        from scipy.stats import wasserstein_distance  # here: a slow import

        queries = queries[np.sort(permutation(len(queries))[:N_COMPARED])]
        place = distinct_rows(points) if groups is None else groups
        check_fold_count("MatchedFolds", self.n_folds, int(place.max()) + 1, "distinct points")
        if points.shape[1] > MOST_NUMBERS:
            points, queries = (
                sketch(p, MOST_NUMBERS) / MOST_NUMBERS**0.5 for p in (points, queries)
            )
        with few_threads(points.size):
            planned = Neighbors(points).nearest(queries, 1)[0][:, 0]
            return {
                name: (float(wasserstein_distance(planned, held_out_distances(points, s))), s)
                for name, s in self._candidates(points, queries, place)
            }

    def _candidates(
        self, points: Points, queries: Points, place: np.ndarray
    ) -> Iterator[Candidate]:
        """The folds that are compared. Each place, a distinct row or a group, is held out as a whole, and lies at its mean."""
        size = np.bincount(place)
        means = np.zeros((len(size), points.shape[1]))
        np.add.at(means, place, points)
        means /= size[:, None]

        def of_rows(splits: Splits) -> list[Split]:
            return [tuple(np.flatnonzero(np.isin(place, p)) for p in pair) for pair in splits]  # type: ignore[misc]

        def merged(label: Int[np.ndarray, " n_places"]) -> list[Split]:
            return [*GroupFolds(self.n_folds).split(points, None, label[place])]

        yield "random", of_rows(RandomFolds(self.n_folds, self.random_state).split(means))
        most = min(len(means) // 2, MOST_CLUSTERS)
        numbers = np.geomspace(self.n_folds, max(most, self.n_folds), self.n_tried)
        for number in np.unique(numbers.round().astype(int)).tolist():
            label = self._clusters(means, number)
            if len(np.unique(label)) < self.n_folds:
                continue
            splits = merged(label)
            if max(len(held_out) for _, held_out in splits) <= self.max_share * len(points):
                yield f"{number} clusters", splits
        for name, direction in _directions(means, queries):
            order = (means @ direction).argsort(kind="stable")
            slab = np.empty(len(means), dtype=int)
            slab[order] = np.arange(len(means)) * self.n_folds // len(means)
            yield f"slabs {name}", merged(slab)
        for smallest in SMALLEST:
            if self.n_folds < len(means) and smallest * len(points) >= FEWEST_LEFT:
                nested = NestedFolds(self.n_folds, smallest)
                yield f"nested to {smallest:.2g}", of_rows(nested.split(means))
                if self.n_folds > 3:
                    inside = RandomFolds(self.n_folds - 2, self.random_state)
                    both = CombinedFolds(inside, NestedFolds(2, smallest))
                    yield f"random and nested to {smallest:.2g}", of_rows(both.split(means))

    def _clusters(self, means: np.ndarray, number: int) -> Int[np.ndarray, " n_places"]:
        from sklearn.cluster import KMeans  # here: a slow import

        some = means[permutation(len(means))[:N_CLUSTERED]]
        with warnings.catch_warnings(action="ignore"):  # of too few distinct points
            kmeans = KMeans(number, n_init=1, random_state=self.random_state).fit(some)
        return np.asarray(kmeans.predict(means))


def held_out_distances(points: Points, splits: Sequence[Split]) -> Float[np.ndarray, " m"]:
    """Distances of held-out points to the nearest point that their fold keeps, of all folds together; at some points of large data."""
    step = 1 + sum(len(held_out) for _, held_out in splits) // N_COMPARED
    found = []
    for train, held_out in splits:
        some = held_out[permutation(len(held_out))[: -(-len(held_out) // step)]]
        found.append(Neighbors(points[train]).nearest(points[some], 1)[0][:, 0])
    return np.concatenate(found)


def _directions(means: np.ndarray, queries: Points) -> Iterator[tuple[str, np.ndarray]]:
    """The principal axis of the places, and the direction from their mean to the mean of the queries."""
    centred = means - means.mean(axis=0)
    some = centred[permutation(len(centred))[:N_COMPARED]]
    yield "across the principal axis", np.linalg.svd(some, full_matrices=False)[2][0]
    towards = queries.mean(axis=0) - means.mean(axis=0)
    if np.linalg.norm(towards) > 0:
        yield "towards the planned queries", towards
