"""Arrays in and out of geoq, work in chunks, and the number of threads.

Users pass NumPy arrays, torch tensors or data frames. Their callables receive the same kind of array, and results are returned in that
kind. Inside geoq there are only tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

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
    """Convert an array to a floating-point tensor, without a copy where possible.

    Args:
        array: a NumPy array or a tensor of real numbers, integers or booleans.
        name: the name of the argument, for the error message.

    Raises:
        TypeError: the array holds something else than real numbers.
    """
    if isinstance(array, Table):
        array = array.array
    if isinstance(array, np.ndarray):
        if array.dtype == object or not (
            np.issubdtype(array.dtype, np.number) or array.dtype == bool
        ):
            raise TypeError(
                f"{name} has dtype {array.dtype}, but must hold real numbers; convert it first."
            )
        # torch shares the memory of writable, native, positively strided arrays; anything else is copied.
        shareable = (
            array.flags.writeable
            and array.dtype.isnative
            and all(s >= 0 for s in array.strides)
        )
        tensor = torch.from_numpy(
            array if shareable else np.array(array, dtype=array.dtype.newbyteorder("="))
        )
    elif isinstance(array, Tensor):
        tensor = array.detach()
    else:
        raise TypeError(
            f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}; "
            f"convert it, for example with numpy.asarray({name})."
        )
    if tensor.is_complex():
        raise TypeError(
            f"{name} is complex; pass its real and imaginary parts as two coordinates."
        )
    if not tensor.is_floating_point():
        return tensor.to(torch.float64)
    return (
        tensor.to(torch.float32)
        if tensor.dtype in (torch.float16, torch.bfloat16)
        else tensor
    )


def restore(tensor: Tensor, like: Rows) -> Array:
    """Convert a tensor to the kind of array that ``like`` is: NumPy, or torch on the device of ``like``."""
    if isinstance(like, Tensor):
        return tensor.to(like.device)
    return tensor.cpu().numpy()


def take(array: RowsT, rows: Int[Tensor, " n_rows"]) -> RowsT:
    """Select rows of a user's array and keep its kind."""
    where = rows.to(array.device) if isinstance(array, Tensor) else rows.cpu().numpy()
    return cast(RowsT, array[where])


def chunks(n_rows: int, row_numbers: int) -> Iterator[slice]:
    """Slices that cover all rows, each of about ``CHUNK_NUMBERS`` numbers and at least one row.

    Args:
        n_rows: the number of rows.
        row_numbers: how many numbers one row holds.
    """
    step = max(1, CHUNK_NUMBERS // max(1, row_numbers))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


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
