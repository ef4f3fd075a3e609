"""Cells without errors. Such a cell has the error nan, and no quantile, mean or loss counts it.

A cell is masked in all samples, such as land, or absent from some samples, such as clouds. A cell in which all errors are zero, such as
a fixed boundary value, is exact: it would count as covered whatever the bound is, so that the other cells would be covered less often
than the quantile level. The bound of an exact cell is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import chunks
from geoq.surrogate import answers_of, on_scale


@dataclass(frozen=True)
class Mask:
    """The cells of an output that are masked in all samples, and what replaces the values that are absent from some samples.

    Attributes:
        cells: true where an output is masked in all samples. Predictions have 0 there.
        fill: the mean of y over the samples in which a cell is present; None if all samples have the same mask.

    Example:
        >>> y = np.ma.masked_equal([[1.0, -9.0], [2.0, -9.0]], -9.0)
        >>> Mask.of(y).cells
        array([False,  True])
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

    def for_training(self, y: Any) -> Any:
        """What recipes receive: 0 in cells that are masked in all samples; otherwise a masked array with nan under the mask."""
        values, mask = np.ma.getdata(y), np.ma.getmaskarray(y)
        if self.fill is None:
            return np.where(self.cells, values.dtype.type(0), values)
        under = values.dtype.type(np.nan if values.dtype.kind == "f" else 0)
        return np.ma.array(np.where(mask, under, values), mask=mask)

    def filled(self, prediction: np.ndarray) -> np.ndarray:
        """A prediction with 0 in the masked cells, and the mean of y where it is absent (nan) from a sample."""
        if prediction.shape[1:] != self.cells.shape:
            return prediction
        shown = np.where(self.cells, prediction.dtype.type(0), prediction)
        if self.fill is not None:
            absent, cells = np.isnan(shown), tuple(range(1, shown.ndim))
            # A prediction without any cell stays nan: its query has no answer.
            some = ~(absent | self.cells).all(axis=cells, keepdims=True)
            shown = np.where(absent & some, self.fill, shown)
        return shown.astype(prediction.dtype)

    def hidden(self, rows: Any) -> Any:
        """A masked array with this mask; rows of another shape are unchanged, and tensors get nan."""
        if tuple(rows.shape[1:]) != self.cells.shape:
            return rows
        if not isinstance(rows, np.ndarray):
            rows[:, rows.new_tensor(self.cells).bool()] = np.nan
            return rows
        gaps = np.isnan(rows) if self.fill is not None else False
        return np.ma.array(rows, mask=np.broadcast_to(self.cells, rows.shape) | gaps)


def masked_where_nan(values: np.ndarray) -> np.ndarray:
    """The values as a masked array, if some of them are nan."""
    gaps = np.isnan(values) if values.dtype.kind == "f" else np.zeros(1, dtype=bool)
    return np.ma.array(values, mask=gaps) if gaps.any() else values


def outputs_with_nan(y: np.ndarray) -> Float[np.ndarray, " n *output"]:
    """Reference outputs as floating-point numbers, with nan under a mask."""
    values = np.ma.getdata(y)
    if values.dtype.kind != "f":
        values = values.astype(float)
    return np.where(np.ma.getmaskarray(y), np.nan, values).astype(values.dtype)


def exact_cells(errors: Sequence[np.ndarray]) -> Bool[np.ndarray, " *field"] | None:
    """The cells in which all errors that count are zero; None if there are none, or if all errors are zero."""
    wrong = np.zeros(errors[0].shape[1:], dtype=bool)
    for error in errors:
        for part in chunks(len(error), wrong.size):
            wrong |= ((error[part] != 0) & ~np.isnan(error[part])).any(axis=0)
    return None if wrong.all() or not wrong.any() else ~wrong


def filled_with_means(error: Float[np.ndarray, " n *field"]) -> Float[np.ndarray, " n *field"]:
    """Errors or outputs without gaps: an absent value is the mean of its cell, and 0 in a cell without any value."""
    absent = np.isnan(error)
    if not absent.any():
        return error
    n_present = (~absent).sum(axis=0)
    mean = np.where(absent, 0, error).sum(axis=0) / np.maximum(n_present, 1)
    return np.where(absent, mean, error).astype(error.dtype)


def predict(surrogate: Any, mask: Mask | None, x: Any, error_functional: Any = None) -> np.ndarray:
    """The predictions of a surrogate, with the mask of y, on the scale of their error; they can be nan or infinite."""
    answers = on_scale(answers_of(surrogate, x, "surrogate"), error_functional)
    return answers if mask is None else mask.filled(answers)


def with_gaps(values: np.ndarray, gaps: np.ndarray | None) -> np.ndarray:
    """Fields with nan in the cells that the surrogate has masked."""
    if gaps is None or values.shape != gaps.shape or not gaps.any():
        return values
    return np.where(gaps, np.nan, values)
