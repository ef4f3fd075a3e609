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


def load(folder, *, start=None, days=DAYS):
    """Read WeatherBench's folders, or files with all variables, from ``start`` or from the first time on."""
    if folder is None:
        raise ValueError(f"no data given; {HOW_TO_GET}")
    parts = _files(Path(folder))
    fields = {name: _period(own, name, start, days) for name, own in parts.items()}
    names, first = tuple(fields), next(iter(fields.values()))
    for name, field in fields.items():
        _check(name, field, names[0], first)
    values = np.stack([np.asarray(f.values, np.float32) for f in fields.values()], axis=1)
    return Weather(values, names, *(first[axis].values for axis in GRID))


def _files(folder):
    """Lazily opened fields by variable, one per file."""
    plain = sorted(folder.glob("*.nc"))
    by_folder = {path.name: sorted(path.glob("*.nc")) for path in sorted(folder.glob("*/"))}
    if set(WEATHERBENCH) <= by_folder.keys():
        by_folder = {name: by_folder[name] for name in WEATHERBENCH}
    fields = {}
    for name, files in ({"": plain} if plain else by_folder).items():
        for file in files:
            for inside, field in _fields(file).items():
                fields.setdefault(name or inside, []).append(field)
    if not fields:
        raise ValueError(f"{folder} holds no netCDF files; {HOW_TO_GET}")
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
            more = f"dimensions {others} besides time and grid"
            raise ValueError(f"{name} in {file} has {more}; select one of them first.")
        fields[name] = field.squeeze(list(others), drop=True).transpose(*GRID)
    return fields


def _period(parts, name, start, days):
    """A variable at 0, 6, 12 and 18 o'clock of the period, in the order of time, read into memory."""
    import xarray

    first = min(part.time.values.min() for part in parts)
    begin = np.datetime64(start or first, "ns")
    end, hours, kept = begin + np.timedelta64(days * 24, "h"), np.timedelta64(HOURS, "h"), []
    for part in parts:
        time = part.time.values
        on_time = (time - time.astype("datetime64[D]")) % hours == np.timedelta64(0)
        kept.append(part[on_time & (time >= begin) & (time < end)])
    kept = [part.load() for part in kept if part.sizes["time"]]
    if not kept:
        raise ValueError(
            f"start={start}, but {name} begins at {first} and has no field at 0, 6, 12 or 18 o'clock in {days} days from the start."
        )
    return xarray.concat(kept, dim="time").sortby("time")


def _check(name, field, first_name, first):
    """Raise for different grids, gaps in time and missing values."""
    for axis in GRID:
        if not np.array_equal(field[axis].values, first[axis].values):
            sizes = f"({field.sizes[axis]} and {first.sizes[axis]} of them)"
            raise ValueError(
                f"{name} and {first_name} have different {axis} coordinates {sizes}; regrid the variables to one grid and one period."
            )
    steps = np.diff(field.time.values)
    if bad := np.flatnonzero(steps != np.timedelta64(HOURS, "h")).tolist():
        gaps = f"{len(bad)} gaps in time, the first after {field.time.values[bad[0]]}"
        raise ValueError(
            f"{name} has {gaps}; windows need a state every {HOURS} hours, so choose a period without gaps."
        )
    if n := int(np.isnan(field.values).sum()):
        raise ValueError(f"{name} has {n} missing values; fill them or choose another period.")


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
    states = (states - low[:, None, None]) / (high - low)[:, None, None]
    first = torch.arange(n_past, origin - n_leads + 1)
    first_test = torch.arange(origin, min(origin + n_leads, len(states) - n_leads + 1))
    pairs = (windows(states, rows, n_past, n_leads) for rows in (first, first_test))
    return Split(*next(pairs), *next(pairs), states[:origin], first, first_test)
