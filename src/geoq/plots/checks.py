"""Refusals of unusable arguments of the pictures."""

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from geoq.arrays import Array, to_tensor
from geoq.regions.field_scores import grid_axes


def check_figure(figure: object) -> None:
    """Refuse anything that is not a figure, such as axes."""
    if not isinstance(figure, FigureBase):
        raise TypeError(
            f"figure is a {type(figure).__name__}, but an empty figure is needed; pass figure=matplotlib.figure.Figure() or "
            "matplotlib.pyplot.figure() first."
        )


def check_axes(axes: object) -> None:
    """Refuse anything that is not axes, such as a figure."""
    if not isinstance(axes, Axes):
        raise TypeError(
            f"axes is a {type(axes).__name__}, but axes are needed; pass axes=figure.subplots()."
        )


def numbers_of(values: Array, name: str = "values") -> np.ndarray:
    """The values as a NumPy array."""
    return np.asarray(to_tensor(values, name).cpu().numpy())


def true_errors(values: Array, name: str, error_hat: Array) -> np.ndarray:
    """The errors of all queries as numbers; refused if they cannot be the errors of these bounds.

    The bound of a diverged rollout is infinite, and its error can be missing there.
    """
    numbers = numbers_of(values, name)
    if numbers.shape != tuple(error_hat.shape):
        raise ValueError(
            f"{name} has shape {numbers.shape}, but the bounds have shape {tuple(error_hat.shape)}; pass the errors of all "
            "queries, one for each bound."
        )
    missing = ~np.isfinite(numbers) & np.isfinite(numbers_of(error_hat))
    if missing.any():
        raise ValueError(
            f"{name} is not finite in {missing.sum()} of {numbers.size} places where the bound is finite; assess only "
            "queries with known errors."
        )
    if (numbers < 0).any():
        raise ValueError(
            f"{name} contains {np.nanmin(numbers):.3g}, but an error is never negative; pass errors and not outputs: "
            "abs(y - assessment.prediction)."
        )
    return numbers


def true_outputs(values: Array, prediction: Array) -> None:
    """Refuse reference outputs that do not have the shape of the predictions."""
    shape = numbers_of(values, "truth").shape
    if shape != tuple(prediction.shape):
        raise ValueError(
            f"truth has shape {shape}, but the predictions have shape {tuple(prediction.shape)}; pass the reference outputs of all "
            "queries."
        )


def grid_of(prediction: Array, extent: Sequence[float] | None) -> int:
    """The number of axes of the grid of the predictions, from the extent or from their shape; 1 or 2."""
    shape = tuple(prediction.shape[1:])
    if extent is None:
        n_spatial = grid_axes(shape) if shape else 0
    else:
        numbers = [float(end) for end in extent]
        n_spatial = {2: 1, 4: 2}.get(len(numbers), 0)
        if not n_spatial or not np.isfinite(numbers).all():
            raise ValueError(
                f"extent={extent!r}, but it has the edges of the grid; pass (left, right) for a line, or (left, right, bottom, top) "
                "for a plane."
            )
    if n_spatial == 3:
        raise ValueError(
            f"the prediction of a query has shape {shape}, a grid with three axes, but a picture has two; draw a layer of it "
            "with Matplotlib: axes.imshow(assessment.error_hat[row, ..., 0])."
        )
    if not 0 < n_spatial <= len(shape):
        advice = "lower the number of edges" if shape else "use plots.summary"
        raise ValueError(
            f"the prediction of a query has shape {shape}, so it is no field that can be drawn on "
            f"{'a plane' if n_spatial == 2 else 'a grid'}; {advice}."
        )
    return n_spatial


def row_index(value: SupportsIndex, n: int, name: str, members: str) -> int:
    """The number of a row; refused unless there is such a row."""
    if not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}, but an integer is needed; choose one of 0 to {n - 1}."
        )
    number = index(value)
    if not 0 <= number < n:
        raise ValueError(
            f"{name}={number}, but {members} are 0 to {n - 1}; choose one of them."
        )
    return number


def channels_of(
    values: Float[Array, " 1 *field"], name: str, n_spatial: int
) -> Float[np.ndarray, " n_channels *grid"]:
    """The channels of one query's field."""
    shape = tuple(values.shape[1:])
    if len(shape) < n_spatial:
        raise ValueError(
            f"{name} of a query has shape {shape}, but the grid has {n_spatial} axes; draw all queries with plots.summary."
        )
    return numbers_of(values, name).reshape(-1, *shape[len(shape) - n_spatial :])
