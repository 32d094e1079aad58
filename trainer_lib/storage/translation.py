"""Turn what a store raises into an error of ours, with the file, the reason and a remedy."""

from __future__ import annotations

import errno

from trainer_lib.errors import StorageError, StorageFullError

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
    "paramiko",
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "507", "storageQuotaExceeded"}
"""Codes of object stores that have a limit. MinIO's many codes are recognised by how they end (`_is_full`)."""
_NO_FOLDER = {errno.EEXIST, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_of_a_store(error: Exception) -> bool:
    """Return whether a store failed, and not our own code or the caller's."""
    # By the module's name, because most of these packages are not installed.
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _VENDORS


def absent(where: str) -> StorageError:
    """Return the error for a file, folder or bucket that does not exist."""
    return StorageError("There is no such file, folder or bucket.", field=where, remedy="Check the URL.")


def _is_full(code: str | None) -> bool:
    return code is not None and (code in _FULL_CODES or code.endswith(("StorageFull", "QuotaExceeded")))


def typed_error(error: Exception, verb: str, where: str) -> StorageError:
    """Return a StorageError for what a store raised.

    Args:
        error: what the store raised.
        verb: what was tried, as in "Could not `verb` it".
        where: the URL.

    Returns:
        a StorageFullError when no space is left, which no retry can help.
    """
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if number in _FULL or _is_full(vendor_code(error)):
        remedy = "Free space there, or choose another storage; nothing committed was touched."
        return StorageFullError(f"Could not {verb} it: no space left ({reason}).", field=where, remedy=remedy)
    # For a new file it is the place that is missing, not the file.
    if isinstance(error, FileNotFoundError) and verb in ("write", "create"):
        remedy = "Make it first, or choose another storage."
        return StorageError("There is no such folder or bucket, and none could be made.", field=where, remedy=remedy)
    if isinstance(error, FileNotFoundError):
        return absent(where)
    if number in _NO_FOLDER:
        remedy = "Choose another storage, or move that file away."
        return StorageError("A file stands where a folder is needed.", field=where, remedy=remedy)
    if number in _DENIED or isinstance(error, PermissionError):
        remedy = "Check the permissions, and for a remote store the credentials in the environment."
    elif type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        remedy = "Give credentials through the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
    else:
        remedy = "If the store was only unreachable for a moment, run the same command again."
    return StorageError(f"Could not {verb} it: {reason}", field=where, remedy=remedy)


def vendor_code(error: BaseException) -> str | None:
    """Return the store's own error code, such as ``PreconditionFailed``; s3fs keeps it in the cause."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None
