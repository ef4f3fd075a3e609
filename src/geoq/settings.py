"""Refusals of unusable settings of objects such as increment models and trainings, when the object is made."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def is_integer(value: object) -> bool:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number; arrays, True and False are not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def check_integer(value: Any, name: str, least: int) -> None:
    """Refuse anything but an integer of at least ``least``."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}.")


def check_seed(value: Any, name: str) -> None:
    """Refuse anything but an integer."""
    if not is_integer(value):
        raise ValueError(f"{name}={value!r} must be an integer, the seed.")


def check_numbers(values: Any, name: str, *, least: float) -> None:
    """Refuse anything but a sequence of finite numbers of at least ``least``."""
    if not _is_sequence(values) or not all(is_number(v) and v >= least for v in values):
        raise ValueError(
            f"{name}={values!r} must be a tuple of numbers >= {least:g}, for example (0.5, 1.0)."
        )


def check_widths(values: Any, name: str, *, n_least: int = 1) -> None:
    """Refuse anything but a sequence of ``n_least`` or more integers of at least 1."""
    if not _is_sequence(values) or not all(is_integer(v) and v >= 1 for v in values):
        raise ValueError(
            f"{name}={values!r} must be a tuple of integers >= 1, for example (32, 64)."
        )
    if len(values) < n_least:
        raise ValueError(f"{name}={values!r} is empty; pass for example (32, 64).")


def check_object(value: object, kind: type, name: str, example: str) -> None:
    """Refuse a class in place of an object, and objects that are not of a class or protocol; ``example`` is a usable value."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}, but an object is needed; pass for example {name}={example}."
        )
    if not isinstance(value, kind):
        members = (*getattr(kind, "__annotations__", {}), *vars(kind))
        missing = [m for m in members if m[0] != "_" and not hasattr(value, m)]
        is_protocol = getattr(kind, "_is_protocol", False) and missing
        what = f"has no {' and no '.join(missing)}" if is_protocol else "is not usable"
        raise TypeError(
            f"{name}={value!r} {what}, but {name} must be a {kind.__name__}; pass for example {name}={example}."
        )


def check_function(value: object, name: str, call: str) -> None:
    """Refuse anything that cannot be called."""
    if not callable(value):
        raise TypeError(
            f"{name}={value!r}, but it is called as {call}; pass a function."
        )


def _is_sequence(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str)
