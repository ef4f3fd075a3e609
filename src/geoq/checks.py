"""Checks of settings and arguments, before any work starts.

Each message has three parts: the user's argument and its value, the fact that it conflicts with, and what to do.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from numbers import Integral, Real
from typing import Any

import numpy as np


def warn(message: str) -> None:
    """Issue a warning that points to the user's own line of code, however deep in the package it arises."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "geoq":
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


def shortened(value: object) -> str:
    """The repr of a value, cut after 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_integer(value: object) -> bool:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number; arrays, True and False are not."""
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        return False
    return math.isfinite(value)


def check_integer(value: Any, name: str, least: int | None = None) -> None:
    """Raise unless the value is an integer, of at least ``least``."""
    if not is_integer(value) or (least is not None and value < least):
        rest = "" if least is None else f" >= {least}"
        raise ValueError(f"{name}={value!r} must be an integer{rest}.")


def check_quantile(
    value: Any, name: str, kind: str = "quantile level", usual: float = 0.95
) -> None:
    """Raise unless the value is a number in the open interval (0, 1)."""
    if not is_number(value) or not 0 < value < 1:
        percent = is_number(value) and 1 < value < 100
        way_out = f"{value:g} % is {value / 100:g}" if percent else f"pass a number such as {usual}"
        raise ValueError(
            f"{name}={value!r}, but a {kind} lies strictly between 0 and 1; {way_out}."
        )


def check_fraction(value: Any, name: str) -> None:
    """Raise unless the value is a number in the half-open interval (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"{name}={value!r}, but it is a fraction; choose a value above 0 and at most 1."
        )


def check_widths(values: Any, name: str, *, n_least: int = 1) -> None:
    """Raise unless the values are a sequence of ``n_least`` or more integers of at least 1."""
    usable = isinstance(values, tuple | list) and all(is_integer(v) and v >= 1 for v in values)
    if not usable or len(values) < n_least:
        raise ValueError(
            f"{name}={values!r} must be a tuple of {n_least} or more integers >= 1, for example (32, 64)."
        )


def check_object(value: object, kind: type, name: str, example: str) -> None:
    """Raise for a class in place of an object, and for objects that are not of a class or protocol."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}, but an object is needed; pass for example {name}={example}."
        )
    if not isinstance(value, kind) or isinstance(value, str):  # which has a method split
        members = (*getattr(kind, "__annotations__", {}), *vars(kind))
        missing = [m for m in members if m[0] != "_" and not hasattr(value, m)]
        is_protocol = getattr(kind, "_is_protocol", False) and missing
        what = f"has no {' and no '.join(missing)}" if is_protocol else "is not usable"
        raise TypeError(
            f"{name}={shortened(value)} {what}, but {name} must be a {kind.__name__}; pass for example {name}={example}."
        )


def check_function(value: object, name: str, call: str) -> None:
    """Raise unless the value can be called."""
    if not callable(value):
        raise TypeError(f"{name}={shortened(value)}, but it is called as {call}; pass a function.")


def check_index(number: Any, name: str, n: int) -> int:
    """The number of a row as a nonnegative integer; raises if the row does not exist."""
    if not isinstance(number, Integral):
        raise TypeError(
            f"{name}={shortened(number)} is a {type(number).__name__}, but the number of a row is needed; choose 0 to {n - 1}."
        )
    row = int(number)
    if not -n <= row < n:
        raise IndexError(f"{name}={row}, but {n} were assessed; choose 0 to {n - 1}.")
    return row % n


def check_fitted(estimator: object, attribute: str = "fitted_") -> None:
    """Raise before ``fit``."""
    if not hasattr(estimator, attribute):
        from sklearn.exceptions import NotFittedError  # here: a slow import

        raise NotFittedError(f"this {type(estimator).__name__} is not fitted yet; call fit first.")


def core_of(given: Any) -> Any:
    """The fitted estimator inside a ``GeoQRegressor`` or a ``Labelled``, or the estimator itself; raises before ``fit``."""
    estimator = getattr(given, "estimator_" if hasattr(given, "like_") else "geoq_", given)
    check_fitted(estimator)
    return estimator


def check_finite(array: np.ndarray, name: str, way_out: str) -> None:
    """Raise for NaN and infinity."""
    # The sum is finite unless a value is not, or the sum overflows; so most arrays need no second look.
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(array.sum(dtype=float))):
            return
    bad = np.argwhere(~np.isfinite(array))
    if not len(bad):
        return
    where = ", ".join(map(str, bad[0]))
    value = array[tuple(bad[0])]
    raise ValueError(
        f"{name}[{where}] is {value} ({len(bad)} of {array.size} values are NaN or infinite); {way_out}."
    )


# Squares of larger or smaller numbers overflow or vanish, in single and in double precision.
_UNITS = {4: (1e-18, 1e18), 8: (1e-140, 1e140)}


def check_unit(array: np.ndarray, name: str, *, by_column: bool) -> None:
    """Raise for values whose squares overflow or vanish, in one of the columns or over all columns."""
    low, high = _UNITS[8 if by_column else array.dtype.itemsize]
    least, most = (np.asarray(end, dtype=float) for end in (array.min(axis=0), array.max(axis=0)))
    size, spread = np.maximum(abs(most), abs(least)), most - least
    if not by_column:
        # The largest spread over the samples: a single output may be close to constant.
        size, spread = size.max(), spread.max()
    bad = np.asarray((size > high) | ((spread > 0) & (spread < low)))
    if bad.any():
        where = np.argwhere(bad)[0].tolist()
        column = f"{name}[{', '.join(map(str, [':', *where]))}]" if where else name
        ends = least[tuple(where)].min(), most[tuple(where)].max()
        raise ValueError(
            f"{column} ranges from {ends[0]:.3g} to {ends[1]:.3g}; squares of such numbers overflow or vanish; pass it in another "
            f"unit of measurement, for example {column} / abs({column}).max()."
        )


def module_with_torch(module: str, asked: str) -> Any:
    """A module that needs PyTorch; without PyTorch an error that states what needs it, and the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        command = 'pip install "geoq[torch]"'
        raise ImportError(f"{asked} needs PyTorch; install it with {command}.") from exc


def names_with_torch(
    package: str, names: list[str], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package; besides its names it has some that need torch, in these modules."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(module_with_torch(modules[name], f"{package}.{name}"), name)

    return find, lambda: [*names, *modules]
