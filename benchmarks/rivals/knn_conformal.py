"""Normalised conformal prediction: a local scale from the nearest points, times one calibrated factor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.weights import (
    TupleWeights,
    equal_tuples,
    weighted_conformal_factor,
)
from geoq.arrays import Array
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, clear_fitted
from geoq.estimator import GeoQ
from geoq.geometry import anchor_mean
from geoq.neighbors import Neighbors
from geoq.quantiles import check_quantile


@dataclass
class KNNDistanceConformal:
    r"""A bound proportional to the support distance.

    .. math:: \widehat E_j(x) = c_j \Delta d_k(x), \quad c_j = \widehat Q_\tau(e_{ij} / \Delta d_k(x_i))

    Distances at inference are to all points, distances of held-out points to the points of the other folds. With few random
    folds in few dimensions the former are smaller, and the bound with them.

    Attributes:
        geoq: GeoQ whose surrogate, folds and support distance are used.
        quantile: tau.
        weights: weights of the calibration tuples: ``equal_tuples`` or ``equal_families``.
    """

    geoq: GeoQ
    quantile: float = 0.95
    weights: TupleWeights = equal_tuples

    def fit(
        self, x: Array, y: Array, *, groups: Sequence[Any] | None = None
    ) -> "KNNDistanceConformal":
        check_quantile(self.quantile, "quantile")
        clear_fitted(self)
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, groups)
        calibration = self.cross_fitted_.calibration
        self.factor_ = weighted_conformal_factor(
            calibration.error,
            calibration.features.support_distance,
            self.weights(calibration),
            self.quantile,
        )
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "factor_")
        features = self.cross_fitted_.view(x)
        error_hat = self.factor_ * features.support_distance.reshape(
            -1, *(1,) * self.factor_.ndim
        )
        return self.cross_fitted_.bound(features, error_hat, x)


@dataclass
class KNNResidualConformal:
    r"""A bound proportional to the mean held-out error of the nearest tuples.

    .. math:: \widehat E_j(x) = c_j (\overline e_{j, k}(x) + \beta \overline e_j),
        \quad c_j = \widehat Q_\tau(e_{ij} / (\overline e_{j, k}(x_i) + \beta \overline e_j))

    with :math:`\overline e_{j, k}` the mean over the nearest tuples in the normalised input space and
    :math:`\overline e_j` the mean over all. While calibrating, a point's neighbours exclude the tuples of the point
    itself and of points that depend on it.

    Attributes:
        geoq: GeoQ whose surrogate and folds are used.
        quantile: tau.
        n_neighbors: number of nearest tuples in the mean.
        beta: fraction of the overall mean error that is added, so that the scale is positive.
        weights: weights of the calibration tuples: ``equal_tuples`` or ``equal_families``.
    """

    geoq: GeoQ
    quantile: float = 0.95
    n_neighbors: int = 25
    beta: float = 0.01
    weights: TupleWeights = equal_tuples

    def fit(
        self, x: Array, y: Array, *, groups: Sequence[Any] | None = None
    ) -> "KNNResidualConformal":
        check_quantile(self.quantile, "quantile")
        if not self.beta > 0:
            raise ValueError(
                f"beta={self.beta}: beta must be > 0, so that the scale is positive."
            )
        clear_fitted(self)
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, groups)
        calibration = self.cross_fitted_.calibration
        inputs = calibration.features.inputs
        self.neighbors_ = Neighbors(inputs.reshape(len(inputs), -1))
        position = (
            calibration.point if calibration.position is None else calibration.position
        )
        _, nearest = self.neighbors_.nearest_other(
            self.n_neighbors, position=position, reach=calibration.reach
        )
        self.factor_ = weighted_conformal_factor(
            calibration.error,
            self._scale(nearest),
            self.weights(calibration),
            self.quantile,
        )
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "factor_")
        features = self.cross_fitted_.view(x)
        queries = self.cross_fitted_.normalized(x)
        _, nearest = self.neighbors_.nearest(
            queries.reshape(len(queries), -1), self.n_neighbors
        )
        return self.cross_fitted_.bound(
            features, self.factor_ * self._scale(nearest), x
        )

    def _scale(self, nearest: Tensor) -> Float[Tensor, " n *field"]:
        residual = self.cross_fitted_.calibration.error
        return anchor_mean(nearest, residual) + self.beta * residual.mean(dim=0)
