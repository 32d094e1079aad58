"""The facts that a store has about a file."""

from __future__ import annotations

from dataclasses import dataclass


class FolderGoneError(OSError):
    """A pinned folder was renamed or removed; not the ESTALE of a network folder, which may come back."""


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: its path relative to the store, size in bytes, SHA-256 in hexadecimal digits."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """A file as a store lists it: its path relative to the store, size in bytes.

    `tag` identifies the content without reading it (an ETag or a checksum of the store); None where the store has none.
    """

    path: str
    size: int
    tag: str | None = None
