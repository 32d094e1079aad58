"""The process behind `flows.server.api.prefect_api`: a Prefect server that lives exactly as long as it has clients.

    python embedded.py FOLDER

It needs no operator. Two `flock`s in FOLDER decide everything, and the kernel releases them however a process ends:

- ``clients.lock`` is held *shared* by every client. The server waits for it *exclusively*: when it gets the
  lock, no client is left, not even one that was killed with SIGKILL, and it stops. While it stops it keeps the lock, so
  a new client waits for the end instead of talking to a server that is going away.
- ``server.lock`` is held exclusively by the server for its whole life: ``server.json`` describes a living server if and
  only if that lock is taken, and two servers never open one database.

It listens on a loopback port the kernel chose, and answers only to the password in ``server.json`` (mode 0600): a
deployment's parameters name code to run, so another user of the machine must not be able to start one. A server that
was killed leaves its ``server.json``: the next one takes port and password from there, because the clients of the
killed one know no other.

Run by its file, never imported as part of `flows`: it must not depend on the user's working directory, and its first
act must not be an import that takes a second.
"""

from __future__ import annotations

import base64
import fcntl
import http.client
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

CLIENTS_LOCK = "clients.lock"
SERVER_LOCK = "server.lock"
DESCRIPTION = "server.json"
SERVED_TAG = "trainflow-serve"  # deployments that live as long as a `trainflow serve` on this server
ANOTHER_SERVES = 75  # exit code (EX_TEMPFAIL); uvicorn ends a failed start with 3

# How long (seconds) a new server tries for the server lock: a client that checks it holds it briefly.
_CLAIM_S = 1.0
# Events of a run travel through queues inside the server; the last ones get this long (seconds) to reach the database.
_SETTLE_S = 0.2
# A graceful end that takes longer than this (seconds) is cut short: the database is consistent at any moment.
_STOP_S = 10.0


def main(folder: Path) -> int:
    """Serve until the last client is gone. Returns 0, or `ANOTHER_SERVES`."""
    if not _claim(folder):
        return ANOTHER_SERVES
    port, password = _killed_predecessor(folder)
    listener = _listen_on(port)
    if listener.getsockname()[1] != port:
        # A stale address must not lead a client to the program that has that port now.
        (folder / DESCRIPTION).unlink(missing_ok=True)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    running: list[uvicorn.Server] = []
    threading.Thread(target=_end_without_clients, args=(folder, running), daemon=True).start()
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = password
    os.environ["PREFECT_SERVER_UI_API_URL"] = f"{url}/api"
    os.environ.setdefault("PREFECT_API_DATABASE_TIMEOUT", "60")  # seconds a write waits for the others' on a slow disk
    server = _build()
    running.append(server)
    threading.Thread(target=_open, args=(folder, server, url, password), daemon=True).start()
    server.run(sockets=[listener])
    return 0


def _killed_predecessor(folder: Path) -> tuple[int, str]:
    """Port and password of a server that was killed; port 0 and a new password when the last one ended in order."""
    try:
        left = json.loads((folder / DESCRIPTION).read_bytes())
        return int(str(left["url"]).rpartition(":")[2]), str(left["auth"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, f"trainflow:{secrets.token_urlsafe(24)}"


def _listen_on(port: int) -> socket.socket:
    """A listening socket at this loopback port; at any free one if another program has taken it, or it is 0."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The connections of a killed server linger at its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    return listener


def _open(folder: Path, server: uvicorn.Server, url: str, password: str) -> None:
    """Wait until the server answers, pause stale schedules, then tell clients the address through ``server.json``."""
    while not server.started:
        time.sleep(0.02)
    try:
        _pause_unserved(url, password)
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"Schedules without a serving process could not be paused: {error!r}\n")
    _describe(folder, {"pid": os.getpid(), "url": url, "auth": password})


def _pause_unserved(url: str, password: str) -> None:
    """Pause the schedules of processes that are gone: a server that has just started has no serving process yet.

    Runs would pile up for an active schedule that no process serves, and the next `serve` of that name would start them
    all.
    """
    served = {"deployments": {"tags": {"all_": [SERVED_TAG]}}}
    for deployment in _request(url, password, "/api/deployments/filter", served):
        if not deployment.get("paused"):
            _request(url, password, f"/api/deployments/{deployment['id']}/pause_deployment")


def _request(url: str, password: str, path: str, body: object = None) -> Any:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        token = base64.b64encode(password.encode()).decode()
        headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise http.client.HTTPException(f"{path}: {answer.status} {data[:200]!r}")
        return json.loads(data) if data else None
    finally:
        connection.close()


def _claim(folder: Path) -> bool:
    descriptor = os.open(folder / SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # open for life
    deadline = time.monotonic() + _CLAIM_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _describe(folder: Path, description: dict[str, object]) -> None:
    """Write ``server.json`` in one step, readable by its owner only."""
    draft = folder / f"{DESCRIPTION}.draft"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(description, file)
    draft.replace(folder / DESCRIPTION)


def _build() -> uvicorn.Server:
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app(final=True), log_level="error", lifespan="on", timeout_graceful_shutdown=3)
    return uvicorn.Server(config)


def _end_without_clients(folder: Path, running: list[uvicorn.Server]) -> None:
    descriptor = os.open(folder / CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # kept until the process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    if running:
        time.sleep(_SETTLE_S)
        running[0].should_exit = True
        time.sleep(_STOP_S)
    os._exit(0)  # still importing, so nothing is open yet; or the graceful end hangs


if __name__ == "__main__":
    try:
        exit_code = main(Path(sys.argv[1]))
    except SystemExit as end:  # uvicorn's way to end a failed start
        exit_code = int(end.code or 0)
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit: a database thread of a failed start could keep the process for ever
