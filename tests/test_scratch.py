"""Data that are not in memory: memory maps, HDF5 datasets, Dask and Zarr arrays give the answers of arrays in memory."""

import os
import subprocess
import sys

import dask.array
import h5py
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from geoq import GeoQ, PredictedFolds, RandomFolds, Region, TrainedFolds, arrays
from geoq.regions.table_scores import SupportDistance

X = np.random.default_rng(0).normal(size=(60, 2, 3, 4))
Y = X[:, 0] ** 2


class Tenth:
    """A tenth more than the anchor error, which needs no memory of its own."""

    def fit(self, tuples, quantile):
        return lambda features: 1.1 * features.anchor_error


REGION = Region((SupportDistance(),))
SETTINGS = {"folds": RandomFolds(3), "bound_model": Tenth(), "safe_region": REGION}


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


kinds = pytest.mark.parametrize("kind", [memory_map, dataset, dask_array, stored_array])
SOURCES = {
    "no retraining": (model, None),
    "trained folds": (model, TrainedFolds([train(X, Y)] * 3)),
    "a recipe": (None, train),
}


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    monkeypatch.setattr(arrays, "PART_BYTES", 1000)
    monkeypatch.setattr("geoq.arrays.CHUNK_NUMBERS", 100)


@kinds
@pytest.mark.filterwarnings("ignore:the surrogates of folds", "ignore:the mean error")
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_answers_are_those_of_arrays_in_memory(kind, source, tmp_path):
    lazy = kind(X, tmp_path, "x"), kind(Y, tmp_path, "y")
    estimators = [GeoQ(*source, **SETTINGS).fit(*data) for data in (lazy, (X, Y))]
    ours, theirs = (estimator.assess(X[:9] + 0.1) for estimator in estimators)
    for name in ("prediction", "error_hat", "support_score", "anchors"):
        assert_array_equal(getattr(ours, name), getattr(theirs, name))


@kinds
def test_predictions_of_folds_may_be_lazy(kind, tmp_path):
    found = [factor * Y for factor in (0.8, 0.9, 1.1)]
    lazy = [kind(array, tmp_path, f"fold{i}") for i, array in enumerate(found)]
    errors = [
        GeoQ(model, PredictedFolds(given), **SETTINGS).fit(X, Y).fitted_.tuples.error
        for given in (found, lazy)
    ]
    assert_array_equal(*errors)


def test_arrays_in_memory_are_not_copied_and_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert arrays.stored(X) is X
    assert_array_equal(arrays.stored(dask_array(X, None, "x")), X)
    assert not [*tmp_path.iterdir()]


def test_too_little_space_for_scratch_files_raises_before_any_work(monkeypatch):
    space = type("Space", (), {"free": 2**10})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: space)
    with pytest.raises(OSError, match=r"not in memory, but .* GiB for a scratch .*TMPDIR"):
        GeoQ(model, None).fit(dask_array(X, None, "x"), Y)


LIMITED = """
import resource, sys
import h5py, numpy as np
from geoq import GeoQ, RandomFolds, arrays
from test_scratch import SETTINGS

arrays.CHUNK_NUMBERS = 2**18

def calibrate(x, y):
    estimator = GeoQ(lambda x: x, lambda x, y: lambda x: x, **(SETTINGS | {"folds": RandomFolds(15)}))
    return estimator.fit(x, y, progress=None).bound(x[:3])

few = np.random.default_rng(0).normal(size=(30, 9, 9))
calibrate(few, 2 * few)  # loads all modules
lines = open("/proc/self/status").read().splitlines()
used = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + int(sys.argv[2]),) * 2)
with h5py.File(sys.argv[1]) as file:
    x, y = file["x"], file["y"]
    # The first points are their own anchors.
    np.testing.assert_allclose(calibrate(x, y), 1.1 * abs(x[:3] - y[:3]), rtol=1e-6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
def test_the_peak_memory_with_15_retrained_folds_is_seven_times_the_data(tmp_path):
    """Coordinates are in memory, and errors and predictions of points and of tuples, but no copies in double precision."""
    path, wave = tmp_path / "data.h5", np.sin(np.linspace(0, 9, 96, dtype=np.float32))
    with h5py.File(path, "w") as file:
        x, y = (file.create_dataset(n, (300, 1, 96, 96), np.float32) for n in "xy")
        for row, a in enumerate(np.random.default_rng(0).normal(size=300)):
            x[row] = np.float32(a) * wave * wave[:, None]
            y[row] = x[row] ** 2
        allowed = 7 * (x.nbytes + y.nbytes)
    # Without this threshold freed memory stays with the process, and counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LIMITED, path, str(allowed)]
    subprocess.run(command, check=True, env=environment)
