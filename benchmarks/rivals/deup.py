"""Direct epistemic uncertainty prediction: learn the mean error, then scale it to a bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.per_coordinate import (
    CoordinateModels,
    Predict,
    of_x_and_distance,
)
from benchmarks.rivals.weights import (
    TupleWeights,
    equal_tuples,
    weighted_conformal_factor,
)
from geoq.arrays import Array
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, clear_fitted
from geoq.crossfit import CalibrationSet
from geoq.estimator import GeoQ
from geoq.quantiles import check_quantile

# Number of parts of the calibration points; trees fitted to the other parts predict each part.
N_PARTS = 5


@dataclass
class MeanErrorPredictor:
    r"""The mean held-out error given the input and its support distance, times one factor per coordinate.

    .. math:: \widehat E_j(x) = c_j m_j(\nu(x), \log \Delta d_k(x)), \quad m_j \approx \mathbb E[e_j],
        \quad c_j = \widehat Q_\tau(e_{ij} / m_j^{(-i)})

    Boosted trees with the Poisson deviance predict the mean; like the squared error, the deviance is smallest at the mean,
    and the prediction is positive. The factor uses predictions by trees that were not trained on the point: predictions
    of training points are too close to their errors, and the factor would be too small.

    Attributes:
        geoq: GeoQ whose surrogate, folds and support distance are used.
        quantile: tau.
        n_trees: largest number of trees; early stopping on held-out tuples may use fewer.
        n_leaves: leaves per tree.
        learning_rate: factor of each tree's prediction.
        random_state: seed of the parts and of the held-out tuples.
        weights: weights of the calibration tuples: ``equal_tuples`` or ``equal_families``.
    """

    geoq: GeoQ
    quantile: float = 0.95
    n_trees: int = 500
    n_leaves: int = 15
    learning_rate: float = 0.05
    random_state: int = 0
    weights: TupleWeights = equal_tuples

    def fit(
        self, x: Array, y: Array, *, groups: Sequence[Any] | None = None
    ) -> "MeanErrorPredictor":
        check_quantile(self.quantile, "quantile")
        clear_fitted(self)
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, groups)
        calibration = self.cross_fitted_.calibration
        table = of_x_and_distance(calibration.features.inputs, calibration.features)
        self.models_ = self._models(
            table,
            calibration,
            torch.ones(len(table), dtype=torch.bool, device=table.device),
        )
        self.factor_ = weighted_conformal_factor(
            calibration.error,
            self._out_of_part(table, calibration),
            self.weights(calibration),
            self.quantile,
        )
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "factor_")
        features = self.cross_fitted_.view(x)
        table = of_x_and_distance(self.cross_fitted_.normalized(x), features)
        error_hat = self.factor_ * self.models_(table, features.prediction)
        return self.cross_fitted_.bound(features, error_hat, x)

    def _out_of_part(
        self, table: Tensor, calibration: CalibrationSet
    ) -> Float[Tensor, " n *field"]:
        """Mean errors predicted by trees that were not fitted to any tuple of the same group."""
        distinct, group = calibration.group.unique(return_inverse=True)
        generator = torch.Generator().manual_seed(self.random_state)
        part = (torch.randperm(len(distinct), generator=generator) % N_PARTS).to(
            group.device
        )[group]
        mean = torch.empty_like(calibration.error)
        for left_out in part.unique():
            inside = part == left_out
            models = self._models(table, calibration, ~inside)
            mean[inside] = models(
                table[inside], calibration.features[inside].prediction
            )
        return mean

    def _models(
        self, table: Tensor, calibration: CalibrationSet, rows: Tensor
    ) -> CoordinateModels:
        return CoordinateModels.fit(
            self._regress,
            table[rows],
            calibration.features[rows].prediction,
            calibration.error[rows],
            calibration.group[rows],
            self.weights(calibration)[rows],
        )

    def _regress(
        self,
        table: np.ndarray,
        target: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
    ) -> Predict:
        from sklearn.ensemble import (
            HistGradientBoostingRegressor,
        )  # importing scikit-learn is slow

        del group
        scale = float(target.mean())
        if scale == 0:
            return lambda queries: np.zeros(len(queries))
        trees = HistGradientBoostingRegressor(
            loss="poisson",
            max_iter=self.n_trees,
            max_leaf_nodes=self.n_leaves,
            learning_rate=self.learning_rate,
            early_stopping=True,
            n_iter_no_change=20,
            random_state=self.random_state,
        )
        # Divided by its mean, because the trees do not split on small sums of the target.
        trees.fit(table, target / scale, sample_weight=weight)
        return lambda queries: scale * trees.predict(queries)
