"""Recipes of the suite's surrogates: networks, trees, Gaussian processes and linear models.

Each recipe is a ``train_surrogate`` with ``with_seed``, so that a deep ensemble can be made of it.
"""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from geoq import Training, TrainNetwork
from geoq.nets.mlp import MLP
from geoq.training import TrainedNetwork


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each column."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, values):
        deviation = values.std(axis=0)
        return cls(values.mean(axis=0), np.where(deviation > 0, deviation, 1.0))

    def down(self, values):
        return (values - self.mean) / self.deviation

    def up(self, values):
        return self.mean + self.deviation * values


@dataclass(frozen=True)
class Standardised:
    """A network with standardised inputs and outputs."""

    trained: TrainedNetwork
    of_x: Scale
    of_y: Scale
    output_shape: tuple[int, ...]

    @property
    def network(self):
        return self.trained.network

    def __call__(self, x):
        answers = self.of_y.up(self.trained(self.of_x.down(x)))
        return answers.reshape(-1, *self.output_shape)


@dataclass(frozen=True)
class Network:
    """A fully connected network; inputs and outputs are standardised by the training pairs."""

    hidden: tuple[int, ...] = (64, 64)
    training: Training = field(
        default_factory=lambda: Training(n_steps=1500, batch_size=64, patience=5)
    )
    dropout: float = 0.0

    def __call__(self, x, y):
        return self.train_many(x, y, [np.arange(len(x))])[0]

    def n_together(self, x, y):
        return self._train(x, y).n_together(x, y)

    def train_many(self, x, y, subsets, seeds=None):
        """A network per subset of the rows, each standardised by its own rows; all are trained together."""
        flat = y.reshape(len(y), -1)
        scales = [(Scale.of(x[rows]), Scale.of(flat[rows])) for rows in subsets]
        scaled = [
            (of_x.down(x[rows]), of_y.down(flat[rows]))
            for rows, (of_x, of_y) in zip(subsets, scales, strict=True)
        ]
        ends = np.cumsum([0, *map(len, subsets)])
        networks = self._train(x, y).train_many(
            *(np.concatenate(parts) for parts in zip(*scaled, strict=True)),
            [np.arange(a, b) for a, b in itertools.pairwise(ends)],
            seeds,
        )
        return [
            Standardised(network, *of, y.shape[1:])
            for network, of in zip(networks, scales, strict=True)
        ]

    def _train(self, x, y):
        n_outputs = int(np.prod(y.shape[1:]))
        make_network = partial(
            MLP, x.shape[1], n_outputs, hidden=self.hidden, dropout=self.dropout
        )
        return TrainNetwork(make_network, training=self.training)

    def with_seed(self, random_state):
        return replace(self, training=replace(self.training, random_state=random_state))

    def with_dropout(self, probability):
        return replace(self, dropout=probability)


@dataclass(frozen=True)
class Step:
    """The input plus its predicted change."""

    change: Callable[[np.ndarray], np.ndarray]

    @property
    def network(self):
        return self.change.network

    def __call__(self, x):
        return x + self.change(x)


@dataclass(frozen=True)
class Increment:
    """A recipe for the change from input to output, as for the step of a time integrator."""

    recipe: Network

    def __call__(self, x, y):
        return Step(self.recipe(x, y - x))

    def n_together(self, x, y):
        return self.recipe.n_together(x, y)

    def train_many(self, x, y, subsets, seeds=None):
        return [*map(Step, self.recipe.train_many(x, y - x, subsets, seeds))]

    def with_seed(self, random_state):
        return replace(self, recipe=self.recipe.with_seed(random_state))

    def with_dropout(self, probability):
        return replace(self, recipe=self.recipe.with_dropout(probability))


@dataclass(frozen=True)
class Regressor:
    """A scikit-learn model. ``with_seed`` also resamples the training rows, because some models are deterministic."""

    make_model: Callable[[int], BaseEstimator]
    random_state: int = 0
    resample: bool = False

    def __call__(self, x, y):
        if self.resample:
            rng = np.random.default_rng(self.random_state)
            rows = rng.integers(len(x), size=len(x))
            x, y = x[rows], y[rows]
        with warnings.catch_warnings(
            action="ignore"
        ):  # about kernel parameters at their bounds
            return self.make_model(self.random_state).fit(x, y).predict

    def with_seed(self, random_state):
        return replace(self, random_state=random_state, resample=True)


def network(seed):
    return Network().with_seed(seed)


def network_of_increments(seed):
    return Increment(Network(hidden=(128,))).with_seed(seed)


def boosted_trees(seed):
    def make(random_state):
        return HistGradientBoostingRegressor(max_iter=150, random_state=random_state)

    return Regressor(make, seed)


def random_forest(seed):
    def make(random_state):
        return RandomForestRegressor(60, random_state=random_state)

    return Regressor(make, seed)


def gaussian_process(seed):
    def make(_):
        kernel = ConstantKernel() * RBF([1.0, 1.0]) + WhiteKernel(1e-4)
        process = GaussianProcessRegressor(kernel, normalize_y=True)
        return make_pipeline(StandardScaler(), process)

    return Regressor(make, seed)


def kernel_ridge(seed):
    def make(_):
        ridge = KernelRidge(kernel="rbf", alpha=1e-3, gamma=0.1)
        return make_pipeline(StandardScaler(), ridge)

    return Regressor(make, seed)


def linear_ridge(seed):
    return Regressor(lambda _: Ridge(alpha=1e-2), seed)
