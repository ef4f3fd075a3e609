"""Repeated measurements: rows of the data with equal inputs, and the spread of their outputs."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.folds import distinct_rows


@dataclass(frozen=True)
class Repeats:
    """How often the inputs of each row occur in the data, and how much the outputs of equal inputs differ.

    The bound is for the next measurement at a query, not for the mean of many measurements, so it contains this spread.

    Attributes:
        count: the number of rows with the inputs of each row, itself included.
        spread: the standard deviation of the outputs of these rows.
    """

    count: Int[Tensor, " n"]
    spread: Float[Tensor, " n *output"]

    @staticmethod
    def of(
        points: Float[np.ndarray, " n d"], outputs: Float[Tensor, " n *output"]
    ) -> "Repeats | None":
        """The repeats of the data; None if all inputs differ."""
        place = torch.from_numpy(distinct_rows(points))
        n_distinct = int(place.max()) + 1
        if n_distinct == len(place):
            return None
        count = place.bincount()
        flat = outputs.detach().cpu().double().reshape(len(place), -1)

        def mean(values: Tensor) -> Tensor:
            total = values.new_zeros(n_distinct, values.shape[1])
            return total.index_add_(0, place, values) / count[:, None]

        squares = mean((flat - mean(flat)[place]) ** 2)
        # Of the population of measurements: divided by one less than their number.
        scaled = squares * (count / (count - 1).clamp(min=1))[:, None]
        spread = scaled.sqrt()[place].reshape(outputs.shape)
        return Repeats(count[place], spread)
