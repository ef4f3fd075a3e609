"""Conformal rivals: a scale of the error times one factor per output coordinate, which is calibrated on held-out errors."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.record import QUANTILE
from benchmarks.rivals.cross_fitted import Bound, Rival, conformal_factor, per_value, permuted
from benchmarks.rivals.gaussian_process import GaussianProcess
from benchmarks.rivals.spline import SmoothingSpline, best_smoothing
from geoq.arrays import flat, take
from geoq.core.geometry import anchor_mean
from geoq.neighbors import Neighbors
from geoq.quantiles import n_required, weighted_quantile


@dataclass
class SplitConformal:
    r"""The paper's split conformal prediction: the same bound for all queries, one number per output coordinate.

    .. math:: \widehat E_j = \widehat Q_\tau(|y_{ij} - \widehat F_j(x_i)|), \quad i \text{ held out of training}
    """

    train_surrogate: Any
    quantile: float = QUANTILE
    calibration_fraction: float = 0.2
    random_state: int = 0

    def fit(self, x, y):
        order, n = permuted(len(x), self.random_state), round(self.calibration_fraction * len(x))
        held_out, rest = order[:n], order[n:]
        self.surrogate_ = self.train_surrogate(take(x, rest), take(y, rest))
        error = abs(take(y, held_out) - self.surrogate_(take(x, held_out)))
        self.bound_ = conformal_factor(np.asarray(error), quantile=self.quantile)
        return self

    def predict(self, x):
        prediction = self.surrogate_(x)
        return Bound(prediction, np.broadcast_to(self.bound_, prediction.shape).copy())


@dataclass
class CVPlus:
    r"""CV+ of Barber et al. (2021): the largest error of the deployed surrogate that is possible in the CV+ interval.

    .. math:: [\ell_j, u_j] = \bigl[\widehat Q^-_{1 - \tau}(\widehat F_j^{(-i)}(x) - e_{ij}),
        \widehat Q^+_\tau(\widehat F_j^{(-i)}(x) + e_{ij})\bigr], \quad
        \widehat E_j(x) = \max(u_j - \widehat F_j(x), \widehat F_j(x) - \ell_j)

    Lower and upper quantiles are the :math:`\lfloor (n + 1)(1 - \tau) \rfloor`-th and the
    :math:`\lceil (n + 1) \tau \rceil`-th smallest of the n values. MAPIE accepts one output coordinate only.
    """

    surrogate: Any
    train_surrogate: Any
    quantile: float
    folds: Any

    def fit(self, x, y):
        if len(x) < n_required(self.quantile):
            raise ValueError(f"quantile={self.quantile}, but x has only {len(x)} rows.")
        splits = list(self.folds.split(x))
        self.members_ = self.train_surrogate.train_many(x, y, [train for train, _ in splits])
        pairs = [(m, held_out) for m, (_, held_out) in zip(self.members_, splits, strict=True)]
        self.errors_ = [abs(y[held_out] - member(x[held_out])) for member, held_out in pairs]
        return self

    def predict(self, x):
        prediction = self.surrogate(x)
        answers = [member(x) for member in self.members_]
        below = int(np.floor((sum(map(len, self.errors_)) + 1) * (1 - self.quantile) + 1e-9)) - 1
        bound = np.empty_like(prediction)
        # A block of queries has one value per error, query and coordinate.
        for rows in np.array_split(np.arange(len(x)), 1 + prediction.size // 2000):
            pairs = list(zip(answers, self.errors_, strict=True))
            low = np.concatenate([answer[rows] - error[:, None] for answer, error in pairs])
            high = np.concatenate([answer[rows] + error[:, None] for answer, error in pairs])
            lower = np.partition(low, below, axis=0)[below]
            upper = np.partition(high, -1 - below, axis=0)[-1 - below]
            bound[rows] = np.maximum(upper - prediction[rows], prediction[rows] - lower)
        return Bound(prediction, bound)


@dataclass
class Constant(Rival):
    """The quantile of all held-out errors of each coordinate."""

    def learn(self, tuples, x, y):
        self.bound_ = weighted_quantile(tuples.error, self.weight_, self.quantile)

    def bound(self, features):
        return np.broadcast_to(self.bound_, features.anchor_error.shape)


@dataclass
class KNNDistanceConformal(Rival):
    r"""A bound proportional to the support distance.

    .. math:: \widehat E_j(x) = c_j \Delta d_k(x), \quad c_j = \widehat Q_\tau(e_{ij} / \Delta d_k(x_i))
    """

    def learn(self, tuples, x, y):
        self.factor_ = self.factor(tuples.error, tuples.relation.support_distance)

    def bound(self, features):
        return self.factor_ * per_value(features.support_distance, 1 + self.factor_.ndim)


@dataclass
class KNNResidualConformal(Rival):
    r"""A bound proportional to the mean held-out error of the nearest tuples.

    .. math:: \widehat E_j(x) = c_j (\overline e_{j, k}(x) + \beta \overline e_j),
        \quad c_j = \widehat Q_\tau(e_{ij} / (\overline e_{j, k}(x_i) + \beta \overline e_j))

    with the means over the k nearest tuples in the coordinates T and over all. While calibrating, a point's neighbours exclude the
    tuples of the point itself and of points that depend on it.
    """

    n_neighbors: int = 25
    beta: float = 0.01

    def learn(self, tuples, x, y):
        self.error_ = tuples.error
        self.neighbors_ = Neighbors(flat(tuples.features.inputs))
        group = tuples.point if tuples.position is None else tuples.position
        nearest = _nearest_other(self.neighbors_, self.n_neighbors, group, tuples.reach)
        self.factor_ = self.factor(tuples.error, self._scale(nearest))

    def bound(self, features):
        nearest = self.neighbors_.nearest(flat(features.inputs), self.n_neighbors)[1]
        return self.factor_ * self._scale(nearest)

    def _scale(self, nearest):
        return anchor_mean(nearest, self.error_) + self.beta * self.error_.mean(axis=0)


def _nearest_other(neighbors, k, group, reach):
    """The rows of the k nearest points of other groups, for each point."""
    n, m = len(neighbors.points), k
    left, found = np.arange(n), np.empty((n, k), dtype=int)
    while len(left):
        m = min(n, 4 * m)
        index = neighbors.nearest(neighbors.points[left], m)[1]
        counts = abs(group[index] - group[left, None]) > reach
        enough = counts.sum(axis=1) >= k
        if m == n and not enough.all():
            raise ValueError(f"n_neighbors={k}, but a tuple has fewer independent others.")
        order = np.argsort(~counts, axis=1, kind="stable")[:, :k]
        found[left[enough]] = np.take_along_axis(index, order, axis=1)[enough]
        left = left[~enough]
    return found


@dataclass
class GPScaledConformal(Rival):
    """The standard deviation of a Gaussian process times one conformal factor per coordinate.

    Length scale and noise are fitted once: to y if it is one number per point, otherwise to the mean held-out error of each point.
    The deviation at a held-out point is conditioned on the training points of its fold only.
    """

    n_most: int = 400
    random_state: int = 0

    def learn(self, tuples, x, y):
        points = flat(tuples.points.inputs)
        target = y if y.ndim == 1 else _mean_error(tuples)
        some = np.random.default_rng(self.random_state).permutation(len(points))[: self.n_most]
        self.process_ = GaussianProcess().fit(points[some], target[some])
        self.points_ = self.process_.scaled(points)
        folds = [[self.points_[rows] for rows in split] for split in tuples.points.splits]
        deviation = np.concatenate([self._deviation(*points) for points in folds])
        self.factor_ = self.factor(tuples.error, deviation)

    def bound(self, features):
        deviation = self._deviation(self.points_, self.process_.scaled(flat(features.inputs)))
        return self.factor_ * per_value(deviation, 1 + self.factor_.ndim)

    def _deviation(self, points, queries):
        """Standard deviation of an observation at the queries given observations at the points, for signal variance 1."""
        # The lower limit keeps the factorisation of nearly noise-free processes accurate.
        ratio = max(float(self.process_.ratio_[0]), 1e-8)
        length = float(self.process_.length_scale_[0])
        return self.process_.deviation(points, queries, length, ratio)


def _mean_error(tuples):
    """The mean held-out error of each point."""
    error = flat(tuples.error).mean(axis=1)
    return np.bincount(tuples.point, error) / np.bincount(tuples.point)


@dataclass
class SplineScaledConformal(Rival):
    """The difference between surrogate and smoothing spline, plus its median, times one conformal factor per coordinate.

    At a held-out point the spline is fitted to the training points of its fold only.
    """

    def learn(self, tuples, x, y):
        points = flat(tuples.points.inputs).astype(float)
        values = flat(np.asarray(y)).astype(float)
        smoothing = best_smoothing(points, values)
        self.spline_ = SmoothingSpline.fit(points, values, smoothing)
        spline = [
            SmoothingSpline.fit(points[train], values[train], smoothing)(points[held_out])
            for train, held_out in tuples.points.splits
        ]
        predicted = tuples.features.prediction.astype(float)
        gap = abs(predicted - np.concatenate(spline).reshape(predicted.shape))
        self.median_ = np.partition(gap, (len(gap) - 1) // 2, axis=0)[(len(gap) - 1) // 2]
        self.factor_ = self.factor(tuples.error.astype(float), gap + self.median_)

    def bound(self, features):
        predicted = features.prediction.astype(float)
        spline = self.spline_(flat(features.inputs).astype(float)).reshape(predicted.shape)
        return self.factor_ * (abs(predicted - spline) + self.median_)


@dataclass
class OpinionScaledConformal(Rival):
    r"""GeoQ's second opinion without its laws: the error that a Gaussian process expects, times one conformal factor per coordinate.

    The expected error is :math:`q = \sqrt{(F - m)^2 + v}`, or, with ``gap_alone``, the difference |F - m| plus its median. At a held-out
    point the process has the training points of its fold only.
    """

    gap_alone: bool = False

    def learn(self, tuples, x, y):
        self.median_ = 0.0
        scale = self._scale(tuples.features)
        if self.gap_alone:
            self.median_ = np.median(scale, axis=0)
        self.factor_ = self.factor(tuples.error.astype(float), scale + self.median_)

    def bound(self, features):
        return self.factor_ * (self._scale(features) + self.median_)

    def _scale(self, features):
        predicted, opinion = features.prediction.astype(float), features.opinion
        gap = abs(predicted - opinion.mean.reshape(predicted.shape))
        return gap if self.gap_alone else np.hypot(gap, opinion.deviation.reshape(predicted.shape))
