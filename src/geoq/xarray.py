"""The xarray interface of GeoQ: labelled bounds for labelled fields, which can be larger than memory if they are chunked."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from geoq import archive, files, parameters
from geoq.checks import check_fitted
from geoq.conformal import POINTWISE, Guarantee
from geoq.estimator import GeoQ
from geoq.increments.protocol import IncrementModel
from geoq.regions.field_region import FittedFieldRegion
from geoq.representation import Representation
from geoq.rollout import RolloutGeoQ
from geoq.scratch import larger_than_memory, stored
from geoq.surrogate import ErrorFunctional, Surrogate, absolute_error, norm_error
from geoq.training.checkpoint import Checkpoint
from geoq.training.progress import BAR, ShowProgress

try:
    import xarray as xr
except ImportError as exc:
    raise ImportError(
        "geoq.xarray needs xarray; install it with pip install 'geoq[xarray]'."
    ) from exc

from geoq.xarray_labels import (
    InputNames,
    Labelled,
    Parts,
    applied,
    array_of,
    check_no_gaps,
    check_same_grid,
    check_storable,
    described,
    labels_of,
    listed,
    masked_outputs,
    span,
    stacked,
    template,
    warn_of_dates,
    with_nan,
)
from geoq.xarray_rollouts import XarrayRolloutGeoQ

__all__ = ["XarrayGeoQ", "XarrayRolloutGeoQ"]

# The variables of an answer as xarray writes them on the axes of a plot.
_LONG_NAMES = {
    "error_hat": "error bound",
    "anchor_error": "observed error of the anchors",
    "increment": "increment of the error bound",
    "safe": "calibration supports the bound",
    "anchors": "samples that serve as anchors",
    "anchor_distance": "distance to the anchors",
    "observed_error": "mean observed error of the anchor",
}
_ERRORS = ("error_hat", "anchor_error", "increment", "observed_error", "expected_error")


@dataclass(eq=False)
class XarrayGeoQ:
    """GeoQ for labelled arrays: it checks the coordinates of the inputs and puts coordinates on the answers.

    The callables of the wrapped GeoQ receive plain NumPy arrays: samples first, then the other dimensions in the order in
    which ``fit`` received them. The variables of a Dataset are stacked along a dimension ``variable`` after the samples, with
    their units as a coordinate; the variables of queries are selected by their names.

    Queries that are chunked along the samples give lazy answers, which Dask computes chunk by chunk. Chunks along other
    dimensions are joined.

    Attributes:
        geoq: the settings of the calibration; ``fit`` does not change it.
        sample_dim: the name of the dimension of the samples, which can be any dimension of the data.
        geoq_: the calibrated copy of ``geoq``.
        labels_: the labels of the calibration samples.
        x_, y_: the data of ``fit`` without samples: their dimensions, coordinates and attributes.

    Example:
        >>> import numpy as np, xarray as xr
        >>> from geoq import GeoQ, RandomFolds
        >>> from geoq.xarray import XarrayGeoQ
        >>> grid = {"time": np.arange(60), "lon": [0.0, 90.0, 180.0, 270.0]}
        >>> x = xr.DataArray(np.random.default_rng(0).normal(size=(60, 4)), grid)
        >>> def train(x, y):
        ...     weights = np.linalg.lstsq(x, y)[0]
        ...     return lambda x: x @ weights
        >>> geoq = XarrayGeoQ(GeoQ(None, train, folds=RandomFolds(5)), "time")
        >>> geoq.fit(x, x**2).bound(x.isel(time=[0, 1])).sizes
        Frozen({'time': 2, 'lon': 4})
    """

    geoq: GeoQ
    sample_dim: str

    def __post_init__(self) -> None:
        if isinstance(self.geoq, RolloutGeoQ):
            raise TypeError(
                "geoq is a RolloutGeoQ, but XarrayGeoQ bounds single predictions; pass it to geoq.xarray.XarrayRolloutGeoQ."
            )

    def fit(
        self,
        x: Labelled,
        y: Labelled,
        *,
        groups: Sequence[Any] | xr.DataArray | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = BAR,
    ) -> "XarrayGeoQ":
        """Calibrate on pairs of inputs and reference outputs; chunked pairs can be larger than memory.

        Args:
            x: inputs, which can have other dimensions than y.
            y: reference outputs, for the same samples in the same order. Cells that are nan in all samples, such as land, or
                in some samples do not count, see the masked arrays of ``GeoQ.fit``; the answers are nan there.
            groups: a label per sample, for fold schemes that hold out whole groups.
            checkpoint: a folder, or a ``Checkpoint``, that stores each finished fold, see ``GeoQ.fit``.
            progress: how the progress is shown, see ``GeoQ.fit``.

        Raises:
            ValueError: the samples of x and y differ, or the data or a setting is unusable. These checks come before any
                training.
        """
        x, y = self._samples_first(x, "x"), self._samples_first(y, "y")
        with larger_than_memory(*(p.data for p in (x, y) if p.chunks is not None)):
            x, y = self._pairs(x, y)
            empty = {"x": self._empty(x), "y": self._empty(y)}
            check_storable(empty, x[self.sample_dim])
            if groups is None:
                warn_of_dates(y, self.geoq.folds)
            self.geoq_ = copy.copy(self.geoq).fit(
                x.values,
                masked_outputs(y),
                groups=None if groups is None else list(np.asarray(groups)),
                checkpoint=checkpoint,
                progress=progress,
            )
        self.x_, self.y_ = empty["x"], empty["y"]
        self.labels_ = x[self.sample_dim].values
        return self

    def conformalize(
        self, x: Labelled, y: Labelled, *, guarantee: Guarantee = POINTWISE
    ) -> "XarrayGeoQ":
        """Scale the bound so that it holds on pairs that ``fit`` has not seen, see ``GeoQ.conformalize``.

        Their coordinates must be the coordinates of the data of ``fit``.
        """
        x, y = self._pairs(self._queries(x), self._on_grid(y, self.y_, "y"))
        self.geoq_.conformalize(x.values, masked_outputs(y), guarantee=guarantee)
        return self

    def _pairs(
        self, x: xr.DataArray, y: xr.DataArray
    ) -> tuple[xr.DataArray, xr.DataArray]:
        """Inputs and outputs in memory or in scratch files; refused unless their samples match."""
        x, y = (
            part if part.chunks is None else part.copy(data=stored(part.data))
            for part in (x, y)
        )
        dim = self.sample_dim
        if not x.get_index(dim).equals(y.get_index(dim)):
            raise ValueError(
                f"x and y differ along {dim!r}: {span(x, dim)} and {span(y, dim)}; "
                f"select the same samples in the same order, for example with y.sel({dim}=x.{dim})."
            )
        check_no_gaps(x, "x")
        return x, y

    def assess(self, x: Labelled) -> xr.Dataset:
        """Return the prediction, the error bound, the safe flag and their parts at each sample.

        Args:
            x: queries with the coordinates of the inputs of ``fit``; the dimensions can be in any order.

        Returns:
            The parts of ``Assessment`` without the displacement. Fields have the dimensions and coordinates of y, and
            ``anchors`` contains the labels of calibration samples.

        Raises:
            ValueError: x has other dimensions or coordinates than the inputs of ``fit``.
        """
        return self._apply(self._assess, self._queries(x), self._parts())

    def bound(self, x: Labelled) -> xr.DataArray:
        """Return the error bound, ``assess(x).error_hat``."""
        return self.assess(x)["error_hat"]

    def bounds(
        self, x: Labelled, levels: Sequence[float], *, dim: str = "level"
    ) -> xr.DataArray:
        """Return error bounds at several quantile levels along a new dimension, see ``GeoQ.bounds``.

        Args:
            x: queries, as in ``assess``.
            levels: quantile levels, for example ``(0.5, 0.9)``.
            dim: the name of the new dimension.

        Raises:
            ValueError: a level is not between 0 and 1, or y or the samples already have a coordinate named ``dim``.
        """
        x = self._queries(x)
        # Computed here, so that unusable levels are refused before a lazy answer is computed.
        given = [*self.geoq_.bounds(self.geoq_.probes_[:1], levels)]
        dtype, dims = self._parts()["error_hat"]
        parts: Parts = {"error_hat": (dtype, {**dims, dim: len(given)})}
        if dim in {*dims, *self.y_.coords, *self._sample_coords(x)}:
            raise ValueError(
                f"dim={dim!r}, but the answer already has a coordinate of this name; choose another name, for example "
                "dim='quantile_level'."
            )
        answer = self._apply(partial(self._bounds, given), x, parts)
        return answer["error_hat"].assign_coords({dim: given})

    def expected_error(self, x: Labelled) -> xr.DataArray:
        """Return the expected error, see ``GeoQ.expected_error``; labelled and lazy as in ``assess``."""
        x = self._queries(x)
        # Computed here, so that other increment models are refused before a lazy answer is computed.
        self.geoq_.expected_error(self.geoq_.probes_[:1])
        parts = {"expected_error": self._parts()["error_hat"]}

        def expected(block: np.ndarray) -> np.ndarray:
            return with_nan(self.geoq_.expected_error(block))

        return self._apply(expected, x, parts)["expected_error"]

    def _apply(
        self, function: Callable[[Any], Any], x: xr.DataArray, parts: Parts
    ) -> xr.Dataset:
        """Apply a function to blocks of samples and label its answers."""
        return self._labelled(applied(function, [x], [x.dims[1:]], parts), x)

    def reason(self, x: Labelled, label: Any) -> str:
        """Explain the bound and the flag of one sample in words and numbers.

        Args:
            x: queries, as in ``assess``.
            label: the label of the sample along ``sample_dim``.
        """
        query = self._queries(x).sel({self.sample_dim: label})
        if self.sample_dim in query.dims:
            n = query.sizes[self.sample_dim]
            raise ValueError(
                f"{self.sample_dim}={label!r} selects {n} samples; choose a label that selects one."
            )
        labels = xr.Variable(self.sample_dim, self.labels_).to_index()
        return self.geoq_.assess(query.values[None]).reason(
            0,
            name=f"{self.sample_dim} {label}",
            labels=labels,
            names=self._input_names(),
            outputs=InputNames(self.y_),
        )

    def _input_names(self) -> InputNames | None:
        """A name for each input, or for each channel if the safe region is a region of fields."""
        region, template = self.geoq_.safe_region_, self.x_
        if isinstance(region, FittedFieldRegion):
            grid = template.dims[template.ndim - region.layout.n_spatial :]
            template = template.isel(dict.fromkeys(grid, 0))
        return InputNames(template) if template.ndim > 1 else None

    def save(self, path: str | Path) -> None:
        """Write the calibration and the coordinates to one file, see ``GeoQ.save``; ``GeoQ.load`` reads it as well."""
        check_fitted(self, "geoq_")
        own = {
            "sample_dim": self.sample_dim,
            "x": described(self.x_),
            "y": described(self.y_),
            "labels": listed(xr.DataArray(self.labels_, name=self.sample_dim)),
        }
        numbers, arrays = files.state(self.geoq_)
        archive.write(path, numbers | {"xarray": own}, arrays)

    get_params = parameters.get_params
    set_params = parameters.set_params

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
        """Read a calibrated estimator; the arguments are the arguments of ``GeoQ.load``."""
        content = archive.read(path)
        if "xarray" not in content[0]:
            raise ValueError(
                f"{path} was not saved by an XarrayGeoQ; load it with the class that saved it."
            )
        geoq = files.load(
            GeoQ,
            path,
            content,
            surrogate=surrogate,
            representation=representation,
            increment_model=increment_model,
            error_functional=error_functional,
        )
        with archive.restoring(path):
            own = content[0]["xarray"]
            estimator = cls(geoq, own["sample_dim"])
            estimator.geoq_ = copy.copy(geoq)
            estimator.x_, estimator.y_ = template(own["x"]), template(own["y"])
            estimator.labels_ = array_of(own["labels"])
            prediction = geoq.calibration_.features[:1].prediction
            for name, stored, expected in (
                ("x", estimator.x_.shape[1:], geoq.coordinates_.mean.shape),
                ("y", estimator.y_.shape[1:], prediction.shape[1:]),
                ("labels", estimator.labels_.shape, geoq.error_.shape[:1]),
            ):
                what = f"the shape {stored} of {name}"
                archive.check_value(what, stored == tuple(expected), "not possible")
        return estimator

    def __dask_tokenize__(self) -> str:
        # Otherwise Dask would pickle the whole calibration to name its tasks.
        return uuid4().hex

    def _samples_first(
        self, array: Labelled, name: str, fitted: xr.DataArray | None = None
    ) -> xr.DataArray:
        array = stacked(array, name, fitted)
        if self.sample_dim not in array.dims:
            raise ValueError(
                f"{name} has dimensions {array.dims}, but the dimension of the samples is {self.sample_dim!r}; "
                f"add it to a single sample with {name}.expand_dims({self.sample_dim!r})."
            )
        return array.transpose(self.sample_dim, ...)

    def _empty(self, array: xr.DataArray) -> xr.DataArray:
        """The array without samples: its dimensions, the coordinates that all samples share, name and attributes."""
        own = [name for name, c in array.coords.items() if self.sample_dim in c.dims]
        # A copy, because a view would keep the samples in memory.
        return array.isel({self.sample_dim: slice(0)}).drop_vars(own).copy()

    def _queries(self, x: Labelled) -> xr.DataArray:
        """Queries with their dimensions in the order of ``fit``."""
        check_fitted(self, "geoq_")
        return self._on_grid(x, self.x_, "x")

    def _on_grid(
        self, array: Labelled, fitted: xr.DataArray, name: str
    ) -> xr.DataArray:
        """The array with its dimensions in the order of ``fit``; refused unless its coordinates are the same."""
        array = self._samples_first(array, name, fitted)
        if set(array.dims) != set(fitted.dims):
            raise ValueError(
                f"{name} has dimensions {array.dims}, but {name} had dimensions {fitted.dims} in fit; "
                f"pass {name} with these dimensions."
            )
        check_same_grid(array, fitted, fitted.dims[1:], name)
        return array.transpose(*fitted.dims)

    def _parts(self) -> Parts:
        """The variables of an assessment."""
        real = np.dtype(str(self.geoq_.error_.dtype).removeprefix("torch."))
        output = dict(zip(self.y_.dims[1:], self.y_.shape[1:], strict=True))
        shape = self.geoq_.error_.shape[1:]
        # Some error functionals return another shape than y, for example one number per field.
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

    def _assess(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """The variables of ``_parts`` for a block of samples."""
        assessment = self.geoq_.assess(x)
        answers: dict[str, Any] = vars(assessment) | {
            "support_distance": assessment.features.support_distance,
            "anchors": labels_of(self.labels_, assessment.anchors),
        }
        return tuple(with_nan(answers[name]) for name in self._parts())

    def _bounds(self, levels: list[float], x: np.ndarray) -> np.ndarray:
        """The bounds of a block of samples, with the levels along the last axis."""
        bounds = self.geoq_.bounds(x, levels)
        return np.stack([with_nan(bounds[level]) for level in levels], axis=-1)

    def _sample_coords(self, x: xr.DataArray) -> xr.Coordinates:
        """The coordinates of the samples, such as their dates."""
        others = [n for n, c in x.coords.items() if c.dims != (self.sample_dim,)]
        return x.isel(dict.fromkeys(x.dims[1:], 0)).drop_vars(others).coords

    def _labelled(
        self, variables: dict[str, xr.Variable], x: xr.DataArray
    ) -> xr.Dataset:
        """The answer with the coordinates of y, the coordinates of the samples, and attributes."""
        units = {key: of for key, of in self.y_.attrs.items() if key == "units"}
        own = {"prediction": self.y_.attrs}
        if self.geoq_.error_functional in (absolute_error, norm_error):
            own |= dict.fromkeys(_ERRORS, units)
        for name, variable in variables.items():
            long_name = _LONG_NAMES.get(name, name.replace("_", " "))
            variable.attrs = {"long_name": long_name} | own.get(name, {})
        region, calibration = self.geoq_.safe_region_, self.geoq_.calibration_
        return (
            xr.Dataset(variables)
            .assign_coords(self.y_.coords)
            .assign_coords(self._sample_coords(x))
            .assign_attrs(
                threshold=region.threshold,
                safe=region.meaning[0],
                not_safe=region.meaning[1],
                typical_distance=calibration.typical_distance,
                typical_support_distance=calibration.typical_support_distance,
                quantile=self.geoq_.increment_model_.quantile,
            )
        )
