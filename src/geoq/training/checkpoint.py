"""Checkpoints: a folder with the predictions of every finished fold, from which an interrupted calibration continues.

The files contain arrays and numbers, and no code. Each file is written completely or not at all, and contains an identifier of
the calibration that it belongs to.
"""

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import cloudpickle
import numpy as np

from geoq.arrays import chunks, is_tensor, to_numbers
from geoq.checks import add_note_on_error, warn
from geoq.data.table import Table

MANIFEST = "calibration.npz"
# Modules in these folders are a part of Python or of an installed package.
INSTALLED = ("site-packages", "dist-packages", str(Path(os.__file__).parent))
# What the code of a function is; the numbers of its lines and the name of its file are left out.
CODE = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code", "co_consts", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_name", "co_exceptiontable",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A folder that keeps the finished folds of a calibration; pass it to ``fit`` as ``checkpoint``.

    The folder alone is sufficient in most cases. A later run must have the same data, folds and settings, and the same recipe
    and representation. These are recognised by their code and values, unless ``key`` is given.

    Attributes:
        folder: the folder; it is created if it does not exist.
        key: your name for the recipe and the representation. A later run then compares this name instead of code and values.
        calibration: the identifier of the calibration, which ``fit`` sets.

    Example:
        >>> from geoq.parts import Checkpoint
        >>> checkpoint = Checkpoint("calibration", key="ridge, alpha=0.1")
        >>> estimator.fit(x, y, checkpoint=checkpoint)  # doctest: +SKIP
    """

    folder: str | Path
    key: str | None = None
    calibration: str = field(default="", repr=False)

    @staticmethod
    def of(place: "str | Path | Checkpoint") -> "Checkpoint":
        """The checkpoint in a folder, or a given one."""
        return place if isinstance(place, Checkpoint) else Checkpoint(place)

    def open(self, facts: Mapping[str, str], callables: Mapping[str, object]) -> "Checkpoint":
        """Start a checkpoint, or continue it; raises if the facts or the callables differ."""
        own = dict(facts) | {name: self._id(name, of) for name, of in callables.items()}
        place = Path(self.folder)
        if place.exists() and not place.is_dir():
            raise ValueError(f"checkpoint={str(place)!r} is a file; pass the path of a folder.")
        place.mkdir(parents=True, exist_ok=True)
        manifest = place / MANIFEST
        if not manifest.exists():
            orphans = [path.name for path in place.glob("fold-*.npz")]
            if orphans:
                raise ValueError(
                    f"checkpoint={str(place)!r} contains {orphans[0]} but not {MANIFEST}, so its calibration is unknown; "
                    "use an empty folder."
                )
            _write(manifest, json.dumps(own), {})
        with add_note_on_error("Delete the folder to start again."):
            stored = json.loads(_read(manifest)[0])
        different = [n for n in {**stored, **own} if stored.get(n) != own.get(n)]
        if different:
            listed = "; ".join(f"{n} was {stored.get(n)}, now {own.get(n)}" for n in different)
            way_out = "use another folder, or delete this folder to start again."
            if self.key is None and set(different) <= set(callables):
                way_out += " If the code and values are the same, name them with Checkpoint(folder, key='name')."
            raise ValueError(
                f"checkpoint={str(place)!r} belongs to another calibration ({listed}); {way_out}"
            )
        return replace(self, calibration=_hash(json.dumps(own, sort_keys=True)))

    def _id(self, name: str, of: object) -> str:
        try:
            return identity(of) if self.key is None else f"key {self.key!r}"
        except Exception as exc:
            raise ValueError(
                f"checkpoint={str(self.folder)!r}, but {name} cannot be pickled ({exc}), so a later run cannot recognise it; give it "
                f"a name of your own, checkpoint=Checkpoint({str(self.folder)!r}, key='name'), from geoq.parts."
            ) from exc

    # An open checkpoint: the files of the finished folds, each with the identifier of the calibration.

    def jobs(self, proposed: list[list[Any]]) -> list[list[Any]]:
        """The folds that are trained together: the folds of the first run, or the proposed ones."""
        sizes = np.array([len(job) for job in proposed])
        every = iter([fold for job in proposed for fold in job])
        known = self.first("jobs", {"jobs": sizes})["jobs"]
        if known.sum() != sizes.sum():
            raise ValueError(
                f"{self.folder} has other jobs of folds; delete the folder to start again."
            )
        return [[*islice(every, size)] for size in known.tolist()]

    def first(self, name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays that the first run stored under this name; they are stored now if this is the first run."""
        file = Path(self.folder) / f"{name}.npz"
        if file.exists():
            return self._read(file)
        self._write(file, arrays)
        return dict(arrays)

    def has(self, fold: int) -> bool:
        """Whether the fold is finished."""
        return self._file(fold).exists()

    def load(self, fold: int, n_rows: int) -> np.ndarray:
        """The predictions of the surrogate of the fold at this number of rows."""
        found = self._read(self._file(fold)).get(f"prediction {fold}")
        if found is None or len(found) != n_rows:
            raise ValueError(
                f"{self._file(fold)} does not contain the {n_rows} predictions of fold {fold + 1}; delete it to train this fold "
                "again."
            )
        return found

    def save(self, fold: int, prediction: np.ndarray) -> None:
        """Store the predictions of a finished fold."""
        self._write(self._file(fold), {f"prediction {fold}": prediction})

    def _file(self, fold: int) -> Path:
        return Path(self.folder) / f"fold-{fold + 1:04d}.npz"

    def _read(self, file: Path) -> dict[str, np.ndarray]:
        with add_note_on_error(f"Delete {file} to compute its content again."):
            calibration, arrays = _read(file)
            if calibration != self.calibration:
                raise ValueError(f"{file} belongs to another calibration.")
        return arrays

    def _write(self, file: Path, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            _write(file, self.calibration, arrays)
        except OSError as exc:
            warn(
                f"checkpoint={str(self.folder)!r} cannot be written ({exc.strerror or exc}); fit continues, but an interrupted run "
                "will train this fold again."
            )


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A file beside its target under another name, which replaces the target when it is complete."""
    scratch = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        scratch.touch()
        mode = scratch.stat().st_mode  # of a file that the user makes; writers may choose another
        yield scratch
        scratch.chmod(mode)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _write(file: Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, text=np.array(text), **arrays)
    content = buffer.getvalue()
    with replaced(file) as scratch:
        scratch.write_bytes(content + hashlib.sha256(content).digest())


def _read(file: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The text and the arrays of a file; raises if a byte differs from what was written."""
    content = file.read_bytes()
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        raise ValueError(f"{file} is damaged or not complete.")
    with np.load(io.BytesIO(content[:-32]), allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    return str(arrays.pop("text")), arrays


def _hash(*parts: str) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def array_id(array: Any) -> str:
    """An identifier of the values of an array or a table."""
    names = repr(array.schema) if isinstance(array, Table) else ""
    is_masked = isinstance(array, np.ma.MaskedArray)
    values = np.ma.getdata(array) if is_masked else to_numbers(array, "array")
    digest = hashlib.sha256(f"{names} {values.dtype} {values.shape}".encode())
    for part in (values, np.ma.getmaskarray(array)) if is_masked else (values,):
        for rows in chunks(len(part), int(np.prod(part.shape[1:]))):
            digest.update(np.ascontiguousarray(part[rows]).tobytes())
    kind = "tensor" if is_tensor(array) else type(array).__name__
    return f"{kind} of shape {values.shape} with hash {digest.hexdigest()[:16]}"


def identity(of: object) -> str:
    """A hash of the code and values of a recipe; functions, classes and variables of the user's modules count with theirs."""
    getattr(type(of), "__annotations__", None)  # Python creates them when a protocol is checked
    own = [module for module in [*sys.modules.values()] if _is_of_user(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        _digest(of, {})  # the first time can fill caches of the object
        digest = _digest(of, {})
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return f"{getattr(of, '__qualname__', type(of).__name__)} with hash {digest}"


def _is_of_user(module: object) -> bool:
    """Whether a module is neither a part of Python, nor an installed package, nor geoq."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(module, ModuleType) or not isinstance(file, str):
        return False
    if name.partition(".")[0] in ("geoq", "__main__") or sys.modules.get(name) is not module:
        return False
    return not any(place in file for place in INSTALLED)


class _Values(cloudpickle.Pickler):  # type: ignore[misc]
    """Code and values as bytes that are the same in every process, which cannot be read again.

    The order of sets, numbers of lines and names of files do not count, nor does what cloudpickle stores of its own process.
    """

    def __init__(self, file: Any, modules: dict[str, str]) -> None:
        super().__init__(file)
        self.modules = modules

    def persistent_id(self, part: Any) -> Any:
        """Sets by their sorted values, and modules of the user by their variables."""
        if isinstance(part, set | frozenset):
            return "set", sorted(_digest(item, self.modules) for item in part)
        if not isinstance(part, ModuleType) or not _is_of_user(part):
            return None
        name = part.__name__
        if name not in self.modules:
            self.modules[name] = name  # a module can contain itself
            names = sorted(key for key in vars(part) if not key.startswith("__"))
            values = [f"{key} {_digest_or_type(vars(part)[key], self.modules)}" for key in names]
            self.modules[name] = _hash(name, *values)
        return "module", self.modules[name]

    def reducer_override(self, part: Any) -> Any:
        """Functions and classes as cloudpickle stores them, without what differs between processes."""
        if isinstance(part, CodeType):
            return tuple, (tuple(getattr(part, name) for name in CODE),)
        found = super().reducer_override(part)
        if not isinstance(found, tuple) or len(found) != 6:
            return found
        make, arguments, state, *others = found
        if isinstance(part, type):
            arguments = (*arguments[:-2], None, arguments[-1])  # without the number of the class
        elif isinstance(state, tuple):
            state[1].pop("_cloudpickle_submodules", None)  # those that are imported already
            arguments[1].pop("__file__", None)
        return make, arguments, state, *others


def _digest(of: object, modules: dict[str, str]) -> str:
    digest = hashlib.sha256()
    _Values(SimpleNamespace(write=digest.update), modules).dump(of)
    return digest.hexdigest()[:32]


def _digest_or_type(of: object, modules: dict[str, str]) -> str:
    """A module of the user can contain anything: of what cannot be pickled, the type."""
    try:
        return _digest(of, modules)
    except Exception:  # noqa: BLE001
        return type(of).__qualname__
