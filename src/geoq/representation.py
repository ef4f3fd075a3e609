"""The representation phi, and the standardisation that serves as nu (of the inputs) and as T (of the features)."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array


@runtime_checkable
class Representation(Protocol):
    """The representation phi: one row of any shape per input, fixed and shared by all folds."""

    def __call__(self, x: Array, /) -> Array: ...


def identity(x: Array) -> Array:
    r"""The inputs in their own units, which is the representation of the paper.

    .. math:: \phi = \operatorname{Id}_{\mathcal X}
    """
    return x


@dataclass(frozen=True)
class Standardization:
    r"""Centring and scaling of each coordinate by its population mean and standard deviation.

    .. math:: \nu(x) = (x - \mu) / \sigma

    A constant coordinate carries no information about distances. Its scale is its absolute value, or 1 if it is 0, which avoids a
    division by almost zero.

    Attributes:
        mean: mean of each coordinate.
        scale: standard deviation of each coordinate; see above for constant ones.

    Example:
        >>> import torch
        >>> points = torch.tensor([[0.0], [2.0]])
        >>> Standardization.fit(points)(points)
        tensor([[-1.],
                [ 1.]])
    """

    mean: Float[Tensor, " *coordinates"]
    scale: Float[Tensor, " *coordinates"]

    @classmethod
    def fit(cls, points: Float[Tensor, " n *coordinates"]) -> "Standardization":
        """Mean and scale of each coordinate over the points."""
        scale = points.std(dim=0, correction=0)
        # Exact equality is tested, because rounding gives a constant column a deviation of 1e-17.
        constant = points.amin(dim=0) == points.amax(dim=0)
        mean = points.mean(dim=0)
        size = mean.abs()
        scale = torch.where(constant | (scale == 0), size, scale)
        return cls(mean, scale.masked_fill(scale == 0, 1.0))

    def __call__(
        self, points: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        return (points - self.mean) / self.scale
