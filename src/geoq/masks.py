"""Cells without errors: masked cells, which are no part of the problem, and exact cells, whose errors are all zero.

Land in an ocean model is masked or filled with zeros. Fixed boundary values and copied lags are predicted exactly. Such cells count
as covered whatever the bound is. If they were part of a quantile over all cells, the other cells would be covered less often than
the quantile level. Therefore they are left out of every quantile, and their bound is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from geoq.arrays import Array, nonzero_counts
from geoq.surrogate import TrainSurrogate, TrainTogether
from geoq.training.fold_surrogates import (
    FoldSurrogates,
    PredictedFolds,
    TrainedFolds,
)


def exact_coordinates(
    errors: Sequence[Float[Tensor, " _ *field"]],
) -> Bool[Tensor, " *field"] | None:
    """The coordinates in which all errors are exactly zero; None if there are none, or if all errors are zero."""
    exact = torch.stack([nonzero_counts(error) == 0 for error in errors]).all(dim=0)
    return exact if exact.any() and not exact.all() else None


def without(
    coordinates: Bool[Tensor, " *field"] | None, values: Shaped[Tensor, " n *values"]
) -> Shaped[Tensor, " n n_left"]:
    """Values with one row per query, flattened, without these coordinates."""
    flat = values.reshape(len(values), -1)
    if coordinates is None:
        return flat
    return flat[:, ~coordinates.flatten().to(flat.device)]


@dataclass(frozen=True, eq=False)
class Mask:
    """The cells of an output that are masked in all samples.

    Callables of the user receive and return arrays with any values in these cells; geoq replaces the values by 0.

    Attributes:
        cells: true where an output is masked.

    Example:
        >>> y = np.ma.masked_equal([[1.0, -9.0], [2.0, -9.0]], -9.0)
        >>> Mask.of(y).filled(y)
        array([[1., 0.],
               [2., 0.]])
    """

    cells: Bool[np.ndarray, " *output"]

    @staticmethod
    def of(y: Any) -> "Mask | None":
        """The mask of a masked array; None if there is no mask, or if it differs between samples."""
        if not isinstance(y, np.ma.MaskedArray) or y.ndim < 2 or not len(y):
            return None
        mask = np.ma.getmaskarray(y)
        same = mask[0].any() and not mask[0].all() and (mask == mask[0]).all()
        return Mask(mask[0].copy()) if same else None

    def filled(self, rows: Any) -> Any:
        """Rows with 0 in the masked cells. Rows of another shape, and masks of other cells, stay and are refused later."""
        if isinstance(rows, Tensor):
            if tuple(rows.shape[1:]) != self.cells.shape:
                return rows
            return rows.masked_fill(torch.as_tensor(self.cells, device=rows.device), 0)
        values = np.ma.getdata(rows)
        if values.shape[1:] != self.cells.shape:
            return rows
        plain = np.where(self.cells, values.dtype.type(0), values)
        others = np.ma.getmaskarray(rows) & ~self.cells
        return np.ma.array(plain, mask=others) if others.any() else plain

    def hidden(self, rows: Array) -> Array:
        """A masked array with this mask, or a tensor with nan in the masked cells; rows of another shape are unchanged."""
        if tuple(rows.shape[1:]) != self.cells.shape:
            return rows
        if isinstance(rows, Tensor):
            cells = torch.as_tensor(self.cells, device=rows.device)
            return rows.masked_fill(cells, torch.nan)
        return np.ma.array(rows, mask=np.broadcast_to(self.cells, rows.shape))


def filled(mask: Mask | None, rows: Any) -> Any:
    """Rows with 0 in the masked cells, if there is a mask."""
    return rows if mask is None else mask.filled(rows)


def outside(
    mask: Mask | None, error: Float[Tensor, " n *field"]
) -> Float[Tensor, " n n_shown"]:
    """The errors outside the mask; all of them if there is not one error for each output."""
    same = mask is not None and tuple(error.shape[1:]) == mask.cells.shape
    return without(torch.as_tensor(mask.cells) if mask and same else None, error)


def hidden(mask: Mask | None, rows: Array) -> Array:
    """Rows with the mask, if there is one."""
    return rows if mask is None else mask.hidden(rows)


@dataclass(frozen=True)
class MaskedSurrogate:
    """A surrogate whose predictions are 0 in the masked cells."""

    surrogate: Any
    mask: Mask

    def __call__(self, x: Any) -> Any:
        return self.mask.filled(self.surrogate(x))


def masked_surrogate(surrogate: Any, mask: Mask | None) -> Any:
    """The surrogate, which is checked later, with predictions of 0 in the masked cells, if there is a mask."""
    return surrogate if mask is None else MaskedSurrogate(surrogate, mask)


@dataclass(frozen=True)
class _MaskedRecipe:
    """A recipe whose surrogates predict 0 in the masked cells."""

    train_surrogate: TrainSurrogate
    mask: Mask

    def __call__(self, x: Any, y: Any) -> MaskedSurrogate:
        return MaskedSurrogate(self.train_surrogate(x, y), self.mask)


@dataclass(frozen=True)
class _MaskedTogether:
    """The same for a recipe that trains several surrogates at once."""

    train_surrogate: TrainTogether
    mask: Mask

    def __call__(self, x: Any, y: Any) -> MaskedSurrogate:
        return MaskedSurrogate(self.train_surrogate(x, y), self.mask)

    def n_together(self, x: Any, y: Any) -> int:
        return self.train_surrogate.n_together(x, y)

    def train_many(
        self, x: Any, y: Any, subsets: Sequence[Any], seeds: Any = None
    ) -> list[MaskedSurrogate]:
        trained = self.train_surrogate.train_many(x, y, subsets, seeds)
        return [MaskedSurrogate(surrogate, self.mask) for surrogate in trained]


def masked_folds(
    source: TrainSurrogate | FoldSurrogates | None, mask: Mask | None
) -> TrainSurrogate | FoldSurrogates | None:
    """The recipe or source of the fold surrogates, with predictions of 0 in the masked cells."""
    if mask is None or source is None:
        return source
    if isinstance(source, TrainedFolds):
        return TrainedFolds([MaskedSurrogate(s, mask) for s in source.surrogates])
    if isinstance(source, PredictedFolds):
        return PredictedFolds([mask.filled(array) for array in source.arrays])
    if isinstance(source, TrainTogether):
        return _MaskedTogether(source, mask)
    return source if isinstance(source, FoldSurrogates) else _MaskedRecipe(source, mask)
