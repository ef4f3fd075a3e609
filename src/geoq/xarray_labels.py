"""The labels of an XarrayGeoQ: in the form of JSON, as names of inputs and anchors, and in messages."""

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import xarray as xr

from geoq import archive
from geoq.arrays import Array
from geoq.checks import warn
from geoq.estimator import GeoQ

# Kinds of NumPy types that a file can store: booleans, numbers, strings, times and time differences.
_STORABLE_KINDS = "biufUmM"
# What stands for the label of a missing anchor, by the kind of NumPy type; labels of other kinds become None.
_NO_LABEL = {"f": np.nan, "M": "NaT", "m": "NaT", "U": "", "S": b"", "i": -1, "u": 0}


@dataclass(frozen=True, eq=False)
class Labels:
    """The data of ``fit`` without their values.

    Attributes:
        sample_dim: the name of the dimension of the samples.
        x: the inputs without samples.
        y: the reference outputs without samples.
        samples: the labels of the samples.
    """

    sample_dim: str
    x: xr.DataArray
    y: xr.DataArray
    samples: np.ndarray

    def check(self) -> None:
        """Refuse attributes that a file cannot store, and warn of coordinates that it cannot store."""
        for name, array in (("x", self.x), ("y", self.y)):
            _check_attributes(array, name)
            for coordinate, of in array.coords.items():
                _check_attributes(of, f"{name}[{coordinate!r}]")
        try:
            self.described()
        except ValueError as exc:
            warn(f"save will refuse this estimator: {exc}")

    def described(self) -> dict[str, Any]:
        """The labels in the form of JSON."""
        return {
            "sample_dim": self.sample_dim,
            "x": _described(self.x),
            "y": _described(self.y),
            "labels": _listed(xr.DataArray(self.samples, name=self.sample_dim)),
        }

    @staticmethod
    def restored(described: dict[str, Any], geoq: GeoQ) -> "Labels":
        """The inverse of ``described``, refused unless the sizes are the sizes of the calibration."""
        x, y = _template(described["x"]), _template(described["y"])
        labels = Labels(described["sample_dim"], x, y, _array(described["labels"]))
        prediction = geoq.calibration_.features[:1].prediction
        for name, stored, expected in (
            ("x", x.shape[1:], geoq.coordinates_.mean.shape),
            ("y", y.shape[1:], prediction.shape[1:]),
            ("labels", labels.samples.shape, geoq.error_.shape[:1]),
        ):
            same = stored == tuple(expected)
            archive.check_value(f"the shape {stored} of {name}", same, "not possible")
        return labels


def _check_attributes(array: xr.DataArray, name: str) -> None:
    for key, attribute in array.to_dict(data=False)["attrs"].items():
        try:
            json.dumps({key: attribute})
        except (TypeError, ValueError) as exc:
            raise TypeError(
                f"{name}.attrs[{key!r}] is a {type(attribute).__name__}, but a file stores only numbers, strings and lists; "
                f"convert it with str, or remove it from {name}.attrs."
            ) from exc


def _described(template: xr.DataArray) -> dict[str, Any]:
    """An array without samples in the form of JSON."""
    described = template.to_dict(data=False)
    for name, coordinate in described["coords"].items():
        coordinate |= _listed(template[name])
    return described


def _listed(coordinate: xr.DataArray) -> dict[str, Any]:
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


def _array(described: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(described["dtype"])
    possible = dtype.kind in _STORABLE_KINDS + "O"
    archive.check_value(f"dtype {dtype}", possible, "not a dtype of labels")
    # The width of strings is the width of the longest: a declared width could exceed the memory.
    wanted = np.dtype(str) if dtype.kind == "U" else dtype
    return np.array(described["data"], dtype=wanted)


def _template(described: dict[str, Any]) -> xr.DataArray:
    """The inverse of ``_described``."""
    coordinates = {
        name: (tuple(c["dims"]), _array(c), c["attrs"])
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

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> list[str]: ...

    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
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


def masked_outputs(y: xr.DataArray) -> np.ndarray:
    """The values of y; masked where they are nan in all samples, and refused if they are nan elsewhere."""
    gaps = y.isnull().values if y.dtype.kind == "f" else np.zeros(1, dtype=bool)
    if not gaps.any() or gaps.all():
        return y.values
    always = gaps.all(axis=0)
    check_no_gaps(y.where(~always, 0), "y")
    return np.ma.array(y.values, mask=np.broadcast_to(always, y.shape))


def check_no_gaps(array: xr.DataArray, name: str) -> None:
    """Refuse nan, and name the first one by its labels: the sample, the variable and the position."""
    gaps = array.isnull().values if array.dtype.kind == "f" else np.zeros(1, dtype=bool)
    if not gaps.any():
        return
    first = zip(array.dims, np.argwhere(gaps)[0], strict=True)
    place = ", ".join(f"{dim} {array.get_index(dim)[int(at)]}" for dim, at in first)
    dim = array.dims[0]
    n_samples = int(gaps.reshape(len(gaps), -1).any(axis=1).sum())
    same = len(gaps) > 1 and bool((gaps == gaps[0]).all())
    way_out = (
        f"the same cells are nan in all samples: fill them, {name}.fillna(0)"
        if same
        else f"remove these samples, for example with {name}.dropna({str(dim)!r}), or fill them"
    )
    raise ValueError(
        f"{name} is nan at {place} ({n_samples} of {len(gaps)} samples have nan); {way_out}."
    )


def with_nan(array: Array) -> np.ndarray:
    """A plain array, with nan under a mask."""
    plain: np.ndarray = np.ma.filled(np.asanyarray(array), np.nan)
    return plain
