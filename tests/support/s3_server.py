"""A real S3 server on loopback (moto's), in a process of its own: ``python -m tests.support.s3_server``.

Prints its port on the first line and serves until its standard input closes, so it cannot outlive the tests. A POST to
``/-/plan`` makes one of the next writes go wrong (see `Plan`); ``/-/seen`` says what was asked of it, and which
requests were signed without their bytes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

StartResponse = Callable[..., Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class AtomicConditions:
    """Lets one request through at a time: S3 decides conditional puts atomically, moto checks and then writes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._app(environ, start_response)
        with self._lock:
            return list(self._app(environ, start_response))


class Plan:
    """Counts requests, and spoils the n-th one that writes (PUT, POST, DELETE), in a chosen way.

    refuse: 403, not done. full: 507, not done. lost: done, but the connection closes before the answer. denied: done,
    then 403. slow: done after 0.3 s. broken: a read's answer breaks off half way (`at` counts reads then). outage: from
    that write on, every request is cut off unread for `seconds`, reads too.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._plan: dict[str, Any] = {}
        self._writes: list[str] = []
        self._reads: list[str] = []
        self._flying = self._most = 0
        self._back_at = 0.0

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith("/-/"):
            return self._control(environ, start_response)
        what = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING'].partition('=')[0]}"
        if environ.get("HTTP_X_AMZ_CONTENT_SHA256") == "UNSIGNED-PAYLOAD":
            what += " unsigned"
        with self._lock:
            line = self._reads if environ["REQUEST_METHOD"] in ("GET", "HEAD") else self._writes
            line.append(what)
            kind = self._plan.get("kind") if len(line) == self._plan.get("at") else None
            if (kind == "broken") != (line is self._reads):
                kind = None
            if kind == "outage":
                self._back_at = time.monotonic() + self._plan["seconds"]
            if time.monotonic() < self._back_at:
                kind = "outage"
            self._flying += 1
            self._most = max(self._most, self._flying)
        try:
            return self._serve(kind, environ, start_response)
        finally:
            with self._lock:
                self._flying -= 1

    def _control(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        with self._lock:
            seen = {"writes": self._writes, "reads": self._reads, "most_in_flight": self._most}
            if environ["REQUEST_METHOD"] == "POST":
                self._plan = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self._writes, self._reads, self._most = [], [], 0
                self._back_at = 0.0
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(seen).encode()]

    def _serve(self, kind: str | None, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if kind in ("refuse", "full"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error(kind, start_response)
        if kind == "outage":
            start_response("503 Service Unavailable", [])
            return _cut(environ)
        if kind == "slow":
            time.sleep(0.3)
        body = list(self._app(environ, start_response if kind != "denied" else lambda *args: None))
        if kind == "denied":
            return _error(kind, start_response)
        if kind == "lost":
            return _cut(environ)
        if kind == "broken":
            return _half(b"".join(body), environ)
        return body


def _error(kind: str, start_response: StartResponse) -> Iterable[bytes]:
    code = "XMinioStorageFull" if kind == "full" else "AccessDenied"
    start_response("507 Insufficient Storage" if kind == "full" else "403 Forbidden", [])
    return [f"<Error><Code>{code}</Code><Message>planned</Message></Error>".encode()]


def _half(body: bytes, environ: dict[str, Any]) -> Iterable[bytes]:
    yield body[: len(body) // 2]
    yield from _cut(environ)


def _cut(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


class Quiet(WSGIRequestHandler):
    """No line per request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""

    def log(self, type: str, message: str, *args: object) -> None:
        """Log no connections that were cut."""


def main() -> None:
    # What moto signs with, and whose requests it takes, does not matter here; real credentials must not be reachable.
    os.environ.update(AWS_ACCESS_KEY_ID="server", AWS_SECRET_ACCESS_KEY="server")
    app = Plan(AtomicConditions(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
