"""A small network for the fields of a query, on a grid or on a mesh, and the fields that it can see (with torch)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.arrays import chunks
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Grid, Layout, Shapes
from geoq.nets.mesh import MeshNet
from geoq.nets.unet import UNet

# Normalisations are computed from this many rows, and factors are validated on this many rows; large fields use fewer.
MAX_ROWS, MAX_VALUES = 256, 2**27
# Variances of the whitened directions are at least this fraction of the largest one, so that noise is not amplified.
MIN_VARIANCE = 1e-3

# A function that returns what a network sees, one row per query: fields whose last axes are the cells, or a few numbers.
Seen = Callable[[Features, Any], np.ndarray]


def inputs(features: Features, _: Any) -> np.ndarray:
    """The coordinates of the inputs."""
    return features.inputs


def prediction(features: Features, _: Any) -> np.ndarray:
    """The prediction of the surrogate."""
    return features.prediction


def displacement(features: Features, _: Any) -> np.ndarray:
    """The displacement from the anchors, in representation space."""
    return features.displacement


def anchor_error(features: Features, _: Any) -> np.ndarray:
    """The mean observed error of the anchors."""
    return features.anchor_error


def log_bound(features: Features, bound: np.ndarray) -> np.ndarray:
    """The logarithm of the bound that a factor multiplies."""
    log: np.ndarray = np.log(np.maximum(bound, np.finfo(np.float32).tiny))
    return log.reshape(features.anchor_error.shape)


def expected_error(features: Features, _: Any) -> np.ndarray:
    """The logarithm of the error that the companion expects."""
    log: np.ndarray = np.log(np.maximum(features.expected_error, np.finfo(np.float32).tiny))
    return log.reshape(features.anchor_error.shape)


# The functions that a file can name.
FUNCTIONS = (inputs, prediction, displacement, anchor_error, log_bound, expected_error)


def check_sees(sees: Any) -> None:
    """Raise for an empty list of fields, and for anything that is not a function."""
    if not isinstance(sees, Sequence) or not sees or not all(map(callable, sees)):
        raise ValueError(
            f"sees={sees!r}, but a network must see at least one field; pass functions such as sees=(inputs, prediction) (from "
            "geoq.parts import inputs, prediction)."
        )


@dataclass(frozen=True)
class Sight:
    """What networks see of queries, as channels on the cells of a layout."""

    sees: tuple[Seen, ...]
    layout: Layout

    def __call__(
        self, features: Features, bound: Any = None
    ) -> tuple[Float[Tensor, " n n_channels *cells"], Float[Tensor, " n"]]:
        """The input of a network: all channels, the channels of the inputs first, and the support distance."""
        ordered = sorted(self.sees, key=lambda seen: seen is not inputs)
        channels = [self.layout.channels(seen(features, bound)) for seen in ordered]
        distance = features.support_distance.astype(np.float32)
        return torch.from_numpy(np.concatenate(channels, axis=1)), torch.from_numpy(distance)

    def check(self, shapes: Shapes) -> None:
        """Raise for fields to be seen that lie on other cells."""
        rows_seen = (
            (inputs, "inputs", shapes.inputs),
            (prediction, "outputs", shapes.outputs),
            (displacement, "representation", shapes.z),
        )
        for seen, what, shape in rows_seen:
            # The shapes are compared, not the sizes: another grid can have equally many cells.
            if seen in self.sees and not self.layout.is_visible(shape):
                raise ValueError(
                    f"sees contains {seen.__name__}, but a row of the {what} has shape {shape} and an error has shape "
                    f"{shapes.error}, which do not end in the same cells, {self.layout.cells}; put the cells last in both, or "
                    f"remove {seen.__name__} from sees."
                )

    def maker(
        self, tuples: Tuples, widths: tuple[int, ...], dropout: float = 0.0, bound_of: Any = None
    ) -> "Callable[[], FieldNetwork]":
        """A function that makes a new network, with the normalisation of some calibration tuples."""
        parts, some = [], tuples.subsample(max_rows(tuples.field_shape))
        for rows in chunks(len(some), 4 * math.prod(tuples.field_shape)):
            features = some[rows].features
            parts.append(self(features, bound_of and bound_of(features)))
        channels, distance = (torch.cat(part) for part in zip(*parts, strict=True))
        own = self.layout.channels(tuples.points.inputs[:1])
        state = normalization(channels, own.shape[1] if inputs in self.sees else 0, distance)
        n_in, n_out = channels.shape[1], self.layout.n_outputs(tuples.field_shape)
        sizes: Any = {"layout": self.layout, "widths": widths, "dropout": dropout}

        def make() -> FieldNetwork:
            network = FieldNetwork(n_in, n_out, **sizes)
            network.load_state_dict(state, strict=False)
            return network

        return make

    @property
    def words(self) -> list[str]:
        """What the networks see, in words."""
        return [s.__name__.replace("_", " ") if s in FUNCTIONS else "a function" for s in self.sees]


def max_rows(field_shape: tuple[int, ...]) -> int:
    """How many rows hold at most ``MAX_VALUES`` values; at least 32, so that a bound can be validated."""
    return min(MAX_ROWS, max(32, MAX_VALUES // math.prod(field_shape)))


def normalization(
    channels: Float[Tensor, " n n_channels *cells"], n_inputs: int, distance: Float[Tensor, " n"]
) -> dict[str, Tensor]:
    """The normalisation that standardises each channel, and decorrelates the first ``n_inputs`` channels.

    If the inputs are states at successive times, decorrelation gives their differences the same variance as the states.
    """
    flat = channels.transpose(0, 1).reshape(channels.shape[1], -1).double()
    deviation = flat.std(dim=1, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    whitening = torch.diag(1 / deviation)
    if n_inputs > 1:
        standardised = flat[:n_inputs] / deviation[:n_inputs, None]
        variances, directions = torch.linalg.eigh(torch.cov(standardised))
        least = (MIN_VARIANCE * variances.max()).clamp(min=1e-30)
        own = directions / variances.clamp(min=least).sqrt()
        whitening[:n_inputs, :n_inputs] = own / deviation[:n_inputs, None]
    log = distance.clamp(min=1e-30).log()
    spread = log.std(correction=0)
    spread = spread if spread > 0 else spread + 1
    distances = torch.stack([log.mean(), spread, log.min(), log.max()])
    return {"mean": flat.mean(dim=1), "whitening": whitening, "distances": distances}


class FieldNetwork(nn.Module):
    """A network on a domain and the normalisation of its inputs, in one state dict. A new network returns 0 everywhere.

    If the errors do not lie on the cells, it returns one number per channel, the mean over the cells.
    """

    def __init__(
        self, n_in: int, n_out: int, *, layout: Layout, widths: tuple[int, ...], dropout: float
    ) -> None:
        super().__init__()
        domain, sizes = layout.domain, {"widths": widths, "dropout": dropout}
        self.config = {"n_in": n_in, "n_out": n_out, "layout": layout, **sizes}
        on: dict[str, Any] = {"mesh": domain}
        if isinstance(domain, Grid):
            on = {"n_spatial": domain.n_axes, "periodic": domain.periodic}
        make: Any = UNet if isinstance(domain, Grid) else MeshNet
        self.unet = make(n_in, n_out, **on, **sizes)
        self.pooled = not layout.on_cells
        for parameter in self.unet.output.parameters():
            nn.init.zeros_(parameter)
        self.mean = nn.Buffer(torch.zeros(n_in))
        self.whitening = nn.Buffer(torch.eye(n_in))
        self.distances = nn.Buffer(torch.tensor([0.0, 1.0, 0.0, 0.0]))

    def forward(self, seen: tuple[Tensor, Tensor]) -> Float[Tensor, " n n_values"]:
        channels, distance = (part.to(self.mean) for part in seen)
        centred = channels - self.mean.view(-1, *(1,) * (channels.ndim - 2))
        white = torch.tensordot(self.whitening, centred, dims=([0], [1]))
        centre, spread, low, high = self.distances
        # The network never sees a distance outside the range of the calibration.
        log = distance.clamp(min=1e-30).log().clamp(low, high)
        answer: Tensor = self.unet(white.transpose(0, 1), (log - centre) / spread)
        return answer.flatten(2).mean(dim=2) if self.pooled else answer.flatten(1)


def pinball(error: Tensor, bound: Tensor, quantile: float) -> Tensor:
    """Elementwise pinball loss; 0 where the error is nan."""
    excess = error - bound
    return torch.where(error.isnan(), 0, torch.maximum(quantile * excess, (quantile - 1) * excess))
