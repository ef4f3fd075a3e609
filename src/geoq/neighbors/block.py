"""A block of queries that are answered together."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from geoq.neighbors.left_out import LeftOut
from geoq.neighbors.rows import Rows, as_slice, split


class Block(NamedTuple):
    """Some rows of all queries, and what these may not see."""

    queries: Float[Tensor, " n_queries n_dims"]
    rows: Rows
    left_out: LeftOut | None

    @property
    def indices(self) -> Int[Tensor, " n_block"]:
        """The rows as indices, also where they are a slice."""
        if isinstance(self.rows, Tensor):
            return self.rows
        device = self.queries.device
        return torch.arange(self.rows.start, self.rows.stop, device=device)

    @property
    def size(self) -> int:
        if isinstance(self.rows, Tensor):
            return len(self.rows)
        return len(range(self.rows.start, self.rows.stop))

    @property
    def n_left_out(self) -> int:
        """How many points, at most, one of the queries may not see."""
        return self.left_out.most if self.left_out else 0

    def split(self, size: int) -> "Iterator[Block]":
        """The same queries in blocks of at most the given size."""
        for part in split(self.rows, size):
            rows = as_slice(part) if isinstance(part, Tensor) else part
            yield self._replace(rows=rows)
