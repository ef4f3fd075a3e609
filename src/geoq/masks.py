"""Cells without errors: masked cells, which are no part of the problem, and exact cells, whose errors are all zero.

A cell that is masked in some samples only, for example under clouds, has errors in the other samples. Where it is absent, an
anchor counts with the mean error of the cell, and a calibration tuple with the error of a similar sample that has the cell.

Land in an ocean model is masked or filled with zeros. Fixed boundary values and copied lags are predicted exactly. Such cells count
as covered whatever the bound is. If they were part of a quantile over all cells, the other cells would be covered less often than
the quantile level. Therefore they are left out of every quantile, and their bound is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from geoq.arrays import Array, Rows, chunks, nonzero_counts, to_tensor
from geoq.fold_plan import FoldPlan
from geoq.scratch import room
from geoq.surrogate import ErrorFunctional, TrainSurrogate, TrainTogether, errors_of
from geoq.training.fold_surrogates import FoldSurrogates, PredictedFolds, TrainedFolds
from geoq.training.shared import SharedTraining


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
    """The cells of an output that are masked in all samples, such as land, or in some samples, such as clouds.

    Callables of the user receive and return arrays with any values in masked cells; geoq replaces the values.

    Attributes:
        cells: true where an output is masked in all samples. Its values there are replaced by 0.
        fill: the mean of y over the samples in which a cell is present, which replaces the values of the others; None if all
            samples have the same mask.

    Example:
        >>> y = np.ma.masked_equal([[1.0, -9.0], [2.0, -9.0]], -9.0)
        >>> Mask.of(y).filled(y)
        array([[1., 0.],
               [2., 0.]])
    """

    cells: Bool[np.ndarray, " *output"]
    fill: Float[np.ndarray, " *output"] | None = None

    @staticmethod
    def of(y: Any) -> "Mask | None":
        """The mask of a masked array; None if there is no mask, or if a sample is masked everywhere."""
        if not isinstance(y, np.ma.MaskedArray) or y.ndim < 2 or not len(y):
            return None
        mask = np.ma.getmaskarray(y)
        if not mask.any() or mask.reshape(len(mask), -1).all(axis=1).any():
            return None
        cells = np.asarray(mask.all(axis=0))
        if (mask == cells).all():
            return Mask(cells)
        return Mask(cells, np.ma.filled(y.mean(axis=0), 0).astype(y.dtype))

    def absent(self, y: Any) -> Bool[Tensor, " n *output"]:
        """Where y is masked, beside the cells that are masked in all samples."""
        return torch.as_tensor(np.ma.getmaskarray(y) & ~self.cells)

    def filled(self, rows: Any) -> Any:
        """Rows without masked cells. Rows of another shape, and masks of other cells, stay and are refused later."""
        if isinstance(rows, Tensor):
            if tuple(rows.shape[1:]) != self.cells.shape:
                return rows
            return rows.masked_fill(torch.as_tensor(self.cells, device=rows.device), 0)
        values = np.ma.getdata(rows)
        if values.shape[1:] != self.cells.shape:
            return rows
        others = np.ma.getmaskarray(rows) & ~self.cells
        zero, fill = values.dtype.type(0), self.fill
        plain = room(values.shape, values.dtype)
        for part in chunks(len(values), self.cells.size):
            plain[part] = np.where(self.cells, zero, values[part])
            if fill is not None:
                missing = others[part] | np.isnan(plain[part])
                plain[part] = np.where(missing, fill, plain[part])
        foreign = fill is None and others.any()
        return np.ma.array(plain, mask=others) if foreign else plain

    def with_gaps(self, rows: Any) -> Any:
        """A prediction with 0 in the cells that are masked in all samples, and nan in the others that it masks."""
        values = np.ma.getdata(rows)
        if values.shape[1:] != self.cells.shape:
            return rows
        shown = np.where(np.ma.getmaskarray(rows), np.nan, values)
        return np.where(self.cells, 0, shown).astype(values.dtype)

    def hidden(self, rows: Array) -> Array:
        """A masked array with this mask, or a tensor with nan in the masked cells; rows of another shape are unchanged."""
        if tuple(rows.shape[1:]) != self.cells.shape:
            return rows
        if isinstance(rows, Tensor):
            cells = torch.as_tensor(self.cells, device=rows.device)
            return rows.masked_fill(cells, torch.nan)
        gaps = np.isnan(rows) if self.fill is not None else False
        return np.ma.array(rows, mask=np.broadcast_to(self.cells, rows.shape) | gaps)


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


def some_absent(mask: Mask | None, y: Any) -> tuple[Tensor | None, Any]:
    """Where y is masked in some samples only, and what recipes receive then: a masked array with nan under the mask."""
    if mask is None or mask.fill is None:
        return None, filled(mask, y)
    under = np.nan if y.dtype.kind == "f" else 0
    values = np.where(np.ma.getmaskarray(y), y.dtype.type(under), np.ma.getdata(y))
    return mask.absent(y), np.ma.array(values, mask=np.ma.getmaskarray(y))


def present_pairs(mask: Mask | None, y: Any) -> tuple[Any, Tensor | None]:
    """The outputs of pairs without masked cells, and which cells are masked beside those that are masked in all samples."""
    own = Mask.of(y)
    if own is None:
        return filled(mask, y), None
    absent = np.ma.getmaskarray(y)
    fill = np.zeros_like(absent[0]) if mask is None or mask.fill is None else mask.fill
    if mask is not None and mask.cells.shape == absent.shape[1:]:
        absent = absent & ~mask.cells
    values = np.where(np.ma.getmaskarray(y), fill, np.ma.getdata(y))
    values = values.astype(y.dtype)
    return filled(mask, values), torch.as_tensor(absent) if absent.any() else None


def present_mean(
    error: Float[Tensor, " n *field"], absent: Bool[Tensor, " n *output"] | None
) -> Float[Tensor, " n *field"]:
    """The errors; an absent cell has the mean error of this cell over the samples in which it is present."""
    if absent is None or absent.shape != error.shape:
        return error
    n_present = (~absent).sum(dim=0)
    mean = error.masked_fill(absent, 0).sum(dim=0) / n_present.clamp(min=1)
    if not bool(n_present.all()):
        mean = torch.where(n_present > 0, mean, mean[n_present > 0].mean())
    return torch.where(absent, mean, error)


def without_absent(
    prediction: Float[Tensor, " n *output"], y: Tensor, absent: Tensor | None
) -> Float[Tensor, " n *output"]:
    """The predictions, with the values of y in absent cells, so that they have no error there."""
    if absent is None or prediction.shape != y.shape:
        return prediction
    return torch.where(absent, y.to(prediction), prediction)


def from_donors(
    error: Float[Tensor, " n *field"],
    absent: Bool[Tensor, " n *output"] | None,
    donors: Int[Tensor, " n n_donors"] | None,
) -> Float[Tensor, " n *field"]:
    """The errors; an absent cell has the error of the first donor in which it is present, so that it changes no quantile.

    The donors of an error are rows of the errors; -1 stands for no donor.
    """
    if donors is None or absent is None or absent.shape != error.shape:
        return error
    found, missing = present_mean(error, absent), absent.clone()
    for column in donors.T:
        row = column.clamp(min=0)
        takes = missing & ~absent[row]
        takes &= (column >= 0).reshape(-1, *(1,) * (error.ndim - 1))
        found = torch.where(takes, error[row], found)
        missing &= ~takes
    return found


def donors_of_tuples(
    donors: Int[Tensor, " n_points n_donors"], point: Int[Tensor, " n"], plan: FoldPlan
) -> Int[Tensor, " n n_donors"]:
    """For each tuple, the tuples of its donors in the same family of folds; -1 where there is none."""
    family = torch.as_tensor(plan.per_tuple(plan.family), device=point.device)
    rows = torch.full_like(donors[point], -1)
    for number in family.unique():
        own = (family == number).nonzero()[:, 0]
        row_of = torch.full((len(donors),), -1, device=point.device)
        row_of[point[own]] = own
        rows[own] = row_of[donors[point[own]]]
    return rows


def fold_errors(
    prediction: Float[Tensor, " n *output"],
    error_functional: ErrorFunctional,
    y: Rows,
    absent: Bool[Tensor, " n *output"] | None,
    n_unseen: int,
) -> Float[Tensor, " n *field"]:
    """Errors of a fold surrogate; after the first ``n_unseen`` rows, an absent cell of an anchor has its mean error."""
    if absent is None:
        return errors_of(prediction, error_functional, y)
    exact = without_absent(prediction, to_tensor(y, "y"), absent)
    error = errors_of(exact, error_functional, y)
    error[n_unseen:] = present_mean(error[n_unseen:], absent[n_unseen:])
    return error


@dataclass(frozen=True)
class MaskedSurrogate:
    """A surrogate whose predictions are 0 in the cells that are masked in all samples, and finite in the others."""

    surrogate: Any
    mask: Mask

    def __call__(self, x: Any) -> Any:
        return self.mask.filled(self.surrogate(x))

    def with_gaps(self, x: Any) -> Any:
        """The predictions, with nan in the cells that are absent from them."""
        return self.mask.with_gaps(self.surrogate(x))


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
    if isinstance(source, SharedTraining):
        recipe = _masked_recipe(source.train_surrogate, mask)
        return replace(source, train_surrogate=recipe)
    return (
        source if isinstance(source, FoldSurrogates) else _masked_recipe(source, mask)
    )


def _masked_recipe(recipe: TrainSurrogate, mask: Mask) -> TrainSurrogate:
    if isinstance(recipe, TrainTogether):
        return _MaskedTogether(recipe, mask)
    return _MaskedRecipe(recipe, mask)
