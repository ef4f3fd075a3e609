"""The xarray interface of RolloutGeoQ: labelled trajectories, initial states and forcings, and labelled answers."""

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import xarray as xr

from geoq import archive, parameters
from geoq.checks import check_count, check_fitted
from geoq.representation import Representation
from geoq.rollout import RolloutAssessment, RolloutGeoQ, files
from geoq.rollout.assessment import WITHOUT_TOLERANCE
from geoq.surrogate import Surrogate
from geoq.training.checkpoint import Checkpoint
from geoq.training.progress import BAR, ShowProgress
from geoq.xarray_labels import (
    Labelled,
    applied,
    array_of,
    check_same_grid,
    check_storable,
    described,
    listed,
    stacked,
    template,
)
from geoq.xarray_trajectories import (
    STEP,
    along_steps,
    driven,
    forced,
    gathered,
    listed_parts,
    on_grid,
    time_step,
    without_times,
)

_LONG_NAMES = {
    "error_hat": "error bound",
    "safe": "calibration supports the bound of the step",
    "supported_horizon": "number of steps that are safe",
    "trusted_horizon": "number of steps that can be trusted",
    "diverged_at": "step at which the rollout diverges, or 0",
    "bound_over_tolerance": "largest ratio of bound and tolerance",
}


@dataclass(eq=False)
class XarrayRolloutGeoQ:
    """RolloutGeoQ for labelled arrays: it checks the coordinates of the states and puts coordinates on the answers.

    The callables of the wrapped RolloutGeoQ receive plain NumPy arrays: samples first, then the other dimensions in the order
    in which ``fit`` received them. The variables of a Dataset are stacked along a dimension ``variable`` after the samples,
    with their units as a coordinate. A series without other dimensions has states of shape (1,).

    Attributes:
        geoq: the settings of the calibration; ``fit`` does not change it.
        time_dim: the name of the dimension of time.
        trajectory_dim: the name of the dimension of the trajectories, if one array contains several.
        geoq_: the calibrated copy of ``geoq``.
        state_, given_: the states and the forcing of ``fit`` without their values; ``given_`` is None without forcing.
        time_step_: the time between two states; None if it varies, as between months.

    Example:
        >>> import numpy as np, xarray as xr
        >>> from geoq import RolloutGeoQ
        >>> from geoq.xarray import XarrayRolloutGeoQ
        >>> angle = 0.1 * np.arange(400)
        >>> waves = xr.Dataset({"u": ("time", np.cos(angle)), "v": ("time", np.sin(angle))})
        >>> def step(x):  # a rotation by 0.1 that is slightly wrong
        ...     return x @ np.array([[0.99, 0.1], [-0.1, 0.99]])
        >>> geoq = XarrayRolloutGeoQ(RolloutGeoQ(step, None, n_calibration=20))
        >>> answer = geoq.fit(waves.isel(time=slice(300))).assess(waves.isel(time=[300, 350]), 10, 0.5)
        >>> answer.error_hat.sizes
        Frozen({'time': 2, 'step': 10, 'variable': 2})
    """

    geoq: RolloutGeoQ
    time_dim: str = "time"
    trajectory_dim: str | None = None

    def fit(
        self,
        trajectories: Labelled | Sequence[Labelled],
        *,
        forcing: Labelled | Sequence[Labelled] | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
        progress: ShowProgress = BAR,
    ) -> "XarrayRolloutGeoQ":
        """Calibrate on true trajectories, which must be in memory.

        Args:
            trajectories: one trajectory, a list of them, or an array with the dimension ``trajectory_dim``. Their times must
                be in order and without gaps.
            forcing: the inputs of each step, one part per trajectory or one for all of them. It contains the times of the
                trajectories: the forcing at a time drives the step from this time to the next one. A forcing without the
                dimension of time is constant along a trajectory.
            checkpoint: a folder, or a ``Checkpoint``, see ``RolloutGeoQ.fit``.
            progress: how the progress is shown, see ``GeoQ.fit``.

        Raises:
            ValueError: the trajectories or a setting is unusable. These checks come before any training.
        """
        dim, time = self.trajectory_dim, self.time_dim
        parts = gathered(listed_parts(trajectories, dim), "trajectories", time)
        steps = [time_step(part) for part in parts]
        state, given, along = without_times(parts[0]), None, None
        if forcing is not None:
            common = dim is None or dim not in getattr(forcing, "dims", (dim,))
            inputs = listed_parts(forcing, None if common else dim)
            along = driven(inputs, parts, time)
            given = without_times(along[0])
        known = {"trajectories": state} | ({} if given is None else {"forcing": given})
        check_storable(known)
        fitted = copy.copy(self.geoq).fit(
            [self._rows(part) for part in parts],
            forcing=None if along is None else [self._rows(part) for part in along],
            checkpoint=checkpoint,
            progress=progress,
        )
        self.geoq_, self.state_, self.given_ = fitted, state, given
        self.time_step_ = steps[0] if all(step == steps[0] for step in steps) else None
        return self

    def assess(
        self,
        x0: Labelled,
        n_steps: int,
        tolerance: Any = None,
        *,
        forcing: Labelled | None = None,
    ) -> xr.Dataset:
        """Roll out from each initial state and bound the error of every step.

        Args:
            x0: one initial state, or initial states along any further dimensions, such as time or members. If they are chunked
                along these dimensions, the answer is lazy.
            n_steps: the number of steps to forecast.
            tolerance: the largest acceptable error as in ``RolloutGeoQ.assess``, or labelled: a dictionary or a Dataset with a
                number for each variable, or a DataArray.
            forcing: the inputs of each step: a series that contains the times of x0 and of the following steps, or an array
                with a dimension ``step``. A forcing with neither of them is constant along a rollout.

        Returns:
            The parts of ``RolloutAssessment``, with the coordinates of x0 and of the states. The steps have the coordinate
            ``step`` and, if the time between two states is constant, also ``lead_time`` and ``valid_time``.

        Raises:
            ValueError: x0 or the forcing has other dimensions, coordinates or units than in ``fit``.
        """
        check_fitted(self, "geoq_")
        check_count(n_steps, "n_steps")
        arrays = self._arguments(x0, forcing, n_steps)
        largest = self._tolerance(tolerance)
        # Computed here, so that an unusable tolerance is refused before a lazy answer is computed.
        probe = self._probe(largest)
        sizes = {STEP: n_steps, **self._output().sizes}
        parts = {
            name: (value.dtype, dict([*sizes.items()][: value.ndim - 1]))
            for name, value in vars(probe).items()
            if isinstance(value, np.ndarray) and name != "tolerance"
        }
        function = partial(self._assess, n_steps, largest, tuple(parts))
        answers = applied(function, arrays, self._core, parts)
        return self._labelled(answers, arrays[0], probe)

    def bound(
        self, x0: Labelled, n_steps: int, *, forcing: Labelled | None = None
    ) -> xr.DataArray:
        """Return the error bound of every step, ``assess(x0, n_steps).error_hat``."""
        return self.assess(x0, n_steps, forcing=forcing)["error_hat"]

    def reason(
        self,
        x0: Labelled,
        n_steps: int,
        tolerance: Any = None,
        *,
        forcing: Labelled | None = None,
    ) -> str:
        """Explain the horizon and the bounds of one rollout in words and numbers; the arguments are the arguments of ``assess``."""
        check_fitted(self, "geoq_")
        check_count(n_steps, "n_steps")
        arrays = self._arguments(x0, forcing, n_steps)
        others = [dim for dim in arrays[0].dims if dim not in self.state_.dims[1:]]
        if any(arrays[0].sizes[dim] != 1 for dim in others):
            raise ValueError(
                f"x0 contains several initial states along {others}; select one, for example with x0.isel({others[0]}=0)."
            )
        blocks = [
            part.transpose(..., *dims).values.reshape([part.sizes[dim] for dim in dims])
            for part, dims in zip(arrays, self._core, strict=True)
        ]
        answer = self._answer(n_steps, self._tolerance(tolerance), *blocks)
        names = [name for name in (self.time_dim, *others) if name in arrays[0].coords]
        labels = [f"{name} {arrays[0][name].values.ravel()[0]}" for name in names]
        title = " from ".join(["rollout", *labels[:1]])
        return answer.reason(0).replace("rollout 0", title, 1)

    def save(self, path: str | Path) -> None:
        """Write the calibration and the coordinates to one file, see ``RolloutGeoQ.save``; ``RolloutGeoQ.load`` reads it as well."""
        check_fitted(self, "geoq_")
        step = self.time_step_
        own = {
            "time_dim": self.time_dim,
            "trajectory_dim": self.trajectory_dim,
            "state": described(self.state_),
            "given": None if self.given_ is None else described(self.given_),
            "time_step": None if step is None else listed(xr.DataArray(step)),
        }
        files.save(self.geoq_, path, xarray=own)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        surrogate: Surrogate,
        representation: Representation | None = None,
    ) -> "XarrayRolloutGeoQ":
        """Read a calibrated estimator; the arguments are the arguments of ``RolloutGeoQ.load``."""
        geoq = RolloutGeoQ.load(
            path, surrogate=surrogate, representation=representation
        )
        numbers, _ = archive.read(path)
        if "xarray" not in numbers:
            raise ValueError(
                f"{path} was not saved by an XarrayRolloutGeoQ; load it with the class that saved it."
            )
        with archive.restoring(path):
            own = numbers["xarray"]
            estimator = cls(geoq, own["time_dim"], own["trajectory_dim"])
            estimator.geoq_ = copy.copy(geoq)
            estimator.state_ = template(own["state"])
            given, step = own["given"], own["time_step"]
            estimator.given_ = None if given is None else template(given)
            estimator.time_step_ = None if step is None else array_of(step)[()]
            parts, known = (estimator.state_, estimator.given_), geoq.forcing_
            for part, shape in zip(parts, (known.state, known.shape), strict=True):
                stored = None if part is None else part.shape[1:] or (1,)
                same = stored == shape
                archive.check_value(f"the shape {stored}", same, "not possible")
        return estimator

    get_params = parameters.get_params
    set_params = parameters.set_params

    def __dask_tokenize__(self) -> str:
        # Otherwise Dask would pickle the whole calibration to name its tasks.
        return uuid4().hex

    def _arguments(
        self, x0: Labelled, forcing: Labelled | None, n_steps: int
    ) -> Sequence[xr.DataArray]:
        """The initial states and, if there is one, the forcing of each step."""
        states = on_grid(x0, self.state_, "x0")
        if STEP in states.dims:
            raise ValueError(
                f"x0 has a dimension {STEP!r}, which the answers use; rename it, x0.rename({STEP}='start')."
            )
        if self.given_ is None:
            if forcing is not None:
                raise ValueError(
                    "forcing is given, but fit received no forcing; leave it out, or fit with forcing."
                )
            return [states]
        if forcing is None:
            raise ValueError(
                f"forcing=None, but fit received a forcing with dimensions {self.given_.dims}; pass forcing."
            )
        along = along_steps(forcing, states, n_steps, self.time_dim)
        given = on_grid(along, self.given_, "forcing")
        return forced(states, given, self.given_, n_steps)

    def _tolerance(self, tolerance: Any) -> Any:
        """A labelled tolerance as an array in the shape of the output; anything else as it is."""
        if isinstance(tolerance, Mapping) and not isinstance(tolerance, xr.Dataset):
            tolerance = xr.Dataset(tolerance)
        if not isinstance(tolerance, xr.DataArray | xr.Dataset):
            return tolerance
        output = self._output()
        array = stacked(tolerance, "tolerance", self.state_)
        foreign = [dim for dim in array.dims if dim not in output.dims]
        if foreign:
            raise ValueError(
                f"tolerance has dimensions {array.dims}, but the output has {output.dims}; leave {foreign} out."
            )
        check_same_grid(array, output, array.dims, "tolerance")
        # A copy, because a broadcast array is not writable.
        return array.broadcast_like(output).transpose(*output.dims).values.copy()

    def _output(self) -> xr.DataArray:
        """The output of one state: its dimensions and coordinates."""
        one = self.state_.sum(self.time_dim)
        index, shape = self.geoq_.output, self.geoq_.reference_states_.output.shape
        if index is None or not one.ndim:
            return one
        chosen = one[[index] if isinstance(index, int) else index]
        if chosen.shape == shape:
            return chosen
        dims = [f"output_dim_{place}" for place in range(len(shape))]
        return xr.DataArray(np.zeros(shape), dims=dims)

    @property
    def _core(self) -> list[tuple[Hashable, ...]]:
        """The dimensions of one state, and of the forcing of one rollout."""
        given = [] if self.given_ is None else [(STEP, *self.given_.dims[1:])]
        return [self.state_.dims[1:], *given]

    def _rows(self, array: xr.DataArray) -> np.ndarray:
        """The values of a trajectory or a forcing; numbers get an axis of length 1."""
        values = np.ascontiguousarray(array.values)
        return values[:, None] if values.ndim == 1 else values

    def _answer(
        self, n_steps: int, tolerance: Any, states: np.ndarray, *forcing: np.ndarray
    ) -> RolloutAssessment:
        """The answer of RolloutGeoQ to a block of initial states."""
        given = None
        n_loop = states.ndim - len(self.state_.dims) + 1
        rows = states.reshape(-1, *(states.shape[n_loop:] or (1,)))
        for part in forcing:
            own = part.shape[part.ndim - len(self._core[1]) :]
            each = np.broadcast_to(part, (*states.shape[:n_loop], *own))
            given = each.reshape(len(rows), n_steps, *(own[1:] or (1,)))
        return self.geoq_.assess(rows, n_steps, tolerance, forcing=given)

    def _assess(
        self,
        n_steps: int,
        tolerance: Any,
        names: tuple[str, ...],
        states: np.ndarray,
        *forcing: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """These parts of the answer to a block of initial states, with the dimensions of the block."""
        answer = self._answer(n_steps, tolerance, states, *forcing)
        loop = states.shape[: states.ndim - len(self.state_.dims) + 1]
        output = self._output().shape

        def shaped(value: np.ndarray) -> np.ndarray:
            own = (n_steps, *output) if value.ndim > 2 else value.shape[1:]
            return value.reshape((*loop, *own))

        return tuple(shaped(getattr(answer, name)) for name in names)

    def _probe(self, tolerance: Any) -> RolloutAssessment:
        """The answer to a stored state and one step."""
        states, *forcing = self.geoq_.forcing_.split(self.geoq_.probes_[:1])
        given = forcing[0][:, None] if forcing else None
        return self.geoq_.assess(states, 1, tolerance, forcing=given)

    def _labelled(
        self,
        variables: dict[str, xr.Variable],
        states: xr.DataArray,
        probe: RolloutAssessment,
    ) -> xr.Dataset:
        """The answer with the coordinates of the initial states, the steps and the output, and attributes."""
        units = {key: of for key, of in self.state_.attrs.items() if key == "units"}
        own = {"prediction": self.state_.attrs, "error_hat": units}
        for name, variable in variables.items():
            long_name = _LONG_NAMES.get(name, name.replace("_", " "))
            variable.attrs = {"long_name": long_name} | own.get(name, {})
        grid = {*self.state_.dims[1:]}
        known = {n: c for n, c in states.coords.items() if not grid & {*c.dims}}
        answer = xr.Dataset(variables).assign_coords(self._output().coords)
        answer = answer.assign_coords(known)
        n_steps = answer.sizes[STEP]
        answer = answer.assign_coords({STEP: np.arange(1, n_steps + 1)})
        if self.time_step_ is not None:
            lead = answer[STEP] * self.time_step_
            answer = answer.assign_coords(lead_time=lead)
            times = known.get(self.time_dim)
            if times is not None and times.dtype.kind != "O":
                answer = answer.assign_coords(valid_time=times + lead)
        rule = {} if probe.trust is None else vars(probe.trust)
        answer = answer.assign_attrs({f"trust_{name}": of for name, of in rule.items()})
        largest = np.asarray(probe.tolerance, dtype=float)
        if largest.ndim:
            answer = answer.assign(tolerance=(self._output().dims, largest))
        elif probe.tolerance is not None:
            answer = answer.assign_attrs(tolerance=float(largest))
        return answer.assign_attrs(
            threshold=probe.threshold,
            safe=probe.meaning[0],
            not_safe=probe.meaning[1],
            n_calibrated=probe.n_calibrated,
            trust=str(probe.trust or WITHOUT_TOLERANCE),
        )
