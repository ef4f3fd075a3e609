"""phi, and the one class of the two fixed standardisations: nu of the inputs, T of the features."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array


@runtime_checkable
class Representation(Protocol):
    """phi: one row of any shape per input, fixed and shared by all folds."""

    def __call__(self, x: Array, /) -> Array: ...


def identity(x: Array) -> Array:
    r"""The inputs as they are, in their own units.

    .. math:: \phi = \operatorname{Id}_{\mathcal X}
    """
    return x


@dataclass(frozen=True)
class Standardization:
    r"""Each coordinate centred and scaled by its population mean and standard deviation.

    .. math:: \nu(x) = (x - \mu) / \sigma

    A constant coordinate keeps scale 1: it says nothing about who is near, and must not say it loudly.
    """

    mean: Float[Tensor, " *coordinates"]
    scale: Float[Tensor, " *coordinates"]

    @classmethod
    def fit(cls, points: Float[Tensor, " n *coordinates"]) -> "Standardization":
        """Mean and scale of each coordinate over the points."""
        scale = points.std(dim=0, correction=0)
        # Exact equality, not a small deviation: rounding leaves a constant column a deviation of 1e-17.
        constant = points.amin(dim=0) == points.amax(dim=0)
        return cls(
            mean=points.mean(dim=0),
            scale=scale.masked_fill(constant | (scale == 0), 1.0),
        )

    def __call__(
        self, points: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        return (points - self.mean) / self.scale
