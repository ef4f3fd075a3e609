"""The user's callables: surrogates, recipes and error functionals, and their evaluation on batches (lines 1 and 4)."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from geoq.arrays import chunks, native, no_grad, own_copy, restore, to_numbers
from geoq.checks import add_note_on_error, check_finite
from geoq.data.table import Table

# The trained model F-hat, kept fixed: an ``nn.Module`` in eval mode, ``model.predict``, or any function of a batch.
Surrogate: TypeAlias = Callable[[Any], Any]
# A recipe: it trains a new surrogate on the pairs that it receives. It is called once per fold. A recipe with ``n_together`` and
# ``train_many``, such as ``TrainNetwork``, trains several surrogates at once for less than their separate cost.
TrainSurrogate: TypeAlias = Callable[[Any, Any], Surrogate]
# The error rho(y, y_hat): nonnegative, one row per sample, of any shape.
ErrorFunctional: TypeAlias = Callable[[Any, Any], Any]


def absolute_error(y: Any, y_hat: Any) -> Any:
    r"""Absolute error of each value: a number, a vector or a field per sample.

    .. math:: E(x) = |F(x) - \widehat F(x)|  (eq:pointwise_error)

    Example:
        >>> absolute_error(np.array([1.0, 2.0]), np.array([1.5, 1.0]))
        array([0.5, 1. ])
    """
    return abs(_difference(y, y_hat))


def norm_error(y: Any, y_hat: Any) -> Any:
    r"""Euclidean norm of the error, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2
    """
    return (_difference(y, y_hat).reshape(len(y), -1) ** 2).sum(1) ** 0.5


def relative_norm_error(y: Any, y_hat: Any) -> Any:
    r"""Norm of the error divided by the norm of the reference, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2 / \|F(x)\|_2
    """
    return norm_error(y, y_hat) / norm_error(y, 0 * y_hat)


def log_error(y: Any, y_hat: Any) -> Any:
    r"""Absolute error of the logarithm of each value, for positive outputs over several decades.

    .. math:: E(x) = |\log F(x) - \log \widehat F(x)|

    A bound of 0.1 is a factor of 1.105. Second opinion, distances of outputs and bound work with logarithms, predictions and intervals
    have the unit of the outputs.

    Example:
        >>> log_error(np.array([1.0, 1000.0]), np.array([1.1, 1100.0])).round(3)
        array([0.095, 0.095])
    """
    both = (value.log() if hasattr(value, "log") else np.log(value) for value in (y, y_hat))
    return absolute_error(*both)


# The errors that are differences of outputs, or of their logarithms, so that a bound gives an interval.
ELEMENTWISE = (absolute_error, log_error)


def on_scale(values: np.ndarray, error_functional: Any) -> np.ndarray:
    """Outputs on the scale on which their error is a difference: their logarithms for ``log_error``, nan unless they are positive."""
    if error_functional is not log_error:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values >= 0, np.log(values), np.nan).astype(values.dtype)


def _difference(y: Any, y_hat: Any) -> Any:
    # torch does not subtract from boolean masks; NumPy treats them as 0 and 1.
    return (y * 1 if "bool" in str(y.dtype) else y) - y_hat


# The name of what a recipe returns; other callables are named after their argument.
TRAINED = "the trained surrogate"
# How the callables are called, and what to pass in place of an object that cannot be called.
_CALLS = {
    "train_surrogate": (
        "train_surrogate(x, y)",
        "pass a function that returns a trained model, such as lambda x, y: Model().fit(x, y).predict, or a TrainNetwork",
    ),
    "error_functional": (
        "error_functional(y, y_hat)",
        "pass a function of both, such as geoq.absolute_error",
    ),
    TRAINED: ("surrogate(x)", "return a function such as model.predict from train_surrogate"),
}


def check_callable(function: Any, name: str) -> None:
    """Raise for objects that cannot be called on a batch, and for networks in training mode, whose output is random."""
    if getattr(function, "training", False) is True and hasattr(function, "eval"):
        in_recipe = name == TRAINED
        way_out = "return model.eval() from train_surrogate" if in_recipe else f"call {name}.eval()"
        raise ValueError(
            f"{name} is in training mode, so dropout would make its errors random; {way_out}."
        )
    got = type(function).__name__
    usable = callable(function)
    if isinstance(function, type):
        # A class whose objects can be called can be a recipe, but not a class of networks.
        got = f"the class {function.__name__}"
        usable = name == "train_surrogate" and not hasattr(function, "state_dict")
        usable = usable and issubclass(function, Callable)  # type: ignore[arg-type]
    if usable:
        return
    default = f"{name}(x)", f"pass a trained object or a function, such as {name}=model.predict"
    call, way_out = _CALLS.get(name, default)
    raise TypeError(f"{name} must be callable as {call}, got {got}; {way_out}.")


def evaluate(function: Callable[[Any], Any], x: Any, name: str) -> np.ndarray:
    """Apply a user's function to all rows of x, in chunks; raises unless it returns one finite row per input."""
    answers = answers_of(function, x, name)
    check_finite(answers, f"{name}(x)", f"{name} must return finite numbers")
    return answers


def answers_of(function: Callable[..., Any], x: Any, name: str, *others: np.ndarray) -> np.ndarray:
    """Apply a user's function to all rows of x and of the others, in chunks; its answers can be nan, masked (then nan) or infinite."""
    if hasattr(function, "state_dict") and not isinstance(x, Table):
        from geoq.training.recipe import TrainedNetwork  # needs torch

        function = TrainedNetwork(cast(Any, function))
    answers: np.ndarray | None = None
    for rows in chunks(len(x), int(np.prod(x.shape[1:]))):
        # A copy goes in, because a function may work in place, and a copy is kept, because it may use its buffer again.
        part = own_copy(x[rows])
        with no_grad(), add_note_on_error(f"while calling {name}(x) on {len(part)} rows"):
            also = (restore(other[rows].copy(), native(part)) for other in others)
            answer = one_row_each(function(native(part), *also), len(part), name)
        if answers is None:
            answers = np.empty((len(x), *answer.shape[1:]), answer.dtype)
        if answer.shape[1:] != answers.shape[1:]:
            raise ValueError(
                f"{name} returned rows of shape {answer.shape[1:]} and of shape {answers.shape[1:]} for inputs of the same shape; "
                "it must return rows of one shape."
            )
        answers[rows] = answer
    assert answers is not None
    return answers


def one_row_each(answer: Any, n_rows: int, name: str) -> np.ndarray:
    """What a function of the user returned, as numbers; raises unless there is one row per input."""
    if hasattr(answer, "to_numpy"):  # a Series or a data frame
        answer = answer.to_numpy()
    if isinstance(answer, np.ma.MaskedArray):
        answer = np.ma.filled(answer.astype(float), np.nan)
    numbers = to_numbers(answer, f"the output of {name}")
    if numbers.ndim == 0 or len(numbers) != n_rows:
        raise ValueError(
            f"{name} returned shape {numbers.shape} for {n_rows} inputs; it must return one row per input."
        )
    return numbers


def errors_of(
    prediction: np.ndarray, error_functional: ErrorFunctional, y: np.ndarray, like: Any
) -> np.ndarray:
    r"""Errors of predictions with known reference outputs, computed in chunks; nan where y is nan.

    .. math:: E(x_i) = \rho(y_i, \widehat F(x_i))  (eq:pointwise_error)

    The error functional receives arrays of the kind of ``like``, and the prediction in place of y where y is nan.
    """
    if prediction.shape != y.shape:
        raise ValueError(
            f"surrogate returned shape {prediction.shape} for y of shape {y.shape}; reshape y or the surrogate's output until they "
            "agree."
        )
    error, way_out = None, "error_functional must return finite numbers"
    for part in chunks(len(y), int(np.prod(y.shape[1:]))):
        absent = np.isnan(y[part])
        truth = np.where(absent, prediction[part], y[part])
        kind = None if isinstance(like, Table) else like
        given = (restore(values, kind) for values in (truth, prediction[part].copy()))
        with no_grad():
            found = one_row_each(error_functional(*given), len(truth), "error_functional")
        if found.shape == absent.shape and absent.any():
            found = np.where(absent, np.nan, found)
        if error is None:
            error = np.empty((len(y), *found.shape[1:]), found.dtype)
        error[part] = found
        if found.shape == absent.shape:
            found = np.where(absent, 0, found)
        check_finite(found, "error_functional(y, y_hat)", way_out)
        if found.min(initial=0) < 0:
            raise ValueError(
                f"error_functional returned {found.min():g}, but an error is nonnegative; take its absolute value."
            )
    assert error is not None
    return error
