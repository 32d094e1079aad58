"""Files of remote stores on this machine: kept by their digest, in a private folder of bounded size."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer_lib.storage import FileEntry, Store

DEFAULT_BYTES = 50 * 1024**3


class FileCache:
    """A folder of files named by their SHA-256: two pipelines that use the same bytes share them.

    Args:
        folder: where; created with mode 0700.
        max_bytes: once more is kept, the files used longest ago go.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @classmethod
    def default(cls) -> FileCache:
        """``$TRAINFLOW_CACHE_DIR``, else ``$XDG_CACHE_HOME/trainflow/files``; bounded by ``$TRAINFLOW_CACHE_BYTES``."""
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("TRAINFLOW_CACHE_DIR") or home / "trainflow" / "files")
        return cls(folder, int(os.environ.get("TRAINFLOW_CACHE_BYTES") or DEFAULT_BYTES))

    def fetch(self, store: Store, entry: FileEntry) -> Path:
        """A local copy of `entry`, downloaded (its digest checked) unless it is there. Ranks download it once."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / entry.sha256
        with self._lock():
            if not path.exists() or path.stat().st_size != entry.size:
                self._make_room(entry.size)
                partial = path.with_suffix(".partial")
                store.download(entry.path, partial, expect=entry)
                partial.replace(path)
            os.utime(path)  # marks the use; a mapped file that is evicted stays readable until it is closed
        return path

    def _make_room(self, size: int) -> None:
        files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir())
        kept = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in files:
            if kept + size <= self._max_bytes:
                return
            if path.name != "lock":
                path.unlink()
                kept -= bytes_

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
