"""One file of arrays and numbers: written completely or not at all, checked when it is read, without code.

The format is safetensors: a JSON header, then raw arrays. Reading a file does not execute anything in it. The checksum in a file
detects damage. It is not a signature: whoever writes a file can also compute its checksum.

A file is written beside its target under another name, and replaces the target when it is complete. The process that writes it
holds a lock, which the operating system releases when the process ends. An unlocked scratch file is therefore the rest of a
process that was killed, and the next ``write`` to the same target removes it.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from uuid import uuid4

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.settings import is_number

try:
    import fcntl
except ImportError:  # Windows: without locks, the files of killed processes stay
    fcntl = None  # type: ignore[assignment]

# The numbers and the arrays of a file.
Content: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]

FORMAT = "geoq 3"
# A representation or an increment model is another one if its answers differ by more than this fraction of the largest one.
SAME = 1e-4
# A surrogate is another one if its answers differ by more than this fraction of the typical error, and by more than rounding:
# on two machines, or in batches of different sizes, the answers of one model differ by about this fraction of the largest one.
ERROR_FRACTION = 0.01
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10}
# The largest header that the format allows, in bytes.
LARGEST_HEADER = 100_000_000
# A file this large whose blocks on the disk hold less than a thousandth of it was not written by geoq.
LARGE, MOST_HOLES = 2**24, 1000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What the restoration of an estimator raises if the content of a file is incomplete or of another type.
_INCOMPLETE = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
)


def write(
    path: str | Path, numbers: Mapping[str, Any], arrays: Mapping[str, Tensor]
) -> None:
    """Write numbers (anything that JSON can hold) and arrays. The old file is replaced only when the new one is complete.

    A symbolic link stays, and the file that it points to is replaced.
    """
    target = _writable(Path(path))
    stored = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
    # default: converts NumPy numbers.
    text = json.dumps(numbers, sort_keys=True, default=lambda number: number.item())
    header = _header(text, stored)
    try:
        with _scratch_file(target) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in _order(stored):
                file.write(_bytes(stored[name]))
    except OSError as exc:
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        raise OSError(
            exc.errno,
            f"{target} cannot be written ({reason}); the earlier file, if there is one, is unchanged. Free some space, or choose "
            "another folder",
        ) from exc


def read(path: str | Path) -> Content:
    """Read the numbers and arrays of a file; refused unless it is complete, unaltered and written by geoq.

    The arrays are in memory: later changes of the file do not reach them.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(
            f"{source} is not a file; save an estimator there first with geoq.save(path)."
        )
    with source.open("rb") as file:
        try:
            metadata, arrays = _content(file)
        except (*_INCOMPLETE, RecursionError) as exc:
            raise ValueError(
                f"{source} is truncated or not a geoq file ({exc}); use an unaltered copy, or write it again."
            ) from exc
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{source} has format {metadata.get('format')!r}, but this version of geoq reads {FORMAT!r}; "
            "save the estimator again with this version."
        )
    text = metadata.get("numbers", "")
    if metadata.get("sha256") != _digest(text, arrays):
        raise ValueError(
            f"{source} was altered after it was written (checksum mismatch); use an unaltered copy."
        )
    with restoring(source):
        numbers = json.loads(text)
        check_value("the content", isinstance(numbers, dict), "not a list of names")
    return numbers, arrays


@contextmanager
def restoring(path: str | Path) -> Iterator[None]:
    """Refuse, with the name of the file, content from which no estimator can be restored."""
    try:
        yield
    except _INCOMPLETE as exc:
        raise ValueError(
            f"{path} is not a complete file of a calibrated estimator ({type(exc).__name__}: {exc}); save the estimator again, and "
            "load it with the class that saved it."
        ) from exc


def check_given(surrogate: object, name: str, path: str | Path) -> None:
    """Refuse a call of ``load`` without the model."""
    if surrogate is None:
        raise ValueError(
            f"{name}=None, but {path} contains no model; pass {name}=, the model that the file was calibrated with."
        )


def check_values(
    arrays: Mapping[str, Tensor],
    *,
    finite: tuple[str, ...],
    defined: tuple[str, ...],
    errors: tuple[str, ...],
) -> None:
    """Refuse values that a calibration cannot produce.

    The names of arrays without nan and infinity start with a text in ``finite``, and the names of arrays without nan with a text
    in ``defined``. ``errors`` are the names of arrays without negative and infinite values.
    """
    for name, array in arrays.items():
        if not array.is_floating_point():
            continue
        if name.startswith(defined):
            check_value(f"array {name!r}", not bool(array.isnan().any()), "nan")
        elif name.startswith(finite):
            check_value(f"array {name!r}", bool(array.isfinite().all()), "not finite")
    for name in errors:
        impossible = (arrays[name] < 0) | arrays[name].isinf()
        check_value(
            f"array {name!r}", not bool(impossible.any()), "negative or infinite"
        )


def check_value(what: str, holds: bool, problem: str) -> None:  # noqa: FBT001
    """Refuse a value of a file."""
    if not holds:
        raise ValueError(f"{what} is {problem}")


def check_number(name: str, number: Any, *, above: float = -math.inf) -> None:
    """Refuse anything that is not a finite number larger than a limit."""
    holds = is_number(number) and above < number
    check_value(f"{name}={number!r}", holds, "no possible value")


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
    _check_shape(name, answer, expected)
    difference = float((answer - expected.to(answer)).abs().max())
    # Also refused if the difference is nan.
    if not difference <= SAME * float(expected.abs().max()):
        raise ValueError(
            f"{_another(name, difference)}; pass the original {name}, or calibrate again."
        )


def check_surrogate(
    answer: Tensor,
    expected: Tensor,
    typical: Float[Tensor, " n_channels"],
    distance: Callable[[Tensor, Tensor], Float[Tensor, " n_probes n_channels"]],
) -> None:
    """Refuse a surrogate whose answers on the stored inputs differ by more than rounding and by more than 1 % of its errors.

    ``typical`` is the typical held-out error of each channel, and ``distance`` the error functional between two answers, averaged
    over each channel.
    """
    _check_shape("surrogate", answer, expected)
    gap, expected = (answer - expected.to(answer)).abs(), expected.to(answer)
    if bool((gap <= rounding(expected)).all()):
        return
    ratio = (distance(expected, answer) / typical.to(answer)).nan_to_num(torch.inf)
    # Where the typical error is 0, only rounding is allowed.
    if bool((ratio <= ERROR_FRACTION).all()):
        return
    worst = int(ratio.amax(dim=0).argmax())
    raise ValueError(
        f"{_another('surrogate', float(gap.max()))}, which is {100 * float(ratio.max()):.3g} % of the typical error "
        f"{float(typical[worst]):.3g} that is bounded, and at most {100 * ERROR_FRACTION:g} % is allowed; pass the original "
        "surrogate, or calibrate again."
    )


def rounding(answers: Float[Tensor, " n *output"]) -> Float[Tensor, " *channels"]:
    """The largest difference that rounding causes between machines and batches, for each channel of a field or each output."""
    size = answers.abs()
    channel = size.amax(dim=(0, *range(2, answers.ndim)), keepdim=True)
    own = ROUNDING[answers.dtype] * channel
    return own + torch.finfo(answers.dtype).eps * size.max()


def _check_shape(name: str, answer: Tensor, expected: Tensor) -> None:
    if answer.shape != expected.shape:
        raise ValueError(
            f"{name} returns shape {tuple(answer.shape)} on the stored inputs, but the {name} of the file returned "
            f"{tuple(expected.shape)}; pass the {name} that the file was calibrated with."
        )


def _another(name: str, difference: float) -> str:
    return (
        f"{name} is not the one that the file was calibrated with: on the stored inputs its answers differ by up to "
        f"{difference:.3g}"
    )


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a network its stored weights.

    The network is built on the device "meta", so that its sizes are compared with the arrays before memory is allocated.
    """
    module.load_state_dict(weights, assign=True)
    module.eval()


def state_of(part: Any) -> dict[str, Any]:
    """The fields of a dataclass, without what it computes from them."""
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


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


def _writable(path: Path) -> Path:
    """The file to write: the target of a symbolic link, refused unless it is a file or does not exist yet."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written because its folder does not exist; create the folder first."
        )
    if target.is_symlink() or (target.exists() and not target.is_file()):
        kind = "a folder" if target.is_dir() else "a device or a link to itself"
        raise ValueError(f"{path} is {kind}, not a file; choose the path of a file.")
    return target


@contextmanager
def _scratch_file(target: Path) -> Iterator[BinaryIO]:
    """An open file that replaces the target at the end of the ``with`` block, unless the block raises.

    Its permissions follow the umask. Scratch files that killed processes left for the same target are removed.
    """
    _remove_leftovers(target)
    scratch, file = _create(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    """Remove the scratch files of this target that no living process holds."""
    for path in target.parent.glob(f".{escape(target.name)}.{32 * '[0-9a-f]'}.tmp"):
        _remove_if_unlocked(path)


def _create(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        scratch = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
        file = scratch.open("xb")
        if fcntl is None:
            return scratch, file
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            return scratch, file
        # Between open and lock, another process may have removed the file as a leftover.
        if scratch.exists():
            return scratch, file
        file.close()


def _remove_if_unlocked(path: Path) -> None:
    if fcntl is None or path.is_symlink():
        return
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (
        OSError
    ):  # a living process holds the lock, or the file belongs to another user
        return


def _header(text: str, arrays: Mapping[str, Tensor]) -> bytes:
    """The header of the format: name, type, shape and place of each array; padded so that the arrays are aligned."""
    metadata = {"format": FORMAT, "numbers": text, "sha256": _digest(text, arrays)}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name in _order(arrays):
        array = arrays[name]
        end = start + array.numel() * array.element_size()
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _content(file: BinaryIO) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the arrays; refused unless the declared sizes account for every byte of the file."""
    status = os.fstat(file.fileno())
    on_disk = 512 * getattr(status, "st_blocks", 0)
    if status.st_size > LARGE and 0 < MOST_HOLES * on_disk < status.st_size:
        raise ValueError(f"only {on_disk} of its {status.st_size} bytes were written")
    n_header = int.from_bytes(file.read(8), "little")
    n_data = status.st_size - 8 - n_header
    if n_header > LARGEST_HEADER or n_data < 0:
        raise ValueError("the header is incomplete")
    header = json.loads(file.read(n_header))
    metadata = header.pop("__metadata__", {})
    check_value("metadata", all(type(t) is str for t in metadata.values()), "no text")
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    # All sizes are compared before the first array is allocated.
    if _end(entries) != n_data:
        raise ValueError(f"{n_data} bytes of arrays instead of {_end(entries)}")
    return metadata, {name: _array(file, entry) for name, entry in entries}


def _end(entries: list[tuple[str, dict[str, Any]]]) -> int:
    """The number of bytes of all arrays; refused unless each has its declared size and they lie without gaps."""
    place = 0
    for name, entry in entries:
        (start, end), shape = entry["data_offsets"], entry["shape"]
        size = _DTYPES[entry["dtype"]].itemsize
        possible = all(type(n) is int and n >= 0 for n in (start, end, *shape))
        fits = possible and start == place and end - start == size * math.prod(shape)
        check_value(f"array {name!r}", fits, "not of its declared size")
        place = end
    return place


def _array(file: BinaryIO, entry: dict[str, Any]) -> Tensor:
    """An array in memory of its own, read from the file."""
    array = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
    view = _bytes(array)
    if len(view) and file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise ValueError("the file ends before its arrays")
    return array


def _order(arrays: Mapping[str, Tensor]) -> list[str]:
    """The order of the arrays in a file: large elements first, so that all arrays are aligned."""
    return sorted(arrays, key=lambda name: (-arrays[name].element_size(), name))


def _bytes(array: Tensor) -> memoryview:
    """The memory of an array."""
    if not array.numel():
        return memoryview(b"")
    # A single number can have the stride 0, which a view as bytes does not accept.
    row = array.as_strided((array.numel(),), (1,))
    flat: memoryview = row.view(torch.uint8).numpy().data
    return flat


def _digest(text: str, arrays: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()
