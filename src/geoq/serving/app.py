"""The service: routes, limits, metrics and the server."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol as Connection

from geoq.checks import check_fitted, check_object, warn
from geoq.core.assessment import Assessment, numbers_of
from geoq.core.estimator import GeoQ
from geoq.monitor import Monitor
from geoq.serving import inference, page, umbridge
from geoq.serving.served import Refusal, Served, Together

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# The page calls only the service that it comes from.
OWN = "style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
POLICY = {"Content-Security-Policy": f"default-src 'none'; {OWN}"}


class Metrics:
    """Counters and histograms in the format of Prometheus."""

    def __init__(self) -> None:
        self.registry = own = prometheus.CollectorRegistry()
        paths, numbers = ["path", "status"], ["number"]
        self.seconds = prometheus.Summary("geoq_request_seconds", "Requests", paths, registry=own)
        self.queries = prometheus.Counter("geoq_queries", "Queries", ["safe"], registry=own)
        self.batches = prometheus.Summary("geoq_batch_queries", "Batches", registry=own)
        self.monitor = prometheus.Gauge("geoq_monitor", "Monitor", numbers, registry=own)

    def seen(self, answer: Assessment) -> None:
        """Count the queries of a batch."""
        n_safe = int(numbers_of(answer.safe).sum())
        self.batches.observe(len(answer))
        self.queries.labels("true").inc(n_safe)
        self.queries.labels("false").inc(len(answer) - n_safe)


class Service:
    """The application: the handlers of all paths around one estimator."""

    def __init__(
        self, served: Served, megabytes: float, seconds: float, token: str | None, hosts: Any
    ) -> None:
        self.served, self.megabytes, self.seconds = served, megabytes, seconds
        self.token, self.hosts, self.metrics = token, hosts, Metrics()
        self.monitor: Any = served.monitor
        self.together = Together(served, seconds, self.metrics.seen)
        model = f"/v2/models/{inference.MODEL}"
        tensors = {"inputs": served.inputs(), "outputs": served.outputs()}
        server = {"name": "geoq", "version": "2", "extensions": ["binary_tensor_data"]}
        gets: dict[str, Any] = {
            "/Info": umbridge.INFO,
            "/v2": server,
            "/v2/health/live": {"live": True},
            "/v2/health/ready": self._ready,
            f"{model}/ready": self._ready,
            model: {"name": inference.MODEL, "platform": "geoq", **tensors},
            "/metrics": self._metrics,
            "/page.json": page.content(served),
        }
        posts: dict[str, Any] = dict.fromkeys(umbridge.PATHS, self._umbridge)
        posts[f"{model}/infer"] = self._infer
        if self.monitor is not None:
            gets["/monitor"], posts["/monitor"] = self._status, self._verified
        html = HTMLResponse(page.HTML, headers=POLICY)
        routes = [Route("/", lambda _: html)]
        for method, handlers in (("GET", gets), ("POST", posts)):
            routes += [Route(p, self._guarded(p, h), methods=[method]) for p, h in handlers.items()]
        unknown: Any = {HTTPException: self._unknown}
        self.app = Starlette(routes=routes, exception_handlers=unknown)

    def _guarded(self, path: str, handler: Any) -> Callable[[Request], Awaitable[Response]]:
        """A handler, or content, with limits, metrics, and refusals in the schema of its protocol."""

        async def respond(request: Request) -> Response:
            started = time.perf_counter()
            try:
                self._check(request, path)
                body = await self._body(request)
                found = await handler(request, body) if callable(handler) else handler
                response = found if isinstance(found, Response) else _json(found)
            except (ValueError, TypeError) as exc:  # the library refuses what the request has
                response = _refused(path, Refusal(str(exc)))
            except Exception as exc:  # noqa: BLE001
                response = _refused(path, Refusal.of(exc))
            seconds = time.perf_counter() - started
            self.metrics.seconds.labels(path, response.status_code).observe(seconds)
            return response

        return respond

    def _check(self, request: Request, path: str) -> None:
        host, given = (request.headers.get(name, "") for name in ("host", "authorization"))
        if self.hosts and not {host, host.rpartition(":")[0]} & {*self.hosts}:
            raise Refusal(f"{host!r} is not a name of this service.")
        own = "" if self.token is None or path.startswith("/v2/health") else f"Bearer {self.token}"
        if own and not hmac.compare_digest(given.encode(), own.encode()):
            raise Refusal("the token is not right; send Authorization: Bearer TOKEN.", 401)

    async def _body(self, request: Request) -> bytes:
        """The body, within the limits of size and time."""
        body, most = bytearray(), self.megabytes * 2**20
        try:
            async with asyncio.timeout(self.seconds):
                async for part in request.stream():
                    body += part
                    if max(len(body), int(request.headers.get("content-length", 0))) > most:
                        text = f"the request is larger than {self.megabytes:g} MiB; pass fewer queries."
                        raise Refusal(text, 413)
        except (TimeoutError, ClientDisconnect) as exc:
            text = f"the request did not arrive within {self.seconds:g} seconds."
            raise Refusal(text, 408) from exc
        return bytes(body)

    async def _unknown(self, request: Request, exc: HTTPException) -> Response:
        known, path = f"/Info, /v2/models/{inference.MODEL} and /metrics", request.url.path
        text = f"{request.method} {path} does not exist; see {known}."
        return _json({"error": text}, exc.status_code)

    async def _ready(self, _: Request, __: bytes) -> Response:
        ready = not self.together.is_stuck
        return _json({"name": inference.MODEL, "ready": ready, "live": True}, 200 if ready else 503)

    async def _metrics(self, _: Request, __: bytes) -> Response:
        if self.monitor is not None:
            status = await self.together.run(self.monitor.status)
            for name, value in {**status.numbers, "alarms": len(status.alarms)}.items():
                if isinstance(value, int | float):
                    self.metrics.monitor.labels(name).set(value)
        text = prometheus.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _infer(self, request: Request, body: bytes) -> Response:
        length = request.headers.get(inference.LENGTH)
        content, headers = await inference.infer(body, length, self.served, self.together)
        kind = "application/octet-stream" if headers else "application/json"
        return Response(content, headers=headers, media_type=kind)

    async def _umbridge(self, request: Request, body: bytes) -> Any:
        asked = inference.from_json(body)
        return await umbridge.respond(request.url.path, asked, self.served, self.together)

    async def _status(self, _: Request, __: bytes) -> Any:
        status = await self.together.run(self.monitor.status)
        return asdict(status) | {"text": str(status)}

    async def _verified(self, request: Request, body: bytes) -> Any:
        _, tensors = inference.parse(body, request.headers.get(inference.LENGTH))
        if "y" not in tensors:
            raise Refusal("the results are missing; pass the queries and the tensor y.")
        y, x = tensors.pop("y"), self.served.queries(tensors)
        await self.together.run(partial(self.monitor.verified, x, y))
        return await self._status(request, body)


def _json(content: Any, status: int = 200) -> Response:
    return Response(inference.to_json(content), status, media_type="application/json")


def _refused(path: str, refusal: Refusal) -> Response:
    typed = {"type": refusal.kind, "message": refusal.message}
    error = typed if path in umbridge.PATHS else refusal.message
    response = _json({"error": error}, refusal.status)
    if refusal.status in (408, 413):  # the rest of the body is not read
        response.headers["Connection"] = "close"
    return response


class TimedConnection(Connection):
    """Closes connections whose headers arrive too slowly."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch(self)

    def _watch(self, earlier: object) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is earlier:
            self.transport.close()
        elif not self.transport.is_closing():
            seconds = self.config.timeout_graceful_shutdown or 0
            self.loop.call_later(seconds, self._watch, self.cycle)


def server_of(
    estimator: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 4242,
    token: str | None = None,
    monitor: Monitor | None = None,
    megabytes: float = 16,
    seconds: float = 30,
    names: Sequence[str] | None = None,
) -> uvicorn.Server:
    """A server of a fitted estimator; its ``run()`` serves until SIGTERM or SIGINT, and finishes what is under way.

    Args:
        estimator: a fitted ``GeoQ``.
        host: the address; by default only this machine can connect.
        port: the port; 0 takes a free one.
        token: requests must send it as bearer token; None asks for none.
        monitor: observes all queries, for example ``Monitor(estimator, folder="monitor")``.
        megabytes: the largest request.
        seconds: the longest time of a request, of its answer, and of what is under way after SIGTERM.
        names: names of the inputs, if they are an array.
    """
    check_object(estimator, GeoQ, "estimator", "GeoQ(surrogate, train).fit(x, y)")
    local, wait = host in LOOPBACK, max(1, round(seconds))
    check_fitted(estimator)
    if monitor is not None and monitor.estimator is not estimator:
        raise ValueError("monitor observes another estimator; make it with Monitor(estimator).")
    if not local and token is None:
        warn(f"host={host!r} admits other machines without a token; set one, or a local host.")
    served, hosts = Served(estimator, monitor, names), LOOPBACK if local else ()
    service = Service(served, megabytes, seconds, token, hosts)
    settings: dict[str, Any] = {"http": TimedConnection, "lifespan": "off", "access_log": False}
    settings |= {"log_level": "warning", "server_header": False, "limit_concurrency": 512}
    settings |= dict.fromkeys(("timeout_graceful_shutdown", "timeout_keep_alive"), wait)
    return uvicorn.Server(uvicorn.Config(service.app, host, port, **settings))


def run(server: uvicorn.Server, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; ``announce`` receives the address. Returns the exit code."""
    own = server.config.bind_socket()
    own.listen()  # requests wait until the server answers
    announce("http://{}:{}".format(*own.getsockname()))
    server.run([own])
    return 0
