"""The xarray interface of GeoQ: labelled fields in, labelled bounds out, also for chunked fields larger than memory."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from geoq import archive, files
from geoq.checks import check_fitted
from geoq.conformal import POINTWISE, Guarantee
from geoq.estimator import GeoQ
from geoq.increments.protocol import IncrementModel
from geoq.parameters import get_params, set_params
from geoq.representation import Representation
from geoq.surrogate import ErrorFunctional, Surrogate, absolute_error, norm_error

try:
    import xarray as xr
except ImportError as exc:
    raise ImportError(
        "geoq.xarray needs xarray; install it with pip install 'geoq[xarray]'."
    ) from exc

Labelled: TypeAlias = xr.DataArray | xr.Dataset
# Type and dimensions besides the samples of each variable of an answer.
Parts: TypeAlias = dict[str, tuple[np.dtype[Any], dict[Hashable, int]]]

# Names of the variables of an answer on the axes of a plot.
_LONG_NAMES = {
    "prediction": "prediction",
    "error_hat": "error bound",
    "anchor_error": "observed error of the anchors",
    "increment": "increment of the error bound",
    "expected_error": "expected error",
    "safe": "calibration supports the bound",
    "support_score": "support score",
    "support_distance": "support distance",
    "anchors": "samples that serve as anchors",
    "anchor_distance": "distance to the anchors",
    "observed_error": "mean observed error of the anchor",
}
_ERRORS = ("error_hat", "anchor_error", "increment", "observed_error", "expected_error")
# Kinds of NumPy types that JSON can hold: booleans, numbers, strings, times and time differences.
_STORABLE_KINDS = "biufUmM"


@dataclass(eq=False)
class XarrayGeoQ:
    """GeoQ for labelled arrays: coordinates are checked on input and restored on output.

    The callables of the wrapped GeoQ receive plain NumPy arrays: samples first, then the other dimensions in the order in
    which ``fit`` received them. The variables of a Dataset are stacked along a dimension ``variable`` after the samples.

    Attributes:
        geoq: the settings of the calibration; ``fit`` calibrates a copy, ``geoq_``.
        sample_dim: the dimension of the samples, at any position among the dimensions.
    """

    geoq: GeoQ
    sample_dim: str

    def fit(
        self,
        x: Labelled,
        y: Labelled,
        *,
        groups: Sequence[Any] | xr.DataArray | None = None,
        checkpoint: str | Path | None = None,
    ) -> "XarrayGeoQ":
        """Calibrate on pairs of inputs and reference outputs, which must be in memory.

        Args:
            x: inputs; their grid may be another one than that of y.
            y: reference outputs, for the same samples in the same order.
            groups: a label per sample, for fold schemes that hold out whole groups.
            checkpoint: a folder that keeps each finished fold.

        Raises:
            ValueError: the samples do not match, or anything that GeoQ refuses; said before any training starts.
        """
        x, y = self._pairs(x, y)
        self.geoq_ = copy.copy(self.geoq).fit(
            x.values,
            y.values,
            groups=None if groups is None else list(np.asarray(groups)),
            checkpoint=checkpoint,
        )
        self.x_, self.y_ = self._empty(x), self._empty(y)
        self.labels_ = x[self.sample_dim].values
        return self

    def conformalize(
        self, x: Labelled, y: Labelled, *, guarantee: Guarantee = POINTWISE
    ) -> "XarrayGeoQ":
        """``GeoQ.conformalize`` on pairs set aside, which must be in memory and on the grids of ``fit``."""
        x, y = self._pairs(self._queries(x), self._on_grid(y, self.y_, "y"))
        self.geoq_.conformalize(x.values, y.values, guarantee=guarantee)
        return self

    def _pairs(self, x: Labelled, y: Labelled) -> tuple[xr.DataArray, xr.DataArray]:
        """Both with their samples first, if these match and are in memory."""
        x, y = self._samples_first(x, "x"), self._samples_first(y, "y")
        for name, array in (("x", x), ("y", y)):
            if array.chunks is not None:
                raise ValueError(
                    f"{name} is chunked, but calibration needs all pairs in memory; pass {name}.compute(), "
                    "of fewer samples if they do not fit."
                )
        dim = self.sample_dim
        if not x.get_index(dim).equals(y.get_index(dim)):
            raise ValueError(
                f"x and y differ along {dim!r}: {_span(x, dim)} and {_span(y, dim)}; "
                f"bring them to the same samples first, for example by y.sel({dim}=x.{dim})."
            )
        return x, y

    def assess(self, x: Labelled) -> xr.Dataset:
        """Prediction, error bound, safe flag and their parts at each sample.

        Fields have the dimensions and coordinates of y. ``anchors`` names samples of the calibration by their labels.
        The displacement is left out; ``geoq.assess`` has it. Chunked samples give a lazy answer that is computed chunk
        by chunk; chunks along other dimensions are joined.

        Raises:
            ValueError: x lies on another grid than the data of ``fit``.
        """
        x = self._queries(x)
        return self._asked(x, self._parts(), self._answer)

    def bound(self, x: Labelled) -> xr.DataArray:
        """The error bound, ``assess(x).error_hat``."""
        return self.assess(x)["error_hat"]

    def bounds(self, x: Labelled, levels: Sequence[float]) -> xr.DataArray:
        """Error bounds at several quantile levels along a new dimension ``level``, see ``GeoQ.bounds``."""
        x = self._queries(x)
        given = [float(level) for level in levels]
        # Unusable levels are refused now, not when a lazy answer is computed.
        self.geoq_.bounds(self.geoq_.probes_[:1], given)
        real, dims = self._parts()["error_hat"]
        parts: Parts = {"error_hat": (real, {**dims, "level": len(given)})}

        def answer(x: np.ndarray) -> np.ndarray:
            bounds = self.geoq_.bounds(x, given)
            return np.stack([np.asarray(bounds[level]) for level in given], axis=-1)

        return self._asked(x, parts, answer)["error_hat"].assign_coords(level=given)

    def expected_error(self, x: Labelled) -> xr.DataArray:
        """The expected error, for increment models that estimate it; labelled and lazy as in ``assess``."""
        x = self._queries(x)
        # Other models are refused now, not when a lazy answer is computed.
        self.geoq_.expected_error(self.geoq_.probes_[:1])
        parts = {"expected_error": self._parts()["error_hat"]}
        return self._asked(x, parts, self._expected)["expected_error"]

    def _asked(
        self, x: xr.DataArray, parts: Parts, answer: Callable[[np.ndarray], Any]
    ) -> xr.Dataset:
        """What ``answer`` says of blocks of samples, labelled; lazily if the samples are chunked."""
        grid = x.dims[1:]
        sizes = {dim: n for _, dims in parts.values() for dim, n in dims.items()}
        # Variables, because the coordinates of x are not those of the answer.
        queries = x.variable
        if x.chunks is not None:
            queries = queries.chunk(dict.fromkeys(grid, -1))
        answers = xr.apply_ufunc(
            answer,
            queries,
            input_core_dims=[grid],
            output_core_dims=[[*dims] for _, dims in parts.values()],
            exclude_dims=set(grid),
            dask="parallelized",
            output_dtypes=[dtype for dtype, _ in parts.values()],
            dask_gufunc_kwargs={"output_sizes": sizes},
        )
        variables = answers if len(parts) > 1 else (answers,)
        return self._labelled(dict(zip(parts, variables, strict=True)), x)

    def reason(self, x: Labelled, label: Any) -> str:
        """Explain the bound and the flag of the sample with this label in words and numbers."""
        x = self._queries(x)
        query = x.sel({self.sample_dim: label})
        if self.sample_dim in query.dims:
            raise ValueError(
                f"{self.sample_dim}={label!r} is the label of {query.sizes[self.sample_dim]} samples; choose a unique label."
            )
        labels = xr.Variable(self.sample_dim, self.labels_).to_index()
        return self.geoq_.assess(query.values[None]).reason(
            0, name=f"{self.sample_dim} {label}", labels=labels
        )

    def save(self, path: str | Path) -> None:
        """Write GeoQ's file and, in it, the coordinates; ``GeoQ.load`` reads it as well."""
        check_fitted(self, "x_")
        numbers, arrays = files.state(self.geoq_)
        labels = xr.DataArray(self.labels_, name=self.sample_dim)
        own = {
            "sample_dim": self.sample_dim,
            "x": _described(self.x_),
            "y": _described(self.y_),
            "labels": _listed(labels),
        }
        archive.write(path, numbers | {"xarray": own}, arrays)

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 (scikit-learn's signature)
        """The constructor arguments, as scikit-learn's ``clone`` needs them."""
        del deep
        return get_params(self)

    def set_params(self, **params: Any) -> "XarrayGeoQ":
        """Change constructor arguments."""
        set_params(self, params)
        return self

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Representation | None = None,
        increment_model: IncrementModel | None = None,
        error_functional: ErrorFunctional | None = None,
    ) -> "XarrayGeoQ":
        """Read a calibrated estimator; the arguments are those of ``GeoQ.load``."""
        numbers, _ = archive.read(path)
        if "xarray" not in numbers:
            raise ValueError(
                f"{path} holds no coordinates; load it with the class that saved it."
            )
        geoq = GeoQ.load(
            path,
            surrogate=surrogate,
            representation=representation,
            increment_model=increment_model,
            error_functional=error_functional,
        )
        own = numbers["xarray"]
        estimator = cls(geoq, own["sample_dim"])
        estimator.geoq_ = geoq
        estimator.x_, estimator.y_ = _template(own["x"]), _template(own["y"])
        estimator.labels_ = _array(own["labels"])
        return estimator

    def __dask_tokenize__(self) -> str:
        # Dask would otherwise pickle the whole calibration only to give its tasks a name.
        return uuid4().hex

    def _samples_first(self, array: Labelled, name: str) -> xr.DataArray:
        if isinstance(array, xr.Dataset):
            array = array.to_dataarray()
        if not isinstance(array, xr.DataArray):
            raise TypeError(
                f"{name} must be a DataArray or a Dataset, got {type(array).__name__}; for plain arrays use GeoQ."
            )
        if self.sample_dim not in array.dims:
            raise ValueError(
                f"{name} has dimensions {array.dims}, but samples should lie along {self.sample_dim!r}; "
                f"a single sample needs it too, for example by {name}.expand_dims({self.sample_dim!r})."
            )
        return array.transpose(self.sample_dim, ...)

    def _empty(self, array: xr.DataArray) -> xr.DataArray:
        """The array without samples: its dimensions, the coordinates that all samples share, name and attributes."""
        own = [name for name, c in array.coords.items() if self.sample_dim in c.dims]
        # A copy, because a view would keep the samples in memory.
        return array.isel({self.sample_dim: slice(0)}).drop_vars(own).copy()

    def _queries(self, x: Labelled) -> xr.DataArray:
        """Queries in the order of dimensions that the surrogate knows, refused unless they lie on its grid."""
        check_fitted(self, "x_")
        return self._on_grid(x, self.x_, "x")

    def _on_grid(self, array: Labelled, known: xr.DataArray, name: str) -> xr.DataArray:
        array = self._samples_first(array, name)
        if set(array.dims) != set(known.dims):
            raise ValueError(
                f"{name} has dimensions {array.dims}, but those of fit were {known.dims}; pass {name} with the same ones."
            )
        for dim in known.dims[1:]:
            if not array.get_index(dim).equals(known.get_index(dim)):
                raise ValueError(
                    f"{name} has another grid along {dim!r} than the data of fit: {_span(array, dim)} instead of "
                    f"{_span(known, dim)}; sort, select or interpolate it to that grid first."
                )
        return array.transpose(*known.dims)

    def _parts(self) -> Parts:
        """Type and dimensions besides the samples of each variable of an answer."""
        real = np.dtype(str(self.geoq_.error_.dtype).removeprefix("torch."))
        output = dict(zip(self.y_.dims[1:], self.y_.shape[1:], strict=True))
        shape = self.geoq_.error_.shape[1:]
        # An error functional may make another shape of it: one number for the field, say.
        error: dict[Hashable, int] = (
            output
            if tuple(shape) == self.y_.shape[1:]
            else {f"error_dim_{place}": n for place, n in enumerate(shape)}
        )
        anchors: dict[Hashable, int] = {"anchor": self.geoq_.geometry_.n_anchors}
        return {
            "prediction": (real, output),
            "error_hat": (real, error),
            "anchor_error": (real, error),
            "increment": (real, error),
            "safe": (np.dtype(bool), {}),
            "support_score": (real, {}),
            "support_distance": (real, {}),
            "anchors": (self.labels_.dtype, anchors),
            "anchor_distance": (real, anchors),
            "observed_error": (real, anchors),
        }

    def _expected(self, x: np.ndarray) -> np.ndarray:
        expected = self.geoq_.expected_error(x)
        assert isinstance(expected, np.ndarray)
        return expected

    def _answer(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """The variables of an answer to a block of samples, in the order of ``_parts``."""
        assessment = self.geoq_.assess(x)
        answers: dict[str, Any] = vars(assessment) | {
            "support_distance": assessment.features.support_distance,
            "anchors": self.labels_[assessment.anchors],
        }
        return tuple(answers[name] for name in self._parts())

    def _labelled(
        self, variables: dict[str, xr.Variable], x: xr.DataArray
    ) -> xr.Dataset:
        """The answer with the coordinates of y, the samples' own ones from x, and attributes."""
        units = {key: of for key, of in self.y_.attrs.items() if key == "units"}
        own = {"prediction": self.y_.attrs}
        if self.geoq_.error_functional in (absolute_error, norm_error):
            own |= dict.fromkeys(_ERRORS, units)
        for name, variable in variables.items():
            variable.attrs = {"long_name": _LONG_NAMES[name]} | own.get(name, {})
        others = [n for n, c in x.coords.items() if c.dims != (self.sample_dim,)]
        one_cell = x.isel(dict.fromkeys(x.dims[1:], 0))
        region, calibration = self.geoq_.safe_region_, self.geoq_.calibration_
        return (
            xr.Dataset(variables)
            .assign_coords(self.y_.coords)
            .assign_coords(one_cell.drop_vars(others).coords)
            .assign_attrs(
                threshold=region.threshold,
                safe=region.meaning[0],
                not_safe=region.meaning[1],
                typical_distance=calibration.typical_distance,
                typical_support_distance=calibration.typical_support_distance,
            )
        )


def _span(array: xr.DataArray, dim: Hashable) -> str:
    labels = array.get_index(dim)
    ends = f" from {labels[0]} to {labels[-1]}" if len(labels) else ""
    return f"{len(labels)} {'labels' if dim in array.coords else 'places'}{ends}"


def _described(template: xr.DataArray) -> dict[str, Any]:
    """A template in the form of JSON."""
    described = template.to_dict(data=False)
    for name, coordinate in described["coords"].items():
        coordinate |= _listed(template[name])
    return described


def _listed(coordinate: xr.DataArray) -> dict[str, Any]:
    values = coordinate.values
    strings = all(isinstance(value, str) for value in values.flat)
    if values.dtype.kind not in _STORABLE_KINDS and not strings:
        raise ValueError(
            f"coordinate {coordinate.name!r} holds {values.dtype}, but files hold numbers, strings and times; "
            "drop or convert it before fit."
        )
    whole = values.astype(np.int64) if values.dtype.kind in "mM" else values
    return {"dtype": str(values.dtype), "data": whole.tolist()}


def _array(described: dict[str, Any]) -> np.ndarray:
    return np.array(described["data"], dtype=described["dtype"])


def _template(described: dict[str, Any]) -> xr.DataArray:
    coordinates = {
        name: (tuple(c["dims"]), _array(c), c["attrs"])
        for name, c in described["coords"].items()
    }
    empty = np.empty(described["shape"], dtype=described["dtype"])
    return xr.DataArray(
        empty,
        coordinates,
        tuple(described["dims"]),
        described["name"],
        described["attrs"],
    )
