"""The process behind `flows.server.api.prefect_api`: a Prefect server that lives while it has clients, and lingers.

    python embedded.py FOLDER
    python embedded.py --early PLACE     loads itself, and gets its folder and settings as a line of JSON on stdin

It needs no operator. Two `flock`s in FOLDER decide everything, and the kernel releases them however a process ends:

- ``clients.lock`` is held *shared* by every client. The server waits for it *exclusively*: when it gets the
  lock, no client is left, not even one that was killed with SIGKILL. Then it lingers: it gives the lock back, and
  tries for it every second. It stops when no client has come for as long as TRAINFLOW_PREFECT_LINGER_S says, or its
  folder is gone. While it stops it keeps the lock, so a new client waits for the end instead of talking to a server
  that is going away. A client changes the lock's modification time, so that also a short one is seen.
- ``server.lock`` is held exclusively by the server for its whole life, and names its process: ``server.json`` describes
  a living server if and only if that lock is taken, and two servers never open one database.

A client that gets ``clients.lock`` exclusively is alone with the server: it may end one that it cannot use.

It listens on a loopback port the kernel chose, and answers only to the password in ``server.json`` (mode 0600): a
deployment's parameters name code to run, so another user of the machine must not be able to start one. A server that
was killed leaves its ``server.json``: the next one takes port and password from there, because the clients of the
killed one know no other.

A command starts it `--early`, while it loads Prefect itself (`flows.server.early`): the end of stdin ends one that is
not wanted.

Run by its file, never imported as part of `flows`: it must not depend on the user's working directory, and its first
act must not be an import that takes a second.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import gc
import http.client
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.json_text import parse_json, read_json
from trainer_lib.locks.file_lock import try_lock

if TYPE_CHECKING:
    import uvicorn

LINGER = "TRAINFLOW_PREFECT_LINGER_S"  # seconds that a server without clients waits for another one
MADE_BY = "TRAINFLOW_SERVER_MADE_BY"  # what its starter was: versions, interpreter, settings
CLIENTS_LOCK = "clients.lock"
SERVER_LOCK = "server.lock"
DESCRIPTION = "server.json"
SERVED_TAG = "trainflow-serve"  # deployments that live as long as a `trainflow serve` on this server
SIGN_IN = "/trainflow-sign-in"  # see flows/server/sign_in.py
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
# How often, and seconds between, a request of its own is sent while the database is busy.
_TRIES = 10
_BUSY_S = 0.2
# Seconds between two looks of a server that lingers.
_LOOK_S = 1.0


def main(folder: Path) -> int:
    """Serve until the last client is gone. Returns 0, or `ANOTHER_SERVES`."""
    place = _Place.take(folder)
    if place is None:
        return ANOTHER_SERVES
    load()
    return _serve(place)


def main_early() -> int:
    """Load Prefect, and serve in the folder that a line on stdin names, as `main` does."""
    asked: list[_Place | None] = []
    asking = threading.Thread(target=_obey, args=(asked,), daemon=True)
    asking.start()
    load()
    asking.join()
    if not asked or asked[0] is None:
        return ANOTHER_SERVES
    return _serve(asked[0])


def _obey(asked: list[_Place | None]) -> None:
    """Wait for the line, and take the place at once: another command that comes now must see that one is starting."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)  # its starter has ended, or does not want it
    orders = parse_json(line)
    log = os.open(orders["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.update(orders["environ"])
    os.chdir(orders["folder"])
    asked.append(_Place.take(Path(orders["folder"])))


def load() -> None:
    """Import what a server needs: most of its start."""
    gc.disable()  # everything that is made now stays
    import prefect.server.api.server  # noqa: F401 - see `_build`
    import uvicorn  # noqa: F401 - see `_build`

    gc.freeze()
    gc.enable()


class _Place:
    """What a server has from the moment on at which it is the only one: address, password, watch over its clients."""

    def __init__(self, folder: Path, listener: socket.socket, url: str, password: str) -> None:
        self.folder = folder
        self.listener = listener
        self.url = url
        self.password = password
        self.running: list[uvicorn.Server] = []
        self.opened = threading.Event()

    @classmethod
    def take(cls, folder: Path) -> _Place | None:
        """Take the folder; None if another server has it."""
        if not _claim(folder):
            return None
        place = cls(folder, *_find_address(folder))
        watching = (folder, place.running, place.opened, partial(_pause_unserved, place.url, place.password))
        threading.Thread(target=_end_without_clients, args=watching, daemon=True).start()
        return place


def _find_address(folder: Path) -> tuple[socket.socket, str, str]:
    """A listening socket, its URL, and the password."""
    port, password = _killed_predecessor(folder)
    listener = _listen_on(port)
    if listener.getsockname()[1] != port:
        # A stale address must not lead a client to the program that has that port now.
        (folder / DESCRIPTION).unlink(missing_ok=True)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}", password


def _serve(place: _Place) -> int:
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = place.password
    os.environ["PREFECT_SERVER_UI_API_URL"] = f"{place.url}/api"
    os.environ.setdefault("PREFECT_API_DATABASE_TIMEOUT", "60")  # seconds a write waits for the others' on a slow disk
    server = _build()
    place.running.append(server)
    opening = (place.folder, server, place.url, place.password, place.opened)
    threading.Thread(target=_open, args=opening, daemon=True).start()
    server.run(sockets=[place.listener])
    return 0


def _killed_predecessor(folder: Path) -> tuple[int, str]:
    """Port and password of a server that was killed; port 0 and a new password when the last one ended in order."""
    try:
        left = read_json(folder / DESCRIPTION)
        return int(str(left["url"]).rpartition(":")[2]), str(left["auth"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, f"trainflow:{secrets.token_urlsafe(24)}"


def _listen_on(port: int) -> socket.socket:
    """A listening socket at this loopback port; at any free one if another program has taken it, or it is 0."""
    # The protocol is named: without it asyncio leaves Nagle's algorithm on (`asyncio.base_events._set_nodelay`), and
    # each answer waits 40 ms for the client's acknowledgement of its first packet.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # The connections of a killed server linger at its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    return listener


def _open(folder: Path, server: uvicorn.Server, url: str, password: str, opened: threading.Event) -> None:
    """Wait until the server answers, pause stale schedules, then tell clients the address through ``server.json``."""
    while not server.started:
        time.sleep(0.02)
    _pause_unserved(url, password)
    about = {"pid": os.getpid(), "url": url, "auth": password}
    _describe(folder, {**about, "linger_s": _linger_s(), "made_by": os.environ.get(MADE_BY, "")})
    opened.set()


def _linger_s() -> float:
    return float(os.environ.get(LINGER) or 0.0)


def _pause_unserved(url: str, password: str) -> None:
    """Pause the schedules of processes that are gone: a server without clients has no serving process.

    Runs would pile up for an active schedule that no process serves, and the next `serve` of that name would start them
    all.
    """
    served = {"deployments": {"tags": {"all_": [SERVED_TAG]}}}
    try:
        for deployment in _request(url, password, "/api/deployments/filter", served):
            if not deployment.get("paused"):
                _request(url, password, f"/api/deployments/{deployment['id']}/pause_deployment")
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"Schedules without a serving process could not be paused: {error!r}\n")


def _request(url: str, password: str, path: str, body: object = None) -> Any:
    """Send a request, again while the database is busy: then the server answers 503 and expects that."""
    status, data = _send(url, password, path, body)
    for _ in range(_TRIES):
        if status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            break
        time.sleep(_BUSY_S)
        status, data = _send(url, password, path, body)
    if status >= http.HTTPStatus.BAD_REQUEST:
        raise http.client.HTTPException(f"{path}: {status} {data[:200]!r}")
    return parse_json(data) if data else None


def _send(url: str, password: str, path: str, body: object) -> tuple[int, bytes]:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        token = base64.b64encode(password.encode()).decode()
        headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _claim(folder: Path) -> bool:
    descriptor = os.open(folder / SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # open for life
    deadline = time.monotonic() + _CLAIM_S
    while True:
        if try_lock(descriptor):
            _sign(descriptor)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _sign(descriptor: int) -> None:
    """Write into the server's lock which process holds it; on a full disk it stays empty."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def _describe(folder: Path, description: dict[str, object]) -> None:
    """Write ``server.json`` in one step, readable by its owner only."""
    draft = folder / f"{DESCRIPTION}.draft"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(description, file)
    draft.replace(folder / DESCRIPTION)


def _build() -> uvicorn.Server:
    import uvicorn
    from prefect.context import refresh_global_settings_context
    from prefect.server.api.server import create_app
    from starlette.responses import FileResponse
    from starlette.routing import Route

    refresh_global_settings_context()  # the settings were read before the variables above were set
    app = create_app(final=True)
    page = Path(__file__).with_name("sign_in.html")
    answer = FileResponse(page, headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"})
    # First, because the UI answers to every path.
    app.router.routes.insert(0, Route(SIGN_IN, lambda request: answer))
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=3)
    return uvicorn.Server(config)


def _end_without_clients(
    folder: Path, running: list[uvicorn.Server], opened: threading.Event, calm: Callable[[], object]
) -> None:
    """End this process when it has no client, and has had none for as long as it lingers.

    Args:
        running: the server, once it was made.
        opened: set once clients can know its address.
        calm: called when the last client has gone, before another one can come.
    """
    descriptor = os.open(folder / CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # kept until the process ends
    while True:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A server that has no address yet, or lost its only client while it started, is of no use.
        if not opened.is_set() or not _lingers(folder, descriptor, calm):
            break
    (folder / DESCRIPTION).unlink(missing_ok=True)
    if running:
        _settle()
        running[0].should_exit = True
        time.sleep(_STOP_S)
    os._exit(0)  # still importing, so nothing is open yet; or the graceful end hangs


def _settle() -> None:
    """Wait until this process has nothing to do; on a busy machine its queues take longer than the clock suggests."""
    deadline = time.monotonic() + _SETTLE_MOST_S
    while time.monotonic() < deadline:
        used, began = time.process_time(), time.monotonic()
        time.sleep(_SETTLE_S)
        if time.process_time() - used < _IDLE_SHARE * (time.monotonic() - began):
            break


def _lingers(folder: Path, descriptor: int, calm: Callable[[], object]) -> bool:
    """Wait for a client; return whether one came. Called with the lock, and without a client returns with it."""
    linger_s = _linger_s()
    if linger_s <= 0:
        return False
    calm()
    stamp, since = os.fstat(descriptor).st_mtime_ns, time.monotonic()
    while True:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(min(_LOOK_S, linger_s))
        if not try_lock(descriptor):
            return True
        if os.fstat(descriptor).st_mtime_ns != stamp:
            return True  # it has gone again
        if time.monotonic() - since > linger_s or not _is_at_home(folder, descriptor):
            return False


def _is_at_home(folder: Path, descriptor: int) -> bool:
    """Whether clients still find this server: its folder was not removed, nor its database."""
    try:
        return os.path.samestat((folder / CLIENTS_LOCK).stat(), os.fstat(descriptor)) and _has_database()
    except FileNotFoundError:
        return False


def _has_database() -> bool:
    from prefect.settings import get_current_settings

    url = get_current_settings().server.database.connection_url
    scheme, _, path = (url.get_secret_value() if url else "").partition(":///")
    return "sqlite" not in scheme or not path.startswith("/") or Path(path.partition("?")[0]).exists()


if __name__ == "__main__":
    try:
        exit_code = main_early() if sys.argv[1] == "--early" else main(Path(sys.argv[1]))
    except SystemExit as end:  # uvicorn's way to end a failed start
        exit_code = int(end.code or 0)
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit: a database thread of a failed start could keep the process for ever
