"""Arrays in and out of geoq, work in chunks, and the number of threads.

Users pass NumPy arrays, torch tensors or data frames. Their callables receive the same kind of array, and results are returned in that
kind. Inside geoq there are only tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from geoq.scratch import empty_like_rows, in_use, room, shared
from geoq.table import Frame, Table

Array: TypeAlias = np.ndarray | Tensor
# What geoq carries to the user's callables.
Rows: TypeAlias = np.ndarray | Tensor | Table
# What users pass.
Inputs: TypeAlias = Rows | Frame
RowsT = TypeVar("RowsT", bound=Rows)

# User callables receive rows in chunks of about this many input numbers. This bounds the memory for fields (36 states of
# 240 x 480) and is one chunk for most tables (262,144 rows of 16 columns).
CHUNK_NUMBERS = 2**22
# Work on fewer numbers than this uses one thread.
SMALL_NUMBERS = 2**19


def to_tensor(array: Rows, name: str) -> Tensor:
    """Convert an array of real numbers, integers or booleans to a floating-point tensor, without a copy where possible.

    Anything else, and masked values, are refused under the name of the argument.
    """
    if isinstance(array, Table):
        array = array.array
    if isinstance(array, np.ndarray):
        tensor = _from_numpy(array, name)
    elif isinstance(array, Tensor):
        way_out = _instead_of_tensor(array)
        if way_out:
            raise TypeError(
                f"{name} is a {way_out[0]} tensor, but must be dense; pass {name}.{way_out[1]}."
            )
        tensor = array.detach()
    else:
        raise TypeError(
            f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}; "
            f"{_instead(array, name)}."
        )
    if tensor.is_complex():
        raise TypeError(
            f"{name} is complex; pass its real and imaginary parts as two coordinates."
        )
    if not tensor.is_floating_point():
        return tensor.to(torch.float64)
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(torch.float32) if is_half else tensor


def _from_numpy(array: np.ndarray, name: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        if (mask := np.ma.getmaskarray(array)).any():
            same = mask.ndim > 1 and not mask[0].all() and bool((mask == mask[0]).all())
            way_out = (
                f"the same places are masked in all rows: keep the others, {name}[:, ~{name}.mask[0]].data, here and in the "
                "inputs or outputs of the surrogate"
                if same
                else f"leave these rows out, or replace the values, for example with {name}.filled(0)"
            )
            raise ValueError(
                f"{name} is masked in {mask.sum()} of {mask.size} values, and the numbers under a mask mean nothing; {way_out}."
            )
        array = np.ma.getdata(array)
    kind = array.dtype.kind
    if kind not in "biufc" or array.dtype.itemsize > (16 if kind == "c" else 8):
        ways_out = {
            "m": f"divide it by its unit, {name} / numpy.timedelta64(1, 's')",
            "M": f"pass the time since a date, ({name} - {name}[0]) / numpy.timedelta64(1, 's')",
            "f": f"pass {name}.astype(float)",
            "c": "pass its real and imaginary parts as two coordinates",
        }
        raise TypeError(
            f"{name} has dtype {array.dtype}, but must hold real numbers of at most 64 bits; "
            f"{ways_out.get(kind, 'convert it first')}."
        )
    # torch shares the memory of native, positively strided arrays; anything else is copied.
    if not array.dtype.isnative or any(s < 0 for s in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    return shared(array)


def _instead_of_tensor(tensor: Tensor) -> tuple[str, str] | None:
    """The kind of an unusual tensor, and the method that makes it dense."""
    if tensor.is_nested:
        return "nested", "to_padded_tensor(0.0)"
    if tensor.layout != torch.strided:
        return "sparse", "to_dense()"
    if tensor.is_quantized:
        return "quantised", "dequantize()"
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return str(tensor.dtype).removeprefix("torch."), "float()"
    if tensor.is_meta:
        return "meta", "to_empty(device='cpu') with its values"
    return None


def _instead(array: object, name: str) -> str:
    """What to pass in place of something that is not an array."""
    if hasattr(array, "toarray"):
        return f"pass {name}.toarray()"
    if isinstance(array, Mapping):
        return f"pass its values as columns, numpy.column_stack([*{name}.values()])"
    if isinstance(array, Iterator):
        return f"pass numpy.array([*{name}])"
    if isinstance(array, str | bytes):
        return "read the data first, for example with numpy.load"
    return f"convert it, for example with numpy.asarray({name})"


def restore(tensor: Tensor, like: Rows) -> Array:
    """Convert a tensor to the kind of array that ``like`` is: NumPy, or torch on the device of ``like``."""
    if isinstance(like, Tensor):
        return tensor.to(like.device)
    return tensor.cpu().numpy()


def own_arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """Tensors of the CPU as NumPy arrays, which take less time for small arrays and for logarithms; others unchanged."""
    return tuple(t.numpy() if t.device.type == "cpu" else t for t in tensors)


def functions_of(array: Any) -> Any:
    """NumPy or torch, whose functions (``log``, ``maximum``, ...) have the same names."""
    return np if isinstance(array, np.ndarray) else torch


def rows_of(values: Any, rows: Any) -> Any:
    """Chosen rows of a tensor or an array."""
    if isinstance(values, np.ndarray):
        return values.take(rows, axis=0)
    return values[rows]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def take(array: RowsT, rows: Int[Tensor, " n_rows"]) -> RowsT:
    """Select rows of a user's array and keep its kind."""
    if isinstance(array, Tensor):
        return cast(RowsT, gathered(array, rows.to(array.device)))
    where = rows.cpu().numpy()
    if not in_use() or type(array) is not np.ndarray:
        return cast(RowsT, array[where])
    taken = room((len(where), *array.shape[1:]), array.dtype)
    for part in chunks(len(where), int(np.prod(array.shape[1:]))):
        taken[part] = array[where[part]]
    return cast(RowsT, taken)


def gathered(values: Tensor, rows: Tensor) -> Tensor:
    """Chosen rows; in a scratch file if they are large and scratch files are in use."""
    if not in_use():
        return values[rows]
    return in_chunks(lambda part: values[rows[part]], len(rows), values[:1])


def converted(values: Tensor, like: Tensor) -> Tensor:
    """The values with the dtype and on the device of another tensor."""
    if values.dtype == like.dtype and values.device == like.device:
        return values
    return in_chunks(
        lambda part: values[part].to(like), len(values), values[:1].to(like)
    )


def in_chunks(
    rows_of_part: Callable[[slice], Tensor], n_rows: int, like: Tensor
) -> Tensor:
    """All rows of a result like a given row, computed in chunks; in a scratch file if it is large and scratch files are in use."""
    if not in_use():
        return rows_of_part(slice(0, n_rows))
    place = empty_like_rows(like, n_rows)
    for part in chunks(n_rows, like.numel()):
        place[part] = rows_of_part(part)
    return place


def chunks(n_rows: int, row_numbers: int) -> Iterator[slice]:
    """Slices that cover all rows of ``row_numbers`` numbers, each of about ``CHUNK_NUMBERS`` numbers and at least one row."""
    step = max(1, CHUNK_NUMBERS // max(1, row_numbers))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def permutation(n: int) -> Int[Tensor, " n"]:
    """The numbers from 0 to n - 1 in a random order, the same one at every call."""
    return torch.from_numpy(np.random.default_rng(0).permutation(n))


def nonzero_counts(rows: Shaped[Tensor, " n *field"]) -> Int[Tensor, " *field"]:
    """Count the rows that are nonzero (or true) in each cell.

    The count runs in chunks because ``torch.count_nonzero`` allocates eight bytes for every number.
    """
    total = torch.zeros_like(rows[0], dtype=torch.long)
    for part in chunks(len(rows), 8 * rows[0].numel()):
        total += rows[part].count_nonzero(dim=0)
    return total


@contextmanager
def few_threads(n_numbers: int) -> Iterator[None]:
    """Use one thread for work on few numbers.

    On a busy machine small operations spend their time waiting for other threads. Measured on two busy cores: the demo
    took 325 s with two threads and 20 s with one thread, most of it in scikit-learn and in the training of small networks.
    """
    if n_numbers > SMALL_NUMBERS:
        yield
        return
    from threadpoolctl import threadpool_limits  # here, to keep the import quick

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(n_threads)
