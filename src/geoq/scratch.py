"""Arrays in scratch files, for data that are larger than memory.

``fit`` accepts arrays that are not in memory: NumPy's memory maps, HDF5 datasets, Zarr arrays and Dask arrays. They are copied
once, chunk by chunk, to a scratch file that is mapped into memory, except memory maps, which are one already. While such data
are calibrated, all arrays with one row per point are in scratch files as well. The operating system reads and writes their
pages as they are used, and removes the files with the arrays.
"""

import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Smaller arrays stay in memory; data are read in parts of about this many bytes.
SMALL_BYTES = 2**23
# The scratch files need about this many times the data: inputs, outputs, coordinates, predictions, errors, the rows of a fold.
DISK_FACTOR = 4
_IN_USE: ContextVar[bool] = ContextVar("scratch files are in use", default=False)


def is_lazy(array: Any) -> bool:
    """Whether an array has a shape and can be sliced, but is not in memory.

    Example:
        >>> is_lazy(np.zeros(3))
        False
    """
    if isinstance(array, np.ndarray | Tensor) or any(
        hasattr(array, name) for name in ("__dlpack__", "to_numpy", "toarray")
    ):
        return isinstance(array, np.memmap)
    needed = ("shape", "dtype", "__getitem__")
    return all(hasattr(array, name) for name in needed) and len(array.shape) > 0


@contextmanager
def larger_than_memory(*arrays: Any) -> Iterator[None]:
    """Use scratch files within the ``with`` block if one of the arrays is not in memory; refused if the disk is too small."""
    lazy = [array for array in arrays if is_lazy(array)]
    if lazy:
        _check_space(sum(_n_bytes(array) for array in lazy))
    token = _IN_USE.set(_IN_USE.get() or bool(lazy))
    try:
        yield
    finally:
        _IN_USE.reset(token)


def stored(array: Any) -> Any:
    """An array that is not in memory as a NumPy array in a scratch file; any other array as it is."""
    if not is_lazy(array):
        return array
    if isinstance(array, np.memmap):
        return np.asarray(array)
    place = room(tuple(array.shape), np.dtype(array.dtype))
    for start, stop in pairwise(_ends(array)):
        place[start:stop] = array[start:stop]
    return place


def room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An empty array; in a scratch file if it is large and scratch files are in use."""
    small = math.prod(shape) * dtype.itemsize < SMALL_BYTES
    if small or not _IN_USE.get() or dtype.kind == "O":
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="geoq") as file:
        return np.asarray(np.memmap(file, dtype, "w+", shape=shape))


def empty_like_rows(rows: Tensor, n: int) -> Tensor:
    """An empty tensor for n rows like these."""
    if rows.device.type != "cpu" or not _IN_USE.get():
        return rows.new_empty((n, *rows.shape[1:]))
    dtype = np.dtype(str(rows.dtype).removeprefix("torch."))
    return torch.from_numpy(room((n, *rows.shape[1:]), dtype))


def in_use() -> bool:
    """Whether large arrays are put into scratch files."""
    return _IN_USE.get()


def shared(array: np.ndarray) -> Tensor:
    """A tensor in the memory of an array, which may be read-only; geoq does not write to arrays of the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _ends(array: Any) -> list[int]:
    """The first rows of parts of the array, which contain whole chunks of the stored array, and the number of rows."""
    n = array.shape[0]
    step = max(1, SMALL_BYTES // max(1, _n_bytes(array) // max(1, n)))
    given = (getattr(array, "chunks", None) or (1,))[0]
    if isinstance(given, tuple):  # Dask: the length of each chunk
        return [0, *np.cumsum(given).tolist()]
    step = max(step // given, 1) * given
    return [*range(0, n, step), n]


def physical_memory() -> int:
    """The memory of the machine in bytes; infinite if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def n_bytes(*arrays: Any) -> int:
    """The number of bytes of these arrays."""
    return sum(_n_bytes(array) for array in arrays)


def _n_bytes(array: Any) -> int:
    return int(math.prod(array.shape) * np.dtype(array.dtype).itemsize)


def _check_space(n_bytes: int) -> None:
    folder = tempfile.gettempdir()
    free, needed = shutil.disk_usage(folder).free, DISK_FACTOR * n_bytes
    if free < needed:
        raise OSError(
            f"x and y have {n_bytes / 2**30:.3g} GiB that are not in memory, so that fit needs about {needed / 2**30:.3g} GiB of "
            f"scratch files, but {folder} has {free / 2**30:.3g} GiB; set the environment variable TMPDIR to a folder with more "
            "space, or pass fewer rows."
        )
