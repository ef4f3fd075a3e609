"""A service for a calibrated estimator: UM-Bridge, the Open Inference Protocol, metrics and a page; it needs the extra ``serve``."""

try:
    import orjson  # noqa: F401
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as exc:
    raise ImportError('geoq.serving needs a web server; pip install "geoq[serve]".') from exc
