r"""How wrong a value is where the surrogate predicts it: the error's quantile, given the channel and the prediction.

.. math:: r_c(v) = \widehat Q_\tau\{e_{cj} : \widehat F_{cj} \approx v\}

Surrogates often know themselves where they are unsure: a probability near one half, a front, a value that the data hardly
have. Unlike a climatology this is learned from cross-fitted errors, and knows nothing that they do not say.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.increment import Shapes
from geoq.scale import LEAST_SHARE

# A channel's levels are read off so many values at most.
MOST_OF_CHANNEL = 2**22
# A bin with fewer errors takes the level of its channel.
FEWEST = 100


@dataclass(frozen=True)
class PredictionLevels:
    """How the levels are found; a ``reference`` of ``PowerLawIncrement`` that is fitted with it.

    Attributes:
        n_spatial: last dimensions of the error that are the grid; all before them are channels.
        n_bins: bins between the least and the greatest prediction of a channel.
    """

    n_spatial: int = 2
    n_bins: int = 64

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without a grid, and those that are not of one output each."""
        if len(shapes.error) < self.n_spatial:
            raise ValueError(
                f"PredictionLevels(n_spatial={self.n_spatial}), but an error has shape {shapes.error}; put the grid last."
            )
        if shapes.error != shapes.outputs:
            raise ValueError(
                f"PredictionLevels, but errors have shape {shapes.error} and predictions {shapes.outputs}; they serve "
                "elementwise errors."
            )

    def fit(self, calibration: CalibrationSet, quantile: float) -> "FittedLevels":
        """Levels of the cross-fitted errors."""
        shapes = Shapes.of(calibration)
        self.check_shapes(shapes)
        n_cells = math.prod(shapes.error[len(shapes.error) - self.n_spatial :])
        rows = calibration.some(max(1, MOST_OF_CHANNEL // n_cells))
        errors, predictions = (
            part.reshape(len(rows), -1, n_cells).transpose(0, 1).flatten(1)
            for part in (rows.error, rows.features.prediction)
        )
        low, high = predictions.amin(dim=1), predictions.amax(dim=1)
        table = []
        for number in range(len(errors)):
            bins = _bins(predictions[number], low[number], high[number], self.n_bins)
            table.append(_levels(errors[number], bins, self.n_bins, quantile))
        levels = torch.stack(table)
        # A channel that was never wrong takes the least level of all, for a factor on zero could not change that.
        wrong = levels[levels > 0]
        least = wrong.min() if len(wrong) else levels.new_tensor(1.0)
        return FittedLevels(low, high, torch.where(levels > 0, levels, least))


@dataclass(frozen=True)
class FittedLevels:
    """A table of levels per channel, constant in each bin; beyond the predictions seen the last bins go on."""

    low: Float[Tensor, " n_channels"]
    high: Float[Tensor, " n_channels"]
    table: Float[Tensor, " n_channels n_bins"]

    def __call__(
        self, prediction: Float[Tensor, " n n_coordinates"]
    ) -> Float[Tensor, " n n_coordinates"]:
        low, high, table = (
            part.to(prediction) for part in (self.low, self.high, self.table)
        )
        channels = prediction.reshape(len(prediction), len(low), -1)
        bins = _bins(channels, low[:, None], high[:, None], table.shape[1])
        number = torch.arange(len(low), device=prediction.device)[:, None]
        return table[number, bins].reshape(prediction.shape)


def _bins(
    values: Float[Tensor, " *shape"], low: Tensor, high: Tensor, n_bins: int
) -> Int[Tensor, " *shape"]:
    span = torch.where(high > low, high - low, 1.0)
    return ((values - low) / span * n_bins).long().clamp(0, n_bins - 1)


def _levels(
    error: Float[Tensor, " n"], bins: Int[Tensor, " n"], n_bins: int, quantile: float
) -> Float[Tensor, " n_bins"]:
    """The inverse-CDF quantile of the errors in each bin; not below a share of their mean."""
    by_error = error.argsort()
    order = by_error[bins[by_error].argsort(stable=True)]
    count = torch.bincount(bins, minlength=n_bins)
    rank = (count.double() * quantile - 1e-9).ceil().long().clamp(min=1) - 1
    place = (count.cumsum(0) - count + rank).clamp(max=len(error) - 1)
    pooled = error[by_error[max(0, math.ceil(len(error) * quantile - 1e-9) - 1)]]
    level = torch.where(count < FEWEST, pooled, error[order][place])
    return torch.maximum(level, LEAST_SHARE * error.mean())
