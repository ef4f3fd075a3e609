r"""The default increment for fields: a scale for each cell, and a learned factor for each query.

.. math:: b_{cj}(x) = k \, s_{cj} \, r_{cj}(\widehat F(x)), \qquad
    \widehat E_{cj}(x) = \lambda f_{cj}(x) \, b_{cj}(x) + 2 L_{cj} (\Delta d(x) - d_r)_+

The scale s and the reference r give the size of the error in each cell, and k is one number. The scale is 0 in cells whose errors
are all zero, such as land, and these cells are left out of k and lambda. The factor f sees the fields of the
query and the support distance; it is used only if it lowers the loss on held-out tuples. The lift lambda makes the bound hold
inside the data in every family of folds. Outside, beyond the distance d_r, the bound grows with the steepest slope L.

The bound uses neither the anchor error nor a power of the distance. The distances between fields are nearly equal, so that a
power law fitted to their short range would be arbitrary, and the errors of the nearest fields are a poor predictor of the cells
in which a field is wrong.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.archive import with_prefix, without_prefix
from geoq.arrays import chunks
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.climatology import (
    Climatology,
    FittedReference,
    PerCoordinate,
    Reference,
    check_reference,
    check_reference_shapes,
    fit_reference,
    natural_scale,
    over_reference,
    reference_from_state,
    reference_state,
)
from geoq.increments.domain import (
    Domain,
    check_domain,
    domain_from_state,
    domain_state,
    layout_of,
)
from geoq.increments.edge import (
    STEEPNESS,
    edge_distance,
    random_coordinates,
    required_lift,
    steepest_slope,
)
from geoq.increments.factor import Factor, Learned
from geoq.increments.field_factor import FieldFactor, FittedField
from geoq.increments.scale import LowRankScale
from geoq.increments.shapes import Shapes
from geoq.quantiles import check_quantile, weighted_quantile
from geoq.settings import check_object

# The coefficient k is one number; it is computed from about this many values.
MAX_VALUES = 200_000


@dataclass
class FieldScaleIncrement:
    """The increment model for fields on a grid of one to three axes or on a mesh, and for a few numbers per input field.

    The shapes of inputs and errors determine the grid: channels come first, and the last axes that both have in common are the
    grid. The bound does not depend on the anchor error and can be smaller, so increments can be negative.

    Attributes:
        quantile: tau, the quantile level of the bound.
        domain: where the errors lie: ``Mesh(coordinates)``, or ``Grid(n_axes)`` if the shapes do not determine the grid or if
            it has periodic axes. None means that the shapes determine the grid.
        factor: how the factor f is learned; None means ``FieldFactor()``.
        reference: how the reference r, a natural scale of each output, is found, such as ``Climatology()``. None means r = 1.

    Example:
        >>> from geoq import FieldScaleIncrement
        >>> from geoq.increments import FieldFactor, inputs, prediction
        >>> increment = FieldScaleIncrement(0.9, factor=FieldFactor(sees=(inputs, prediction)))
    """

    quantile: float = 0.95
    domain: Domain | None = None
    factor: Factor | None = None
    reference: Reference | None = None
    may_be_negative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_domain(self.domain)
        if self.factor is not None:
            check_object(self.factor, Factor, "factor", "FieldFactor()")
        check_reference(self.reference)
        own = self.factor.domain if isinstance(self.factor, FieldFactor) else None
        if own is not None and own != self.domain:
            raise ValueError(
                f"factor has domain={own!r}, but FieldScaleIncrement has domain={self.domain!r}; pass the domain to "
                "FieldScaleIncrement alone."
            )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without cells, seen fields on other cells, and a reference for errors that are not elementwise."""
        if isinstance(self._factor, FieldFactor):
            self._factor.check_shapes(shapes)
        else:
            layout_of(self.domain, shapes)
        check_reference_shapes(self.reference, shapes)

    @property
    def _factor(self) -> Factor:
        factor = self.factor or FieldFactor()
        if isinstance(factor, FieldFactor):
            return replace(factor, domain=self.domain)
        return factor

    def fit(self, calibration: CalibrationSet) -> "FieldScaleIncrement":
        """Estimate the scale and the coefficient, learn the factor, and compute the lift."""
        self.reference_ = fit_reference(self.reference, calibration, self.quantile)
        self.edge_ = edge_distance(calibration)
        self.slope_ = steepest_slope(calibration, self.quantile)
        layout = layout_of(self.domain, Shapes.of(calibration))
        scale = LowRankScale(layout.n_axes).fit(
            lambda rows: over_reference(calibration[rows], self.reference_),
            calibration.weight,
            calibration[:1].error[0],
            self.quantile,
        )
        scale = scale.reshape(-1).double().cpu()
        scale = scale / scale.mean() if scale.any() else torch.ones_like(scale)
        if calibration.data is not None and calibration.data.exact is not None:
            scale[calibration.data.exact.flatten().cpu()] = 0
        self.coefficient_ = _coefficient(
            calibration, self.reference_, scale, self.quantile
        )
        self.scale_ = scale.to(calibration.point.device)
        learned: Any = self._factor.fit(calibration, self._bound, self.quantile)
        if not isinstance(learned, Learned):
            raise TypeError(
                f"{type(self._factor).__name__}.fit returned {learned!r}, but it must return a Learned."
            )
        self.factor_ = learned.fitted
        lift = required_lift(
            learned, self._bound, edge=self.edge_, quantile=self.quantile
        )
        self.lift_ = lift if math.isfinite(lift) else 1.0
        return self

    def _bound(self, features: GeometricFeatures) -> PerCoordinate:
        """The bound b, without factor, lift and slope."""
        natural = natural_scale(features, self.reference_)
        return self.coefficient_ * (natural * self.scale_.to(natural.device))

    def __call__(self, features: GeometricFeatures) -> Tensor:
        shape = features.anchor_error.shape
        parts = [
            self._increment(features[rows])
            for rows in chunks(len(features), 4 * math.prod(shape[1:]))
        ]
        return torch.cat(parts).reshape(shape).to(features.support_distance)

    def _increment(self, features: GeometricFeatures) -> PerCoordinate:
        bound = self._bound(features)
        if self.factor_ is not None:
            bound = self.factor_.factor(features, bound) * bound
        beyond = (features.support_distance.double() - self.edge_).clamp(min=0)[:, None]
        line = beyond * self.slope_.to(bound.device) * STEEPNESS
        anchor = features.anchor_error.reshape(bound.shape)
        return self.lift_ * bound + line / 2 - anchor

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        factor = "no learned factor" if self.factor_ is None else str(self.factor_)
        return f"a scale for each cell, {factor}, lifted by {self.lift_:.2f}"

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and fitted numbers, for a file."""
        domain, arrays = domain_state(self.domain)
        if not isinstance(self._factor, FieldFactor):
            raise TypeError(
                f"factor={self.factor!r} is an object of the user, which a file cannot hold; use a FieldFactor."
            )
        settings = {
            "quantile": self.quantile,
            "domain": domain,
            "factor": None if self.factor is None else self._factor.settings(),
            "coefficient": self.coefficient_,
            "edge": self.edge_,
            "lift": self.lift_,
        }
        arrays |= {"scale": self.scale_, "slope": self.slope_}
        arrays |= reference_state(self.reference_)
        if self.factor_ is not None:
            settings["learned"], learned = self.factor_.state()
            arrays |= with_prefix("learned.", learned)
        return settings, arrays

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "FieldScaleIncrement":
        """The fitted model that ``state`` described."""
        arrays = {name: array.cpu() for name, array in weights.items()}
        reference = reference_from_state(arrays)
        domain = domain_from_state(settings["domain"], arrays)
        factor = settings["factor"]
        model = FieldScaleIncrement(
            settings["quantile"],
            domain,
            None if factor is None else FieldFactor.from_settings(factor),
            None if reference is None else Climatology(),
        )
        model.reference_ = reference
        model.scale_, model.slope_ = arrays["scale"], arrays["slope"]
        model.coefficient_ = settings["coefficient"]
        model.edge_, model.lift_ = settings["edge"], settings["lift"]
        model.factor_ = None
        if "learned" in settings:
            learned = without_prefix("learned.", arrays)
            model.factor_ = FittedField.from_state(settings["learned"], learned, domain)
        return model


def _coefficient(
    calibration: CalibrationSet,
    reference: FittedReference | None,
    scale: Float[Tensor, " n_coordinates"],
    quantile: float,
) -> float:
    """The coefficient k with the smallest pinball loss: the quantile of e / (s r), weighted by s r."""
    calibration = calibration.subsample(max(1000, MAX_VALUES // len(scale)))
    columns = random_coordinates(calibration, MAX_VALUES // len(calibration))
    naturals, errors = [], []
    for rows in chunks(len(calibration), 8 * len(scale)):
        natural = natural_scale(calibration.features[rows], reference)
        error = calibration[rows].error.reshape(natural.shape).double()
        naturals.append(natural.cpu()[:, columns])
        errors.append(error.cpu()[:, columns])
    error, shape = torch.cat(errors), torch.cat(naturals) * scale[columns]
    weight = calibration.weight.double().cpu()[:, None].expand_as(error)
    positive = shape > 0
    if not positive.any():
        return 1.0
    ratio = error[positive] / shape[positive]
    return float(weighted_quantile(ratio, (weight * shape)[positive], quantile))
