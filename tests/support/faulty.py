"""Stores on which the n-th write goes wrong, in a chosen way: ``faulty://``, and any backend inside `FaultyBackend`.

Every step that changes the store counts as one write: opening a file for writing, each ``write``, closing it, a put, a
removal. `Faults.plan` says which one fails and how; `Faults.count` says how many there were.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Kind = Literal["error", "full", "short", "silent", "after", "slow", "die"]
"""error: EIO, nothing done. full: ENOSPC, half of the bytes written. short: half written, and said so. silent: half
written, and nothing said. after: done, then EIO. slow: done after 20 ms. die: the process ends here; nothing works
until the next plan."""


class Died(BaseException):
    """The process was killed here (not an Exception: nothing may handle it)."""


class Faults:
    """The plan for the one faulty store of this process."""

    def __init__(self) -> None:
        self.count = 0
        self.log: list[str] = []
        self._at: int | None = None
        self._kind: Kind = "error"
        self._only = ""
        self._dead = False

    def plan(self, at: int | None, kind: Kind = "error", *, only: str = "") -> None:
        """From now on count writes with `only` in their path: number `at` goes wrong (None: none does)."""
        self.count, self.log, self._at, self._kind, self._dead = 0, [], at, kind, False
        self._only = only

    def step(self, what: str) -> Kind | None:
        """Right before one write: ends the process or fails, if that is the plan; else what its body must do wrong."""
        if self._dead:
            raise Died
        if self._only not in what:
            return None
        self.count += 1
        self.log.append(what)
        kind = self._kind if self.count == self._at else None
        if kind == "die":
            self._dead = True
            raise Died
        if kind == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO), what)
        if kind == "slow":
            time.sleep(0.02)
        return kind

    @contextmanager
    def write(self, what: str) -> Iterator[Kind | None]:
        """Around one write; yields what its body must do wrong."""
        kind = self.step(what)
        yield kind
        if kind == "after":
            raise OSError(errno.EIO, os.strerror(errno.EIO), what)
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

    def look(self) -> None:
        """A read: the dead do not read either."""
        if self._dead:
            raise Died


FAULTS = Faults()


class FaultyFile:
    def __init__(self, target: Any, path: str) -> None:
        self._target = target
        self._path = path

    def write(self, data: Any) -> int:
        """Append, unless the plan says otherwise."""
        whole = bytes(data)
        with FAULTS.write(f"write {self._path}") as kind:
            half = whole[: len(whole) // 2]
            self._target.write(half if kind in ("short", "silent", "full") else whole)
            return len(half) if kind == "short" else len(whole)

    def close(self) -> None:
        with FAULTS.write(f"close {self._path}"):
            self._target.close()


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A memory of its own, shared by all instances, with a plan of faults."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  # fsspec's own declaration
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(MemoryFileSystem._strip_protocol(str(path).removeprefix("faulty://")))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            FAULTS.look()
            try:
                return super()._open(path, mode, **kwargs)
            except FileExistsError as error:  # what fsspec's memory says when a part of the path is a file
                raise NotADirectoryError(path) from error
        with FAULTS.write(f"open {path}"):
            return FaultyFile(super()._open(path, mode, **kwargs), path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        with FAULTS.write(f"put {path}") as kind:
            half = value[: len(value) // 2]
            super()._open(path, "wb").write(half if kind in ("short", "silent", "full") else value)

    def rm_file(self, path: str) -> None:
        with FAULTS.write(f"remove {path}"):
            super().rm_file(path)

    def info(self, path: str, **kwargs: Any) -> Any:
        FAULTS.look()
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        FAULTS.look()
        return super().ls(path, detail, **kwargs)

    def find(self, path: str, **kwargs: Any) -> Any:
        FAULTS.look()
        return super().find(path, **kwargs)


class FaultyBackend:
    """Any backend with the same plan of faults in front of it.

    Only a stream can be cut short; `create` is all or nothing by contract.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # whatever only looks

    def child(self, rel: str) -> FaultyBackend:
        return FaultyBackend(self._inner.child(rel))

    def open_write(self, rel: str) -> Any:
        """One write to open, then one per ``write``."""
        stream = None
        try:
            with FAULTS.write(f"open {rel}"):
                stream = self._inner.open_write(rel)
        except OSError:
            if stream is not None:
                self._inner.abort(stream, rel)
            raise
        return FaultyFile(stream, rel)

    def finish(self, stream: Any) -> None:
        with FAULTS.write("close"):
            self._inner.finish(stream._target)

    def abort(self, stream: Any, rel: str) -> None:
        """Never fails, by contract."""
        self._inner.abort(stream._target, rel)

    def create(self, rel: str, data: bytes) -> bool:
        with FAULTS.write(f"create {rel}") as kind:
            return kind != "full" and bool(self._inner.create(rel, data))

    def delete(self, rel: str) -> None:
        with FAULTS.write(f"delete {rel}"):
            self._inner.delete(rel)

    def delete_tree(self, rel: str) -> None:
        with FAULTS.write(f"delete tree {rel}"):
            self._inner.delete_tree(rel)

    def sync(self) -> None:
        with FAULTS.write("sync"):
            self._inner.sync()


def register() -> None:
    """Make ``faulty://`` known, with an empty store and no faults."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    forget()


def forget() -> None:
    """Empty the store and the plan."""
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FAULTS.plan(None)
