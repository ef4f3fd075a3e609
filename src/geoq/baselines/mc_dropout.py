"""MC dropout: one network, asked many times with its dropout left on."""

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
    """A surrogate whose answers come from a network that can be reached: one step of it, or a rollout of many."""

    @property
    def network(self) -> nn.Module: ...

    def __call__(self, x: Array, /) -> Array: ...


@dataclass
class MCDropout:
    r"""The paper's MC dropout: mean of the passes, and their standard deviation as a bound.

    .. math:: \widehat E(x) = 1.96 \sigma(x)

    Only dropout layers are random; normalisation layers stay in eval mode.

    Attributes:
        train_surrogate: trains a network with dropout layers, of rate 0.1 in the paper.
        n_passes: passes per prediction.
        random_state: seed of the masks; the same in every call of ``predict``.
    """

    train_surrogate: TrainSurrogate
    n_passes: int = 100
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "MCDropout":
        if self.n_passes < 2:
            raise ValueError(
                f"n_passes={self.n_passes}, but a spread needs at least 2; the paper's bound wants many."
            )
        clear_fitted(self)
        check_pairs(x, y)
        surrogate = self.train_surrogate(x, y)
        if not isinstance(surrogate, NetworkSurrogate):
            raise TypeError(
                f"train_surrogate returned {type(surrogate).__name__}, which has no attribute network to find dropout "
                "layers in; return a geoq.training.TrainedNetwork."
            )
        if not any(layer.p > 0 for layer in _dropout_layers(surrogate.network)):
            raise ValueError(
                f"{type(surrogate.network).__name__} has no dropout layer with a rate above 0, so all passes would be "
                "equal; build it with nn.Dropout(0.1) between its layers."
            )
        self.surrogate_ = surrogate
        return self

    def predict(self, x: Array) -> Bound:
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
    layers = _dropout_layers(network)
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()
