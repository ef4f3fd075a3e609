"""A network for a quantile of the held-out error, from the inputs alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.cross_fitted import CrossFitted
from benchmarks.rivals.weights import TupleWeights, equal_tuples
from geoq.arrays import Array, chunks
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, clear_fitted
from geoq.estimator import GeoQ
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.quantiles import check_quantile, inverse_cdf_quantile, pinball_loss
from geoq.training.loop import Training, seeded, train

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OnTable:
    """Makes a fully connected network from an input's shape and an error's shape."""

    hidden: tuple[int, ...] = (64, 64)

    def __call__(self, input_shape: Shape, field_shape: Shape) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            MLP(math.prod(input_shape), math.prod(field_shape), hidden=self.hidden),
            _Reshape(field_shape),
        )


@dataclass(frozen=True)
class OnField:
    """Makes a U-Net from an input's shape and an error's shape, which both end in one grid."""

    n_spatial: int = 2
    widths: tuple[int, ...] = (32, 64, 128)

    def __call__(self, input_shape: Shape, field_shape: Shape) -> nn.Module:
        if (
            input_shape[-self.n_spatial :] != field_shape[-self.n_spatial :]
            or len(input_shape) < self.n_spatial
        ):
            raise ValueError(
                f"OnField(n_spatial={self.n_spatial}), but a row of x has shape {input_shape} and a row of the error "
                f"{field_shape}, which do not end in the same grid; put the grid last in both, or use OnTable."
            )
        return _InputUNet(input_shape, field_shape, self.n_spatial, self.widths)


class _Reshape(nn.Module):
    def __init__(self, field_shape: Shape) -> None:
        super().__init__()
        self.field_shape = field_shape

    def forward(self, flat: Tensor) -> Tensor:
        return flat.reshape(-1, *self.field_shape)


class _InputUNet(nn.Module):
    """A U-Net of the input field only."""

    def __init__(
        self, input_shape: Shape, field_shape: Shape, n_spatial: int, widths: Shape
    ) -> None:
        super().__init__()
        self.field_shape, self.grid = field_shape, input_shape[-n_spatial:]
        n_in, n_out = (
            math.prod(shape[:-n_spatial]) for shape in (input_shape, field_shape)
        )
        self.unet = UNet(n_in, n_out, n_spatial=n_spatial, widths=widths)

    def forward(self, x: Tensor) -> Tensor:
        fields = x.reshape(len(x), -1, *self.grid)
        result: Tensor = self.unet(fields, fields.new_zeros(len(x)))
        return result.reshape(-1, *self.field_shape)


@dataclass
class QuantileNetwork:
    r"""Direct quantile regression of the held-out error by a network, as uncertainty-quantifying operators do it.

    .. math:: \widehat E_j(x) = u_j \operatorname{softplus}(w_j(\nu(x))) / \log 2, \quad
        u_j = \widehat Q_\tau(e_{ij})

    It starts near :math:`u`, the pooled quantile of each coordinate, for any units of the data.

    Attributes:
        geoq: GeoQ whose surrogate and folds are used.
        quantile: tau.
        make_network: makes w from the shapes of an input and of an error: ``OnTable()``, ``OnField()`` or your own.
        training: settings of the training of w.
        weights: weights of the calibration tuples: ``equal_tuples`` or ``equal_families``.
    """

    geoq: GeoQ
    quantile: float = 0.95
    make_network: Callable[[Shape, Shape], nn.Module] = field(default_factory=OnTable)
    training: Training = field(
        default_factory=lambda: Training(n_steps=5000, batch_size=256)
    )
    weights: TupleWeights = equal_tuples

    def fit(
        self, x: Array, y: Array, *, groups: Sequence[Any] | None = None
    ) -> "QuantileNetwork":
        check_quantile(self.quantile, "quantile")
        clear_fitted(self)
        self.cross_fitted_ = CrossFitted.fit(self.geoq, x, y, groups)
        calibration = self.cross_fitted_.calibration
        inputs, point = self.cross_fitted_.normalized(x).float(), calibration.point
        error = calibration.error.float()
        mean = float(error.mean()) or 1.0
        weight = self.weights(calibration).float().reshape(-1, *(1,) * (error.ndim - 1))
        with seeded(self.training.random_state):
            network = self.make_network(tuple(inputs.shape[1:]), tuple(error.shape[1:]))
            self.module_ = _Quantile(network, _start(error, self.quantile)).to(
                error.device
            )
            result = train(
                self.module_,
                lambda net, rows: (
                    (
                        weight[rows]
                        * pinball_loss(
                            error[rows], net(inputs[point[rows]]), self.quantile
                        )
                    ).mean()
                    / mean
                ),
                self.training,
                groups=calibration.group,
            )
        self.trainings_ = (result,)
        return self

    @torch.no_grad()
    def predict(self, x: Array) -> Bound:
        check_fitted(self, "module_")
        features = self.cross_fitted_.view(x)
        inputs = self.cross_fitted_.normalized(x).float()
        row_numbers = max(inputs[:1].numel(), self.module_.start.numel())
        error_hat = torch.cat(
            [self.module_(inputs[rows]) for rows in chunks(len(inputs), row_numbers)]
        )
        return self.cross_fitted_.bound(
            features, error_hat.to(self.cross_fitted_.calibration.error), x
        )


class _Quantile(nn.Module):
    def __init__(self, network: nn.Module, start: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("start", start)
        self.start: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.start * nn.functional.softplus(self.network(x)) / math.log(2)


def _start(error: Tensor, quantile: float) -> Tensor:
    # A coordinate with nearly all errors zero starts at the mean of all errors, where the gradient does not vanish.
    return torch.maximum(inverse_cdf_quantile(error, quantile), error.mean())
