"""Normalised conformal prediction with the standard deviation of a Gaussian process."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.weights import (
    TupleWeights,
    equal_tuples,
    weighted_conformal_factor,
)
from geoq import GeoQ
from geoq.baselines import GaussianProcess


@dataclass
class GPScaledConformal:
    """The standard deviation of a Gaussian process times one conformal factor per coordinate.

    Length scale and noise are fitted once, on at most ``n_most`` points: to y if it is one number per point, otherwise to
    the mean held-out error of each point. The deviation at a held-out point is conditioned on the training points of its
    fold only.
    """

    geoq: GeoQ
    quantile: float
    n_most: int = 400
    random_state: int = 0
    weights: TupleWeights = equal_tuples

    def fit(self, x, y):
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, None)
        calibration = self.cross_fitted_.calibration
        points = self.cross_fitted_.normalized(x).reshape(len(x), -1)
        target = y if y.ndim == 1 else self._mean_error(len(x))
        some = np.random.default_rng(self.random_state).permutation(len(x))
        some = some[: self.n_most]
        self.process_ = GaussianProcess().fit(
            points[some], torch.as_tensor(target[some])
        )
        self.points_ = self.process_.normalization_(points)
        deviation = [
            self._deviation(self.points_[train], self.points_[held_out])
            for train, held_out in self.geoq.folds.split(points.numpy())
        ]
        self.factor_ = weighted_conformal_factor(
            calibration.error,
            torch.cat(deviation),
            self.weights(calibration),
            self.quantile,
        )
        return self

    def predict(self, x):
        features = self.cross_fitted_.view(x)
        queries = self.cross_fitted_.normalized(x).reshape(len(x), -1)
        deviation = self._deviation(self.points_, self.process_.normalization_(queries))
        error_hat = self.factor_ * deviation.reshape(-1, *(1,) * self.factor_.ndim)
        return self.cross_fitted_.bound(features, error_hat, x)

    def _mean_error(self, n_points):
        calibration = self.cross_fitted_.calibration
        point = calibration.point.numpy()
        error = calibration.error.flatten(start_dim=1).mean(dim=1).numpy()
        return np.bincount(point, error, n_points) / np.bincount(point)

    def _deviation(self, points, queries):
        """Standard deviation of an observation at the queries given observations at the points, for signal variance 1."""
        # The lower limit keeps the factorisation of nearly noise-free processes accurate.
        ratio = float(self.process_.ratio_.clamp(min=1e-8))

        def correlation(a, b):
            distance = torch.cdist(a, b) / self.process_.length_scale_
            return torch.exp(-(distance**2) / 2)

        noise = ratio * torch.eye(len(points), dtype=points.dtype)
        factor = torch.linalg.cholesky(correlation(points, points) + noise)
        explained = torch.linalg.solve_triangular(
            factor, correlation(points, queries), upper=False
        )
        return (1 - (explained**2).sum(dim=0)).clamp(min=0).add(ratio).sqrt()
