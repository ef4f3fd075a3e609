"""Calibration tuples: errors at points that the surrogate of a fold has not seen, and their features (lines 6-11)."""

import warnings
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from geoq.arrays import chunks, flat, permutation
from geoq.core.folds import count_independent, distinct_rows
from geoq.core.geometry import Features, Relation, Space, anchor_mean, displacement
from geoq.data.companion import Companion
from geoq.data.coordinates import Coordinates, spread
from geoq.data.domain import Layout
from geoq.data.metric import FittedMetric
from geoq.data.process import Opinion, Process

# The typical error is computed from at most this many tuples.
N_TYPICAL = 128


@dataclass(frozen=True)
class Points:
    """The points of the data, as bounds and safe regions may use them when they are fitted.

    Attributes:
        space: all points in the coordinates of the geometry.
        outputs: the reference outputs; nan where they are absent.
        error: the observed errors of the deployed surrogate; an absent cell has the mean error of the cell.
        splits: the training rows and the held-out rows of each fold.
        coordinates: T.
        metric: the metric of the geometry; None for a representation of the user.
        layout: whether the rows are rows of a table, or where their cells are.
        exact: the cells in which all errors are zero; None if there are none.
        process: a second model of the points, a Gaussian process or a companion; None if the bound does not use one.
        user: the coordinates of the features of the user; None if the bound does not use them.
        user_loss: the held-out loss of the bound with them relative to the bound without, amid the data and outside.
    """

    space: Space
    outputs: Float[np.ndarray, " n *output"]
    error: Float[np.ndarray, " n *field"]
    splits: tuple[tuple[np.ndarray, np.ndarray], ...]
    coordinates: Coordinates
    metric: FittedMetric | None
    layout: Layout
    exact: Bool[np.ndarray, " *field"] | None = None
    process: Process | Companion | None = None
    user: Coordinates | None = None
    user_loss: tuple[float, float] | None = None

    @property
    def inputs(self) -> Float[np.ndarray, " n *coordinates"]:
        """The coordinates T(x) of all points."""
        return self.space.inputs


@dataclass(frozen=True)
class Tuples:
    r"""Calibration tuples :math:`(\psi_i, r_i^{cf})` of all folds; nested folds give several tuples per point.

    Without retraining the tuples of one point share its fields, so errors and predictions are stored once, and ``row`` has the
    place of each tuple. An error of nan does not count: its cell is masked, absent or exact.

    Attributes:
        relation: the held-out points related to the points that their fold left in, by the rows of the data.
        point: the row of the data that a tuple comes from.
        fold: the fold that held the point out, counted from 0.
        family: the fold scheme that the fold belongs to.
        row: the row of the stored arrays of each tuple.
        errors: stored errors, made by the surrogate of the fold.
        anchor_errors: stored anchor errors; None if the deployed surrogate made them.
        predictions: stored predictions.
        points: the points that the tuples come from.
        position: for dependent points, the group or the time of the point. Two tuples depend on each other if their
            positions differ by at most ``reach``.
        reach: see ``position``.
        queries: the held-out points; None if they are points of the data. Along rollouts they are not.
        opinion: what the second model of the points that the fold left in predicts at each tuple; None without one.
        user: the features of the user at each tuple; None without them, or if they do not help.
    """

    relation: Relation
    point: Int[np.ndarray, " n"]
    fold: Int[np.ndarray, " n"]
    family: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    errors: Float[np.ndarray, " n_stored *field"]
    anchor_errors: Float[np.ndarray, " n_stored *field"] | None
    predictions: Float[np.ndarray, " n_stored *output"]
    points: Points
    position: Int[np.ndarray, " n"] | None = None
    reach: int = 0
    queries: Space | None = None
    opinion: Opinion | None = None
    user: Float[np.ndarray, " n k"] | None = None

    def __len__(self) -> int:
        return len(self.point)

    def __getitem__(self, rows: slice | np.ndarray) -> "Tuples":
        of_each = "relation point fold family row position queries opinion user"
        parts = {name: getattr(self, name) for name in of_each.split()}
        own = {name: part[rows] for name, part in parts.items() if part is not None}
        return replace(self, **own)

    def subsample(self, n_rows: int) -> "Tuples":
        """All tuples, or a random sample of ``n_rows`` of them if there are more."""
        if len(self) <= n_rows:
            return self
        return self[np.sort(permutation(len(self))[:n_rows])]

    @property
    def error(self) -> Float[np.ndarray, " n *field"]:
        """The held-out errors; nan does not count."""
        return self.errors[self.row]

    @property
    def field_shape(self) -> tuple[int, ...]:
        """The shape of the error of one tuple."""
        return self.errors.shape[1:]

    @property
    def n_numbers(self) -> int:
        """How many numbers the tuples have in all."""
        return len(self) * (self.points.space.inputs[:1].size + self.errors[:1].size)

    @property
    def features(self) -> Features:
        """The features of the held-out points relative to the points that their fold left in."""
        space, anchors = self.points.space, self.relation.anchors
        queries, own = (space, self.point) if self.queries is None else (self.queries, slice(None))
        stored = self.anchor_errors
        of_anchors = anchor_mean(anchors, self.points.error) if stored is None else stored[self.row]
        return Features(
            displacement(queries.z[own], anchors, space.z),
            self.relation.support_distance,
            of_anchors,
            self.predictions[self.row],
            queries.inputs[own],
            self.relation,
            self.opinion,
            user=self.user,
        )

    @property
    def increment(self) -> Float[np.ndarray, " n *field"]:
        r"""The part of the error that the anchors do not explain; nan where the error does not count.

        .. math:: r_i^{cf} = [e_i^{cf} - \overline e_{k_a, i}^{cf}]_+  (eq:anchor_increment)
        """
        excess: np.ndarray = (self.error - self.features.anchor_error).clip(min=0)
        return excess

    @property
    def weight(self) -> Float[np.ndarray, " n"]:
        """Weights of the tuples. They sum to 1, and every family of folds has the same total weight."""
        _, number, count = np.unique(self.family, return_inverse=True, return_counts=True)
        return 1 / (count[number] * len(count))

    @property
    def interpolating(self) -> Bool[np.ndarray, " n"]:
        """Mask of the family of folds with the smallest median support distance, normally the random folds."""
        distance, families = self.relation.support_distance, np.unique(self.family).tolist()
        nearest = min(families, key=lambda family: _lower_median(distance[self.family == family]))
        return np.asarray(self.family == nearest)

    @property
    def interpolating_folds(self) -> list[int]:
        """The folds of that family, in the order of their tuples."""
        return list(dict.fromkeys(self.fold[self.interpolating].tolist()))

    @property
    def group(self) -> Int[np.ndarray, " n"]:
        """The group of each tuple: tuples of one group come from one point, one group of points or one stretch of time.

        Neighbouring stretches of time touch, so a split by groups separates dependent times nearly, but not completely.
        """
        return self.point if self.position is None else self.position // (self.reach + 1)

    @property
    def n_independent(self) -> int:
        """Smallest number of independent partners that any tuple has."""
        return count_independent(self.position, self.reach, len(self))

    def independent_of(self, held_out: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Mask of the tuples that are not held out and do not depend on a held-out stretch of time."""
        independent = ~held_out
        if self.position is not None:
            own = self.position[held_out]
            before = self.position < own.min() - self.reach
            independent &= before | (self.position > own.max() + self.reach)
        return independent

    @property
    def counted(self) -> Int[np.ndarray, " n_counted"]:
        """The columns of the flattened error in which some error counts."""
        exact = self.points.exact
        everything = np.ones(self.field_shape, dtype=bool)
        return np.flatnonzero(everything if exact is None else ~exact)

    @property
    def standardization(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and scale of the features psi, the parts of T (line 11); the paper's bound and safe region use it."""
        return spread(self.features.flat)

    def typical(self) -> "Typical":
        """Medians for comparison in the explanation of an answer."""
        row = self.points.space.z[:1].size
        lengths = [self[part].features.distance for part in chunks(len(self), 4 * row)]
        error = self[self.interpolating].subsample(N_TYPICAL).error
        # A field has one typical error per channel.
        each = error.reshape(*error.shape[:2], -1) if error.ndim > 2 else error[..., None]
        with warnings.catch_warnings(action="ignore"):  # of outputs without errors
            by_channel = np.nanmean(each, axis=-1).reshape(len(error), -1)
            median = np.nanmedian(by_channel, axis=0)
        distance = _lower_median(np.concatenate(lengths))
        return Typical(distance, _lower_median(self.relation.support_distance), median)


@dataclass(frozen=True)
class Typical:
    """Medians over the calibration tuples: displacement, support distance, and error of each output or channel."""

    distance: float
    support_distance: float
    error: Float[np.ndarray, " n_channels"]


@dataclass(frozen=True)
class Repeats:
    """How often the inputs of each row occur in the data, and the standard deviation of the outputs of equal inputs.

    The bound is for the next measurement at a query, not for the mean of many measurements, so it contains this spread.
    """

    count: Int[np.ndarray, " n"]
    spread: Float[np.ndarray, " n *output"]

    @staticmethod
    def of(points: np.ndarray, outputs: np.ndarray) -> "Repeats | None":
        """The repeats of the data; None if all inputs differ."""
        place = distinct_rows(flat(points))
        n_distinct = int(place.max()) + 1
        if n_distinct == len(place):
            return None
        count, values = np.bincount(place), np.nan_to_num(flat(outputs).astype(float))
        total, squares = np.zeros((2, n_distinct, values.shape[1]))
        np.add.at(total, place, values)
        np.add.at(squares, place, (values - (total / count[:, None])[place]) ** 2)
        spread = np.sqrt(squares / np.maximum(count - 1, 1)[:, None])  # unbiased
        return Repeats(count[place], spread[place].reshape(outputs.shape))


def _lower_median(values: np.ndarray) -> float:
    """The lower median, which is one of the values."""
    place = (len(values) - 1) // 2
    return float(np.partition(values, place)[place])
