"""Recipes of the suite's surrogates: networks, trees, Gaussian processes, splines and linear models.

Each recipe is a ``train_surrogate`` with ``with_seed``, so that a deep ensemble can be made of it.
"""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.interpolate import RBFInterpolator
from sklearn import ensemble, linear_model
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, SplineTransformer, StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

from geoq import MLP, Training, TrainNetwork


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

    trained: Any
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
        pairs = zip(subsets, scales, strict=True)
        scaled = [(of_x.down(x[rows]), of_y.down(flat[rows])) for rows, (of_x, of_y) in pairs]
        ends = np.cumsum([0, *map(len, subsets)])
        networks = self._train(x, y).train_many(
            *(np.concatenate(parts) for parts in zip(*scaled, strict=True)),
            [np.arange(a, b) for a, b in itertools.pairwise(ends)],
            seeds,
        )
        found = zip(networks, scales, strict=True)
        return [Standardised(network, *of, y.shape[1:]) for network, of in found]

    def _train(self, x, y):
        n_outputs = int(np.prod(y.shape[1:]))
        make = partial(MLP, x.shape[1], n_outputs, hidden=self.hidden, dropout=self.dropout)
        return TrainNetwork(make, training=self.training)

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

    make_model: Callable[[int], Any]
    random_state: int = 0
    resample: bool = False

    def __call__(self, x, y):
        if self.resample:
            rows = np.random.default_rng(self.random_state).integers(len(x), size=len(x))
            x, y = x[rows], y[rows]
        with warnings.catch_warnings(action="ignore"):  # about kernel parameters at their bounds
            return self.make_model(self.random_state).fit(x, y).predict

    def with_seed(self, random_state):
        return replace(self, random_state=random_state, resample=True)


class ThinPlate:
    """Thin-plate spline with a little smoothing, on the nearest points."""

    def fit(self, x, y):
        # A bootstrap repeats points, which a spline refuses.
        rows = np.unique(x, axis=0, return_index=True)[1]
        self.mean, self.deviation = x.mean(axis=0), x.std(axis=0)
        self.spline = RBFInterpolator(self._scaled(x[rows]), y[rows], neighbors=60, smoothing=1e-3)
        return self

    def predict(self, x):
        return self.spline(self._scaled(x))

    def _scaled(self, x):
        return (x - self.mean) / self.deviation


def network(seed):
    return Network().with_seed(seed)


def network_of_increments(seed):
    return Increment(Network(hidden=(128,))).with_seed(seed)


def short_network(seed):
    """A fully connected network with two layers of 48 nodes and a short training."""
    return Network((48, 48), Training(n_steps=600, batch_size=64, patience=5)).with_seed(seed)


def recipe(make):
    """A recipe by its seed, from a function of the random state that returns a scikit-learn model."""
    return partial(Regressor, make)


def scaled(*steps):
    """A model of standardised inputs."""
    return make_pipeline(StandardScaler(), *steps)


def process(kernel):
    return scaled(GaussianProcessRegressor(kernel, normalize_y=True))


def _mixed(state):
    members = {
        "boosted": HistGradientBoostingRegressor(max_iter=80, random_state=state),
        "random": ExtraTreesRegressor(50, min_samples_leaf=2, random_state=state),
        "neighbours": scaled(KNeighborsRegressor(5)),
    }
    return ensemble.VotingRegressor(list(members.items()))


def _tanh(state):
    settings = {"activation": "tanh", "solver": "lbfgs", "alpha": 1e-3, "max_iter": 400}
    return scaled(MLPRegressor(hidden_layer_sizes=(24, 24), **settings, random_state=state))


def _bagged(state):
    tree = DecisionTreeRegressor(min_samples_leaf=3)
    return ensemble.BaggingRegressor(tree, 40, max_features=0.8, random_state=state)


def _forest(state, **settings):
    return ensemble.RandomForestRegressor(60, random_state=state, **settings)


def _matern(_):
    kernel = ConstantKernel() * Matern(np.ones(2), nu=2.5) + WhiteKernel(1e-5)
    return scaled(MultiOutputRegressor(GaussianProcessRegressor(kernel, normalize_y=True)))


def _nystroem(state):
    return scaled(Nystroem(gamma=0.02, n_components=300, random_state=state), Ridge(alpha=1e-2))


def _quadratic_in_modes(_):
    ridge = linear_model.RidgeCV(np.logspace(-4, 2, 7))
    return make_pipeline(PCA(6), StandardScaler(), PolynomialFeatures(2), ridge)


def _cubic(_):
    ridge = linear_model.RidgeCV(np.logspace(-6, 2, 9))
    return make_pipeline(PolynomialFeatures(3), StandardScaler(), ridge)


boosted_trees = recipe(lambda s: HistGradientBoostingRegressor(max_iter=150, random_state=s))
random_forest = recipe(_forest)
# At least ten training points in each leaf, for noisy data.
pruned_forest = recipe(partial(_forest, min_samples_leaf=10))
extra_trees = recipe(lambda s: ExtraTreesRegressor(80, min_samples_leaf=2, random_state=s))
bagged_trees = recipe(_bagged)
# The mean of boosted trees, extremely randomised trees and nearest neighbours.
mixed_ensemble = recipe(_mixed)
gaussian_process = recipe(lambda _: process(ConstantKernel() * RBF([1.0, 1.0]) + WhiteKernel(1e-4)))
# One length scale; it learns how noisy the data are.
noisy_process = recipe(lambda _: process(ConstantKernel() * RBF() + WhiteKernel(1e-2)))
matern_process = recipe(_matern)
# A length scale for each of six inputs.
relevant_process = recipe(
    lambda _: process(ConstantKernel() * Matern(np.ones(6), nu=2.5) + WhiteKernel(1e-4))
)
kernel_ridge = recipe(lambda _: scaled(KernelRidge(kernel="rbf", alpha=1e-3, gamma=0.1)))
linear_ridge = recipe(lambda _: Ridge(alpha=1e-2))
# All monomials up to the second degree.
quadratic_ridge = recipe(lambda _: scaled(PolynomialFeatures(2), Ridge(alpha=1e-2)))
# Ridge regression on 300 features that approximate a Gaussian kernel.
nystroem_ridge = recipe(_nystroem)
# Quadratic response surface of the leading principal components of a field.
quadratic_in_modes = recipe(_quadratic_in_modes)
cubic_blend = recipe(_cubic)
# Cubic splines with equally spaced knots and a small penalty.
splines = recipe(lambda _: make_pipeline(SplineTransformer(60), Ridge(alpha=1e-2)))
thin_plate = recipe(lambda _: ThinPlate())
support_vectors = recipe(lambda _: scaled(SVR(C=30.0, epsilon=0.01, gamma=0.08)))
# A small network of scikit-learn, trained by a quasi-Newton method.
tanh_network = recipe(_tanh)
# The mean of the eight nearest outputs, weighted by the inverse distance.
nearest_neighbours = recipe(lambda _: scaled(KNeighborsRegressor(8, weights="distance")))
