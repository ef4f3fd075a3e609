"""UM-Bridge 1.0: models of vectors, one query per call, for codes of uncertainty quantification."""

import math
from typing import Any

import numpy as np

from geoq.core.assessment import Assessment, numbers_of
from geoq.serving.inference import numbers_in
from geoq.serving.served import Refusal, Served, Together

PARTS = {
    "prediction": ("prediction",),
    "bound": ("error_hat",),
    "support_score": ("support_score",),
    "assess": ("prediction", "error_hat", "safe", "support_score"),
}
INFO = {"protocolVersion": 1.0, "models": [*PARTS]}
OTHERS = ("Gradient", "ApplyJacobian", "ApplyHessian")
SHARED = ("TestShMem", *(f"{name}ShMem" for name in ("Evaluate", *OTHERS)))
PATHS = {f"/{n}" for n in ("ModelInfo", "InputSizes", "OutputSizes", "Evaluate", *OTHERS, *SHARED)}


async def respond(path: str, asked: Any, served: Served, together: Together) -> Any:
    """The response to a request; refusals have a type of the protocol."""
    name = asked.get("name") if isinstance(asked, dict) else None
    if not isinstance(name, str) or name not in PARTS:
        text = f"there is no model {name!r}; the models are {[*PARTS]}."
        raise Refusal(text, kind="ModelNotFound")
    if path == "/ModelInfo":
        return {"support": {"Evaluate": True} | dict.fromkeys(OTHERS, False)}
    lettered = served.columns is not None and any(c.kind != "number" for c in served.columns)
    if lettered or path[1:] in (*OTHERS, *SHARED):
        text = f"{path} is not supported; the models have Evaluate over HTTP, for inputs that are numbers."
        raise Refusal(text, kind="UnsupportedFeature")
    if asked.get("config"):
        raise Refusal(f"config={asked['config']!r}, but there are no settings; pass config={{}}.")
    fitted = served.estimator.fitted_
    sizes = {"prediction": fitted.output_shape, "error_hat": fitted.error.shape[1:]}
    if path == "/InputSizes":
        return {"inputSizes": [math.prod(fitted.coordinates.input_shape)]}
    if path == "/OutputSizes":
        return {"outputSizes": [math.prod(sizes.get(part, ())) for part in PARTS[name]]}
    queries = served.queries(_tensors(asked.get("input"), served))

    def make(answer: Assessment, drawn: np.ndarray, rows: slice) -> Any:
        del drawn
        return {"output": [_vector(answer, part, rows.start) for part in PARTS[name]]}

    return await together.answer(queries, make)


def _tensors(given: Any, served: Served) -> dict[str, np.ndarray]:
    """One query from the vectors of a request."""
    shape = served.estimator.fitted_.coordinates.input_shape
    vectors = given if isinstance(given, list) else []
    if [len(v) if isinstance(v, list) else -1 for v in vectors] != [math.prod(shape)]:
        raise Refusal(f"input must be a list of one vector of {math.prod(shape)} numbers.")
    row = numbers_in(vectors[0], "input")
    if np.isnan(row).any():
        raise Refusal("input has a missing value, but UM-Bridge has numbers only.")
    if served.columns is not None:
        return {c.name: row[j : j + 1] for j, c in enumerate(served.columns)}
    return {"x": row.reshape(1, *shape)}


def _vector(answer: Assessment, part: str, row: int) -> Any:
    """A part of the answer to one query as a vector of finite numbers."""
    values = numbers_of(getattr(answer, part))[row].reshape(-1).astype(float)
    if not np.isfinite(values).all():
        text = f"{part} is not finite, which JSON cannot express. {answer.reason(row, name='This query')}"
        raise Refusal(text, kind="InvalidOutput")
    return values.tolist()
