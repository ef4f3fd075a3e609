"""The protocol of a scheme, which bounds the error at every step of a rollout, and the checks of what a scheme returns."""

import copy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from geoq.rollout.features import RolloutCalibration, RolloutFeatures


@runtime_checkable
class RolloutScheme(Protocol):
    """A bound of the error at every step, computed from the features along a rollout and fitted on held-out rollouts.

    ``quantile`` is the quantile level tau of the bound. ``SaturatingGrowth`` and ``AdditiveRecursion`` are two schemes.
    """

    quantile: float

    def fit(self, calibration: RolloutCalibration, /) -> "RolloutScheme": ...

    def __call__(self, features: RolloutFeatures, /) -> Tensor: ...


def fit_scheme(scheme: RolloutScheme, calibration: RolloutCalibration) -> RolloutScheme:
    """Fit a copy of a scheme; refused if ``fit`` does not return the fitted scheme."""
    fitted: Any = copy.deepcopy(scheme).fit(calibration)
    if isinstance(fitted, type) or not isinstance(fitted, RolloutScheme):
        raise TypeError(
            f"{type(scheme).__name__}.fit returned {fitted!r}, but it must return the fitted scheme; end it with return self."
        )
    return fitted


def bound_of(scheme: RolloutScheme, features: RolloutFeatures) -> Tensor:
    """The bounds of a scheme, infinite from the step at which a rollout diverges.

    Raises:
        ValueError: there is not one nonnegative number for each value of the predicted states.
    """
    name, shape = type(scheme).__name__, tuple(features.climatology.shape)
    bound: Any = scheme(features)
    if not isinstance(bound, Tensor) or tuple(bound.shape) != shape:
        got = tuple(bound.shape) if isinstance(bound, Tensor) else type(bound).__name__
        raise ValueError(
            f"{name} returned {got} for predicted states of shape {shape}; return a tensor with one bound for each value."
        )
    if (bound < 0).any():
        raise ValueError(
            f"{name} returned the bound {float(bound.min()):g}, but a bound is nonnegative; clamp it at 0."
        )
    bound[~features.alive] = torch.inf
    return bound.nan_to_num(nan=torch.inf, posinf=torch.inf)
