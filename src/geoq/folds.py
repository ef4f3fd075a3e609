"""Fold schemes: which points a fold surrogate may not see (line 5).

A scheme yields pairs of row numbers ``(train, held_out)`` and promises no more, so scikit-learn's splitters serve
as they are. Random folds imitate interpolation; cluster, nested, group and temporal folds imitate extrapolation.
Schemes see the normalised inputs nu(x), one flattened row per point.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from geoq.surrogate import few_threads

Split: TypeAlias = tuple[np.ndarray, np.ndarray]


@runtime_checkable
class Folds(Protocol):
    """Row pairs (train, held_out); not always a partition: nested folds overlap."""

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterable[Split]: ...


@dataclass(frozen=True)
class Dependence:
    """Points i and j depend on each other where ``|position_i - position_j| <= reach``.

    A position is a group's number (reach 0) or a place in time (reach = the gap that makes two points independent).
    """

    position: Int[np.ndarray, " n_points"]
    reach: int


@runtime_checkable
class DependentFolds(Protocol):
    """A scheme that knows which points depend on each other; the safe threshold then leaves all of them out."""

    def dependence(
        self, n_points: int, groups: np.ndarray | None = None
    ) -> Dependence | None: ...


def _complements(held_out: Iterable[np.ndarray], n_points: int) -> Iterator[Split]:
    for rows in held_out:
        yield np.setdiff1d(np.arange(n_points), rows), rows


def _check_fold_count(scheme: str, n_folds: int, n_things: int, things: str) -> None:
    if not 2 <= n_folds <= n_things:
        way_out = (
            f"choose n_folds between 2 and {n_things}, as in folds={scheme}(n_folds={n_things})"
            if n_things > 1
            else "give more data"
        )
        raise ValueError(
            f"{scheme}(n_folds={n_folds}), but there are {n_things} {things} to divide; {way_out}."
        )


def _check_scheme(scheme: object) -> None:
    if isinstance(scheme, type):
        raise TypeError(
            f"folds is the class {scheme.__name__}, but a scheme is an object; pass {scheme.__name__}(5), for example."
        )
    if not isinstance(scheme, Folds):
        raise TypeError(
            f"folds={scheme!r}, but a fold scheme has a method split; pass RandomFolds(5), for example."
        )


@dataclass(frozen=True)
class RandomFolds:
    """A random partition: small displacements, as queries inside the data have them."""

    n_folds: int = 5
    random_state: int = 0

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterator[Split]:
        del y, groups
        _check_fold_count("RandomFolds", self.n_folds, len(points), "points")
        order = np.random.default_rng(self.random_state).permutation(len(points))
        yield from _complements(
            map(np.sort, np.array_split(order, self.n_folds)), len(points)
        )


@dataclass(frozen=True)
class ClusterFolds:
    """One K-means cluster held out at a time: the paper's pseudo-extrapolation."""

    n_folds: int = 5
    random_state: int = 0

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterator[Split]:
        from sklearn.cluster import (
            KMeans,
        )  # here, because it takes a third of a second to import

        del y, groups
        _check_fold_count("ClusterFolds", self.n_folds, len(points), "points")
        # Too few distinct points make K-means warn; they are refused below, with the way out.
        with warnings.catch_warnings(action="ignore"), few_threads(points.size):
            kmeans = KMeans(self.n_folds, n_init=4, random_state=self.random_state)
            clusters = kmeans.fit_predict(points)
        _check_fold_count(
            "ClusterFolds", self.n_folds, len(np.unique(clusters)), "distinct points"
        )
        yield from _complements(
            (np.flatnonzero(clusters == c) for c in range(self.n_folds)), len(points)
        )


@dataclass(frozen=True)
class TemporalFolds:
    """Blocks of consecutive rows, with ``gap`` rows on either side left out of the training rows.

    Rows must be in the order of time. For windows that overlap in time choose the gap so that two windows a gap
    apart share no state: with shorter gaps the fold surrogate has seen what it is asked for.
    """

    n_folds: int = 5
    gap: int = 0

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterator[Split]:
        del y, groups
        _check_fold_count("TemporalFolds", self.n_folds, len(points), "points")
        if self.gap < 0:
            raise ValueError(
                f"TemporalFolds(gap={self.gap}), but a gap is a number of rows; choose 0 or more."
            )
        rows = np.arange(len(points))
        for held_out in np.array_split(rows, self.n_folds):
            before, after = (
                rows < held_out[0] - self.gap,
                rows > held_out[-1] + self.gap,
            )
            yield rows[before | after], held_out

    def dependence(
        self, n_points: int, groups: np.ndarray | None = None
    ) -> Dependence | None:
        del groups
        return Dependence(np.arange(n_points), self.gap) if self.gap else None


@dataclass(frozen=True)
class GroupFolds:
    """Whole groups held out together; give the groups' labels to ``GeoQ.fit(x, y, groups=labels)``.

    ``n_folds=None`` holds out one group at a time; otherwise groups are dealt to folds, the largest first, each to
    the fold with the fewest points.
    """

    n_folds: int | None = None

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterator[Split]:
        del y
        codes = self._codes(len(points), groups)
        sizes = np.bincount(codes)
        n_folds = len(sizes) if self.n_folds is None else self.n_folds
        _check_fold_count("GroupFolds", n_folds, len(sizes), "groups")
        fold_of_group, load = (
            np.empty(len(sizes), dtype=int),
            np.zeros(n_folds, dtype=int),
        )
        for group in np.argsort(-sizes, kind="stable"):
            fold_of_group[group] = load.argmin()
            load[fold_of_group[group]] += sizes[group]
        folds = fold_of_group[codes]
        yield from _complements(
            (np.flatnonzero(folds == f) for f in range(n_folds)), len(points)
        )

    def dependence(
        self, n_points: int, groups: np.ndarray | None = None
    ) -> Dependence | None:
        return Dependence(self._codes(n_points, groups), reach=0)

    @staticmethod
    def _codes(n_points: int, groups: np.ndarray | None) -> np.ndarray:
        if groups is None:
            raise ValueError(
                "GroupFolds needs each point's group; call fit(x, y, groups=labels)."
            )
        if len(groups) != n_points:
            raise ValueError(
                f"groups has {len(groups)} labels for {n_points} points; give one label per point."
            )
        return np.unique(groups, return_inverse=True)[1]


@dataclass(frozen=True)
class NestedFolds:
    """Subsets that shrink towards the centre of the data; what lies outside a subset is held out.

    Shares shrink evenly from stage to stage down to ``smallest``, 1 / (n_folds + 1) unless it is given: a point far
    from the centre is held out at many stages, at displacements from small to large.
    """

    n_folds: int = 10
    smallest: float | None = None

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterator[Split]:
        del y, groups
        _check_fold_count(
            "NestedFolds", self.n_folds, len(points) - 1, "proper nested subsets"
        )
        centre_first = np.argsort(
            np.linalg.norm(points - points.mean(axis=0), axis=1), kind="stable"
        )
        smallest = 1 / (self.n_folds + 1) if self.smallest is None else self.smallest
        if not 0 < smallest < 1:
            raise ValueError(
                f"NestedFolds(smallest={smallest}), but a subset is a share of the points; choose between 0 and 1."
            )
        for stage in range(1, self.n_folds + 1):
            n_kept = round(len(points) * (1 - (1 - smallest) * stage / self.n_folds))
            yield np.sort(centre_first[:n_kept]), np.sort(centre_first[n_kept:])


class CombinedFolds:
    """The folds of several schemes one after the other, so that displacements span small to large.

    An extrapolation scheme alone leaves the interior of the data outside its safe region, because no calibration
    tuple looks like an interior query; add random folds to cure that.
    """

    def __init__(self, *schemes: Folds) -> None:
        if not schemes:
            raise ValueError(
                "CombinedFolds() got no scheme; pass at least one, for example RandomFolds(5)."
            )
        for scheme in schemes:
            _check_scheme(scheme)
        self.schemes = schemes

    def __repr__(self) -> str:
        return f"CombinedFolds({', '.join(map(repr, self.schemes))})"

    def split(
        self,
        points: Float[np.ndarray, " n d"],
        y: None = None,
        groups: np.ndarray | None = None,
    ) -> Iterator[Split]:
        for scheme in self.schemes:
            yield from scheme.split(points, y, groups)

    def dependence(
        self, n_points: int, groups: np.ndarray | None = None
    ) -> Dependence | None:
        known = [
            s.dependence(n_points, groups)
            for s in self.schemes
            if isinstance(s, DependentFolds)
        ]
        stated = [d for d in known if d is not None]
        if len({(d.position.tobytes(), d.reach) for d in stated}) > 1:
            raise ValueError(
                f"{self!r} states {len(stated)} different dependences between points; keep one grouping or one gap."
            )
        return stated[0] if stated else None


def default_folds(interpolating: Folds | None = None) -> CombinedFolds:
    """Three families together: no single one serves every problem, and the union is never the worst.

    Args:
        interpolating: the family whose held-out points stay nearest to the others. None means ``RandomFolds(5)``; for a
            trajectory pass ``TemporalFolds(5, gap)``. Windows that share targets leak through the other two families:
            for them use ``TemporalFolds`` alone.
    """
    return CombinedFolds(
        RandomFolds(5) if interpolating is None else interpolating,
        ClusterFolds(5),
        NestedFolds(5),
    )


@dataclass(frozen=True)
class ForgottenFolds:
    """Stands in an estimator from a file for the scheme that it was calibrated with, of which only the name is known."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterable[Split]:
        del points, y, groups
        raise ValueError(
            f"folds={self.name}, but of an estimator from a file only the name of its folds is known; calibrate a new "
            "GeoQ, or give this one folds and a train_surrogate by set_params."
        )


@dataclass(frozen=True)
class FoldPlan:
    """Folds as drawn for one set of points: the rows of each, and what is known about them.

    ``family`` numbers the scheme that a fold comes from; schemes that were not combined are family 0. A plan is a
    scheme as well, which yields the folds it holds whatever it is asked.
    """

    splits: tuple[Split, ...]
    family: tuple[int, ...]
    dependence: Dependence | None
    n_points: int
    name: str = "FoldPlan"

    def __repr__(self) -> str:
        return self.name

    @staticmethod
    def draw(
        folds: Any, points: Float[np.ndarray, " n d"], groups: np.ndarray | None
    ) -> "FoldPlan":
        """Ask the scheme for its folds, and refuse those that keep nothing in or nothing out."""
        if isinstance(folds, FoldPlan):
            if folds.n_points != len(points):
                raise ValueError(
                    f"folds were drawn for {folds.n_points} points, but there are {len(points)}; draw them anew."
                )
            return folds
        _check_scheme(folds)
        schemes = folds.schemes if isinstance(folds, CombinedFolds) else (folds,)
        drawn = [
            (family, (np.asarray(train), np.asarray(held_out)))
            for family, scheme in enumerate(schemes)
            for train, held_out in scheme.split(points, None, groups)
        ]
        plan = FoldPlan(
            splits=tuple(split for _, split in drawn),
            family=tuple(family for family, _ in drawn),
            dependence=folds.dependence(len(points), groups)
            if isinstance(folds, DependentFolds)
            else None,
            n_points=len(points),
            name=repr(folds),
        )
        plan._check_rows()
        return plan

    def split(
        self, points: np.ndarray, y: None = None, groups: np.ndarray | None = None
    ) -> Iterable[Split]:
        del points, y, groups
        return self.splits

    @property
    def point(self) -> Int[np.ndarray, " n_tuples"]:
        """Row of the data that each calibration tuple comes from."""
        return np.concatenate([held_out for _, held_out in self.splits])

    def per_tuple(self, numbers: Iterable[int]) -> Int[np.ndarray, " n_tuples"]:
        """One number per fold, repeated for each tuple of the fold."""
        return np.repeat(
            np.array([*numbers]), [len(held_out) for _, held_out in self.splits]
        )

    @property
    def fewest_left_in(self) -> int:
        """Points that the smallest fold trains on."""
        return min(len(train) for train, _ in self.splits)

    @property
    def n_independent(self) -> int:
        """Calibration tuples that are independent of the tuple that has the fewest of them."""
        if self.dependence is None:
            return len(self.point) - 1
        position, reach = (
            np.sort(self.dependence.position[self.point]),
            self.dependence.reach,
        )
        near = np.searchsorted(position, position + reach, side="right")
        near -= np.searchsorted(position, position - reach, side="left")
        return len(position) - int(near.max())

    @property
    def n_units(self) -> int:
        """Points, groups or stretches of time that are independent of each other."""
        if self.dependence is None:
            return self.n_points
        stretch = self.dependence.position // (self.dependence.reach + 1)
        return len(np.unique(stretch))

    def check(self, *, n_anchors: int, n_support: int, n_safe: int) -> None:
        """Refuse more neighbours than the folds leave, before anything is trained on them."""
        for fold, (train, _) in enumerate(self.splits, start=1):
            for name, needed, purpose in (
                ("n_anchors", n_anchors, "anchor to"),
                ("n_support", n_support, "measure support by"),
            ):
                if len(train) < needed:
                    raise ValueError(
                        f"{name}={needed}, but {self._name(fold)} leaves only {len(train)} points to {purpose}; "
                        f"lower {name}, give more data, or choose folds that leave more in."
                    )
        if n_safe > self.n_independent:
            raise ValueError(
                f"n_safe={n_safe}, but a calibration point has only {self.n_independent} others that are independent "
                "of it; lower n_safe or the gap, or give more data."
            )

    def _check_rows(self) -> None:
        if not self.splits:
            raise ValueError(
                "folds.split yielded no fold; choose a scheme with at least one."
            )
        for fold, (train, held_out) in enumerate(self.splits, start=1):
            for name, rows in (("training", train), ("held-out", held_out)):
                if not len(rows):
                    raise ValueError(
                        f"{self._name(fold)} has no {name} points of the {self.n_points} given; "
                        "lower n_folds or gap, or give more data."
                    )
                outside = rows[(rows < 0) | (rows >= self.n_points)]
                if outside.size:
                    raise ValueError(
                        f"{self._name(fold)} names row {outside[0]}, but there are {self.n_points} rows; "
                        "correct the folds."
                    )
            if np.intersect1d(train, held_out).size:
                raise ValueError(
                    f"{self._name(fold)} trains on points it holds out; folds must keep the two apart."
                )

    def _name(self, fold: int) -> str:
        return f"fold {fold} of {len(self.splits)}"
