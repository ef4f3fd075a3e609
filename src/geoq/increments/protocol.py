"""The protocol of an increment model, and the protocols of its optional capabilities.

An increment model estimates an upper conditional quantile of the part of the error that the anchors do not explain (line 12). It
needs ``quantile``, ``fit`` and ``__call__``, and nothing else. A model with more capabilities implements further protocols of
this module; geoq checks with ``isinstance`` before it uses a capability. ``docs/own-increment.md`` has an example.
"""

import copy
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from geoq.arrays import Array, restore, to_tensor
from geoq.checks import warn
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes
from geoq.probing import N_PROBES
from geoq.quantiles import check_quantile, n_required
from geoq.surrogate import ErrorFunctional, own_copy


@runtime_checkable
class IncrementModel(Protocol):
    """The increment g: the bound of a query is its anchor error plus the increment.

    Increments are nonnegative, unless the model also implements ``MayBeNegative`` and its ``may_be_negative`` is true.

    Attributes:
        quantile: tau, the quantile level of the bound.
    """

    quantile: float

    def fit(self, calibration: CalibrationSet, /) -> "IncrementModel":
        """Fit the model to the calibration tuples, and return the fitted model."""
        ...

    def __call__(self, features: GeometricFeatures, /) -> Tensor:
        """The increments of queries, with the shape of their errors: one row per query."""
        ...


@runtime_checkable
class MayBeNegative(Protocol):
    """A model whose increments can be negative if ``may_be_negative`` is true: the bound can be below the anchor error.

    ``FieldScaleIncrement`` and ``IndicatorIncrement`` are such models, because their bounds do not depend on the anchor error.
    ``TwoLawIncrement`` is one, because the anchor error is only one of its features.
    """

    @property
    def may_be_negative(self) -> bool: ...


@runtime_checkable
class Storable(Protocol):
    """A model whose fitted state consists of numbers and arrays, so that a file can hold it."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The settings and the arrays of the fitted model."""
        ...


@runtime_checkable
class HasLevels(Protocol):
    """A fitted model that has bounds at other quantile levels; the bounds of other models are multiplied by a factor."""

    def at_level(self, quantile: float, /) -> IncrementModel:
        """The fitted model at another quantile level."""
        ...


@runtime_checkable
class HasExpectedError(Protocol):
    """A fitted model that also estimates the mean of the error."""

    def expected_error(self, features: GeometricFeatures, /) -> Tensor:
        """The mean errors of queries, with the shape of their errors."""
        ...


@runtime_checkable
class NotConformalizable(Protocol):
    """A model whose coverage does not rise when its bound is multiplied by a factor; the property is the reason."""

    @property
    def why_not_conformalizable(self) -> str: ...


@runtime_checkable
class ChecksShapes(Protocol):
    """A model that checks the shapes of a problem before the fold surrogates are trained."""

    def check_shapes(self, shapes: Shapes, /) -> None:
        """Raise an error if the model cannot be fitted to these shapes."""
        ...


@runtime_checkable
class ChecksErrors(Protocol):
    """A model that checks the errors of the deployed surrogate before the fold surrogates are trained."""

    def check_errors(self, prediction: Tensor, error: Tensor, /) -> None:
        """Raise an error if the model cannot be fitted to such errors."""
        ...


def check_increment_model(model: object) -> None:
    """Refuse an object that is not an increment model, a class in place of an object, and an impossible quantile level."""
    if isinstance(model, type):
        name = model.__qualname__
        raise TypeError(
            f"increment_model={name} is a class; call it, increment_model={name}()."
        )
    if not isinstance(model, IncrementModel):
        needed = ("quantile", "fit", "__call__")
        missing = [name for name in needed if not hasattr(model, name)]
        raise TypeError(
            f"increment_model={model!r} has no {' and no '.join(missing)}; pass an object with quantile, fit and __call__, "
            "such as increment_model=TwoLawIncrement(quantile=0.9)."
        )
    check_quantile(model.quantile, f"{type(model).__name__}.quantile")


def fit_increment(model: IncrementModel, calibration: CalibrationSet) -> IncrementModel:
    """Fit a copy of an increment model, and check its increments at some calibration tuples.

    Raises:
        TypeError: ``fit`` does not return the fitted model, or an increment is not a floating-point tensor.
        ValueError: the increments have another shape than the errors, or are negative or not finite.
    """
    name = type(model).__name__
    fitted: Any = copy.deepcopy(model).fit(calibration)
    if isinstance(fitted, type) or not isinstance(fitted, IncrementModel):
        raise TypeError(
            f"{name}.fit returned {fitted!r}, but it must return the fitted model; end it with return self."
        )
    increment = increments_of(fitted, calibration.features[:N_PROBES])
    if not increment.isfinite().all():
        raise ValueError(
            f"{name} returned the increment {float(increment.amax()):g} at a calibration tuple; return finite numbers."
        )
    return fitted


def increments_of(model: IncrementModel, features: GeometricFeatures) -> Tensor:
    """The increments of queries; refused if they cannot be added to the anchor errors."""
    name, anchor = type(model).__name__, features.anchor_error
    increment: Any = model(features)
    if not isinstance(increment, Tensor) or not increment.is_floating_point():
        got = getattr(increment, "dtype", type(increment).__name__)
        raise TypeError(
            f"{name} returned increments of type {got}; return a floating-point tensor."
        )
    if increment.shape != anchor.shape:
        raise ValueError(
            f"{name} returned increments of shape {tuple(increment.shape)} for anchor errors of shape {tuple(anchor.shape)}; "
            "return one increment per anchor error."
        )
    if (increment < 0).any() and not getattr(model, "may_be_negative", False):
        raise ValueError(
            f"{name} returned the increment {float(increment.min()):g}, but increments are nonnegative; clamp them at 0, or set "
            "may_be_negative = True in the class."
        )
    if increment.isnan().any():
        raise ValueError(f"{name} returned nan; return a number for every query.")
    return increment.detach().to(anchor)


def warn_if_few(quantile: float, n_groups: int) -> None:
    """Warn if there are fewer independent points than the quantile level requires."""
    needed = n_required(quantile)
    if n_groups < needed:
        warn(
            f"n={n_groups} independent points (or groups, or stretches of time), but quantile={quantile} needs at least "
            f"{needed} to be estimated; treat the bounds as guesses, give more data, or choose a lower quantile for the "
            "increment model."
        )


def check_shapes(
    model: IncrementModel,
    error_functional: ErrorFunctional,
    z: Array,
    x: Array,
    y: Array,
) -> None:
    """Refuse outputs of which the error functional or the increment model cannot use the shape.

    The arrays are the representations ``z``, the inputs and the reference outputs of a few rows. The error functional is called
    with ``y`` in place of the predictions.
    """
    same = restore(to_tensor(y, "y").clone(), y)
    errors = error_functional(own_copy(y), same)
    error = to_tensor(errors, "the output of error_functional")
    if error.ndim == 0 or len(error) != len(y):
        raise ValueError(
            f"error_functional returned shape {tuple(error.shape)} for {len(y)} pairs; it must return one row per pair."
        )
    if isinstance(model, ChecksShapes):
        model.check_shapes(Shapes(*(tuple(p.shape[1:]) for p in (z, error, x, y))))
