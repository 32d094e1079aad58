"""The facts that a store has about a file, and the protocol of a backend.

Glossary: *rel* is a path relative to the store's folder, with forward slashes; ``""`` is the folder itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


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


class Backend(Protocol):
    """One kind of store. It raises what the system raises (`OSError`, a vendor's error); `Store` gives it a type."""

    @property
    def exclusive(self) -> bool:
        """True when `create` has exactly one winner, however many processes race."""

    def child(self, rel: str) -> Backend:
        """Return the backend of a folder below."""

    def size(self, rel: str) -> int:
        """Return the bytes of a file; raise FileNotFoundError when there is none."""

    def files(self, rel: str) -> list[FileInfo]:
        """List every file below, recursively and in no order, by paths relative to the root; follow no links."""

    def links(self) -> list[str]:
        """List every symbolic link, recursively and in no order, by its path relative to the root."""

    def names(self, rel: str) -> list[str]:
        """List the names of the files and folders directly below, in no order; none when `rel` is absent."""

    def open_read(self, rel: str) -> BinaryIO:
        """Open a file for reading, at its first byte."""

    def read_ranges(self, rel: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes | bytearray | memoryview]:
        """Yield the bytes [start, end) of each range in order; a remote store has several requests in flight."""

    def open_write(self, rel: str) -> BinaryIO:
        """Open a file for writing, replace the one that is there, and make the folders above it."""

    def finish(self, stream: BinaryIO) -> None:
        """Close a written stream and make its bytes durable."""

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Give up a written stream: send no more bytes and remove what can be removed. Never raises."""

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file unless one is there; True if it was written. All of `data` becomes visible, or nothing."""

    def replace(self, rel: str, data: bytes) -> None:
        """Write a small file durably in place of the one that is there: a reader sees the old bytes or the new ones."""

    def delete(self, rel: str) -> None:
        """Remove a file durably; do nothing when it is absent."""

    def delete_tree(self, rel: str) -> None:
        """Remove a folder and everything in it; do nothing when it is absent."""

    def free_bytes(self) -> int | None:
        """Return the bytes that may still be written; None when the store has no such number."""

    def sync_file(self, rel: str) -> None:
        """Make the bytes of a file durable that other code wrote."""

    def sync(self) -> None:
        """Make every entry of every folder durable."""
