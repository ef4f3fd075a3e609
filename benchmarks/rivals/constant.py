"""The pooled quantile of the held-out errors."""

from dataclasses import dataclass

from benchmarks.rivals.cross_fitted import CrossFitted
from geoq import GeoQ
from geoq.quantiles import inverse_cdf_quantile


@dataclass
class Constant:
    """A constant bound: the quantile of all held-out errors of each coordinate."""

    geoq: GeoQ
    quantile: float

    def fit(self, x, y):
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, None)
        error = self.cross_fitted_.calibration.error
        self.bound_ = inverse_cdf_quantile(error, self.quantile)
        return self

    def predict(self, x):
        features = self.cross_fitted_.view(x)
        error_hat = self.bound_.expand_as(features.anchor_error).clone()
        return self.cross_fitted_.bound(features, error_hat, x)
