"""The servers of `benchmarks.chaos_pipeline`, and the relay that makes one of them dead, slow or silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.support import s3
from tests.support.command import engine
from tests.support.machine import free_port

START_S = 120.0
_ERROR = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Relay:
    """Passes TCP connections on to a server, unless it plays a fault; it runs in a thread of its own.

    mode: "open"; "dead" (connections are refused); "silent" (bytes are taken, no answer comes); "errors" (each request
    is answered with HTTP 503). `delay_s` passes before each piece of an answer.
    """

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._mode = "open"
        self._delay_s = 0.0
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.set("open")

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: str, *, delay_s: float = 0.0) -> None:
        """Play this fault from now on."""
        asyncio.run_coroutine_threadsafe(self._set(mode, delay_s), self._loop).result(10)

    def close(self) -> None:
        """Refuse connections, and end the thread."""
        self.set("dead")
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set(self, mode: str, delay_s: float) -> None:
        self._mode, self._delay_s = mode, delay_s
        if mode in ("dead", "errors"):
            for writer in tuple(self._connections):
                writer.transport.abort()
        if mode == "dead" and self._server is not None:
            self._server.close()
            self._server = None
        if mode != "dead" and self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if self._mode == "errors":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_ERROR)
                await writer.drain()
                return
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            pumps = [
                asyncio.ensure_future(self._pump(reader, forth)),
                asyncio.ensure_future(self._pump(back, writer, is_answer=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                forth.transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while self._mode == "silent":
                    await asyncio.sleep(0.05)
                if is_answer and self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()


class MlflowServer:
    """A real MLflow server over sqlite; `database` can be read beside it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.database = folder / "mlflow.db"
        self.port = free_port()
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = (self._folder / "log").open("ab")
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", (self._folder / "artifacts").as_uri()]
        with log:
            # Its job runner is five more processes.
            env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if _answers(f"http://127.0.0.1:{self.port}/health"):
                return
            time.sleep(0.1)
        raise RuntimeError(f"The MLflow server did not start; see {self._folder / 'log'}")

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


class Services:
    """Services of all cases: an MLflow server, one Prefect engine, and an S3 server once a case needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._s3: s3.S3Server | None = None
        self.home = folder / "prefect"
        self.new_home = folder / "prefect-new"  # what a command with an engine of its own begins with

    def __enter__(self) -> Services:
        self.mlflow = MlflowServer(self._folder / "mlflow")
        self._stack.callback(self.mlflow.kill)
        self._stack.enter_context(engine(self.home))
        # To make the database takes an engine eight seconds.
        self.new_home.mkdir()
        with (
            contextlib.closing(sqlite3.connect(self.home / "prefect.db")) as made,
            contextlib.closing(sqlite3.connect(self.new_home / "prefect.db")) as copy,
        ):
            made.backup(copy)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def engine(self) -> tuple[int, str]:
        """The port and the password of the Prefect engine that is up."""
        [path] = self.home.glob("trainflow/*/server.json")
        described = json.loads(path.read_bytes())
        return int(described["url"].rpartition(":")[2]), described["auth"]

    def s3(self) -> s3.S3Server:
        """The S3 server, started by the first call, with the bucket "chaos"."""
        if self._s3 is None:
            process, self._s3 = s3.start()
            self._stack.callback(s3.stop, process)
            self.bucket().mkdir("chaos")
        return self._s3

    def bucket(self) -> Any:
        """A file system on the S3 server, past every relay."""
        import fsspec

        server = self.s3()
        keys = {"key": server.env["AWS_ACCESS_KEY_ID"], "secret": server.env["AWS_SECRET_ACCESS_KEY"]}
        return fsspec.filesystem("s3", endpoint_url=server.endpoint, use_listings_cache=False, **keys)


def can_mount() -> bool:
    """Whether this process may mount file systems (see `with_mounts`)."""
    return os.environ.get("TRAINFLOW_CHAOS_MOUNTS") == "1"


def with_mounts() -> None:
    """Replace this process by itself in a mount namespace of its own, where that is allowed; otherwise do nothing."""
    unshare = shutil.which("unshare")
    if "TRAINFLOW_CHAOS_MOUNTS" in os.environ or unshare is None:
        return
    way = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    able = subprocess.run([unshare, *way, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    allowed = "1" if able.returncode == 0 else "0"
    command = [unshare, *way, sys.executable] if allowed == "1" else [sys.executable]
    os.execve(command[0], [*command, *sys.orig_argv[1:]], {**os.environ, "TRAINFLOW_CHAOS_MOUNTS": allowed})
