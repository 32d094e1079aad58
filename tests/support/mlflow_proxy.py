"""A real MLflow server behind a proxy that misbehaves on demand: refuses, waits, cuts an answer off."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from tests.support.machine import free_port
from tests.support.mlflow_store import fresh_store


@contextlib.contextmanager
def answering(words: list[str], folder: Path, env: Mapping[str, str], path: str) -> Iterator[int]:
    """Run a command of MLflow that serves, as long as the block runs; yield its port once it answers at `path`."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", *words, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    log = folder / f"{words[0]}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**env, "PYTHONWARNINGS": "ignore"}, cwd=folder, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 150
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[int]:
    """Yield the port of an MLflow server on loopback whose database and artifacts lie in `folder`."""
    words = ["server", "--backend-store-uri", fresh_store(folder), "--artifacts-destination", str(folder / "artifacts")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with answering(words, folder, env, "health") as port:
        yield port


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a port, one connection each, and misbehaves as its attributes say.

    Attributes:
        mode: "ok"; "refuse" closes every connection at once; "delay" forwards after `delay_s`; "cut" forwards a request
            and closes before the answer.
        only: the requests that the mode is meant for contain this text in their first line; the others are forwarded.
        requests: the first line of each request that came.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.target = port
        self.mode = "ok"
        self.only = ""
        self.delay_s = 2.0
        self.requests: list[str] = []
        self.ended = threading.Event()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), name="mlflow proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def behave(self, mode: str, *, only: str = "") -> None:
        self.mode, self.only = mode, only

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that gave up has closed its connection."""


class _Forwarding(BaseHTTPRequestHandler):
    """One request, since HTTP/1.0 has one a connection: each is treated as the mode is when it comes."""

    server: Proxy

    @override
    def handle(self) -> None:
        if self.server.mode != "refuse" or self.server.only:
            super().handle()

    def _forward(self) -> None:
        proxy = self.server
        proxy.requests.append(self.requestline)
        mode = proxy.mode if proxy.only in self.requestline else "ok"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if mode == "delay":
            proxy.ended.wait(proxy.delay_s)
        if mode == "refuse":
            return
        server = http.client.HTTPConnection("127.0.0.1", proxy.target)
        with contextlib.closing(server):
            server.request(self.command, self.path, body or None, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
        if mode != "cut":
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward
