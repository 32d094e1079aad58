"""Prefect's API for the length of one command: the configured server, or an embedded one that needs no operator.

    with prefect_api() as url:
        run_pipeline(spec)

With ``PREFECT_API_URL`` (environment, active profile, prefect.toml) nothing is started. Without it the command shares
an embedded server (`flows.server.embedded`) with every other trainflow command of this user: the first one starts it,
and it ends by itself with the last one, however that one ended. Each command looks after it: a server that was killed,
or no longer answers, is started again at the same address, on the same database.

Prefect's own temporary server would not do: each command would have one, several on one sqlite file; it outlives a
SIGKILL of its owner; every user of the machine may talk to it; and it makes the client import the whole server, two
seconds more per command.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from flows.server import embedded
from flows.server.answers import reachable, require_answer
from tasks.prefect_internals import patient_events, send_queued, settings_for_every_thread
from trainer_lib.errors import InfrastructureError, StorageError

if TYPE_CHECKING:
    from prefect.settings import Settings

# What we set unless the user did. Everything outward is off; see docs/deployments.md.
QUIET = {
    "DO_NOT_TRACK": "true",  # literally "true": Prefect ignores "1"
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",  # mlflow without git installed
}
_log = logging.getLogger(__name__)
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = "127.0.0.1,localhost"
# Seconds a start may take on a busy machine, a flush of queued events, and the server's end.
_START_S = 60
_FLUSH_S = 10.0
# Seconds that events wait for a server which is started again, before they are given up.
_AWAY_S = 60
_STOP_S = 12.0
# Seconds after which a server that has not begun to end is assumed to serve others.
_OTHERS_S = 1.0
# Seconds between two looks at whether the embedded server is there, and at whether it answers.
_LOOK_S = 0.5
_HEALTH_S = 5.0
# Seconds without an answer after which it is killed and started again: it writes to a local database only.
_HUNG_S = 30.0
# Seconds that one request to the embedded server may take before Prefect's client repeats it.
_REQUEST_S = 20.0


def quiet_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Turn off analytics, advertisements and chatter of Prefect and MLflow; a value the user has set stays.

    Call it before either is imported. NO_PROXY is extended by the loopback addresses.
    """
    environ = os.environ if environ is None else environ
    for name, value in QUIET.items():
        environ.setdefault(name, value)
    if any(environ.get(name) for name in _PROXIES):
        for name in ("NO_PROXY", "no_proxy"):
            spared = environ.get(name, "")
            if "127.0.0.1" not in spared and spared != "*":
                environ[name] = f"{spared},{_LOOPBACK}" if spared else _LOOPBACK


@contextlib.contextmanager
def prefect_api(*, meanwhile: Callable[[], object] | None = None) -> Iterator[str]:
    """Give Prefect an API inside the block; yields its URL (``http://127.0.0.1:41234/api``).

    Args:
        meanwhile: called once while the embedded server starts (slow imports fit here: the start takes three seconds,
            eight the first time, when it creates its database).

    Raises:
        ConfigError: the configured server does not answer, or PREFECT_HOME is not usable.
        InfrastructureError: the embedded server did not start; names its log.
    """
    with warnings.catch_warnings():
        # Prefect creates its home only below an existing folder. We create the folders above it, or raise the reason.
        warnings.filterwarnings("ignore", message="Failed to create the Prefect home directory")
        from prefect.settings import get_current_settings

        settings = get_current_settings()
    if settings.api.url:
        if meanwhile is not None:
            meanwhile()
        require_answer(settings.api.url)
        with _flushed(), reachable(settings.api.url):
            yield settings.api.url
        return
    membership = _Membership(settings)
    try:
        if meanwhile is not None:
            meanwhile()
        url, password = membership.wait()
        membership.look_after()
        with _settings_of(f"{url}/api", password), _flushed(), reachable(f"{url}/api"):
            yield f"{url}/api"
    finally:
        membership.leave()


def server_folder(url: str) -> Path | None:
    """The folder of the embedded server that answers at `url` (as yielded by `prefect_api`); None: not embedded."""
    from prefect.settings import get_current_settings

    for path in (get_current_settings().home / "trainflow").glob(f"*/{embedded.DESCRIPTION}"):
        with contextlib.suppress(OSError, ValueError):
            if f"{json.loads(path.read_bytes())['url']}/api" == url:
                return path.parent
    return None


@contextlib.contextmanager
def _settings_of(api: str, password: str) -> Iterator[None]:
    """Prefect's settings inside the block, for this thread and for those that copied no context.

    A request to a server that hangs is given up early and repeated, because the server is soon started again. The
    heartbeat is off: its thread holds every flow run back by a second at the end, and an embedded server has no
    automation that would listen to it.
    """
    from prefect import settings

    updates = {
        settings.PREFECT_API_URL: api,
        settings.PREFECT_API_AUTH_STRING: password,
        settings.PREFECT_API_REQUEST_TIMEOUT: _REQUEST_S,
        settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with settings_for_every_thread(updates):
        yield


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """At the end, send what is still queued: task states travel as events, so an unsent one is a task never seen."""
    with patient_events(_AWAY_S):
        try:
            yield
        finally:
            send_queued(_FLUSH_S)


class _Membership:
    """This process as one client of the embedded server: joined when made, until `leave`."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = max(_START_S, settings.server.ephemeral.startup_timeout_seconds)
        self._deadline = time.monotonic() + self._timeout_s
        # Settings of a profile or of prefect.toml are in no environment variable, and the server must share them.
        self._environ = {**os.environ, **settings.to_environment_variables(exclude_unset=True)}
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: _Keeper | None = None
        self.folder = _private_folder(settings)
        self.log = self.folder / "server.log"
        self._descriptor = os.open(self.folder / embedded.CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # waits while a server without clients ends
        self.start_if_absent()

    def wait(self) -> tuple[str, str]:
        """Wait until the server answers; its URL and password."""
        while time.monotonic() < self._deadline:
            description = self.description()
            if description is not None and _is_healthy(description["url"]):
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
        """Give the membership up. The last client waits until the server has ended, so nothing is left running."""
        if self._keeper is not None:
            self._keeper.close()
        os.close(self._descriptor)
        start_s = time.monotonic()
        while self._is_serving() and (waited_s := time.monotonic() - start_s) < _STOP_S:
            if waited_s > _OTHERS_S and (self.folder / embedded.DESCRIPTION).exists():
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
        command = [sys.executable, "-P", str(Path(embedded.__file__).resolve()), str(self.folder)]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            # In a session of its own: Ctrl-C is for us, and another command may be using it.
            self._process = subprocess.Popen(
                command,
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return True

    def _is_serving(self) -> bool:
        descriptor = os.open(self.folder / embedded.SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def description(self) -> dict[str, Any] | None:
        """What the living server says about itself: url, auth, pid; None without one. May be a killed one's."""
        if not self._is_serving():
            return None
        try:
            found: dict[str, Any] = json.loads((self.folder / embedded.DESCRIPTION).read_bytes())
        except FileNotFoundError:
            return None
        return found

    def _failure(self, what: str) -> InfrastructureError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self.log.exists() else []
        cause = next((line.strip() for line in reversed(lines) if "Error" in line), "")
        return InfrastructureError(
            f"The embedded Prefect server did not start. {what} {cause}".rstrip(),
            field="prefect",
            value=str(self.log),
            remedy="Read that log; or start a server of your own (`prefect server start`) and set PREFECT_API_URL.",
            details="\n".join(lines[-40:]),
        )


class _Keeper(threading.Thread):
    """Starts the embedded server again when it was killed or hangs: a run needs it at its end, hours from now."""

    def __init__(self, membership: _Membership) -> None:
        super().__init__(name="trainflow-prefect-keeper", daemon=True)
        self._membership = membership
        self._done = threading.Event()
        self._answered_s = time.monotonic()
        self._answering: int | None = None
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
            except OSError as error:  # no process or descriptor is free just now; the next look may succeed
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
        if _is_healthy(description["url"]):
            self._answered_s, self._answering = time.monotonic(), pid
            self._pause_s = _LOOK_S
        elif self._answering == pid and time.monotonic() - self._answered_s > _HUNG_S:
            _log.warning("The embedded Prefect server does not answer; it is started again.")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._answering = None


def _private_folder(settings: Settings) -> Path:
    """The folder where the clients of one database meet; one per host, because PREFECT_HOME may be on a network."""
    database = settings.server.database.connection_url
    place = f"{socket.gethostname()}\n{database.get_secret_value() if database else ''}"
    folder = settings.home / "trainflow" / hashlib.sha256(place.encode()).hexdigest()[:12]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with (folder / embedded.CLIENTS_LOCK).open("ab") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return folder
    except OSError as error:
        raise _unusable(settings.home, error) from error
    return folder


def _unusable(home: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Prefect's home cannot be used: {error.strerror or error}.",
        field="PREFECT_HOME",
        value=str(home),
        remedy="Set PREFECT_HOME to a folder you may write, on a file system with locks.",
    )


def _is_healthy(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
