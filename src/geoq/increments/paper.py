r"""Increment models: an upper conditional quantile of what the anchors do not explain (line 12).

.. math:: g_\eta(\psi) = \|\psi\|_{\mathscr P} \, h_\eta(T(\psi))
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.arrays import chunks, nonzero_counts
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes, check_spatial, warn_of_channels_last
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.quantiles import check_quantile, inverse_cdf_quantile, pinball_loss
from geoq.representation import Standardization
from geoq.training.loop import Training, seeded, train


class _ScaledRate(nn.Module):
    """||psi|| h(T(psi)) with everything it needs in one state dict: T, the units and the network.

    h is ``unit * softplus(network + start) / softplus(0)``. It cannot die as a ReLU output does, and starts at the pooled
    quantile of r / ||psi|| in each coordinate, whatever the units of the data: that is the unit, and start is 0. Where the
    quantile is 0, since errors are rare, the unit is the size of an error where there is one, and start leads to the mean:
    in units of the mean the network would have to answer 1000 for a cell that is wrong once in a thousand.
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
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))
        self.register_buffer("unit", torch.ones(field_shape))
        self.register_buffer("start", torch.zeros(field_shape))
        self.mean: Tensor
        self.scale: Tensor
        self.unit: Tensor
        self.start: Tensor

    def forward(self, features: GeometricFeatures) -> Tensor:
        standardised = Standardization(self.mean, self.scale)(features.flat.float())
        answer = self.network(standardised).view(-1, *self.unit.shape) + self.start
        rate = nn.functional.softplus(answer) / math.log(2)
        norm = features.norm.float().view(-1, *(1,) * self.unit.ndim)
        return norm * self.unit * rate

    def fit_normalization(self, calibration: CalibrationSet, quantile: float) -> None:
        """T, and the level of each coordinate at which h starts."""
        standardization = calibration.standardization
        self.mean.copy_(standardization.mean)
        self.scale.copy_(standardization.scale)
        norm = calibration.features.norm
        apart = norm > 0
        slope = calibration.increment[apart] / norm[apart].view(
            -1, *(1,) * self.unit.ndim
        )
        if not len(slope):
            self.unit.zero_()
            return
        level, mean = inverse_cdf_quantile(slope, quantile), slope.mean(dim=0)
        # Where more than the level's share of the increments is zero, the mean keeps h off zero so that it can learn;
        # a cell that was never wrong starts where its channel does.
        by_channel = self._by_channel(mean)
        first = torch.where(mean > 0, mean, 0.01 * by_channel)
        share = self._by_channel(nonzero_counts(slope).to(slope) / len(slope))
        size = torch.where(share > 0, by_channel / share, 0.0)
        rare = (level == 0) & (size > 0)
        level = torch.maximum(level, first)
        self.unit.copy_(torch.where(rare, size, level))
        # Of softplus(start) / softplus(0) = first / size.
        # Less than one wrong value in a million starts no lower.
        softplus = (math.log(2) * first / size).clamp(1e-6, 30.0)
        self.start.copy_(torch.where(rare, softplus.expm1().log(), 0.0))

    def _by_channel(self, values: Float[Tensor, " *field"]) -> Float[Tensor, " *field"]:
        """Values averaged over the grid, if there is one: its cells share a unit, other coordinates need not."""
        grid = tuple(range(values.ndim - self.n_spatial, values.ndim))
        return values.mean(dim=grid, keepdim=True).expand_as(values) if grid else values


def _fit_rate(
    module: _ScaledRate,
    calibration: CalibrationSet,
    quantile: float,
    training: Training,
    weights: tuple[float, ...] = (),
) -> None:
    increment = calibration.increment.float()
    # Outputs in other units weigh alike: the minimiser of each coordinate's pinball loss does not depend on its weight,
    # but what a shared network learns in finite time does.
    typical = module._by_channel(increment.mean(dim=0))
    weight = torch.where(typical > 0, 1 / typical, 0)
    if weights:
        weight = weight * weight.new_tensor(weights).view(-1, *(1,) * (weight.ndim - 1))

    def loss(net: nn.Module, rows: Tensor) -> Tensor:
        return (
            weight
            * pinball_loss(increment[rows], net(calibration.features[rows]), quantile)
        ).mean()

    module.to(increment.device)
    module.fit_normalization(calibration, quantile)
    # Tuples of one point, or of points that depend on each other, must not sit on both sides of the early stopping.
    train(module, loss, training, units=calibration.group, repeatable=True)
    apart = calibration.features.norm > 0  # where psi is zero, so is g by construction
    if not apart.any():
        return
    answers = _parts(module, calibration.features)
    largest = reduce(torch.maximum, (part.amax(dim=0) for part in answers))
    dead = (largest == 0) & (inverse_cdf_quantile(increment[apart], quantile) > 0)
    if dead.any():
        raise RuntimeError(
            f"the increment model returns zero everywhere in {int(dead.sum())} of {dead.numel()} output coordinates, "
            f"though the {quantile:g} quantile of the calibration increments there is positive; "
            "its training died: change its random_state or lower its learning_rate."
        )


def _parts(module: _ScaledRate, features: GeometricFeatures) -> Iterator[Tensor]:
    """Answers, some rows at a time."""
    row_numbers = max(features.displacement[:1].numel(), module.unit.numel())
    for rows in chunks(len(features), row_numbers):
        with torch.no_grad():
            part = module(features[rows])
        yield part


def _apply(module: _ScaledRate, features: GeometricFeatures) -> Tensor:
    return torch.cat(list(_parts(module, features)))


@dataclass
class NormScaledIncrement:
    r"""The paper's increment for scalar and vector errors.

    .. math:: g_\eta(\psi) = \|\psi\| \, h_\eta(T(\psi)), \quad h_\eta \text{ an MLP}

    Attributes:
        quantile: tau, the level of the conditional quantile.
        hidden: widths of h's hidden layers.
        training: how h is trained.
    """

    quantile: float = 0.95
    hidden: tuple[int, ...] = (64, 64)
    training: Training = field(
        default_factory=lambda: Training(n_steps=3000, batch_size=256)
    )

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")

    def fit(self, calibration: CalibrationSet) -> "NormScaledIncrement":
        features = calibration.features.flat.shape[1]
        self._build(features, tuple(calibration.error.shape[1:]))
        _fit_rate(self.module_, calibration, self.quantile, self.training)
        return self

    def __call__(self, features: GeometricFeatures) -> Tensor:
        return _apply(self.module_, features).to(features.support_distance.dtype)

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
        model._build(len(weights["mean"]), tuple(weights["unit"].shape))
        _load(model.module_, weights)
        return model

    def _build(self, n_features: int, field_shape: tuple[int, ...]) -> None:
        def make_network() -> nn.Module:
            return MLP(n_features, math.prod(field_shape), hidden=self.hidden)

        network = _fresh(make_network, self.training.random_state)
        self.module_ = _ScaledRate(network, n_features, field_shape, n_spatial=0)


class _FieldNetwork(nn.Module):
    """A U-Net on the flattened psi: unpacks the field, conditions on the support distance, packs the answer."""

    def __init__(
        self,
        field_shape: tuple[int, ...],
        z_shape: tuple[int, ...],
        n_spatial: int,
        widths: tuple[int, ...],
    ):
        super().__init__()
        self.space = z_shape[-n_spatial:]
        self.n_in = math.prod(z_shape[:-n_spatial])
        self.unet = UNet(
            self.n_in,
            math.prod(field_shape[:-n_spatial]),
            n_spatial=n_spatial,
            widths=widths,
        )

    def forward(self, psi: Tensor) -> Tensor:
        result: Tensor = self.unet(
            psi[:, :-1].view(-1, self.n_in, *self.space), psi[:, -1]
        )
        return result


@dataclass
class FieldIncrement:
    r"""The paper's increment for fields.

    .. math:: g_\eta(\psi) = \|\psi\| \, h_\eta(T(\psi)), \quad h_\eta \text{ a U-Net conditioned on } \Delta d \text{ by FiLM}

    Displacement and error are fields on the same grid, which is their last ``n_spatial`` dimensions; all dimensions
    before it are channels, and the error may have others than the input (40 lead times of 3 variables, say).

    Attributes:
        quantile: tau, the level of the conditional quantile.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        widths: channels per level of the U-Net.
        training: how h is trained.
        weights: of the first dimension of the error in the loss, for example growing with lead time as in the paper;
            none means alike.
    """

    quantile: float = 0.95
    n_spatial: int = 2
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = field(
        default_factory=lambda: Training(n_steps=2000, batch_size=16, check_every=50)
    )
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_spatial(self.n_spatial)

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse displacements and errors that do not live on one grid."""
        grids = shapes.z[-self.n_spatial :], shapes.error[-self.n_spatial :]
        if grids[0] != grids[1] or len(grids[0]) < self.n_spatial:
            raise ValueError(
                f"FieldIncrement(n_spatial={self.n_spatial}), but a row of the representation has shape {shapes.z} and "
                f"a row of the error {shapes.error}, which do not end in one grid; put the grid last in both, or use "
                "NormScaledIncrement."
            )
        warn_of_channels_last(shapes.error, self.n_spatial)
        if self.weights and len(self.weights) != shapes.error[0]:
            raise ValueError(
                f"FieldIncrement got {len(self.weights)} weights, but a row of the error has shape {shapes.error}; give one "
                "for each place along its first dimension."
            )

    def fit(self, calibration: CalibrationSet) -> "FieldIncrement":
        shapes = Shapes.of(calibration)
        self.check_shapes(shapes)
        self._build(shapes.z, shapes.error)
        _fit_rate(self.module_, calibration, self.quantile, self.training, self.weights)
        return self

    def __call__(self, features: GeometricFeatures) -> Tensor:
        return _apply(self.module_, features).to(features.support_distance.dtype)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings, shape of the representation, and weights, for a file."""
        return {**asdict(self), "z_shape": self.z_shape_}, self.module_.state_dict()

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "FieldIncrement":
        """The fitted model that ``state`` described."""
        widths, training = tuple(settings["widths"]), Training(**settings["training"])
        model = FieldIncrement(
            settings["quantile"],
            settings["n_spatial"],
            widths,
            training,
            tuple(settings["weights"]),
        )
        model._build(tuple(settings["z_shape"]), tuple(weights["unit"].shape))
        _load(model.module_, weights)
        return model

    def _build(self, z_shape: tuple[int, ...], field_shape: tuple[int, ...]) -> None:
        self.z_shape_ = z_shape

        def make_network() -> nn.Module:
            return _FieldNetwork(field_shape, z_shape, self.n_spatial, self.widths)

        network = _fresh(make_network, self.training.random_state)
        self.module_ = _ScaledRate(
            network, math.prod(z_shape) + 1, field_shape, self.n_spatial
        )


def _fresh(make_network: Callable[[], nn.Module], random_state: int) -> nn.Module:
    with seeded(random_state):
        return make_network()


def _load(module: _ScaledRate, weights: dict[str, Tensor]) -> None:
    module.load_state_dict(weights)
    module.to(weights["unit"].device).eval()
