"""Rivals that are networks: a quantile network, deep ensembles and MC dropout, raw and calibrated."""

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.rivals.cross_fitted import Bound, Rival, conformal_factor, per_value
from benchmarks.rivals.gaussian_process import GAUSSIAN_95
from geoq import MLP, Training
from geoq.bounds.network import pinball
from geoq.quantiles import inverse_cdf_quantile
from geoq.training.loop import seeded, train

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def spread(predictions):
    """Mean and unbiased standard deviation of several predictions, of which only one is in memory at a time."""
    members = iter(predictions)
    mean = copy.deepcopy(next(members))
    squares, count = 0 * mean, 1
    for prediction in members:
        count += 1
        deviation = prediction - mean
        mean = mean + deviation / count
        squares = squares + deviation * (prediction - mean)
    return mean, (squares / (count - 1)) ** 0.5


@dataclass
class DeepEnsemble:
    r"""The paper's deep ensemble: the bound is a multiple of the standard deviation of the members.

    .. math:: \widehat E(x) = 1.96 \sigma(x)

    The prediction is the mean of the members. The recipe has ``with_seed``, which returns it with another seed.
    """

    train_surrogate: Any
    n_members: int = 5
    random_state: int = 0

    def fit(self, x, y):
        """Train all members on all rows."""
        # Seeds of 31 bits, which every library accepts.
        sequence = np.random.SeedSequence(self.random_state)
        seeds = sequence.generate_state(self.n_members) >> 1
        recipe, rows = self.train_surrogate, np.arange(len(x))
        if hasattr(recipe, "train_many"):
            size, self.members_ = recipe.n_together(x, y), []
            for some in np.split(seeds, range(size, len(seeds), size)):
                self.members_ += recipe.train_many(x, y, [rows] * len(some), some.tolist())
        else:
            self.members_ = [recipe.with_seed(seed)(x, y) for seed in seeds.tolist()]
        return self

    def predict(self, x):
        """Mean of the members, and 1.96 times their standard deviation."""
        mean, deviation = spread(member(x) for member in self.members_)
        return Bound(mean, GAUSSIAN_95 * deviation)


@dataclass
class MCDropout:
    """The paper's MC dropout: mean and 1.96 standard deviations of passes of one network with active dropout layers.

    Only dropout layers are in training mode; normalization layers stay in evaluation mode. Every ``predict`` has the same masks.
    """

    train_surrogate: Any
    n_passes: int = 100
    random_state: int = 0

    def fit(self, x, y):
        """Train the network on all rows."""
        surrogate = self.train_surrogate(x, y)
        if not any(layer.p > 0 for layer in _dropout_layers(surrogate.network)):
            raise ValueError("the network has no dropout layer with a probability above 0.")
        self.surrogate_ = surrogate
        return self

    def predict(self, x):
        """Mean of the passes, and 1.96 times their standard deviation."""
        with seeded(self.random_state), _dropout_on(self.surrogate_.network):
            mean, deviation = spread(self.surrogate_(x) for _ in range(self.n_passes))
        return Bound(mean, GAUSSIAN_95 * deviation)


def _dropout_layers(network):
    return [layer for layer in network.modules() if isinstance(layer, DROPOUT)]


@contextmanager
def _dropout_on(network):
    """Put the dropout layers into training mode, and back into evaluation mode afterwards."""
    for layer in _dropout_layers(network):
        layer.train()
    try:
        yield
    finally:
        network.eval()


@dataclass
class CalibratedSpread:
    r"""A conformal factor times the spread of an ensemble or of dropout passes.

    .. math:: \widehat E_j(x) = c_j (\sigma_j(x) + \beta \overline \sigma_j),
        \quad c_j = \widehat Q_\tau(e_{ij} / (\sigma_j^{(-i)}(x_i) + \beta \overline \sigma_j))

    Each fold trains the whole baseline, with all its members; errors and deviations are those of its held-out rows.
    """

    baseline: Any
    quantile: float
    folds: Any
    beta: float = 0.01

    def fit(self, x, y):
        error, scale = [], []
        for train_rows, held_out in self.folds.split(x):
            fitted = replace(self.baseline).fit(x[train_rows], y[train_rows])
            prediction, deviation = fitted.predict(x[held_out])
            error.append(abs(y[held_out] - prediction))
            scale.append(deviation)
        scales = np.concatenate(scale)
        self.least_ = self.beta * scales.mean(axis=0)
        self.factor_ = conformal_factor(np.concatenate(error), scales + self.least_, self.quantile)
        self.baseline_ = replace(self.baseline).fit(x, y)
        return self

    def predict(self, x):
        prediction, deviation = self.baseline_.predict(x)
        return Bound(prediction, self.factor_ * (deviation + self.least_))


def _network(input_shape, field_shape):
    """A fully connected network from an input of any shape to an error of any shape."""
    network = MLP(math.prod(input_shape), math.prod(field_shape), hidden=(64, 64))
    shaped = nn.Unflatten(1, field_shape) if field_shape else nn.Flatten(0)
    return nn.Sequential(nn.Flatten(), network, shaped)


class Positive(nn.Module):
    """``start softplus(network) / log 2``: positive, near ``start`` at first, and with a gradient that does not vanish."""

    def __init__(self, network, start):
        super().__init__()
        self.network = network
        self.register_buffer("start", start)

    def forward(self, x):
        return self.start * nn.functional.softplus(self.network(x)) / math.log(2)


@dataclass
class QuantileNetwork(Rival):
    r"""Direct quantile regression of the held-out error by a network, as uncertainty-quantifying operators do it.

    .. math:: \widehat E_j(x) = u_j \operatorname{softplus}(w_j(\nu(x))) / \log 2, \quad
        u_j = \widehat Q_\tau(e_{ij})

    It starts near :math:`u`, the pooled quantile of each coordinate, for any units of the data.
    """

    training: Training = field(default_factory=lambda: Training(n_steps=5000, batch_size=256))

    def learn(self, tuples, x, y):
        inputs, error = (_single(part) for part in (tuples.points.inputs, tuples.error))
        point, weight = (_single(per_value(w, error.ndim)) for w in (tuples.point, self.weight_))
        point = point.long().flatten()
        scale = float(error.mean()) or 1.0
        # A coordinate with nearly all errors zero starts at the mean of all errors, where the gradient does not vanish.
        start = np.maximum(inverse_cdf_quantile(tuples.error, self.quantile), tuples.error.mean())
        with seeded(self.training.random_state):
            network = _network(tuple(inputs.shape[1:]), tuple(error.shape[1:]))
            self.module_ = Positive(network, _single(start))

            def loss(net, rows):
                each = pinball(error[rows], net(inputs[point[rows]]), self.quantile)
                return (weight[rows] * each).mean() / scale

            groups = torch.as_tensor(tuples.group)
            rows = self.training.hold_out(groups)
            self.trainings_ = (train(self.module_, loss, self.training, *rows),)

    @torch.no_grad()
    def bound(self, features):
        return self.module_(_single(features.inputs)).numpy()


def _single(values):
    return torch.as_tensor(np.asarray(values, dtype=np.float32))
