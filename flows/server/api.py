"""Prefect's API for the length of one command: the configured server, or an embedded one that needs no operator.

    with prefect_api() as url:
        run_pipeline(spec)

With ``PREFECT_API_URL`` (environment, active profile, prefect.toml) nothing is started. Without it the command shares
an embedded server (`trainflow.flows.server.embedded`) with every other trainflow command of this user: the first one
starts it, and it ends by itself some minutes after the last one, however that one ended (TRAINFLOW_PREFECT_LINGER_S).
Commands look after it: a server that was killed, or no longer answers, is started again at the same address, on
the same database.

Prefect's own temporary server would not do: commands would have several on one sqlite file; it outlives a
SIGKILL of its owner; every user of the machine may talk to it; and it makes the client import the whole server, two
seconds more per command. `prefect server start --background` never ends by itself.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_lib.base.restore_process import objects_set_aside
from trainer_lib.errors import ConfigError, InfrastructureError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage.outages import describe_outage
from trainer_lib.storage.urls import checked_address
from trainflow.tasks.prefect.prefect_internals import patient_events, send_queued, settings_for_every_thread

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_UNAUTHORIZED = (401, 403)


@contextlib.contextmanager
def reachable(api: str) -> Iterator[None]:
    """Turn a lost connection, or a request that the server refuses, into an error that names the server."""
    import httpx

    try:
        yield
    except (httpx.TransportError, httpx.HTTPStatusError) as error:
        what = f"The connection to Prefect's server was lost ({type(error).__name__})."
        remedy = "What is committed stays: run the same command again."
        if isinstance(error, httpx.HTTPStatusError):
            if not str(error.request.url).startswith(api.rstrip("/")):
                raise
            what = f"Prefect's server refused a request: the answer is {error.response.status_code}."
            remedy = f"Read the server's log. {remedy}"
        details = "".join(traceback.format_exception(error))
        raise InfrastructureError(what, field="prefect", value=api, remedy=remedy, details=details) from error


def require_answer(api: str) -> None:
    """Raise ConfigError unless the server that is set answers, and takes the login."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    checked_address(api, field="PREFECT_API_URL", unset="a server of the command's own")
    settings = get_current_settings().api
    timeout = settings.request_timeout if "request_timeout" in settings.model_fields_set else _ANSWER_S
    with get_client(sync_client=True, httpx_settings={"timeout": timeout}) as client:
        error = client.api_healthcheck() or _find_refusal(client)
    if error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _UNAUTHORIZED:
            what = f"Prefect's server at {mask(api)} refuses the login: the answer is {status}."
            remedy = "Set it to the server's PREFECT_SERVER_API_AUTH_STRING; for Prefect Cloud set PREFECT_API_KEY."
            raise ConfigError(what, field="PREFECT_API_AUTH_STRING", remedy=remedy, details=repr(error))
        why = f"the answer is {status}" if status is not None else describe_outage(error) or first_line(error)
        what = f"No Prefect server answers there: {why}."
        remedy = "Start it (`prefect server start`), or unset PREFECT_API_URL to run without a server of your own."
        raise ConfigError(what, field="PREFECT_API_URL", value=api, remedy=remedy, details=repr(error))


def _find_refusal(client: SyncPrefectClient) -> Exception | None:
    """The fault of the login or of the server; None: neither. A server reports its health without a login."""
    import httpx

    try:
        client.hello()
        client.raise_for_api_version_mismatch_once()
    except httpx.HTTPStatusError as error:
        return error if error.response.status_code in _UNAUTHORIZED else None
    except httpx.TransportError as error:
        return error
    except RuntimeError as error:
        return error.__cause__ if isinstance(error.__cause__, Exception) else error
    except (TypeError, ValueError) as error:  # what it names as its version is none
        return OSError(errno.EPROTO, str(error))
    return None


# What we set unless the user did. Everything outward is off; see docs/deployments.md.
QUIET = {
    "DO_NOT_TRACK": "true",  # literally "true": Prefect ignores "1"
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",  # mlflow without git installed
}
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = "127.0.0.1,localhost"
# Seconds a flush of queued events may take.
_FLUSH_S = 10.0
# Seconds that events wait for a server which is started again, before they are given up.
_AWAY_S = 60
# Seconds that another server may take for its first answers, unless the user says it; Prefect's client waits sixty.
_ANSWER_S = 5.0
# Seconds that one request to the embedded server may take before Prefect's client repeats it.
_REQUEST_S = 20.0
# How often a request to another server is repeated, unless the user says it: for 14 seconds, not for Prefect's minute.
# The end of a run waits for two requests, and the next command repairs what the server did not learn.
_RETRIES = 3


def quiet_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Turn off analytics, advertisements and chatter of Prefect and MLflow; a value the user has set stays.

    Call it before either is imported. NO_PROXY is extended by the loopback addresses. A `prefect.toml` or `.env` of the
    working directory cannot name a logging configuration, which can call any function.
    """
    environ = os.environ if environ is None else environ
    if "PREFECT_LOGGING_SETTINGS_PATH" not in environ:
        home = Path(environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
        environ.setdefault("PREFECT_LOGGING_CONFIG_PATH", str(home / "logging.yml"))
    for name, value in QUIET.items():
        environ.setdefault(name, value)
    if any(environ.get(name) for name in _PROXIES):
        for name in ("NO_PROXY", "no_proxy"):
            spared = environ.get(name, "")
            if "127.0.0.1" not in spared and spared != "*":
                environ[name] = f"{spared},{_LOOPBACK}" if spared else _LOOPBACK


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Inside the block no garbage is collected: imports make what stays, and every look at it costs more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def prefect_api(*, meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Give Prefect an API inside the block; yields its URL (``http://127.0.0.1:41234/api``).

    Args:
        meanwhile: called once while the embedded server starts (slow imports fit here: the start takes three seconds,
            eight the first time, when it creates its database).

    Raises:
        ConfigError: the configured server does not answer, or PREFECT_HOME is not usable.
        InfrastructureError: the embedded server did not start; names its log.
    """
    with warnings.catch_warnings(), _without_collections():
        # Prefect creates its home only below an existing folder. We create the folders above it, or raise the reason.
        warnings.filterwarnings("ignore", message="Failed to create the Prefect home directory")
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings

        from trainflow.flows.server.membership import Membership

        settings = get_current_settings()
    if settings.api.url:
        with _without_collections():
            meanwhile()
        retries = settings.client.max_retries if "max_retries" in settings.client.model_fields_set else _RETRIES
        with settings_for_every_thread({PREFECT_CLIENT_MAX_RETRIES: retries}):
            require_answer(settings.api.url)
            with _connected(settings.api.url):
                yield settings.api.url
        return
    membership = Membership(settings)
    try:
        with _without_collections():
            meanwhile()
        url, password = membership.wait()
        membership.look_after()
        api = f"{url}/api"
        with _settings_of(api, password), _connected(api):
            yield api
    finally:
        membership.leave()


def _settings_of(api: str, password: str) -> contextlib.AbstractContextManager[None]:
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
        # Else a client asks for a token first, also where the server, which shares our settings, takes none.
        settings.PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: settings.PREFECT_SERVER_CSRF_PROTECTION_ENABLED.value(),
    }
    return settings_for_every_thread(updates)


@contextlib.contextmanager
def _connected(api: str) -> Iterator[None]:
    """At the end, send what is still queued: task states travel as events, so an unsent one is a task never seen."""
    with objects_set_aside(), patient_events(_AWAY_S):
        try:
            with reachable(api):
                yield
        finally:
            send_queued(_FLUSH_S)
