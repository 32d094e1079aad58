"""A command as a client of the embedded Prefect server: it joins, looks after the server, and leaves.

`flows.server.embedded` has the protocol of the locks. A server that lingers without clients is used by the next command
if the same installation with the same settings has started it, and if it answers; else it is ended first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from flows.server import embedded
from flows.server.early import EarlyServer
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError
from trainer_lib.json_text import read_json
from trainer_lib.locks.file_lock import is_locked, try_lock
from trainer_lib.ready_databases import Kind, keep, place

if TYPE_CHECKING:
    from prefect.settings import Settings

_log = logging.getLogger(__name__)
_DATABASES = Kind(
    "prefect",
    "server/database/_migrations/versions/sqlite",
    ("alembic_version", "block_type", "block_schema", "block_schema_reference"),
)
# Seconds that a server without clients lingers, unless the variable says otherwise; 0: it ends with its last client.
_LINGER_S = 600.0
# Seconds a start may take on a busy machine, and the server's end.
_START_S = 180
_STOP_S = 12.0
# Seconds after which a server that is not ending yet is assumed to serve others.
_OTHERS_S = 1.0
# Seconds between two looks at whether the embedded server is there, and at whether it answers.
_LOOK_S = 0.5
_HEALTH_S = 5.0
# Seconds without an answer, and looks in a row, after which it is killed and started again: it writes to a local
# database only. Both, because a machine that slept, or had no processor for us, has missed one look after a long time.
_HUNG_S = 30.0
_HUNG_LOOKS = 3
_DAMAGED = ("file is not a database", "database disk image is malformed")  # as sqlite says it


class Membership:
    """This process as one client of the embedded server: joined when made, until `leave`."""

    def __init__(self, settings: Settings, early: EarlyServer | None = None) -> None:
        self._early = early
        self._timeout_s = max(_START_S, settings.server.ephemeral.startup_timeout_seconds)
        self._deadline = time.monotonic() + self._timeout_s
        # Settings of a profile or of prefect.toml are in no environment variable, and the server must share them.
        own = settings.to_environment_variables(exclude_unset=True)
        self._made_by = _identify(own)
        self._environ = {**own, embedded.LINGER: str(_read_linger_s()), embedded.MADE_BY: self._made_by}
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: _Keeper | None = None
        self.folder = _private_folder(settings)
        self._database = _database_file(settings)
        self._makes_database = False
        self.log = self.folder / "server.log"
        self._descriptor = os.open(self.folder / embedded.CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._join()
            self.start_if_absent()
            if self._early is not None:
                self._early.close()  # another one serves
                self._early = None
        except BaseException:
            os.close(self._descriptor)
            raise

    def _join(self) -> None:
        """Take the clients' lock, once a server without clients has ended if it is ending."""
        hung_s = time.monotonic() + _HUNG_S
        while not try_lock(self._descriptor):
            if try_lock(self._descriptor, shared=True):
                break
            if time.monotonic() > self._deadline:
                raise self._failure(f"Another one has not ended within {self._timeout_s} s.")
            if time.monotonic() > hung_s:
                self._kill_hung()
                hung_s += _HUNG_S
            time.sleep(0.01)
        else:
            # No other client is there, and none can come.
            self._end_unfit()
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)  # a server that lingers sees also a client that is gone at its next look

    def _end_unfit(self) -> None:
        """End a server that lingers if it is another installation's, has other settings, or does not answer."""
        found = self.description()
        if found is None:  # none is there, or it is still starting
            return
        answers = is_healthy(found["url"])
        if answers and found.get("made_by") == self._made_by:
            return
        for number in (signal.SIGTERM, signal.SIGKILL) if answers else (signal.SIGKILL,):
            pid = self._server_pid()
            if pid is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + _STOP_S
            while self._is_serving() and time.monotonic() < deadline:
                time.sleep(0.02)
        if not self._is_serving():
            # No client is left that would look for the next one at its address.
            (self.folder / embedded.DESCRIPTION).unlink(missing_ok=True)

    def _kill_hung(self) -> None:
        """Kill a server that was stopped with the clients' lock in its hand; one that works holds it for a moment."""
        found, pid = self.description(), self._server_pid()
        if pid is not None and (found is None or not is_healthy(found["url"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _server_pid(self) -> int | None:
        """The process that holds the server's lock; None without one."""
        text = (self.folder / embedded.SERVER_LOCK).read_text(encoding="ascii", errors="replace")
        return int(text) if text.isdecimal() and self._is_serving() else None

    def wait(self) -> tuple[str, str]:
        """Wait until the server answers; its URL and password."""
        while time.monotonic() < self._deadline:
            description = self.description()
            if description is not None and is_healthy(description["url"]):
                if self._makes_database and self._database is not None:
                    keep(_DATABASES, self._database)
                return description["url"], description["auth"]
            if self._process is not None and self._process.poll() not in (None, embedded.ANOTHER_SERVES):
                raise self._failure(f"It ended with exit code {self._process.returncode}.")
            self.start_if_absent()
            time.sleep(0.05)
        raise self._failure(f"It did not answer within {self._timeout_s} s.")

    def look_after(self) -> None:
        """From now on, start the server again whenever it is killed or hangs, until `leave`."""
        self._keeper = _Keeper(self)
        self._keeper.start()

    def leave(self) -> None:
        """Give the membership up. The last client of a server that does not linger waits until it has ended."""
        if self._keeper is not None:
            self._keeper.close()
        os.close(self._descriptor)
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < _STOP_S and self._is_serving():
            found = self.description()
            if found is not None and (found.get("linger_s") or waited_s > _OTHERS_S):
                break
            time.sleep(0.02)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.0 if self._is_serving() else 2.0)
            self._process.returncode = self._process.returncode or 0  # a server that others still use outlives us

    def start_if_absent(self) -> bool:
        """Start a server unless one holds the lock, or one is starting; whether it was done."""
        starting = self._process is not None and self._process.poll() is None
        if starting or self._is_serving():
            return False
        if self._database is not None and not self._database.exists():
            self._makes_database = not place(_DATABASES, self._database)
        command = [sys.executable, "-P", str(Path(embedded.__file__).resolve()), str(self.folder)]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            early, self._early = self._early, None
            if early is not None and (process := early.serve(self.folder, self.log, self._environ)) is not None:
                self._process = process
                return True
            # In a session of its own: Ctrl-C is for us, and another command may be using it.
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._environ},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return True

    def _is_serving(self) -> bool:
        return is_locked(self.folder / embedded.SERVER_LOCK)

    def description(self) -> dict[str, Any] | None:
        """What the living server says about itself: url, auth, pid; None without one. May be a killed one's."""
        if not self._is_serving():
            return None
        try:
            return read_json(self.folder / embedded.DESCRIPTION, dict)
        except (FileNotFoundError, ValueError):
            return None

    def _failure(self, what: str) -> InfrastructureError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self.log.exists() else []
        cause = next((line.strip() for line in reversed(lines) if "Error" in line), "")
        if self._database is not None and any(words in cause for words in _DAMAGED):
            return InfrastructureError(
                "The database of the embedded Prefect server is damaged.",
                field="prefect",
                value=str(self._database),
                remedy="Move it away, with the files beside it that begin with its name: a new one is made. Results "
                "and records of runs are on the storage; what Prefect's page had of earlier runs is lost.",
                details="\n".join(lines[-40:]),
            )
        return InfrastructureError(
            f"The embedded Prefect server did not start. {what} {cause}".rstrip(),
            field="prefect",
            value=str(self.log),
            remedy="Read that log; or start a server of your own (`prefect server start`) and set PREFECT_API_URL.",
            details="\n".join(lines[-40:]),
        )


class _Keeper(threading.Thread):
    """Starts the embedded server again when it was killed or hangs: a run needs it at its end, hours from now."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(name="trainflow-prefect-keeper", daemon=True)
        self._membership = membership
        self._done = threading.Event()
        self._answered_s = time.monotonic()
        self._answering: int | None = None
        self._missed = 0  # looks in a row without an answer
        self._pause_s = _LOOK_S

    @override
    def run(self) -> None:
        asked_s = time.monotonic()
        while not self._done.wait(self._pause_s):
            try:
                # A server that cannot start, on a full disk, is tried less and less often.
                started = self._membership.start_if_absent()
                self._pause_s = min(2 * self._pause_s, _START_S) if started else self._pause_s
                if time.monotonic() - asked_s >= _HEALTH_S:
                    self._look()
                    asked_s = time.monotonic()
            # No process, descriptor or memory is free just now; the next look may succeed.
            except (OSError, MemoryError) as error:
                _log.debug("The embedded server could not be looked after: %s", error)

    def close(self) -> None:
        """Stop looking; a look under way takes five seconds at most."""
        self._done.set()
        self.join()

    def _look(self) -> None:
        """Kill a server that used to answer, and has not done so for too long."""
        description = self._membership.description()
        if description is None or self._done.is_set():
            return
        pid = int(description["pid"])
        if is_healthy(description["url"]):
            self._answered_s, self._answering, self._missed = time.monotonic(), pid, 0
            self._pause_s = _LOOK_S
            return
        self._missed += 1
        hangs = self._missed >= _HUNG_LOOKS and time.monotonic() - self._answered_s > _HUNG_S
        if self._answering == pid and hangs:
            _log.warning("The embedded Prefect server does not answer; it is started again.")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._answering = None


def _identify(settings: Mapping[str, str]) -> str:
    """A digest of what decides how a server behaves that this process starts: versions, interpreter, settings."""
    program = Path(embedded.__file__).read_bytes()
    versions = [metadata.version(name) for name in ("trainflow", "prefect")]
    parts = [*versions, sys.version, sys.prefix, hashlib.sha256(program).hexdigest(), sorted(settings.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_linger_s() -> float:
    text = os.environ.get(embedded.LINGER, "")
    try:
        seconds = float(text or _LINGER_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            "This is not a number of seconds.",
            field=embedded.LINGER,
            value=text,
            remedy="Set a number, such as 600; 0 ends the server with its last command.",
        )
    return seconds


def _private_folder(settings: Settings) -> Path:
    """The folder where the clients of one database meet; one per host, because PREFECT_HOME may be on a network."""
    database = settings.server.database.connection_url
    place = f"{socket.gethostname()}\n{database.get_secret_value() if database else ''}"
    folder = settings.home / "trainflow" / hashlib.sha256(place.encode()).hexdigest()[:12]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with (folder / embedded.CLIENTS_LOCK).open("ab") as probe:
            try_lock(probe.fileno(), shared=True)  # whether there are locks at all
    except OSError as error:
        raise _unusable(settings.home, error) from error
    return folder


def _database_file(settings: Settings) -> Path | None:
    """The sqlite file of the embedded server; None for any other database."""
    database = settings.server.database.connection_url
    scheme, _, path = (database.get_secret_value() if database else "").partition(":///")
    return Path(path) if scheme == "sqlite+aiosqlite" and path.startswith("/") and "?" not in path else None


def _unusable(home: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Prefect's home cannot be used: {error.strerror or error}.",
        field="PREFECT_HOME",
        value=str(home),
        remedy="Set PREFECT_HOME to a folder you may write, on a file system with locks.",
    )


def is_healthy(url: str) -> bool:
    """Whether a Prefect server answers at `url` (``http://127.0.0.1:41234``)."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
