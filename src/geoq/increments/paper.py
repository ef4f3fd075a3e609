r"""The increment models of the paper: the length of psi times a learned rate (line 12).

.. math:: g_\eta(\psi) = \|\psi\|_{\mathscr P} \, h_\eta(T(\psi))

The rate h is a network, and T standardises the features (line 11). The increment is zero where psi is zero, and never negative.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.archive import load_weights
from geoq.arrays import chunks, nonzero_counts
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes, check_spatial, warn_of_channels_last
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.quantiles import check_quantile, inverse_cdf_quantile, pinball_loss
from geoq.representation import Standardization
from geoq.settings import check_numbers, check_object, check_widths
from geoq.training.loop import (
    Training,
    TrainingResult,
    seeded,
    train,
    warn_if_untrained,
)

# A cell without any error starts at this fraction of the mean rate of its channel.
INITIAL_FRACTION = 0.01


class _ScaledRate(nn.Module):
    r"""The function ||psi|| h(T(psi)); its state dict contains T, u, b and the weights of the network n.

    .. math:: h(\psi) = u \, \operatorname{softplus}(n(T(\psi)) + b) / \operatorname{softplus}(0)

    The typical rate u and the offset b have one value per coordinate of the error. They are chosen so that the training starts
    near the quantile of r / ||psi||, whatever the units of the data are. Normally u is this quantile, or the mean of
    r / ||psi|| if the mean is larger, and b is 0. If errors are so rare that the quantile is 0, u is the mean of the nonzero
    rates, and b makes h start at the mean of all rates. With the mean of all rates as u, the network would have to return
    1000 in a cell that is wrong once in a thousand tuples.
    """

    def __init__(
        self,
        network: nn.Module,
        n_features: int,
        field_shape: tuple[int, ...],
        n_spatial: int,
    ) -> None:
        super().__init__()
        self.network, self.n_spatial = network, n_spatial
        self.mean = nn.Buffer(torch.zeros(n_features))
        self.scale = nn.Buffer(torch.ones(n_features))
        self.typical_rate = nn.Buffer(torch.ones(field_shape))
        self.offset = nn.Buffer(torch.zeros(field_shape))

    def forward(self, features: GeometricFeatures) -> Tensor:
        standardised = Standardization(self.mean, self.scale)(features.flat.float())
        output = self.network(standardised).view(-1, *self.offset.shape) + self.offset
        rate = nn.functional.softplus(output) / math.log(2)
        norm = features.norm.float().view(-1, *(1,) * self.offset.ndim)
        return norm * self.typical_rate * rate

    def fit_normalization(self, calibration: CalibrationSet, quantile: float) -> None:
        """Set T, u and b from the calibration tuples."""
        standardization = calibration.standardization
        self.mean.copy_(standardization.mean)
        self.scale.copy_(standardization.scale)
        norm = calibration.features.norm.view(-1, *(1,) * self.offset.ndim)
        positive = norm.flatten() > 0
        rate = calibration.increment[positive] / norm[positive]
        if not len(rate):
            self.typical_rate.zero_()
            return
        upper, mean = inverse_cdf_quantile(rate, quantile), rate.mean(dim=0)
        channel_mean = self.channel_mean(mean)
        initial = torch.where(mean > 0, mean, INITIAL_FRACTION * channel_mean)
        nonzero = self.channel_mean(nonzero_counts(rate).to(rate) / len(rate))
        nonzero_mean = torch.where(nonzero > 0, channel_mean / nonzero, 0.0)
        rare = (upper == 0) & (nonzero_mean > 0)
        usual = torch.maximum(upper, initial)
        self.typical_rate.copy_(torch.where(rare, nonzero_mean, usual))
        # Solve softplus(b) / softplus(0) = initial / nonzero_mean for b; the lower limit is one error in a million values.
        softplus = (math.log(2) * initial / nonzero_mean).clamp(1e-6, 30.0)
        self.offset.copy_(torch.where(rare, softplus.expm1().log(), 0.0))

    def channel_mean(
        self, values: Float[Tensor, " *field"]
    ) -> Float[Tensor, " *field"]:
        """The mean over the grid of each channel; the values themselves if there is no grid."""
        grid = tuple(range(values.ndim - self.n_spatial, values.ndim))
        return values.mean(dim=grid, keepdim=True).expand_as(values) if grid else values


def _fit_rate(
    module: _ScaledRate,
    calibration: CalibrationSet,
    quantile: float,
    training: Training,
    weights: tuple[float, ...] = (),
) -> tuple[TrainingResult, ...]:
    """Train the rate with the pinball loss, each channel divided by its mean increment; return the course of the training."""
    increment = calibration.increment.float()
    # A network that is trained for a finite time fits the coordinates with large weights first, so channels in different units
    # get equal weights.
    typical = module.channel_mean(increment.mean(dim=0))
    weight = torch.where(typical > 0, 1 / typical, 0)
    if weights:
        weight = weight * weight.new_tensor(weights).view(-1, *(1,) * (weight.ndim - 1))

    def loss(net: nn.Module, rows: Tensor) -> Tensor:
        bound = net(calibration.features[rows])
        return (weight * pinball_loss(increment[rows], bound, quantile)).mean()

    module.to(increment.device)
    module.fit_normalization(calibration, quantile)
    # Dependent tuples, such as tuples of one point, stay on the same side of the split for early stopping.
    result = train(module, loss, training, calibration.group, repeatable=True)
    _check_not_zero(module, calibration, quantile)
    if module.typical_rate.any():
        warn_if_untrained([result], "the increment model")
    return (result,)


def _check_not_zero(
    module: _ScaledRate, calibration: CalibrationSet, quantile: float
) -> None:
    """Refuse a trained rate that is zero in a coordinate with positive increments."""
    positive = calibration.features.norm > 0
    if not positive.any():
        return
    answers = _in_chunks(module, calibration.features)
    largest = reduce(torch.maximum, (part.amax(dim=0) for part in answers))
    increment = calibration.increment.float()[positive]
    failed = (largest == 0) & (inverse_cdf_quantile(increment, quantile) > 0)
    if failed.any():
        raise RuntimeError(
            f"the increment model returns zero everywhere in {int(failed.sum())} of {failed.numel()} output coordinates, "
            f"although the {quantile:g} quantile of the calibration increments is positive there. Its training has failed; "
            "lower the learning_rate of its training, or change the random_state."
        )


def _in_chunks(module: _ScaledRate, features: GeometricFeatures) -> Iterator[Tensor]:
    """The increments of the features, a limited number of rows at a time."""
    row_numbers = max(features.displacement[:1].numel(), module.offset.numel())
    for rows in chunks(len(features), row_numbers):
        with torch.no_grad():
            part = module(features[rows])
        yield part


def _increments(module: _ScaledRate, features: GeometricFeatures) -> Tensor:
    """The increments of all features, in the precision of the features."""
    increments = torch.cat(list(_in_chunks(module, features)))
    return increments.to(features.support_distance.dtype)


@dataclass
class NormScaledIncrement:
    r"""The paper's increment model for scalar and vector errors.

    .. math:: g_\eta(\psi) = \|\psi\| \, h_\eta(T(\psi)), \quad h_\eta \text{ an MLP}

    Attributes:
        quantile: tau, the quantile level of the bound.
        hidden: widths of the hidden layers of h.
        training: how h is trained.
        trainings_: after ``fit``, the first, best and last held-out loss of the training of h.

    Example:
        >>> from geoq import GeoQ, NormScaledIncrement, Training
        >>> increment = NormScaledIncrement(0.9, training=Training(n_steps=1000))
        >>> geoq = GeoQ(lambda x: 2 * x, None, increment_model=increment)
    """

    quantile: float = 0.95
    hidden: tuple[int, ...] = (64, 64)
    training: Training = Training(n_steps=3000, batch_size=256)

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_widths(self.hidden, "hidden", n_least=0)
        check_object(self.training, Training, "training", "Training(n_steps=1000)")

    def fit(self, calibration: CalibrationSet) -> "NormScaledIncrement":
        """Train h on the calibration tuples."""
        n_features = calibration.features.flat.shape[1]
        self._build(n_features, tuple(calibration.error.shape[1:]))
        self.trainings_ = _fit_rate(
            self.module_, calibration, self.quantile, self.training
        )
        return self

    def __call__(self, features: GeometricFeatures) -> Tensor:
        return _increments(self.module_, features)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        return asdict(self), self.module_.state_dict()

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "NormScaledIncrement":
        """The fitted model that ``state`` described."""
        hidden, training = tuple(settings["hidden"]), Training(**settings["training"])
        model = NormScaledIncrement(settings["quantile"], hidden, training)
        with torch.device("meta"):
            model._build(len(weights["mean"]), tuple(weights["offset"].shape))
        load_weights(model.module_, weights)
        return model

    def _build(self, n_features: int, field_shape: tuple[int, ...]) -> None:
        with seeded(self.training.random_state):
            network = MLP(n_features, math.prod(field_shape), hidden=self.hidden)
        self.module_ = _ScaledRate(network, n_features, field_shape, n_spatial=0)


class _FieldNetwork(nn.Module):
    """A U-Net for the flattened psi: it sees the displacement as a field, and the support distance through FiLM."""

    def __init__(
        self,
        field_shape: tuple[int, ...],
        z_shape: tuple[int, ...],
        n_spatial: int,
        widths: tuple[int, ...],
    ):
        super().__init__()
        self.grid = z_shape[-n_spatial:]
        self.n_in = math.prod(z_shape[:-n_spatial])
        n_out = math.prod(field_shape[:-n_spatial])
        self.unet = UNet(self.n_in, n_out, n_spatial=n_spatial, widths=widths)

    def forward(self, psi: Tensor) -> Tensor:
        displacement = psi[:, :-1].view(-1, self.n_in, *self.grid)
        result: Tensor = self.unet(displacement, psi[:, -1])
        return result


@dataclass
class FieldIncrement:
    r"""The paper's increment model for fields.

    .. math:: g_\eta(\psi) = \|\psi\| \, h_\eta(T(\psi)), \quad h_\eta \text{ a U-Net conditioned on } \Delta d \text{ by FiLM}

    The displacement and the error are fields on the same grid. The grid is their last ``n_spatial`` dimensions; all dimensions
    before it are channels. The error can have other channels than the displacement, for example 40 lead times of 3 variables.

    Attributes:
        quantile: tau, the quantile level of the bound.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        widths: channels at each resolution of the U-Net.
        training: how h is trained.
        weights: weights in the loss along the first dimension of the error, for example weights that grow with the lead
            time as in the paper. An empty tuple means equal weights.
        trainings_: after ``fit``, the first, best and last held-out loss of the training of h.

    Example:
        >>> from geoq import FieldIncrement
        >>> increment = FieldIncrement(n_spatial=1, widths=(16, 32), weights=(1.0, 2.0))
    """

    quantile: float = 0.95
    n_spatial: int = 2
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = Training(n_steps=2000, batch_size=16, check_every=50)
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_spatial(self.n_spatial)
        check_widths(self.widths, "widths")
        check_object(self.training, Training, "training", "Training(n_steps=1000)")
        check_numbers(self.weights, "weights", least=0)

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse displacements and errors on different grids, and weights that do not fit the error."""
        grids = shapes.z[-self.n_spatial :], shapes.error[-self.n_spatial :]
        if grids[0] != grids[1] or len(grids[0]) < self.n_spatial:
            raise ValueError(
                f"FieldIncrement(n_spatial={self.n_spatial}), but a row of the representation has shape {shapes.z} and a "
                f"row of the error has shape {shapes.error}, which do not end in the same grid; put the grid last in both, "
                "or use NormScaledIncrement."
            )
        warn_of_channels_last(shapes.error, self.n_spatial)
        if self.weights and len(self.weights) != shapes.error[0]:
            raise ValueError(
                f"FieldIncrement has {len(self.weights)} weights, but a row of the error has shape {shapes.error}; pass "
                f"{shapes.error[0]} weights, one for each index of its first dimension."
            )

    def fit(self, calibration: CalibrationSet) -> "FieldIncrement":
        """Train h on the calibration tuples."""
        shapes = Shapes.of(calibration)
        self.check_shapes(shapes)
        self._build(shapes.z, shapes.error)
        self.trainings_ = _fit_rate(
            self.module_, calibration, self.quantile, self.training, self.weights
        )
        return self

    def __call__(self, features: GeometricFeatures) -> Tensor:
        return _increments(self.module_, features)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings, the shape of the representation, and weights, for a file."""
        return {**asdict(self), "z_shape": self.z_shape_}, self.module_.state_dict()

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "FieldIncrement":
        """The fitted model that ``state`` described."""
        model = FieldIncrement(
            settings["quantile"],
            settings["n_spatial"],
            tuple(settings["widths"]),
            Training(**settings["training"]),
            tuple(settings["weights"]),
        )
        with torch.device("meta"):
            model._build(tuple(settings["z_shape"]), tuple(weights["offset"].shape))
        load_weights(model.module_, weights)
        return model

    def _build(self, z_shape: tuple[int, ...], field_shape: tuple[int, ...]) -> None:
        self.z_shape_ = z_shape
        n_features, n_spatial = math.prod(z_shape) + 1, self.n_spatial
        with seeded(self.training.random_state):
            network = _FieldNetwork(field_shape, z_shape, n_spatial, self.widths)
        self.module_ = _ScaledRate(network, n_features, field_shape, n_spatial)
