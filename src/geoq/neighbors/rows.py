"""Rows of a tensor, taken in parts that bound the memory for work."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

# A slice, which copies nothing, or indices.
Rows = slice | Tensor


def work_size(x: Tensor) -> int:
    """How many numbers a work array may hold: fits a CPU's cache, fills a GPU."""
    return 2**24 if x.device.type == "cuda" else 2**20


def split(rows: Rows, size: int) -> Iterator[Rows]:
    """The rows in parts of at most the given size, and of one row at least."""
    size = max(1, size)
    if isinstance(rows, Tensor):
        if len(rows):
            yield from rows.split(size)
        return
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def as_slice(rows: Int[Tensor, " n_rows"]) -> Rows:
    """The same rows as a slice, if they are consecutive."""
    if not bool((rows.diff() == 1).all()):
        return rows
    return slice(int(rows[0]), int(rows[0]) + len(rows))
