"""Writes fields in the layout of the WeatherBench archive, to check the loader without the archive.

    python -m benchmarks.weather.layout SOURCE FOLDER    # six-hourly fields of the stand-in, written as hourly yearly files

The archive has a folder per variable and a file per year, for example geopotential_500/geopotential_500hPa_1979_5.625deg.nc:
hourly fields of float32 with the dimensions (time, lat, lon), lat from south to north, lon from 0, a short name (z), units and,
for pressure levels, a scalar coordinate ``level`` in hPa.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOURS = 6
DEGREES = 5.625


@dataclass(frozen=True)
class ArchiveVariable:
    """A variable of the archive.

    Attributes:
        folder: name of the folder, which the loader uses as the name of the variable.
        file: start of the file names.
        short: name inside the files.
        units: units of measurement.
        level: pressure in hPa; None for fields at the surface.
    """

    folder: str
    file: str
    short: str
    units: str
    level: int | None = None


ARCHIVE = (
    ArchiveVariable(
        "geopotential_500", "geopotential_500hPa", "z", "m**2 s**-2", level=500
    ),
    ArchiveVariable("temperature_850", "temperature_850hPa", "t", "K", level=850),
    ArchiveVariable("2m_temperature", "2m_temperature", "t2m", "K"),
)
# The variables of the stand-in for ERA5, named as the archive names others.
STAND_IN = {
    "msl": ArchiveVariable(
        "mean_sea_level_pressure", "mean_sea_level_pressure", "msl", "Pa"
    ),
    "vo850": ArchiveVariable(
        "vorticity_850", "vorticity_850hPa", "vo", "s**-1", level=850
    ),
}


def grid():
    """Latitudes and longitudes of the archive's coarsest grid, 32 x 64 cells."""
    lat = -90 + DEGREES * (np.arange(32) + 0.5)
    return lat, DEGREES * np.arange(64)


def write_variable(folder, variable, time, values):
    """Write hourly fields, one file per year.

    Args:
        folder: the archive's folder.
        variable: an ``ArchiveVariable``.
        time: the hours, as datetime64.
        values: the fields, one per hour, on the archive's grid.
    """
    import xarray

    lat, lon = grid()
    coordinates = {"time": time, "lat": lat, "lon": lon}
    if variable.level is not None:
        coordinates["level"] = np.int32(variable.level)
    field = xarray.DataArray(
        values.astype(np.float32),
        coordinates,
        ("time", "lat", "lon"),
        attrs={"units": variable.units},
    )
    (folder / variable.folder).mkdir(parents=True, exist_ok=True)
    for year, part in field.groupby("time.year"):
        file = f"{variable.file}_{year}_{DEGREES}deg.nc"
        data = part.to_dataset(name=variable.short)
        data.to_netcdf(folder / variable.folder / file, engine="h5netcdf")


def hourly(time, values):
    """Hours and fields by linear interpolation between six-hourly fields, which it keeps exactly."""
    steps = np.arange(HOURS * (len(time) - 1) + 1)
    before = np.minimum(steps // HOURS, len(time) - 2)
    passed = (steps - HOURS * before)[:, None, None] / HOURS
    fields = (1 - passed) * values[before] + passed * values[before + 1]
    return time[0] + steps * np.timedelta64(1, "h"), fields


def main():
    from benchmarks.weather.data import load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a folder with the stand-in for ERA5")
    parser.add_argument("folder", type=Path, help="where to write")
    arguments = parser.parse_args()
    states = load(arguments.source)
    for channel, name in enumerate(states.names):
        fields = hourly(states.time, states.values[:, channel].astype(np.float64))
        write_variable(arguments.folder, STAND_IN[name], *fields)
    again = load(arguments.folder, [STAND_IN[name].folder for name in states.names])
    same = np.array_equal(again.values, states.values)
    print(f"{arguments.folder}: {again.values.shape}, equal to the source: {same}")


if __name__ == "__main__":
    main()
