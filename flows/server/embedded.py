"""The process behind `flows.server.api.prefect_api`: a Prefect server that lives while it has clients, and lingers.

    python embedded.py FOLDER

It needs no operator. Two `flock`s in FOLDER decide everything, and the kernel releases them however a process ends:

- ``clients.lock`` is held *shared* by every client. The server tries for it *exclusively*, ten times a second: while it
  gets the lock, no client is left, not even one that was killed with SIGKILL. It stops when no client has come for as
  long as TRAINFLOW_PREFECT_LINGER_S says, or its folder is gone. While it stops it keeps the lock, so a new client
  waits for the end instead of talking to a server that is going away.
- ``server.lock`` is held exclusively by the server for its whole life, and names its process: ``server.json`` describes
  a living server if and only if that lock is taken, and two servers never open one database.

A client that gets ``clients.lock`` exclusively is alone with the server: it may end one that it cannot use.

It listens on a loopback port the kernel chose, and answers only to the password in ``server.json`` (mode 0600): a
deployment's parameters name code to run, so another user of the machine must not be able to start one. A server that
was killed leaves its ``server.json``: the next one takes port and password from there, because the clients of the
killed one know no other.

Run by its file, never imported as part of `flows`: it must not depend on the user's working directory, and its first
act must not be an import that takes a second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_lib.base.json_text import read_json
from trainer_lib.locks.file_lock import try_lock, unlock

if TYPE_CHECKING:
    import uvicorn

LINGER = "TRAINFLOW_PREFECT_LINGER_S"  # seconds that a server without clients waits for another one
MADE_BY = "TRAINFLOW_SERVER_MADE_BY"  # what its starter was: versions, interpreter, settings
CLIENTS_LOCK = "clients.lock"
SERVER_LOCK = "server.lock"
DESCRIPTION = "server.json"
SIGN_IN = "/trainflow-sign-in"  # see `trainflow.flows.server.membership.sign_in_link`
ANOTHER_SERVES = 75  # exit code (EX_TEMPFAIL); uvicorn ends a failed start with 3

# How long (seconds) a new server tries for the server lock: a client that checks it holds it briefly.
_CLAIM_S = 1.0
# Events of a run travel through queues inside the server. The last ones are written when it needs less than this share
# of a processor for so long (seconds); it gets so long at most.
_IDLE_SHARE = 0.1
_SETTLE_S = 0.2
_SETTLE_MOST_S = 5.0
# A graceful end that takes longer than this (seconds) is cut short: the database is consistent at any moment.
_STOP_S = 10.0
# Seconds between two looks for clients.
_LOOK_S = 0.1


def main(folder: Path) -> int:
    """Serve until the last client is gone. Returns 0, or `ANOTHER_SERVES`."""
    if not _claim(folder):
        return ANOTHER_SERVES
    server = _Server(folder)
    threading.Thread(target=server.end_without_clients, daemon=True).start()
    server.serve()
    return 0


def _claim(folder: Path) -> bool:
    """Take the server's lock, and write into it which process holds it; on a full disk it stays empty."""
    descriptor = os.open(folder / SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # open for life
    deadline = time.monotonic() + _CLAIM_S
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return True


class _Server:
    """The only server of a folder: address, password, and the watch over its clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        port, self._password = _killed_predecessor(folder)
        self._listener = listen_on(port)
        free_port = self._listener.getsockname()[1]
        self._url = f"http://127.0.0.1:{free_port}"
        self._running: uvicorn.Server | None = None
        if free_port != port:
            # A stale address must not lead a client to the program that has that port now.
            (folder / DESCRIPTION).unlink(missing_ok=True)

    def serve(self) -> None:
        """Load Prefect, and serve until the last client has gone."""
        os.environ["PREFECT_SERVER_API_AUTH_STRING"] = self._password
        os.environ["PREFECT_SERVER_UI_API_URL"] = f"{self._url}/api"
        os.environ.setdefault("PREFECT_API_DATABASE_TIMEOUT", "60")  # seconds a write waits for others on a slow disk
        gc.disable()  # everything that is made now stays
        self._running = _build()
        gc.freeze()
        gc.enable()
        threading.Thread(target=self._open, daemon=True).start()
        self._running.run(sockets=[self._listener])

    def _open(self) -> None:
        """Wait until the server answers, then describe it in one step, for its owner only."""
        while self._running is None or not self._running.started:
            time.sleep(0.02)
        draft = self._folder / f"{DESCRIPTION}.draft"
        draft.unlink(missing_ok=True)
        about = {"pid": os.getpid(), "url": self._url, "auth": self._password, "linger_s": _linger_s()}
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({**about, "made_by": os.environ.get(MADE_BY, "")}, file)
        draft.replace(self._folder / DESCRIPTION)

    def end_without_clients(self) -> None:
        """End this process when it has had no client for as long as it lingers, or its folder is gone."""
        descriptor = os.open(self._folder / CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # kept until the process ends
        wait_for_end(self._folder, descriptor, _linger_s())
        (self._folder / DESCRIPTION).unlink(missing_ok=True)
        if self._running is not None:
            settle()
            self._running.should_exit = True
            time.sleep(_STOP_S)
        os._exit(0)  # still importing, so nothing is open yet; or the graceful end hangs


def wait_for_end(folder: Path, descriptor: int, linger_s: float) -> None:
    """Return, with the clients' lock, when no client has come for `linger_s`, or none could: the folder is gone."""
    alone_since: float | None = None
    while True:
        if try_lock(descriptor):
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since >= linger_s or not _is_there(folder, descriptor):
                return
            unlock(descriptor)
        else:
            alone_since = None
        time.sleep(_LOOK_S)


def _is_there(folder: Path, descriptor: int) -> bool:
    """Whether clients still find this lock; a folder that was made again has another one."""
    try:
        return os.path.samestat((folder / CLIENTS_LOCK).stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def settle() -> None:
    """Wait until this process has nothing to do; on a busy machine its queues take longer than the clock suggests."""
    deadline, is_idle = time.monotonic() + _SETTLE_MOST_S, False
    while time.monotonic() < deadline and not is_idle:
        wanted, began = _wanted_s(), time.monotonic()
        time.sleep(_SETTLE_S)
        is_idle = _wanted_s() - wanted < _IDLE_SHARE * (time.monotonic() - began)


def _wanted_s() -> float:
    """Seconds for which this process had a core and, where Linux tells, for which its other threads waited for one."""
    waited_ns = 0
    for thread in Path("/proc/self/task").glob("*"):
        if thread.name != str(threading.get_native_id()):
            with contextlib.suppress(OSError):  # it has ended
                waited_ns += int((thread / "schedstat").read_text().split()[1])
    return time.process_time() + waited_ns / 1e9


def _linger_s() -> float:
    return float(os.environ.get(LINGER) or 0.0)


def _killed_predecessor(folder: Path) -> tuple[int, str]:
    """Port and password of a server that was killed; port 0 and a new password when the last one ended in order."""
    try:
        left_over = read_json(folder / DESCRIPTION)
        return int(str(left_over["url"]).rpartition(":")[2]), str(left_over["auth"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, f"trainflow:{secrets.token_urlsafe(24)}"


def listen_on(port: int) -> socket.socket:
    """A listening socket at this loopback port; at any free one if another program has taken it, or it is 0."""
    # The protocol is named: without it asyncio leaves Nagle's algorithm on (`asyncio.base_events._set_nodelay`), and
    # answers wait 40 ms for the client's acknowledgement of its first packet.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # The connections of a killed server linger at its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    return listener


def _build() -> uvicorn.Server:
    import uvicorn
    from prefect.server.api.server import create_app
    from starlette.responses import FileResponse
    from starlette.routing import Route

    app = create_app(final=True)
    page = Path(__file__).with_name("sign_in.html")
    answer = FileResponse(page, headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"})
    # First, because the UI answers to every path.
    app.router.routes.insert(0, Route(SIGN_IN, lambda request: answer))
    return uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=3))


if __name__ == "__main__":
    try:
        exit_code = main(Path(sys.argv[1]))
    except SystemExit as end:  # uvicorn's way to end a failed start
        exit_code = int(end.code or 0)
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit: a database thread of a failed start could keep the process for ever
