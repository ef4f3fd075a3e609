"""The pooled quantile of the held-out errors."""

from dataclasses import dataclass

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.weights import TupleWeights, equal_tuples
from geoq import GeoQ
from geoq.quantiles import weighted_quantile


@dataclass
class Constant:
    """A constant bound: the quantile of all held-out errors of each coordinate."""

    geoq: GeoQ
    quantile: float
    weights: TupleWeights = equal_tuples

    def fit(self, x, y):
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, None)
        calibration = self.cross_fitted_.calibration
        error = calibration.error
        weight = self.weights(calibration).reshape(-1, *(1,) * (error.ndim - 1))
        self.bound_ = weighted_quantile(error, weight.expand_as(error), self.quantile)
        return self

    def predict(self, x):
        features = self.cross_fitted_.view(x)
        error_hat = self.bound_.expand_as(features.anchor_error).clone()
        return self.cross_fitted_.bound(features, error_hat, x)
