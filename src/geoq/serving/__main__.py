"""``python -m geoq.serving``: the service from the command line."""

import argparse
import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from geoq.core.estimator import GeoQ
from geoq.monitor import Monitor
from geoq.serving.app import server_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command ``serve``."""
    parser.add_argument("model", help="file that save has written")
    parser.add_argument("--surrogate", required=True, help="the surrogate, as package.module:name")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: this machine alone)")
    parser.add_argument("--port", type=int, default=4242, help="port; 0 takes a free one")
    parser.add_argument("--monitor", help="folder of a monitor, which observes all queries")
    parser.add_argument("--megabytes", type=float, default=16, help="largest request")
    parser.add_argument("--seconds", type=float, default=30, help="longest request and answer")


def imported(name: str) -> Any:
    """The object that ``package.module:name`` names; modules of the present folder are found."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"surrogate={name!r} does not have the form package.module:name.")
    sys.path.insert(0, str(Path.cwd()))
    return getattr(import_module(module), attribute)


def serve(asked: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. The environment variable GEOQ_TOKEN sets a bearer token."""
    settings = {name: getattr(asked, name) for name in ("host", "port", "megabytes", "seconds")}
    estimator = GeoQ.load(asked.model, surrogate=imported(asked.surrogate))
    monitor = Monitor(estimator, folder=asked.monitor) if asked.monitor else None
    token = os.environ.get("GEOQ_TOKEN")
    server = server_of(estimator, token=token, monitor=monitor, **settings)

    async def run() -> None:
        work = asyncio.create_task(server.serve())
        while not server.started and not work.done():
            await asyncio.sleep(0.02)
        if server.started:
            port = server.servers[0].sockets[0].getsockname()[1]
            sys.stderr.write(f"geoq serves {asked.model} at http://{asked.host}:{port}\n")
            sys.stderr.flush()
        await work

    asyncio.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m geoq.serving", description=__doc__)
    add_arguments(parser)
    serve(parser.parse_args())
