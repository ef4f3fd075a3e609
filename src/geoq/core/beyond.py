"""Queries where no point was held out: between the levels of a lattice, and beyond the ranges of the inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import ndtri

from geoq.arrays import flat
from geoq.core.geometry import Features
from geoq.core.tuples import Points
from geoq.data.metric import FittedMetric
from geoq.data.process import Process
from geoq.quantiles import inverse_cdf_quantile
from geoq.regions.region import SAFE
from geoq.regions.views import LITTLE

# An input is beyond its range from this many standard deviations on, and up to this fraction of the width of its range.
NEAR, FAR = 0.05, 0.5
# Fewer distinct points do not show which inputs matter.
MIN_PLACES = 100
# The factor on the bound of a query that is safe although an input is beyond its range.
MARGIN = 1.25


def change_beyond(
    features: Features, metric: FittedMetric | None, process: Any
) -> Float[np.ndarray, " n"]:
    r"""How much changes between a query and the nearest point within all ranges, relative to the error that is expected.

    .. math:: c(x) = \max_k \max\bigl(O_k(x), |m_k(x) - m_k(x_{clip})|\bigr) / q_k(x)

    The overhang O is the change of the surrogate if it kept changing as inside, and m is the process. Infinite for a query that is not beyond
    a range or too far beyond it, and where one of the two is unknown.
    """
    change, t = np.full(len(features), np.inf), flat(features.inputs).astype(float)
    if metric is None or metric.sensitivity is None or not isinstance(process, Process):
        return change
    if len(process.centres) + len(process.others) < MIN_PLACES:
        return change
    within = t.clip(metric.low, metric.high)
    outside = abs(t - within)
    beyond = (outside > NEAR).any(axis=1)
    beyond &= (outside <= FAR * (metric.high - metric.low)).all(axis=1)
    rows = np.flatnonzero(beyond)
    if len(rows):
        opinion, expected = features.opinion, features[rows].expected_error
        assert opinion is not None
        weight = 1.0 if metric.weight is None else metric.weight.reshape(-1)
        of_process = abs(opinion.mean[rows] - process(weight * within[rows]).mean)
        of_surrogate = metric.overhang(t[rows])
        larger = np.maximum(of_surrogate, of_process)
        change[rows] = (larger / expected.clip(min=1e-300)).max(axis=1)
    return change


def errors_at_levels(
    points: Points, process: Any, outputs: Float[np.ndarray, " n p"]
) -> Float[np.ndarray, " m p"] | None:
    """The errors of the process at inner levels of a lattice that it has not seen, sorted; None without a lattice.

    Their distance to the levels beside them is twice the distance of a query between levels.
    """
    gaps = points.coordinates.gaps
    if gaps is None or not len(gaps) or not isinstance(process, Process):
        return None
    t, z, found = flat(points.inputs), flat(points.space.normalized).astype(float), []
    for j in np.unique(gaps[:, 0]):
        below, above = gaps[gaps[:, 0] == j, 1:].T
        for level in np.intersect1d(below, above):
            out = np.isclose(t[:, int(j)], level)
            left_in = Process.fit(z[~out], outputs[~out], process.smoothness)
            found.append(abs(left_in(z[out]).mean - outputs[out]))
    return np.sort(np.concatenate(found), axis=0) if found else None


def with_margins(
    bound: Float[np.ndarray, " n *field"],
    features: Features,
    safe: Bool[np.ndarray, " n"],
    fitted: Any,
    level: float,
) -> Float[np.ndarray, " n *field"]:
    """Larger bounds where no point was held out.

    Between the levels of a lattice the bound contains the distance to the process, and the error of the process at levels that it has not
    seen. The bound of a query that is safe only because nothing happens beyond the range of an input is multiplied by ``MARGIN``.
    """
    opinion, inputs = features.opinion, flat(features.inputs)
    if opinion is None:
        return bound
    factor, floor = np.ones(len(bound)), np.zeros(flat(bound).shape)
    calm = np.zeros_like(safe) if features.change is None else safe & (features.change <= LITTLE)
    if calm.any():
        rows = np.flatnonzero(calm)
        strict = replace(features[rows], change=None)
        factor[rows[np.asarray(fitted.region.support_score(strict)) > SAFE]] = MARGIN
    between = (fitted.coordinates.at_levels(inputs) != inputs).any(axis=1)
    if between.any():
        own = ndtri((1 + level) / 2) * opinion.deviation
        if fitted.between is not None:
            own = np.maximum(own, inverse_cdf_quantile(fitted.between, level))
        floor[between] = (abs(flat(features.prediction) - opinion.mean) + own)[between]
    larger = np.maximum(flat(bound) * factor[:, None], floor)
    return larger.reshape(bound.shape).astype(bound.dtype)
