"""A small network for the fields of a query, on a grid or on a mesh, and the fields that it can see."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.geometry import GeometricFeatures
from geoq.increments.domain import Layout
from geoq.increments.shapes import Shapes

# Normalisations are computed from this many rows, and factors are validated on this many rows; large fields use fewer.
MAX_ROWS = 256
MAX_VALUES = 2**27
# Variances of the whitened directions are at least this fraction of the largest one, so that noise is not amplified.
MIN_VARIANCE = 1e-3

# A function that returns what a network sees, one row per query: fields whose last axes are the cells, or a few numbers.
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
    assert bound is not None
    log = bound.clamp(min=torch.finfo(torch.float32).tiny).log()
    return log.reshape(features.anchor_error.shape)


SEEN: dict[str, Seen] = {
    seen.__name__: seen
    for seen in (inputs, prediction, displacement, anchor_error, log_bound)
}


def names_of(sees: Sequence[Seen]) -> list[str]:
    """The names of the functions, for a file; a function of the user is refused."""
    for seen in sees:
        if seen not in SEEN.values():
            raise ValueError(
                f"sees contains {seen!r}, a function of the user, which a file cannot hold; use some of {', '.join(SEEN)} "
                "(from geoq.increments)."
            )
    return [seen.__name__ for seen in sees]


def words_of(sees: Sequence[Seen]) -> list[str]:
    """What the networks see, in words."""
    return [
        seen.__name__.replace("_", " ") if seen in SEEN.values() else "a function"
        for seen in sees
    ]


def check_sees(sees: Any) -> None:
    """Refuse an empty list of fields, and anything that is not a function."""
    usable = isinstance(sees, Sequence) and all(map(callable, sees))
    if not usable or not sees:
        raise ValueError(
            f"sees={sees!r}, but a network must see at least one field; pass functions such as sees=(inputs, prediction) "
            "(from geoq.increments import inputs, prediction)."
        )


@dataclass(frozen=True)
class View:
    """What networks see of queries, as channels on the cells of a layout."""

    sees: Sequence[Seen]
    layout: Layout

    def __call__(
        self, features: GeometricFeatures, bound: Tensor | None = None
    ) -> tuple[Float[Tensor, " n n_channels *cells"], Float[Tensor, " n"]]:
        """The input of a network: all channels, the channels of the inputs first, and the support distance."""
        ordered = sorted(self.sees, key=lambda seen: seen is not inputs)
        channels = [self.layout.channels(seen(features, bound)) for seen in ordered]
        return torch.cat(channels, dim=1), features.support_distance

    def normalize(
        self,
        networks: "Sequence[FieldNetwork]",
        channels: Float[Tensor, " n n_channels *cells"],
        features: GeometricFeatures,
    ) -> None:
        """Set the normalisation of all networks from the channels of some rows."""
        n_inputs = 0
        if inputs in self.sees:
            n_inputs = self.layout.channels(features.inputs[:1]).shape[1]
        distance = features.support_distance.float()
        networks[0].fit_normalization(channels, n_inputs, distance)
        buffers = dict(networks[0].named_buffers())
        for network in networks[1:]:
            network.load_state_dict(buffers, strict=False)

    def check(self, shapes: Shapes) -> None:
        """Refuse fields to be seen that lie on other cells."""
        rows_seen = {
            inputs: ("inputs", shapes.inputs),
            prediction: ("outputs", shapes.outputs),
            displacement: ("representation", shapes.z),
            anchor_error: ("errors", shapes.error),
            log_bound: ("errors", shapes.error),
        }
        for seen, (what, shape) in rows_seen.items():
            # The shapes are compared, not the sizes: another grid can have equally many cells.
            if seen in self.sees and not self.layout.is_visible(shape):
                name = seen.__name__
                raise ValueError(
                    f"sees contains {name}, but a row of the {what} has shape {shape} and an error has shape {shapes.error}, "
                    f"which do not end in the same cells, {self.layout.cells}; put the cells last in both, or remove {name} from sees."
                )


def max_rows(field_shape: tuple[int, ...]) -> int:
    """How many rows hold at most ``MAX_VALUES`` values; at least 32, so that a bound can be validated."""
    return min(MAX_ROWS, max(32, MAX_VALUES // math.prod(field_shape)))


class FieldNetwork(nn.Module):
    """A network on a domain and the normalisation of its inputs, in one state dict. A new network returns 0 everywhere.

    Args:
        n_in: number of channels that it sees.
        n_out: number of channels that it returns.
        layout: where the fields lie. If the errors do not lie on the cells, the network returns one number per channel, the mean
            over the cells.
        widths: channels at each resolution.
        dropout: fraction of the activations that are dropped in training.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        layout: Layout,
        widths: tuple[int, ...],
        dropout: float,
    ) -> None:
        super().__init__()
        self.unet = layout.domain.network(n_in, n_out, widths, dropout)
        self.pooled = not layout.on_cells
        for parameter in self.unet.output.parameters():
            nn.init.zeros_(parameter)
        self.mean = nn.Buffer(torch.zeros(n_in))
        self.whitening = nn.Buffer(torch.eye(n_in))
        self.distances = nn.Buffer(torch.tensor([0.0, 1.0, 0.0, 0.0]))

    def fit_normalization(
        self, channels: Tensor, n_inputs: int, distance: Float[Tensor, " n"]
    ) -> None:
        """Standardise each channel, and decorrelate the first ``n_inputs`` channels.

        If the inputs are states at successive times, decorrelation gives their differences the same variance as the states.
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
            own = directions / variances.clamp(min=least).sqrt()
            self.whitening[:n_inputs, :n_inputs] = own / deviation[:n_inputs, None]
        log = distance.clamp(min=1e-30).log()
        spread = log.std(correction=0)
        spread = spread if spread > 0 else spread + 1
        self.distances.copy_(torch.stack([log.mean(), spread, log.min(), log.max()]))

    def forward(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        channels, distance = seen
        centred = channels - self.mean.view(-1, *(1,) * (channels.ndim - 2))
        white = torch.tensordot(self.whitening, centred, dims=([0], [1]))
        centre, spread, low, high = self.distances
        # The network never sees a distance outside the range of the calibration.
        log = distance.float().clamp(min=1e-30).log().clamp(low, high)
        answer: Tensor = self.unet(white.transpose(0, 1), (log - centre) / spread)
        return answer.flatten(2).mean(dim=2) if self.pooled else answer.flatten(1)
