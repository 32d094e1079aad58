"""Turn what a store raises into a TrainflowError with the file, the reason and a remedy."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from trainer_lib.errors import StorageError, StorageFullError, StorageGoneError, StoreUnreachableError
from trainer_lib.storage.outages import describe_outage, vendor_code, vendor_message
from trainer_lib.storage.urls import HUB

_VENDORS = {
    "botocore",
    "aiobotocore",
    "boto3",
    "s3fs",
    "gcsfs",
    "google",
    "adlfs",
    "azure",
    "aiohttp",
    "fsspec",
    "httpcore",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "paramiko",
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "507", "storageQuotaExceeded"}
"""Codes of object stores that have a limit. MinIO's many codes are recognised by how they end (`_is_full`)."""
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_FOLDER = {errno.EEXIST, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class FolderGoneError(OSError):
    """A pinned folder was renamed or removed; not the ESTALE of a network folder, which may come back."""


def is_of_a_store(error: Exception) -> bool:
    """Return whether a store failed, and not our own code or the caller's."""
    # By the module's name, because most of these packages are not installed.
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _VENDORS


def absent(where: str) -> StorageError:
    """Return the error for a file, folder or bucket that does not exist."""
    return StorageError("There is no such file, folder or bucket.", field=where, remedy="Check the URL.")


def gone(where: str) -> StorageGoneError:
    """Return the error for a storage that was renamed or removed while this process worked on it."""
    return StorageGoneError(
        "The storage was renamed or removed while this command worked on it; nothing more is written there.",
        field=where,
        remedy="Give it its name back, and run the same command again: it continues from what is there.",
    )


def unreachable(outage: str, verb: str, where: str) -> StoreUnreachableError:
    """Return the error for a store that does not answer, for the reason that `describe_outage` found."""
    s3 = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    asked = f" and the endpoint (AWS_ENDPOINT_URL is {s3})" if s3 and where.startswith("s3") else ""
    if where.startswith(f"{HUB}://") and (hub := os.environ.get("HF_ENDPOINT")):
        asked = f" and the endpoint (HF_ENDPOINT is {hub})"
    return StoreUnreachableError(
        f"Could not {verb} it: the store does not answer ({outage}).",
        field=where,
        remedy=f"Check the network{asked}; the same command continues.",
    )


def _free_bytes(where: str) -> int | None:
    """Bytes that are free where a local file was to be written; None on another store."""
    if not where.startswith("/"):
        return None
    place = next((folder for folder in (Path(where), *Path(where).parents) if folder.exists()), Path("/"))
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _is_full(code: str | None) -> bool:
    return code is not None and (code in _FULL_CODES or code.endswith(("StorageFull", "QuotaExceeded")))


def _reason(error: Exception) -> str:
    """The message of the system or the store, without the client's sentence around it."""
    code = vendor_code(error)
    said = error.strerror if isinstance(error, OSError) else None
    if code is not None:
        message = vendor_message(error) or said
        return f"the store answers {code}" + (f" ({message.rstrip('.')})" if message else "")
    return said or str(error) or type(error).__name__


def typed_error(error: Exception, verb: str, where: str, *, needed: int | None = None) -> StorageError:
    """Return a StorageError for what a store raised.

    Args:
        error: what the store raised.
        verb: what was tried, as in "Could not `verb` it".
        where: the URL.
        needed: bytes that the file has at least, for the error of a full disk.

    Returns:
        a StorageFullError when no space is left, which no retry can help; a StoreUnreachableError when the store does
        not answer, which a later try may help.
    """
    number, reason = (error.errno if isinstance(error, OSError) else None), _reason(error)
    if number in _FULL or _is_full(vendor_code(error)):
        remedy = "Free space there, or choose another storage; nothing committed was touched."
        free = _free_bytes(where)
        left = "no space left" if free is None else f"no space left, {free:,} bytes are free"
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
    if number in _DENIED or isinstance(error, PermissionError):
        remedy = "Check the permissions, and for a remote store the credentials in the environment."
    elif type(error).__name__ in _CREDENTIALS:
        remedy = "Give credentials through the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
    elif (outage := describe_outage(error)) is not None:
        return unreachable(outage, verb, where)
    else:
        remedy = "If the store was only unreachable for a moment, run the same command again."
    return StorageError(f"Could not {verb} it: {reason.rstrip('.')}.", field=where, remedy=remedy)
