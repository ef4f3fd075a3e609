"""How a bound is fitted to calibration tuples, and how it answers queries."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from geoq.checks import warn
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Shapes
from geoq.data.process import Process


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


def model_for(how: Any, tuples: Tuples) -> BoundModel:
    """The chosen model of the bound, or the default for the layout; for outputs 0 and 1 the one for errors of two values."""
    from geoq.bounds.two_laws import TwoLawBound
    from geoq.bounds.two_values import LabelBound, values_of

    usual: BoundModel = how.bound_for(tuples.points.layout)
    values = None if how.bound_model is not None else values_of(tuples)
    if values is None:
        fields = how.bound_model is None and not tuples.points.layout.is_table
        return TwoLawBound() if fields and isinstance(tuples.points.process, Process) else usual
    chosen: Any = LabelBound(values)
    if not tuples.points.layout.is_table:
        points = tuples.points
        parts = points.space.z, tuples.errors, points.space.inputs, points.outputs
        try:
            from geoq.bounds.indicator import IndicatorBound  # needs torch

            chosen = IndicatorBound(values)
            chosen.check_shapes(Shapes(*(part.shape[1:] for part in parts)), points.layout)
        except (ImportError, ValueError):
            return usual
    warn(
        f"all outputs are 0 or 1, so an error has one of two values, and so has the bound: fit uses bound_model={type(chosen).__name__}(values="
        f"{values.__name__}), from geoq.parts. expected_error(x) is the probability of a wrong label. Pass bound_model to choose it "
        "without this warning."
    )
    return chosen


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
