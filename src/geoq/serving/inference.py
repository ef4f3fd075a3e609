"""The Open Inference Protocol v2: batches of queries as tensors, in strict JSON or with the extension for binary tensors."""

from typing import Any

import numpy as np
import orjson

from geoq.arrays import to_numbers
from geoq.core.assessment import Assessment, numbers_of
from geoq.serving.served import KINDS, N_DEFAULT, Refusal, Served, Together

MODEL = "geoq"
# The number types of the protocol, little endian.
TYPES = {
    "FP64": "<f8", "FP32": "<f4", "FP16": "<f2", "INT64": "<i8", "INT32": "<i4", "INT16": "<i2", "INT8": "i1", "UINT64": "<u8",
    "UINT32": "<u4", "UINT16": "<u2", "UINT8": "u1", "BOOL": "?",
}  # fmt: skip
# This header has the length of the JSON before binary tensors.
LENGTH = "Inference-Header-Content-Length"


def to_json(content: Any) -> bytes:
    """Strict JSON: numbers that are not finite become null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def from_json(body: bytes | memoryview) -> Any:
    """The content of strict JSON; refuses anything else, such as NaN."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise Refusal(f"the body is not strict JSON: {exc}.") from exc


def numbers_in(data: Any, name: str) -> np.ndarray:
    """JSON numbers as an array; null is nan. Raises for anything else."""
    found = np.asarray(data)
    if found.dtype.kind == "O" and all(v is None or type(v) in (int, float) for v in found.flat):
        found = found.astype(float)
    if found.dtype.kind not in "iuf":
        raise Refusal(f"{name} must contain numbers alone, or null where a value is missing.")
    return to_numbers(found, name)


def parse(body: bytes, length: str | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The request and its input tensors, given the length of the JSON if binary tensors follow it."""
    end = len(body) if length is None else int(length)
    asked, rest, tensors = from_json(memoryview(body)[:end]), memoryview(body)[end:], {}
    inputs = asked.get("inputs") if isinstance(asked, dict) else None
    if not isinstance(inputs, list) or not all(isinstance(t, dict) and "name" in t for t in inputs):
        raise Refusal("pass inputs, a list of tensors with name, shape, datatype and data.")
    for tensor in inputs:
        size = parameters_of(tensor).get("binary_data_size")
        if size is not None and (type(size) is not int or not 0 <= size <= len(rest)):
            raise Refusal(f"binary_data_size={size!r}, but {len(rest)} bytes follow.")
        name = str(tensor["name"])
        try:
            tensors[name] = _values(tensor, name, None if size is None else rest[:size])
        except (ValueError, TypeError) as exc:
            raise Refusal(f"the input {name!r} is not usable: {exc}.") from exc
        rest = rest[size or 0 :]
    if len(tensors) < len(inputs):
        raise Refusal("two inputs have the same name; pass each once.")
    return asked, tensors


def parameters_of(part: Any) -> dict[str, Any]:
    """The parameters of a request or of a tensor."""
    found = part.get("parameters")
    return found if isinstance(found, dict) else {}


def _values(tensor: dict[str, Any], name: str, raw: memoryview | None) -> np.ndarray:
    """The values of an input tensor."""
    kind, shape, data = (tensor.get(key) for key in ("datatype", "shape", "data"))
    if kind not in (["BYTES", *TYPES] if raw is None else [*TYPES]):
        raise TypeError(f"the datatype is {kind!r}; use one of {[*TYPES]}, or BYTES in JSON")
    if not isinstance(shape, list) or not (raw is not None or isinstance(data, list)):
        raise TypeError("its shape and its data must be lists")
    if raw is not None:
        return np.frombuffer(raw, TYPES[str(kind)]).astype(float).reshape(shape)
    values = np.asarray(data, object) if kind == "BYTES" else numbers_in(data, name)
    return values.reshape(shape)


async def infer(body: bytes, length: str | None, served: Served, together: Together) -> Any:
    """The body and the headers of the response to a request."""
    asked, tensors = parse(body, length)
    queries, wanted = served.queries(tensors), _wanted(asked, served)
    head = {"model_name": MODEL} | ({"id": asked["id"]} if "id" in asked else {})

    def make(answer: Assessment, drawn: np.ndarray, rows: slice) -> tuple[bytes, dict[str, str]]:
        outputs, raw = [], b""
        for name, binary in wanted.items():
            values = _output(name, answer, drawn, rows, served.names)
            kind = KINDS.get(name, "FP64")
            tensor: dict[str, Any] = {"name": name, "datatype": kind, "shape": values.shape}
            if binary and kind != "BYTES":
                raw += values.tobytes()
                tensor["parameters"] = {"binary_data_size": values.nbytes}
            else:
                flat = values.reshape(-1)
                tensor["data"] = flat.tolist() if kind == "BYTES" else flat
            outputs.append(tensor)
        text = to_json(head | {"outputs": outputs})
        return text + raw, {LENGTH: str(len(text))} if raw else {}

    observe = parameters_of(asked).get("observe") is not False
    return await together.answer(queries, make, observe=observe)


def _wanted(asked: dict[str, Any], served: Served) -> dict[str, bool]:
    """The outputs that a request names, and whether each of them is binary."""
    known = [part["name"] for part in served.outputs()]
    everything = parameters_of(asked).get("binary_data_output", False)
    outputs = asked.get("outputs") or [{"name": name} for name in known[:N_DEFAULT]]
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise Refusal("outputs must be a list of objects with a name.")
    if unknown := [part.get("name") for part in outputs if part.get("name") not in known]:
        raise Refusal(f"there is no output {unknown[0]!r}; the outputs are {known}.")
    return {o["name"]: bool(parameters_of(o).get("binary_data", everything)) for o in outputs}


def _output(
    name: str, answer: Assessment, drawn: np.ndarray, rows: slice, names: Any
) -> np.ndarray:
    """The values of an output for the queries of one request."""
    numbers = range(rows.start, rows.stop)
    if name == "verify":
        return np.isin(numbers, drawn)
    if name == "reason":
        texts = (answer.reason(i, name=f"query {i - rows.start}", names=names) for i in numbers)
        return np.array([*texts], object)
    values = np.ascontiguousarray(numbers_of(getattr(answer, name))[rows])
    return values if values.dtype.kind == "b" else values.astype(float)
