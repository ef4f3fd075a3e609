"""How far a predicted value lies from what the data do: the error of a forecast that has forgotten its start."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.increment import check_quantile
from geoq.surrogate import Array, to_tensor

# Order statistics kept per coordinate, and places at which the table is computed; between them it is interpolated.
N_ORDERED, N_PLACES = 2048, 256


@dataclass(frozen=True)
class Climatology:
    r"""Upper quantile of the distance of a value to the states of the data, coordinate by coordinate.

    .. math:: C_j(v) = \widehat Q_\tau(\{|v - u_{ij}|\}_i)

    Of n sorted values any m = ceil(tau n) neighbouring ones lie in an interval of centre c_i and half width h_i, so
    that C(v) = min_i(|v - c_i| + h_i). It is tabulated between the least and the greatest value of each coordinate;
    outside it grows by the distance to them, with slope 1.
    """

    low: Float[Tensor, " n_coordinates"]
    high: Float[Tensor, " n_coordinates"]
    table: Float[Tensor, " n_coordinates n_places"]

    @staticmethod
    def fit(states: Array, quantile: float) -> "Climatology":
        """Tabulate the quantiles of the states given, one per row."""
        check_quantile(quantile, "quantile")
        values = to_tensor(states, "states").reshape(len(states), -1)
        places = torch.linspace(
            0, 1, N_PLACES, dtype=values.dtype, device=values.device
        )
        low, high = values.amin(dim=0), values.amax(dim=0)
        table = [
            _distances(_ordered(column), a + (b - a) * places, quantile)
            for column, a, b in zip(values.T, low, high, strict=True)
        ]
        return Climatology(low, high, torch.stack(table))

    def __call__(
        self, states: Float[Tensor, " *rows n_coordinates"]
    ) -> Float[Tensor, " *rows n_coordinates"]:
        low, high, table = (p.to(states) for p in (self.low, self.high, self.table))
        inside = torch.minimum(torch.maximum(states, low), high)
        span = torch.where(high > low, high - low, 1.0)
        at = (inside - low) / span * (N_PLACES - 1)
        below = at.floor().clamp(0, N_PLACES - 2)
        share = at - below
        coordinate = torch.arange(len(low), device=states.device)
        index = coordinate * N_PLACES + below.long()
        flat = table.flatten()
        known = flat[index] * (1 - share) + flat[index + 1] * share
        return known + (states - inside).abs()


def _ordered(values: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    """Values in order, thinned evenly to at most ``N_ORDERED`` order statistics."""
    ordered = values.sort().values
    if len(ordered) <= N_ORDERED:
        return ordered
    kept = torch.linspace(0, len(ordered) - 1, N_ORDERED, dtype=torch.float64)
    return ordered[kept.round().long().to(ordered.device)]


def _distances(
    ordered: Float[Tensor, " m"], places: Float[Tensor, " p"], quantile: float
) -> Float[Tensor, " p"]:
    n_inside = max(1, math.ceil(len(ordered) * quantile - 1e-9))
    left, right = ordered[: len(ordered) - n_inside + 1], ordered[n_inside - 1 :]
    centre, half_width = (left + right) / 2, (right - left) / 2
    return ((places[:, None] - centre).abs() + half_width).amin(dim=1)
