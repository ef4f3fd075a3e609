"""The classes and functions that a file can name."""

import sys
from importlib import import_module
from typing import Any

from geoq import surrogate
from geoq.bounds import climatology, fields, law, two_laws
from geoq.core import conformal, fitted, folds, geometry, tuples
from geoq.data import companion as field_companion
from geoq.data import coordinates, domain, masks, metric, process, table
from geoq.regions import field_scores, region, table_scores, views
from geoq.rollout import additive, features, growth, horizon, members, series
from geoq.rollout import fitted as fitted_rollouts

_MODULES = (
    climatology,
    fields,
    law,
    two_laws,
    conformal,
    fitted,
    folds,
    geometry,
    tuples,
    field_companion,
    coordinates,
    domain,
    masks,
    metric,
    process,
    table,
    field_scores,
    region,
    table_scores,
    views,
    additive,
    features,
    growth,
    horizon,
    members,
    series,
    fitted_rollouts,
)
_FUNCTIONS: tuple[Any, ...] = (
    surrogate.absolute_error,
    surrogate.norm_error,
    surrogate.relative_norm_error,
    metric.identity,
    additive.signed_displacement,
)
# Modules with torch: their classes are known where they were imported, and to the reader of a file that names one of them.
_WITH_TORCH = (
    "geoq.training.loop",
    "geoq.bounds.network",
    "geoq.bounds.factor",
    "geoq.bounds.indicator",
    "geoq.bounds.paper",
)


def all_classes(*, with_torch: bool = False) -> list[Any]:
    """All dataclasses and networks of these modules, and the functions of geoq that a setting can be."""
    if with_torch:
        for name in _WITH_TORCH:
            import_module(name)
    modules = [*_MODULES, *(sys.modules[n] for n in _WITH_TORCH if n in sys.modules)]
    found = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and kind.__module__ == module.__name__
        and kind is not table.Table  # stored by its numbers; the domain has the same name
        and (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "state_dict"))
    ]
    functions = [f for module in modules for f in getattr(module, "FUNCTIONS", ())]
    return [*found, *_FUNCTIONS, *functions]
