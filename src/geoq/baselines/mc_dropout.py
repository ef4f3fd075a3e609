"""MC dropout: many predictions of one network with active dropout layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from geoq.arrays import Array, restore
from geoq.baselines.bound import GAUSSIAN_95, Bound, spread
from geoq.checks import check_fitted, check_pairs, clear_fitted
from geoq.surrogate import TrainSurrogate, evaluate
from geoq.training.loop import seeded

DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@runtime_checkable
class NetworkSurrogate(Protocol):
    """A surrogate with the attribute ``network``, which computes its predictions in one or many steps."""

    @property
    def network(self) -> nn.Module: ...

    def __call__(self, x: Array, /) -> Array: ...


@dataclass
class MCDropout:
    r"""The paper's MC dropout: the bound is a multiple of the standard deviation of the passes.

    .. math:: \widehat E(x) = 1.96 \sigma(x)

    The prediction is the mean of the passes. Only dropout layers are in training mode; normalization layers stay in
    evaluation mode.

    Attributes:
        train_surrogate: Function that trains a network with dropout layers; their probability is 0.1 in the paper.
        n_passes: Number of passes per prediction.
        random_state: Seed of the dropout masks; every call of ``predict`` uses the same masks.

    Example:
        >>> from functools import partial
        >>> import numpy as np
        >>> from geoq import Training, TrainNetwork
        >>> from geoq.nets.mlp import MLP
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> network = partial(MLP, 1, 1, hidden=(8,), dropout=0.1)
        >>> recipe = TrainNetwork(network, training=Training(n_steps=20))
        >>> bound = MCDropout(recipe, n_passes=10).fit(x, x**2).predict(x)
        >>> bound.prediction.shape, bool((bound.error_hat > 0).any())
        ((40, 1), True)
    """

    train_surrogate: TrainSurrogate
    n_passes: int = 100
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "MCDropout":
        """Train the network on all rows."""
        if self.n_passes < 2:
            raise ValueError(
                f"n_passes={self.n_passes}, but a standard deviation needs at least 2 passes; 100 are usual."
            )
        clear_fitted(self)
        check_pairs(x, y)
        surrogate = self.train_surrogate(x, y)
        if not isinstance(surrogate, NetworkSurrogate):
            raise TypeError(
                f"train_surrogate returned a {type(surrogate).__name__}, which has no attribute network with dropout "
                "layers; return a geoq.training.TrainedNetwork."
            )
        if not any(layer.p > 0 for layer in _dropout_layers(surrogate.network)):
            raise ValueError(
                f"train_surrogate returned a {type(surrogate.network).__name__}, which has no dropout layer with a "
                "probability above 0, so all passes would be equal; add nn.Dropout(0.1) between its layers."
            )
        self.surrogate_ = surrogate
        return self

    def predict(self, x: Array) -> Bound:
        """Mean of the passes, and 1.96 times their standard deviation as the bound."""
        check_fitted(self, "surrogate_")
        with seeded(self.random_state), _dropout_on(self.surrogate_.network):
            mean, deviation = spread(
                evaluate(self.surrogate_, x, "surrogate") for _ in range(self.n_passes)
            )
        return Bound(restore(mean, x), restore(GAUSSIAN_95 * deviation, x))


def _dropout_layers(network: nn.Module) -> list[nn.Dropout]:
    return [layer for layer in network.modules() if isinstance(layer, DROPOUT)]  # type: ignore[misc]


@contextmanager
def _dropout_on(network: nn.Module) -> Iterator[None]:
    """Put the dropout layers into training mode, and back into evaluation mode afterwards."""
    layers = _dropout_layers(network)
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()
