"""Queries without an answer: a batch is answered even if some of its queries cannot be.

A query has no answer if one of its inputs is missing, infinite or too far from the data for a distance, or if the surrogate does
not return finite numbers for it. Its row is computed at a stand-in, a row of the data, and then filled with nan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from geoq.arrays import Rows, RowsT, take, to_tensor
from geoq.columns import ColumnCoordinates
from geoq.table import Names, Schema, Table

# Inputs more standard deviations away from the data have no distance to it: squares overflow in single precision.
FARTHEST = 1e15


def unusable_rows(
    standardised: Float[Tensor, " n *coordinates"],
    inputs: Float[Tensor, " n *coordinates"],
) -> Bool[Tensor, " n"] | None:
    """Which rows have missing, infinite or too distant inputs; None if there are none.

    The inputs themselves are needed, because the coordinate of a negative infinite input is finite after a logarithm.
    """
    # Two numbers decide for nearly all batches; nan makes the comparison false.
    if standardised.abs().max() <= FARTHEST and inputs.amin() > -torch.inf:
        return None
    usable = (standardised.abs() <= FARTHEST) & inputs.isfinite()
    return ~usable.reshape(len(usable), -1).all(dim=1)


def rows_not_finite(values: Float[Tensor, " n *shape"]) -> Bool[Tensor, " n"] | None:
    """Which rows contain nan or infinity; None if there are none."""
    finite = values.isfinite()
    return None if finite.all() else ~finite.reshape(len(finite), -1).all(dim=1)


def either(
    one: Bool[Tensor, " n"] | None, other: Bool[Tensor, " n"] | None
) -> Bool[Tensor, " n"] | None:
    """The rows of both masks, of which None has no rows."""
    if one is None or other is None:
        return other if one is None else one
    return one | other.to(one.device)


def with_stand_in(x: RowsT, lost: Bool[Tensor, " n"] | None, stand_in: Any) -> RowsT:
    """The queries, with the stand-in in place of the lost ones; for a table, a query with an answer if there is one."""
    if lost is None:
        return x
    if isinstance(x, Table):
        answered = (~lost).nonzero()[:, 0]
        if not len(answered):
            if not isinstance(stand_in, Table):
                return cast(RowsT, x)
            one: Table = stand_in
            return cast(RowsT, take(one, torch.zeros(len(x), dtype=torch.long)))
        rows = torch.arange(len(x), device=lost.device)
        return take(x, torch.where(lost, answered[0], rows))
    if isinstance(x, np.ndarray):
        filled = x.copy()
        filled[lost.cpu().numpy()] = np.asarray(stand_in)
        return filled
    mask = lost.to(x.device).reshape(-1, *(1,) * (x.ndim - 1))
    return cast(RowsT, torch.where(mask, torch.as_tensor(stand_in).to(x), x))


def blank(
    values: Shaped[Tensor, " n *shape"], lost: Bool[Tensor, " n"] | None
) -> Shaped[Tensor, " n *shape"]:
    """The values with nan in the lost rows; flags are False there and row numbers -1."""
    if lost is None:
        return values
    missing = torch.nan if values.is_floating_point() else -1
    if values.dtype == torch.bool:
        missing = False
    mask = lost.to(values.device).reshape(-1, *(1,) * (values.ndim - 1))
    return values.masked_fill(mask, missing)


@dataclass(frozen=True)
class Gaps:
    """The queries of a batch that have no answer.

    Attributes:
        rows: their numbers, in ascending order.
        inputs: their inputs.
        standardised: their standardised inputs.
        noun: what an input is called.
    """

    rows: Int[Tensor, " n_gaps"]
    inputs: Float[Tensor, " n_gaps *coordinates"]
    standardised: Float[Tensor, " n_gaps *standardised"]
    noun: str = "input"

    @staticmethod
    def of(
        lost: Bool[Tensor, " n"] | None,
        x: Rows,
        standardise: Callable[[Tensor], Tensor],
        noun: str = "input",
    ) -> "Gaps | None":
        """The gaps of a batch; None if all queries have an answer."""
        if lost is None:
            return None
        rows = lost.nonzero()[:, 0]
        inputs = to_tensor(take(x, rows), "x")
        if isinstance(standardise, ColumnCoordinates):
            # Other columns may be missing.
            new = standardise.newly_missing(inputs)
            inputs = inputs.masked_fill(inputs.isnan() & ~new, 0.0)
        return Gaps(rows.cpu(), inputs.cpu(), standardise(inputs).cpu(), noun)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, query: int) -> bool:
        return bool((self.rows == query).any())

    def explain(self, query: int, names: Names | None = None) -> str:
        """Why this query has no answer, and what to do."""
        at = int((self.rows == query).nonzero()[0, 0])
        if isinstance(names, Schema):
            j = int(self.inputs[at].isnan().nonzero()[0, 0])
            return f"input {names[j]} is missing, but it is never missing in the data; fill it in, or leave this row out"
        inputs, far = self.inputs[at], ~(self.standardised[at].abs() <= FARTHEST)
        for unusable, advice in (
            (~inputs.isfinite(), "replace it by a number, or leave this row out"),
            (far, "which is too far from the data for a distance; check its unit"),
        ):
            if unusable.any():
                place = tuple(unusable.nonzero()[0].tolist())
                comma = "," if advice.startswith("which") else ";"
                return f"{self._label(place, names)} is {inputs[place].item():g}{comma} {advice}"
        return "the surrogate or the representation did not return finite numbers here; check their output"

    def _label(self, place: tuple[int, ...], names: Names | None) -> str:
        """The name of an input, its number, or its place in a field."""
        if names is None:
            return f"{self.noun} {', '.join(map(str, place))}".rstrip()
        shape = self.inputs.shape[1:]
        return f"{self.noun} {names[int(torch.arange(shape.numel()).reshape(shape)[place])]}"
