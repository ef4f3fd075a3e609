"""Held-out errors and features of a GeoQ without an increment, for the rivals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, restore, to_tensor
from geoq.baselines.bound import Bound
from geoq.crossfit import CalibrationSet
from geoq.estimator import GeoQ
from geoq.geometry import GeometricFeatures


@dataclass
class NoIncrement:
    """The increment model that adds nothing.

    Attributes:
        quantile: every increment model has a quantile level. Here it has no effect, and 0.5 requires a single point.
    """

    quantile: float = 0.5

    def fit(self, calibration: CalibrationSet) -> "NoIncrement":
        del calibration
        return self

    def __call__(self, features: GeometricFeatures) -> Tensor:
        return torch.zeros_like(features.anchor_error)


@dataclass(frozen=True)
class CrossFitted:
    """A fitted GeoQ without an increment: held-out errors, and the features of any query."""

    geoq: GeoQ

    @classmethod
    def fit(
        cls, geoq: GeoQ, x: Array, y: Array, groups: Sequence[Any] | None
    ) -> "CrossFitted":
        """Fit a copy of GeoQ without an increment; the given GeoQ is not changed."""
        return cls(
            replace(geoq, increment_model=NoIncrement()).fit(x, y, groups=groups)
        )

    @property
    def calibration(self) -> CalibrationSet:
        """Held-out errors and their features, all folds together."""
        return self.geoq.calibration_

    def normalized(self, x: Array) -> Float[Tensor, " n *coordinates"]:
        """Standardised inputs nu(x), in which GeoQ measures support distances."""
        coordinates = self.geoq.coordinates_
        return coordinates(to_tensor(x, "x").to(coordinates.mean))

    def view(self, x: Array) -> GeometricFeatures:
        """Features of queries, as tensors of the calibration's precision and device."""
        answer = self.geoq.assess(x)
        like = self.calibration.error
        displacement, support_distance, anchor_error, prediction = (
            to_tensor(part, "a feature").to(like)
            for part in (
                answer.features.displacement,
                answer.features.support_distance,
                answer.anchor_error,
                answer.prediction,
            )
        )
        return GeometricFeatures(
            displacement,
            support_distance,
            anchor_error,
            prediction,
            self.normalized(x).to(like),
        )

    @staticmethod
    def bound(features: GeometricFeatures, error_hat: Tensor, like: Array) -> Bound:
        """The surrogate's predictions with their bounds, in the user's kind of array."""
        return Bound(
            restore(features.prediction, like),
            restore(error_hat, like),
        )
