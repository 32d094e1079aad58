"""Folders on any store: the only place that touches fsspec.

A `Store` is one folder on a local disk, ``s3://``, ``gs://``, ``memory://`` or any other fsspec file system. Files are
written under their final names while their SHA-256 is computed on the way; nothing is renamed, because a rename is a
copy and a delete on an object store. What is complete is said by a commit file (see `trainer_lib.commit`), never by
a name or a time. Locally "written" means written *and fsynced*.

Credentials, endpoints and regions come from the environment (``AWS_ENDPOINT_URL``, ...), never from the URL, so a URL
may be logged. Every failure is a `StorageError` or `StorageFullError` that names the URL.
"""

from trainer_lib.storage.files import FileEntry, FileInfo
from trainer_lib.storage.store import DigestingWriter, Store
from trainer_lib.storage.urls import relative_problem

__all__ = ["DigestingWriter", "FileEntry", "FileInfo", "Store", "relative_problem"]
