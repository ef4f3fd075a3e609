"""Features of the user: numbers from a function of inputs and predictions, such as the residual of a reduced model.

They inform the bound alone. Distances, anchors and the safe region do not see them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat, native, no_grad, own_copy, restore
from geoq.checks import add_note_on_error
from geoq.data.coordinates import Coordinates
from geoq.data.masks import Mask
from geoq.data.table import Table
from geoq.surrogate import one_row_each

# At most this many numbers per row; a bound uses them if amid the data and outside its held-out loss with them is below this fraction of
# the loss without.
MAX_NUMBERS, USEFUL = 32, 0.98
# Positive numbers are used as logarithms if their middle nine tenths span this factor.
SPAN = 3.0

Numbers = Float[np.ndarray, " n k"]


def numbers_of_user(
    function: Callable[[Any, Any], Any], x: Any, prediction: np.ndarray, mask: Mask | None
) -> Numbers:
    """What the function returns for rows and predictions in the user's kind of array, in chunks; the numbers can be nan."""
    kind, parts = None if isinstance(x, Table) else native(x), []
    for rows in chunks(len(x), max(flat(prediction).shape[1], int(np.prod(x.shape[1:])))):
        given = restore(prediction[rows].copy(), kind)
        given = given if mask is None else mask.hidden(given)
        with no_grad(), add_note_on_error("while calling features(x, prediction)"):
            found = function(native(own_copy(x[rows])), given)
        found = one_row_each(found, len(given), "features")
        if found.ndim > 2 or found[:1].size > MAX_NUMBERS:
            raise ValueError(
                f"features returned shape {found.shape} for {len(given)} inputs; it must return one number per row, or at most "
                f"{MAX_NUMBERS}, such as a norm."
            )
        parts.append(flat(found).astype(float))
    return np.concatenate(parts)


@dataclass(frozen=True)
class UserFeatures:
    """How the numbers of the user's function enter a bound: standardised, and never beyond their range at the held-out points.

    Attributes:
        coordinates: T of the numbers, with logarithms of positive numbers over decades.
        low: the smallest coordinates at the held-out points.
        high: the largest ones.
        loss: the held-out loss of the bound with them relative to the bound without, amid the data and outside.
    """

    coordinates: Coordinates
    low: Float[np.ndarray, " k"]
    high: Float[np.ndarray, " k"]
    loss: tuple[float, float] = (1.0, 1.0)

    @staticmethod
    def fit(numbers: Numbers) -> "UserFeatures":
        """Standardise the numbers at the held-out points."""
        low, high = np.quantile(numbers, (0.05, 0.95), axis=0)
        log = (numbers.min(axis=0) > 0) & (high > SPAN * low)
        own = np.where(log, np.log(np.where(log, numbers, 1.0)), numbers)
        coordinates = replace(Coordinates.fit(own, logarithms=False), log=log)
        own = coordinates(numbers)
        return UserFeatures(coordinates, own.min(axis=0), own.max(axis=0))

    def __call__(self, numbers: Numbers) -> Numbers:
        return self.coordinates(numbers).clip(self.low, self.high)

    @property
    def used(self) -> bool:
        """Whether the bound uses them."""
        return max(self.loss) < USEFUL

    def describe(self) -> str:
        """How much they help, in one sentence."""
        how = "" if self.used else ", so the bound does not use them"
        amid, outside = self.loss
        return (
            f"The held-out loss with the features of the user is {amid:.2f} of the loss without them amid the data and {outside:.2f} outside"
            f"{how}"
        )

    def why_limited(self, numbers: Numbers) -> list[str]:
        """Which numbers of one query are beyond their range, in words."""
        low, high = (self.coordinates.inverse(end) for end in (self.low, self.high))
        return [
            f"  feature {j} of the user is {value:.4g}, beyond its range at the held-out points, {low[j]:.4g} to {high[j]:.4g}; the bound "
            "uses the end of the range"
            for j, value in enumerate(numbers[0])
            if not low[j] <= value <= high[j]
        ]
