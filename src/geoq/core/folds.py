"""Fold schemes: which points the surrogate of a fold does not see (line 5).

A scheme yields pairs of row numbers ``(train, held_out)``, so scikit-learn's splitters can be used as they are. Random folds
imitate interpolation; cluster, nested, group and temporal folds imitate extrapolation. A scheme receives the standardised inputs
nu(x), one flattened row per point.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Int

from geoq.arrays import few_threads
from geoq.checks import check_integer, check_object, is_number, shortened, warn

# Successive samples with at least this correlation are alike. It is measured in at most about this many cells.
ALIKE, MOST_CELLS = 0.5, 500

Split: TypeAlias = tuple[np.ndarray, np.ndarray]
Splits: TypeAlias = Iterable[Split]
Points: TypeAlias = np.ndarray
Groups: TypeAlias = np.ndarray | None
# What ``dependence`` of a scheme returns: the position of each point, the number of its group or its time, and a reach. Points whose
# positions differ by at most the reach depend on each other, so leave-one-out scores leave all of them out.
Dependence: TypeAlias = tuple[np.ndarray, int] | None


@runtime_checkable
class Folds(Protocol):
    """A scheme yields pairs of row numbers (train, held_out). They need not be a partition: nested folds overlap."""

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits: ...


def count_independent(position: np.ndarray | None, reach: int, n: int) -> int:
    """Smallest number of independent partners that any of n tuples has; tuples within the reach depend on each other."""
    if position is None:
        return n - 1
    ordered = np.sort(position)
    near = np.searchsorted(ordered, ordered + reach, side="right")
    near -= np.searchsorted(ordered, ordered - reach, side="left")
    return n - int(near.max())


def dependence_of(scheme: Any, n_points: int, groups: Groups) -> Dependence:
    """Which points depend on each other; None unless the scheme states it."""
    return scheme.dependence(n_points, groups) if hasattr(scheme, "dependence") else None


def _splits(fold: Int[np.ndarray, " n"], n_folds: int) -> Splits:
    """The splits in which each point is held out by the fold of this number."""
    return ((np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(n_folds))


def distinct_rows(points: np.ndarray) -> Int[np.ndarray, " n"]:
    """The number of the distinct row that each row equals, in the order of first appearance.

    Without repeated rows the numbers are 0, 1, 2, ..., so that a permutation of them is a permutation of the rows.
    """
    found: dict[bytes, int] = {}
    # Digests, not the rows themselves, which can be large fields. Adding zero makes both signs of zero equal.
    digests = (blake2b(row + 0.0, digest_size=16).digest() for row in points)
    return np.array([found.setdefault(d, len(found)) for d in digests])


def check_fold_count(scheme: str, n_folds: Any, n_things: int, things: str) -> None:
    """Raise unless things can be divided into this number of folds."""
    check_integer(n_folds, f"{scheme}.n_folds", 1)
    if not 2 <= n_folds <= n_things:
        # Random folds need the fewest points of all families; nested folds leave one point in.
        nested = scheme == "NestedFolds"
        alone = f"{'RandomFolds' if nested else scheme}({min(5, n_things + nested)})"
        usable = f"choose n_folds between 2 and {n_things}, or one family alone, folds={alone}"
        raise ValueError(
            f"{scheme}(n_folds={n_folds}), but there are {n_things} {things} to divide; "
            f"{usable if n_things > 1 else 'give more data'}."
        )


@dataclass(frozen=True)
class RandomFolds:
    """A random partition, which imitates queries inside the data: displacements are small.

    Rows with equal inputs are held out together, so that a repeated measurement never supports its own copies.

    Attributes:
        n_folds: number of folds.
        random_state: seed of the partition.

    Example:
        >>> [len(held_out) for _, held_out in RandomFolds(3).split(np.arange(9)[:, None])]
        [3, 3, 3]
    """

    n_folds: int = 5
    random_state: int = 0

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        del y, groups
        check_integer(self.random_state, "RandomFolds.random_state")
        distinct = distinct_rows(points)
        n_distinct = int(distinct.max()) + 1
        check_fold_count("RandomFolds", self.n_folds, n_distinct, "distinct points")
        order = np.random.default_rng(self.random_state).permutation(n_distinct)
        fold = np.empty(n_distinct, dtype=int)
        fold[order] = np.sort(np.arange(n_distinct) % self.n_folds)  # as numpy.array_split
        yield from _splits(fold[distinct], self.n_folds)


@dataclass(frozen=True)
class ClusterFolds:
    """The paper's pseudo-extrapolation: each fold holds out one K-means cluster, with all rows of equal inputs.

    Attributes:
        n_folds: number of clusters.
        random_state: seed of K-means.
    """

    n_folds: int = 5
    random_state: int = 0

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        # Here, because it takes a third of a second to import.
        from sklearn.cluster import KMeans

        del y, groups
        check_integer(self.random_state, "ClusterFolds.random_state")
        check_fold_count("ClusterFolds", self.n_folds, len(points), "points")
        # K-means warns of too few distinct points; they raise below.
        with warnings.catch_warnings(action="ignore"), few_threads(points.size):
            kmeans = KMeans(self.n_folds, n_init=4, random_state=self.random_state)
            clusters = kmeans.fit_predict(points)
        check_fold_count("ClusterFolds", self.n_folds, len(np.unique(clusters)), "distinct points")
        # Rounding must not separate rows with equal inputs.
        distinct = distinct_rows(points)
        first = np.unique(distinct, return_index=True)[1]
        yield from _splits(clusters[first][distinct], self.n_folds)


@dataclass(frozen=True)
class TemporalFolds:
    """Blocks of consecutive rows, for time series.

    The rows must be in the order of time. If samples are windows that overlap in time, choose the gap so that two windows
    farther apart than the gap have no state in common; otherwise the fold surrogate has seen parts of the held-out outputs.

    Attributes:
        n_folds: number of blocks.
        gap: number of rows before and after a held-out block that are not used for training either.
    """

    n_folds: int = 5
    gap: int = 0

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        del y, groups
        check_fold_count("TemporalFolds", self.n_folds, len(points), "points")
        check_integer(self.gap, "TemporalFolds.gap", 0)
        rows = np.arange(len(points))
        for held_out in np.array_split(rows, self.n_folds):
            before = rows < held_out[0] - self.gap
            yield rows[before | (rows > held_out[-1] + self.gap)], held_out

    def dependence(self, n_points: int, groups: Groups = None) -> Dependence:
        del groups
        return (np.arange(n_points), self.gap) if self.gap else None


@dataclass(frozen=True)
class GroupFolds:
    """Groups of points that are held out together; pass the labels as ``GeoQ.fit(x, y, groups=labels)``.

    Attributes:
        n_folds: number of folds; the largest groups are distributed first, each to the fold with the fewest points. None
            holds out one group at a time.
    """

    n_folds: int | None = None

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        del y
        codes = self._codes(groups)
        sizes = np.bincount(codes)
        n_folds = len(sizes) if self.n_folds is None else self.n_folds
        check_fold_count("GroupFolds", n_folds, len(sizes), "groups")
        fold_of_group, load = np.empty_like(sizes), np.zeros(n_folds, dtype=int)
        for group in np.argsort(-sizes, kind="stable"):
            fold_of_group[group] = load.argmin()
            load[fold_of_group[group]] += sizes[group]
        yield from _splits(fold_of_group[codes], n_folds)

    def dependence(self, n_points: int, groups: Groups = None) -> Dependence:
        return self._codes(groups), 0

    @staticmethod
    def _codes(groups: Groups) -> np.ndarray:
        if groups is None:
            raise ValueError(
                "GroupFolds needs the group of each point; call fit(x, y, groups=labels)."
            )
        return np.unique(groups, return_inverse=True)[1]


@dataclass(frozen=True)
class NestedFolds:
    """Subsets that shrink towards the centre of the data; each fold holds out the points outside a subset.

    A point far from the centre is held out by many folds, at displacements from small to large. Rows with equal inputs are held
    out together.

    Attributes:
        n_folds: number of subsets.
        smallest: the fraction of the points in the smallest subset; None means 1 / (n_folds + 1). The sizes decrease evenly.
    """

    n_folds: int = 10
    smallest: float | None = None

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        del y, groups
        # Copies at the centre count once; otherwise the smallest subsets could hold nothing else.
        distinct = distinct_rows(points)
        places = points[np.unique(distinct, return_index=True)[1]]
        check_fold_count("NestedFolds", self.n_folds, len(places) - 1, "proper nested subsets")
        distance = np.linalg.norm(places - points.mean(axis=0), axis=1)
        centre_first = np.argsort(distance, kind="stable")
        smallest = 1 / (self.n_folds + 1) if self.smallest is None else self.smallest
        if not is_number(smallest) or not 0 < smallest < 1:
            raise ValueError(
                f"NestedFolds(smallest={smallest!r}): smallest is a fraction of the points, strictly between 0 and 1."
            )
        for stage in range(1, self.n_folds + 1):
            n_kept = round(len(places) * (1 - (1 - smallest) * stage / self.n_folds))
            held_out = ~np.isin(distinct, centre_first[:n_kept])
            yield np.flatnonzero(~held_out), np.flatnonzero(held_out)


@dataclass(frozen=True, init=False, repr=False)
class CombinedFolds:
    """The folds of several schemes, one after the other, so that displacements range from small to large.

    With an extrapolation scheme alone, no calibration tuple resembles a query inside the data; add random folds.

    Args:
        schemes: the fold schemes; each is one family of folds.

    Example:
        >>> CombinedFolds(RandomFolds(5), ClusterFolds(3))
        CombinedFolds(RandomFolds(n_folds=5, random_state=0), ClusterFolds(n_folds=3, random_state=0))
    """

    schemes: tuple[Folds, ...]

    def __init__(self, *schemes: Folds) -> None:
        if not schemes:
            raise ValueError(
                "CombinedFolds() needs at least one scheme; pass for example RandomFolds(5)."
            )
        for scheme in schemes:
            check_object(scheme, Folds, "folds", "RandomFolds(5)")
        object.__setattr__(self, "schemes", schemes)

    def __repr__(self) -> str:
        return f"CombinedFolds({', '.join(map(repr, self.schemes))})"

    def split(self, points: Points, y: None = None, groups: Groups = None) -> Splits:
        for scheme in self.schemes:
            yield from scheme.split(points, y, groups)

    def dependence(self, n_points: int, groups: Groups = None) -> Dependence:
        known = [dependence_of(scheme, n_points, groups) for scheme in self.schemes]
        stated = [dependence for dependence in known if dependence is not None]
        if len({(position.tobytes(), reach) for position, reach in stated}) > 1:
            raise ValueError(
                f"{self!r} has {len(stated)} schemes that define different dependences between points; keep one grouping or one gap."
            )
        return stated[0] if stated else None


def default_folds(interpolating: Folds | None = None, *, n_trainings: int = 15) -> CombinedFolds:
    """The default folds: three families together, 15 folds in total; 10 or 8 if a training takes long.

    Args:
        interpolating: the family whose held-out points are nearest to the other points. None means ``RandomFolds(5)``; for
            a trajectory pass ``TemporalFolds(5, gap)``. If samples are windows with common outputs, use ``TemporalFolds``
            alone, because the other two families would train on the outputs of held-out windows.
        n_trainings: 15, 10 (three clusters, two nested folds) or 8 (three nested folds), with five folds of the first family.

    Returns:
        A scheme for the argument ``folds`` of ``GeoQ``.

    Example:
        >>> len(default_folds(n_trainings=8).schemes)
        2
    """
    extrapolating: dict[int, tuple[Folds, ...]] = {
        15: (ClusterFolds(5), NestedFolds(5)),
        10: (ClusterFolds(3), NestedFolds(2, smallest=1 / 6)),
        8: (NestedFolds(3, smallest=1 / 6),),
    }
    if n_trainings not in extrapolating:
        raise ValueError(
            f"n_trainings={n_trainings!r}, but 15, 10 or 8 trainings were measured; choose one of them, or RandomFolds(5) for queries inside "
            "the data."
        )
    first = RandomFolds(5) if interpolating is None else interpolating
    return CombinedFolds(first, *extrapolating[n_trainings])


def warn_of_alike(outputs: np.ndarray, folds: Any) -> None:
    """Warn if random folds hold out samples whose neighbours in time are alike; the samples are in the order of time."""
    schemes = getattr(folds, "schemes", (folds,))
    if not any(isinstance(scheme, RandomFolds) for scheme in schemes):
        return
    # Some cells of large fields are enough for a correlation.
    cells = outputs.reshape(len(outputs), -1)
    values = cells[:, :: 1 + cells.shape[1] // MOST_CELLS].astype(float)
    values = values[:, np.isfinite(values).all(axis=0)]
    values = values[:, np.ptp(values, axis=0) > 0]
    if not values.size:
        return
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    correlation = [(values[gap:] * values[:-gap]).mean() for gap in range(1, 2 + len(values) // 10)]
    gap = next((i for i, own in enumerate(correlation) if own < ALIKE), len(correlation))
    if gap:
        proposal = f"TemporalFolds(5, gap={gap + 1})"
        warn(
            f"folds={shortened(folds)} holds out random dates, but successive samples are alike (correlation {correlation[0]:.2g}), so "
            "fold surrogates have nearly seen the held-out samples, and the bounds are too small for later dates; pass "
            f"folds={proposal if len(schemes) == 1 else f'default_folds({proposal})'}, or groups."
        )
