"""How a bound is fitted to calibration tuples, and how it answers queries."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from geoq.core.geometry import Features
from geoq.core.tuples import Tuples


@runtime_checkable
class BoundModel(Protocol):
    """How a bound is fitted to calibration tuples, at a quantile level; ``docs/own-bound.md`` lists optional attributes."""

    def fit(self, tuples: Tuples, quantile: float, /) -> Callable[..., Any]: ...


def check_bound_model(model: object) -> None:
    """Raise for an object that is not a model of a bound, and for a class in place of an object."""
    if isinstance(model, type):
        name = model.__qualname__
        raise TypeError(f"bound_model={name} is a class; call it, bound_model={name}().")
    if not isinstance(model, BoundModel):
        raise TypeError(
            f"bound_model={model!r} has no fit; pass an object with fit(tuples, quantile) that returns a function of features, "
            "such as bound_model=TwoLawBound()."
        )


def fit_bound(model: BoundModel, tuples: Tuples, quantile: float) -> Callable[..., Any]:
    """Fit a model and check its bounds at some calibration tuples."""
    fitted: Any = model.fit(tuples, quantile)
    if isinstance(fitted, type) or not callable(fitted):
        raise TypeError(
            f"{type(model).__name__}.fit returned {fitted!r}, but it must return the fitted bound, a function of features."
        )
    bounds_of(fitted, tuples[:8].features)
    return fitted


def bounds_of(bound: Any, features: Features, quantile: float | None = None) -> np.ndarray:
    """The bounds of queries, at the level of the fit by default; raises unless there is one nonnegative number for each error."""
    name, anchor = type(bound).__name__, features.anchor_error
    found = bound(features) if quantile is None else bound(features, quantile)
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        raise TypeError(
            f"{name} returned bounds of type {type(found).__name__}; return an array of floating-point numbers."
        )
    if found.shape != anchor.shape:
        raise ValueError(
            f"{name} returned bounds of shape {found.shape} for anchor errors of shape {anchor.shape}; return one bound per "
            "anchor error."
        )
    least = found.min(initial=0.0)
    if np.isnan(least):
        raise ValueError(f"{name} returned nan; return a number for every query.")
    if least < 0:
        raise ValueError(
            f"{name} returned the bound {least:g}, but bounds are nonnegative; clip them at 0."
        )
    return found.astype(anchor.dtype, copy=False)
