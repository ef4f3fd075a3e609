"""The safe region in a file: its settings, its threshold and its arrays."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from geoq.archive import Content, without_prefix
from geoq.regions.field_region import FieldRegion, FittedFieldRegion
from geoq.regions.safe_region import (
    DistanceRegion,
    FittedDistanceRegion,
    FittedRegion,
    FittedSafeRegion,
    Region,
    SafeRegion,
)
from geoq.regions.support_region import FittedSupportRegion, SupportRegion

if TYPE_CHECKING:
    from geoq.estimator import GeoQ

_RULES: dict[str, type[SupportRegion | FieldRegion | DistanceRegion | SafeRegion]] = {
    rule.__name__: rule
    for rule in (SupportRegion, FieldRegion, DistanceRegion, SafeRegion)
}
_WITH_STATE = (FittedSupportRegion, FittedFieldRegion)


def state(region: FittedRegion) -> Content:
    """The settings and the arrays of a fitted region."""
    rule: Any = getattr(region, "rule", region)
    if type(rule) not in _RULES.values():
        raise ValueError(
            f"the safe region {type(rule).__name__} cannot be saved; use {' or '.join(_RULES)}."
        )
    arrays = region.state() if isinstance(region, _WITH_STATE) else {}
    name, settings = type(rule).__name__, asdict(rule)
    return {"rule": name, "settings": settings, "threshold": region.threshold}, arrays


def restored(
    geoq: "GeoQ", stored: dict[str, Any], arrays: dict[str, Tensor]
) -> tuple[Region, FittedRegion]:
    """The rule and the fitted region that ``state`` described."""
    rule, threshold = _RULES[stored["rule"]](**stored["settings"]), stored["threshold"]
    if isinstance(rule, FieldRegion):
        own = without_prefix("region.", arrays)
        return rule, FittedFieldRegion.from_state(rule, own)
    if isinstance(rule, SupportRegion):
        assert geoq.metric_ is not None
        own = without_prefix("region.", arrays)
        return rule, FittedSupportRegion.from_state(rule, own, geoq.metric_)
    if isinstance(rule, SafeRegion):
        return rule, FittedSafeRegion.of(rule, geoq.calibration_, threshold)
    return rule, FittedDistanceRegion(threshold, rule=rule)
