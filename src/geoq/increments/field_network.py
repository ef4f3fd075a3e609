"""A small convolutional network for the fields of a query, and the fields that it can see."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes, check_spatial, warn_of_channels_last
from geoq.nets.unet import UNet

# Normalisations are computed from this many rows, and factors are validated on this many rows; large fields use fewer.
MAX_ROWS = 256
MAX_VALUES = 2**27
# Variances of the whitened directions are at least this fraction of the largest one, so that noise is not amplified.
MIN_VARIANCE = 1e-3

# A function that returns a field that a network sees: one row per query, whose last dimensions are the grid of the error.
Seen = Callable[[GeometricFeatures, Tensor | None], Tensor]


def inputs(features: GeometricFeatures, bound: Tensor | None) -> Tensor:
    """The standardised inputs nu(x)."""
    del bound
    return features.inputs


def prediction(features: GeometricFeatures, bound: Tensor | None) -> Tensor:
    """The prediction of the surrogate."""
    del bound
    return features.prediction


def displacement(features: GeometricFeatures, bound: Tensor | None) -> Tensor:
    """The displacement from the anchors, in representation space."""
    del bound
    return features.displacement


def anchor_error(features: GeometricFeatures, bound: Tensor | None) -> Tensor:
    """The mean observed error of the anchors."""
    del bound
    return features.anchor_error


def log_bound(features: GeometricFeatures, bound: Tensor | None) -> Tensor:
    """The logarithm of the bound that a factor multiplies."""
    del features
    assert bound is not None
    return bound.clamp(min=torch.finfo(torch.float32).tiny).log()


SEEN: dict[str, Seen] = {
    seen.__name__: seen
    for seen in (inputs, prediction, displacement, anchor_error, log_bound)
}


def name_of(seen: Seen) -> str | None:
    """The name of a function in ``SEEN``; None for a function of the user."""
    return next((name for name, own in SEEN.items() if own is seen), None)


def names_of(sees: Sequence[Seen]) -> list[str]:
    """The names of the functions, for a file; a function of the user is refused."""
    names = []
    for seen in sees:
        name = name_of(seen)
        if name is None:
            raise ValueError(
                f"sees contains {seen!r}, a function of the user, which a file cannot hold; use some of {', '.join(SEEN)} "
                "(from geoq.increments)."
            )
        names.append(name)
    return names


def channels_of(
    sees: Sequence[Seen],
    features: GeometricFeatures,
    bound: Tensor | None,
    grid: tuple[int, ...],
) -> Float[Tensor, " n n_channels *grid"]:
    """All fields that a network sees, as channels on one grid; the channels of the inputs come first."""
    ordered = sorted(sees, key=lambda seen: seen is not inputs)
    parts = [seen(features, bound) for seen in ordered]
    return torch.cat([p.reshape(len(p), -1, *grid).float() for p in parts], dim=1)


def n_input_channels(
    sees: Sequence[Seen], features: GeometricFeatures, grid: tuple[int, ...]
) -> int:
    """How many of the channels are standardised inputs."""
    return features.inputs[0].numel() // math.prod(grid) if inputs in sees else 0


def check_sees(sees: Any) -> None:
    """Refuse an empty list of fields, and anything that is not a function."""
    usable = isinstance(sees, Sequence) and all(map(callable, sees))
    if not usable or not sees:
        raise ValueError(
            f"sees={sees!r}, but a network must see at least one field; pass functions such as sees=(inputs, prediction) "
            "(from geoq.increments import inputs, prediction)."
        )


def check_grid(sees: Sequence[Seen], shapes: Shapes, n_spatial: int) -> None:
    """Refuse errors without a grid, and seen fields that lie on another grid."""
    check_spatial(n_spatial)
    if len(shapes.error) < n_spatial:
        raise ValueError(
            f"n_spatial={n_spatial}, but an error has shape {shapes.error}; put the grid last, or use an increment "
            "model for tables."
        )
    warn_of_channels_last(shapes.error, n_spatial)
    for name, what, shape in (
        ("inputs", "inputs", shapes.inputs),
        ("prediction", "outputs", shapes.outputs),
        ("displacement", "representation", shapes.z),
    ):
        # The shapes are compared, not the sizes: another grid can have equally many cells.
        if SEEN[name] in sees and shape[-n_spatial:] != shapes.error[-n_spatial:]:
            raise ValueError(
                f"sees contains {name}, but a row of the {what} has shape {shape} and an error has shape "
                f"{shapes.error}, which do not end in the same grid; put the grid last in both, or remove "
                f"{name} from sees."
            )


def max_rows(field_shape: tuple[int, ...]) -> int:
    """How many rows hold at most ``MAX_VALUES`` values; at least 32, so that a bound can be validated."""
    return min(MAX_ROWS, max(32, MAX_VALUES // math.prod(field_shape)))


class FieldNetwork(nn.Module):
    """A U-Net and the normalisation of its inputs, in one state dict. A new network returns 0 everywhere.

    Args:
        n_in: number of channels that it sees.
        n_out: number of channels that it returns.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        widths: channels at each resolution.
        dropout: fraction of the activations that are dropped in training.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_spatial: int,
        widths: tuple[int, ...],
        dropout: float,
    ) -> None:
        super().__init__()
        self.unet = UNet(
            n_in, n_out, n_spatial=n_spatial, widths=widths, dropout=dropout
        )
        for parameter in self.unet.output.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("mean", torch.zeros(n_in))
        self.register_buffer("whitening", torch.eye(n_in))
        self.register_buffer("distances", torch.tensor([0.0, 1.0, 0.0, 0.0]))
        self.mean: Tensor
        self.whitening: Tensor
        self.distances: Tensor

    def fit_normalization(
        self, channels: Tensor, n_inputs: int, distance: Float[Tensor, " n"]
    ) -> None:
        """Standardise each channel, and decorrelate the first ``n_inputs`` channels.

        If the inputs are states at successive times, decorrelation gives their differences the same variance as the states.

        Args:
            channels: the channels of some rows, standardised inputs first.
            n_inputs: number of channels of standardised inputs.
            distance: support distances of these rows.
        """
        flat = channels.transpose(0, 1).reshape(channels.shape[1], -1).double()
        self.mean.copy_(flat.mean(dim=1))
        deviation = flat.std(dim=1, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)
        self.whitening.copy_(torch.diag(1 / deviation))
        if n_inputs > 1:
            standardised = flat[:n_inputs] / deviation[:n_inputs, None]
            variances, directions = torch.linalg.eigh(torch.cov(standardised))
            least = (MIN_VARIANCE * variances.max()).clamp(min=1e-30)
            uncorrelated = directions / variances.clamp(min=least).sqrt()
            self.whitening[:n_inputs, :n_inputs] = (
                uncorrelated / deviation[:n_inputs, None]
            )
        log = distance.clamp(min=1e-30).log()
        spread = log.std(correction=0)
        self.distances.copy_(
            torch.stack(
                [log.mean(), spread if spread > 0 else spread + 1, log.min(), log.max()]
            )
        )

    def copy_normalization(self, network: "FieldNetwork") -> None:
        """Copy the normalisation of another network."""
        for own, other in zip(self.buffers(), network.buffers(), strict=True):
            own.copy_(other)

    def forward(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        channels, distance = seen
        centred = channels - self.mean.view(-1, *(1,) * (channels.ndim - 2))
        white = torch.tensordot(self.whitening, centred, dims=([0], [1])).transpose(
            0, 1
        )
        centre, spread, low, high = self.distances
        # The network never sees a distance outside the range of the calibration.
        log = distance.float().clamp(min=1e-30).log().clamp(low, high)
        answer: Tensor = self.unet(white, (log - centre) / spread)
        return answer.flatten(1)
