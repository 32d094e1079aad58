"""`Store`: one folder on any kind of store. It checks paths, computes digests and gives failures a type."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from typing_extensions import override

from trainer_lib.errors import (
    ConfigError,
    DamagedError,
    StorageError,
    StorageFullError,
    StoreUnreachableError,
    TrainflowError,
)
from trainer_lib.storage.local import LocalBackend, pinned
from trainer_lib.storage.outages import absent, is_of_a_store, typed_error
from trainer_lib.storage.remote import read_up_to, scatter
from trainer_lib.storage.urls import HUB, FileEntry, FileInfo, checked, split_url

if TYPE_CHECKING:
    from trainer_lib.storage.remote import RemoteBackend

CHUNK = 8 * 2**20
"""Bytes hashed and written at a time: enough for speed, and few enough that a huge tensor is never copied whole."""


class DigestingWriter:
    """A binary stream that computes SHA-256 and size of what is written: `entry`, once the ``with`` block has ended."""

    def __init__(self, store: Store, rel: str, stream: BinaryIO) -> None:
        self._store = store
        self._rel = rel
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0
        self._entry: FileEntry | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data` and return its length in bytes. Raises StorageError when the store accepted fewer bytes."""
        # An array's view counts elements, and sizes here are bytes.
        view = memoryview(data).cast("B")
        with self._store._typed("write", self._rel, needed=self._size + len(view)):
            for start in range(0, len(view), CHUNK):
                piece = view[start : start + CHUNK]
                taken = self._stream.write(piece)
                if taken is not None and taken != len(piece):
                    raise OSError(errno.EIO, f"the store accepted {taken} of {len(piece)} bytes")
                self._digest.update(piece)
        self._size += len(view)
        return len(view)

    @property
    def entry(self) -> FileEntry:
        """The finished file: path, size in bytes and SHA-256."""
        if self._entry is None:
            raise RuntimeError("The file is not finished: leave the with block first.")
        return self._entry

    def _finish(self) -> None:
        with self._store._typed("write", self._rel):
            self._store._backend.finish(self._stream)
        self._entry = FileEntry(self._rel, self._size, self._digest.hexdigest())


class _TypedReader(io.RawIOBase):
    """A store's stream whose failures get a type; an exception of the block that uses it stays as it is."""

    def __init__(self, store: Store, rel: str, stream: BinaryIO) -> None:
        self._store = store
        self._rel = rel
        self._stream = stream

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._store._typed("read", self._rel):
            return int(self._stream.readinto(buffer))  # type: ignore[attr-defined]  # every backend's stream has it

    @override
    def read(self, size: int = -1, /) -> bytes:
        with self._store._typed("read", self._rel):
            return self._stream.read(size)

    @override
    def seek(self, offset: int, whence: int = 0, /) -> int:
        with self._store._typed("read", self._rel):
            return self._stream.seek(offset, whence)

    @override
    def tell(self) -> int:
        return self._stream.tell()

    @override
    def close(self) -> None:
        with self._store._typed("read", self._rel):
            self._stream.close()
        super().close()


class Store:
    """A folder on some store. It need not exist: reading an absent folder finds nothing, and writing makes it."""

    def __init__(self, url: str, backend: LocalBackend | RemoteBackend) -> None:
        self.url = url  # the folder's address; it holds no secrets and may be logged and put in manifests
        self._backend = backend
        self.is_local = isinstance(backend, LocalBackend)  # True on a mounted disk
        # True when `create` has exactly one winner. On a store without a conditional put, two callers within
        # milliseconds may both get True.
        self.exclusive = backend.exclusive

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, field: str = "storage") -> Store:
        """Return the folder at a path or URL, without reading or writing anything. Errors name `field`.

        Raises ConfigError for a URL that is malformed, of an unknown scheme or with credentials, and MissingExtraError.
        """
        scheme, path = split_url(url, field=field)
        if scheme == "file":
            # A local store's URL is its plain path.
            return cls(path, LocalBackend(Path(path)))
        # asyncio comes with these: 30 ms, which a command on a local disk does without.
        from trainer_lib.storage.remote import HubBackend, RemoteBackend
        from trainer_lib.storage.s3 import S3Backend

        kinds: dict[str, type[RemoteBackend]] = {"s3": S3Backend, "s3a": S3Backend, HUB: HubBackend}
        return cls(f"{scheme}://{path}", kinds.get(scheme, RemoteBackend)(scheme, path, field=field))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def child(self, *parts: str) -> Store:
        """Return a folder below this one. Raises ConfigError for ``..`` and absolute parts."""
        rel = "/".join(checked(part) for part in parts)
        if not rel:
            return self
        return Store(self._where(rel), self._backend.child(rel))

    def local_path(self, rel: str = "") -> Path:
        """Return the path of a file of a local store. Raises ConfigError when the store is remote."""
        checked(rel, root_too=True)
        if not isinstance(self._backend, LocalBackend):
            raise ConfigError("This must be a local folder.", value=self.url, remedy="Use a path on a mounted disk.")
        return self._backend.path(rel)

    def ensure_writable(self, *, field: str = "storage") -> None:
        """Write and remove a tiny file, so that a wrong address or a missing permission is found before work starts.

        Raises ConfigError (with the store's reason), StorageFullError or StoreUnreachableError.
        """
        probe = f".probe-{os.urandom(8).hex()}"
        try:
            self.write_bytes(probe, b"trainflow\n")
            self.delete(probe)
        # Its own exit code and remedy are right already.
        except StorageFullError:
            raise
        except StoreUnreachableError as error:
            error.field, error.value = field, self.url  # the setting, in place of the tiny file
            raise
        except StorageError as error:
            remedy = error.remedy or "Choose another storage."
            what = f"Cannot write there: {error.message.removeprefix('Could not write it: ')}"
            raise ConfigError(what, field=field, value=self.url, remedy=remedy) from error

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Inside the block, a local folder that is renamed or removed stays away: writes raise StorageGoneError."""
        with contextlib.ExitStack() as stack:
            if isinstance(self._backend, LocalBackend):
                with self._typed("write", ""):
                    stack.enter_context(pinned(self._backend.root))
            yield

    # -- looking ------------------------------------------------------------------------------------------------------

    def exists(self, rel: str) -> bool:
        """Return whether there is such a *file*; a folder of the name does not count."""
        with self._typed("look for", checked(rel)):
            try:
                self._backend.size(rel)
            except FileNotFoundError:
                return False
        return True

    def size(self, rel: str) -> int:
        """Return the bytes of a file. Raises StorageError when it is absent."""
        with self._typed("look at", checked(rel)):
            return self._backend.size(rel)

    def children(self, rel: str = "") -> list[str]:
        """List the sorted names of the files and folders directly below `rel`; none when it is absent."""
        with self._typed("list", checked(rel, root_too=True)):
            return sorted(self._backend.names(rel))

    def links(self) -> list[str]:
        """List every symbolic link of a local folder, recursively and sorted; `delete` removes one, not its target."""
        with self._typed("list", ""):
            return sorted(self._backend.links())

    def list(self, rel: str = "") -> list[FileInfo]:
        """List every file below `rel`, recursively and sorted by path; none when it is absent. Links are left out."""
        with self._typed("list", checked(rel, root_too=True)):
            return sorted(self._backend.files(rel), key=lambda info: info.path)

    def free_bytes(self) -> int | None:
        """Return the bytes that may still be written; None when the store has no such number."""
        with self._typed("look at", ""):
            return self._backend.free_bytes()

    # -- reading ------------------------------------------------------------------------------------------------------

    def open_read(self, rel: str) -> BinaryIO:
        """Open a seekable stream at the first byte, to be closed after use. Its failures are StorageErrors as well."""
        with self._typed("read", checked(rel)):
            return cast(BinaryIO, _TypedReader(self, rel, self._backend.open_read(rel)))

    def read_bytes(self, rel: str, *, limit: int | None = None) -> bytes:
        """Read a whole file. Raises StorageError, and DamagedError when it has more than `limit` bytes."""
        data = self.read_if_exists(rel, limit=limit)
        if data is None:
            raise absent(self._where(rel))
        return data

    def read_if_exists(self, rel: str, *, limit: int | None = None) -> bytes | None:
        """Read a whole file; return None when it is absent. One request, so the file cannot vanish in between."""
        with self._typed("read", checked(rel)):
            try:
                with self._backend.open_read(rel) as stream:
                    # One byte more than allowed is enough to know that the file is too large.
                    data = stream.read() if limit is None else read_up_to(stream, limit + 1)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
        if limit is not None and len(data) > limit:
            remedy = "trainflow did not write it, or it is damaged."
            raise DamagedError(f"The file has more than {limit:,} bytes.", field=self._where(rel), remedy=remedy)
        return data

    def read_into(self, rel: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers with parts of a file, with several requests in flight on a remote store. Raises StorageError.

        `parts`: (position of the first byte, buffer of bytes to fill), in any order. One request reads neighbours.
        """
        with self._typed("read", checked(rel)):
            scatter(lambda ranges: self._backend.read_ranges(rel, ranges), parts)

    def digest(self, rel: str, on_read: Callable[[int], object] = lambda size: None) -> str:
        """Compute the SHA-256 of a file, in hexadecimal digits; it is read in pieces, whose sizes `on_read` gets."""
        digest = hashlib.sha256()
        with self.open_read(rel) as stream:
            while piece := stream.read(CHUNK):
                digest.update(piece)
                on_read(len(piece))
        return digest.hexdigest()

    def download(self, rel: str, local: Path, *, expect: FileEntry | None = None) -> None:
        """Copy a file to the local disk; `local` appears only when it is whole and equal to `expect`."""
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
                what = (
                    f"The file is not the committed one ({size:,} bytes instead of {expect.size:,}, or other content)."
                )
                remedy = "Restore it, or make it again with --force."
                raise DamagedError(what, field=self._where(rel), remedy=remedy)
            draft.replace(local)  # in one step, after the check: a reader never sees a part of the file
        except OSError as error:
            raise typed_error(error, "download to", str(local)) from error
        finally:
            draft.unlink(missing_ok=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_write(self, rel: str) -> Iterator[DigestingWriter]:
        """Write a file of any size, durable when the block ends; an exception leaves no whole file under the name."""
        with self._typed("write", checked(rel)):
            stream = self._backend.open_write(rel)
        writer = DigestingWriter(self, rel, stream)
        try:
            yield writer
            writer._finish()
        # Also Ctrl-C: a part of a file under its final name would look whole.
        except BaseException:
            self._backend.abort(stream, rel)
            raise

    def write_bytes(self, rel: str, data: bytes) -> FileEntry:
        """Write a small file and replace the one that is there."""
        with self.open_write(rel) as writer:
            writer.write(data)
        return writer.entry

    def replace(self, rel: str, data: bytes) -> None:
        """Write a small file that others may read, in one step: it is the old one or this one, never a part."""
        with self._typed("write", checked(rel)):
            self._backend.replace(rel, data)

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file unless one is there; True if it was written. The file is whole or absent, never half.

        A client repeats a put whose answer is lost, and may then return False although the first put wrote the file.
        Callers that must know put something unique into `data` and read it back.
        """
        with self._typed("create", checked(rel)):
            return self._backend.create(rel, data)

    def upload(self, local: Path, rel: str) -> FileEntry:
        """Copy a local file into the store and compute its digest on the way."""
        with self.open_write(rel) as writer, local.open("rb") as source:
            while piece := source.read(CHUNK):
                writer.write(piece)
        return writer.entry

    def delete(self, rel: str) -> None:
        """Remove a file; do nothing when it is absent."""
        with self._typed("delete", checked(rel)):
            self._backend.delete(rel)

    def delete_tree(self, rel: str = "") -> None:
        """Remove everything below `rel`; a commit file must go before it, as in `commit.withdraw_folder`."""
        with self._typed("delete", checked(rel, root_too=True)):
            self._backend.delete_tree(rel)

    def sync_file(self, rel: str) -> None:
        """Make the bytes of a file durable that other code wrote; a file of `open_write` is durable already."""
        with self._typed("sync", checked(rel)):
            self._backend.sync_file(rel)

    def sync(self) -> None:
        """Make the entries of folders durable on a local disk; on other stores a finished write is durable."""
        with self._typed("sync", ""):
            self._backend.sync()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _where(self, rel: str) -> str:
        return f"{self.url.rstrip('/')}/{rel}" if rel else self.url

    @contextlib.contextmanager
    def _typed(self, verb: str, rel: str, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except TrainflowError:
            raise
        except Exception as error:
            if not is_of_a_store(error):  # a bug in trainflow, which a type would hide
                raise
            raise self._backend.refusal(error) or typed_error(error, verb, self._where(rel), needed=needed) from error
