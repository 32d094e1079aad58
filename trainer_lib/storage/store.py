"""`Store`: one folder, whatever it lies on. Paths are checked, digests computed, failures typed: here, once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainer_lib.errors import ConfigError, DamagedError, StorageError, StorageFullError, TrainflowError
from trainer_lib.storage.files import Backend, FileEntry, FileInfo
from trainer_lib.storage.local import LocalBackend
from trainer_lib.storage.ranges import scatter
from trainer_lib.storage.remote import RemoteBackend
from trainer_lib.storage.s3 import S3Backend
from trainer_lib.storage.translation import absent, is_of_a_store, typed_error
from trainer_lib.storage.urls import checked, split_url

CHUNK = 8 * 2**20
"""Bytes hashed and moved at a time: enough for speed, little enough that a huge tensor is never copied whole."""


class DigestingWriter:
    """A binary stream that knows the SHA-256 and the size of what passed through it.

    `entry` is there once the ``with`` block has ended without an exception.
    """

    def __init__(self, store: Store, rel: str, stream: BinaryIO) -> None:
        self._store = store
        self._rel = rel
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0
        self._entry: FileEntry | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; returns its length in bytes. Raises StorageError when the store took fewer bytes."""
        view = memoryview(data).cast("B")
        with self._store._typed("write", self._rel):
            for start in range(0, len(view), CHUNK):
                piece = view[start : start + CHUNK]
                taken = self._stream.write(piece)
                if taken is not None and taken != len(piece):
                    raise OSError(errno.EIO, f"the store took {taken} of {len(piece)} bytes")
                self._digest.update(piece)
        self._size += len(view)
        return len(view)

    @property
    def entry(self) -> FileEntry:
        """The finished file."""
        if self._entry is None:
            raise RuntimeError("The file is not finished: leave the with block first.")
        return self._entry

    def _finish(self) -> None:
        with self._store._typed("write", self._rel):
            self._store._backend.finish(self._stream)
        self._entry = FileEntry(self._rel, self._size, self._digest.hexdigest())


class _TypedReader(io.RawIOBase):
    """A store's stream whose failures are typed; only its own, not those of the block that uses it."""

    def __init__(self, store: Store, rel: str, stream: BinaryIO) -> None:
        self._store = store
        self._rel = rel
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._store._typed("read", self._rel):
            return int(self._stream.readinto(buffer))  # type: ignore[attr-defined]  # every backend's stream has it

    def read(self, size: int = -1, /) -> bytes:
        with self._store._typed("read", self._rel):
            return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with self._store._typed("read", self._rel):
            return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        with self._store._typed("read", self._rel):
            self._stream.close()
        super().close()


class Store:
    """A folder on some store. It need not exist: reading an absent one finds nothing, writing makes it.

    Attributes:
        url: where it is; free of secrets, may be logged and put in manifests.
        is_local: on a mounted disk.
        exclusive: whether `create` has exactly one winner. Elsewhere two simultaneous callers may, in a window of
            milliseconds, both be told they won: the weaker guarantee of stores without a conditional put.
    """

    def __init__(self, url: str, backend: Backend) -> None:
        self.url = url
        self._backend = backend
        self.is_local = isinstance(backend, LocalBackend)
        self.exclusive = backend.exclusive

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, field: str = "storage") -> Store:
        """The folder at a path or URL; nothing is read or written yet.

        Raises:
            ConfigError: malformed URL, unknown scheme, credentials in the URL. Names `field`.
            MissingExtraError: the scheme's package is not installed.
        """
        scheme, path = split_url(url, field=field)
        if scheme == "file":
            return cls(path, LocalBackend(Path(path)))
        kind = S3Backend if scheme in ("s3", "s3a") else RemoteBackend
        return cls(f"{scheme}://{path}", kind(scheme, path, field=field))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def child(self, *parts: str) -> Store:
        """A folder below this one. Raises ConfigError for ``..`` and absolute parts."""
        rel = "/".join(checked(part) for part in parts)
        if not rel:
            return self
        return Store(self._where(rel), self._backend.child(rel))

    def local_path(self, rel: str = "") -> Path:
        """Where a file of a local store lies. Raises ConfigError when the store is remote."""
        checked(rel, root_too=True)
        if not isinstance(self._backend, LocalBackend):
            raise ConfigError("A local folder is needed here.", value=self.url, remedy="Use a path on a mounted disk.")
        return self._backend.path(rel)

    def ensure_writable(self, *, field: str = "storage") -> None:
        """Write and remove a tiny file, so that a wrong address or missing right is found before work starts.

        Raises:
            ConfigError: it cannot be written, with the store's reason.
        """
        probe = f".probe-{os.urandom(8).hex()}"
        try:
            self.write_bytes(probe, b"trainflow\n")
            self.delete(probe)
        except StorageFullError:
            raise
        except StorageError as error:
            remedy = error.remedy or "Choose another storage."
            raise ConfigError(
                f"Cannot write there: {error.message.removeprefix('Could not write it: ')}",
                field=field,
                value=self.url,
                remedy=remedy,
            ) from error

    # -- looking ------------------------------------------------------------------------------------------------------

    def exists(self, rel: str) -> bool:
        """Whether there is such a *file*."""
        with self._typed("look for", checked(rel)):
            try:
                self._backend.size(rel)
            except FileNotFoundError:
                return False
        return True

    def size(self, rel: str) -> int:
        """Bytes of a file. Raises StorageError when absent."""
        with self._typed("look at", checked(rel)):
            return self._backend.size(rel)

    def children(self, rel: str = "") -> list[str]:
        """Sorted names of the files and folders directly below `rel`; none when absent."""
        with self._typed("list", checked(rel, root_too=True)):
            return sorted(self._backend.names(rel))

    def list(self, rel: str = "") -> list[FileInfo]:
        """Every file below `rel`, recursively, sorted by path; none when absent. Links are left out."""
        with self._typed("list", checked(rel, root_too=True)):
            return sorted(self._backend.files(rel), key=lambda info: info.path)

    def free_bytes(self) -> int | None:
        """Bytes that may still be written; None when the store cannot say."""
        with self._typed("look at", ""):
            return self._backend.free_bytes()

    # -- reading ------------------------------------------------------------------------------------------------------

    def open_read(self, rel: str) -> BinaryIO:
        """A seekable stream from the first byte, to be closed; failures while reading are typed as well."""
        with self._typed("read", checked(rel)):
            return cast(BinaryIO, _TypedReader(self, rel, self._backend.open_read(rel)))

    def read_bytes(self, rel: str, *, limit: int | None = None) -> bytes:
        """A whole file. Raises StorageError when absent, DamagedError when it has more than `limit` bytes."""
        data = self.read_if_exists(rel, limit=limit)
        if data is None:
            raise absent(self._where(rel))
        return data

    def read_if_exists(self, rel: str, *, limit: int | None = None) -> bytes | None:
        """A whole file, or None when absent: one look, so there is no moment between looking and reading."""
        with self._typed("read", checked(rel)):
            try:
                with self._backend.open_read(rel) as stream:
                    data = stream.read() if limit is None else _read_up_to(stream, limit + 1)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
        if limit is not None and len(data) > limit:
            remedy = "It was not written by trainflow, or is damaged."
            raise DamagedError(f"The file has more than {limit:,} bytes.", field=self._where(rel), remedy=remedy)
        return data

    def read_range(self, rel: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file. Raises StorageError when it is absent or shorter."""
        data = bytearray(end - start)
        self.read_into(rel, [(start, memoryview(data))])
        return bytes(data)

    def read_into(self, rel: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers with parts of a file; far away, several ranges are asked for at a time, near ones as one.

        Args:
            rel: the file.
            parts: (position of the first byte, buffer of bytes to fill), in any order.

        Raises:
            StorageError: the file is absent, or ends before one of the parts does.
        """
        with self._typed("read", checked(rel)):
            scatter(lambda ranges: self._backend.read_ranges(rel, ranges), parts)

    def digest(self, rel: str) -> str:
        """SHA-256 of a file, in hex; read in pieces."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
        with self.open_read(rel) as stream:
            while taken := stream.readinto(buffer):  # type: ignore[attr-defined]  # see _TypedReader
                digest.update(buffer[:taken])
        return digest.hexdigest()

    def download(self, rel: str, local: Path, *, expect: FileEntry | None = None) -> None:
        """Copy a file to the local disk; `local` appears only when whole (and equal to `expect`).

        Raises:
            DamagedError: size or digest differ from `expect`.
        """
        local.parent.mkdir(parents=True, exist_ok=True)
        draft = local.with_name(f".{local.name}.{os.urandom(8).hex()}.tmp")
        digest, size = hashlib.sha256(), 0
        try:
            with draft.open("xb") as target, self.open_read(rel) as stream:
                while piece := stream.read(CHUNK):
                    target.write(piece)
                    digest.update(piece)
                    size += len(piece)
            if expect is not None and (size, digest.hexdigest()) != (expect.size, expect.sha256):
                raise DamagedError(
                    f"The file is not the one that was committed ({size:,} bytes, committed {expect.size:,}).",
                    field=self._where(rel),
                    remedy="Restore it, or make it again with --force.",
                )
            draft.replace(local)
        except OSError as error:
            raise typed_error(error, "download to", str(local)) from error
        finally:
            draft.unlink(missing_ok=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_write(self, rel: str) -> Iterator[DigestingWriter]:
        """Write a file of any size. Durable when the block ends; on an exception nothing whole is left under the name.

        Raises:
            StorageError, StorageFullError: from `write` or at the end of the block.
        """
        with self._typed("write", checked(rel)):
            stream = self._backend.open_write(rel)
        writer = DigestingWriter(self, rel, stream)
        try:
            yield writer
            writer._finish()
        except BaseException:
            self._backend.abort(stream, rel)
            raise

    def write_bytes(self, rel: str, data: bytes) -> FileEntry:
        """Write a small file, replacing what was there."""
        with self.open_write(rel) as writer:
            writer.write(data)
        return writer.entry

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file unless one is there; True if we did. Whole or absent, never half.

        A put whose answer is lost and which the client repeats may report False although we won. Callers that must know
        put something unique into `data` and read it back.
        """
        with self._typed("create", checked(rel)):
            return self._backend.create(rel, data)

    def upload(self, local: Path, rel: str) -> FileEntry:
        """Copy a local file into the store; its digest is computed on the way."""
        with self.open_write(rel) as writer, local.open("rb") as source:
            while piece := source.read(CHUNK):
                writer.write(piece)
        return writer.entry

    def delete(self, rel: str) -> None:
        """Remove a file; none is fine."""
        with self._typed("delete", checked(rel)):
            self._backend.delete(rel)

    def delete_tree(self, rel: str = "") -> None:
        """Remove everything below `rel`; nothing is fine. The commit file goes first: `manifest.withdraw`."""
        with self._typed("delete", checked(rel, root_too=True)):
            self._backend.delete_tree(rel)

    def sync(self) -> None:
        """Make folder entries durable (local disks; elsewhere a finished write is)."""
        with self._typed("sync", ""):
            self._backend.sync()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _where(self, rel: str) -> str:
        return f"{self.url.rstrip('/')}/{rel}" if rel else self.url

    @contextlib.contextmanager
    def _typed(self, verb: str, rel: str) -> Iterator[None]:
        try:
            yield
        except TrainflowError:
            raise
        except Exception as error:
            if is_of_a_store(error):
                raise typed_error(error, verb, self._where(rel)) from error
            raise


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    """At most so many bytes, taking memory only as they come: one large read would ask for all of it at once."""
    data = bytearray()
    while len(data) < size and (piece := stream.read(min(2**20, size - len(data)))):
        data += piece
    return bytes(data)
