"""Identifiers of recipes that are the same in a later process, and differ for another recipe.

A function is identified by its code, constants, defaults, and the values of its closure and of the globals that it reads; an
object by its class and its attributes. Code of Python, of installed packages and of geoq is identified by its name.
"""

import dataclasses
import dis
import functools
import hashlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from geoq.arrays import Rows, to_tensor
from geoq.table import Table

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_STDLIB, _GEOQ = sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    Path,
    range,
    slice,
)
_CODE = (types.FunctionType, staticmethod, classmethod, property)


class Unrecognisable(Exception):
    """An object whose content cannot be read, so that a later run cannot recognise it."""


def array_id(array: Rows) -> str:
    """An identifier of an array: dtype, shape and a hash of its values. The columns of a table belong to it."""
    if isinstance(array, Table):
        return f"{array_id(array.array)} {array.schema}"
    values = array
    if not isinstance(array, np.ndarray):
        values = to_tensor(array, "array").detach().cpu().numpy()
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"{values.dtype} {values.shape} {digest[:16]}"


def object_id(thing: object) -> str:
    """The ``repr`` of an object without addresses."""
    return _ADDRESS.sub("", repr(thing))


def recipe_id(recipe: object) -> str:
    """An identifier of a recipe or representation: its name, and a hash of its code and values."""
    return f"{object_id(recipe)[:100]} with content {_Reader().digest(recipe)[:16]}"


class _Reader:
    """Computes hashes of objects. A hash depends on the values in an object, not on its place in memory."""

    def __init__(self) -> None:
        self.finished: dict[int, tuple[object, str]] = {}
        self.open: list[int] = []

    def digest(self, thing: Any) -> str:
        if id(thing) in self.finished:
            return self.finished[id(thing)][1]
        if id(thing) in self.open:  # an object that contains itself
            return f"cycle {self.open.index(id(thing))}"
        self.open.append(id(thing))
        try:
            parts = "\n".join(self._parts(thing))
        finally:
            self.open.pop()
        digest = hashlib.sha256(parts.encode()).hexdigest()
        # The object is kept as well, so that no other object gets its id.
        self.finished[id(thing)] = (thing, digest)
        return digest

    def _parts(self, thing: Any) -> Iterator[str]:
        if isinstance(thing, _PLAIN):
            yield f"{type(thing).__qualname__} {thing!r}"
        elif isinstance(thing, np.ndarray | torch.Tensor):
            is_list = isinstance(thing, np.ndarray) and thing.dtype == object
            yield self.digest(thing.tolist()) if is_list else array_id(thing)
        elif isinstance(thing, types.ModuleType):
            yield from _module(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, types.CodeType):
            yield from self._code(thing)
        elif isinstance(thing, Mapping):
            yield type(thing).__qualname__
            yield from (self.digest(part) for item in thing.items() for part in item)
        elif isinstance(thing, set | frozenset):
            yield from sorted(map(self.digest, thing))
        elif isinstance(thing, Sequence):
            yield type(thing).__qualname__
            yield from map(self.digest, thing)
        else:
            yield self.digest(type(thing))
            yield self.digest(_content(thing))

    def _class(self, kind: type) -> Iterator[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if not _is_installed(_file_of(kind.__module__)):
            yield from map(self.digest, kind.__bases__)
            for name, part in sorted(vars(kind).items()):
                if isinstance(part, _CODE) or not name.startswith("_"):
                    yield name + self.digest(part)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield f"{function.__module__}.{function.__qualname__}"
        code, values = function.__code__, [*map(_value, function.__closure__ or ())]
        if _is_installed(code.co_filename):
            # Two functions that an installed decorator returns differ in their closures.
            with suppress(Unrecognisable):
                yield self.digest(values)
            return
        yield self.digest(values)
        yield self.digest(code)
        yield self.digest((function.__defaults__, function.__kwdefaults__))
        for name in sorted(_globals(code)):
            if name in function.__globals__:
                yield name + self.digest(function.__globals__[name])

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield hashlib.sha256(code.co_code).hexdigest()
        yield f"{code.co_names} {code.co_varnames}"
        yield self.digest(code.co_consts)


def _content(thing: Any) -> Any:
    """The values that determine an object: its attributes, or its ``repr`` if the class defines one."""
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.BuiltinFunctionType):
        return [thing.__qualname__, thing.__self__]
    if isinstance(thing, staticmethod | classmethod):
        return thing.__func__
    if isinstance(thing, property):
        return [thing.fget, thing.fset]
    if isinstance(thing, nn.Module):
        return [object_id(thing), dict(thing.state_dict())]
    if dataclasses.is_dataclass(thing):
        names = [part.name for part in dataclasses.fields(thing)]
        return {name: getattr(thing, name) for name in names}
    if hasattr(thing, "get_params"):
        return thing.get_params(deep=False)
    if hasattr(thing, "__wrapped__"):
        return thing.__wrapped__
    if hasattr(thing, "__array__"):
        return np.asarray(thing)
    return _attributes(thing)


def _attributes(thing: Any) -> Any:
    described_by: object = type(thing).__repr__
    if described_by is object.__repr__:
        if hasattr(thing, "__dict__"):
            return vars(thing)
    elif not _ADDRESS.search(repr(thing)) and "..." not in repr(thing):
        return repr(thing)
    raise Unrecognisable(f"an object of the class {type(thing).__qualname__}")


def _value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


def _globals(code: types.CodeType) -> set[str]:
    """The globals that a function and the functions inside it read."""
    own = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return own.union(*map(_globals, inner))


def _module(module: types.ModuleType) -> Iterator[str]:
    """The name of a module; for modules of the user a hash of the file as well."""
    yield module.__name__
    file = getattr(module, "__file__", None)
    if file is not None and not _is_installed(file):
        yield hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _file_of(module: str) -> str:
    """The file of a module; the main program belongs to the user."""
    if module == "__main__":
        return ""
    return getattr(sys.modules.get(module), "__file__", None) or _STDLIB


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to geoq."""
    parts = Path(file).parts
    in_package = "site-packages" in parts or "dist-packages" in parts
    return in_package or file.startswith((_STDLIB, _GEOQ, "<frozen"))
