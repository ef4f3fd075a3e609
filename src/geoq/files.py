"""Saving and loading of a calibrated GeoQ: what a file contains, and how an estimator is restored from it.

A file contains arrays and numbers, never code. The user's callables are not in it; their answers at a few stored inputs are, so
that a different callable is refused. ``rollout/files.py`` does the same for ``RolloutGeoQ``.
"""

from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from geoq import archive, region_files, tuple_files
from geoq.archive import with_prefix, without_prefix
from geoq.arrays import Array, Rows, restore, to_tensor
from geoq.checks import check_callable, check_count, check_fitted, warn
from geoq.conformal import ConformalFactors
from geoq.folds import UnavailableFolds
from geoq.frames import frame_state, rebuilt
from geoq.geometry import Embedding, Geometry, mean_over_channels, mean_over_field
from geoq.increments.field_scale import FieldScaleIncrement
from geoq.increments.indicator import IndicatorIncrement
from geoq.increments.paper import FieldIncrement, NormScaledIncrement
from geoq.increments.protocol import IncrementModel, Storable
from geoq.increments.two_laws import TwoLawIncrement
from geoq.masks import Mask, masked_surrogate, outside
from geoq.metric import FittedMetric, Metric, SensitivityMetric, coordinates_from
from geoq.preparation import check_fitted_callables
from geoq.probing import N_PROBES
from geoq.repeats import Repeats
from geoq.representation import Representation
from geoq.surrogate import (
    ErrorFunctional,
    Surrogate,
    absolute_error,
    evaluate,
    norm_error,
    relative_norm_error,
)
from geoq.table import Schema, Table, values

if TYPE_CHECKING:
    from geoq.estimator import GeoQ

_MODELS: dict[str | None, Any] = {
    model.__name__: model
    for model in (
        NormScaledIncrement,
        FieldIncrement,
        TwoLawIncrement,
        FieldScaleIncrement,
        IndicatorIncrement,
    )
}
_ERRORS: dict[str | None, ErrorFunctional] = {
    error.__name__: error for error in (absolute_error, norm_error, relative_norm_error)
}
# Arrays of an increment model with one row per point.
_OF_POINTS = ("outputs", "held_out_error")
# Starts of the names of arrays without nan and infinity, without nan, and names of arrays without negative and infinite values.
_FINITE = ("coordinates.", "points.", "metric.", "increment.", "region.", "probe.")
# The limits of a learned factor can be infinite.
_DEFINED = ("increment.learned.lower", "increment.learned.upper")
_NOT_NEGATIVE = (
    "error",
    "typical_error",
    "features.error",
    "features.support_distance",
)


def state(geoq: "GeoQ", *, calibration: bool = True) -> archive.Content:
    """The numbers and arrays of a calibrated estimator, with or without its calibration tuples."""
    check_fitted(geoq, "probes_")
    if not calibration:
        tuple_files.check_droppable(geoq)
    numbers, arrays = _query_state(geoq)
    if not calibration:
        tuples = geoq.calibration_
        numbers["typical"] = [tuples.typical_distance, tuples.typical_support_distance]
        return numbers, arrays | {"typical_error": tuples.typical_error}
    tuple_numbers, tuple_arrays = tuple_files.state(geoq)
    return numbers | tuple_numbers, arrays | tuple_arrays


def _query_state(geoq: "GeoQ") -> archive.Content:
    """The numbers and arrays that answer queries."""
    name, settings, weights = _model_state(geoq.increment_model_)
    points = geoq.geometry_.points
    region, region_arrays = region_files.state(geoq.safe_region_)
    numbers = {
        # As fitted: the constructor arguments may have been changed since.
        "n_anchors": geoq.geometry_.n_anchors,
        "n_support": geoq.geometry_.n_support,
        "conformal_factors": [*astuple(geoq.conformal_factors_)],
        "safe_region": region,
        "collects": geoq.geometry_.collects,
        "numpy": isinstance(geoq.probes_, np.ndarray),
        "cuda": geoq.error_.is_cuda,
        "increment_model": name,
        "increment_settings": settings,
        **_table_state(geoq),
        "output_names": geoq.output_names_,
        "folds": repr(geoq.folds),
        "error_functional": getattr(geoq.error_functional, "__name__", None),
    }
    arrays = {
        **with_prefix("coordinates.", geoq.coordinates_.state()),
        "error": geoq.error_,
        "points.z": points.z,
        **with_prefix("increment.", weights),
        **with_prefix("region.", region_arrays),
        **with_prefix("probe.", _answers(geoq)),
    }
    if geoq.metric_ is not None:
        arrays |= with_prefix("metric.", geoq.metric_.state())
    elif not points.shared:
        arrays["points.normalized"] = points.normalized
    if geoq.mask_ is not None:
        arrays["mask"] = torch.as_tensor(geoq.mask_.cells)
        if geoq.mask_.fill is not None:
            arrays["mask_fill"] = torch.as_tensor(geoq.mask_.fill)
    if geoq.exact_ is not None:
        arrays["exact"] = geoq.exact_
    if geoq.repeats_ is not None:
        arrays |= with_prefix("repeats.", vars(geoq.repeats_))
    if geoq.schema_ is not None:
        arrays["table.x"] = _raw(values(geoq.probes_))
    return numbers, arrays


def _table_state(geoq: "GeoQ") -> dict[str, Any]:
    """The columns of a table and the types of a few rows; no types if the rows could not be rebuilt from them."""
    if geoq.schema_ is None:
        return {"table": None, "frame": None}
    columns, probes = geoq.schema_.state(), geoq.probes_
    if not isinstance(probes, Table):
        return {"table": columns, "frame": None}
    frame = frame_state(probes)
    try:
        same = rebuilt(geoq.schema_, probes.array, frame)
        assert same is not None
        answers = [evaluate(geoq.surrogate_, t, "surrogate") for t in (probes, same)]
        archive.check_same("surrogate", *answers)
    except Exception:  # noqa: BLE001 (any model; load warns that a later surrogate was not compared)
        return {"table": columns, "frame": None}
    return {"table": columns, "frame": frame}


def _model_state(
    model: IncrementModel,
) -> tuple[str | None, dict[str, Any], dict[str, Tensor]]:
    if not isinstance(model, Storable):
        return None, {}, {}
    return type(model).__name__, *model.state()


def load(
    cls: type["GeoQ"],
    path: str | Path,
    content: archive.Content,
    *,
    surrogate: Surrogate,
    representation: Representation | None,
    increment_model: IncrementModel | None,
    error_functional: ErrorFunctional | None,
) -> "GeoQ":
    """The estimator that the content of a file describes; see ``GeoQ.load``."""
    numbers, stored = content
    if "estimator" in numbers:
        raise ValueError(
            f"{path} holds a {numbers['estimator']}; load it with {numbers['estimator']}.load."
        )
    archive.check_given(surrogate, "surrogate", path)
    if error_functional is not None:
        check_callable(error_functional, "error_functional")
    with archive.restoring(path):
        _check(numbers, stored)
        arrays = archive.placed(numbers, stored)
        geoq = cls(
            surrogate,
            None,
            representation=representation or SensitivityMetric(),
            error_functional=error_functional
            or _ERRORS.get(numbers["error_functional"], _missing_error_functional),
            folds=UnavailableFolds(numbers["folds"]),
            n_anchors=numbers["n_anchors"],
            n_support=numbers["n_support"],
        )
        _restore_geometry(geoq, numbers, arrays)
        geoq.safe_region, geoq.safe_region_ = region_files.restored(
            geoq, numbers["safe_region"], arrays
        )
        geoq.schema_, geoq.probes_ = _restored_probes(numbers, arrays)
        outputs, repeats = numbers["output_names"], without_prefix("repeats.", arrays)
        geoq.output_names_ = None if outputs is None else tuple(outputs)
        geoq.repeats_ = Repeats(**repeats) if repeats else None
        own = _restored_model(numbers, arrays)
    geoq.increment_model = geoq.increment_model_ = _chosen_model(own, increment_model)
    _check_callables(geoq, path, arrays)
    return geoq


def _check_callables(geoq: "GeoQ", path: str | Path, arrays: dict[str, Tensor]) -> None:
    """Refuse callables whose answers at the stored inputs differ from the answers in the file."""
    present = _answers(geoq)
    can_ask = geoq.schema_ is None or isinstance(geoq.probes_, Table)
    if can_ask:
        with archive.restoring(path):
            expected, typical = arrays["probe.surrogate"], _typical_error(geoq)
        distance = partial(_distance, geoq)
        archive.check_surrogate(present["surrogate"], expected, typical, distance)
    else:
        warn(
            f"{path} was calibrated on a table that cannot be rebuilt here, so it was not checked whether surrogate is the model "
            "that the file was calibrated with."
        )
    for name in ("representation", "increment_model"):
        archive.check_same(name, present.get(name), arrays.get(f"probe.{name}"))
    if can_ask:
        with archive.restoring(path):
            # The callables have answered at these inputs, so that an error here lies in the file.
            geoq.assess(geoq.probes_)


def _typical_error(geoq: "GeoQ") -> Tensor:
    typical: Tensor = geoq.calibration_.typical_error
    same = typical.shape == mean_over_channels(geoq.error_[:1])[0].shape
    archive.check_value("array 'typical_error'", same, "not of the shape of an error")
    return typical


def _distance(geoq: "GeoQ", one: Tensor, other: Tensor) -> Tensor:
    """The distance between two answers to the stored inputs, measured with the error functional, if it is available."""
    if geoq.error_functional is _missing_error_functional:
        return torch.full((1, 1), torch.inf)
    both = (restore(part, values(geoq.probes_)) for part in (one, other))
    error = to_tensor(geoq.error_functional(*both), "the error")
    return mean_over_channels(error).to(one)


def _restored_probes(
    numbers: dict[str, Any], arrays: dict[str, Tensor]
) -> tuple[Schema | None, Rows]:
    """The columns of the table of ``fit``, and the rows at which callables are recognised."""
    if numbers.get("table") is None:
        probes = arrays["probe.x"]
        return None, probes.cpu().numpy() if numbers["numpy"] else probes
    schema = Schema.from_state(numbers["table"])
    array = arrays["table.x"].cpu().numpy()
    frame = numbers["frame"]
    table = None if frame is None else rebuilt(schema, array, frame)
    return schema, array if table is None else table


def _check(numbers: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    """Refuse values that no calibration has, and arrays whose lengths differ."""
    errors = tuple(name for name in _NOT_NEGATIVE if name in arrays)
    archive.check_values(arrays, finite=_FINITE, defined=_DEFINED, errors=errors)
    archive.check_number("threshold", numbers["safe_region"]["threshold"], above=-1e-9)
    for factor in numbers["conformal_factors"]:
        archive.check_number("conformal_factors", factor, above=-1e-9)
    archive.check_value(
        "numpy", isinstance(numbers["numpy"], bool), "not true or false"
    )
    probes = "probe.x" if numbers.get("table") is None else "table.x"
    archive.check_value(f"array {probes!r}", len(arrays[probes]) > 0, "empty")
    n_points = len(arrays["error"])
    for name in ("n_anchors", "n_support"):
        check_count(numbers[name], name)
        archive.check_value(name, numbers[name] <= n_points, "larger than the data")
    for name in ("z", "normalized", "inputs", "prediction"):
        tuple_files.check_length(arrays, f"points.{name}", n_points)
    for name in _OF_POINTS:
        tuple_files.check_length(arrays, f"increment.points.{name}", n_points)
    tuple_files.check(arrays, n_points)
    for name in ("mask", "exact"):
        is_bool = name not in arrays or arrays[name].dtype == torch.bool
        archive.check_value(f"array {name!r}", is_bool, "not true or false")
    if "exact" in arrays:
        same = arrays["exact"].shape == arrays["error"].shape[1:]
        archive.check_value("array 'exact'", same, "not of the shape of the errors")


def _restore_geometry(
    geoq: "GeoQ", numbers: dict[str, Any], arrays: dict[str, Tensor]
) -> None:
    """Restore everything but the increment model and the safe region."""
    assert geoq.surrogate is not None  # for mypy
    cells, fill = (
        arrays[name].cpu().numpy() if name in arrays else None
        for name in ("mask", "mask_fill")
    )
    geoq.mask_ = None if cells is None else Mask(cells, fill)
    geoq.surrogate_ = masked_surrogate(geoq.surrogate, geoq.mask_)
    geoq.exact_ = arrays.get("exact")
    geoq.coordinates_ = coordinates_from(without_prefix("coordinates.", arrays))
    metric = without_prefix("metric.", arrays)
    geoq.metric_ = FittedMetric.from_state(metric) if metric else None
    geoq.error_ = arrays["error"]
    geoq.error_size_ = mean_over_field(outside(geoq.mask_, geoq.error_))
    z = arrays["points.z"]
    geoq.n_support_ = numbers["n_support"]
    geoq.geometry_ = Geometry(
        Embedding(z, arrays.get("points.normalized", z)),
        n_anchors=geoq.n_anchors,
        n_support=geoq.n_support_,
        collects=numbers["collects"],
    )
    geoq.conformal_factors_ = ConformalFactors(*numbers["conformal_factors"])
    geoq.calibration_ = tuple_files.restored(numbers, arrays)


def _restored_model(
    numbers: dict[str, Any], arrays: dict[str, Tensor]
) -> IncrementModel | None:
    """The increment model in the file; None if it was an object of the user."""
    own = _MODELS.get(numbers.get("increment_model"))
    if own is None:
        return None
    weights = without_prefix("increment.", arrays)
    model: IncrementModel = own.from_state(numbers["increment_settings"], weights)
    return model


def _chosen_model(
    own: IncrementModel | None, given: IncrementModel | None
) -> IncrementModel:
    if own is not None and given is not None:
        raise ValueError(
            f"the file contains its increment model ({type(own).__name__}); leave increment_model out."
        )
    model = given if own is None else own
    if model is None:
        raise ValueError(
            "the file was saved with an increment model of the user, which it does not contain; pass the fitted model as "
            "increment_model."
        )
    return model


def _answers(geoq: "GeoQ") -> dict[str, Tensor]:
    """The stored inputs, and the answers of the callables at them."""
    check_fitted_callables(geoq)
    answers = {}
    if geoq.schema_ is None:
        answers["x"] = _raw(values(geoq.probes_))
    elif not isinstance(geoq.probes_, Table):
        return answers
    answers["surrogate"] = evaluate(geoq.surrogate_, geoq.probes_, "surrogate")
    if not isinstance(geoq.representation, Metric):
        answers["representation"] = evaluate(
            geoq.representation, geoq.probes_, "representation"
        )
    if not isinstance(geoq.increment_model_, Storable):
        answers["increment_model"] = geoq.increment_model_(
            geoq.calibration_.features[:N_PROBES]
        )
    return answers


def _missing_error_functional(_y: Array, _prediction: Array) -> Array:
    raise ValueError(
        "the file was calibrated with an error functional of the user, which it does not contain; pass it to load as "
        "error_functional."
    )


def _raw(array: Array) -> Tensor:
    """The array as a tensor of its own dtype."""
    return (
        torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        if isinstance(array, np.ndarray)
        else array.detach()
    )
