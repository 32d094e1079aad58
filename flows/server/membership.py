"""A command as a client of the embedded Prefect server: it joins, looks after the server, and leaves.

`trainflow.flows.server.embedded` has the protocol of the locks. A server that lingers without clients is used by the
next command if the same installation with the same settings has started it, and if it answers; else it is ended first.
"""

from __future__ import annotations

import base64
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
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import read_json
from trainer_lib.base.ready_databases import Kind, keep, place
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError
from trainer_lib.locks.file_lock import is_locked, try_lock
from trainflow.flows.server import embedded

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
# Seconds between two looks after the server, and for an answer to one of them.
_LOOK_S = 1.0
_ANSWER_S = 5.0
# Looks in a row without an answer after which it is killed and started again: it writes to a local database only.
# Counted, not timed: a machine that slept, or had no processor for us, has missed one look after a long time.
_HUNG_LOOKS = 5
_DAMAGED = ("file is not a database", "database disk image is malformed")  # as sqlite says it


class Membership:
    """This process as one client of the embedded server: joined when made, until `leave`."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = max(_START_S, settings.server.ephemeral.startup_timeout_seconds)
        self._deadline = time.monotonic() + self._timeout_s
        # Settings of a profile or of prefect.toml are in no environment variable, and the server must share them.
        shared = settings.to_environment_variables(exclude_unset=True)
        self._made_by = _identify(shared)
        self._environ = {**shared, embedded.LINGER: str(_read_linger_s()), embedded.MADE_BY: self._made_by}
        self._process: subprocess.Popen[bytes] | None = None
        self._left = threading.Event()
        self._keeper: threading.Thread | None = None
        self.folder = _private_folder(settings)
        self._database = _database_file(settings)
        self._makes_database = False
        self.log = self.folder / "server.log"
        self._descriptor = os.open(self.folder / embedded.CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._join()
            self.start_if_absent()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _join(self) -> None:
        """Take the clients' lock, once a server without clients has ended if it is ending."""
        while not try_lock(self._descriptor):
            if try_lock(self._descriptor, shared=True):
                return
            if time.monotonic() > self._deadline:
                raise self._failure(f"Another one has not ended within {self._timeout_s} s.")
            time.sleep(0.01)
        # No other client is there, and none can come.
        self._end_unfit()
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def _end_unfit(self) -> None:
        """End a server that lingers if it is another installation's, does not answer, or lost its database."""
        described = self.description()
        if described is None:  # none is there, or it is still starting
            return
        # sqlite would write into a file that was removed, without a word.
        has_database = self._database is None or self._database.exists()
        if has_database and described.get("made_by") == self._made_by and is_healthy(described["url"]):
            return
        self._kill()
        deadline = time.monotonic() + _STOP_S
        while self._is_serving() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self._is_serving():
            # No client is left that would look for the next one at its address.
            (self.folder / embedded.DESCRIPTION).unlink(missing_ok=True)

    def _kill(self) -> None:
        """Kill the server, whose database is consistent at any moment."""
        if (pid := self.server_pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def server_pid(self) -> int | None:
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
        """From now on, until `leave`, start the server again when it is killed or hangs: a run needs it at its end."""
        self._keeper = threading.Thread(target=self._keep, name="trainflow-prefect-keeper", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        pause_s, answering, missed = _LOOK_S, None, 0
        while not self._left.wait(pause_s):
            try:
                if self.start_if_absent():
                    # One that cannot start, on a full disk, is tried less and less often.
                    pause_s = min(2 * pause_s, _START_S)
                    continue
                described, pid = self.description(), self.server_pid()
                if described is not None and is_healthy(described["url"]):
                    pause_s, answering, missed = _LOOK_S, pid, 0
                elif pid is not None and pid == answering:
                    missed += 1
                    if missed > _HUNG_LOOKS and not self._left.is_set():
                        _log.warning("The embedded Prefect server does not answer; it is started again.")
                        self._kill()
            # No process, descriptor or memory is free just now; the next look may succeed.
            except (OSError, MemoryError) as error:
                _log.debug("The embedded server could not be looked after: %s", error)

    def leave(self) -> None:
        """Give the membership up. The last client of a server that does not linger waits until it has ended."""
        self._left.set()
        if self._keeper is not None:
            self._keeper.join()
        os.close(self._descriptor)
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < _STOP_S and self._is_serving():
            described = self.description()
            if described is not None and (described.get("linger_s") or waited_s > _OTHERS_S):
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
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            # In a session of its own: Ctrl-C is for us, and another command may be using it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(embedded.__file__).resolve()), str(self.folder)],
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
        """The running server's own record: url, auth, pid; None without one. May be a killed one's."""
        if not self._is_serving():
            return None
        try:
            return read_json(self.folder / embedded.DESCRIPTION, dict)
        except (FileNotFoundError, ValueError):
            return None

    def _failure(self, what: str) -> InfrastructureError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self.log.exists() else []
        cause = next((line.strip() for line in reversed(lines) if "Error" in line), "")
        place, what = self.log, f"The embedded Prefect server did not start. {what} {cause}".rstrip()
        remedy = "Read that log; or start a server of your own (`prefect server start`) and set PREFECT_API_URL."
        if self._database is not None and any(words in cause for words in _DAMAGED):
            place, what = self._database, "The database of the embedded Prefect server is damaged."
            remedy = (
                "Move it away, with the files next to it that begin with its name: a new one is made. Results and "
                "records of runs are on the storage; what Prefect's page had of earlier runs is lost."
            )
        details = "\n".join(lines[-40:])
        return InfrastructureError(what, field="prefect", value=str(place), remedy=remedy, details=details)


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
        remedy = "Set a number, such as 600; 0 ends the server with its last command."
        raise ConfigError("This is not a number of seconds.", field=embedded.LINGER, value=text, remedy=remedy)
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
        what = f"Prefect's home cannot be used: {error.strerror or error}."
        remedy = "Set PREFECT_HOME to a folder you may write, on a file system with locks."
        raise StorageError(what, field="PREFECT_HOME", value=str(settings.home), remedy=remedy) from error
    return folder


def _database_file(settings: Settings) -> Path | None:
    """The sqlite file of the embedded server; None for any other database."""
    database = settings.server.database.connection_url
    scheme, _, path = (database.get_secret_value() if database else "").partition(":///")
    return Path(path) if scheme == "sqlite+aiosqlite" and path.startswith("/") and "?" not in path else None


def is_healthy(url: str) -> bool:
    """Whether a Prefect server answers at `url` (``http://127.0.0.1:41234``)."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _described() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folders of embedded servers with what they say about themselves; some may have ended."""
    from prefect.settings import get_current_settings

    for path in sorted((get_current_settings().home / "trainflow").glob(f"*/{embedded.DESCRIPTION}")):
        with contextlib.suppress(OSError, ValueError):
            yield path.parent, read_json(path, dict)


def server_folder(url: str) -> Path | None:
    """The folder of the embedded server that answers at `url` (as yielded by `prefect_api`); None: not embedded."""
    return next((folder for folder, about in _described() if f"{about.get('url')}/api" == url), None)


def sign_in_link(api: str | None = None, page: str = "/runs") -> str | None:
    """The link that opens a page of the UI of an embedded server without its password prompt; None: there is none.

    The UI keeps the password in the browser's storage. The server's page `SIGN_IN` gets it behind "#", a part that no
    browser sends anywhere, stores it and opens the UI. The page alone holds no secret: other users stay outside.

    Args:
        api: the address of the server's API; None: any that answers.
    """
    for _, about in _described():
        url = str(about.get("url"))
        if f"{url}/api" == api or (api is None and is_healthy(url)):
            password = base64.b64encode(str(about.get("auth")).encode()).decode()
            return f"{url}{embedded.SIGN_IN}#{password}&{page}"
    return None


def find_page(page: str = "") -> str | None:
    """The page of a Prefect server that runs already: the configured one, else a living embedded one; None: neither."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url:
        return str(settings.ui_url or settings.api.url.removesuffix("/api")) + page
    return sign_in_link()
