"""References: a natural scale of the error at each prediction, such as the distance to the values in the data."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.archive import state_of, with_prefix, without_prefix
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.shapes import Shapes
from geoq.quantiles import check_quantile, rank
from geoq.settings import check_object

# One number for each query and each coordinate of the flattened error.
PerCoordinate: TypeAlias = Float[Tensor, " n n_coordinates"]
# At most this many order statistics are used per coordinate, and the table has this many points per coordinate.
N_ORDERED, N_PLACES = 2048, 256


@runtime_checkable
class FittedReference(Protocol):
    """A fitted reference: the natural scale of the error of each output at given predictions."""

    def __call__(self, prediction: Tensor, /) -> Tensor:
        """Nonnegative scales of the same shape as the predictions, which have one flat row per query."""
        ...


@runtime_checkable
class Reference(Protocol):
    """How a natural scale of the errors is found from the reference outputs, such as ``Climatology()``."""

    def fit(self, outputs: Tensor, quantile: float, /) -> FittedReference:
        """Fit the reference to the outputs of all calibration points, at the quantile level of the increment model."""
        ...


@dataclass(frozen=True)
class Climatology:
    """The natural scale of a chaotic system: the upper quantile of the distance of a value to the values in the data.

    The error of a forecast that has lost all information about its initial state has this size.

    Example:
        >>> from geoq import TwoLawIncrement
        >>> from geoq.increments import Climatology
        >>> increment = TwoLawIncrement(reference=Climatology())
    """

    def fit(
        self, outputs: Float[Tensor, " n *output"], quantile: float
    ) -> "FittedClimatology":
        """Tabulate the quantiles of the distances to the outputs of all points."""
        check_quantile(quantile, "quantile")
        values = outputs.reshape(len(outputs), -1)
        places = torch.linspace(
            0, 1, N_PLACES, dtype=values.dtype, device=values.device
        )
        low, high = values.amin(dim=0), values.amax(dim=0)
        table = [
            _distances(_ordered(column), a + (b - a) * places, quantile)
            for column, a, b in zip(values.T, low, high, strict=True)
        ]
        return FittedClimatology(low, high, torch.stack(table))


@dataclass(frozen=True)
class FittedClimatology:
    r"""The upper quantile of the distance of a value to the values in the data, for each coordinate.

    .. math:: C_j(v) = \widehat Q_\tau(\{|v - u_{ij}|\}_i)

    Among n sorted values, any m = ceil(tau n) consecutive ones lie in an interval with centre c_i and half width h_i, so
    C(v) = min_i(|v - c_i| + h_i). C is tabulated between the smallest and the largest value of each coordinate. Outside
    this range it grows with slope 1.

    Attributes:
        low: the smallest value of each coordinate.
        high: the largest value of each coordinate.
        table: C at equidistant values between ``low`` and ``high``.
    """

    low: Float[Tensor, " n_coordinates"]
    high: Float[Tensor, " n_coordinates"]
    table: Float[Tensor, " n_coordinates n_places"]

    def __call__(
        self, states: Float[Tensor, " *rows n_coordinates"]
    ) -> Float[Tensor, " *rows n_coordinates"]:
        low, high, table = (p.to(states) for p in (self.low, self.high, self.table))
        inside = torch.minimum(torch.maximum(states, low), high)
        span = torch.where(high > low, high - low, 1.0)
        at = (inside - low) / span * (N_PLACES - 1)
        below = at.floor().clamp(0, N_PLACES - 2)
        fraction = at - below
        coordinate = torch.arange(len(low), device=states.device)
        index = coordinate * N_PLACES + below.long()
        flat = table.flatten()
        interpolated = flat[index] * (1 - fraction) + flat[index + 1] * fraction
        return interpolated + (states - inside).abs()


def _ordered(values: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    """The sorted values, or ``N_ORDERED`` evenly spaced order statistics if there are more."""
    ordered = values.sort().values
    if len(ordered) <= N_ORDERED:
        return ordered
    kept = torch.linspace(0, len(ordered) - 1, N_ORDERED, dtype=torch.float64)
    return ordered[kept.round().long().to(ordered.device)]


def _distances(
    ordered: Float[Tensor, " m"], places: Float[Tensor, " p"], quantile: float
) -> Float[Tensor, " p"]:
    """C at the given places: min over i of |v - c_i| + h_i."""
    n_inside = rank(len(ordered), quantile)
    left, right = ordered[: len(ordered) - n_inside + 1], ordered[n_inside - 1 :]
    centre, half_width = (left + right) / 2, (right - left) / 2
    return ((places[:, None] - centre).abs() + half_width).amin(dim=1)


def fit_reference(
    reference: Reference | None, calibration: CalibrationSet, quantile: float
) -> FittedReference | None:
    """Fit a reference to the reference outputs of the calibration points; None stays None."""
    if reference is None:
        return None
    assert calibration.data is not None
    outputs = calibration.data.outputs.to(calibration.features.support_distance)
    fitted: Any = reference.fit(outputs, quantile)
    if not callable(fitted):
        raise TypeError(
            f"{type(reference).__name__}.fit returned {fitted!r}, but it must return a function of predictions."
        )
    return fitted  # type: ignore[no-any-return]


def check_reference(reference: object) -> None:
    """Refuse anything that is not a reference."""
    if reference is not None:
        check_object(reference, Reference, "reference", "Climatology()")


def check_reference_shapes(reference: Reference | None, shapes: Shapes) -> None:
    """Refuse a reference for errors that are not elementwise, because it has one scale per output."""
    elementwise = math.prod(shapes.outputs) == math.prod(shapes.error)
    if reference is not None and not elementwise:
        raise ValueError(
            f"reference={reference!r} has one scale per output, but outputs have shape {shapes.outputs} and errors have "
            f"shape {shapes.error}; use an elementwise error functional, such as absolute_error, or no reference."
        )


def natural_scale(
    features: GeometricFeatures, reference: FittedReference | None
) -> PerCoordinate:
    """The reference at the predictions, in double precision; 1 without a reference, and 1 where it is zero."""
    n = len(features)
    anchor = features.anchor_error.reshape(n, -1).double()
    if reference is None:
        return anchor.new_ones(1, 1).expand_as(anchor)
    predicted = features.prediction.reshape(n, -1).double()
    natural = torch.as_tensor(reference(predicted)).to(predicted)
    usable = (natural >= 0) & natural.isfinite()
    fits = natural.shape == anchor.shape and usable.all()
    if predicted.isfinite().all() and not fits:
        raise ValueError(
            f"{type(reference).__name__} returned scales of shape {tuple(natural.shape)} with smallest value "
            f"{float(natural.min()):.3g} for errors of shape {tuple(anchor.shape)}; a reference must return a finite, "
            "nonnegative scale for each error."
        )
    return torch.where(natural > 0, natural, 1.0)


def over_reference(
    calibration: CalibrationSet, reference: FittedReference | None
) -> Float[Tensor, " n *field"]:
    """The errors divided by the natural scale at their predictions."""
    error = calibration.error
    if reference is None:
        return error
    natural = natural_scale(calibration.features, reference).to(error)
    return error / natural.reshape(error.shape)


def reference_state(reference: FittedReference | None) -> dict[str, Tensor]:
    """The arrays of a fitted reference, for a file."""
    if reference is None:
        return {}
    if not isinstance(reference, FittedClimatology):
        raise TypeError(
            f"reference={reference!r} is an object of the user, which a file cannot hold; use Climatology()."
        )
    return with_prefix("reference.", state_of(reference))


def reference_from_state(arrays: dict[str, Tensor]) -> FittedClimatology | None:
    """The reference that ``reference_state`` described."""
    own = without_prefix("reference.", arrays)
    return FittedClimatology(**own) if own else None
