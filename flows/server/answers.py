"""Answers of Prefect's server: whether it is there and takes the login, and errors that name a lost server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.secrets import mask
from trainer_lib.storage.outages import describe_outage
from trainer_lib.storage.urls import checked_address

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_UNAUTHORIZED = (401, 403)


@contextlib.contextmanager
def reachable(api: str) -> Iterator[None]:
    """Turn a lost connection, or a request that the server refuses, into an error that names the server."""
    import httpx

    try:
        yield
    except httpx.TransportError as error:
        raise InfrastructureError(
            f"The connection to Prefect's server was lost ({type(error).__name__}).",
            field="prefect",
            value=api,
            remedy="What is committed stays: run the same command again.",
            details=_traceback(error),
        ) from error
    except httpx.HTTPStatusError as error:
        if not str(error.request.url).startswith(api.rstrip("/")):
            raise
        raise InfrastructureError(
            f"Prefect's server refused a request: the answer is {error.response.status_code}.",
            field="prefect",
            value=api,
            remedy="Read the server's log. What is committed stays: run the same command again.",
            details=_traceback(error),
        ) from error


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def require_answer(api: str) -> None:
    """Make sure that the server which is set answers, and takes the login.

    Raises:
        ConfigError: it does not, or its address is of another form.
    """
    from prefect.client.orchestration import get_client

    checked_address(api, field="PREFECT_API_URL", unset="a server of the command's own")
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck() or _find_refusal(client)
    if error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _UNAUTHORIZED:
            raise ConfigError(
                f"Prefect's server at {mask(api)} refuses the login: the answer is {status}.",
                field="PREFECT_API_AUTH_STRING",
                remedy="Set it to the server's PREFECT_SERVER_API_AUTH_STRING; for Prefect Cloud set PREFECT_API_KEY.",
                details=repr(error),
            )
        what = f"the answer is {status}" if status is not None else describe_outage(error) or type(error).__name__
        raise ConfigError(
            f"No Prefect server answers there: {what}.",
            field="PREFECT_API_URL",
            value=api,
            remedy="Start it (`prefect server start`), or unset PREFECT_API_URL to run without a server of your own.",
            details=repr(error),
        )


def _find_refusal(client: SyncPrefectClient) -> Exception | None:
    """The server's objection to a login; None: it accepts it. A server answers about its health without one."""
    import httpx

    try:
        client.hello()
    except httpx.HTTPStatusError as error:
        return error if error.response.status_code in _UNAUTHORIZED else None
    except httpx.TransportError as error:
        return error
    return None
