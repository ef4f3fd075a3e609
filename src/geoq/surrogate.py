"""The user's side of the border: surrogates, error functionals, and the arrays they speak.

Users bring NumPy arrays or torch tensors and callables that work on them. Their callables receive what the
user passed, their results come back in the same kind, and between the two there are only tensors.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

Array: TypeAlias = np.ndarray | Tensor

# Rows are handed to user callables in chunks of about this many input numbers, which bounds memory for fields
# (36 states of 240 x 480) and is no chunk at all for tables (262,144 rows of 16).
CHUNK_NUMBERS = 2**22
# Work on fewer numbers than this is done by one thread.
SMALL_NUMBERS = 2**19


@runtime_checkable
class Surrogate(Protocol):
    """F-hat, fixed: an ``nn.Module`` in eval mode, ``model.predict``, a lambda."""

    def __call__(self, x: Array, /) -> Array: ...


@runtime_checkable
class TrainSurrogate(Protocol):
    """Train a fresh surrogate; called once per fold with the pairs left in."""

    def __call__(self, x: Array, y: Array, /) -> Surrogate: ...


@runtime_checkable
class TrainTogether(Protocol):
    """A recipe that trains several surrogates at once for less than one by one; ``geoq.TrainNetwork`` is one.

    Each surrogate has its own subset of the rows and, where seeds are given, its own seed. ``n_together`` says how many
    are worth training at once on such data.
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
    """rho: reference and prediction to a nonnegative error, one row per row, of any shape."""

    def __call__(self, y: Array, y_hat: Array, /) -> Array: ...


def absolute_error(y: Array, y_hat: Array) -> Array:
    r"""Absolute error of any shape: a number, a vector or a field per sample.

    .. math:: E(x) = |F(x) - \widehat F(x)|  (eq:pointwise_error)
    """
    error: Array = abs(_difference(y, y_hat))  # type: ignore[assignment]  # NumPy's stubs call it object
    return error


def norm_error(y: Array, y_hat: Array) -> Array:
    r"""Euclidean norm of the error, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2
    """
    return (_difference(y, y_hat).reshape(len(y), -1) ** 2).sum(1) ** 0.5


def relative_norm_error(y: Array, y_hat: Array) -> Array:
    r"""Norm of the error in units of the norm of the reference, one number per sample.

    .. math:: E(x) = \|F(x) - \widehat F(x)\|_2 / \|F(x)\|_2
    """
    return norm_error(y, y_hat) / norm_error(y, 0 * y_hat)


def _difference(y: Array, y_hat: Array) -> Array:
    if isinstance(y, Tensor) and y.dtype == torch.bool:
        # torch subtracts no masks, where NumPy takes them for 0 and 1.
        y = y.to(torch.uint8)
    return y - y_hat


def to_tensor(array: Array, name: str) -> Tensor:
    """The array as a floating-point tensor that shares its memory where it can."""
    if isinstance(array, np.ndarray):
        if array.dtype == object or not (
            np.issubdtype(array.dtype, np.number) or array.dtype == bool
        ):
            raise TypeError(
                f"{name} has dtype {array.dtype}, but must hold real numbers; convert it first."
            )
        # torch shares the memory of writable, native, positively strided arrays; anything else is copied.
        shareable = (
            array.flags.writeable
            and array.dtype.isnative
            and all(s >= 0 for s in array.strides)
        )
        tensor = torch.from_numpy(
            array if shareable else np.array(array, dtype=array.dtype.newbyteorder("="))
        )
    elif isinstance(array, Tensor):
        tensor = array.detach()
    else:
        raise TypeError(
            f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}; "
            f"convert it, for example by numpy.asarray({name})."
        )
    if tensor.is_complex():
        raise TypeError(
            f"{name} is complex; pass its real and imaginary parts as two coordinates."
        )
    if not tensor.is_floating_point():
        return tensor.to(torch.float64)
    return (
        tensor.to(torch.float32)
        if tensor.dtype in (torch.float16, torch.bfloat16)
        else tensor
    )


def restore(tensor: Tensor, like: Array) -> Array:
    """The tensor as the user's kind of array: NumPy, or torch on the user's device."""
    return (
        tensor.cpu().numpy() if isinstance(like, np.ndarray) else tensor.to(like.device)
    )


def take(array: Array, rows: Int[Tensor, " n_rows"]) -> Array:
    """Rows of a user's array, still the user's kind."""
    return (
        array[rows.cpu().numpy()]
        if isinstance(array, np.ndarray)
        else array[rows.to(array.device)]
    )


REMOVE = "remove or impute these samples first"
MASK = (
    "these are the same places in all samples, as of land or an obstacle: fill them with 0 in x and y, and let "
    "error_functional return 0 there"
)


def check_finite(
    tensor: Tensor, name: str, way_out: str = REMOVE, if_masked: str = ""
) -> None:
    """Refuse NaN and infinity, saying where the first one is and how many there are, and the way out.

    There may be another one where the same places are missing in all samples.
    """
    finite = tensor.isfinite()
    if finite.all():
        return
    if if_masked and _is_masked(finite):
        way_out = if_masked
    bad = (~finite).nonzero()
    where = ", ".join(str(int(i)) for i in bad[0])
    raise ValueError(
        f"{name}[{where}] is {tensor[tuple(bad[0])].item()} ({len(bad)} of {tensor.numel()} values are not finite); "
        f"{way_out}."
    )


def _is_masked(finite: Tensor) -> bool:
    """Whether some places of fields, not all, are missing in every sample."""
    if finite.ndim < 3 or len(finite) < 2 or not finite[0].any():
        return False
    return bool((finite == finite[0]).all())


def check_pairs(x: Array, y: Array) -> tuple[Tensor, Tensor]:
    """Inputs and outputs as tensors, refused if they are no finite pairs."""
    inputs, outputs = to_tensor(x, "x"), to_tensor(y, "y")
    for name, tensor in (("x", inputs), ("y", outputs)):
        if tensor.ndim == 0 or not tensor.numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and holds no samples; pass one per row."
            )
        check_finite(tensor, name, if_masked=MASK)
    if len(inputs) != len(outputs):
        raise ValueError(
            f"x has {len(inputs)} rows and y has {len(outputs)}; each input needs its reference output."
        )
    return inputs, outputs


def warn(message: str) -> None:
    """Warn, pointing to the user's own line however deep in the package the reason was found."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] == "geoq":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def check_fitted(estimator: object, attribute: str) -> None:
    """Refuse to answer before ``fit``."""
    if not hasattr(estimator, attribute):
        # Here, because importing scikit-learn takes long.
        from sklearn.exceptions import NotFittedError

        raise NotFittedError(
            f"this {type(estimator).__name__} is not fitted yet; call fit first."
        )


def forget(estimator: object) -> None:
    """Drop what an earlier fit has learned, so that a fit that fails does not leave two mixed."""
    for name in [name for name in vars(estimator) if name.endswith("_")]:
        delattr(estimator, name)


def chunks(n_rows: int, row_numbers: int) -> Iterator[slice]:
    """Slices over the rows, each of about ``CHUNK_NUMBERS`` numbers and at least one row."""
    step = max(1, CHUNK_NUMBERS // max(1, row_numbers))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def nonzero_counts(rows: Shaped[Tensor, " n *field"]) -> Int[Tensor, " *field"]:
    """How many rows are not 0, or true, in each cell; in chunks, since torch counts a copy of eight bytes a number."""
    total = torch.zeros_like(rows[0], dtype=torch.long)
    for some in chunks(len(rows), 8 * rows[0].numel()):
        total += rows[some].count_nonzero(dim=0)
    return total


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Exceptions of user code keep their type and gain a note."""
    try:
        yield
    except Exception as exc:
        exc.add_note(note)
        raise


@contextmanager
def few_threads(n_numbers: int) -> Iterator[None]:
    """One thread for what is small: on a busy machine threads that wait for each other cost minutes.

    Measured on two busy cores: the demo took 325 s with two threads and 20 s with one, nearly all of it in scikit-learn's
    trees and clusters and in the training of small networks.
    """
    if n_numbers > SMALL_NUMBERS:
        yield
        return
    from threadpoolctl import (
        threadpool_limits,  # here: scikit-learn brings it, and may be imported later
    )

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(n_threads)


# What recipes return goes by this name; the others go by that of their argument.
TRAINED = "the trained surrogate"
_CALLS = {
    "train_surrogate": "train_surrogate(x, y)",
    "error_functional": "error_functional(y, y_hat)",
    TRAINED: "surrogate(x)",
}


def check_callable(function: object, name: str) -> None:
    """Refuse what cannot be called on a batch, and networks whose answers would be random."""
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
    """Whether it is a class where an object is wanted; a class whose objects can be called may well be a recipe."""
    if not isinstance(function, type):
        return False
    is_recipe = issubclass(function, Callable) and not issubclass(function, nn.Module)  # type: ignore[arg-type]
    return name != "train_surrogate" or not is_recipe


def _instead(function: object, name: str) -> str:
    """What to pass in place of something that cannot be called."""
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


@torch.no_grad()
def evaluate(function: Callable[[Array], Array], x: Array, name: str) -> Tensor:
    """A user's function on all rows of x, in chunks, one row of answer per row of input."""
    if isinstance(function, nn.Module):
        check_kind(function, x, name, "x")
    rows = [x[rows] for rows in chunks(len(x), int(np.prod(x.shape[1:])))]
    return torch.cat(
        [_one_row_each(_call(function, part, name), len(part), name) for part in rows]
    )


def check_kind(module: nn.Module, array: Array, name: str, array_name: str) -> None:
    """Refuse NumPy arrays for torch modules."""
    if isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a torch module, but {array_name} is a NumPy array; pass x and y as tensors of its dtype, "
            f"{array_name}=torch.from_numpy({array_name}){_to_dtype(module)}."
        )


def _call(function: Callable[[Array], Array], x: Array, name: str) -> Array:
    try:
        return function(x)
    except RuntimeError as exc:
        # Not before the call: a module may well take other numbers than it is made of.
        if not isinstance(function, nn.Module) or _dtype(function) in (None, x.dtype):
            raise
        raise TypeError(
            f"{name} has weights of {_dtype(function)} and failed on x of {x.dtype} ({exc}); pass x and y in the dtype of its weights, "
            f"x{_to_dtype(function)}."
        ) from exc


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _to_dtype(module: nn.Module) -> str:
    """What makes a tensor fit the module's weights."""
    dtype = _dtype(module) or torch.float32
    short = {
        torch.float32: "float()",
        torch.float64: "double()",
        torch.float16: "half()",
    }
    return f".{short.get(dtype, f'to({dtype})')}"


@torch.no_grad()
def observe(
    surrogate: Surrogate,
    error_functional: ErrorFunctional,
    x: Array,
    y: Array,
    name: str = "surrogate",
) -> tuple[Float[Tensor, " n *output"], Float[Tensor, " n *field"]]:
    r"""Predictions of the surrogate and their errors where the reference is known.

    .. math:: E(x_i) = \rho(y_i, \widehat F(x_i))  (eq:pointwise_error)
    """
    prediction = evaluate(surrogate, x, name)
    return prediction, errors_of(prediction, error_functional, y, name)


@torch.no_grad()
def errors_of(
    prediction: Float[Tensor, " n *output"],
    error_functional: ErrorFunctional,
    y: Array,
    name: str = "surrogate",
) -> Float[Tensor, " n *field"]:
    """Errors of predictions whose references are known, in chunks."""
    if prediction.shape != y.shape:
        raise ValueError(
            f"{name} returned shape {tuple(prediction.shape)} for y of shape {tuple(y.shape)}; "
            "reshape y or the surrogate's output until they agree."
        )
    row_numbers = int(np.prod(y.shape[1:]))
    error = torch.cat(
        [
            _one_row_each(
                error_functional(y[part], restore(prediction[part], y)),
                len(y[part]),
                "error_functional",
            )
            for part in chunks(len(y), row_numbers)
        ]
    )
    if (error < 0).any():
        raise ValueError(
            f"error_functional returned {error.min().item():g}, but an error is nonnegative; take its absolute value."
        )
    return error


def _one_row_each(answer: Array, n_rows: int, name: str) -> Tensor:
    tensor = to_tensor(answer, f"the output of {name}")
    if tensor.ndim == 0 or len(tensor) != n_rows:
        raise ValueError(
            f"{name} returned shape {tuple(tensor.shape)} for {n_rows} inputs; it must return one row per input."
        )
    check_finite(tensor, f"{name}(x)", f"{name} must answer with finite numbers")
    return tensor
