"""The protocols of a bound: how it is fitted to calibration tuples, and how it answers queries."""

from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Layout, Shapes


@runtime_checkable
class FittedBound(Protocol):
    """The bound of the error of queries, with the shape of their anchor errors: one row per query.

    The second argument is a quantile level. It is passed only if the bound has the attribute ``has_levels``, which is then true;
    other bounds are multiplied by a factor. A bound with a method ``expected_error(features)`` also estimates the mean of the
    error. ``scalable`` is False for a bound whose coverage does not rise when it is multiplied by a factor.
    """

    def __call__(self, features: Features, quantile: float | None = None, /) -> Any: ...


@runtime_checkable
class BoundModel(Protocol):
    """How a bound is fitted to calibration tuples, at a quantile level.

    A model can raise for shapes and errors that it cannot be fitted to, before any training: with a method ``check_shapes(shapes,
    layout)``, and with a method ``check_errors(prediction, error)`` for the values of the deployed surrogate. Its attribute
    ``uses_neighborhood`` is False if it does not need the side of the nearest points.
    """

    def fit(self, tuples: Tuples, quantile: float, /) -> FittedBound: ...


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


def check_shapes(model: Any, shapes: Shapes, layout: Layout) -> None:
    """Raise for anything but a model, and for shapes that it cannot be fitted to."""
    check_bound_model(model)
    if hasattr(model, "check_shapes"):
        model.check_shapes(shapes, layout)


def fit_bound(model: BoundModel, tuples: Tuples, quantile: float) -> FittedBound:
    """Fit a model and check its bounds at some calibration tuples."""
    fitted: Any = model.fit(tuples, quantile)
    if isinstance(fitted, type) or not callable(fitted):
        raise TypeError(
            f"{type(model).__name__}.fit returned {fitted!r}, but it must return the fitted bound, a function of features."
        )
    bounds_of(fitted, tuples[:8].features)
    return cast(FittedBound, fitted)


def bounds_of(bound: FittedBound, features: Features, quantile: float | None = None) -> np.ndarray:
    """The bounds of queries; raises unless there is one nonnegative number for each error.

    The quantile level is None for the level of the fit.
    """
    name, anchor = type(bound).__name__, features.anchor_error
    found: Any = bound(features) if quantile is None else bound(features, quantile)
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
