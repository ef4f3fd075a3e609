"""Normalised conformal prediction with the difference between the surrogate and a smoothing spline."""

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
from geoq.increments.spline import SmoothingSpline, best_smoothing


@dataclass
class SplineScaledConformal:
    """The difference between surrogate and spline, plus its median, times one conformal factor per coordinate.

    This is the simplest bound that uses the spline of GeoQ's default. The spline at a held-out point is fitted to the
    training points of its fold only.
    """

    geoq: GeoQ
    quantile: float
    weights: TupleWeights = equal_tuples

    def fit(self, x, y):
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, None)
        calibration = self.cross_fitted_.calibration
        points, values = (
            self._points(x),
            torch.as_tensor(y).reshape(len(y), -1).double(),
        )
        smoothing = best_smoothing(points, values)
        self.spline_ = SmoothingSpline.fit(points, values, smoothing)
        spline = [
            SmoothingSpline.fit(points[train], values[train], smoothing)(
                points[held_out]
            )
            for train, held_out in self.geoq.folds.split(points.numpy())
        ]
        predicted = calibration.features.prediction.double()
        gap = (predicted - torch.cat(spline).reshape(predicted.shape)).abs()
        self.median_ = gap.median(dim=0).values
        error = calibration.error.double()
        self.factor_ = weighted_conformal_factor(
            error, gap + self.median_, self.weights(calibration), self.quantile
        )
        return self

    def predict(self, x):
        features = self.cross_fitted_.view(x)
        predicted = features.prediction.double()
        spline = self.spline_(self._points(x)).reshape(predicted.shape)
        error_hat = self.factor_ * ((predicted - spline).abs() + self.median_)
        return self.cross_fitted_.bound(features, error_hat.to(features.prediction), x)

    def _points(self, x):
        normalized = self.cross_fitted_.normalized(x)
        return torch.as_tensor(np.asarray(normalized)).reshape(len(x), -1).double()
