"""Data that are not in memory: memory maps, HDF5 datasets and Dask arrays give the answers of arrays in memory."""

import os
import subprocess
import sys

import dask.array
import h5py
import numpy as np
import pytest
import xarray as xr

from geoq import DistanceRegion, GeoQ, RandomFolds, TrainedFolds, scratch
from geoq.training import PredictedFolds
from geoq.xarray import XarrayGeoQ

FOLDS = RandomFolds(3)
X = np.random.default_rng(0).normal(size=(60, 2, 3, 4))
Y = X[:, 0] ** 2


class Tenth:
    """A tenth of the anchor error, which needs no memory of its own."""

    quantile = 0.95

    def fit(self, calibration):
        return self

    def __call__(self, features):
        return features.anchor_error / 10


def model(x):
    assert type(x) is np.ndarray
    return 0.9 * x[:, 0] ** 2


def train(x, y):
    """A recipe that reads its data in parts."""
    slope = sum((x[i, 0] * y[i]).sum() for i in range(len(x))) / (x[:, 0] ** 2).sum()
    return lambda x: slope * x[:, 0]


def memory_map(array, folder, name):
    path = folder / f"{name}.dat"
    np.memmap(path, array.dtype, "w+", shape=array.shape)[:] = array
    return np.memmap(path, array.dtype, "r", shape=array.shape)


def dataset(array, folder, name):
    file = h5py.File(folder / f"{name}.h5", "w")
    return file.create_dataset(name, data=array, chunks=(7, *array.shape[1:]))


def dask_array(array, folder, name):
    return dask.array.from_array(array, chunks=(17, *array.shape[1:]))


class Stored:
    """What a Zarr array has: a shape, a type, chunks and slices."""

    def __init__(self, array):
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, (9, 1)
        self._array = array

    def __getitem__(self, rows):
        assert rows.stop - rows.start <= 9
        return self._array[rows]


def stored_array(array, folder, name):
    return Stored(array)


KINDS = (memory_map, dataset, dask_array, stored_array)
SOURCES = {
    "no retraining": (model, None),
    "trained folds": (model, TrainedFolds([train(X, Y)] * 3)),
    "a recipe": (None, train),
}


@pytest.fixture
def tiny(monkeypatch):
    """All arrays but the smallest are in scratch files, and are computed in many chunks."""
    monkeypatch.setattr(scratch, "SMALL_BYTES", 64)
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 100)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_answers_are_the_answers_of_arrays_in_memory(kind, source, tmp_path):
    lazy = kind(X, tmp_path, "x"), kind(Y, tmp_path, "y")
    geoqs = [
        GeoQ(*source, folds=FOLDS, increment_model=Tenth()).fit(*data)
        for data in (lazy, (X, Y))
    ]
    ours, theirs = (geoq.assess(X[:9] + 0.1) for geoq in geoqs)
    for name in ("prediction", "error_hat", "support_score", "anchors"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    geoqs[0].save(tmp_path / "a.geoq")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_of_folds_may_be_lazy(kind, tmp_path):
    arrays = [factor * Y for factor in (0.8, 0.9, 1.1)]
    lazy = [kind(array, tmp_path, f"fold{i}") for i, array in enumerate(arrays)]
    errors = [
        GeoQ(model, PredictedFolds(given), folds=FOLDS, increment_model=Tenth())
        .fit(X, Y)
        .calibration_.error
        for given in (arrays, lazy)
    ]
    np.testing.assert_array_equal(*errors)


@pytest.mark.usefixtures("tiny")
def test_only_one_of_the_arrays_may_be_lazy(tmp_path):
    x, y = X[:, 0, 0], Y[:, 0]
    both = [
        GeoQ(None, lambda x, y: lambda x: x / 2, folds=FOLDS).fit(x, outputs)
        for outputs in (y, dataset(y, tmp_path, "y"))
    ]
    np.testing.assert_array_equal(*(geoq.bound(x + 0.1) for geoq in both))


@pytest.mark.usefixtures("tiny")
def test_chunked_xarray_data_are_calibrated():
    dims = ("time", "level", "lat", "lon")
    x = xr.DataArray(X, dims=dims)
    y = xr.DataArray(Y, dims=("time", "lat", "lon")).where(lambda y: y.lon > 0)
    settings = {"folds": FOLDS, "safe_region": DistanceRegion()}
    bounds = [
        XarrayGeoQ(GeoQ(model, None, increment_model=Tenth(), **settings), "time")
        .fit(*data)
        .bound(x[:5])
        for data in ((x, y), (x.chunk(time=8), y.chunk(time=8, lon=2)))
    ]
    xr.testing.assert_identical(*bounds)
    assert bounds[0].isel(lon=0).isnull().all()


def test_too_little_space_for_scratch_files_is_refused_before_any_work(monkeypatch):
    x = dask_array(X, None, "x")
    monkeypatch.setattr(scratch, "DISK_FACTOR", 2**60)
    with pytest.raises(OSError, match=r"x and y have .* GiB .* set .* TMPDIR"):
        GeoQ(model, None).fit(x, Y)


def test_an_increment_that_needs_everything_in_memory_is_refused(monkeypatch):
    monkeypatch.setattr(scratch, "physical_memory", lambda: 2**10)
    with pytest.raises(ValueError, match=r"TwoLawIncrement needs .*FieldScaleIncrem"):
        GeoQ(model, None).fit(dask_array(X, None, "x"), Y)


LIMITED = """
import resource, sys
import h5py, numpy as np
from geoq import DistanceRegion, GeoQ, RandomFolds, TrainedFolds, arrays, scratch
from test_scratch import Tenth

arrays.CHUNK_NUMBERS, scratch.SMALL_BYTES = 2**18, 2**18

def calibrate(x, y):
    folds = TrainedFolds([lambda x: x] * 3)
    geoq = GeoQ(lambda x: x, folds, folds=RandomFolds(3), increment_model=Tenth(), safe_region=DistanceRegion())
    return geoq.fit(x, y, progress=None).bound(x[:3])

few = np.random.default_rng(0).normal(size=(30, 4))
calibrate(few, 2 * few)  # loads all modules
lines = open("/proc/self/status").read().splitlines()
used = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + int(sys.argv[2]),) * 2)
with h5py.File(sys.argv[1]) as file:
    x, y = file["x"], file["y"]
    # The first points are their own anchors.
    expected = abs(x[:3] - y[:3])
    np.testing.assert_array_equal(calibrate(x, y), expected + expected / 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
def test_data_of_four_times_the_allowed_memory_are_calibrated(tmp_path):
    path, shape = tmp_path / "data.h5", (1, 256, 256)
    wave = np.sin(np.linspace(0, 9, 256, dtype=np.float32))
    with h5py.File(path, "w") as file:
        x, y = (file.create_dataset(n, (300, *shape), np.float32) for n in "xy")
        for row, a in enumerate(np.random.default_rng(0).normal(size=300)):
            x[row] = np.float32(a) * wave * wave[:, None]
            y[row] = x[row] ** 2
        n_bytes = 2 * x.nbytes
    # Without this threshold freed memory stays with the process, and counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    command = [sys.executable, "-c", LIMITED, path, str(n_bytes // 4)]
    subprocess.run(command, check=True, env=environment)
