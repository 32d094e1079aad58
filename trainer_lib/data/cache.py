"""Local copies of files of remote stores, named by their digest, in a private folder of bounded size."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer_lib.storage import FileEntry, Store

DEFAULT_BYTES = 50 * 1024**3


class FileCache:
    """A folder of files named by their SHA-256, so that pipelines share equal files.

    Args:
        folder: the folder; created with mode 0700.
        max_bytes: size from which the least recently used files are removed.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @classmethod
    def default(cls) -> FileCache:
        """The user's cache: ``$TRAINFLOW_CACHE_DIR``, or ``$XDG_CACHE_HOME/trainflow/files``.

        ``$TRAINFLOW_CACHE_BYTES`` sets its size.
        """
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("TRAINFLOW_CACHE_DIR") or home / "trainflow" / "files")
        return cls(folder, int(os.environ.get("TRAINFLOW_CACHE_BYTES") or DEFAULT_BYTES))

    def fetch(self, store: Store, entry: FileEntry) -> Path:
        """The path of a local copy of `entry`; a missing one is downloaded once per machine, its digest verified."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / entry.sha256
        with self._lock():
            # The size is enough: the digest was compared when the file was downloaded.
            if not path.exists() or path.stat().st_size != entry.size:
                self._make_room(entry.size)
                # Renamed when complete: a killed download never looks like a file.
                partial = path.with_suffix(".partial")
                store.download(entry.path, partial, expect=entry)
                partial.replace(path)
            os.utime(path)  # marks the use; a mapped file that is removed stays readable until it is closed
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
