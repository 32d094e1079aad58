"""What a store knows about a file, and what a backend must be able to do.

Glossary: *rel* is a path relative to the store's folder, with forward slashes; ``""`` is the folder itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: path relative to its store, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """A file as a store lists it: path relative to the listed store, size in bytes.

    `tag` is what the store says of the content without reading it (an ETag, a checksum); None where it says nothing.
    """

    path: str
    size: int
    tag: str | None = None


class Backend(Protocol):
    """One kind of store. Raises what the system raises (`OSError`, a vendor's error); `Store` makes it typed."""

    @property
    def exclusive(self) -> bool:
        """Whether `create` has exactly one winner however many race."""

    def child(self, rel: str) -> Backend:
        """The same kind of store, one folder below."""

    def size(self, rel: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""

    def files(self, rel: str) -> list[FileInfo]:
        """Every file below, recursively, in no order, paths relative to the root; links are not followed."""

    def names(self, rel: str) -> list[str]:
        """Names of the files and folders directly below, in no order; none when absent."""

    def open_read(self, rel: str) -> BinaryIO:
        """A fresh stream from the first byte."""

    def read_ranges(self, rel: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes | bytearray | memoryview]:
        """The bytes [start, end) of each range, in order; where the store is far away, several are on their way."""

    def open_write(self, rel: str) -> BinaryIO:
        """A stream that replaces the file; folders above it are made."""

    def finish(self, stream: BinaryIO) -> None:
        """Close a written stream; its bytes are durable afterwards."""

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Give up a written stream: no more bytes are sent, what can be removed is removed. Never raises."""

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file unless one is there: True if written. All of `data` is visible, or nothing."""

    def delete(self, rel: str) -> None:
        """Remove a file, durably; none is fine."""

    def delete_tree(self, rel: str) -> None:
        """Remove a folder and everything in it; none is fine."""

    def free_bytes(self) -> int | None:
        """Bytes that may still be written, or None when the store cannot say."""

    def sync(self) -> None:
        """Make every folder entry durable."""
