"""Arrays of the user and work in chunks.

Users pass NumPy arrays, torch tensors or data frames. Their callables receive the same kind of array, and results are returned in
that kind. Inside geoq there are only NumPy arrays. NumPy's memory maps, HDF5 datasets, Zarr arrays and Dask arrays stay on disk; all
but memory maps are copied once, in parts, to a scratch file that is mapped into memory.
"""

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from geoq.data.table import Table

# User callables receive rows in chunks of about this many input numbers. This bounds the memory for fields (36 states of
# 240 x 480) and is one chunk for most tables (262,144 rows of 16 columns).
CHUNK_NUMBERS = 2**22
# Data on disk are read in parts of about this many bytes.
PART_BYTES = 2**23
# Work on fewer numbers than this uses one thread.
SMALL_NUMBERS = 2**19
# Trainings use one more OpenMP thread for this many input numbers.
NUMBERS_PER_THREAD = 2**17


def is_tensor(array: object) -> bool:
    """Whether an array is a torch tensor; torch is not imported for the answer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def no_grad() -> Any:
    """A context without gradients, where torch is imported."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def to_numbers(array: Any, name: str) -> np.ndarray:
    """An array of real numbers, integers or booleans as floating-point numbers, without a copy where possible.

    Raises:
        TypeError: the argument is anything else.
        ValueError: some values are masked.
    """
    if isinstance(array, Table):
        array = array.array
    elif is_tensor(array):
        array = _from_tensor(array, name)
    elif not isinstance(array, np.ndarray):
        array = _from_other(array, name)
    if (mask := np.ma.getmask(array)).any():
        raise ValueError(
            f"{name} is masked in {mask.sum()} of {mask.size} values, and the numbers under a mask mean nothing; leave these rows "
            f"or columns out, or replace the values, for example with {name}.filled(0)."
        )
    array = np.ma.getdata(array)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biuf" or size > 8:
        frame = ", a data frame if columns hold text," * (name == "x")
        labels = f"pass {name}.astype(float) if all are numbers{frame} or code labels as numbers, such as ({name} == 'yes') * 1.0"
        ways_out = {
            "m": f"divide it by its unit, {name} / numpy.timedelta64(1, 's')",
            "M": f"pass the time since a date, ({name} - {name}[0]) / numpy.timedelta64(1, 's')",
            "f": f"pass {name}.astype(float)",
            **dict.fromkeys("OSUT", labels),
            "c": "pass its real and imaginary parts as two coordinates",
        }
        raise TypeError(
            f"{name} has dtype {array.dtype}, but must hold real numbers of at most 64 bits; "
            f"{ways_out.get(kind, 'convert it first')}."
        )
    if kind != "f":
        return array.astype(float)
    if size < 4 or not array.dtype.isnative:
        return array.astype("f4" if size <= 4 else "f8")
    return np.asarray(array)


def _from_other(array: Any, name: str) -> np.ndarray:
    """The numbers of an array of another library, such as JAX, by ``__array__`` or DLPack."""
    is_sparse = hasattr(array, "toarray")
    way_out = f"{name}.toarray()" if is_sparse else "an array of numbers"
    if isinstance(array, list):
        way_out = f"numpy.asarray({name})"
    elif isinstance(array, tuple):
        way_out = "the prediction alone, lambda x: model(x)[0]: geoq does not use a deviation"
    elif hasattr(array, "shape") and not is_sparse:
        for find in (np.asarray, partial(np.from_dlpack, device="cpu")):
            try:
                found = find(array)
            except (TypeError, AttributeError, RuntimeError, BufferError):
                continue
            if found.dtype != object:
                return np.asarray(found)
    raise TypeError(
        f"{name} must be a NumPy array, a torch tensor or another array, got {type(array).__name__}; pass {way_out}."
    )


def is_other(array: Any) -> bool:
    """Whether an array is of another library that has the array interface of Python, such as JAX."""
    return hasattr(array, "__array_namespace__") and not isinstance(array, np.ndarray)


def _from_tensor(tensor: Any, name: str) -> np.ndarray:
    """The numbers of a dense tensor."""
    tensor = tensor.detach().cpu()
    if "bfloat16" in str(tensor.dtype):
        tensor = tensor.float()
    try:
        return np.asarray(tensor.resolve_conj().resolve_neg().numpy())
    except (TypeError, RuntimeError) as exc:
        raise TypeError(
            f"{name} is a sparse, nested or quantised tensor ({exc}), but must be dense; pass {name}.to_dense(), "
            f"{name}.to_padded_tensor(0.0) or {name}.dequantize()."
        ) from exc


def restore(values: np.ndarray, like: Any) -> Any:
    """The values as the kind of array that ``like`` is: NumPy, torch on the device of ``like``, or another one."""
    if not is_tensor(like):
        return like.__array_namespace__().asarray(values) if is_other(like) else values
    torch = sys.modules["torch"]
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


def native(x: Any) -> Any:
    """What the user's callables receive: the data frame of a table, and any other array as it is."""
    return x.native if isinstance(x, Table) else x


def take(array: Any, rows: Any) -> Any:
    """Select rows of a user's array and keep its kind."""
    if is_tensor(array) and isinstance(rows, np.ndarray):
        rows = sys.modules["torch"].from_numpy(rows).to(array.device)
    return array[rows]


def in_kind(array: Any, like: Any) -> Any:
    """An array in the kind and dtype of another one if no value changes; otherwise in its own dtype, but not in fewer bits.

    Tensors of floating-point numbers get the dtype of the others, because networks refuse another one.
    """
    if is_tensor(array) != is_tensor(like) or is_other(array) != is_other(like):
        array = restore(to_numbers(array, "x"), like)
    elif type(like) is np.ndarray and not np.ma.getmask(array).any():
        # Plain arrays of masked arrays without a mask, matrices and memory maps.
        array = np.ma.getdata(array).view(np.ndarray)
    wanted: Any = getattr(like, "dtype", None)
    own: Any = getattr(array, "dtype", None)
    if own == wanted or type(array) is not type(like) or isinstance(array, np.ma.MaskedArray):
        return array
    with np.errstate(invalid="ignore"):
        new = array.to(wanted) if is_tensor(array) else array.astype(wanted)
    floats = is_tensor(array) and own.is_floating_point and wanted.is_floating_point
    if floats or bool(((new == array) | (array != array)).all()):  # nan stays nan  # noqa: PLR0124
        return new
    return array if is_tensor(array) or own.kind == "f" else array.astype(float)


def same(one: Any, two: Any) -> bool:
    """Whether two labels or arrays are the same, numbers up to rounding."""
    if all(np.asarray(part).dtype.kind == "f" for part in (one, two)):
        return np.shape(one) == np.shape(two) and np.allclose(one, two, 1e-5, 1e-6, equal_nan=True)
    return np.array_equal(one, two)


def own_copy(array: Any) -> Any:
    """A copy of the user's array, which a function of the user may change."""
    if is_tensor(array):
        return array.clone()
    if is_other(array):
        return restore(np.array(to_numbers(array, "x")), array)
    return array.copy() if isinstance(array, Table) else array.copy(order="K")


def flat(values: np.ndarray) -> np.ndarray:
    """One row of numbers for each row of fields."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def per_row(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """One number per row, with dimensions of size 1 so that it broadcasts over rows like these."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def chunks(n_rows: int, row_numbers: int) -> Iterator[slice]:
    """Slices that cover all rows of ``row_numbers`` numbers, each of about ``CHUNK_NUMBERS`` numbers and at least one row."""
    step = max(1, CHUNK_NUMBERS // max(1, row_numbers))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def permutation(n: int) -> np.ndarray:
    """The numbers from 0 to n - 1 in a random order, the same one at every call."""
    return np.random.default_rng(0).permutation(n)


@contextmanager
def few_threads(n_numbers: float) -> Iterator[None]:
    """Use one thread for work on few numbers: on a busy machine small operations wait for other threads most of the time."""
    if n_numbers > SMALL_NUMBERS:
        yield
        return
    from threadpoolctl import threadpool_limits  # here, to keep the import quick

    torch = sys.modules.get("torch")
    n_threads = 1 if torch is None else torch.get_num_threads()
    if n_threads != 1:
        torch.set_num_threads(1)  # type: ignore[union-attr]
    try:
        with threadpool_limits(1):
            yield
    finally:
        if n_threads != 1:
            torch.set_num_threads(n_threads)  # type: ignore[union-attr]


@contextmanager
def few_workers(n_numbers: int, n_jobs: int | None = None) -> Iterator[None]:
    """Trainings on this many input numbers in ``n_jobs`` processes, each with few threads of OpenMP, but for torch.

    Boosted trees on few rows are as quick with one thread, and 5 to 10 times as quick on a busy machine, where threads wait for each other. The
    number of threads depends on the data alone, so that a second run gives the same answers.
    """
    from joblib import parallel_config  # here, to keep the import quick
    from threadpoolctl import ThreadpoolController

    libraries = ThreadpoolController()
    own = [lib["filepath"] for lib in libraries.info() if lib["user_api"] == "openmp"]
    found = libraries.select(filepath=[path for path in own if "torch" not in path])
    most = [lib["num_threads"] for lib in found.info()]
    limit = min([1 + n_numbers // NUMBERS_PER_THREAD, *most])
    jobs = nullcontext() if n_jobs is None else parallel_config(n_jobs=n_jobs)
    with found.limit(limits=limit), jobs:
        yield


def is_lazy(array: Any) -> bool:
    """Whether an array has a shape and can be sliced, but is not in memory.

    Example:
        >>> is_lazy(np.zeros(3))
        False
    """
    if isinstance(array, np.ndarray) or is_tensor(array) or is_other(array):
        return isinstance(array, np.memmap)
    if any(hasattr(array, name) for name in ("__dlpack__", "to_numpy", "toarray")):
        return False
    needed = ("shape", "dtype", "__getitem__")
    return all(hasattr(array, name) for name in needed) and len(array.shape) > 0


def stored(array: Any) -> Any:
    """An array that is not in memory as a NumPy array in a scratch file; any other array as it is."""
    if not is_lazy(array):
        return array
    if isinstance(array, np.memmap):
        return np.asarray(array)
    shape, dtype, folder = tuple(array.shape), np.dtype(array.dtype), tempfile.gettempdir()
    n_bytes, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OSError(
            f"an array of {n_bytes / 2**30:.3g} GiB is not in memory, but {folder} has {free / 2**30:.3g} GiB for a scratch file; set "
            "the environment variable TMPDIR to a folder with more space, or pass fewer rows."
        )
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
