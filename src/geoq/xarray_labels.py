"""Labels of arrays: in the form of JSON, as names of inputs and anchors, and in messages; answers with labels."""

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from geoq import archive
from geoq.arrays import Array, chunks
from geoq.checks import shortened, warn
from geoq.folds import RandomFolds
from geoq.scratch import room

Labelled: TypeAlias = xr.DataArray | xr.Dataset
# The variables of an answer: for each its type, and the sizes of its dimensions other than the samples.
Parts: TypeAlias = dict[str, tuple[np.dtype[Any], dict[Hashable, int]]]
# Kinds of NumPy types that a file can store: booleans, numbers, strings, times and time differences.
_STORABLE_KINDS = "biufUmM"
# Successive samples with at least this correlation are alike. It is measured in at most about this many cells.
ALIKE, MOST_CELLS = 0.5, 500
# What stands for the label of a missing anchor, by the kind of NumPy type; labels of other kinds become None.
_NO_LABEL = {"f": np.nan, "M": "NaT", "m": "NaT", "U": "", "S": b"", "i": -1, "u": 0}


def applied(
    function: Callable[..., Any],
    arrays: Sequence[xr.DataArray],
    core: Sequence[Sequence[Hashable]],
    parts: Parts,
) -> dict[str, xr.Variable]:
    """The variables of the answers of a function to blocks of samples; lazy if the samples are chunked.

    ``core`` has the dimensions of one sample of each array, whose chunks are joined.
    """
    sizes = {dim: n for _, dims in parts.values() for dim, n in dims.items()}
    variables = [
        part.variable.chunk(dict.fromkeys(dims, -1)) if part.chunks else part.variable
        for part, dims in zip(arrays, core, strict=True)
    ]
    answers = xr.apply_ufunc(
        function,
        *variables,
        input_core_dims=core,
        output_core_dims=[[*dims] for _, dims in parts.values()],
        exclude_dims={dim for dims in core for dim in dims},
        dask="parallelized",
        output_dtypes=[dtype for dtype, _ in parts.values()],
        dask_gufunc_kwargs={"output_sizes": sizes},
    )
    found = answers if len(parts) > 1 else (answers,)
    return dict(zip(parts, found, strict=True))


def check_storable(arrays: Mapping[str, xr.DataArray], *labels: xr.DataArray) -> None:
    """Refuse attributes that a file cannot store, and warn of coordinates and labels that it cannot store."""
    for name, array in arrays.items():
        _check_attributes(array, name)
        for coordinate, of in array.coords.items():
            _check_attributes(of, f"{name}[{coordinate!r}]")
    try:
        for array in arrays.values():
            described(array)
        for label in labels:
            listed(label)
    except ValueError as exc:
        warn(f"save will refuse this estimator: {exc}")


def _check_attributes(array: xr.DataArray, name: str) -> None:
    for key, attribute in array.to_dict(data=False)["attrs"].items():
        try:
            json.dumps({key: attribute})
        except (TypeError, ValueError) as exc:
            raise TypeError(
                f"{name}.attrs[{key!r}] is a {type(attribute).__name__}, but a file stores only numbers, strings and lists; "
                f"convert it with str, or remove it from {name}.attrs."
            ) from exc


def described(template: xr.DataArray) -> dict[str, Any]:
    """An array without samples in the form of JSON."""
    described = template.to_dict(data=False)
    for name, coordinate in described["coords"].items():
        coordinate |= listed(template[name])
    return described


def listed(coordinate: xr.DataArray) -> dict[str, Any]:
    """The values of a coordinate in the form of JSON."""
    values = coordinate.values
    strings = all(isinstance(value, str) for value in values.flat)
    if values.dtype.kind not in _STORABLE_KINDS and not strings:
        raise ValueError(
            f"coordinate {coordinate.name!r} has dtype {values.dtype}, but a file stores only numbers, strings and times; drop or "
            "convert it before fit."
        )
    whole = values.astype(np.int64) if values.dtype.kind in "mM" else values
    return {"dtype": str(values.dtype), "data": whole.tolist()}


def array_of(described: dict[str, Any]) -> np.ndarray:
    """The inverse of ``listed``."""
    dtype = np.dtype(described["dtype"])
    possible = dtype.kind in _STORABLE_KINDS + "O"
    archive.check_value(f"dtype {dtype}", possible, "not a dtype of labels")
    # The width of strings is the width of the longest: a declared width could exceed the memory.
    wanted = np.dtype(str) if dtype.kind == "U" else dtype
    return np.array(described["data"], dtype=wanted)


def template(described: dict[str, Any]) -> xr.DataArray:
    """The inverse of ``described``."""
    coordinates = {
        name: (tuple(c["dims"]), array_of(c), c["attrs"])
        for name, c in described["coords"].items()
    }
    shape = described["shape"]
    archive.check_value(f"shape {shape}", math.prod(shape) == 0, "not without samples")
    empty = np.empty(shape, dtype=described["dtype"])
    dims, name, attributes = (described[part] for part in ("dims", "name", "attrs"))
    return xr.DataArray(empty, coordinates, tuple(dims), name, attributes)


def labels_of(labels: np.ndarray, anchors: Array) -> np.ndarray:
    """The labels of these rows; a missing label for row -1."""
    rows = np.asarray(anchors)
    taken: np.ndarray = labels[rows]
    missing = rows < 0
    if missing.any():
        taken[missing] = _NO_LABEL.get(labels.dtype.kind)
    return taken


@dataclass(frozen=True)
class InputNames(Sequence[str]):
    """A name for each input: its labels along the dimensions of the data other than the samples.

    Example:
        >>> x = xr.DataArray(np.zeros((0, 2)), dims=("time", "lon"), coords={"lon": [0.0, 90.0]})
        >>> list(InputNames(x))
        ['lon 0.0', 'lon 90.0']
    """

    template: xr.DataArray

    def __len__(self) -> int:
        return int(np.prod(self.template.shape[1:]))

    def __getitem__(self, number: int) -> str:  # type: ignore[override]  # no slices
        if not 0 <= number < len(self):
            raise IndexError(f"input {number}, but there are {len(self)}.")
        places = np.unravel_index(number, self.template.shape[1:])
        parts = [
            f"{dim} {self.template.get_index(dim)[int(place)]}"
            for dim, place in zip(self.template.dims[1:], places, strict=True)
        ]
        return ", ".join(parts)


def span(array: xr.DataArray, dim: Hashable) -> str:
    """The number of labels along a dimension, the first and the last one, for messages."""
    labels = array.get_index(dim)
    ends = f" from {labels[0]} to {labels[-1]}" if len(labels) else ""
    return f"{len(labels)} {'labels' if dim in array.coords else 'positions'}{ends}"


def stacked(array: Any, name: str, fitted: xr.DataArray | None = None) -> xr.DataArray:
    """A DataArray: the variables of a Dataset are stacked along ``variable``, with their units as a coordinate.

    After ``fit``, the variables of the array in ``fit`` are selected by their names.
    """
    names: list[Any] = []
    if fitted is not None and "variable" in fitted.coords:
        names = list(fitted.get_index("variable"))
    if isinstance(array, xr.Dataset):
        missing = [variable for variable in names if variable not in array.data_vars]
        if missing:
            raise ValueError(
                f"{name} has the variables {list(array.data_vars)}, but fit also had {missing}; add them."
            )
        array = array[names] if names else array
        kinds = {name: of.dtype.kind for name, of in array.data_vars.items()}
        numbers = [variable for variable, kind in kinds.items() if kind in "biuf"]
        if len(numbers) < len(kinds):
            others = [variable for variable in kinds if variable not in numbers]
            raise TypeError(
                f"{name} has the variables {others}, which are not numbers; leave them out, {name}[{numbers}]."
            )
        units = [str(of.attrs.get("units", "")) for of in array.data_vars.values()]
        array = array.to_dataarray()
        if any(units) and "units" not in array.coords:
            array = array.assign_coords(units=("variable", units))
    if not isinstance(array, xr.DataArray):
        raise TypeError(
            f"{name} must be a DataArray or a Dataset, got {type(array).__name__}; for plain arrays use GeoQ or RolloutGeoQ."
        )
    found: xr.DataArray = array
    if names and "variable" in found.coords:
        own = list(found.get_index("variable"))
        if own != names and sorted(map(str, own)) == sorted(map(str, names)):
            found = found.sel(variable=names)
    return found


def check_same_grid(
    array: xr.DataArray, fitted: xr.DataArray, dims: Sequence[Hashable], name: str
) -> None:
    """Refuse other labels along these dimensions, or other units, than in ``fit``."""
    for dim in dims:
        check_same_labels(array, fitted, dim, name)
    pairs = [("", array.attrs.get("units"), fitted.attrs.get("units"))]
    if "units" in array.coords and "units" in fitted.coords:
        names = fitted.get_index("variable") if "variable" in fitted.dims else [""]
        both = (np.ravel(of["units"].values) for of in (array, fitted))
        pairs += [
            (f"[{variable!r}]", *units)
            for variable, *units in zip(names, *both, strict=False)
        ]
    for place, own, theirs in pairs:
        if own and theirs and own != theirs:
            raise ValueError(
                f"{name}{place} has the units '{own}', but '{theirs}' in fit; convert it, or correct its attribute 'units'."
            )


def check_same_labels(
    array: xr.DataArray, fitted: xr.DataArray, dim: Hashable, name: str
) -> None:
    """Refuse other labels along a dimension than in ``fit``."""
    own, theirs = array.get_index(dim), fitted.get_index(dim)
    if own.equals(theirs):
        return
    if len(own) == len(theirs) and _nearly_equal(own.values, theirs.values):
        apart = abs(own.values - theirs.values).max()
        raise ValueError(
            f"{name} has other labels along {dim!r} than in fit, but they differ by at most {apart:.3g}, probably by rounding; pass "
            f"{name}.assign_coords({dim}=<the labels of fit>)."
        )
    raise ValueError(
        f"{name} has {span(array, dim)} along {dim!r}, but {name} had {span(fitted, dim)} in fit; sort, select "
        "or interpolate it to these coordinates."
    )


def _nearly_equal(one: Any, other: Any) -> bool:
    """Whether two arrays of numbers differ only by rounding."""
    if one.dtype.kind not in "fiu" or other.dtype.kind not in "fiu":
        return False
    return bool(np.allclose(one, other, rtol=1e-6, atol=1e-6 * np.ptp(other)))


def _gaps(array: xr.DataArray) -> np.ndarray:
    """Where an array is nan, found in chunks of rows."""
    if array.dtype.kind != "f":
        return np.zeros(1, dtype=bool)
    values, gaps = array.values, room(array.shape, np.dtype(bool))
    for part in chunks(len(values), int(np.prod(values.shape[1:]))):
        np.isnan(values[part], out=gaps[part])
    return gaps


def masked_outputs(y: xr.DataArray) -> np.ndarray:
    """The values of y, masked where they are nan; samples that are nan everywhere are refused."""
    gaps = _gaps(y)
    if not gaps.any() or gaps.all():
        return y.values
    empty = gaps.reshape(len(gaps), -1).all(axis=1)
    if empty.any():
        check_no_gaps(y.where(xr.DataArray(empty, dims=y.dims[:1]), 0), "y")
    return np.ma.array(y.values, mask=gaps)


def warn_of_dates(y: xr.DataArray, folds: object) -> None:
    """Warn if random folds hold out samples whose neighbours in time are alike, and propose folds of blocks of time."""
    time = y.get_index(y.dims[0])
    schemes = getattr(folds, "schemes", (folds,))
    is_date = time.dtype.kind == "M" or isinstance(time, xr.CFTimeIndex)
    random = any(isinstance(scheme, RandomFolds) for scheme in schemes)
    if not is_date or not random or y.dtype.kind not in "iuf":
        return
    # Some cells of large fields are enough for a correlation.
    cells = y.values.reshape(len(y), -1)
    values = cells[:, :: 1 + cells.shape[1] // MOST_CELLS][np.argsort(time.values)]
    values = values[:, np.isfinite(values).all(axis=0)]
    values = values[:, np.ptp(values, axis=0) > 0]
    if not values.size:
        return
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    gap, correlation = 1, float((values[1:] * values[:-1]).mean())
    if not correlation >= ALIKE:
        return
    while gap <= len(y) // 10 and (values[gap:] * values[:-gap]).mean() >= ALIKE:
        gap += 1
    proposal = f"TemporalFolds(5, gap={gap})"
    if len(schemes) > 1:
        proposal = f"default_folds({proposal})"
    warn(
        f"folds={shortened(folds)} holds out random dates, but successive samples along {str(y.dims[0])!r} are alike (correlation "
        f"{correlation:.2g}), so fold surrogates have nearly seen the held-out samples, and the bounds are too small for later "
        f"dates; pass folds={proposal}, or groups."
    )


def check_no_gaps(array: xr.DataArray, name: str, way_out: str = "") -> None:
    """Refuse nan, and name the first one by its labels: the sample, the variable and the position."""
    gaps = _gaps(array)
    if not gaps.any():
        return
    first = zip(array.dims, np.argwhere(gaps)[0], strict=True)
    place = ", ".join(f"{dim} {array.get_index(dim)[int(at)]}" for dim, at in first)
    dim = array.dims[0]
    n_samples = int(gaps.reshape(len(gaps), -1).any(axis=1).sum())
    same = len(gaps) > 1 and bool((gaps == gaps[0]).all())
    way_out = way_out or (
        f"the same cells are nan in all samples: fill them, {name}.fillna(0)"
        if same
        else f"remove these samples, for example with {name}.dropna({str(dim)!r}), or fill them"
    )
    raise ValueError(
        f"{name} is nan at {place} ({n_samples} of {len(gaps)} samples have nan); {way_out}."
    )


def with_nan(array: Array) -> np.ndarray:
    """A plain array, with nan under a mask."""
    return np.asarray(np.ma.filled(np.asanyarray(array), np.nan))
