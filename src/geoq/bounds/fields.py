r"""The default bound for fields: a scale for each cell, and a learned factor for each query.

.. math:: b_{cj}(x) = k \, s_{cj} \, r_{cj}(\widehat F(x)) \, q_{cj}(x)^a, \qquad
    \widehat E_{cj}(x) = \lambda f_{cj}(x) \, b_{cj}(x) + 2 L_{cj} (\Delta d(x) - d_r)_+

The scale s and the natural scale r give the size of the error in each cell, q is the error that a companion of the surrogate
expects, and k and a are numbers; without a companion a is 0. The factor f sees the fields of the query, q and the support distance;
it is used only if it lowers the loss on held-out tuples. The lift lambda makes the bound hold inside the data in every family of
folds. Outside, beyond the distance d_r, the bound grows with the steepest slope L.

The bound does not use the anchor error, because the errors of the nearest fields are a poor predictor of the cells in which a field
is wrong. The distances between fields are nearly equal, so that a power law fitted to their short range would be arbitrary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat, joined, permutation
from geoq.bounds.climatology import Climatology, FittedClimatology, natural_scale
from geoq.bounds.law import LEVELS, MIN_ERROR, RIDGE_INSIDE, fit_line
from geoq.checks import warn
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Layout, Shapes
from geoq.quantiles import (
    conformal_factor,
    error_ratios,
    inverse_cdf_quantile,
    n_required,
    pinball_loss,
    weighted_quantile,
)

# Bounds of queries, one number for each query and value of the flattened error, and one for each channel and cell.
Bounds: TypeAlias = Float[np.ndarray, " n *field"]
Values: TypeAlias = Float[np.ndarray, " n n_values"]
Maps: TypeAlias = Float[np.ndarray, " n_channels n_cells"]
# The number of maps whose combinations are the scales of all channels.
RANK = 3
# The mean error of a cell counts as at least this fraction of the mean error of its channel.
MIN_FRACTION = 1e-3
# The edge of the data is this quantile of the support distances of the interpolating tuples.
EDGE_QUANTILE = 0.95
# The slope beyond the edge is this multiple of the steepest e / d, which is too small, because no distance inside is close to 0.
STEEPNESS = 2.0
# The power a of the expected error is one of these. The expected error counts up to this multiple of its largest held-out value.
POWERS, REACH = (0.0, 0.25, 0.5, 0.75, 1.0), 10.0
# Quantiles of a channel, the coefficient, a bound without a factor, and the lift are computed from about this many values.
MAX_CHANNEL_VALUES, MAX_VALUES, MAX_CHECKED, MAX_RATIOS = 2**17, 200_000, 60_000, 2**22


@dataclass(frozen=True)
class NoFactor:
    """No learned factor: the bound of a field is a scale for each cell.

    Example:
        >>> from geoq.parts import FieldBound, NoFactor
        >>> bound = FieldBound(factor=NoFactor())
    """

    def fit(self, tuples: Tuples, bound_of: Any, quantile: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class FieldBound:
    """The default bound for fields on a grid of one to three axes or on a mesh, and for a few numbers per input field.

    The bound does not depend on the anchor error and can be smaller, so increments can be negative.

    Attributes:
        factor: how the factor f is learned, with torch; None means ``FieldFactor()``, and ``NoFactor()`` leaves it out.
        reference: the natural scale r of each output, ``Climatology()``; None means r = 1.

    Example:
        >>> from geoq.parts import Climatology, FieldBound
        >>> bound = FieldBound(reference=Climatology())
    """

    factor: Any = None
    reference: Climatology | None = None
    uses_neighborhood: ClassVar[bool] = False
    uses_companion: ClassVar[bool] = True

    def check_shapes(self, shapes: Shapes, layout: Layout) -> None:
        """Raise for errors without cells, and for fields to be seen that lie on other cells."""
        check_cells(self, shapes, layout)
        if hasattr(self.factor, "check_shapes"):
            self.factor.check_shapes(shapes, layout)

    def fit(self, tuples: Tuples, quantile: float) -> "FittedFields":
        """Estimate the scale and the coefficient, learn the factor, and compute the lift."""
        outputs = tuples.points.outputs
        reference = None if self.reference is None else self.reference.fit(outputs, quantile)
        distance = tuples.relation.support_distance[tuples.interpolating]
        edge = float(inverse_cdf_quantile(distance, EDGE_QUANTILE))
        one = np.ones(math.prod(tuples.field_shape))
        fitted = FittedFields(reference, one, edge, _steepest_slope(tuples, quantile))
        if tuples.opinion is not None:
            fitted = _with_power(tuples, fitted, quantile)
        if tuples.user is not None:
            fitted = _with_slopes(tuples, fitted, tuples.user)
        fitted = replace(fitted, scale=_scale(tuples, fitted, quantile))
        # The coefficient k with the smallest pinball loss: the quantile of e / (s r), weighted by s r.
        some = tuples.subsample(max(1000, MAX_VALUES // len(one)))
        ratio, bound = _ratios(some, fitted, MAX_VALUES)
        if bound.any():
            weight = some.weight[:, None] * bound
            coefficient = weighted_quantile(ratio.ravel(), weight.ravel(), quantile)
            fitted = replace(fitted, scale=fitted.scale * coefficient)
        learned = self._factor().fit(tuples, fitted.plain, quantile)
        some = tuples.subsample(max(1000, MAX_CHECKED // len(one)))
        factor, checked, factors = learned or (None, some, 1.0)
        return replace(fitted, factor=factor, lift=_lift(checked, factors, fitted, quantile))

    def _factor(self) -> Any:
        """How the factor is learned; not at all without torch."""
        if self.factor is not None:
            return self.factor
        try:
            from geoq.bounds.factor import FieldFactor
        except ImportError:
            warn(
                "FieldBound learns a factor for each query with torch, which is not installed; the bound is a scale for each "
                "cell. Install geoq[torch], or pass bound_model=FieldBound(factor=NoFactor()), from geoq.parts."
            )
            return NoFactor()
        return FieldFactor()


def check_cells(model: object, shapes: Shapes, layout: Layout) -> None:
    """Raise for errors without cells."""
    if layout.is_table:
        raise ValueError(
            f"bound_model={type(model).__name__} is for fields, but an error has shape {shapes.error} and a row of x has shape "
            f"{shapes.inputs}, which are rows of a table; pass domain=Grid(n_axes) or Mesh(nodes) (from geoq import Grid, Mesh), "
            "or leave bound_model out."
        )


@dataclass(frozen=True)
class FittedFields:
    """The fitted bound: r, k s of each value (0 in exact cells), d_r, the slope L of each value, a, f (if any) and lambda.

    Expected errors count up to ``most``. The bound is multiplied by the exponential of the features of the user, within their range
    ``ends`` at held-out points, times their ``slopes``.
    """

    reference: FittedClimatology | None
    scale: Float[np.ndarray, " n_values"]
    edge: float
    slope: Float[np.ndarray, " n_values"]
    power: float = 0.0
    most: float = math.inf
    factor: Any = None
    lift: float = 1.0
    slopes: Float[np.ndarray, " k"] | None = None
    ends: Float[np.ndarray, " 2 k"] | None = None
    uses_anchor_error: ClassVar[bool] = False

    def natural(self, features: Features) -> Values:
        """The natural scale r times the power of the expected error; a single number if it is 1 everywhere."""
        natural = natural_scale(features, self.reference)
        if self.power:
            natural = natural * np.minimum(features.expected_error, self.most) ** self.power
        if self.slopes is not None and self.ends is not None and features.user is not None:
            natural = natural * np.exp(features.user.clip(*self.ends) @ self.slopes)[:, None]
        return natural

    def plain(self, features: Features) -> Values:
        """The bound b, without factor, lift and slope."""
        shape = (len(features), len(self.scale))
        return np.broadcast_to(self.natural(features) * self.scale, shape)

    def __call__(self, features: Features, quantile: float | None = None) -> Bounds:
        parts = []
        for rows in chunks(len(features), 4 * len(self.scale)):
            part = features[rows]
            bound = self.plain(part)
            if self.factor is not None:
                bound = self.factor(part, bound) * bound
            beyond = (part.support_distance.astype(float) - self.edge).clip(min=0)[:, None]
            parts.append(self.lift * bound + beyond * self.slope * STEEPNESS)
        return joined(parts).reshape(features.anchor_error.shape)

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        factor = "no learned factor" if self.factor is None else self.factor.describe()
        return f"The bound is a scale for each cell, {factor}, lifted by {self.lift:.2f}"


def _with_power(tuples: Tuples, bound: FittedFields, quantile: float) -> FittedFields:
    """Choose the power a by the loss of a simple bound: a mean for each cell from half of the points, on the other half."""
    some = tuples.subsample(max(1000, MAX_VALUES // len(bound.scale)))
    half, losses = np.unique(some.group, return_inverse=True)[1] % 2 == 0, []
    for power in POWERS:
        ratio, unit = _ratios(some, replace(bound, power=power), MAX_VALUES)
        missed = np.zeros_like(unit)
        for own in (half, ~half):
            size = np.nanmean(ratio[own], axis=0) + 1e-300
            weight = some.weight[own, None] * unit[own] * size
            level = weighted_quantile((ratio[own] / size).ravel(), weight.ravel(), quantile)
            missed[~own] = pinball_loss(ratio[~own], level * size, quantile) * unit[~own]
        losses.append(float(some.weight @ np.nan_to_num(missed).mean(axis=1)))
    most = REACH * float(some.features.expected_error.max())
    return replace(bound, power=POWERS[int(np.argmin(losses))], most=most)


def _with_slopes(tuples: Tuples, bound: FittedFields, user: np.ndarray) -> FittedFields:
    """Quantile regression of logarithms of errors, in units of the mean of their cell, on the features of the user."""
    some = tuples.subsample(max(1000, MAX_VALUES // len(bound.scale)))
    ratio, _ = _ratios(some, bound, MAX_VALUES)
    target = np.log(ratio / (np.nanmean(ratio, axis=0) + 1e-300) + MIN_ERROR)
    row, column = np.nonzero(~np.isnan(target))
    parts = np.asarray(some.user)[row], target[row, column], some.weight[row]
    slopes, _ = fit_line(*parts, LEVELS, RIDGE_INSIDE / len(some))
    return replace(bound, slopes=slopes, ends=np.stack([user.min(axis=0), user.max(axis=0)]))


def _scale(tuples: Tuples, bound: FittedFields, quantile: float) -> np.ndarray:
    """The scale s of each value, with the mean 1; 0 in exact cells."""

    def error_of(rows: slice) -> np.ndarray:
        part = tuples[rows]
        return np.asarray(flat(part.error) / bound.natural(part.features))

    n_axes = tuples.points.layout.n_axes
    shape, weight = tuples.field_shape, tuples.weight
    scale = low_rank_scale(error_of, weight, shape, n_axes, quantile).reshape(-1).astype(float)
    scale = scale / scale.mean() if scale.any() else np.ones_like(scale)
    if tuples.points.exact is not None:
        scale[tuples.points.exact.reshape(-1)] = 0
    return scale


def low_rank_scale(
    error_of: Callable[[slice], np.ndarray],
    weight: Float[np.ndarray, " n"],
    shape: tuple[int, ...],
    n_axes: int,
    quantile: float,
    rank: int = RANK,
) -> Float[np.ndarray, " *field"]:
    r"""The scale of errors as a product of a few maps, which can be estimated from a few tuples.

    .. math:: s_{cj} = q_c \exp \sum_{p \le r} a_{cp} m_{pj}

    The sum is the best approximation of rank r of the logarithm of the mean errors in channel c and cell j. The mean of tens of
    dependent tuples is noisy in each cell. The maps m are common to all channels (lead times, variables), which averages the
    noise. The coefficient q_c of a channel minimises its pinball loss. Errors of nan do not count.

    ``error_of`` returns the errors of a chunk of the tuples. The last ``n_axes`` axes of their ``shape`` are cells, and all axes
    before them are channels. With rank 0 a channel has one number, and with at least as many maps as channels each cell its own.
    """
    n_cells = math.prod(shape[len(shape) - n_axes :])
    n_channels, fraction = math.prod(shape) // n_cells, weight / weight.sum()
    some = permutation(n_cells)[: max(100, MAX_CHANNEL_VALUES // len(weight))]
    (total, passed), parts = np.zeros((2, n_channels, n_cells)), []
    for rows in chunks(len(weight), n_channels * n_cells):
        part = error_of(rows).reshape(-1, n_channels, n_cells)
        total += np.tensordot(fraction[rows], np.nan_to_num(part), 1)
        passed += np.tensordot(fraction[rows], ~np.isnan(part), 1)
        parts.append(part[:, :, some])
    mean = total / np.where(passed > 0, passed, 1.0)
    # A cell without errors, such as land, is left out: it gets the mean of its channel for the approximation.
    counts = (mean > 0) | (mean == 0).all(axis=1, keepdims=True)
    typical = mean.sum(axis=1, keepdims=True) / counts.sum(axis=1, keepdims=True)
    maps = low_rank_maps(np.where(counts, mean, typical), rank)
    maps, sampled = np.where(counts, maps, MIN_FRACTION * maps), joined(parts)
    coefficient = np.ones(n_channels)
    for channel, own in enumerate(maps[:, some]):
        ratio, weights = sampled[:, channel] / own, weight[:, None] * counts[channel, some] * own
        found = weighted_quantile(ratio.ravel(), weights.ravel(), quantile)
        # If nearly all errors are zero, their quantile is zero too. Then the scale is the map.
        coefficient[channel] = found if found > 0 else 1.0
    return (coefficient[:, None] * maps).reshape(shape)


def low_rank_maps(mean: Maps, rank: int = RANK) -> Maps:
    """The low-rank approximation of the mean errors, on a logarithmic scale."""
    channel = mean.mean(axis=1, keepdims=True, dtype=float)
    wrong = channel[channel > 0]
    # A channel without errors gets the smallest positive channel mean, so that its scale is small in any unit.
    channel = np.where(channel > 0, channel, wrong.min() if len(wrong) else 1.0)
    log = np.log(np.maximum(mean, MIN_FRACTION * channel))
    centre = log.mean(axis=1, keepdims=True)
    u, s, v = np.linalg.svd(log - centre, full_matrices=False)
    return np.asarray(np.exp(centre + (u * s)[:, :rank] @ v[:rank]))


def _steepest_slope(tuples: Tuples, quantile: float) -> Float[np.ndarray, " n_values"]:
    """The steepest slope L of the errors: the quantile of e / d of each value, maximised over the families of folds."""
    distance, counted = tuples.relation.support_distance, tuples.counted
    errors, slope = flat(tuples.errors), np.zeros(math.prod(tuples.field_shape))
    for number in np.unique(tuples.family):
        own = np.flatnonzero((tuples.family == number) & (distance > 0))
        if not len(own):
            continue
        for part in chunks(len(counted), 4 * len(own)):
            columns = counted[part]
            error = errors[np.ix_(tuples.row[own], columns)].astype(float)
            steepest = inverse_cdf_quantile(error / distance[own, None], quantile)
            slope[columns] = np.fmax(slope[columns], steepest)
    return slope


def _ratios(
    tuples: Tuples, bound: FittedFields, n_values: int, factor: Any = 1.0
) -> tuple[Values, Values]:
    """Errors over bounds, and the bounds, of all values that count or of about ``n_values`` random ones."""
    columns, n_wanted = tuples.counted, max(100, n_values // len(tuples))
    if len(columns) > n_wanted:
        columns = columns[np.sort(permutation(len(columns))[:n_wanted])]
    factor = np.broadcast_to(factor, (len(tuples), len(bound.scale)))
    ratios, bounds = [], []
    for rows in chunks(len(tuples), 8 * len(bound.scale)):
        part = tuples[rows]
        bounds.append(bound.plain(part.features)[:, columns] * factor[rows][:, columns])
        ratios.append(error_ratios(flat(part.error)[:, columns], bounds[-1]))
    return joined(ratios), joined(bounds)


def _lift(tuples: Tuples, factor: Any, bound: FittedFields, quantile: float) -> float:
    """The lift: the smallest number, at least 1, that makes the bound hold inside the data in every family of folds.

    Each tuple is compared with the factor that was learned without its group, because a factor covers new points less often than
    the points that it was fitted to. Queries can resemble any family of folds, so the bound must hold in each family with enough
    tuples. Only tuples inside the data are used. If no number is large enough, the lift is 1.
    """
    ratio, _ = _ratios(tuples, bound, MAX_RATIOS, factor)
    inside = tuples.relation.support_distance <= bound.edge
    families = [inside & (tuples.family == number) for number in np.unique(tuples.family)]
    enough = [rows for rows in families if rows.sum() >= n_required(quantile)]
    lift = max([1.0, *(conformal_factor(ratio[rows], quantile) for rows in enough)])
    return lift if math.isfinite(lift) else 1.0
