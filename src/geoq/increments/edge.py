"""The edge of the data: its distance, the slope of the errors beyond it, and the lift of a bound inside it."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.arrays import chunks, permutation
from geoq.crossfit import CalibrationSet
from geoq.increments.factor import BoundOf, Learned
from geoq.quantiles import (
    conformal_factor,
    error_ratios,
    inverse_cdf_quantile,
    n_required,
)

# The edge is this quantile of the support distances of the interpolating tuples.
EDGE_QUANTILE = 0.95
# The slope beyond the edge is this multiple of the steepest e / d. It is larger than 1, because support distances inside the
# data are not close to zero, so that e / d underestimates the slope outside. Its value was chosen on results of the benchmarks,
# see docs/looks.md.
STEEPNESS = 4.0
# The lift is computed from at most this many values.
MAX_RATIOS = 2**22


def edge_distance(calibration: CalibrationSet) -> float:
    """The support distance up to which a query counts as interpolation."""
    distance = calibration.features.support_distance.double()
    inner = distance[calibration.interpolating]
    return float(inverse_cdf_quantile(inner, EDGE_QUANTILE))


def steepest_slope(
    calibration: CalibrationSet, quantile: float
) -> Float[Tensor, " n_coordinates"]:
    """The steepest slope L of the errors: the quantile of e / d in each coordinate, maximised over the families of folds."""
    distance = calibration.features.support_distance.double()
    slope = distance.new_zeros(math.prod(calibration.field_shape))
    for number in calibration.family.unique():
        own = ((calibration.family == number) & (distance > 0)).nonzero()[:, 0]
        if not len(own):
            continue
        for part in chunks(len(slope), 4 * len(own)):
            error = calibration.errors(own, part).double()
            steepness = error / distance[own, None]
            steepest = inverse_cdf_quantile(steepness, quantile)
            slope[part] = torch.maximum(slope[part], steepest)
    return slope


def counted_coordinates(calibration: CalibrationSet) -> Int[Tensor, " n_counted"]:
    """The coordinates of the flattened error that count in quantiles over coordinates: all but the exact ones."""
    exact = None if calibration.data is None else calibration.data.exact
    if exact is None:
        return torch.arange(math.prod(calibration.field_shape))
    return (~exact).flatten().nonzero()[:, 0].cpu()


def random_coordinates(
    calibration: CalibrationSet, n_wanted: int
) -> Int[Tensor, " n_chosen"]:
    """All coordinates that are not exact, or a sorted random sample of ``n_wanted`` of them, at least 100."""
    n_wanted, counted = max(100, n_wanted), counted_coordinates(calibration)
    if len(counted) <= n_wanted:
        return counted
    order = permutation(len(counted))
    return counted[order[:n_wanted].sort().values]


def required_lift(
    learned: Learned, bound_of: BoundOf, *, edge: float, quantile: float
) -> float:
    """The lift: the smallest number, at least 1, that makes the bound hold inside the data in every family of folds.

    Each tuple is compared with the factor that was learned without its group, because a factor covers new points less often than
    the points that it was fitted to. Queries can resemble any family of folds, so the bound must hold in each family with enough
    tuples. Only tuples with a support distance up to ``edge`` are used.
    """
    tuples, held_out = learned.validation_set, learned.out_of_group_factor
    columns = random_coordinates(tuples, MAX_RATIOS // len(tuples))
    parts = []
    for rows in chunks(len(tuples), 8 * held_out.shape[1]):
        bound = bound_of(tuples.features[rows]).cpu()[:, columns]
        error = tuples[rows].error.reshape(len(bound), -1).cpu()[:, columns]
        factor = held_out[rows][:, columns].cpu()
        parts.append(error_ratios(error.to(bound), bound * factor))
    ratio, family = torch.cat(parts), tuples.family.cpu()
    inside = tuples.features.support_distance.cpu().double() <= edge
    large_enough = [
        rows
        for number in family.unique()
        if (rows := inside & (family == number)).sum() >= n_required(quantile)
    ]
    required = [conformal_factor(ratio[rows], quantile) for rows in large_enough]
    return max([1.0, *required])
