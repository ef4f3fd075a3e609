"""One file of arrays and numbers for a calibrated estimator: a walk over dataclasses, in the format of safetensors.

A file contains no code: ``CLASSES`` lists everything that a file can build. The user's callables are not in it; their answers at a few
stored inputs are, so that another callable is recognised. A file is written beside its target under another name, and replaces the
target when it is complete. The digest in a file detects damage. It is not a signature: whoever writes a file can also compute it.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np

from geoq.arrays import is_tensor, to_numbers
from geoq.checks import check_fitted, warn
from geoq.data.table import Table, build
from geoq.surrogate import check_callable

FORMAT = "geoq 4"
# Fields that are callables of the user.
CALLABLES = ("surrogate", "train_surrogate", "representation", "error_functional")
# A representation is another one if its answers differ by more than this fraction of the largest one.
SAME = 1e-4
# A surrogate is another one if its answers differ by more than this fraction of the typical error, and by more than rounding:
# on two machines, or in batches of different sizes, the answers of one model differ by about this fraction of the largest one.
ERROR_FRACTION = 0.01
ROUNDING = {4: 1e-5, 8: 1e-10}
# What building an estimator raises if the content of a file is incomplete or of another type.
_UNUSABLE = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError)


def classes(*, with_torch: bool = False) -> dict[str, type]:
    """Everything that a file can build; with torch also the networks."""
    from geoq.state_classes import all_classes

    return {kind.__name__: kind for kind in all_classes(with_torch=with_torch)}


class _Packer:
    """Dataclasses as JSON, with their arrays stored once under the path of their first owner."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.known = classes()
        self._paths: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def pack(self, thing: Any, path: str) -> Any:
        """The thing as JSON."""
        if thing is None or isinstance(thing, bool | str):
            return thing
        if isinstance(thing, np.ndarray):
            if thing.flags.f_contiguous and not thing.flags.c_contiguous:
                return {"transposed": self._stored(thing, path)}
            return {"array": self._stored(thing, path)}
        if isinstance(thing, int | np.integer):
            return int(thing)
        if isinstance(thing, float | np.floating):
            return _packed_number(float(thing))
        if isinstance(thing, tuple | list):
            items = [self.pack(part, f"{path}.{i}") for i, part in enumerate(thing)]
            return {type(thing).__name__: items}
        if isinstance(thing, slice):
            return {"slice": [thing.start, thing.stop, thing.step]}
        if isinstance(thing, Mapping):
            items = [[self.pack(k, path), self.pack(v, f"{path}.{k}")] for k, v in thing.items()]
            return {"dict": items}
        if isinstance(thing, Table):
            recipe = None if thing.schema is None else thing.recipe
            return {"table": self.pack((recipe, thing.array), path)}
        if is_tensor(thing):
            return {"tensor": self.pack(to_numbers(thing, path), path)}
        return self._object(thing, path)

    def _object(self, thing: Any, path: str) -> Any:
        name = type(thing).__name__
        if self.known.get(name) is not type(thing):
            named = getattr(thing, "__name__", None)
            if named in self.known and self.known[named] is thing:
                return {"function": named}
            raise TypeError(
                f"{path} is a {name}, an object of the user, which a file cannot hold; use an object of geoq."
            )
        if hasattr(thing, "state_dict"):  # a network, which has the arguments of its class
            weights = {k: v.cpu().numpy() for k, v in thing.state_dict().items()}
            # The file sorts the names; the first one is the kind.
            return {
                "network": name,
                "settings": self.pack(cast(Any, thing).config, f"{path}.settings"),
                "weights": {k: self.pack(v, f"{path}.{k}") for k, v in weights.items()},
            }
        assert is_dataclass(thing)
        own = [f.name for f in fields(thing) if f.name not in CALLABLES]
        parts = {n: self.pack(getattr(thing, n), f"{path}.{n}") for n in own}
        return {"class": name, "fields": parts}

    def _stored(self, array: np.ndarray, path: str) -> str:
        if id(array) not in self._paths:
            self._paths[id(array)] = path
            self._kept.append(array)
            # The same order in memory after loading, as products of matrices round differently in another order.
            fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            self.arrays[path] = array.T if fortran else np.asarray(array, order="C")
        return self._paths[id(array)]


def _packed_number(number: float) -> Any:
    return number if math.isfinite(number) else {"number": repr(number)}


class _Unpacker:
    """The inverse of ``_Packer``. An array that several parts share is one array again."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.known = arrays, classes()
        self._transposed: dict[str, np.ndarray] = {}

    def unpack(self, tree: Any) -> Any:
        """The thing that the JSON describes."""
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = [*tree.items()][:1]
        if kind == "array":
            return self.arrays[content]
        if kind == "transposed":
            return self._transposed.setdefault(content, self.arrays[content].T)
        if kind == "number":
            return float(content)
        if kind == "slice":
            return slice(*content)
        if kind == "missing":
            return _missing(content)
        if kind in ("tuple", "list"):
            parts = [self.unpack(part) for part in content]
            return tuple(parts) if kind == "tuple" else parts
        if kind == "dict":
            return {self.unpack(key): self.unpack(part) for key, part in content}
        if kind == "table":
            recipe, array = self.unpack(content)
            return array if recipe is None else build(array, *recipe)
        if kind == "tensor":
            import torch

            return torch.from_numpy(np.array(self.unpack(content)))
        if content not in self.known:
            self.known = classes(with_torch=True)
        if kind == "function":
            return self.known[content]
        if kind == "network":
            return self._network(tree)
        made: Any = object.__new__(self.known[content])
        if {*tree["fields"]} != {f.name for f in fields(made)} - {*CALLABLES}:
            raise KeyError(f"{content} has other fields")
        for name, part in tree["fields"].items():
            object.__setattr__(made, name, self.unpack(part))
        return made

    def _network(self, tree: Any) -> Any:
        import torch

        config = self.unpack(tree["settings"])
        with torch.device("meta"):  # no random weights
            network: Any = self.known[tree["network"]](**config)
        weights = {
            name: torch.from_numpy(np.array(self.unpack(part)))
            for name, part in tree["weights"].items()
        }
        network.load_state_dict(weights, assign=True)
        return network.eval()


def _missing(name: str) -> Any:
    """What stands in for a callable of the user until it is passed to ``load``."""

    def missing(*_: Any) -> Any:
        raise ValueError(
            f"the file was calibrated with a function of your own as {name}, which it does not contain; pass {name}= to load."
        )

    return missing


def save(
    path: str | Path,
    estimator: Any,
    *,
    calibration: bool = True,
    labels: Mapping[str, Any] | None = None,
) -> None:
    """Write a calibrated estimator; ``labels`` is what a face adds, as JSON."""
    from safetensors.numpy import save_file

    check_fitted(estimator)
    fitted = estimator.fitted_ if calibration else estimator.fitted_.without_tuples()
    packer = _Packer()
    tree = {
        "estimator": type(estimator).__name__,
        "settings": _settings(estimator, packer),
        "fitted": packer.pack(fitted, "fitted"),
        "answers": packer.pack(fitted.answers(), "answers"),
        "labels": None if labels is None else dict(labels),
    }
    text = json.dumps(tree, sort_keys=True)
    metadata = {"format": FORMAT, "tree": text, "digest": _digest(text, packer.arrays)}
    with _scratch_file(Path(path)) as scratch:
        save_file(packer.arrays, scratch, metadata)


def _settings(estimator: Any, packer: _Packer) -> dict[str, Any]:
    """The settings that a file can hold, and the names of the user's callables; the others have their defaults after loading."""
    found = {}
    for name, value in estimator.get_params().items():
        if name in ("surrogate", "train_surrogate"):
            continue
        # The callables of the calibration, whatever was set afterwards.
        used = getattr(estimator.fitted_, name, value) if name in CALLABLES else value
        try:
            found[name] = packer.pack(used, f"settings.{name}")
        except TypeError:
            if name in CALLABLES:
                found[name] = {"missing": name}
    return found


@contextmanager
def _scratch_file(target: Path) -> Iterator[Path]:
    """A file beside the target, which replaces the target at the end."""
    if target.is_dir() or not target.parent.is_dir():
        raise FileNotFoundError(
            f"{target} cannot be written: {'it is a folder' if target.is_dir() else 'its folder does not exist'}; pass the path of "
            "a file."
        )
    scratch = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tree and the arrays of a file; raises unless every byte is as it was written."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist, or is not a file.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError, MemoryError) as exc:
        raise ValueError(
            f"{path} is no file of geoq, or is truncated ({exc}); save the estimator again."
        ) from exc
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has the format {metadata.get('format')!r}, but this version of geoq reads {FORMAT!r}; calibrate and save again."
        )
    if metadata.get("digest") != _digest(metadata.get("tree", ""), arrays):
        raise ValueError(f"{path} is damaged: its digest differs; save it again.")
    tree: dict[str, Any] = json.loads(metadata["tree"])
    return tree, arrays


def load(
    path: str | Path, cls: Any, *, surrogate: Any, content: Any = None, **callables: Any
) -> Any:
    """An estimator of the class ``cls`` from a file, or its content; raises unless the callables answer as the saved ones."""
    tree, arrays = content or read(path)
    if tree.get("estimator") != cls.__name__:
        kind = tree.get("estimator")
        raise ValueError(f"{path} holds a {kind}; load it with {kind}.load.")
    if surrogate is None:
        raise TypeError(
            f"surrogate=None, but {path} contains no model; pass the model that it was calibrated with (surrogate_ of the estimator "
            "that was saved)."
        )
    check_callable(surrogate, "surrogate")
    given = {name: part for name, part in callables.items() if part is not None}
    for name, part in given.items():
        check_callable(part, name)
    try:
        unpacker = _Unpacker(arrays)
        settings = {n: unpacker.unpack(p) for n, p in tree["settings"].items()}
        expected = unpacker.unpack(tree["answers"])
        fitted = unpacker.unpack(tree["fitted"])
        settings |= given
        estimator = cls(surrogate, None, **settings)
        known = {name: getattr(estimator, name, None) for name in CALLABLES}
        del known["train_surrogate"]
        for name, part in known.items():
            object.__setattr__(fitted, name, part)
        probes = fitted.probes
    except _UNUSABLE as exc:
        raise ValueError(
            f"{path} cannot be restored ({type(exc).__name__}: {exc}); save the estimator again."
        ) from exc
    estimator.fitted_ = fitted
    if probes is None:
        warn(
            f"{path} was calibrated on a table that cannot be rebuilt here, so it was not checked whether surrogate is the model "
            "that the file was calibrated with."
        )
        return estimator
    for name, answer in fitted.answers().items():
        _check_same(name, answer, expected.get(name), fitted)
    return estimator


def _check_same(name: str, answer: np.ndarray, expected: np.ndarray | None, fitted: Any) -> None:
    """Raise for a callable whose answers at the stored inputs differ from the answers in the file."""
    if expected is None or answer.shape != expected.shape:
        had = "none" if expected is None else f"shape {expected.shape}"
        raise ValueError(
            f"{name} returns shape {answer.shape} at the stored inputs, but the {name} of the file returned {had}; pass the {name} "
            "that the file was calibrated with."
        )
    gap = abs(answer.astype(float) - expected)
    if name == "surrogate":
        size = abs(expected).max(axis=(0, *range(2, expected.ndim)), keepdims=True)
        own = ROUNDING[expected.dtype.itemsize] * size
        rounding = own + np.finfo(expected.dtype).eps * size.max()
        if bool((gap <= rounding).all()):
            return
        ratio = fitted.relative_difference(answer, expected)
        limit, of = ERROR_FRACTION, "the typical error that is bounded"
    else:
        ratio = float(gap.max() / max(float(abs(expected).max()), 1e-300))
        limit, of = SAME, "its largest answer"
    # Also raised if the ratio is nan.
    if not ratio <= limit:
        raise ValueError(
            f"{name} differs from the {name} of the file by up to {float(gap.max()):.3g} at the stored inputs, which is "
            f"{100 * ratio:.3g} % of {of}, and at most {100 * limit:g} % is allowed; pass the original {name}, or calibrate again."
        )
