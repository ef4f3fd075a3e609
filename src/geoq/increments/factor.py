"""The protocol of a learned factor on a bound.

A factor multiplies each value of a bound. It is learned from calibration tuples, and validated on tuples that it was not learned
from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.climatology import PerCoordinate

# A function from the features of queries to the bound that a factor multiplies, one row per query.
BoundOf = Callable[[GeometricFeatures], Tensor]

# A bound without a factor is validated on about this many values, and on at least 1000 tuples.
MAX_VALUES = 60_000


@runtime_checkable
class FittedFactor(Protocol):
    """A learned factor for each value of a bound, given the features of the queries."""

    def factor(self, features: GeometricFeatures, bound: Tensor, /) -> PerCoordinate:
        """The factor on each value of the bound."""
        ...

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and arrays, for a file."""
        ...


class Learned(NamedTuple):
    """The result of fitting a factor.

    Attributes:
        fitted: the factor; None if it did not lower the held-out loss.
        validation_set: the tuples on which the bound is validated.
        out_of_group_factor: the factors of these tuples, each learned without the group of its tuple.
    """

    fitted: FittedFactor | None
    validation_set: CalibrationSet
    out_of_group_factor: PerCoordinate

    @staticmethod
    def nothing(calibration: CalibrationSet) -> "Learned":
        """A factor of 1 everywhere."""
        n_values = math.prod(calibration.field_shape)
        tuples = calibration.subsample(max(1000, MAX_VALUES // n_values))
        one = tuples.features.support_distance.new_ones(1, 1).double()
        return Learned(None, tuples, one.expand(len(tuples), n_values))


@runtime_checkable
class Factor(Protocol):
    """How a factor is learned."""

    def fit(
        self, calibration: CalibrationSet, bound_of: BoundOf, quantile: float, /
    ) -> Learned:
        """Learn a factor on ``bound_of(features)``, so that the product is an upper quantile of the error."""
        ...


@dataclass(frozen=True)
class NoFactor:
    """No factor: the bound stays as it is."""

    def fit(
        self, calibration: CalibrationSet, bound_of: BoundOf, quantile: float
    ) -> Learned:
        del bound_of, quantile
        return Learned.nothing(calibration)
