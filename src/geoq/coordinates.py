"""The coordinates T of the inputs: standardised, after a logarithm for positive inputs that span several orders of magnitude."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from geoq.quantiles import inverse_cdf_quantile
from geoq.representation import Standardization
from geoq.table import Names

# An input is used as a logarithm if it is positive, has at least this many distinct values, spans this factor, and its middle
# nine tenths span the second factor. A uniform input from 0 on spans 19 there, whatever its smallest value is.
MIN_DISTINCT, MIN_SPAN, MIN_MIDDLE_SPAN = 10, 1e3, 1e2
# A constant input has changed if it differs by more than this fraction of its value; a constant 0 has no such fraction.
CHANGED = 1e-6


@dataclass(frozen=True)
class Coordinates:
    r"""T: each input standardised by its mean and standard deviation, after a logarithm where ``log`` is true.

    .. math:: T_j(x) = (x_j - \mu_j) / \sigma_j \quad \text{or} \quad (\ln x_j - \mu_j) / \sigma_j

    The scale of a constant input is its absolute value, or 1 if it is 0. Without logarithms this is the paper's nu.

    Attributes:
        mean: mean of each input, after the logarithm.
        scale: standard deviation of each input, after the logarithm.
        log: which inputs are used as logarithms.
        constant: which inputs have a single value in the data.
    """

    mean: Float[Tensor, " *coordinates"]
    scale: Float[Tensor, " *coordinates"]
    log: Bool[Tensor, " *coordinates"]
    constant: Bool[Tensor, " *coordinates"]

    @classmethod
    def fit(
        cls, points: Float[Tensor, " n *coordinates"], *, logarithms: bool
    ) -> "Coordinates":
        """Mean and scale of each input over the points."""
        low, high = points.amin(dim=0), points.amax(dim=0)
        constant = low == high
        log = torch.zeros_like(constant)
        if logarithms:
            log = (low > 0) & (high >= MIN_SPAN * low) & ~constant
            for place in log.nonzero():
                column = points[(slice(None), *place)]
                low_end, high_end = (
                    inverse_cdf_quantile(column, q) for q in (0.05, 0.95)
                )
                distinct = len(column.unique()) >= MIN_DISTINCT
                log[tuple(place)] = distinct and high_end >= MIN_MIDDLE_SPAN * low_end
        standard = Standardization.fit(log_where(points, log))
        return cls(standard.mean, standard.scale, log, constant)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.mean.shape)

    @property
    def column(self) -> Int[Tensor, " n_coordinates"]:
        """The number of the input that each coordinate comes from."""
        return torch.arange(self.mean.numel(), device=self.mean.device)

    def is_number(self, j: int) -> bool:
        """Whether coordinate j is a number; the coordinates of a table can also be indicators."""
        del j
        return True

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        return dict(vars(self))

    def __call__(
        self, points: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        standardise = Standardization(self.mean, self.scale)
        return standardise(log_where(points, self.log))

    def inverse(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        """The inputs that have these coordinates."""
        values = self.mean + self.scale * coordinates
        return torch.where(self.log, values.exp(), values)

    def changed(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Bool[Tensor, " n *coordinates"]:
        """Which constant inputs differ from their value in the data."""
        return changed(self.constant, self.mean, coordinates)

    def changed_rows(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Bool[Tensor, " n"] | None:
        """Which queries change a constant input; None if no input is constant."""
        if not self.constant.any():
            return None
        return self.changed(coordinates).reshape(len(coordinates), -1).any(dim=1)

    def explain(
        self, coordinates: Float[Tensor, " 1 *coordinates"], names: Names | None = None
    ) -> str:
        """Which constant input a query changes; an empty text if it changes none."""
        changed = self.changed(coordinates).reshape(-1).nonzero()
        if not len(changed):
            return ""
        j = int(changed[0, 0])
        value, constant = (
            float(part.reshape(-1)[j])
            for part in (self.inverse(coordinates), self.mean)
        )
        label = f"input {j if names is None else names[j]}"
        return f"{label} is {value:.4g}, but it is {constant:.4g} in all the data, so its effect is unknown"


def changed(
    constant: Bool[Tensor, " *coordinates"],
    mean: Float[Tensor, " *coordinates"],
    coordinates: Float[Tensor, " n *coordinates"],
) -> Bool[Tensor, " n *coordinates"]:
    """Which constant coordinates differ from their value in the data, beyond rounding."""
    allowed = torch.where(mean == 0, 0.0, CHANGED)
    return constant & (coordinates.abs() > allowed)


def log_where(points: Tensor, log: Tensor) -> Tensor:
    """The points, with logarithms where ``log`` is true."""
    if not log.any():
        return points
    tiny = torch.finfo(points.dtype).tiny
    return torch.where(log, points.clamp(min=tiny).log(), points)
