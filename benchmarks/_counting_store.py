"""A store in memory that counts what it is asked, behind the real `Store`: requests, and the names of its listings.

It counts as an object store does: a listing is a request for each thousand names.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from trainer_lib.storage import Store
from trainer_lib.storage.urls import FileInfo

PAGE = 1000
_LOCK = threading.Lock()


class Counts:
    """Counts of requests so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.names = 0
        self.longest = 0  # names of one listing

    def listing(self, names: int) -> None:
        """Count a listing."""
        self.requests += max(1, -(-names // PAGE))
        self.names += names
        self.longest = max(self.longest, names)


class CountingBackend:
    """A folder of nested dictionaries: a dictionary is a folder, bytes are a file."""

    exclusive = True

    def __init__(self, tree: dict[str, Any], counts: Counts, root: str = "") -> None:
        self._tree = tree
        self.counts = counts
        self._root = root

    def child(self, rel: str) -> CountingBackend:
        """Return the backend of a folder below."""
        return CountingBackend(self._tree, self.counts, self._path(rel))

    def size(self, rel: str) -> int:
        """Return the bytes of a file."""
        self.counts.requests += 1
        return len(self._read(rel))

    def files(self, rel: str) -> list[FileInfo]:
        """List every file below."""
        found: list[FileInfo] = []

        def walk(folder: dict[str, Any], path: str) -> None:
            for name, held in folder.items():
                where = f"{path}/{name}" if path else name
                if isinstance(held, dict):
                    walk(held, where)
                else:
                    found.append(FileInfo(where, len(held)))

        folder = self._find(rel)
        walk(folder if isinstance(folder, dict) else {}, rel)
        self.counts.listing(len(found))
        return found

    def links(self) -> list[str]:
        """Return none."""
        return []

    def names(self, rel: str) -> list[str]:
        """List the names directly below."""
        folder = self._find(rel)
        names = list(folder) if isinstance(folder, dict) else []
        self.counts.listing(len(names))
        return names

    def open_read(self, rel: str) -> BinaryIO:
        """Open a file."""
        self.counts.requests += 1
        return io.BytesIO(self._read(rel))

    def read_ranges(self, rel: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the ranges one after the other."""
        data = self._read(rel)
        for start, end in ranges:
            self.counts.requests += 1
            yield data[start:end]

    def open_write(self, rel: str) -> BinaryIO:
        """Open a stream whose bytes are the file's once it is finished."""
        stream = io.BytesIO()
        stream.name = rel
        return stream

    def finish(self, stream: BinaryIO) -> None:
        """Put the file."""
        self.replace(stream.name, stream.getvalue())  # type: ignore[attr-defined]

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Nothing was put."""

    def create(self, rel: str, data: bytes) -> bool:
        """Put a file unless it is there."""
        with _LOCK:
            if self._find(rel) is not None:
                self.counts.requests += 1
                return False
            self.replace(rel, data)
            return True

    def replace(self, rel: str, data: bytes) -> None:
        """Put a file."""
        self.counts.requests += 1
        *folders, name = self._path(rel).split("/")
        folder = self._tree
        for each in folders:
            folder = folder.setdefault(each, {})
        folder[name] = data

    def delete(self, rel: str) -> None:
        """Remove a file, and as an object store does the folders that are empty then."""
        self.counts.requests += 1
        self._remove(self._path(rel).split("/"))

    def delete_tree(self, rel: str) -> None:
        """Remove a folder."""
        self.counts.listing(sum(1 for _ in self.files(rel)))
        self._remove(self._path(rel).split("/"))

    def free_bytes(self) -> None:
        """No limit."""

    def sync_file(self, rel: str) -> None:
        """Durable already."""

    def sync(self) -> None:
        """Durable already."""

    def _path(self, rel: str) -> str:
        return "/".join(part for part in (self._root, rel) if part)

    def _find(self, rel: str) -> Any:
        found: Any = self._tree
        for part in filter(None, self._path(rel).split("/")):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def _read(self, rel: str) -> bytes:
        found = self._find(rel)
        if not isinstance(found, bytes):
            raise FileNotFoundError(errno.ENOENT, "No such file", rel)
        return found

    def _remove(self, parts: list[str]) -> None:
        chain = [self._tree]
        for part in parts[:-1]:
            below = chain[-1].get(part)
            if not isinstance(below, dict):
                return
            chain.append(below)
        chain[-1].pop(parts[-1], None)
        for folder, name in zip(reversed(chain[:-1]), reversed(parts[:-1]), strict=True):
            if folder[name]:
                return
            del folder[name]


def counting_store() -> tuple[Store, Counts]:
    """Return a new, empty store, and what it is asked."""
    counts = Counts()
    return Store("counted://store", cast(Any, CountingBackend({}, counts))), counts
