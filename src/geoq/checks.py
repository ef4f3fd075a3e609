"""Refusals of unusable arguments, before any work starts.

Each message has three parts: the user's argument and its value, the fact that it conflicts with, and what to do. The checks
that belong to one protocol (increment models, safe regions, sources of fold surrogates) stand beside that protocol.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor, nn

from geoq.arrays import Array, Rows, chunks, to_tensor
from geoq.table import Table

REMOVE = "remove or impute these samples first"
ABSENT = f"{REMOVE}, or mask cells that have no value, numpy.ma.masked_invalid(y)"
MASK = (
    "the same places are missing in all samples, as on land or in an obstacle: fill them with 0 in x, and mask them in y with "
    "numpy.ma.masked_invalid(y)"
)


def warn(message: str) -> None:
    """Issue a warning that points to the user's own line of code, however deep in the package it arises."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] == "geoq":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextmanager
def add_note_on_error(note: str) -> Iterator[None]:
    """Add a note to exceptions of user code; their type does not change."""
    try:
        yield
    except Exception as exc:
        exc.add_note(note)
        raise


def check_number(value: object, name: str, what: str) -> None:
    """Refuse anything that is not a real number; ``what`` is the meaning of the number, with an example."""
    if isinstance(value, Real) and not isinstance(value, bool | np.bool_):
        return
    raise TypeError(
        f"{name}={shortened(value)} is a {type(value).__name__}, but a number is needed; pass {what}."
    )


def shortened(value: object) -> str:
    """The repr of a value, cut after 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_count(count: object, name: str) -> None:
    """Refuse anything that is not an integer of at least 1."""
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(f"{name}={count!r}: {name} must be an integer >= 1.")


def check_index(number: int, name: str, n: int) -> None:
    """Refuse the number of a query, or of a rollout, that was not assessed."""
    if not isinstance(number, Integral):
        raise TypeError(
            f"{name}={shortened(number)} is a {type(number).__name__}, but the number of a row is needed; choose 0 to {n - 1}."
        )
    if not -n <= number < n:
        raise IndexError(
            f"{name}={number}, but {n} were assessed; choose 0 to {n - 1}."
        )


def check_fitted(estimator: object, attribute: str) -> None:
    """Refuse to answer before ``fit``."""
    if not hasattr(estimator, attribute):
        # Here, because importing scikit-learn takes long.
        from sklearn.exceptions import NotFittedError

        raise NotFittedError(
            f"this {type(estimator).__name__} is not fitted yet; call fit first."
        )


def clear_fitted(estimator: object) -> None:
    """Delete what an earlier fit has learned, so that a failed fit does not leave a mixture of two."""
    for name in [name for name in vars(estimator) if name.endswith("_")]:
        delattr(estimator, name)


def check_finite(
    tensor: Tensor, name: str, way_out: str = REMOVE, if_masked: str = ""
) -> None:
    """Refuse NaN and infinity; ``if_masked`` is the way out for fields that are missing at the same places in all samples."""
    parts = chunks(len(tensor), tensor[:1].numel()) if tensor.ndim else [...]
    if all(bool(tensor[part].isfinite().all()) for part in parts):
        return
    finite = tensor.isfinite()
    if if_masked and _is_masked(finite):
        way_out = if_masked
    bad = (~finite).nonzero()
    where = ", ".join(str(int(i)) for i in bad[0])
    raise ValueError(
        f"{name}[{where}] is {tensor[tuple(bad[0])].item()} ({len(bad)} of {tensor.numel()} values are not finite); "
        f"{way_out}."
    )


# Squares of larger or smaller numbers overflow or vanish, by the precision of the tensor.
_UNITS = {torch.float32: (1e-18, 1e18), torch.float64: (1e-140, 1e140)}


def check_inputs_unit(tensor: Tensor, name: str) -> None:
    """Refuse a coordinate whose values are so large or so close together that no standard deviation can be computed."""
    low, high = _UNITS[torch.float64]
    least, most = tensor.amin(dim=0), tensor.amax(dim=0)
    size, spread = torch.maximum(most.abs(), least.abs()), most - least
    bad = (size > high) | ((spread > 0) & (spread < low))
    if bad.any():
        where = bad.nonzero()[0].tolist()
        column = f"{name}[{', '.join(map(str, [':', *where]))}]" if where else name
        ends = (
            f"from {least[tuple(where)].item():.3g} to {most[tuple(where)].item():.3g}"
        )
        raise ValueError(f"{column} ranges {ends}; {_other_unit(column)}.")


def check_outputs_unit(
    tensor: Tensor, name: str, dtype: torch.dtype | None = None
) -> None:
    """Refuse values whose squares overflow or vanish in a precision, which is by default the precision of the values."""
    dtype = tensor.dtype if dtype is None else dtype
    low, high = _UNITS[dtype]
    least, most = tensor.amin().item(), tensor.amax().item()
    # The largest spread over the samples: a single output may be close to constant.
    spread = float((tensor.amax(dim=0) - tensor.amin(dim=0)).max())
    if max(abs(least), abs(most)) > high or 0 < spread < low:
        raise ValueError(
            f"{name} ranges from {least:.3g} to {most:.3g} in {str(dtype).removeprefix('torch.')}; {_other_unit(name)}."
        )


def _other_unit(name: str) -> str:
    return (
        "squares of such numbers overflow or vanish; pass it in another unit of measurement, for example "
        f"{name} / abs({name}).max()"
    )


def _is_masked(finite: Tensor) -> bool:
    """Whether some places of the fields, but not all, are missing in every sample."""
    if finite.ndim < 3 or len(finite) < 2 or not finite[0].any():
        return False
    return bool((finite == finite[0]).all())


def check_pairs(x: Rows, y: Rows) -> tuple[Tensor, Tensor]:
    """Inputs and reference outputs as tensors; refused unless they are finite and equally many.

    A table may have missing inputs; whether the surrogate accepts them is checked later.
    """
    inputs, outputs = to_tensor(x, "x"), to_tensor(y, "y")
    for name, tensor in (("x", inputs), ("y", outputs)):
        if tensor.ndim == 0 or not tensor.numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and holds no samples; pass one sample per row."
            )
        if name == "y" or not isinstance(x, Table):
            fields = name == "y" and tensor.ndim > 1
            check_finite(tensor, name, ABSENT if fields else REMOVE, if_masked=MASK)
    if len(inputs) != len(outputs):
        raise ValueError(
            f"x has {len(inputs)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    check_inputs_unit(inputs, "x")
    check_outputs_unit(outputs, "y")
    return inputs, outputs


def check_rows(
    rows: Rows, name: str, shape: tuple[int, ...], fitted_on: str, one: str
) -> None:
    """Refuse queries whose shape differs from the rows that the estimator was fitted on, and empty queries."""
    tensor = to_tensor(rows, name)
    if tensor.ndim == 0 or tuple(tensor.shape[1:]) != shape or not len(tensor):
        single = (
            f"; a single {one} needs a first dimension of 1"
            if tuple(tensor.shape) == shape
            else ""
        )
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but {fitted_on} of shape {shape}; "
            f"pass at least one {one} of that shape{single}."
        )


# The name of what a recipe returns; other callables are named after their argument.
TRAINED = "the trained surrogate"
_CALLS = {
    "train_surrogate": "train_surrogate(x, y)",
    "error_functional": "error_functional(y, y_hat)",
    TRAINED: "surrogate(x)",
}


def check_callable(function: object, name: str) -> None:
    """Refuse objects that cannot be called on a batch, and networks in training mode, whose output is random."""
    if isinstance(function, nn.Module) and function.training:
        way_out = (
            "return model.eval() from train_surrogate"
            if name == TRAINED
            else f"call {name}.eval() first"
        )
        raise ValueError(
            f"{name} is in training mode, so dropout would make its errors random; {way_out}."
        )
    if callable(function) and not _is_mistaken(function, name):
        return
    got = type(function).__name__
    if isinstance(function, type):
        got = f"the class {function.__name__}"
    raise TypeError(
        f"{name} must be callable as {_CALLS.get(name, f'{name}(x)')}, got {got}; {_instead(function, name)}."
    )


def _is_mistaken(function: object, name: str) -> bool:
    """Whether a class is passed where an object is needed; a class with callable objects can be a recipe."""
    if not isinstance(function, type):
        return False
    is_recipe = issubclass(function, Callable) and not issubclass(function, nn.Module)  # type: ignore[arg-type]
    return name != "train_surrogate" or not is_recipe


def _instead(function: object, name: str) -> str:
    """What to pass in place of an object that cannot be called."""
    if name == "error_functional":
        return "pass a function of both, such as geoq.absolute_error"
    named = f"{function.__name__}()" if isinstance(function, type) else ""
    has_predict = callable(getattr(function, "predict", None))
    if name == "train_surrogate" and has_predict:
        return f"pass lambda x, y: {named or 'clone(model)'}.fit(x, y).predict"
    if name == "train_surrogate":
        return "pass a function that returns a trained model, or a TrainNetwork"
    what = "a trained object" if named else "a function"
    if name == TRAINED:
        return f"return {'model.predict' if has_predict else what} from train_surrogate"
    return f"pass {name}=model.predict" if has_predict else f"pass {what}"


def check_array_kind(
    module: nn.Module, array: Array, name: str, array_name: str
) -> None:
    """Refuse NumPy arrays for torch modules."""
    if isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a torch module, but {array_name} is a NumPy array; pass x and y as tensors of its dtype, "
            f"{array_name}=torch.from_numpy({array_name}){cast_to_weights(module)}."
        )


def weights_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point weight of a module."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def cast_to_weights(module: nn.Module) -> str:
    """The expression that converts a tensor to the dtype of the module's weights, for messages."""
    dtype = weights_dtype(module) or torch.float32
    short = {
        torch.float32: "float()",
        torch.float64: "double()",
        torch.float16: "half()",
    }
    return f".{short.get(dtype, f'to({dtype})')}"
