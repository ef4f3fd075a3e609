"""Refusals of unusable arguments of the pictures."""

from operator import index
from typing import SupportsIndex

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from geoq.arrays import Array, to_tensor


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
    numbers: np.ndarray = to_tensor(values, name).cpu().numpy()
    return numbers


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
        advice = "pass n_spatial=1" if shape else "draw all queries with plots.summary"
        raise ValueError(
            f"n_spatial={n_spatial}, but {name} of a query has shape {shape}; {advice}."
        )
    return numbers_of(values, name).reshape(-1, *shape[len(shape) - n_spatial :])
