"""The folds that a scheme has drawn for one set of points (line 5)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import flat
from geoq.checks import add_note_on_error, check_object, shortened, warn
from geoq.core.folds import (
    ClusterFolds,
    CombinedFolds,
    Folds,
    Groups,
    NestedFolds,
    Points,
    RandomFolds,
    Split,
    Splits,
    count_independent,
    dependence_of,
)

# Folds that are trained on copies of more than this fraction of their held-out rows separate them; single rows can recur by chance.
COPIED = 0.3


@dataclass(frozen=True)
class FoldPlan:
    """The folds that a scheme has drawn for one set of points.

    ``splits`` has the training rows and the held-out rows of each fold, ``family`` the number of its scheme. Points whose
    ``position`` differs by at most ``reach`` depend on each other; all are independent without positions.
    """

    splits: tuple[Split, ...]
    family: tuple[int, ...]
    n_points: int
    name: str = "FoldPlan"
    family_names: tuple[str, ...] = ()
    position: Int[np.ndarray, " n_points"] | None = None
    reach: int = 0

    def __repr__(self) -> str:
        return self.name

    @staticmethod
    def draw(
        folds: Any,
        points: Float[np.ndarray, " n d"],
        groups: Groups,
        queries: Points | None = None,
        *,
        whole: bool = False,
    ) -> "FoldPlan":
        """Draw the folds of a scheme, of whole groups if wanted; raises for folds that train on nothing or hold out nothing."""
        check_object(folds, Folds, "folds", "RandomFolds(5)")
        schemes = folds.schemes if isinstance(folds, CombinedFolds) else (folds,)
        splits, family = [], []
        for number, scheme in enumerate(schemes):
            drawn = (
                _of_whole_groups(scheme, points, groups, queries)
                if whole and groups is not None
                else _split(scheme, points, groups, queries)
            )
            own = [_rows_of(pair, f"fold {n} of {scheme!r}") for n, pair in enumerate(drawn, 1)]
            splits += own
            family += [number] * len(own)
        position, reach = dependence_of(folds, len(points), groups) or (None, 0)
        known = [repr(scheme).partition("(")[0] for scheme in schemes]
        names = (n if known.count(n) == 1 else f"{n} {place}" for place, n in enumerate(known))
        about = len(points), repr(folds), tuple(names), position, reach
        plan = FoldPlan(tuple(splits), tuple(family), *about)
        plan._check_rows()
        return plan

    @property
    def point(self) -> Int[np.ndarray, " n_tuples"]:
        """The row of the data that each calibration tuple comes from."""
        return np.concatenate([held_out for _, held_out in self.splits])

    def per_tuple(self, numbers: Iterable[int]) -> Int[np.ndarray, " n_tuples"]:
        """One number per fold, repeated for each tuple of the fold."""
        n_tuples = [len(held_out) for _, held_out in self.splits]
        return np.repeat(np.array([*numbers]), n_tuples)

    @property
    def fewest_left_in(self) -> int:
        """The number of points that the smallest fold trains on."""
        return min(len(train) for train, _ in self.splits)

    @property
    def identity(self) -> str:
        """An identifier of the folds: their scheme, and a hash of their training and held-out rows."""
        digest = sha256(str(len(self.splits)).encode())
        for rows in self.splits:
            for part in rows:
                digest.update(np.asarray(part, dtype=np.int64).tobytes() + b"|")
        return f"{self.name} with rows {digest.hexdigest()[:16]}"

    @property
    def n_independent(self) -> int:
        """Smallest number of independent partners that any calibration tuple has."""
        of_each = None if self.position is None else self.position[self.point]
        return count_independent(of_each, self.reach, len(self.point))

    @property
    def n_groups(self) -> int:
        """The number of points, groups or stretches of time that are independent of each other."""
        if self.position is None:
            return self.n_points
        return len(np.unique(self.position // (self.reach + 1)))

    def check(self, *, n_anchors: int, n_support: int) -> None:
        """Raise for more neighbours than the folds leave, before anything is trained."""
        for name, needed in (("n_anchors", n_anchors), ("n_support", n_support)):
            if self.fewest_left_in < needed:
                raise ValueError(
                    f"{name}={needed}, but a fold of {self.name} leaves only {self.fewest_left_in} points; lower {name}, give more "
                    "data, or choose folds that leave more points."
                )

    def without_copies(self, place: Int[np.ndarray, " n"]) -> "FoldPlan":
        """The same folds; none is trained on a row at the place of a held-out row."""
        splits = tuple((t[~np.isin(place[t], place[out])], out) for t, out in self.splits)
        plan = replace(self, splits=splits)
        plan._check_rows()
        return plan

    def warn_of_copies(self, place: Int[np.ndarray, " n"]) -> None:
        """Warn if folds are trained on copies of their held-out rows, which are rows at the same place."""
        trained_on = [np.isin(place[held_out], place[train]) for train, held_out in self.splits]
        share = np.concatenate(trained_on).mean()
        if share > COPIED:
            warn(
                f"folds={self.name} trains on copies of {100 * share:.3g} % of its held-out rows, equal in x and y up to rounding, so "
                "held-out errors and bounds are too small; drop the copies, pass groups, or pass folds that hold them out together, "
                "such as RandomFolds(5)."
            )

    def check_same(self, again: "FoldPlan") -> None:
        """Raise if the scheme draws other folds than these at another call: given surrogates have other held-out rows then."""
        if again.identity != self.identity:
            raise ValueError(
                f"folds={self.name} yields other rows at each call, so the fold surrogates that were trained elsewhere have seen "
                "their held-out rows; fix its seed, for example KFold(5, shuffle=True, random_state=0), or keep the splits in a "
                "list, and train on these."
            )

    def _check_rows(self) -> None:
        if not self.splits:
            raise ValueError("folds.split yielded no fold; choose a scheme with at least one fold.")
        for fold, (train, held_out) in enumerate(self.splits, start=1):
            name = f"fold {fold} of {len(self.splits)}"
            for kind, rows in (("training", train), ("held-out", held_out)):
                if not len(rows):
                    raise ValueError(
                        f"{name} has no {kind} points of the {self.n_points} given; lower n_folds or gap, or give more data."
                    )
                outside = rows[(rows < 0) | (rows >= self.n_points)]
                if outside.size:
                    raise ValueError(
                        f"{name} contains row {outside[0]}, but there are {self.n_points} rows; correct the folds."
                    )
            if np.intersect1d(train, held_out).size:
                raise ValueError(
                    f"{name} trains on points that it holds out; training rows and held-out rows must be disjoint."
                )


def draw_folds(
    folds: Any, points: Float[np.ndarray, " n d"], groups: Any = None, queries: Any = None
) -> FoldPlan:
    """Draw the folds of a scheme; if there are groups, every fold holds out whole groups."""
    if groups is None:
        return FoldPlan.draw(folds, points, None, queries)
    labels, codes = group_codes(groups, len(points))
    plan = FoldPlan.draw(folds, points, codes, queries, whole=True)
    for fold, (train, held_out) in enumerate(plan.splits, start=1):
        both = np.intersect1d(codes[train], codes[held_out])
        if both.size:
            raise ValueError(
                f"groups was given, but fold {fold} of {len(plan.splits)} of folds={folds!r} separates the points of group "
                f"{labels[both[0]]!s}; choose folds that hold out whole groups, for example GroupFolds(5) or default_folds(), or "
                "leave groups out."
            )
    return replace(plan, position=codes, reach=0)


def _rows_of(pair: Any, name: str) -> Split:
    """The training rows and held-out rows of a fold; raises unless they are two lists of row numbers."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"{name} is {shortened(pair)}, but a fold is a pair; yield (training rows, held-out rows)."
        )
    train, held_out = (np.asarray(part) for part in pair)
    for what, rows in (("training", train), ("held-out", held_out)):
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(
                f"the {what} rows of {name} have dtype {rows.dtype} and shape {rows.shape}, but a list of row numbers is "
                "needed; pass integers, such as numpy.flatnonzero(mask)."
            )
    return train, held_out


def group_codes(groups: Any, n_points: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct labels, and the number of the label of each point; raises unless each point has a label."""
    labels = np.asarray(groups)
    if labels.shape != (n_points,):
        raise ValueError(
            f"groups has shape {labels.shape} for {n_points} points; pass one label per point."
        )
    missing = np.array([label is None or label != label for label in labels])  # noqa: PLR0124 (nan differs from itself)
    if missing.any():
        raise ValueError(
            f"groups[{int(missing.argmax())}] is {labels[missing.argmax()]} ({int(missing.sum())} of {n_points} labels are "
            "missing); give every point a label, or remove these points."
        )
    try:
        return np.unique(labels, return_inverse=True)
    except TypeError as exc:
        raise TypeError(
            f"groups has labels of different types, which cannot be ordered ({exc}); convert them to strings."
        ) from exc


def _split(scheme: Any, points: Points, groups: Groups, queries: Points | None) -> Splits:
    """The folds of a scheme, which receives the planned queries if its ``split`` takes them."""
    if queries is None or "queries" not in signature(scheme.split).parameters:
        return scheme.split(points, None, groups)
    return scheme.split(points, None, groups, queries=flat(queries).astype(float))


def _of_whole_groups(
    scheme: Folds, points: Points, codes: np.ndarray, queries: Points | None
) -> Splits:
    """The folds of a scheme; one that receives no labels divides the groups, each at the mean of its points."""
    if isinstance(scheme, CombinedFolds):
        for own in scheme.schemes:
            yield from _of_whole_groups(own, points, codes, queries)
        return
    if not isinstance(scheme, RandomFolds | ClusterFolds | NestedFolds):
        yield from _split(scheme, points, codes, queries)
        return
    sizes = np.bincount(codes)
    means = np.zeros((len(sizes), points.shape[1]))
    np.add.at(means, codes, points)
    note = f"groups was given, so the folds divide its {len(sizes)} groups and not the points"
    with add_note_on_error(note):
        for of_groups in scheme.split(means / sizes[:, None]):
            train, held_out = (np.flatnonzero(np.isin(codes, part)) for part in of_groups)
            yield train, held_out
