"""What stores raise, told as one of ours: which file, which reason, what to do."""

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
"""What object stores with an end answer instead; MinIO's codes are told by their last words."""
_NO_FOLDER = {errno.EEXIST, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_of_a_store(error: Exception) -> bool:
    """Whether a store failed, rather than our code or the caller's."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _VENDORS


def absent(where: str) -> StorageError:
    """Nothing is there."""
    return StorageError("There is no such file, folder or bucket.", field=where, remedy="Check the URL.")


def _is_full(code: str | None) -> bool:
    return code is not None and (code in _FULL_CODES or code.endswith(("StorageFull", "QuotaExceeded")))


def typed_error(error: Exception, verb: str, where: str) -> StorageError:
    """The failure that says what could not be done where, why, and what helps."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if number in _FULL or _is_full(vendor_code(error)):
        remedy = "Free space there, or choose another storage; nothing committed was touched."
        return StorageFullError(f"Could not {verb} it: no space left ({reason}).", field=where, remedy=remedy)
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
    """The store's own error code (``PreconditionFailed``), which s3fs keeps in the cause."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None
