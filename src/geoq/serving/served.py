"""A calibrated estimator behind the service: its inputs and outputs as tensors, and requests that are answered together."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

import narwhals
import numpy as np

from geoq.core.assessment import Assessment
from geoq.core.estimator import GeoQ
from geoq.data.column import Column
from geoq.monitor import Monitor

# The outputs of the Open Inference Protocol; the last two are made only if a request names them.
OUTPUTS = ("prediction", "error_hat", "safe", "support_score", "reason", "verify")
N_DEFAULT = 4
KINDS = {"safe": "BOOL", "verify": "BOOL", "reason": "BYTES"}
# At most about this many queries are answered together.
MOST_TOGETHER = 10_000
# Makes a response from the assessment of all queries, the rows that are drawn, and the rows of the request.
Make: TypeAlias = Callable[[Assessment, np.ndarray, slice], Any]
# Queries, what makes their response, and its future.
Job: TypeAlias = tuple[Any, Make, "asyncio.Future[Any]"]


@dataclass
class Refusal(Exception):
    """A request without an answer: a sentence, the HTTP status, and the type of the error in UM-Bridge."""

    message: str
    status: int = 400
    kind: str = "InvalidInput"

    @classmethod
    def of(cls, exc: Exception) -> "Refusal":
        """The refusal for an exception of the surrogate or of the calibration."""
        if isinstance(exc, Refusal):
            return exc
        logging.getLogger(__name__).error("a request failed", exc_info=exc)
        text = f"the surrogate or the calibration raised {type(exc).__name__}: {exc}"
        return cls(text, 500, "InvalidOutput")


@dataclass(frozen=True)
class Served:
    """The estimator, the monitor that observes its queries, and names of its inputs."""

    estimator: GeoQ
    monitor: Monitor | None = None
    names: Sequence[str] | None = None

    @property
    def columns(self) -> tuple[Column, ...] | None:
        """The columns of the table of ``fit``; None for arrays."""
        schema = self.estimator.fitted_.schema
        return None if schema is None else schema.columns

    def inputs(self) -> list[dict[str, Any]]:
        """The input tensors: one of all inputs, or one per column of a table."""
        if self.columns is None:
            shape = self.estimator.fitted_.coordinates.input_shape
            return [{"name": "x", "datatype": "FP64", "shape": [-1, *shape]}]
        kinds = {
            column.name: "FP64" if column.kind == "number" else "BYTES" for column in self.columns
        }
        return [{"name": name, "datatype": kinds[name], "shape": [-1]} for name in kinds]

    def outputs(self) -> list[dict[str, Any]]:
        """The output tensors."""
        fitted = self.estimator.fitted_
        shapes = {"prediction": fitted.output_shape, "error_hat": fitted.error.shape[1:]}
        return [
            {"name": n, "datatype": KINDS.get(n, "FP64"), "shape": [-1, *shapes.get(n, ())]}
            for n in (OUTPUTS if self.monitor is not None else OUTPUTS[:-1])
        ]

    def queries(self, tensors: dict[str, np.ndarray]) -> Any:
        """The queries in these tensors; raises for what cannot be assessed."""
        expected = [part["name"] for part in self.inputs()]
        if sorted(tensors) != sorted(expected):
            raise Refusal(f"the inputs are {sorted(tensors)}; pass the inputs {expected}.")
        x = tensors["x"] if self.columns is None else self._frame(tensors)
        self.estimator.fitted_.rows_of(x)
        return x

    def _frame(self, tensors: dict[str, np.ndarray]) -> Any:
        """The data frame of these columns, of the library of the data of ``fit``."""
        schema: Any = self.estimator.fitted_.schema
        parts = {}
        for column in schema.columns:
            values = [_value(v, column) for v in tensors[column.name].tolist()]
            kind, name = narwhals.Float64() if column.kind == "number" else None, column.name
            parts[name] = narwhals.new_series(name, values, kind, backend=schema.library)
        return narwhals.from_dict(parts).to_native()

    def assess(self, parts: Sequence[Any]) -> tuple[Assessment, np.ndarray]:
        """The assessment of the queries of several requests together, and the rows that are drawn for verification."""
        x = parts[0]
        if len(parts) > 1 and self.columns is None:
            x = np.concatenate(parts)
        elif len(parts) > 1:
            x = narwhals.concat([narwhals.from_native(part) for part in parts]).to_native()
            x = x.reset_index(drop=True) if hasattr(x, "reset_index") else x
        if self.monitor is not None:
            return self.monitor.observe(x)
        return self.estimator.assess(x), np.zeros(0, dtype=int)


def _value(value: Any, column: Column) -> Any:
    """A value of a tensor as a value of a column."""
    if value is None or value != value:  # noqa: PLR0124 (nan)
        return None
    if column.kind == "time":
        return datetime.fromisoformat(value)
    if column.level_type == "bool":
        if (text := str(value).lower()) not in ("true", "false"):
            raise Refusal(f"{column.name} has the value {value!r}; pass true or false.")
        return text == "true"
    return value


class Together:
    """Answers requests together: all that arrive while a batch is computed are the next batch. One thread computes."""

    def __init__(self, served: Served, seconds: float, seen: Callable[[Assessment], None]) -> None:
        self.served, self.seconds, self.seen = served, seconds, seen
        self._thread, self._since = ThreadPoolExecutor(1, "geoq"), math.inf
        self._waiting: deque[Job] = deque()
        self._work: asyncio.Task[None] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the present batch takes longer than a request may wait."""
        return asyncio.get_running_loop().time() - self._since > self.seconds

    async def answer(self, queries: Any, make: Make, *, observe: bool = True) -> Any:
        """What ``make`` makes of the assessment of these queries; without ``observe`` they are neither counted nor monitored."""
        future = asyncio.get_running_loop().create_future()
        job = (queries, make, future)
        if observe:
            self._waiting.append(job)
            if self._work is None or self._work.done():
                self._work = asyncio.create_task(self._answer_all())
            found = await self._in_time(future)
        else:
            alone = replace(self.served, monitor=None)
            (found,) = await self.run(lambda: _responses(alone, [job], lambda _: None))
        if isinstance(found, Exception):
            raise Refusal.of(found) from found
        return found

    async def run(self, task: Callable[[], Any]) -> Any:
        """The result of a task of the thread that computes, such as a change of the monitor."""
        return await self._in_time(asyncio.get_running_loop().run_in_executor(self._thread, task))

    async def _in_time(self, future: "asyncio.Future[Any]") -> Any:
        try:
            return await asyncio.wait_for(future, self.seconds)
        except TimeoutError as exc:
            text = f"the answer took longer than {self.seconds:g} seconds; pass fewer queries."
            raise Refusal(text, 503) from exc

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            jobs: list[Job] = []
            while self._waiting and sum(len(job[0]) for job in jobs) < MOST_TOGETHER:
                job = self._waiting.popleft()
                if not job[2].done():  # the client may have gone
                    jobs.append(job)
            self._since, task = loop.time(), partial(_responses, self.served, jobs, self.seen)
            found = await loop.run_in_executor(self._thread, task)
            self._since = math.inf
            for (_, _, future), response in zip(jobs, found, strict=True):
                if not future.done():
                    future.set_result(response)


def _responses(served: Served, jobs: list[Job], seen: Callable[[Assessment], None]) -> list[Any]:
    """A response or an exception for each request; a request that fails does not affect the others."""
    found = _tried(served.assess, [queries for queries, _, _ in jobs])
    if isinstance(found, Exception):
        return [found] if len(jobs) == 1 else [_responses(served, [j], seen)[0] for j in jobs]
    seen(found[0])
    responses, stop = [], 0
    for queries, make, _ in jobs:
        start, stop = stop, stop + len(queries)
        responses.append(_tried(make, *found, slice(start, stop)))
    return responses


def _tried(task: Callable[..., Any], *args: Any) -> Any:
    """The result of a task, or its exception."""
    try:
        return task(*args)
    except Exception as exc:  # noqa: BLE001
        return exc
