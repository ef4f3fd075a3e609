"""Boosted trees of the held-out error: for its quantile by LightGBM, and for its mean by scikit-learn."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.cross_fitted import Rival, permuted, split_groups
from geoq.arrays import chunks, flat
from geoq.core.geometry import Features

# For more coordinates than this, one model is used for all; its inputs include the coordinate's prediction and number.
MOST_MODELS = 16
# The common model is fitted to at most this many values, drawn at random.
MOST_VALUES = 500_000
# Number of parts of the calibration points; trees fitted to the other parts predict each part.
N_PARTS = 5


def of_x(features):
    """The standardised inputs only."""
    return flat(features.inputs)


def of_x_and_distance(features):
    """The standardised inputs and the logarithm of the support distance."""
    distance = features.support_distance
    log = np.log(distance.clip(min=np.finfo(distance.dtype).tiny))
    return np.concatenate([of_x(features), log[:, None]], axis=1)


def of_x_distance_and_prediction(features):
    """The standardised inputs, the logarithm of the support distance and the surrogate's prediction."""
    return np.concatenate([of_x_and_distance(features), flat(features.prediction)], axis=1)


class CoordinateModels:
    """Regressions of an error of any shape: one model per coordinate, or a single one for all of them.

    ``regress(table, target, group, weight)`` returns a model; rows of one group must not be split for validation.
    """

    def __init__(self, regress, inputs, tuples, weight):
        features, target = tuples.features, flat(tuples.error)
        self.inputs, self.shape = inputs, tuples.field_shape
        table, prediction, group = inputs(features), flat(features.prediction), tuples.group
        self.pooled = target.shape[1] > MOST_MODELS
        if not self.pooled:
            self.models = [regress(table, column, group, weight) for column in target.T]
            return
        if prediction.shape != target.shape:
            raise ValueError(
                f"the error has {target.shape[1]} coordinates and the prediction {prediction.shape[1]}; more than {MOST_MODELS} "
                "coordinates have one model that reads each coordinate's prediction, so use an error functional of the output's shape."
            )
        n_values = min(target.size, MOST_VALUES)
        value = np.sort(np.random.default_rng(0).choice(target.size, n_values, replace=False))
        row = value // target.shape[1]
        parts = target.reshape(-1)[value], group[row], weight[row]
        self.models = [regress(_pooled(table, prediction, value), *parts)]

    def __call__(self, features):
        table, prediction = self.inputs(features), flat(features.prediction)
        if self.pooled:
            parts = chunks(prediction.size, table.shape[1] + 2)
            values = [np.arange(part.start, part.stop) for part in parts]
            answers = [self.models[0](_pooled(table, prediction, value)) for value in values]
            return np.concatenate(answers).reshape(-1, *self.shape)
        return np.stack([model(table) for model in self.models], 1).reshape(-1, *self.shape)


def _pooled(table, prediction, value):
    """One row per value: the columns of its sample, its prediction and its coordinate."""
    row, coordinate = np.divmod(value, prediction.shape[1])
    return np.column_stack([table[row], prediction[row, coordinate], coordinate])


@dataclass
class BoostedQuantile(Rival):
    r"""Quantile regression of the held-out error by boosted trees, without anchors.

    .. math:: \widehat E_j(x) = [q_j(t(x))]_+, \quad
        q_j = \arg\min \sum_i \max(\tau (e_{ij} - q_j), (\tau - 1) (e_{ij} - q_j))

    Early stopping uses a tenth of the points.
    """

    inputs: Callable[[Features], np.ndarray] = of_x
    n_trees: int = 1000
    n_leaves: int = 15
    learning_rate: float = 0.05
    random_state: int = 0

    def learn(self, tuples, x, y):
        self.models_ = CoordinateModels(self._regress, self.inputs, tuples, self.weight_)

    def bound(self, features):
        return self.models_(features).clip(min=0)

    def _regress(self, table, target, group, weight):
        import lightgbm

        stopping = split_groups(group, self.random_state, 0.1)
        settings = {"objective": "quantile", "alpha": self.quantile, "seed": self.random_state}
        settings |= {"learning_rate": self.learning_rate, "num_leaves": self.n_leaves}
        # On small tables more threads are slower.
        settings |= {"num_threads": 1, "deterministic": True, "force_row_wise": True}
        # LightGBM computes in float32 with absolute tolerances, so the errors are divided by their mean.
        scale = float(target.mean()) or 1.0

        def data(rows, reference=None):
            return lightgbm.Dataset(table[rows], target[rows] / scale, reference, weight[rows])

        known, stop = data(~stopping), [lightgbm.early_stopping(50, verbose=False)]
        how = {"valid_sets": [data(stopping, known)], "callbacks": stop}
        trees = lightgbm.train(settings | {"verbosity": -1}, known, self.n_trees, **how)
        return lambda queries: scale * np.asarray(trees.predict(queries))


@dataclass
class MeanErrorPredictor(Rival):
    r"""Direct epistemic uncertainty prediction: the mean held-out error given x and its support distance, times one factor.

    .. math:: \widehat E_j(x) = c_j m_j(\nu(x), \log \Delta d_k(x)), \quad m_j \approx \mathbb E[e_j],
        \quad c_j = \widehat Q_\tau(e_{ij} / m_j^{(-i)})

    Boosted trees with the Poisson deviance predict the mean. The factor uses predictions by trees that were not trained on the
    point: predictions of training points are too close to their errors.
    """

    n_trees: int = 500
    n_leaves: int = 15
    learning_rate: float = 0.05
    random_state: int = 0

    def learn(self, tuples, x, y):
        self.models_ = self._models(tuples, np.ones(len(tuples), dtype=bool))
        groups, number = np.unique(tuples.group, return_inverse=True)
        part = (permuted(len(groups), self.random_state) % N_PARTS)[number]
        mean = np.empty_like(tuples.error)
        for left_out in np.unique(part):
            inside = part == left_out
            mean[inside] = self._models(tuples, ~inside)(tuples[inside].features)
        self.factor_ = self.factor(tuples.error, mean)

    def bound(self, features):
        return self.factor_ * self.models_(features)

    def _models(self, tuples, rows):
        return CoordinateModels(self._regress, of_x_and_distance, tuples[rows], self.weight_[rows])

    def _regress(self, table, target, group, weight):
        from sklearn.ensemble import HistGradientBoostingRegressor

        del group
        scale = float(target.mean())
        if scale == 0:
            return lambda queries: np.zeros(len(queries))
        settings = {"max_iter": self.n_trees, "max_leaf_nodes": self.n_leaves, "loss": "poisson"}
        settings |= {"learning_rate": self.learning_rate, "random_state": self.random_state}
        trees = HistGradientBoostingRegressor(**settings, early_stopping=True, n_iter_no_change=20)
        # Divided by its mean, because the trees do not split on small sums of the target.
        trees.fit(table, target / scale, sample_weight=weight)
        return lambda queries: scale * trees.predict(queries)
