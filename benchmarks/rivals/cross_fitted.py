"""What the rivals share: held-out errors and features of a GeoQ, weights of the tuples, and conformal factors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.record import QUANTILE
from geoq import GeoQ
from geoq.arrays import restore
from geoq.core.tuples import Tuples
from geoq.quantiles import inverse_cdf_quantile, n_required, rank, weighted_quantile


class Bound(NamedTuple):
    """The prediction of a method and an upper bound of its error, as arrays like the queries."""

    prediction: Any
    error_hat: Any


def permuted(n, seed):
    """A random order; the draws of the published rows came from torch."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()


def split_groups(group, seed, fraction):
    """Mask of the rows of a random fraction of the groups."""
    groups, number = np.unique(group, return_inverse=True)
    chosen = np.zeros(len(groups), dtype=bool)
    chosen[permuted(len(groups), seed)[: max(1, round(fraction * len(groups)))]] = True
    return chosen[number]


def equal_tuples(tuples):
    """The same weight for all tuples. The nested folds then have more than half of the weight."""
    return np.ones(len(tuples))


def equal_families(tuples):
    """The same total weight for each family of folds, as GeoQ has it."""
    return len(tuples) * tuples.weight


def per_value(numbers, n_dims):
    """Numbers of the rows with axes of length 1, so that they multiply values with more axes."""
    return numbers.reshape(*numbers.shape, *(1,) * (n_dims - numbers.ndim))


def conformal_factor(error, scale=1.0, quantile=QUANTILE, weight=None):
    r"""Factor c, per coordinate, with which a scale becomes a bound of the error.

    .. math:: c = \widehat Q_{\tau'}(e_i / s_i; w_i), \quad \tau' = \lceil (n + 1) \tau \rceil / n

    Scales have the shape of the errors, or are one number per row. With the scale 1 it is the bound of split conformal
    prediction: the :math:`\lceil (n + 1) \tau \rceil`-th smallest error.
    """
    n_rows = len(error)
    if n_rows < n_required(quantile):
        raise ValueError(
            f"quantile={quantile}, but {n_rows} errors give no finite factor; use at least {n_required(quantile)}."
        )
    scales = per_value(np.asarray(scale, dtype=float), error.ndim) if np.ndim(scale) else scale
    with np.errstate(divide="ignore", invalid="ignore"):
        # Every factor bounds an error of zero, also where the scale is zero.
        ratio = np.where(error == 0, 0.0, error / scales)
    level = rank(n_rows + 1, quantile) / n_rows
    weights = np.ones(n_rows) if weight is None else weight
    factor = weighted_quantile(ratio, weights.astype(float), level)
    if not np.isfinite(factor).all():
        raise ValueError(
            f"quantile={quantile}, but in {int((~np.isfinite(factor)).sum())} of {np.size(factor)} output coordinates more than the "
            f"fraction {1 - quantile:g} of the errors is positive where the scale is zero, so no factor bounds them; remove repeated "
            "inputs."
        )
    return np.asarray(factor)


@dataclass(frozen=True)
class AnchorError:
    """The anchor error as the bound: a GeoQ that only cross-fits."""

    uses_neighborhood = False

    def fit(self, tuples, quantile):
        del tuples, quantile
        return self

    def __call__(self, features, quantile=None):
        del quantile
        return features.anchor_error


@dataclass(frozen=True)
class DistanceRegion:
    """Queries whose support distance is at most a quantile of the interpolating tuples: a safe region of one score."""

    quantile: float = 0.95
    threshold: float = 1.0

    def fit(self, tuples):
        distance = tuples.relation.support_distance[tuples.interpolating]
        return replace(self, threshold=float(inverse_cdf_quantile(distance, self.quantile)))

    def support_score(self, features):
        return features.support_distance / self.threshold

    def explain(self, features, names=None):
        del features, names
        return "the distance to the nearest training points decides"


@dataclass
class Rival:
    """A bound of the errors of a GeoQ's surrogate, fitted to its held-out errors; the given GeoQ is not changed.

    A subclass has ``learn(tuples, x, y)`` and ``bound(features)``. The tuples have the weights ``weights(tuples)``.
    """

    geoq: GeoQ
    quantile: float = QUANTILE
    weights: Callable[[Tuples], np.ndarray] = equal_tuples  # with the mean 1

    def fit(self, x, y, groups=None):
        known = replace(self.geoq, bound_model=AnchorError()).fit(
            x, y, groups=groups, progress=None
        )
        self.known_ = known.fitted_
        self.weight_ = self.weights(self.known_.tuples)
        self.learn(self.known_.tuples, x, y)
        return self

    def predict(self, x):
        """The surrogate's predictions with their bounds."""
        parts = [part[1] for part in self.known_.views(self.known_.rows_of(x))]
        bounds = [self.bound(features).astype(features.prediction.dtype) for features in parts]
        both = np.concatenate([f.prediction for f in parts]), np.concatenate(bounds)
        return Bound(*(restore(part, x) for part in both))

    def factor(self, error, scale):
        """The conformal factor with the weights of the tuples."""
        return conformal_factor(error, scale, self.quantile, self.weight_)
