"""The calibration tuples in a file: columns of their own, and rows of the arrays of the points, or nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from geoq import archive
from geoq.crossfit import CalibrationSet
from geoq.geometry import Gathered, GeometricFeatures, assembled
from geoq.increments.protocol import Storable
from geoq.regions.safe_region import FittedSafeRegion

if TYPE_CHECKING:
    from geoq.estimator import GeoQ

_FEATURES = (
    "displacement",
    "support_distance",
    "anchor_error",
    "prediction",
    "inputs",
    "neighborhood.rows",
    "neighborhood.nearest",
    "neighborhood.side",
)
_TUPLES = ("point", "fold", "family")


@dataclass(frozen=True)
class DroppedCalibration:
    """What an estimator has in place of the calibration tuples if its file was saved without them."""

    typical_distance: float
    typical_support_distance: float
    typical_error: Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"calibration_.{name} is needed here, but the file was saved with calibration=False, without the calibration tuples; "
            "use the estimator that was fitted, or load a file that was saved with calibration=True."
        )


def check_droppable(geoq: "GeoQ") -> None:
    """Refuse to leave out calibration tuples that the answers need."""
    name = None
    if isinstance(geoq.safe_region_, FittedSafeRegion):
        name = "safe_region=SafeRegion(), which compares queries with them"
    if not isinstance(geoq.increment_model_, Storable):
        model = type(geoq.increment_model_).__name__
        name = f"increment_model={model}(), which load recognises by its increments at some of them"
    if name is not None:
        raise ValueError(
            f"calibration=False leaves the calibration tuples out of the file, but they are needed for {name}; save with "
            "calibration=True."
        )


def state(geoq: "GeoQ") -> archive.Content:
    """The calibration tuples: each column is an array of its own, or rows of an array of the points."""
    calibration, points = geoq.calibration_, geoq.geometry_.points
    columns = dict(zip(_FEATURES, calibration.features.stored, strict=False))
    sources = {"points.z": points.z, "points.inputs": points.coordinates}
    sources["error"] = geoq.error_
    arrays = {f"calibration.{name}": getattr(calibration, name) for name in _TUPLES}
    if calibration.position is not None:
        arrays["calibration.position"] = calibration.position
    gathered = {}
    for name, column in {**columns, "error": calibration.stored_error}.items():
        if not isinstance(column, Gathered):
            arrays[f"features.{name}"] = column
            continue
        if column.point is not None and column.point is not calibration.point:
            arrays[f"features.{name}"] = column.values  # all rows in their order
            continue
        known = (key for key, values in sources.items() if values is column.values)
        source = next(known, f"points.{name}")
        arrays[source] = column.values
        if column.anchors is not None:
            arrays["calibration.anchors"] = column.anchors
        has = column.point is not None, column.anchors is not None
        gathered[name] = [source, *has]
    return {"reach": calibration.reach, "gathered": gathered}, arrays


def check(arrays: dict[str, Tensor], n_points: int) -> None:
    """Refuse tuples of different lengths, and rows that are not rows of the points."""
    if "calibration.point" not in arrays:
        return
    n_tuples = len(arrays["calibration.point"])
    columns = [f"calibration.{name}" for name in (*_TUPLES, "anchors")]
    for name in columns + [f"features.{name}" for name in (*_FEATURES, "error")]:
        check_length(arrays, name, n_tuples)
    for name in ("calibration.point", "calibration.anchors"):
        rows = arrays.get(name, torch.zeros(1))
        inside = bool(((rows >= 0) & (rows < n_points)).all())
        archive.check_value(f"array {name!r}", inside, "out of range")


def check_length(arrays: dict[str, Tensor], name: str, length: int) -> None:
    """Refuse an array of another length."""
    if name in arrays:
        same = len(arrays[name]) == length
        archive.check_value(f"array {name!r}", same, f"not of length {length}")


def restored(numbers: dict[str, Any], arrays: dict[str, Tensor]) -> Any:
    """The calibration tuples, or ``DroppedCalibration``."""
    if "typical" in numbers:
        for number in numbers["typical"]:
            archive.check_number("typical", number, above=-1e-9)
        distance, support_distance = numbers["typical"]
        return DroppedCalibration(distance, support_distance, arrays["typical_error"])
    point, anchors = (arrays.get(f"calibration.{n}") for n in ("point", "anchors"))
    dtype = arrays["points.z"].dtype

    def column(name: str) -> Tensor | Gathered | None:
        if name not in numbers["gathered"]:
            own = arrays.get(f"features.{name}")
            if own is None or own.dtype == dtype or not own.is_floating_point():
                return own
            return Gathered(own, dtype, torch.arange(len(own), device=own.device))
        source, has_point, has_anchors = numbers["gathered"][name]
        rows = point if has_point else None, anchors if has_anchors else None
        return Gathered(arrays[source], dtype, *rows)

    features = [part for name in _FEATURES if (part := column(name)) is not None]
    return assembled(
        CalibrationSet,
        features=GeometricFeatures.of(features),
        error=column("error"),
        **{name: arrays[f"calibration.{name}"] for name in _TUPLES},
        position=arrays.get("calibration.position"),
        reach=numbers["reach"],
        data=None,
    )
