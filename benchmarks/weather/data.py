"""Reanalysis fields for the weather benchmark: read from netCDF, cut into forecast windows, split at rolling origins."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HOURS = 6
DAYS = 160
WEATHERBENCH = ("geopotential_500", "temperature_850", "2m_temperature")
# Variables of the ERA5 stand-in, whose results are stored under another name than WeatherBench's.
STAND_IN = ("msl", "vo850")
GRID = ("time", "lat", "lon")
HOW_TO_GET = """\
pass a folder of reanalysis data with --data.
WeatherBench (github.com/pangeo-data/WeatherBench): download geopotential_500, temperature_850 and 2m_temperature at
5.625 degrees from https://mediatum.ub.tum.de/1524895 and unpack each into a folder of its own,
    DIR/geopotential_500/*.nc  DIR/temperature_850/*.nc  DIR/2m_temperature/*.nc
then run with --data DIR. A folder of netCDF files with all variables on one (time, lat, lon) grid works as well."""


@dataclass(frozen=True)
class Weather:
    """States of the atmosphere, six hours apart."""

    values: np.ndarray  # (time, channel, lat, lon), float32
    names: tuple[str, ...]
    time: np.ndarray
    lat: np.ndarray
    lon: np.ndarray


def label(names):
    """Name of the data in tables and pictures."""
    listed = ", ".join(names)
    return f"ERA5 stand-in ({listed})" if tuple(names) == STAND_IN else listed


def load(folder, variables=None, *, start=None, days=DAYS):
    """Read WeatherBench's folders, or files with all variables, from ``start`` or from the first time on."""
    if folder is None:
        raise ValueError(f"no data given; {HOW_TO_GET}")
    files = _files(Path(folder), variables)
    fields = {name: _six_hourly(parts, name) for name, parts in files.items()}
    wanted = tuple(variables or fields)
    if missing := [name for name in wanted if name not in fields]:
        raise ValueError(
            f"variables {missing} are not in {folder}, which has {sorted(fields)}; choose among those."
        )
    chosen = [_period([*fields[name]], start, days) for name in wanted]
    first = chosen[0]
    for name, field in zip(wanted, chosen, strict=True):
        _check_like(name, field, wanted[0], first)
    values = np.stack([np.asarray(f.values, np.float32) for f in chosen], axis=1)
    return Weather(values, wanted, *(first[axis].values for axis in GRID))


def _files(folder, variables):
    """Lazily opened fields by variable, one per file."""
    plain = sorted(folder.glob("*.nc"))
    by_folder = {p.name: sorted(p.glob("*.nc")) for p in sorted(folder.glob("*/"))}
    by_folder = {name: files for name, files in by_folder.items() if files}
    if not plain and not by_folder:
        raise ValueError(f"{folder} holds no netCDF files; {HOW_TO_GET}")
    fields = {}
    if plain:
        for file in plain:
            for name, field in _fields(file).items():
                fields.setdefault(name, []).append(field)
        return fields
    usual = [name for name in WEATHERBENCH if name in by_folder]
    names = variables or (usual if len(usual) == len(WEATHERBENCH) else by_folder)
    for name in (n for n in names if n in by_folder):
        for file in by_folder[name]:
            inside = _fields(file)
            if len(inside) != 1:
                raise ValueError(
                    f"{file} holds {sorted(inside)}; a folder per variable has files with one variable each."
                )
            fields.setdefault(name, []).extend(inside.values())
    return fields


def _fields(file):
    import xarray  # only needed to load data

    with file.open("rb") as stream:
        engine = "scipy" if stream.read(3) == b"CDF" else "h5netcdf"
    data = xarray.open_dataset(file, engine=engine)
    longer = {"latitude": "lat", "longitude": "lon"}
    data = data.rename({a: b for a, b in longer.items() if a in data.dims})
    fields = {n: f for n, f in data.data_vars.items() if set(GRID) <= set(f.dims)}
    for name, field in fields.items():
        others = {d: n for d, n in field.sizes.items() if d not in GRID}
        if any(size > 1 for size in others.values()):
            raise ValueError(
                f"{name} in {file} has dimensions {others} besides time and grid; select one of them first."
            )
        fields[name] = field.squeeze(list(others), drop=True).transpose(*GRID)
    return fields


def _six_hourly(parts, name):
    """Fields of each file at 0, 6, 12 and 18 o'clock, in the order of time."""
    kept = []
    for part in parts:
        since_midnight = part.time.values - part.time.values.astype("datetime64[D]")
        on_time = since_midnight % np.timedelta64(HOURS, "h") == np.timedelta64(0)
        part = part[on_time].sortby("time")
        if part.sizes["time"]:
            kept.append(part)
    if not kept:
        raise ValueError(f"{name} has no field at 0, 6, 12 or 18 o'clock; use data that have them.")
    return sorted(kept, key=lambda part: part.time.values[0])


def _period(parts, start, days):
    """Fields of the period, read into memory."""
    import xarray

    begin = np.datetime64(start or parts[0].time.values[0], "ns")
    end = begin + np.timedelta64(days * 24, "h")
    inside = [part[(part.time.values >= begin) & (part.time.values < end)] for part in parts]
    inside = [part.load() for part in inside if part.sizes["time"]]
    if not inside:
        last = parts[-1].time.values[-1]
        raise ValueError(
            f"start={start}, but the data run from {parts[0].time.values[0]} to {last}."
        )
    return xarray.concat(inside, dim="time") if len(inside) > 1 else inside[0]


def _check_like(name, field, first_name, first):
    for axis in GRID:
        if not np.array_equal(field[axis].values, first[axis].values):
            raise ValueError(
                f"{name} and {first_name} have different {axis} coordinates ({field.sizes[axis]} and {first.sizes[axis]} of "
                "them); regrid the variables to one grid and one period."
            )
    steps = np.diff(field.time.values)
    if bad := np.flatnonzero(steps != np.timedelta64(HOURS, "h")).tolist():
        raise ValueError(
            f"{name} has {len(bad)} gaps in time, the first after {field.time.values[bad[0]]}; windows need a state every "
            f"{HOURS} hours, so choose a period without gaps."
        )
    if n_missing := int(np.isnan(field.values).sum()):
        raise ValueError(
            f"{name} has {n_missing} missing values; fill them or choose another period."
        )


# Windows and rolling origins.


@dataclass(frozen=True)
class Split:
    """Training windows with all states before the origin, and test windows with all targets after it.

    States are scaled to [0, 1] by the range of each channel before the origin.
    """

    x: torch.Tensor  # (window, past state, channel, lat, lon)
    y: torch.Tensor  # (window, lead, channel, lat, lon)
    x_test: torch.Tensor
    y_test: torch.Tensor
    states: torch.Tensor  # (time, channel, lat, lon), before the origin
    first: torch.Tensor  # the first target's time step, per training window
    first_test: torch.Tensor


def origins(n_steps, n_leads):
    """Three origins, one horizon apart; the last leaves one and a half horizons."""
    last = n_steps - 3 * n_leads // 2
    return [last - 2 * n_leads, last - n_leads, last]


def windows(states, first, n_past, n_leads):
    """Past and future states of the windows whose targets start at the time steps ``first``."""
    past = first[:, None] + torch.arange(-n_past, 0)
    future = first[:, None] + torch.arange(n_leads)
    return states[past], states[future]


def split(values, origin, n_past, n_leads):
    """Training and test windows of one origin."""
    states = torch.from_numpy(values)
    known = states[:origin]
    low, high = (edge(known, dim=(0, 2, 3)) for edge in (torch.amin, torch.amax))
    span = (high - low)[:, None, None]
    states = (states - low[:, None, None]) / span
    first = torch.arange(n_past, origin - n_leads + 1)
    last_test = min(origin + n_leads, len(states) - n_leads + 1)
    first_test = torch.arange(origin, last_test)
    return Split(
        *windows(states, first, n_past, n_leads),
        *windows(states, first_test, n_past, n_leads),
        states[:origin],
        first,
        first_test,
    )
