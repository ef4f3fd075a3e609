"""The scores that are used unless the user chooses others."""

import math

from geoq.core.tuples import Points
from geoq.regions.field_scores import Answers, Moments, Patterns, Windows
from geoq.regions.region import Score
from geoq.regions.table_scores import EachInput, EachPair, Nearest, PrincipalAxes, SupportDistance

# With more inputs than this a table is compared by the support distance alone.
MAX_INPUTS = 64
TABLE: tuple[Score, ...] = (Nearest(3), EachInput(), PrincipalAxes(), EachPair(10))
FIELD: tuple[Score, ...] = (Windows(), Moments(), Patterns(), Answers())


def default_scores(points: Points) -> tuple[Score, ...]:
    """Four scores of a table or of a field; the support distance for many inputs and for representations of the user."""
    if not points.layout.is_table and points.layout.holds(points.inputs.shape[1:]):
        return FIELD
    known = points.coordinates
    few = math.prod(known.input_shape) <= MAX_INPUTS
    if points.metric is None or not few or known.constant.all():
        return (SupportDistance(),)
    return TABLE
