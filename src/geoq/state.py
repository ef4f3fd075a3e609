"""One file of arrays and numbers for a calibrated estimator: a walk over dataclasses, in the format of safetensors.

A file contains no code: ``all_classes`` lists everything that a file can build. The user's callables are not in it; their answers at a
few stored inputs are, so that another callable is recognised. The digest in a file detects damage. It is not a signature: whoever
writes a file can also compute it.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from geoq import surrogate as errors
from geoq.arrays import is_other, is_tensor, to_numbers
from geoq.checks import add_note_on_error, check_fitted, module_with_torch, warn
from geoq.data.metric import identity
from geoq.data.table import Table
from geoq.surrogate import check_callable
from geoq.training.checkpoint import replaced

FORMAT = "geoq 7"
# Fields that are callables of the user.
CALLABLES = ("surrogate", "train_surrogate", "representation", "error_functional", "features")
# A representation is another one if its answers differ by more than this fraction of the largest one.
SAME = 1e-4
# A surrogate is another one if its answers differ by more than this fraction of the typical error, and by more than rounding:
# on two machines, or in batches of different sizes, the answers of one model differ by about this fraction of the largest one.
ERROR_FRACTION = 0.01
ROUNDING = {4: 1e-5, 8: 1e-10}
# What building an estimator raises if the content of a file is incomplete or of another type.
_UNUSABLE = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError)
# The modules of what is fitted. The modules that need torch are imported for files that name one of their classes.
FITTED = tuple(
    f"geoq.{part}"
    for part in ("bounds.", "core.", "data.", "regions.", "rollout.", "training.loop")
)
FUNCTIONS = (*errors.ELEMENTWISE, errors.norm_error, errors.relative_norm_error, identity)
# The arrays that were packed, by their ids, with the paths of their first owners.
Seen: TypeAlias = dict[int, tuple[str, np.ndarray]]


def _is_known(kind: Any) -> bool:
    """Whether a file can name this class: it is a dataclass or a network of these modules."""
    return kind.__module__.startswith(FITTED) and (
        is_dataclass(kind) or hasattr(kind, "state_dict")
    )


def all_classes(*, with_torch: bool = False) -> list[Any]:
    """The dataclasses, networks and functions that a file can name; with torch also from modules that need it."""
    from geoq import parts

    for name in {*parts.WITH_TORCH.values()} if with_torch else ():
        module_with_torch(name, "this file")
    found: list[Any] = [*FUNCTIONS]
    for name, module in [*sys.modules.items()]:
        if name.startswith(FITTED):
            own = [kind for kind in vars(module).values() if isinstance(kind, type)]
            found += [kind for kind in own if kind.__module__ == name and _is_known(kind)]
            found += getattr(module, "FUNCTIONS", ())
    found.remove(Table)  # stored by its numbers; the domain has the same name
    return [*dict.fromkeys(found)]


def _by_name(*, with_torch: bool = False) -> dict[str, Any]:
    return {kind.__name__: kind for kind in all_classes(with_torch=with_torch)}


def _packed(thing: Any, path: str, seen: Seen) -> Any:
    """The thing as JSON; its arrays are stored once."""
    if thing is None or isinstance(thing, bool | str):
        return thing
    thing = np.array(to_numbers(thing, path)) if is_other(thing) else thing
    if isinstance(thing, np.ndarray):
        # The same order in memory after loading, as products of matrices round differently in another order.
        kind = "transposed" if _is_transposed(thing) else "array"
        return {kind: seen.setdefault(id(thing), (path, thing))[0]}
    if isinstance(thing, int | np.integer):
        return int(thing)
    if isinstance(thing, float | np.floating):
        return float(thing) if math.isfinite(thing) else {"number": repr(float(thing))}
    if isinstance(thing, tuple | list):
        items = [_packed(part, f"{path}.{i}", seen) for i, part in enumerate(thing)]
        return {type(thing).__name__: items}
    if isinstance(thing, slice):
        return {"slice": [thing.start, thing.stop, thing.step]}
    if isinstance(thing, Mapping):
        items = [
            [_packed(k, path, seen), _packed(v, f"{path}.{k}", seen)] for k, v in thing.items()
        ]
        return {"dict": items}
    if isinstance(thing, Table):
        return {"table": _packed((thing.schema, thing.array), path, seen)}
    if is_tensor(thing):
        return {"tensor": _packed(to_numbers(thing, path), path, seen)}
    return _packed_object(thing, path, seen)


def _packed_object(thing: Any, path: str, seen: Seen) -> Any:
    name = type(thing).__name__
    if not _is_known(type(thing)):
        named = getattr(thing, "__name__", "")
        if _by_name().get(named) is thing:
            return {"function": named}
        raise TypeError(
            f"{path} is a {name}, an object of the user, which a file cannot hold; use an object of geoq."
        )
    if hasattr(thing, "state_dict"):  # a network, which has the arguments of its class
        weights = {k: v.cpu().numpy() for k, v in thing.state_dict().items()}
        # The file sorts the names; the first one is the kind.
        return {
            "network": name,
            "settings": _packed(thing.config, f"{path}.settings", seen),
            "weights": {k: _packed(v, f"{path}.{k}", seen) for k, v in weights.items()},
        }
    own = [f.name for f in fields(thing) if f.name not in CALLABLES]
    parts = {n: _packed(getattr(thing, n), f"{path}.{n}", seen) for n in own}
    return {"class": name, "fields": parts}


def _is_transposed(array: np.ndarray) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _unpacked(tree: Any, arrays: dict[str, np.ndarray], known: dict[str, Any]) -> Any:
    """The thing that the JSON describes. An array that several parts share is one array again."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = [*tree.items()][:1]
    unpacked = partial(_unpacked, arrays=arrays, known=known)
    if kind == "array":
        return arrays[content]
    if kind == "transposed":
        return arrays.setdefault(f"{content} transposed", arrays[content].T)
    if kind == "number":
        return float(content)
    if kind == "slice":
        return slice(*content)
    if kind == "missing":
        return _missing(content)
    if kind in ("tuple", "list"):
        parts = [unpacked(part) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {unpacked(key): unpacked(part) for key, part in content}
    if kind == "table":
        schema, array = unpacked(content)
        return array if schema is None else schema.build(array)
    if kind == "tensor":
        return _tensor(unpacked(content))
    if content not in known:
        known.update(_by_name(with_torch=True))
    if kind == "function":
        return known[content]
    if kind == "network":
        weights = {name: _tensor(unpacked(part)) for name, part in tree["weights"].items()}
        return _network(known[content], unpacked(tree["settings"]), weights)
    made: Any = object.__new__(known[content])
    if {*tree["fields"]} != {f.name for f in fields(made)} - {*CALLABLES}:
        raise KeyError(f"{content} has other fields")
    for name, part in tree["fields"].items():
        object.__setattr__(made, name, unpacked(part))
    return made


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


def _network(kind: Any, config: dict[str, Any], weights: dict[str, Any]) -> Any:
    import torch

    with torch.device("meta"):  # no random weights
        network = kind(**config)
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
    seen: Seen = {}
    tree = {
        "estimator": type(estimator).__name__,
        "settings": _settings(estimator, seen),
        "fitted": _packed(fitted, "fitted", seen),
        "answers": _packed(fitted.answers(), "answers", seen),
        "labels": None if labels is None else dict(labels),
    }
    text = json.dumps(tree, sort_keys=True)
    arrays = {
        path: array.T if _is_transposed(array) else np.asarray(array, order="C")
        for path, array in seen.values()
    }
    metadata = {"format": FORMAT, "tree": text, "digest": _digest(text, arrays)}
    with replaced(Path(path)) as scratch:
        save_file(arrays, scratch, metadata)


def _settings(estimator: Any, seen: Seen) -> dict[str, Any]:
    """The settings that a file can hold, and the names of the user's callables; the others have their defaults after loading."""
    found = {}
    for name, value in estimator.get_params().items():
        if name in ("surrogate", "train_surrogate"):
            continue
        # The callables of the calibration, whatever was set afterwards.
        used = getattr(estimator.fitted_, name, value) if name in CALLABLES else value
        try:
            found[name] = _packed(used, f"settings.{name}", seen)
        except TypeError:
            if name in CALLABLES:
                found[name] = {"missing": name}
    return found


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
    with add_note_on_error(
        f"{path} contains no model; surrogate_ of an estimator is the one that fit has trained"
    ):
        check_callable(surrogate, "surrogate")
    given = {name: part for name, part in callables.items() if part is not None}
    for name, part in given.items():
        check_callable(part, name)
    try:
        unpacked = partial(_unpacked, arrays=arrays, known=_by_name())
        settings = {n: unpacked(p) for n, p in tree["settings"].items()}
        expected, fitted = unpacked(tree["answers"]), unpacked(tree["fitted"])
        estimator = cls(surrogate, None, **(settings | given))
        for name in {*CALLABLES} - {"train_surrogate"}:
            object.__setattr__(fitted, name, getattr(estimator, name, None))
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


def packed_labels(known: Mapping[str, Any]) -> dict[str, Any]:
    """The labels of DataArrays as JSON; attributes of other types become text."""
    found = {name: like.to_dict(data=False) for name, like in known.items()}
    for name, like in known.items():
        for n, of in like.coords.items():
            if of.dtype.kind == "O" and not {*map(type, of.values.flat)} <= {str}:
                raise ValueError(f"coordinate {n!r} has dtype object; convert it for a file.")
            labels = of.astype(int) if of.dtype.kind in "mM" else of
            found[name]["coords"][n]["data"] = labels.values.tolist()
    return dict(json.loads(json.dumps(found, default=str)))


def unpacked_labels(found: Mapping[str, Any]) -> dict[str, Any]:
    """DataArrays of zeros with these labels."""
    for one in found.values():
        one["data"] = np.zeros(one["shape"], one["dtype"])
        for of in one["coords"].values():
            of["data"] = np.array(of["data"], of["dtype"])
    return {n: import_module("xarray").DataArray.from_dict(one) for n, one in found.items()}
