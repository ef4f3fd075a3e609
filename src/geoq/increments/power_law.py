r"""The default increment model for tables: the error grows like a power of the distance to the data.

.. math:: b_j(d) = c \, (s_j \, d^\alpha + \kappa \overline E_j(x)), \qquad
    \widehat E_j(x) = \max\bigl(\overline E_j(x), \; \lambda f(x) b_j(d_r^-)
    + \tfrac12 f(x) [b_j(\Delta d) - b_j(d_r^-)] + \tfrac12 4 L_j (\Delta d - d_r)_+\bigr), \quad
    d_r^- = \min(\Delta d, d_r)

The form differs from the paper, but the structure is the same: the bound is the anchor error plus a nonnegative increment, which
is an upper conditional quantile given the geometry, learned from cross-fitted tuples. Simple bounds are special cases: a
constant (alpha = 0), a normalisation by the distance (alpha = 1, kappa = 0), the paper's additive anchor error (kappa c = 1).

Beyond the distance :math:`d_r`, where the data end, the bound rises by the mean of two continuations: the law, and a straight
line with four times the steepest slope L of the calibration errors.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.archive import without_prefix
from geoq.arrays import chunks
from geoq.checks import warn
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.boosted_factor import BoostedFactor, Trees
from geoq.increments.climatology import (
    Climatology,
    FittedReference,
    Reference,
    check_reference_shapes,
    fit_reference,
    natural_scale,
    over_reference,
    reference_from_state,
    reference_state,
)
from geoq.increments.edge import (
    STEEPNESS,
    edge_distance,
    random_coordinates,
    required_lift,
    steepest_slope,
)
from geoq.increments.factor import Factor, Learned
from geoq.increments.scale import Scale, coordinate_scale
from geoq.increments.shapes import MIN_GRID_SIZE, Shapes
from geoq.quantiles import (
    check_quantile,
    inverse_cdf_quantile,
    pinball_loss,
    weighted_quantile,
)

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
ANCHOR_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
# Exponent, anchor weight and coefficient are computed from about this many values.
MAX_VALUES = 200_000
# Beyond this quantile of the calibration distances the power law continues along its tangent.
TANGENT_QUANTILE = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law.

    Attributes:
        exponent: alpha.
        anchor_weight: kappa.
        coefficient: c.
        typical_distance: median distance of the calibration; the power is computed from the ratio to it.
        tangent: distance from which the power continues along its tangent.
        edge: d_r, the distance up to which queries interpolate.
        scale: s_j of each coordinate of the error.
        slope: L_j, the steepest slope of each coordinate over the families of folds.
    """

    exponent: float
    anchor_weight: float
    coefficient: float
    typical_distance: float
    tangent: float
    edge: float
    scale: Float[Tensor, " n_coordinates"]
    slope: Float[Tensor, " n_coordinates"]

    def on(self, device: torch.device) -> "PowerLaw":
        """The same law with its arrays on a device."""
        return replace(self, scale=self.scale.to(device), slope=self.slope.to(device))

    def growth(self, distance: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        r""":math:`\Delta d^\alpha`, and its tangent beyond the distance ``tangent``."""
        near = distance.clamp(max=self.tangent) / self.typical_distance
        end = (self.tangent / self.typical_distance) ** self.exponent
        beyond = (
            (distance - self.tangent).clamp(min=0) / self.tangent
            if self.tangent
            else 0 * distance
        )
        growth: Tensor = near**self.exponent + self.exponent * end * beyond
        return growth

    def inside(
        self,
        distance: Float[Tensor, " n"],
        anchor: Float[Tensor, " n n_coordinates"],
        reference: Float[Tensor, " n n_coordinates"] | float = 1.0,
    ) -> Float[Tensor, " n n_coordinates"]:
        """The law, at any distance, but at least the anchor error."""
        growth = reference * self.scale * self.growth(distance)[:, None]
        return torch.maximum(
            anchor, self.coefficient * (growth + self.anchor_weight * anchor)
        )

    def __call__(
        self,
        distance: Float[Tensor, " n"],
        anchor: Float[Tensor, " n n_coordinates"],
        reference: Float[Tensor, " n n_coordinates"] | float = 1.0,
        *,
        factor: Float[Tensor, " n n_coordinates"] | float = 1.0,
        lift: float = 1.0,
    ) -> Float[Tensor, " n n_coordinates"]:
        """The law times factor and lift up to the edge; beyond the edge it rises by the mean of the two continuations."""
        law, at_edge = (
            factor * self.inside(where, anchor, reference)
            for where in (distance, distance.clamp(max=self.edge))
        )
        line = (distance - self.edge).clamp(min=0)[:, None] * self.slope * STEEPNESS
        return lift * at_edge + (law - at_edge + line) / 2


def _warn_of_fields(shape: tuple[int, ...]) -> None:
    """Warn of an error that ends in a grid, because the law treats its cells as unrelated outputs."""
    if len(shape) >= 2 and min(shape[-2:]) >= MIN_GRID_SIZE:
        warn(
            f"an error has shape {shape}, which may be a field on a grid, but PowerLawIncrement treats its values as "
            f"{math.prod(shape)} unrelated outputs; if it is a field, pass increment_model=FieldScaleIncrement(), and "
            "otherwise flatten y to one row per sample."
        )


@dataclass
class PowerLawIncrement:
    """The increment model for tables: a law with three parameters, and a learned factor if it lowers the held-out loss.

    Attributes:
        quantile: tau, the quantile level of the bound.
        factor: how a factor on the power law is learned; None means no factor.
        exponents: values of alpha to choose from.
        anchor_weights: values of kappa to choose from, in multiples of a typical distance term over a typical anchor error.
            If 0 is the only value, the bound does not depend on the anchor error, and increments can be negative.
        reference: how the reference r, a natural scale of each output, is found: ``Climatology()``, or an object with
            ``fit(outputs, quantile)``. The scale becomes s_j r_j(F(x)). None means r = 1.
        scale: how the scale s is found.

    Example:
        >>> from geoq import PowerLawIncrement
        >>> increment = PowerLawIncrement(quantile=0.9)
    """

    quantile: float = 0.95
    factor: Factor | None = field(default_factory=BoostedFactor)
    exponents: tuple[float, ...] = EXPONENTS
    anchor_weights: tuple[float, ...] = ANCHOR_WEIGHTS
    reference: Reference | None = None
    scale: Scale = coordinate_scale

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")

    def fit(self, calibration: CalibrationSet) -> "PowerLawIncrement":
        """Fit the law, learn the factor, and compute the lift."""
        self.reference_ = fit_reference(self.reference, calibration, self.quantile)
        lift = self._fit(calibration, self.exponents)
        if math.isinf(lift) and any(self.exponents):
            # Repeated noisy inputs have errors at distance zero; only a law that is positive there is a bound for them.
            lift = self._fit(calibration, (0.0,))
        self.lift_ = lift if math.isfinite(lift) else 1.0
        return self

    def _fit(self, calibration: CalibrationSet, exponents: tuple[float, ...]) -> float:
        """Fit the law and the factor, and return the lift that they need."""
        grid = [(alpha, kappa) for alpha in exponents for kappa in self.anchor_weights]
        law = fit_power_law(
            calibration, self.quantile, grid, self.reference_, self.scale
        )
        self.law_ = law.on(calibration.error.device)
        learned = (
            Learned.nothing(calibration)
            if self.factor is None
            else self.factor.fit(calibration, self._inside, self.quantile)
        )
        self.factor_ = learned.fitted
        return required_lift(
            learned, self._inside, edge=self.law_.edge, quantile=self.quantile
        )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse a reference for errors that are not elementwise, and warn of errors on a grid."""
        _warn_of_fields(shapes.error)
        check_reference_shapes(self.reference, shapes)

    def __call__(self, features: GeometricFeatures) -> Tensor:
        shape = features.anchor_error.shape
        n_coordinates = math.prod(shape[1:])
        parts = [
            self._increment(features[rows])
            for rows in chunks(len(features), 4 * n_coordinates)
        ]
        return torch.cat(parts).reshape(shape).to(features.support_distance)

    @property
    def may_be_negative(self) -> bool:
        """Whether the bound can be smaller than the anchor error."""
        return not any(self.anchor_weights)

    def _terms(self, features: GeometricFeatures) -> "_Terms":
        terms = _terms(features, self.reference_)
        if not self.may_be_negative:
            return terms
        return terms._replace(anchor=torch.zeros_like(terms.anchor))

    def _inside(self, features: GeometricFeatures) -> Float[Tensor, " n n_coordinates"]:
        terms = self._terms(features)
        return self.law_.on(terms.anchor.device).inside(*terms)

    def _increment(
        self, features: GeometricFeatures
    ) -> Float[Tensor, " n n_coordinates"]:
        terms = self._terms(features)
        law = self.law_.on(terms.anchor.device)
        factor = torch.ones_like(terms.anchor)
        if self.factor_ is not None:
            factor = self.factor_.factor(features, law.inside(*terms))
        bound = law(*terms, factor=factor, lift=self.lift_)
        increment = bound - features.anchor_error.reshape(bound.shape)
        return increment if self.may_be_negative else increment.clamp(min=0)

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        factor = "no factor" if self.factor_ is None else str(self.factor_)
        growth = (
            f"error grows like distance to the power {self.law_.exponent:g}"
            if self.law_.exponent
            else "error does not depend on the distance"
        )
        return (
            f"{growth}, anchor weight "
            f"{self.law_.coefficient * self.law_.anchor_weight:.2g}, {factor}, lifted by {self.lift_:.2f}"
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and fitted numbers, for a file."""
        if self.scale is not coordinate_scale or type(self.factor) not in (
            BoostedFactor,
            type(None),
        ):
            raise ValueError(
                f"{self!r} has a scale or a factor of the user, which a file cannot hold; use coordinate_scale and a "
                "BoostedFactor."
            )
        law = {
            name: value
            for name, value in vars(self.law_).items()
            if not isinstance(value, Tensor)
        }
        settings = {
            "quantile": self.quantile,
            "exponents": self.exponents,
            "anchor_weights": self.anchor_weights,
            "law": law,
            "lift": self.lift_,
            "factor": None if self.factor is None else asdict(self.factor),  # type: ignore[call-overload]
        }
        arrays = {"scale": self.law_.scale, "slope": self.law_.slope}
        arrays |= reference_state(self.reference_)
        if self.factor_ is not None:
            settings["learned"], learned = self.factor_.state()
            arrays |= {f"learned.{name}": array for name, array in learned.items()}
        return settings, arrays

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "PowerLawIncrement":
        """The fitted model that ``state`` described."""
        arrays = {name: array.cpu() for name, array in weights.items()}
        factor = settings["factor"]
        if factor is not None:
            factor = BoostedFactor(**{**factor, "n_trees": tuple(factor["n_trees"])})
        reference = reference_from_state(arrays)
        model = PowerLawIncrement(
            settings["quantile"],
            factor,
            tuple(settings["exponents"]),
            tuple(settings["anchor_weights"]),
            None if reference is None else Climatology(),
        )
        model.law_ = PowerLaw(
            **settings["law"], scale=arrays["scale"], slope=arrays["slope"]
        )
        model.reference_ = reference
        model.lift_ = settings["lift"]
        model.factor_ = None
        if "learned" in settings:
            learned = without_prefix("learned.", arrays)
            model.factor_ = Trees.from_state(settings["learned"], learned)
        return model


class _Terms(NamedTuple):
    """The terms of the law at the queries, in double precision."""

    distance: Float[Tensor, " n"]
    anchor: Float[Tensor, " n n_coordinates"]
    reference: Float[Tensor, " n n_coordinates"]


def _terms(features: GeometricFeatures, reference: FittedReference | None) -> _Terms:
    distance = features.support_distance.double()
    anchor = features.anchor_error.reshape(len(features), -1).double()
    return _Terms(distance, anchor, natural_scale(features, reference))


def fit_power_law(
    calibration: CalibrationSet,
    quantile: float,
    grid: list[tuple[float, float]],
    reference: FittedReference | None = None,
    scale: Scale = coordinate_scale,
) -> PowerLaw:
    """Choose the exponent and the anchor weight from a grid; the best coefficient has a closed form."""
    distance = calibration.features.support_distance.double()
    of_coordinate = scale(
        over_reference(calibration, reference), calibration.weight, quantile
    )
    of_coordinate = of_coordinate.reshape(-1).double().cpu()
    law = PowerLaw(
        exponent=0.0,
        anchor_weight=0.0,
        coefficient=1.0,
        typical_distance=float(distance.median()) or 1.0,
        tangent=float(inverse_cdf_quantile(distance, TANGENT_QUANTILE)),
        edge=edge_distance(calibration),
        # The scale has mean 1, so that the coefficient is the typical size of the errors.
        scale=of_coordinate / of_coordinate.mean()
        if of_coordinate.any()
        else torch.ones_like(of_coordinate),
        slope=steepest_slope(calibration, quantile).cpu(),
    )
    return _choose(law, calibration, quantile, grid, reference)


def _choose(
    law: PowerLaw,
    calibration: CalibrationSet,
    quantile: float,
    grid: list[tuple[float, float]],
    reference: FittedReference | None,
) -> PowerLaw:
    """The exponent and the anchor weight with the smallest pinball loss, each pair with its best coefficient."""
    n_coordinates = calibration.error[0].numel()
    calibration = calibration.subsample(max(1000, MAX_VALUES // n_coordinates))
    some = random_coordinates(n_coordinates, MAX_VALUES // len(calibration))
    scale = law.scale[some]
    distance, anchor, natural, error = _sampled(calibration, reference, some)
    weight = calibration.weight.double().cpu()[:, None].expand_as(error)
    best_loss, best = math.inf, law
    for exponent, pairs in groupby(grid, key=itemgetter(0)):
        shape_of_growth = replace(law, exponent=exponent).growth(distance)[:, None]
        growth = natural * scale * shape_of_growth
        typical = float(growth.median()) / (float(anchor.median()) or 1.0)
        for _, multiple in pairs:
            shape = growth + multiple * typical * anchor
            positive = shape > 0
            if not positive.any():
                continue
            # The pinball loss of c * shape is smallest at the quantile of error / shape, weighted by the shape.
            ratio, importance = error[positive] / shape[positive], weight * shape
            c = float(weighted_quantile(ratio, importance[positive], quantile))
            loss = float((weight * pinball_loss(error, c * shape, quantile)).sum())
            if loss < best_loss:
                best_loss = loss
                best = replace(
                    law,
                    exponent=exponent,
                    anchor_weight=multiple * typical,
                    coefficient=c,
                )
    return best


def _sampled(
    calibration: CalibrationSet, reference: FittedReference | None, some: Tensor | slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distance, anchor error, reference and error of some coordinates, in double precision on the CPU."""
    parts = []
    for rows in chunks(len(calibration), 8 * calibration.error[0].numel()):
        distance, anchor, natural = _terms(calibration.features[rows], reference)
        error = calibration.error[rows].reshape(anchor.shape).double()
        fields = (part.cpu()[:, some] for part in (anchor, natural, error))
        parts.append((distance.cpu(), *fields))
    distance, anchor, natural, error = (
        torch.cat(columns) for columns in zip(*parts, strict=True)
    )
    return distance, anchor, natural, error
