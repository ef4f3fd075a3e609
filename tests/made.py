"""Calibration tuples with given errors and features, for tests of bounds without a calibration."""

from dataclasses import replace

import numpy as np

from geoq.core.geometry import Relation, Space
from geoq.core.tuples import Points, Tuples
from geoq.data.coordinates import Coordinates
from geoq.data.domain import Shapes, layout_of

LEVEL = 0.95


def made_tuples(
    error, inputs, *, distance, displacement=None, anchor_error=None, domain=None, **parts
):
    """Tuples of one point each; the anchor of all is an additional point in the origin, without error unless ``anchor_error``."""
    n = len(error)
    z = inputs if displacement is None else displacement
    outputs = parts.pop("outputs", error)
    prediction = parts.pop("prediction", np.zeros_like(outputs))

    def with_origin(rows):
        return np.concatenate([rows, 0 * rows[:1]])

    shapes = Shapes(*(part.shape[1:] for part in (z, error, inputs, outputs)))
    points = Points(
        space=Space(with_origin(z), with_origin(z), with_origin(inputs)),
        outputs=with_origin(outputs),
        error=with_origin(error),
        splits=(),
        coordinates=Coordinates.fit(inputs, logarithms=False),
        metric=None,
        layout=layout_of(domain, shapes),
        exact=parts.pop("exact", None),
    )
    origin, one = np.full((n, 1), n), np.zeros(n, dtype=int)
    relation = Relation(origin, np.ones((n, 1)), distance, origin, distance, np.zeros(n))
    anchors = np.zeros_like(error) if anchor_error is None else anchor_error
    rows = np.arange(n)
    tuples = Tuples(relation, rows, one, one, rows, error, anchors, prediction, points)
    return replace(tuples, **parts)


def at_distance(features, distance):
    """The same queries at another distance from the data."""
    return replace(features, support_distance=np.full(len(features), float(distance)))


class Largest:
    """The smallest bound model: the largest held-out error."""

    def fit(self, tuples, quantile):
        largest = np.nanmax(tuples.error, axis=0)
        return lambda features: np.broadcast_to(largest, features.anchor_error.shape).copy()
