"""One file of arrays and numbers: written completely or not at all, checked when it is read, without code.

The format is safetensors: a JSON header, then raw arrays. Reading a file does not execute anything in it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "geoq 2"
# Answers of one model on two machines may differ by this fraction of the largest answer.
SAME = 1e-4


def write(
    path: str | Path, numbers: Mapping[str, Any], arrays: Mapping[str, Tensor]
) -> None:
    """Write numbers (anything that JSON can hold) and arrays. The old file is replaced only when the new one is complete."""
    target = Path(path)
    if not target.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"{target} cannot be written because its folder does not exist; create the folder first."
        )
    stored = {
        name: array.detach().cpu().contiguous().clone()
        for name, array in arrays.items()
    }
    # default: converts NumPy numbers.
    header = json.dumps(numbers, sort_keys=True, default=lambda number: number.item())
    metadata = {"format": FORMAT, "numbers": header, "sha256": _digest(header, stored)}
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(stored, scratch, metadata=metadata)
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the numbers and arrays of a file; refused unless it is complete, unaltered and written by geoq."""
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(
            f"{source} is not a file; save an estimator there first with geoq.save(path)."
        )
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as exc:
        raise ValueError(
            f"{source} is truncated or not a geoq file ({exc}); save the estimator again with geoq.save(path)."
        ) from exc
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{source} has format {metadata.get('format')!r}, but this version of geoq reads {FORMAT!r}; "
            "save the estimator again with this version."
        )
    if metadata.get("sha256") != _digest(metadata["numbers"], arrays):
        raise ValueError(
            f"{source} was altered after it was written (checksum mismatch); use an unaltered copy."
        )
    return json.loads(metadata["numbers"]), arrays


def placed(numbers: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the arrays of a file to the GPU if they were saved from one and one is available."""
    on_gpu = numbers["cuda"] and torch.cuda.is_available()
    return {name: array.cuda() if on_gpu else array for name, array in stored.items()}


def check_same(name: str, answer: Tensor | None, expected: Tensor | None) -> None:
    """Refuse a callable whose answers on the stored inputs differ from the answers in the file."""
    if answer is None or expected is None:
        if answer is not expected:
            had, way_out = (
                ("no", f"leave {name} out")
                if expected is None
                else ("a", f"pass {name}=")
            )
            raise ValueError(
                f"the file was saved with {had} {name}, but this call differs; {way_out}."
            )
        return
    if answer.shape != expected.shape:
        raise ValueError(
            f"{name} returns shape {tuple(answer.shape)} on the stored inputs, but the {name} of the file returned "
            f"{tuple(expected.shape)}; pass the {name} that the file was calibrated with."
        )
    difference = float((answer - expected.to(answer)).abs().max())
    if difference > SAME * float(expected.abs().max()):
        raise ValueError(
            f"{name} is not the one that the file was calibrated with: on the stored inputs its answers differ "
            f"by up to {difference:.3g}; pass the original {name}, or calibrate again."
        )


def with_prefix(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays with a prefix before each name."""
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def without_prefix(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays whose names start with the prefix, which is removed."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _digest(header: str, arrays: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(
            array.reshape(-1).view(torch.uint8).numpy().data if array.numel() else b""
        )
    return digest.hexdigest()
