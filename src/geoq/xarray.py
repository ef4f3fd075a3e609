"""The xarray interface of GeoQ and RolloutGeoQ: labelled answers to labelled queries, lazy where the queries are chunked."""

import copy
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from geoq import state
from geoq.arrays import same, stored
from geoq.checks import check_fitted, check_integer, shortened
from geoq.core.conformal import WholeField, levels_of
from geoq.core.estimator import GeoQ, get_params, set_params
from geoq.core.folds import warn_of_alike
from geoq.data.masks import masked_where_nan
from geoq.rollout.estimator import RolloutGeoQ
from geoq.rollout.horizon import EveryValue
from geoq.surrogate import absolute_error, norm_error
from geoq.training.sources import TrainingTime

try:
    import xarray as xr
except ImportError as exc:
    raise ImportError('geoq.xarray needs xarray; pip install "geoq[xarray]".') from exc

Data: TypeAlias = xr.DataArray | xr.Dataset
STEP = "step"
# The parts of an answer in the unit of y, and those that are left out.
ERRORS = ("error_hat", "anchor_error", "increment")
OTHERS = ("displacement", "lost", "asked", "forcing", "tolerance")
# What stands for the label of a missing anchor, by the kind of NumPy type.
NO_LABEL = {"f": np.nan, "M": "NaT", "m": "NaT", "U": "", "i": -1, "O": None}


@dataclass(eq=False, repr=False)
class Labelled:
    """GeoQ or RolloutGeoQ for labelled arrays: it checks the labels of the queries and puts labels on the answers.

    The callables of the estimator receive NumPy arrays: samples first, then the other dimensions as ``fit`` received them.
    The variables of a Dataset are stacked along a dimension ``variable`` after the samples, with their units, and later selected
    by name. Queries can have any further dimensions; if they are chunked along these, the answer is lazy.

    Attributes:
        estimator: a ``GeoQ`` or a ``RolloutGeoQ`` with its settings; ``fit`` calibrates a copy, ``estimator_``.
        dim, trajectory_dim: the dimension of the samples (of time for a ``RolloutGeoQ``), and of trajectories in one array.
        like_: the labels, units and names of what ``fit`` received.

    Example:
        >>> import xarray as xr
        >>> from geoq import GeoQ, RandomFolds
        >>> from geoq.xarray import Labelled
        >>> grid = {"time": np.arange(60), "station": ["Jena", "Oslo", "Rome"]}
        >>> x = xr.DataArray(np.random.default_rng(0).normal(size=(60, 3)), grid)
        >>> labelled = Labelled(GeoQ(np.abs, None, folds=RandomFolds(5)), "time").fit(x, x**2)
        >>> labelled.bound(x.isel(time=[0, 1])).sizes
        Frozen({'time': 2, 'station': 3})
    """

    estimator: Any
    dim: str = "time"
    trajectory_dim: str | None = None

    def fit(self, x: Any, y: Data | None = None, *, forcing: Any = None, **how: Any) -> "Labelled":
        """Calibrate on pairs of inputs and reference outputs, or on true trajectories.

        Args:
            x: the inputs, which can be larger than memory if they are chunked. For a ``RolloutGeoQ`` one trajectory, a list of
                them, or an array with the dimension ``trajectory_dim``; their times must be in order and without gaps.
            y: the reference outputs of the same samples in the same order; none for a ``RolloutGeoQ``. Cells that are nan, such
                as land or clouds, do not count, and the answers are nan there.
            forcing: the inputs of each step of a ``RolloutGeoQ``, one part per trajectory or one for all. The forcing at a time
                drives the step from this time to the next one. Without the dimension of time it is constant.
            how: ``groups``, ``checkpoint`` and ``progress`` of the estimator's ``fit``.
        """
        like, arrays = self._prepared(x, y, forcing, how)
        self.estimator_ = copy.copy(self.estimator).fit(*arrays, **how)
        if self._rolls:
            index, shape = self.estimator.output, self.estimator_.fitted_.reference.layout.output
            own, rank = like["x"], len(shape)
            if index is not None and own.ndim:
                own = own[[index] if isinstance(index, int) else index]
            plain = xr.DataArray(np.zeros(shape), dims=[f"output_dim_{i}" for i in range(rank)])
            like["y"] = own if own.shape in (shape, ()) else plain
        self.like_ = like
        return self

    def estimate(self, x: Any, y: Any = None, *, forcing: Any = None, **how: Any) -> TrainingTime:
        """Train one fold, and estimate the time of ``fit`` with the same arguments, see ``GeoQ.estimate``."""
        return self.estimator.estimate(*self._prepared(x, y, forcing, how)[1], **how)

    def describe(self) -> str:
        """The calibration in a few sentences, see ``describe`` of the estimator."""
        check_fitted(self, "estimator_")
        return str(self.estimator_.describe())

    def __repr__(self) -> str:
        return f"Labelled({getattr(self, 'estimator_', self.estimator)!r}, dim={self.dim!r})"

    def _prepared(self, x: Any, y: Any, forcing: Any, how: Any) -> tuple[dict[str, Any], Any]:
        """The labels, and the arrays for ``fit`` of the estimator; a forcing becomes one of its other arguments."""
        pairs = isinstance(self.estimator, GeoQ)
        if not (pairs or self._rolls) or pairs == (y is None) or (pairs and forcing is not None):
            kinds = "a GeoQ with x and y, or a RolloutGeoQ with x and forcing"
            raise TypeError(f"Labelled({shortened(self.estimator)}) needs {kinds}; pass these.")
        if pairs:
            return self._pairs(x, y, how)
        like, states = self._gathered(self._listed(x), "x")
        found = {"x": like}
        steps = {_time_step(part.get_index(self.dim)) for part in states}
        if self.dim in states[0].coords and len(steps) == 1 and None not in steps:
            found["times"] = xr.DataArray(0.0, {"step": steps.pop()})
        if forcing is not None:
            parts = self._listed(forcing)
            both = zip(parts * len(states) if len(parts) == 1 else parts, states, strict=True)
            along = [_at_times(part, of[self.dim], self.dim) for part, of in both]
            found["forcing"], given = self._gathered(along, "forcing")
            how |= {"forcing": [_vectors(part) for part in given]}
        return found, [[_vectors(part) for part in states]]

    def _pairs(self, x: Any, y: Any, how: Any) -> tuple[dict[str, Any], Any]:
        (like_x, (x,)), (like_y, (y,)) = self._gathered([x], "x"), self._gathered([y], "y")
        times = x.get_index(self.dim)
        _check_labels(y, x, [self.dim], "y")
        if "TemporalFolds" in repr(self.estimator.folds) and not times.is_monotonic_increasing:
            raise ValueError(f"TemporalFolds needs time order; sort x and y by {self.dim!r}.")
        if how.get("groups") is None and (times.dtype.kind == "M" or hasattr(times, "calendar")):
            warn_of_alike(y.values[np.argsort(times)], self.estimator.folds)
        like = {"x": like_x, "y": like_y, "samples": x[self.dim]}
        return like, [x.values, masked_where_nan(y.values)]

    def _listed(self, data: Any) -> list[Data]:
        """The parts of a list, or of an array that contains several along the dimension of the trajectories."""
        parts, dim = [data] if isinstance(data, Data) else [*data], self.trajectory_dim
        pairs = ((part, place) for part in parts for place in range(part.sizes.get(dim, 1)))
        return [part.isel({dim: place}) if dim in part.dims else part for part, place in pairs]

    def _gathered(self, parts: Sequence[Any], name: str) -> tuple[xr.DataArray, list[xr.DataArray]]:
        """The labels of the first part, and all parts in memory or in scratch files, samples first."""
        first = _stacked(parts[0], name)
        if self.dim not in first.dims:
            raise ValueError(f"{name} has no dimension {self.dim!r}, but {first.dims}; rename one.")
        # A scalar coordinate of one trajectory, such as its number, is no property of queries.
        own = [
            n for n, c in first.coords.items() if self.dim in c.dims or self._rolls > bool(c.dims)
        ]
        like = xr.zeros_like(first.drop_vars(own).isel({self.dim: 0}))
        arrays = [on_grid(part, like, name).transpose(self.dim, *like.dims) for part in parts]
        return like, [a if a.chunks is None else a.copy(data=stored(a.data)) for a in arrays]

    def assess(
        self, x: Data, n_steps: int | None = None, tolerance: Any = None, *, forcing: Any = None
    ) -> xr.Dataset:
        """The parts of ``Assessment`` or ``RolloutAssessment``, labelled as y and the queries; anchors are labels of samples.

        Args:
            x: queries on the grid of ``fit``, or initial states of rollouts.
            n_steps: the number of steps of rollouts, which get the coordinates ``step``, ``lead_time`` and ``valid_time``.
            tolerance: as in ``RolloutGeoQ.assess``, where arrays are a DataArray, or a dictionary or a Dataset of the variables.
            forcing: the inputs of each step of rollouts: a series that contains the times of all steps from the times of x on,
                or an array with a dimension ``step``. A forcing with neither of them is constant along a rollout.
        """
        arrays = self._queries(x, n_steps, forcing)
        return self._answer(arrays, n_steps, self._tolerance(tolerance), {})

    def bound(self, x: Data, n_steps: int | None = None, *, forcing: Any = None) -> xr.DataArray:
        """The error bound, ``assess(x).error_hat``."""
        return self.assess(x, n_steps, forcing=forcing)["error_hat"]

    def bounds(self, x: Data, levels: Any, *, dim: str = "level") -> xr.DataArray:
        """The error bounds of a ``GeoQ`` at several quantile levels, along a new dimension ``dim``."""
        arrays, levels = self._queries(x), levels_of(levels)
        if dim in {*arrays[0].coords, *self.like_["y"].coords}:
            raise ValueError(f"dim={dim!r} is a coordinate of the answer; choose another name.")
        return self._answer(arrays, None, None, {dim: levels})["error_hat"].assign_coords(
            {dim: levels}
        )

    def conformalize(self, x: Data, y: Data, *, guarantee: WholeField | None = None) -> "Labelled":
        """Scale the bound of a ``GeoQ`` so that it holds on pairs that ``fit`` has not seen."""
        check_fitted(self, "estimator_")
        pairs = ((part, self.like_[name], name) for name, part in (("x", x), ("y", y)))
        x, y = (on_grid(*pair).transpose(self.dim, *pair[1].dims) for pair in pairs)
        _check_labels(y, x, [self.dim], "y")
        self.estimator_.conformalize(x.values, masked_where_nan(y.values), guarantee=guarantee)
        return self

    def reason(
        self, x: Data, n_steps: int | None = None, tolerance: Any = None, *, forcing: Any = None
    ) -> str:
        """Explain the answer to one query, such as ``x.sel(time="2020-03-05")``, in words and numbers."""
        arrays, like, y = self._queries(x, n_steps, forcing), self.like_["x"], self.like_["y"]
        pairs = zip(arrays, self._core, strict=False)
        _, rows = self._rows([array.transpose(..., *dims).values for array, dims in pairs])
        if len(rows[0]) != 1:
            raise ValueError(f"x has {len(rows[0])} queries; select one, for example with x.sel.")
        answer = self._assessed(rows, n_steps, self._tolerance(tolerance))
        times = np.ravel(arrays[0].coords.get(self.dim, ()))
        label = f"{self.dim} {xr.Variable('', times).to_index()[0]}" if len(times) else None
        if self._rolls:
            return str(answer.reason(0)).replace("rollout 0", f"rollout from {label or 'x'}", 1)
        layout = answer.fitted.layout
        cells = like.dims[-len(layout.cells) :] if layout.holds(like.shape) else ()
        names, anchors = names_of(like.isel(dict.fromkeys(cells, 0))), self.like_["samples"]
        outputs = names_of(y) if answer.error_hat.shape[1:] == y.shape else None
        known = {"labels": anchors.get_index(self.dim), "names": names, "outputs": outputs}
        return str(answer.reason(0, name=label, **known))

    def _queries(self, x: Any, n_steps: Any = None, forcing: Any = None) -> list[xr.DataArray]:
        """The queries or initial states and, if there is one, the forcing of each step."""
        check_fitted(self, "estimator_")
        like, given, times = self.like_["x"], self.like_.get("forcing"), self.like_.get("times")
        scalars = [n for n, c in like.coords.items() if not c.dims]
        states = on_grid(x, like, "x").drop_vars(scalars, errors="ignore")
        if self._rolls or n_steps is not None:
            check_integer(n_steps, "n_steps", 1)
        if (given is None) != (forcing is None):
            received = "no forcing" if given is None else f"a forcing with {given.dims}"
            raise ValueError(f"fit received {received}; pass forcing to both or to neither.")
        if given is None:
            return [states]
        if STEP not in forcing.dims:
            starts, step = xr.DataArray(np.arange(n_steps), dims=STEP), None
            if self.dim in forcing.dims:
                if times is None or self.dim not in states.coords:
                    raise ValueError(f"the steps have no known times; pass forcing along {STEP!r}.")
                step = times["step"].values
                starts = states[self.dim] + starts * step
            forcing = _at_times(forcing, starts, self.dim, step)
        forcing, core = on_grid(forcing, given, "forcing"), {*itertools.chain(*self._core)}
        return [*xr.broadcast(*xr.align(states, forcing, join="exact", exclude=core), exclude=core)]

    def _tolerance(self, tolerance: Any) -> Any:
        """A labelled tolerance as an array in the shape of the output; anything else as it is."""
        if isinstance(tolerance, EveryValue):
            return replace(tolerance, tolerance=self._tolerance(tolerance.tolerance))
        if isinstance(tolerance, Mapping):
            tolerance = xr.Dataset({**tolerance})
        if not isinstance(tolerance, Data):
            return tolerance
        y, array = self.like_["y"], _stacked(tolerance, "tolerance", self.like_["y"])
        _check_labels(array, y, {*array.dims} & {*y.dims}, "tolerance")
        return array.broadcast_like(y).transpose(*y.dims).values  # raises for other dimensions

    @property
    def _rolls(self) -> bool:
        return isinstance(self.estimator, RolloutGeoQ)

    @property
    def _core(self) -> list[tuple[Hashable, ...]]:
        """The dimensions of one query, and of the forcing of one rollout."""
        given = self.like_.get("forcing")
        return [self.like_["x"].dims, *([] if given is None else [(STEP, *given.dims)])]

    def _rows(self, blocks: Sequence[np.ndarray]) -> tuple[tuple[int, ...], list[np.ndarray]]:
        """The shape of the queries, and one row per query."""
        n = blocks[0].ndim - len(self._core[0])
        return blocks[0].shape[:n], [block.reshape(-1, *block.shape[n:]) for block in blocks]

    def _assessed(self, rows: Any, n_steps: int | None, tolerance: Any) -> Any:
        """The answer of the estimator to rows of queries, or of initial states and their forcing."""
        if not self._rolls:
            return self.estimator_.assess(rows[0])
        given = [part[..., None] if part.ndim == 2 else part for part in rows[1:]] or [None]
        return self.estimator_.assess(_vectors(rows[0]), n_steps, tolerance, forcing=given[0])

    def _found(self, rows: Any, n_steps: Any, tolerance: Any, last: Any) -> dict[str, Any]:
        """The parts of the answer to rows by name, or the bounds at the last levels."""
        for levels in last.values():
            bounds = self.estimator_.bounds(rows[0], levels).values()
            return {"error_hat": np.ma.stack([*bounds], axis=-1)}
        answer = vars(self._assessed(rows, n_steps, tolerance))
        found = {n: v for n, v in answer.items() if isinstance(v, np.ndarray) and n not in OTHERS}
        if "anchors" in found:
            labels = self.like_["samples"][self.dim].values[found["anchors"]]
            labels[found["anchors"] < 0] = NO_LABEL.get(labels.dtype.kind, 0)
            found["anchors"] = labels
        return found

    def _block(self, sizes: Any, settings: Any, *blocks: np.ndarray) -> Any:
        """The parts of the answer to a block of queries."""
        loop, rows = self._rows(blocks)
        found, shapes = self._found(rows, *settings), {n: of.values() for n, of in sizes.items()}
        parts = [np.ma.filled(found[n], np.nan).reshape((*loop, *of)) for n, of in shapes.items()]
        return tuple(parts) if len(parts) > 1 else parts[0]

    def _answer(self, arrays: Any, n_steps: Any, tolerance: Any, last: Any) -> xr.Dataset:
        """The labelled answer; lazy if the queries are chunked."""
        fitted, core = self.estimator_.fitted_, self._core
        one = fitted.reference.layout.split(fitted.probes[:1]) if self._rolls else fitted.probes[:1]
        one = [one[0], one[1][:, None]] if isinstance(one, tuple) else [one]
        # The answer to one stored query also raises for unusable arguments before a lazy answer is computed.
        found = self._found(one, n_steps and 1, tolerance, last)
        sizes = {n: self._sizes(n, part.shape[1:], n_steps, last) for n, part in found.items()}
        pairs = zip(arrays, core, strict=True)
        answers = xr.apply_ufunc(
            partial(self._block, sizes, (n_steps, tolerance, last)),
            *(a.chunk(dict.fromkeys(dims, -1)) if a.chunks else a for a, dims in pairs),
            input_core_dims=core,
            output_core_dims=[[*of] for of in sizes.values()],
            exclude_dims={*itertools.chain(*core)},
            dask="parallelized",
            output_dtypes=[part.dtype for part in found.values()],
            dask_gufunc_kwargs={
                "output_sizes": {d: n for of in sizes.values() for d, n in of.items()}
            },
        )
        y, times = self.like_["y"], self.like_.get("times")
        in_units = self._rolls or self.estimator.error_functional in (absolute_error, norm_error)
        units = {key: of for key, of in y.attrs.items() if key == "units" and in_units}
        parts = answers if len(sizes) > 1 else (answers,)
        answer = xr.Dataset(dict(zip(sizes, parts, strict=True))).assign_coords(y.coords)
        for name, part in answer.items():
            part.attrs = y.attrs if name == "prediction" else units if name in ERRORS else {}
        if STEP in answer.dims:
            answer = answer.assign_coords({STEP: np.arange(1, answer.sizes[STEP] + 1)})
        if STEP in answer.dims and times is not None:
            answer = answer.assign_coords(lead_time=answer[STEP] * times["step"].values)
            if self.dim in answer.coords:
                answer = answer.assign_coords(valid_time=answer[self.dim] + answer["lead_time"])
        return answer.assign_attrs(quantile=self.estimator_.quantile)

    def __dask_tokenize__(self) -> str:
        # Otherwise Dask would pickle the whole calibration to name its tasks.
        return uuid4().hex

    def _sizes(self, name: str, shape: Any, n_steps: Any, last: Any) -> dict[Hashable, int]:
        """The dimensions of a part of the answer to one query, given its shape for one step."""
        y, steps = self.like_["y"], {STEP: n_steps} if n_steps and shape else {}
        own = shape[len(steps) : len(shape) - len(last)]
        if name in ("anchors", "anchor_distance"):
            return {"anchor": own[0]}
        # Some error functionals return another shape than y, for example one number per field.
        others = {f"error_dim_{i}": n for i, n in enumerate(own)}
        sizes = y.sizes if own == y.shape or (self._rolls and not y.ndim) else others
        return {**steps, **sizes, **{dim: len(levels) for dim, levels in last.items()}}

    def save(self, path: str | Path, *, calibration: bool = True) -> None:
        """Write the calibration and the labels to one file; the class of the estimator also reads it."""
        check_fitted(self, "estimator_")
        kept = {"dims": [self.dim, self.trajectory_dim], "like": state.packed_labels(self.like_)}
        state.save(path, self.estimator_, calibration=calibration and not self._rolls, labels=kept)

    @classmethod
    def load(cls, path: str | Path, *, surrogate: Any, **callables: Any) -> "Labelled":
        """Read a calibrated estimator; the arguments as in ``GeoQ.load`` or ``RolloutGeoQ.load``."""
        content = state.read(path)
        name, labels = content[0]["estimator"], content[0]["labels"]
        if labels is None:
            raise ValueError(f"{path} was not saved by Labelled; load it with {name}.load.")
        kind = {"GeoQ": GeoQ, "RolloutGeoQ": RolloutGeoQ}[name]
        estimator = state.load(path, kind, content=content, surrogate=surrogate, **callables)
        new = cls(estimator, *labels["dims"])
        new.estimator_ = copy.copy(estimator)
        new.like_ = state.unpacked_labels(labels["like"])
        return new

    get_params, set_params = get_params, set_params


def _stacked(data: Any, name: str, like: Any = None) -> xr.DataArray:
    """A DataArray: the variables of a Dataset along ``variable`` with their units, selected by the names of ``like``."""
    if isinstance(data, xr.Dataset):
        chosen = like is not None and "variable" in like.coords
        names = [*like.get_index("variable")] if chosen else [*data.data_vars]
        if missing := [variable for variable in names if variable not in data.data_vars]:
            raise ValueError(f"{name} has the variables {[*data]}, but fit also had {missing}.")
        units = [str(data[variable].attrs.get("units", "")) for variable in names]
        data = data[names].to_dataarray().assign_coords(units=("variable", units))
    if not isinstance(data, xr.DataArray):
        raise TypeError(f"{name} is a {type(data).__name__}; pass a DataArray or a Dataset.")
    return data


def on_grid(data: Any, like: xr.DataArray, name: str) -> xr.DataArray:
    """A DataArray with the dimensions, labels and units of ``like``, and any further dimensions."""
    array = _stacked(data, name, like)
    if missing := [dim for dim in like.dims if dim not in array.dims]:
        raise ValueError(f"{name} has dimensions {array.dims}, but fit also had {missing}.")
    _check_labels(array, like, like.dims, name)
    known: dict[Any, Any] = {"name": (array.name, like.name)}
    for n, of in like.coords.items():
        if n in array.coords and n != "units" and {*array[n].dims} == {*of.dims}:
            known[n] = array[n].transpose(*of.dims).values, of.values
    for what, (own, of) in known.items():
        if own is not None and of is not None and not same(own, of):
            raise ValueError(
                f"{name} has the {what} {shortened(own)}, but {shortened(of)} in fit; pass the same, or rename it."
            )
    units = [np.ravel(a.coords.get("units", a.attrs.get("units", ""))) for a in (array, like)]
    for own, known in zip(*units, strict=False):
        if own and known and own != known:
            raise ValueError(f"{name} has the units '{own}', but '{known}' in fit; convert it.")
    return array


def _check_labels(array: xr.DataArray, like: xr.DataArray, dims: Any, name: str) -> None:
    """Raise for other labels along these dimensions."""
    for dim in dims:
        own, known = array.get_index(dim), like.get_index(dim)
        if not own.equals(known):
            raise ValueError(
                f"{name} has {_span(own)} along {dim!r}, but needs {_span(known)}; select, interpolate or relabel it."
            )


def _span(labels: Any) -> str:
    return f"{len(labels)} labels from {labels[0]} to {labels[-1]}"


def _vectors(array: Any) -> np.ndarray:
    """States or forcings with at least one axis beside the samples."""
    values = np.ascontiguousarray(array)
    return values[:, None] if values.ndim == 1 else values


def names_of(like: xr.DataArray) -> list[str] | None:
    """A name for each value: its labels along all dimensions."""
    labels = [[f"{dim} {label}" for label in like.get_index(dim)] for dim in like.dims]
    return [", ".join(parts) for parts in itertools.product(*labels)] if labels else None


def _at_times(forcing: Data, times: xr.DataArray, dim: str, step: Any = None) -> Data:
    """The forcing at these times; a forcing without times is constant."""
    if dim not in forcing.dims:
        last = times.dims[-1]
        return forcing.drop_vars(dim, errors="ignore").expand_dims({last: times.sizes[last]})
    rounding = {} if step is None else {"method": "nearest", "tolerance": step / 1000}
    try:
        return forcing.sortby(dim).sel({dim: times}, **rounding).drop_vars(dim)
    except KeyError as exc:
        known = forcing.get_index(dim)
        first = np.setdiff1d(times, known)[0]
        raise ValueError(f"forcing has {_span(known)}, but a step starts at {first}.") from exc


def _time_step(times: Any) -> Any:
    """The time between two states, None if it varies; raises for times that are out of order or have a gap."""
    values = np.diff(times.values)
    values = values.astype("m8[us]") if values.dtype.kind == "O" else values  # other calendars
    apart = values.astype(float)
    if (apart <= 0).any():
        raise ValueError(f"the times of x are not in order; sort them, x.sortby({times.name!r}).")
    if apart.max() > 1.5 * np.median(apart):
        raise ValueError(f"x has a gap after {times[apart.argmax()]}; pass a list of trajectories.")
    return values[0] if np.allclose(apart, apart[0], rtol=1e-6) else None
