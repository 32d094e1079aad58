"""Folders on any store. Only this package uses fsspec.

A `Store` is one folder on a local disk, ``s3://``, ``gs://``, ``memory://`` or any other fsspec file system, or of a
repository on the Hub (``hf://``), which is only read. Files are written under their final names, and their SHA-256 is
computed on the way. No file is renamed, because on an object store a rename is a copy and a delete. A commit file marks
a complete folder (`trainer_lib.storage.commit`); a name or a time never does. On a local disk "written" means written
*and fsynced*.

Credentials, endpoints and regions come from the environment (``AWS_ENDPOINT_URL``, ...), never from the URL, so a URL
may be logged. Every failure is a `StorageError` or `StorageFullError` that names the URL.
"""

from trainer_lib.storage.store import DigestingWriter, Store
from trainer_lib.storage.urls import FileEntry, FileInfo, relative_problem, split_root, split_url

__all__ = ["DigestingWriter", "FileEntry", "FileInfo", "Store", "relative_problem", "split_root", "split_url"]
