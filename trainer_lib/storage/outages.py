"""Recognize that a server does not answer, whatever its client raises, and name it in a few words."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

_REFUSED = "the connection is refused"
_UNKNOWN_HOST = "the name of its host is not known"
_NO_ROUTE = "there is no way to it through the network"
_SLOW = "no answer comes in time"
_BROKEN = "the connection breaks off"
_UNREACHABLE = "no connection comes about"

_NUMBERS = {
    errno.ECONNREFUSED: _REFUSED,
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.ENETDOWN: _NO_ROUTE,
    errno.EHOSTDOWN: _NO_ROUTE,
    errno.ETIMEDOUT: _SLOW,
    errno.ECONNRESET: _BROKEN,
    errno.ECONNABORTED: _BROKEN,
    errno.EPIPE: _BROKEN,
    errno.ESTALE: _BROKEN,  # a network folder whose server was restarted
    errno.EREMOTEIO: "it answers with a failure",
}
# By the names of the classes, because most clients are not installed: the end of a name -> what it means.
_CLASSES = {
    "NameResolutionError": _UNKNOWN_HOST,
    "DNSError": _UNKNOWN_HOST,
    "gaierror": _UNKNOWN_HOST,
    "ConnectTimeoutError": _SLOW,
    "ReadTimeoutError": _SLOW,
    "Timeout": _SLOW,
    "TimeoutError": _SLOW,
    "ConnectionClosedError": _BROKEN,
    "ServerDisconnectedError": _BROKEN,
    "RemoteProtocolError": _BROKEN,
    "ClientPayloadError": _BROKEN,
    "IncompleteRead": _BROKEN,
    "ReadError": _BROKEN,
    "WriteError": _BROKEN,
    "EndpointConnectionError": _UNREACHABLE,
    "ClientConnectorError": _UNREACHABLE,
    "NewConnectionError": _UNREACHABLE,
    "MaxRetryError": _UNREACHABLE,
    "ConnectError": _UNREACHABLE,
    "ConnectionError": _UNREACHABLE,
    "HTTPClientError": _UNREACHABLE,
}
_BUSY_CODES = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "429", "500", "502", "503", "504"}


def describe_outage(error: BaseException) -> str | None:
    """Return what keeps a server from answering ("the connection is refused"); None for a failure of another kind.

    A refusal, such as a missing permission, is an answer. Clients wrap the errors of the network in their own, so the
    causes are looked at as well, and the most precise one counts.
    """
    found = [reason for cause in _chain(error) if (reason := _reason(cause)) is not None]
    return next((reason for reason in reversed(found) if reason != _UNREACHABLE), found[0] if found else None)


def _reason(error: BaseException) -> str | None:
    if isinstance(error, socket.gaierror):
        return _UNKNOWN_HOST
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return _NUMBERS[error.errno]
    code = vendor_code(error)
    if code in _BUSY_CODES or (code or "").startswith("Throttling"):
        return f"it is overloaded or out of order ({code})"
    names = [cls.__name__ for cls in type(error).__mro__]
    return next((reason for end, reason in _CLASSES.items() if any(name.endswith(end) for name in names)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first; also those that a client keeps in an attribute or an argument."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < 20:
        cause = waiting.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        inner = (cause.__cause__, cause.__context__, getattr(cause, "reason", None), getattr(cause, "os_error", None))
        waiting += [linked for linked in (*inner, *cause.args) if isinstance(linked, BaseException)]


def vendor_code(error: BaseException) -> str | None:
    """Return the store's own error code, such as ``PreconditionFailed``, or the Hub's HTTP status.

    s3fs keeps it in the cause.
    """
    return _answered(error, "Code")


def vendor_message(error: BaseException) -> str | None:
    """Return the store's own words about an error; None without any."""
    return _answered(error, "Message")


def _answered(error: BaseException, field: str) -> str | None:
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            value = response.get("Error", {}).get(field)
            return None if value is None and field == "Message" else str(value)
        # A client of the Hub: other clients' errors have a status as well, and words of their own.
        status = getattr(response, "status_code", None) if hasattr(candidate, "server_message") else None
        if status is not None:
            words = getattr(candidate, "server_message", None) or getattr(response, "reason_phrase", None)
            return str(status) if field == "Code" else words
    return None
