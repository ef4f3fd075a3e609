"""The user's callables: surrogates, recipes and error functionals, and their evaluation on batches (lines 1 and 4)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.arrays import Array, Rows, RowsT, chunks, restore, to_tensor
from geoq.checks import cast_to_weights, check_array_kind, check_finite, weights_dtype
from geoq.scratch import empty_like_rows
from geoq.table import Table, native, values


@runtime_checkable
class Surrogate(Protocol):
    """The trained model F-hat, kept fixed: an ``nn.Module`` in eval mode, ``model.predict``, or any function of a batch."""

    def __call__(self, x: Array, /) -> Array: ...


@runtime_checkable
class TrainSurrogate(Protocol):
    """A recipe: it trains a new surrogate on the pairs that it receives. It is called once per fold."""

    def __call__(self, x: Array, y: Array, /) -> Surrogate: ...


@runtime_checkable
class TrainTogether(Protocol):
    """A recipe that can train several surrogates at once for less than their separate cost, such as ``geoq.TrainNetwork``.

    Each surrogate has its own subset of the rows and, if seeds are given, its own seed. ``n_together`` returns how many
    surrogates should be trained at once on data of this shape.
    """

    def __call__(self, x: Array, y: Array, /) -> Surrogate: ...

    def n_together(self, x: Array, y: Array, /) -> int: ...

    def train_many(
        self,
        x: Array,
        y: Array,
        subsets: Sequence[Array],
        seeds: Sequence[int] | None = None,
        /,
    ) -> Sequence[Surrogate]: ...


@runtime_checkable
class ErrorFunctional(Protocol):
    """The error rho(y, y_hat): nonnegative, one row per sample, of any shape."""

    def __call__(self, y: Array, y_hat: Array, /) -> Array: ...


def absolute_error(y: Array, y_hat: Array) -> Array:
    r"""Absolute error of each value: a number, a vector or a field per sample.

    .. math:: E(x) = |F(x) - \widehat F(x)|  (eq:pointwise_error)

    Example:
        >>> absolute_error(np.array([1.0, 2.0]), np.array([1.5, 1.0]))
        array([0.5, 1. ])
    """
    error: Array = abs(_difference(y, y_hat))  # type: ignore[assignment]  # NumPy's stubs call it object
    return error


def norm_error(y: Array, y_hat: Array) -> Array:
    r"""Euclidean norm of the error, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2
    """
    return (_difference(y, y_hat).reshape(len(y), -1) ** 2).sum(1) ** 0.5


def relative_norm_error(y: Array, y_hat: Array) -> Array:
    r"""Norm of the error divided by the norm of the reference, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2 / \|F(x)\|_2
    """
    return norm_error(y, y_hat) / norm_error(y, 0 * y_hat)


def _difference(y: Array, y_hat: Array) -> Array:
    if isinstance(y, Tensor) and y.dtype == torch.bool:
        # torch does not subtract from boolean masks; NumPy treats them as 0 and 1.
        y = y.to(torch.uint8)
    return y - y_hat


@torch.no_grad()
def evaluate(function: Callable[[Any], Any], x: Rows, name: str) -> Tensor:
    """Apply a user's function to all rows of x, in chunks; refused unless it returns one finite row per input."""
    answers = answers_of(function, x, name)
    check_finite(answers, f"{name}(x)", f"{name} must return finite numbers")
    return answers


@torch.no_grad()
def answers_of(function: Callable[[Any], Any], x: Rows, name: str) -> Tensor:
    """Apply a user's function to all rows of x, in chunks; its answers can be nan or infinite."""
    if isinstance(function, nn.Module) and not isinstance(x, Table):
        check_array_kind(function, x, name, "x")
    answers: Tensor | None = None
    for rows in chunks(len(x), int(np.prod(x.shape[1:]))):
        # A copy goes in, because a function may work in place, and a copy is kept, because it may use its buffer again.
        part = own_copy(x[rows])
        answer = _one_row_each(_call(function, part, name), len(part), name)
        if answers is None:
            answers = empty_like_rows(answer, len(x))
        if answer.shape[1:] != answers.shape[1:]:
            raise ValueError(
                f"{name} returned rows of shape {tuple(answer.shape[1:])} and of shape {tuple(answers.shape[1:])} for inputs "
                "of the same shape; it must return rows of one shape."
            )
        answers[rows] = answer
    assert answers is not None
    return answers


def own_copy(array: RowsT) -> RowsT:
    """A copy of the user's array, which a function of the user may change."""
    if isinstance(array, Table):
        return cast(RowsT, array.copy())
    copied = array.clone() if isinstance(array, Tensor) else array.copy(order="K")
    return cast(RowsT, copied)


def _call(function: Callable[[Any], Any], x: Rows, name: str) -> Any:
    try:
        return function(native(x))
    except RuntimeError as exc:
        # Checked only after a failure: a module can accept another dtype than the dtype of its weights.
        if not isinstance(function, nn.Module) or weights_dtype(function) in (
            None,
            x.dtype,
        ):
            raise
        raise TypeError(
            f"{name} has weights of {weights_dtype(function)} and failed on x of {x.dtype} ({exc}); pass x and y in the "
            f"dtype of its weights, x{cast_to_weights(function)}."
        ) from exc


@torch.no_grad()
def observe(
    surrogate: Surrogate, error_functional: ErrorFunctional, x: Rows, y: Rows
) -> tuple[Float[Tensor, " n *output"], Float[Tensor, " n *field"]]:
    r"""Predictions of the surrogate and their observed errors.

    .. math:: E(x_i) = \rho(y_i, \widehat F(x_i))  (eq:pointwise_error)
    """
    prediction = evaluate(surrogate, x, "surrogate")
    return prediction, errors_of(prediction, error_functional, y)


@torch.no_grad()
def errors_of(
    prediction: Float[Tensor, " n *output"], error_functional: ErrorFunctional, y: Rows
) -> Float[Tensor, " n *field"]:
    """Errors of predictions with known reference outputs, computed in chunks."""
    y = cast(Array, values(y))
    if prediction.shape != y.shape:
        raise ValueError(
            f"surrogate returned shape {tuple(prediction.shape)} for y of shape {tuple(y.shape)}; "
            "reshape y or the surrogate's output until they agree."
        )
    row_numbers = int(np.prod(y.shape[1:]))
    error: Tensor | None = None
    for part in chunks(len(y), row_numbers):
        given = own_copy(y[part]), restore(prediction[part].clone(), y)
        found = _one_row_each(
            error_functional(*given), len(given[0]), "error_functional"
        )
        error = empty_like_rows(found, len(y)) if error is None else error
        error[part] = found
    assert error is not None
    way_out = "error_functional must return finite numbers"
    check_finite(error, "error_functional(y, y_hat)", way_out)
    if error.numel() and error.min() < 0:
        raise ValueError(
            f"error_functional returned {error.min().item():g}, but an error is nonnegative; take its absolute value."
        )
    return error


def _one_row_each(answer: Any, n_rows: int, name: str) -> Tensor:
    if hasattr(answer, "to_numpy"):  # a Series or a data frame
        answer = answer.to_numpy()
    tensor = to_tensor(answer, f"the output of {name}")
    if tensor.ndim == 0 or len(tensor) != n_rows:
        raise ValueError(
            f"{name} returned shape {tuple(tensor.shape)} for {n_rows} inputs; it must return one row per input."
        )
    return tensor
