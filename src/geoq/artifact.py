"""One file of arrays and numbers: written whole or not at all, checked when read, never code.

The format is safetensors: a JSON header, then raw arrays. Reading it runs nothing that is in it.
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

FORMAT = "geoq 1"
# Answers that differ by less than this share of the largest are those of one model on two machines.
SAME = 1e-4


def write(
    path: str | Path, numbers: Mapping[str, Any], arrays: Mapping[str, Tensor]
) -> None:
    """Write numbers (anything JSON can hold) and arrays, atomically: the old file stands until the new one is whole."""
    target = Path(path)
    if not target.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"{target} cannot be written, since its folder does not exist; make the folder first."
        )
    stored = {
        name: array.detach().cpu().contiguous().clone()
        for name, array in arrays.items()
    }
    # default: NumPy numbers are numbers too.
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
    """The numbers and arrays of a file, refused unless it is whole, unaltered and ours."""
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
            "it was written by something else: save the estimator again with this version."
        )
    if metadata.get("sha256") != _digest(metadata["numbers"], arrays):
        raise ValueError(
            f"{source} was altered after it was written (checksum mismatch); use an unaltered copy."
        )
    return json.loads(metadata["numbers"]), arrays


def placed(numbers: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arrays of a file on the GPU, if they came from one and one is here."""
    on_gpu = numbers["cuda"] and torch.cuda.is_available()
    return {name: array.cuda() if on_gpu else array for name, array in stored.items()}


def check_same(name: str, answer: Tensor | None, expected: Tensor | None) -> None:
    """Refuse a callable that does not answer on the stored inputs as the one did that the file was made with."""
    if answer is None or expected is None:
        if answer is not expected:
            had, way_out = (
                ("no", f"leave {name} out")
                if expected is None
                else ("a", f"pass {name}=")
            )
            raise ValueError(
                f"the file was saved with {had} {name}, unlike this call; {way_out}."
            )
        return
    if answer.shape != expected.shape:
        raise ValueError(
            f"{name} returns shape {tuple(answer.shape)} on the stored inputs, but the one that the file was "
            f"calibrated for returned {tuple(expected.shape)}; pass that one."
        )
    difference = float((answer - expected.to(answer)).abs().max())
    if difference > SAME * float(expected.abs().max()):
        raise ValueError(
            f"{name} is not the one that the file was calibrated for: on the stored inputs its answers differ "
            f"by up to {difference:.3g}; pass that one, or calibrate again."
        )


def _digest(header: str, arrays: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(
            array.reshape(-1).view(torch.uint8).numpy().data if array.numel() else b""
        )
    return digest.hexdigest()
