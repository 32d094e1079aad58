"""Failures of stores and servers, whatever their client raises: outages in a few words, and errors with a remedy."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

from trainer_lib.errors import StorageError, StorageFullError, StorageGoneError, StoreUnreachableError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage.urls import HUB

_STRANGE = "something else answers in its place"
# ESTALE: a network folder whose server was restarted. EPROTO: ours, of a page that another program sent.
_DOWN = {
    *(errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ESTALE, errno.EREMOTEIO, errno.EPROTO),
}
# By the ends of the classes' names, because most clients are not installed.
_DOWN_CLASSES = (
    *("NameResolutionError", "DNSError", "gaierror", "TimeoutError", "Timeout", "ConnectionClosedError"),
    *("ServerDisconnectedError", "RemoteProtocolError", "ClientPayloadError", "IncompleteRead", "ReadError"),
    *("WriteError", "EndpointConnectionError", "ClientConnectorError", "NewConnectionError", "MaxRetryError"),
    *("ConnectError", "ConnectionError", "HTTPClientError"),
)
_BUSY_CODES = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "429", "500", "502", "503", "504"}
_VENDORS = {
    *("botocore", "aiobotocore", "boto3", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp", "fsspec"),
    *("paramiko", "httpcore", "httpx", "httpx2", "huggingface_hub"),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "507", "storageQuotaExceeded"}
"""Codes of object stores that have a limit. MinIO's many codes are recognised by how they end."""
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_FOLDER = {errno.EEXIST, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def describe_outage(error: BaseException) -> str | None:
    """Return what keeps a server from answering ("Connection refused"); None for a failure of another kind.

    A refusal, such as a missing permission, is an answer. Clients wrap the errors of the network in their own, so the
    causes are looked at as well, and the innermost one counts.
    """
    if isinstance(error, Exception) and is_strange(error):
        return _STRANGE
    found = [reason for cause in _chain(error) if (reason := _outage_of(cause)) is not None]
    return found[-1] if found else None


def _outage_of(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _DOWN:
        return _STRANGE if error.errno == errno.EPROTO else os.strerror(error.errno)
    code, _ = vendor_answer(error)
    if code in _BUSY_CODES or (code or "").startswith("Throttling"):
        return f"it is overloaded or out of order ({code})"
    if type(error).__name__.endswith("BadStatusLine"):
        return _STRANGE
    if any(cls.__name__.endswith(_DOWN_CLASSES) for cls in type(error).__mro__):
        said = error.strerror if isinstance(error, OSError) else None
        return mask(said or first_line(error)).rstrip(".")
    return None


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


def vendor_answer(error: BaseException) -> tuple[str | None, str | None]:
    """The store's own error code, such as ``PreconditionFailed``, or the Hub's HTTP status; and its words."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            said = response.get("Error", {})
            # The status, where the answer has no words of S3.
            code = said.get("Code") or response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return None if code is None else str(code), said.get("Message")
        # A client of the Hub: other clients' errors have a status as well, and words of their own.
        status = getattr(response, "status_code", None) if hasattr(candidate, "server_message") else None
        if status is not None:
            words = getattr(candidate, "server_message", None) or getattr(response, "reason_phrase", None)
            return str(status), words
    return None, None


class FolderGoneError(OSError):
    """A pinned folder was renamed or removed; not the ESTALE of a network folder, which may come back."""


def is_of_a_store(error: Exception) -> bool:
    """Return whether a store failed, and not our own code or the caller's."""
    # By the module's name, because most of these packages are not installed.
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _VENDORS or is_strange(error)


def is_strange(error: Exception) -> bool:
    """Return whether a client did not find in an answer what its store always sends: another program gave it."""
    if not isinstance(error, LookupError | TypeError | AttributeError):
        return isinstance(error, json.JSONDecodeError)
    raised_in = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(raised_in) and raised_in[-1].partition(".")[0] in _VENDORS


def absent(where: str) -> StorageError:
    """Return the error for a file, folder or bucket that does not exist."""
    return StorageError("There is no such file, folder or bucket.", field=where, remedy="Check the URL.")


def gone(where: str) -> StorageGoneError:
    """Return the error for a storage that was renamed or removed while this process worked on it."""
    what = "The storage was renamed or removed while this command worked on it; nothing more is written there."
    remedy = "Give it its name back, and run the same command again: it continues from what is there."
    return StorageGoneError(what, field=where, remedy=remedy)


def unreachable(outage: str, verb: str, where: str) -> StoreUnreachableError:
    """Return the error for a store that does not answer, for the reason that `describe_outage` found."""
    s3 = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    asked = f" and the endpoint (AWS_ENDPOINT_URL is {s3})" if s3 and where.startswith("s3") else ""
    if where.startswith(f"{HUB}://") and (hub := os.environ.get("HF_ENDPOINT")):
        asked = f" and the endpoint (HF_ENDPOINT is {hub})"
    what = f"Could not {verb} it: the store does not answer ({outage})."
    return StoreUnreachableError(what, field=where, remedy=f"Check the network{asked}; the same command continues.")


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process may write on the disk of a path, which need not exist. Raises OSError."""
    return shutil.disk_usage(next((folder for folder in (path, *path.parents) if folder.exists()), "/")).free


def typed_error(error: Exception, verb: str, where: str, *, needed: int | None = None) -> StorageError:
    """A StorageError for `error`, which a store raised when `verb` was tried at `where`: "Could not `verb` it".

    It is a StorageFullError, with the bytes `needed`, when no space is left, which no retry can help; a
    StoreUnreachableError when the store does not answer, which a later try may help.
    """
    number, said = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    code, words = vendor_answer(error)
    # The message of the system or the store, without the client's sentence around it.
    words = f" ({words.rstrip('.')})" if words else ""
    reason = said or str(error) or type(error).__name__ if code is None else f"the store answers {code}{words}"
    if number in _FULL or code in _FULL_CODES or (code or "").endswith(("StorageFull", "QuotaExceeded")):
        remedy = "Free space there, or choose another storage; nothing committed was touched."
        left = "no space left"
        if where.startswith("/"):  # a local file
            with contextlib.suppress(OSError):
                left += f", {free_bytes(Path(where)):,} bytes are free"
        # The system's own words for this number say it once more; a quota or a store's code adds something.
        more = "" if number == errno.ENOSPC else f" ({reason})"
        size = "" if needed is None else f" The file needs at least {needed:,}."
        return StorageFullError(f"Could not {verb} it: {left}{more}.{size}", field=where, remedy=remedy)
    if isinstance(error, FolderGoneError):
        return gone(where)
    # For a new file it is the place that is missing, not the file.
    if isinstance(error, FileNotFoundError) and verb in ("write", "create"):
        remedy = "Make it first, or choose another storage."
        return StorageError("There is no such folder or bucket, and none could be made.", field=where, remedy=remedy)
    if isinstance(error, FileNotFoundError):
        return absent(where)
    if number in _NO_FOLDER:
        remedy = "Choose another storage, or move that file away."
        return StorageError("A file is in the place of a folder.", field=where, remedy=remedy)
    if number in _DENIED or isinstance(error, PermissionError) or code in ("401", "403"):
        remedy = "Check the permissions, and for a remote store the credentials in the environment."
    elif type(error).__name__ in _CREDENTIALS:
        remedy = "Give credentials through the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
    elif (outage := describe_outage(error)) is not None:
        return unreachable(outage, verb, where)
    else:
        remedy = "If the store was only unreachable for a moment, run the same command again."
    return StorageError(f"Could not {verb} it: {reason.rstrip('.')}.", field=where, remedy=remedy)
