r"""The bounds of the paper: the anchor error plus the length of psi times a learned rate (line 12, with torch).

.. math:: \widehat E(x) = \overline E_{k_a}(x) + \|\psi\|_{\mathscr P} \, h_\eta(T(\psi))  (eq:anchor_error_decomposition)

The rate h is a network, and T standardises the features (line 11). The increment is zero where psi is zero, and never negative.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.arrays import chunks, per_row
from geoq.bounds.fields import Bounds, check_cells
from geoq.bounds.network import pinball
from geoq.checks import check_object, check_widths
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Grid, Layout, Shape, Shapes
from geoq.nets.mlp import MLP
from geoq.nets.unet import UNet
from geoq.quantiles import inverse_cdf_quantile
from geoq.training.loop import Training, TrainingResult, seeded, train, warn_if_untrained

# A cell without any error starts at this fraction of the mean rate of its channel.
INITIAL_FRACTION = 0.01


class ScaledRate(nn.Module):
    r"""The function ||psi|| h(T(psi)); its state dict contains T, u, b and the weights of the network n.

    .. math:: h(\psi) = u \, \operatorname{softplus}(n(T(\psi)) + b) / \operatorname{softplus}(0)

    The network is an MLP, or for fields a U-Net that sees the displacement as a field, and the support distance through FiLM.

    The typical rate u and the offset b of each coordinate are chosen so that the training starts near the quantile of r /
    ||psi||, whatever the units of the data are. Normally u is this quantile, or the mean of r / ||psi|| if the mean is larger,
    and b is 0. If errors are so rare that the quantile is 0, u is the mean of the nonzero rates, and b makes h start at the mean
    of all rates. With the mean of all rates as u, the network would have to return 1000 in a cell that is wrong once in a
    thousand tuples.

    The last ``n_axes`` axes of a displacement and of an error are the grid; 0 without a grid. ``widths`` are the widths of the
    hidden layers, or the channels at each resolution of the U-Net.
    """

    def __init__(self, z_shape: Shape, field_shape: Shape, n_axes: int, widths: Shape) -> None:
        super().__init__()
        shapes = {"z_shape": z_shape, "field_shape": field_shape}
        self.config = {**shapes, "n_axes": n_axes, "widths": widths}
        self.n_axes, n_features = n_axes, math.prod(z_shape) + 1
        # The channels and the cells of the displacement.
        self.seen_shape = (-1, *z_shape[len(z_shape) - n_axes :])
        n_out = math.prod(field_shape[: len(field_shape) - n_axes])
        if n_axes:
            n_in = math.prod(z_shape[: len(z_shape) - n_axes])
            self.network: nn.Module = UNet(n_in, n_out, n_spatial=n_axes, widths=widths)
        else:
            self.network = MLP(n_features, n_out, hidden=widths)
        self.mean = nn.Buffer(torch.zeros(n_features))
        self.scale = nn.Buffer(torch.ones(n_features))
        self.typical_rate = nn.Buffer(torch.ones(field_shape))
        self.offset = nn.Buffer(torch.zeros(field_shape))

    def forward(self, features: Features) -> Float[Tensor, " n *field"]:
        psi, norm = (torch.from_numpy(v).to(self.mean) for v in (features.flat, features.norm))
        seen: tuple[Tensor, ...] = ((psi - self.mean) / self.scale,)
        if self.n_axes:
            seen = seen[0][:, :-1].unflatten(1, self.seen_shape), seen[0][:, -1]
        output = self.network(*seen).view(-1, *self.offset.shape)
        rate = nn.functional.softplus(output + self.offset)
        norm = norm.view(-1, *(1,) * self.offset.ndim)
        increment: Tensor = norm * self.typical_rate * (rate / math.log(2))
        return increment

    @torch.no_grad()
    def increments(self, features: Features) -> Bounds:
        """The increments of queries, computed for a limited number of rows at a time."""
        numbers = max(features.displacement[:1].size, self.offset.numel())
        parts = [self(features[rows]) for rows in chunks(len(features), numbers)]
        return torch.cat(parts).cpu().numpy()

    def start(self, tuples: Tuples, quantile: float) -> None:
        """Set T, u and b from the calibration tuples."""
        increment, norm = tuples.increment, tuples.features.norm
        positive = norm > 0
        # Without displacements all rates are zero.
        rate = increment[positive] / per_row(norm[positive], increment)
        rate = rate if len(rate) else 0 * increment
        upper, mean = np.nan_to_num(inverse_cdf_quantile(rate, quantile)), present_mean(rate)
        channel_mean = self.channel_mean(mean)
        initial = np.where(mean > 0, mean, INITIAL_FRACTION * channel_mean)
        nonzero = self.channel_mean(present_mean(np.where(np.isnan(rate), rate, rate > 0)))
        with np.errstate(divide="ignore", invalid="ignore"):
            nonzero_mean = np.where(nonzero > 0, channel_mean / nonzero, 0.0)
            ratio = initial / nonzero_mean
        rare = (upper == 0) & (nonzero_mean > 0)
        # Solve softplus(b) / softplus(0) = initial / nonzero_mean for b; the lower limit is one error in a million values.
        softplus = (math.log(2) * ratio).clip(1e-6, 30.0)
        offset = np.where(rare, np.log(np.expm1(softplus)), 0.0)
        typical_rate = np.where(rare, nonzero_mean, np.maximum(upper, initial))
        parts = dict(zip(("mean", "scale"), tuples.standardization, strict=True))
        parts |= {"typical_rate": typical_rate, "offset": offset}
        state = {name: torch.from_numpy(np.array(part)) for name, part in parts.items()}
        self.load_state_dict(state, strict=False)

    def channel_mean(self, values: Float[np.ndarray, " *field"]) -> Float[np.ndarray, " *field"]:
        """The mean over the grid of each channel; the values themselves if there is no grid."""
        grid = tuple(range(values.ndim - self.n_axes, values.ndim))
        return np.broadcast_to(values.mean(axis=grid, keepdims=True), values.shape)


def present_mean(values: Float[np.ndarray, " n *field"]) -> Float[np.ndarray, " *field"]:
    """The mean of each coordinate over the values that are not nan; 0 without any."""
    count = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nan_to_num(values).sum(axis=0) / np.maximum(count, 1))


@dataclass(frozen=True)
class FittedNormScaled:
    """A fitted bound of the paper: the function ||psi|| h(T(psi)), and the course of the training of h."""

    rate: ScaledRate
    training: TrainingResult

    def __call__(self, features: Features, quantile: float | None = None) -> Bounds:
        anchor = features.anchor_error
        return anchor + self.rate.increments(features).astype(anchor.dtype)

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        return "The bound is the anchor error plus the length of psi times a learned rate"


def _fit(
    widths: Shape, n_axes: int, tuples: Tuples, quantile: float, training: Training, weights: Any
) -> FittedNormScaled:
    """Train the rate with the pinball loss, each channel divided by its mean increment."""
    with seeded(training.random_state):
        z_shape = tuples.points.space.z.shape[1:]
        rate = ScaledRate(z_shape, tuples.field_shape, n_axes, widths)
    increment = torch.from_numpy(tuples.increment).float()
    # A network that is trained for a finite time fits the coordinates with large weights first, so channels in different units
    # get equal weights.
    typical = rate.channel_mean(present_mean(increment.numpy()))
    weight = np.where(typical > 0, 1 / np.where(typical > 0, typical, 1), 0)
    if weights:
        weight = weight * per_row(np.array(weights), weight)
    loss_weight = torch.from_numpy(weight).float()

    def loss(net: Any, rows: Tensor) -> Tensor:
        bound = net(tuples[rows.numpy()].features)
        missed = pinball(increment[rows].to(bound), bound, quantile)
        return (loss_weight.to(bound) * missed).mean()

    rate.start(tuples, quantile)
    # Dependent tuples, such as tuples of one point, stay on the same side of the split for early stopping.
    result = train(rate, loss, training, *training.hold_out(torch.from_numpy(tuples.group)))
    _check_not_zero(rate, tuples, quantile)
    if rate.typical_rate.any():
        warn_if_untrained([result], "the bound")
    return FittedNormScaled(rate, result)


def _check_not_zero(rate: ScaledRate, tuples: Tuples, quantile: float) -> None:
    """Raise for a trained rate that is zero in a coordinate with positive increments."""
    features = tuples.features
    positive = features.norm > 0
    if not positive.any():
        return
    largest = rate.increments(features).max(axis=0)
    failed = (largest == 0) & (inverse_cdf_quantile(tuples.increment[positive], quantile) > 0)
    if failed.any():
        raise RuntimeError(
            f"the bound returns the anchor error everywhere in {int(failed.sum())} of {failed.size} output coordinates, although "
            f"the {quantile:g} quantile of the calibration increments is positive there. Its training has failed; lower the "
            "learning_rate of its training, or change the random_state."
        )


@dataclass(frozen=True)
class NormScaledBound:
    r"""The paper's bound for scalar and vector errors.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + \|\psi\| \, h_\eta(T(\psi)), \quad h_\eta \text{ an MLP}

    Attributes:
        hidden: widths of the hidden layers of h.
        training: how h is trained.

    Example:
        >>> from geoq import GeoQ, Training
        >>> from geoq.parts import NormScaledBound
        >>> model = NormScaledBound(training=Training(n_steps=1000))
        >>> estimator = GeoQ.paper(lambda x: 2 * x, None, bound_model=model)
    """

    hidden: tuple[int, ...] = (64, 64)
    training: Training = Training(n_steps=3000, batch_size=256)

    def __post_init__(self) -> None:
        check_widths(self.hidden, "hidden", n_least=0)
        check_object(self.training, Training, "training", "Training(n_steps=1000)")

    def fit(self, tuples: Tuples, quantile: float) -> FittedNormScaled:
        """Train h on the calibration tuples."""
        return _fit(self.hidden, 0, tuples, quantile, self.training, ())


@dataclass(frozen=True)
class NormScaledFieldBound:
    r"""The paper's bound for fields.

    .. math:: \widehat E(x) = \overline E_{k_a}(x) + \|\psi\| \, h_\eta(T(\psi)), \quad
        h_\eta \text{ a U-Net conditioned on } \Delta d \text{ by FiLM}

    The displacement and the error are fields on the same grid. The error can have other channels than the displacement, for
    example 40 lead times of 3 variables.

    Attributes:
        widths: channels at each resolution of the U-Net.
        training: how h is trained.
        weights: weights in the loss along the first dimension of the error, for example weights that grow with the lead time as
            in the paper. An empty tuple means equal weights.

    Example:
        >>> from geoq.parts import NormScaledFieldBound
        >>> bound = NormScaledFieldBound(widths=(16, 32), weights=(1.0, 2.0))
    """

    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = Training(n_steps=2000, batch_size=16, check_every=50)
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_widths(self.widths, "widths")
        check_object(self.training, Training, "training", "Training(n_steps=1000)")

    def check_shapes(self, shapes: Shapes, layout: Layout) -> None:
        """Raise for displacements and errors on different grids, and for weights that do not fit the error."""
        check_cells(self, shapes, layout)
        if not (isinstance(layout.domain, Grid) and layout.on_cells and layout.holds(shapes.z)):
            raise ValueError(
                f"NormScaledFieldBound needs representations and errors on one grid, but a row of the representation has shape "
                f"{shapes.z} and an error has shape {shapes.error} with the cells {layout.cells} of {layout.domain}; put the "
                "grid last in both, or use NormScaledBound."
            )
        if self.weights and len(self.weights) != shapes.error[0]:
            raise ValueError(
                f"NormScaledFieldBound has {len(self.weights)} weights, but an error has shape {shapes.error}; pass "
                f"{shapes.error[0]} weights, one for each index of its first dimension."
            )

    def fit(self, tuples: Tuples, quantile: float) -> FittedNormScaled:
        """Train h on the calibration tuples."""
        n_axes = tuples.points.layout.n_axes
        return _fit(self.widths, n_axes, tuples, quantile, self.training, self.weights)
