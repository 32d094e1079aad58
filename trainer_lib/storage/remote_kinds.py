"""Which backend serves the URLs of a scheme."""

from __future__ import annotations

from trainer_lib.storage.hub_files import HubBackend
from trainer_lib.storage.remote import RemoteBackend
from trainer_lib.storage.s3 import S3Backend
from trainer_lib.storage.urls import HUB

_KINDS: dict[str, type[RemoteBackend]] = {"s3": S3Backend, "s3a": S3Backend, HUB: HubBackend}


def open_backend(scheme: str, path: str, *, field: str) -> RemoteBackend:
    """Return the backend of a folder that is not on a local disk.

    Raises:
        ConfigError: the URL is not one of this scheme. MissingExtraError: the scheme's package is not installed.
    """
    return _KINDS.get(scheme, RemoteBackend)(scheme, path, field=field)
