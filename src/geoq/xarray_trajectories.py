"""Labelled trajectories and forcings: checked times and coordinates, and windows of a forcing along rollouts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from geoq.xarray_labels import Labelled, check_no_gaps, check_same_grid, span, stacked

# The dimension of the steps in an answer and in a forcing.
STEP = "step"
# Two times that are farther apart than this many usual steps have a gap between them.
GAP = 1.5


def listed_parts(
    data: Labelled | Sequence[Labelled], dim: str | None
) -> list[Labelled]:
    """The trajectories of a list, or of an array that contains several along the dimension ``dim``."""
    parts = [data] if isinstance(data, xr.DataArray | xr.Dataset) else [*data]
    if dim is None:
        return parts
    return [part.isel({dim: i}) for part in parts for i in range(part.sizes[dim])]


def gathered(parts: Sequence[Any], name: str, time: str) -> list[xr.DataArray]:
    """Trajectories as DataArrays with time first, all on the grid of the first one; unusable ones are refused."""
    if not parts:
        raise ValueError(f"{name} is an empty list; pass at least one trajectory.")
    arrays: list[xr.DataArray] = []
    for part in parts:
        array = on_grid(part, arrays[0], name) if arrays else stacked(part, name)
        if time not in array.dims or STEP in array.dims:
            raise ValueError(
                f"{name} has dimensions {array.dims}, but needs the dimension of time, {time!r}, and none named {STEP!r}, which "
                "the answers use; rename its dimensions."
            )
        if arrays and {*array.dims} != {*arrays[0].dims}:
            raise ValueError(
                f"{name} has dimensions {array.dims}, but the first one has {arrays[0].dims}; pass several trajectories as a list, "
                "or name their dimension with trajectory_dim."
            )
        if array.chunks is not None:
            raise ValueError(
                f"{name} is chunked, but the calibration needs all states in memory; pass {name}.compute()."
            )
        order = arrays[0].dims if arrays else (time, ...)
        arrays.append(array.transpose(*order))
        check_no_gaps(arrays[-1], name, "fill it, or split the trajectory there")
    return arrays


def driven(
    parts: Sequence[Any], trajectories: list[xr.DataArray], time: str
) -> list[xr.DataArray]:
    """The forcing of each trajectory at its times, selected from a longer series; a constant forcing is repeated."""
    given = [*parts] * (len(trajectories) if len(parts) == 1 else 1)
    if len(given) != len(trajectories):
        raise ValueError(
            f"forcing has {len(given)} parts, but there are {len(trajectories)} trajectories; pass one per trajectory."
        )
    for place, states in enumerate(trajectories):
        if time not in given[place].dims:
            times = states[time] if time in states.coords else len(states)
            bare = given[place].drop_vars(time, errors="ignore")
            given[place] = bare.expand_dims({time: times})
        elif states.get_index(time).isin(given[place].get_index(time)).all():
            given[place] = given[place].sel({time: states.get_index(time)})
    arrays = gathered(given, "forcing", time)
    for array, states in zip(arrays, trajectories, strict=True):
        if not array.get_index(time).equals(states.get_index(time)):
            raise ValueError(
                f"forcing and trajectories differ along {time!r}: {span(array, time)} and {span(states, time)}; select the same "
                "times."
            )
    return arrays


def time_step(states: xr.DataArray) -> Any:
    """The time between two states, None if it varies; times that are out of order or have a gap are refused."""
    dim = states.dims[0]
    times = states.get_index(dim)
    if dim not in states.coords or len(times) < 2:
        return None
    values = np.diff(times.values)
    if values.dtype.kind == "O":  # dates of other calendars
        values = np.array([step.total_seconds() for step in values]).astype("m8[s]")
    apart = values.astype(float)
    if (apart <= 0).any():
        raise ValueError(
            f"the times of trajectories are not in order along {dim!r}; sort them, for example with .sortby({dim!r})."
        )
    place, usual = int(apart.argmax()), float(np.median(apart))
    if apart[place] > GAP * usual:
        raise ValueError(
            f"trajectories have a gap along {dim!r} between {times[place]} and {times[place + 1]}, {apart[place] / usual:.3g} times "
            "the usual step; split the trajectory there and pass a list."
        )
    return values[0] if np.allclose(apart, apart[0], rtol=1e-6) else None


def without_times(array: xr.DataArray) -> xr.DataArray:
    """A trajectory without its times: dimensions, coordinates of the state, name and attributes."""
    grid = {*array.dims[1:]}
    own = [n for n, c in array.coords.items() if not c.dims or not {*c.dims} <= grid]
    # A copy, because a view would keep the values in memory.
    return array.isel({array.dims[0]: slice(0)}).drop_vars(own).copy()


def on_grid(array: Any, fitted: xr.DataArray, name: str) -> xr.DataArray:
    """States or forcings with any further dimensions; refused unless their coordinates are the same as in ``fit``."""
    found = stacked(array, name, fitted)
    missing = [dim for dim in fitted.dims[1:] if dim not in found.dims]
    if missing:
        raise ValueError(
            f"{name} has dimensions {found.dims}, but it also had {missing} in fit; add them."
        )
    check_same_grid(found, fitted, fitted.dims[1:], name)
    return found


def along_steps(
    forcing: Labelled, states: xr.DataArray, n_steps: int, time: str
) -> Labelled:
    """The forcing of each step: windows of a series from the times of the states, or a constant forcing repeated."""
    if STEP in forcing.dims:
        return forcing
    if time not in forcing.dims:
        constant = forcing.drop_vars(time, errors="ignore")
        return constant.expand_dims({STEP: n_steps})
    if time not in states.coords:
        raise ValueError(
            f"forcing has a dimension {time!r}, but x0 has no coordinate {time!r}; add it, or pass a forcing with a dimension "
            f"{STEP!r}."
        )
    start = states[time]
    first = forcing.get_index(time).get_indexer(start.values.ravel())
    missing = (first < 0) | (first + n_steps > forcing.sizes[time])
    if missing.any():
        raise ValueError(
            f"forcing has {span(forcing[time], time)}, but the rollout from {time} {start.values.ravel()[missing.argmax()]} needs "
            f"{n_steps} times from there on; pass a longer series."
        )
    places = first.reshape(*start.shape, 1) + np.arange(n_steps)
    return forcing.drop_vars(time).isel({time: ((*start.dims, STEP), places)})


def forced(
    states: xr.DataArray, forcing: xr.DataArray, fitted: xr.DataArray, n_steps: int
) -> tuple[xr.DataArray, xr.DataArray]:
    """Initial states with all dimensions of the forcing, so that several forcings of one state are several rollouts."""
    if forcing.sizes[STEP] != n_steps:
        raise ValueError(
            f"forcing has {forcing.sizes[STEP]} steps, but n_steps={n_steps}; pass one forcing per step."
        )
    for dim in forcing.dims:
        if dim in (STEP, *fitted.dims[1:]):
            continue
        labels = forcing.get_index(dim)
        if dim not in states.dims:
            states = states.expand_dims({dim: labels})
        elif dim in forcing.coords and not labels.equals(states.get_index(dim)):
            raise ValueError(
                f"forcing has {span(forcing, dim)} along {dim!r}, but x0 has {span(states, dim)}; select the same ones."
            )
    if forcing.chunks is None:
        check_no_gaps(forcing, "forcing", "fill it")
    return states, forcing
