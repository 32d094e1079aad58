"""A real MLflow server behind a TCP proxy that misbehaves on demand: refuses, waits, hangs, cuts an answer off."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.mlflow_store import fresh_store


@contextlib.contextmanager
def answering(words: list[str], folder: Path, env: Mapping[str, str], path: str) -> Iterator[int]:
    """Run a command of MLflow that serves, as long as the block runs; yield its port once it answers at `path`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
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


class Proxy:
    """Forwards requests to a port, one connection each, and misbehaves as its attributes say.

    Attributes:
        mode: "ok"; "refuse" closes every connection at once; "hang" accepts and never answers; "delay" answers after
            `delay_s`; "cut" forwards a request and closes before the answer.
        only: the requests that the mode is meant for contain this text in their first line; the others are forwarded.
        requests: the first line of each request that came.
    """

    def __init__(self, port: int) -> None:
        self.mode = "ok"
        self.only = ""
        self.delay_s = 2.0
        self.requests: list[str] = []
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()

    @property
    def uri(self) -> str:
        """Its address, as a tracking URI."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def behave(self, mode: str, *, only: str = "") -> None:
        """Set how requests are treated from now on."""
        self.mode, self.only = mode, only

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="mlflow proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self.mode == "refuse" and not self.only:
                return
            request = _read_message(connection)
            line = request.partition(b"\r\n")[0].decode(errors="replace")
            if not line:
                return
            self.requests.append(line)
            mode = self.mode if self.only in line else "ok"
            if mode == "hang":
                self._ended.wait()
            if mode == "delay":
                self._ended.wait(self.delay_s)
            if mode in ("hang", "refuse"):
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                # One request per connection, so that each is treated as the mode is when it comes.
                head, _, body = request.partition(b"\r\n\r\n")
                server.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
                answer = b"".join(iter(lambda: server.recv(65536), b""))
            if mode != "cut":
                head, _, body = answer.partition(b"\r\n\r\n")
                connection.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
        self._sockets.discard(connection)


def _read_message(connection: socket.socket) -> bytes:
    """Read one HTTP request whose body, if there is one, has a length or comes in chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
    length = int(headers.get(b"content-length", b"0"))
    is_chunked = headers.get(b"transfer-encoding") == b"chunked"
    while len(body) < length or (is_chunked and not body.endswith(b"0\r\n\r\n")):
        if not (more := connection.recv(65536)):
            break
        body += more
    return head + b"\r\n\r\n" + body
