"""Data that are larger than memory: arrays on disk are read in chunks.

``fit`` accepts NumPy's memory maps, HDF5 datasets, Zarr arrays and Dask arrays. All but memory maps are copied once, chunk by chunk, to
a scratch file that is mapped into memory. Coordinates, errors and predictions of the points are kept in memory.
"""

import math
import shutil
import tempfile
from itertools import pairwise
from typing import Any

import numpy as np

from geoq.arrays import is_tensor

# Data are read in parts of about this many bytes.
PART_BYTES = 2**23


def is_lazy(array: Any) -> bool:
    """Whether an array has a shape and can be sliced, but is not in memory.

    Example:
        >>> is_lazy(np.zeros(3))
        False
    """
    if isinstance(array, np.ndarray) or is_tensor(array):
        return isinstance(array, np.memmap)
    if any(hasattr(array, name) for name in ("__dlpack__", "to_numpy", "toarray")):
        return False
    needed = ("shape", "dtype", "__getitem__")
    return all(hasattr(array, name) for name in needed) and len(array.shape) > 0


def is_mapped(array: Any) -> bool:
    """Whether an array that ``stored`` has returned lies in a file."""
    return isinstance(array, np.ndarray) and isinstance(array.base, np.memmap)


def stored(array: Any) -> Any:
    """An array that is not in memory as a NumPy array in a scratch file; any other array as it is."""
    if not is_lazy(array):
        return array
    if isinstance(array, np.memmap):
        return np.asarray(array)
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    _check_space(math.prod(shape) * dtype.itemsize)
    with tempfile.TemporaryFile(prefix="geoq") as file:
        place = np.asarray(np.memmap(file, dtype, "w+", shape=shape))
    for start, stop in pairwise(_ends(array, dtype.itemsize)):
        place[start:stop] = array[start:stop]
    return place


def _ends(array: Any, itemsize: int) -> list[int]:
    """The first rows of parts of the array, which contain whole chunks of the stored array, and the number of rows."""
    n = array.shape[0]
    step = max(1, PART_BYTES // max(1, math.prod(array.shape[1:]) * itemsize))
    given = (getattr(array, "chunks", None) or (1,))[0]
    if isinstance(given, tuple):  # Dask: the length of each chunk
        return [0, *np.cumsum(given).tolist()]
    step = max(step // given, 1) * given
    return [*range(0, n, step), n]


def _check_space(n_bytes: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OSError(
            f"an array of {n_bytes / 2**30:.3g} GiB is not in memory, but {folder} has {free / 2**30:.3g} GiB for a scratch file; set "
            "the environment variable TMPDIR to a folder with more space, or pass fewer rows."
        )
