"""A real S3 server on loopback (moto's), in a process of its own: ``python -m tests.support.s3_server``.

Prints its port on the first line and serves until its standard input closes, so it cannot outlive the tests.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

StartResponse = Callable[..., Any]


class AtomicConditions:
    """S3 decides conditional puts atomically; moto looks and then writes. One at a time, the two are the same."""

    def __init__(self, app: Callable[[dict[str, Any], StartResponse], Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._app(environ, start_response)
        with self._lock:
            return list(self._app(environ, start_response))


class Quiet(WSGIRequestHandler):
    """No line per request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def main() -> None:
    """Serve on a free port until standard input ends."""
    # What moto signs with, and whose requests it takes, does not matter here; real credentials must not be reachable.
    os.environ.update(AWS_ACCESS_KEY_ID="server", AWS_SECRET_ACCESS_KEY="server")
    app = AtomicConditions(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
