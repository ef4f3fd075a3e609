"""The classes and functions that a file can name."""

import sys
from typing import Any

from geoq import surrogate
from geoq.bounds import climatology, law, resemblance, spline, two_laws
from geoq.core import conformal, fitted, folds, geometry, tuples
from geoq.data import coordinates, domain, masks, metric, table
from geoq.regions import field_scores, region, table_scores, views

_MODULES = (
    climatology,
    law,
    resemblance,
    spline,
    two_laws,
    conformal,
    fitted,
    folds,
    geometry,
    tuples,
    coordinates,
    domain,
    masks,
    metric,
    table,
    field_scores,
    region,
    table_scores,
    views,
)
_FUNCTIONS: tuple[Any, ...] = (
    surrogate.absolute_error,
    surrogate.norm_error,
    surrogate.relative_norm_error,
)
# Imported only if they were used or torch is there.
_WITH_TORCH = ("geoq.bounds.fields", "geoq.bounds.factor", "geoq.bounds.paper")


def all_classes() -> list[Any]:
    """All dataclasses of these modules, and the error functionals."""
    modules = [*_MODULES, *(sys.modules[n] for n in _WITH_TORCH if n in sys.modules)]
    found = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and kind.__module__ == module.__name__
        and hasattr(kind, "__dataclass_fields__")
    ]
    return [*found, *_FUNCTIONS]
