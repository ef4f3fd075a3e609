"""The climatology: a natural scale of the error of a chaotic system, given the prediction."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat
from geoq.core.geometry import Features
from geoq.quantiles import rank

# At most this many order statistics are used per coordinate, and the table has this many points per coordinate.
N_ORDERED, N_PLACES = 2048, 256


@dataclass(frozen=True)
class Climatology:
    """The natural scale of a chaotic system: the upper quantile of the distance of a value to the values in the data.

    The error of a forecast that has lost all information about its initial state has this size.

    Example:
        >>> from geoq.parts import Climatology, TwoLawBound
        >>> bound = TwoLawBound(reference=Climatology())
    """

    def fit(self, outputs: Float[np.ndarray, " n *output"], quantile: float) -> "FittedClimatology":
        """Tabulate the quantiles of the distances to the outputs of all points."""
        low, high, table = [], [], []
        for column in flat(outputs).T:
            ordered = np.sort(column[~np.isnan(column)])
            if not len(ordered):
                ordered = np.zeros(1)  # a masked output
            kept = np.linspace(0, len(ordered) - 1, min(N_ORDERED, len(ordered)))
            ordered = ordered[np.round(kept).astype(int)]
            n_inside = rank(len(ordered), quantile)
            left, right = ordered[: len(ordered) - n_inside + 1], ordered[n_inside - 1 :]
            centre, half_width = (left + right) / 2, (right - left) / 2
            places = ordered[0] + (ordered[-1] - ordered[0]) * np.linspace(0, 1, N_PLACES)
            table.append((abs(places[:, None] - centre) + half_width).min(axis=1))
            low.append(ordered[0])
            high.append(ordered[-1])
        return FittedClimatology(np.array(low), np.array(high), np.stack(table))


@dataclass(frozen=True)
class FittedClimatology:
    r"""The upper quantile of the distance of a value to the values in the data, for each coordinate.

    .. math:: C_j(v) = \widehat Q_\tau(\{|v - u_{ij}|\}_i)

    Among n sorted values, any m = ceil(tau n) consecutive ones lie in an interval with centre c_i and half width h_i, so
    C(v) = min_i(|v - c_i| + h_i). C is tabulated between the smallest and the largest value of each coordinate. Outside
    this range it grows with slope 1.
    """

    low: Float[np.ndarray, " n_coordinates"]
    high: Float[np.ndarray, " n_coordinates"]
    table: Float[np.ndarray, " n_coordinates n_places"]

    def __call__(self, states: Float[np.ndarray, " *rows n_coordinates"]) -> np.ndarray:
        inside = states.clip(self.low, self.high)
        span = np.where(self.high > self.low, self.high - self.low, 1.0)
        at = (inside - self.low) / span * (N_PLACES - 1)
        below = np.floor(at).clip(0, N_PLACES - 2)
        fraction, table = at - below, self.table.reshape(-1)
        index = np.arange(len(self.low)) * N_PLACES + np.nan_to_num(below).astype(np.int64)
        between = table[index] * (1 - fraction) + table[index + 1] * fraction
        return np.asarray(between + abs(states - inside))


def natural_scale(features: Features, reference: FittedClimatology | None) -> np.ndarray:
    """The climatology at the predictions; 1 without a climatology, and 1 where it is zero."""
    anchor = flat(features.anchor_error)
    if reference is None:
        return np.ones((1, 1))
    predicted = flat(features.prediction).astype(float)
    if predicted.shape != anchor.shape:
        raise ValueError(
            f"reference=Climatology() has one scale per output, but a query has {predicted.shape[1]} outputs and {anchor.shape[1]} "
            "errors; use an elementwise error functional, such as absolute_error, or no reference."
        )
    natural = reference(predicted)
    return np.where(natural > 0, natural, 1.0)
