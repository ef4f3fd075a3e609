"""The contract of an increment model, and its optional capabilities; this is the only place that names them.

An increment model estimates an upper conditional quantile of the error that the anchors do not explain (line 12). It needs
``quantile``, ``fit`` and ``__call__``, and nothing else. A model that can do more implements one of the protocols below;
geoq asks with ``isinstance`` before it uses a capability.

Example:
    The smallest increment model adds the same number everywhere.

    >>> import torch
    >>> from geoq.quantiles import inverse_cdf_quantile
    >>> class ConstantIncrement:
    ...     quantile = 0.95
    ...
    ...     def fit(self, calibration):
    ...         self.constant_ = inverse_cdf_quantile(calibration.increment, self.quantile)
    ...         return self
    ...
    ...     def __call__(self, features):
    ...         return self.constant_.expand_as(features.anchor_error)
    >>> isinstance(ConstantIncrement(), IncrementModel)
    True
"""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from geoq.arrays import Array, restore, to_tensor
from geoq.checks import warn
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes
from geoq.quantiles import check_quantile, n_required
from geoq.surrogate import ErrorFunctional


@runtime_checkable
class IncrementModel(Protocol):
    """The increment g: features to a tensor of the shape of the error, one row per query.

    ``quantile`` is the level of the bound. ``fit`` returns the fitted model. The bound is the anchor error plus the
    increment; an increment is nonnegative unless the model has the capability ``MayBeNegative``.
    """

    quantile: float

    def fit(self, calibration: CalibrationSet, /) -> "IncrementModel": ...

    def __call__(self, features: GeometricFeatures, /) -> Tensor: ...


@runtime_checkable
class MayBeNegative(Protocol):
    """A model whose bound can be smaller than the anchor error if ``may_be_negative`` is true."""

    @property
    def may_be_negative(self) -> bool: ...


@runtime_checkable
class Storable(Protocol):
    """A model whose fitted state is plain numbers and arrays, so that a file can hold it."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


@runtime_checkable
class HasLevels(Protocol):
    """A fitted model that computes its bound at another quantile level itself; otherwise the bound is scaled."""

    def at_level(self, quantile: float, /) -> IncrementModel: ...


@runtime_checkable
class HasExpectedError(Protocol):
    """A fitted model that estimates the mean of the error as well as its quantile."""

    def expected_error(self, features: GeometricFeatures, /) -> Tensor: ...


@runtime_checkable
class NotConformalizable(Protocol):
    """A model whose bound does not cover more often when it is multiplied by a factor; it states the reason."""

    @property
    def why_not_conformalizable(self) -> str: ...


@runtime_checkable
class ChecksShapes(Protocol):
    """A model that can refuse the shapes of a problem before the folds are trained."""

    def check_shapes(self, shapes: Shapes, /) -> None: ...


@runtime_checkable
class ChecksErrors(Protocol):
    """A model that can refuse the errors of the deployed surrogate before the folds are trained."""

    def check_errors(self, prediction: Tensor, error: Tensor, /) -> None: ...


def check_increment_model(model: object) -> None:
    """Refuse an object that does not fulfil the contract, and a class in place of an object."""
    if isinstance(model, type) or not isinstance(model, IncrementModel):
        uncalled = getattr(model, "__qualname__", None)
        missing = [
            name for name in ("quantile", "fit", "__call__") if not hasattr(model, name)
        ]
        has_not = f"has no {' and no '.join(missing)}" if missing else "is not fitted"
        raise TypeError(
            f"increment_model={uncalled or repr(model)} {'is a class' if uncalled else has_not}; "
            + (f"call it, increment_model={uncalled}(), or " if uncalled else "")
            + "pass an object with quantile, fit and __call__, such as increment_model=PowerLawIncrement(quantile=0.9)."
        )
    check_quantile(model.quantile, f"{type(model).__name__}.quantile")


def warn_if_few(quantile: float, n_groups: int) -> None:
    """Warn if there are fewer independent points than the quantile level needs."""
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
    """Let the error functional and the increment model refuse the shapes of a few representations and pairs."""
    same = restore(to_tensor(y, "y"), y)
    error = to_tensor(error_functional(y, same), "the output of error_functional")
    if error.ndim == 0 or len(error) != len(y):
        raise ValueError(
            f"error_functional returned shape {tuple(error.shape)} for {len(y)} pairs; "
            "it must return one row per pair."
        )
    if isinstance(model, ChecksShapes):
        model.check_shapes(Shapes(*(tuple(p.shape[1:]) for p in (z, error, x, y))))
