"""Gradient boosted trees for a quantile of the held-out error, by LightGBM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.per_coordinate import (
    CoordinateModels,
    Predict,
    TabularInputs,
    of_x,
)
from benchmarks.rivals.weights import TupleWeights, equal_tuples
from geoq.arrays import Array
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, clear_fitted
from geoq.estimator import GeoQ
from geoq.quantiles import check_quantile
from geoq.training.loop import Training


@dataclass
class BoostedQuantile:
    r"""Quantile regression of the held-out error by boosted trees, without anchors.

    .. math:: \widehat E_j(x) = [q_j(t(x))]_+, \quad
        q_j = \arg\min \sum_i \max(\tau (e_{ij} - q_j), (\tau - 1) (e_{ij} - q_j))

    Early stopping uses a tenth of the points. Up to 16 output coordinates have one model each; for more coordinates, one
    model also reads the coordinate's prediction and number.

    Attributes:
        geoq: GeoQ whose surrogate and folds are used.
        quantile: tau.
        inputs: the table t of standardised inputs and features: ``of_x``, ``of_x_distance_and_prediction`` or your own.
        n_trees: largest number of trees.
        n_leaves: number of leaves per tree.
        learning_rate: factor of each tree's prediction.
        random_state: seed of the early-stopping points.
        weights: weights of the calibration tuples: ``equal_tuples`` or ``equal_families``.
    """

    geoq: GeoQ
    quantile: float = 0.95
    inputs: TabularInputs = of_x
    n_trees: int = 1000
    n_leaves: int = 15
    learning_rate: float = 0.05
    random_state: int = 0
    weights: TupleWeights = equal_tuples

    def fit(
        self, x: Array, y: Array, *, groups: Sequence[Any] | None = None
    ) -> "BoostedQuantile":
        check_quantile(self.quantile, "quantile")
        _lightgbm()  # raises before the folds are trained
        clear_fitted(self)
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, groups)
        calibration = self.cross_fitted_.calibration
        table = self.inputs(calibration.features.inputs, calibration.features)
        self.models_ = CoordinateModels.fit(
            self._regress,
            table,
            calibration.features.prediction,
            calibration.error,
            calibration.group,
            self.weights(calibration),
        )
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "models_")
        features = self.cross_fitted_.view(x)
        table = self.inputs(self.cross_fitted_.normalized(x), features)
        error_hat = self.models_(table, features.prediction).clamp(min=0)
        return self.cross_fitted_.bound(features, error_hat, x)

    def _regress(
        self,
        table: np.ndarray,
        target: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
    ) -> Predict:
        lightgbm = _lightgbm()
        rows, stopping_rows = (
            part.numpy()
            for part in Training(random_state=self.random_state).hold_out(
                torch.as_tensor(group)
            )
        )
        # On small tables more threads are slower.
        n_threads = min(torch.get_num_threads(), 1 + len(table) // 10_000)
        settings = {
            "objective": "quantile",
            "alpha": self.quantile,
            "learning_rate": self.learning_rate,
            "num_leaves": self.n_leaves,
            "seed": self.random_state,
            "num_threads": n_threads,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }
        # LightGBM computes in float32 with absolute tolerances, so the errors are divided by their mean.
        scale = float(target.mean()) or 1.0
        data = lightgbm.Dataset(table[rows], target[rows] / scale, weight=weight[rows])
        stopping = lightgbm.Dataset(
            table[stopping_rows],
            target[stopping_rows] / scale,
            weight=weight[stopping_rows],
            reference=data,
        )
        trees = lightgbm.train(
            settings,
            data,
            num_boost_round=self.n_trees,
            valid_sets=[stopping],
            callbacks=[lightgbm.early_stopping(50, verbose=False)],
        )
        return lambda queries: scale * np.asarray(trees.predict(queries))


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError as exc:
        raise ImportError(
            'BoostedQuantile needs LightGBM; install it by pip install "geoq[boosting]".'
        ) from exc
    return lightgbm
