"""Every store but the local disk, through fsspec: object stores, memory, ssh and others.

Files are read with several requests in flight, in order and in bounded memory: a *piece* is the range of one request;
the *window* is the number of pieces in flight beyond the one in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from typing_extensions import override

from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.storage.outages import vendor_answer
from trainer_lib.storage.urls import HUB, FileInfo, checked_address, split_root

if TYPE_CHECKING:
    import fsspec

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FLAT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
"""Schemes without folders: making one has no use there, and on S3 it may create a bucket."""
_EXCLUSIVE = {"memory", "s3", "s3a"}
"""Schemes whose exclusive create is proven by the conformance tests (S3: ``If-None-Match: *``)."""
_MEMORY_LOCK = threading.Lock()
"""fsspec's memory store looks and then writes; this lock makes the two one step for the threads of the process."""
_BLOCK = 16 * 2**20
"""Bytes per request of a file that is written; with fsspec's own 5 MiB there are three times as many requests."""
_BUSY_CODES = {"ConditionalRequestConflict", "OperationAborted", "409"}
PIECE = 16 * 2**20  # bytes of one request: so many that the latency of a request does not matter
WINDOW = 6
GAP = 2**20  # bytes between two wanted ranges up to which one request reads both and discards what lies between

Buffer = bytes | bytearray | memoryview
Fetch = Callable[[int, int], "Future[Buffer]"]  # start a request for the bytes [start, end)
Range = tuple[int, int]


def windowed(fetch: Fetch, ranges: Iterable[Range]) -> Iterator[Buffer]:
    """Yield the bytes of ranges in order, while requests for the next ones are in flight. `close` cancels those."""
    flying: deque[tuple[int, Future[Buffer]]] = deque()
    try:
        for start, end in ranges:
            flying.append((end - start, fetch(start, end)))
            if len(flying) > WINDOW:  # the next requests start before the caller gets these bytes
                yield _arrived(*flying.popleft())
        while flying:
            yield _arrived(*flying.popleft())
    finally:
        for _, future in flying:
            future.cancel()
        for _, future in flying:  # a request must not outlive the stream, and asyncio logs exceptions never retrieved
            with contextlib.suppress(Exception, CancelledError):
                future.result()


def _arrived(size: int, future: Future[Buffer]) -> Buffer:
    data = future.result()
    if len(data) != size:
        raise OSError(errno.EIO, f"the store sent {len(data)} of {size} bytes")
    return data


def pieces(start: int, end: int) -> Iterator[Range]:
    """Cut a range into pieces."""
    return ((at, min(at + PIECE, end)) for at in range(start, end, PIECE))


def scatter(read: Callable[[Iterable[Range]], Iterator[Buffer]], parts: Sequence[tuple[int, memoryview]]) -> None:
    """Fill buffers with the bytes from their positions on; read neighbours in one request and no byte twice.

    `read` yields the bytes of ranges in order. Raises OSError where the file ends before a part does.
    """
    wanted = sorted((part for part in parts if len(part[1])), key=lambda part: part[0])
    ranges = [piece for start, end in _runs(wanted) for piece in pieces(start, end)]
    first = 0
    for (start, end), data in zip(ranges, read(ranges), strict=True):
        view = memoryview(data)
        if len(view) != end - start:
            raise OSError(errno.EIO, f"the file ends at byte {start + len(view)}, {end} are wanted")
        # Parts that end before this range are done: they are not looked at again.
        while first < len(wanted) and wanted[first][0] + len(wanted[first][1]) <= start:
            first += 1
        for position, buffer in wanted[first:]:
            if position >= end:
                break
            low, high = max(position, start), min(position + len(buffer), end)
            if low < high:
                buffer[low - position : high - position] = view[low - start : high - start]


def _runs(parts: Sequence[tuple[int, memoryview]]) -> Iterator[Range]:
    """Join sorted parts into the fewest ranges that cover them and have no gap larger than GAP."""
    run: Range | None = None
    for position, buffer in parts:
        end = position + len(buffer)
        if run is None or position > run[1] + GAP:
            if run is not None:
                yield run
            run = (position, end)
        else:
            run = (run[0], max(run[1], end))
    if run is not None:
        yield run


class AheadReader(io.RawIOBase):
    """A file of known size as a stream, which keeps a window of pieces in flight as long as it is read in order."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._piece = memoryview(b"")
        self._coming: Iterator[Buffer] | None = None

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        if position != self._position:
            self._drop()  # the pieces in flight belong to the old position
            self._position = position
        return position

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._size - self._position)
        wanted = rest if size is None or size < 0 else min(size, rest)
        parts = []
        while wanted:
            parts.append(self._take(wanted))
            wanted -= len(parts[-1])
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Copy into `buffer` what is left of the current piece, at most; return 0 only at the end of the file."""
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)

    def _take(self, most: int) -> memoryview:
        """Return the next bytes, at most what is left of the current piece."""
        if not len(self._piece) and most and self._position < self._size:
            if self._coming is None:
                self._coming = windowed(self._fetch, pieces(self._position, self._size))
            self._piece = memoryview(b"")  # the old one is freed before the next is asked for
            self._piece = memoryview(next(self._coming))
        data, self._piece = self._piece[:most], self._piece[most:]
        self._position += len(data)
        return data

    @override
    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        self._piece = memoryview(b"")
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.close()  # type: ignore[attr-defined]  # a generator


def read_up_to(stream: BinaryIO, size: int) -> bytes:
    """Read at most so many bytes, taking memory as they come: one large read would ask for all of it at once."""
    data = bytearray()
    while len(data) < size and (piece := stream.read(min(2**20, size - len(data)))):
        data += piece
    return bytes(data)


def open_file_system(scheme: str, *, field: str) -> fsspec.AbstractFileSystem:
    """The fsspec file system of a scheme, without its cache of listings. Raises MissingExtraError and ConfigError."""
    import fsspec
    from fsspec.registry import known_implementations

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        message, value = "This kind of store needs a package that is not installed.", f"{scheme}://"
        if scheme in _EXTRAS:
            raise MissingExtraError(message, extra=_EXTRAS[scheme], field=field, value=value) from error
        remedy = str(known_implementations[scheme].get("err") or "Install the package that serves it").rstrip(".")
        raise MissingExtraError(message, field=field, value=value, remedy=f"{remedy}.") from error
    options: dict[str, Any] = {"use_listings_cache": False}
    s3 = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme in ("s3", "s3a") and s3:
        # Part of fsspec's instance key, so that a changed environment gives a fresh client.
        options["endpoint_url"] = checked_address(s3, field="AWS_ENDPOINT_URL", unset="Amazon's own S3")
    if scheme == HUB and (endpoint := os.environ.get("HF_ENDPOINT")):
        options["endpoint"] = checked_address(endpoint, field="HF_ENDPOINT", unset="huggingface.co").rstrip("/")
    try:
        return fsspec.filesystem(scheme, **options)
    except (TypeError, ValueError, OSError) as error:
        remedy = "Set its options in fsspec's configuration (FSSPEC_<SCHEME>_<OPTION> in the environment)."
        raise ConfigError(f"The {scheme}:// store cannot be set up: {error}", field=field, remedy=remedy) from error


def _tag(info: dict[str, Any]) -> str | None:
    # S3 and Azure call it ETag or etag, Google md5Hash or crc32c; the Hub has git's name of the content.
    names = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "blob_id", "xet_hash")
    return next((str(info[name]).strip('"') for name in names if info.get(name)), None)


class RemoteBackend:
    """A folder on an fsspec file system."""

    def __init__(self, scheme: str, root: str, *, field: str, fs: fsspec.AbstractFileSystem | None = None) -> None:
        self.scheme = scheme
        self.fs: Any = open_file_system(scheme, field=field) if fs is None else fs
        self.root = self.fs._strip_protocol(f"{scheme}://{root}").rstrip("/")
        self.exclusive = scheme in _EXCLUSIVE
        self._is_async = bool(getattr(self.fs, "async_impl", False))

    def refusal(self, error: Exception) -> ConfigError | None:
        """Return the error for an address that the store refuses by its own rules; None for any other failure."""
        return None

    def child(self, rel: str) -> RemoteBackend:
        """Return the backend of a folder below, with the same client."""
        return type(self)(self.scheme, self.path(rel).lstrip("/"), field="storage", fs=self.fs)

    def path(self, rel: str) -> str:
        """Return the full path in fsspec's form."""
        return f"{self.root}/{rel}" if rel else self.root

    def size(self, rel: str) -> int:
        """Return the bytes of a file."""
        return int(self._info(rel)["size"])

    def _info(self, rel: str) -> dict[str, Any]:
        """The file system's facts about a file. Raises FileNotFoundError when it is absent, or a folder."""
        self._refresh()
        info = cast("dict[str, Any]", self.fs.info(self.path(rel)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "No such file", self.path(rel))
        return info

    def files(self, rel: str) -> list[FileInfo]:
        """List every file below, in one recursive listing."""
        self._refresh()
        prefix = self.root + "/"
        try:
            found = self.fs.find(self.path(rel), detail=True)
        except FileNotFoundError:
            return []
        return [
            FileInfo(name[len(prefix) :], int(info["size"]), _tag(info))
            for name, info in cast("dict[str, dict[str, Any]]", found).items()
            # Consoles make empty objects whose names end with a slash, as folders.
            if info["type"] == "file" and name.startswith(prefix) and not name.endswith("/")
        ]

    def names(self, rel: str) -> list[str]:
        """List the names of one level, in one listing."""
        self._refresh()
        path = self.path(rel)
        try:
            infos = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # A set: a store may have a file and a folder of one name.
        names = {str(info["name"]).rstrip("/").removeprefix(path).strip("/") for info in infos}
        return [name for name in names if name and "/" not in name]

    def open_read(self, rel: str) -> BinaryIO:
        """Open a stream that reads ahead where the file system is asynchronous."""
        path = self.path(rel)
        if self.scheme == "memory":
            # A copy, because fsspec returns the one stored object, whose position all readers share.
            return io.BytesIO(self.fs.cat_file(path))
        if self._is_async:
            size = self._info(rel)["size"]
            if size is not None:  # a web server may leave the size out
                return cast(BinaryIO, AheadReader(lambda start, end: self._fetch(path, start, end), int(size)))
        return cast(BinaryIO, self.fs.open(path, "rb"))

    def read_ranges(self, rel: str, ranges: Iterable[Range]) -> Iterator[Buffer]:
        """Yield the ranges in order, with several requests in flight where the file system is asynchronous."""
        path = self.path(rel)
        if self._is_async:
            return windowed(lambda start, end: self._fetch(path, start, end), ranges)
        # By name: the second positional argument of s3fs is a version.
        return (self.fs.cat_file(path, start=start, end=end) for start, end in ranges)

    def _fetch(self, path: str, start: int, end: int) -> Future[Buffer]:
        return asyncio.run_coroutine_threadsafe(self.fs._cat_file(path, start=start, end=end), self.fs.loop)

    def open_write(self, rel: str) -> BinaryIO:
        """Open a stream that sends a large file in parts while it is written."""
        path = self.path(rel)
        self._make_parents(path)
        return cast(BinaryIO, self.fs.open(path, "wb", block_size=_BLOCK))

    def finish(self, stream: BinaryIO) -> None:
        """Close the stream, which completes the upload."""
        stream.close()

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Discard an upload. Closing it instead, as a ``with`` does, would publish the truncated object."""
        with contextlib.suppress(Exception):
            discard: Callable[[], None] | None = getattr(stream, "discard", None)
            if discard is not None:
                discard()
        with contextlib.suppress(Exception):
            # fsspec's setter: otherwise `__del__` closes the stream, which publishes it.
            stream.closed = True  # type: ignore[misc]
        with contextlib.suppress(Exception):
            self.fs.rm_file(self.path(rel))

    def replace(self, rel: str, data: bytes) -> None:
        """Put a small file: object stores show it once all of it is there."""
        path = self.path(rel)
        self._make_parents(path)
        self.fs.pipe_file(path, data)

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file by a conditional put; where the store has none, look, write and read back."""
        path = self.path(rel)
        self._make_parents(path)
        with _MEMORY_LOCK if self.scheme == "memory" else contextlib.nullcontext():
            try:
                self._put_new(path, data)
            except FileExistsError:
                return False
        # Without a conditional put the last writer wins, and both writers read the same bytes afterwards.
        return self.exclusive or self.fs.cat_file(path) == data

    def _put_new(self, path: str, data: bytes) -> None:
        for attempt in range(4):
            try:
                self.fs.pipe_file(path, data, mode="create")
            except OSError as error:
                code, _ = vendor_answer(error)
                if code in ("PreconditionFailed", "412"):
                    raise FileExistsError(path) from error
                # 409: a delete of the same name is under way, and the store asks for another try.
                if code not in _BUSY_CODES or attempt == 3:
                    raise
            else:
                return

    def delete(self, rel: str) -> None:
        """Remove one file; do nothing when it is absent."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(rel))

    def delete_tree(self, rel: str) -> None:
        """Remove the files, then the empty folders of a store that has folders, but never a bucket."""
        files = [self.path(info.path) for info in self.files(rel)]
        if files:
            # In one call: an object store deletes a thousand names in one request.
            self.fs.rm(files)
        path = self.path(rel)
        self._refresh()
        if "/" in path.strip("/") and self.fs.isdir(path):
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(path, recursive=True)

    def free_bytes(self) -> int | None:
        """Return None: no remote store has such a number."""
        return None

    def links(self) -> list[str]:
        """Return none: what `files` lists can be read and replaced."""
        return []

    def sync_file(self, rel: str) -> None:
        """Do nothing: a finished put is durable."""

    def sync(self) -> None:
        """Do nothing: a finished put is durable."""

    def _make_parents(self, path: str) -> None:
        if self.scheme not in _FLAT:
            self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)

    def _refresh(self) -> None:
        # Some file systems ignore use_listings_cache.
        self.fs.invalidate_cache()


class HubBackend(RemoteBackend):
    """A folder of a repository on the Hugging Face Hub, ``hf://datasets/organisation/name[@revision]/path``; only read.

    `HF_ENDPOINT` and `HF_TOKEN`, or the login of `hf auth login`, are read at every request. A file's tag is its git
    blob, which names the content, so a commit that leaves a file alone changes no tag. A model is published by
    `trainer_lib.hub`, as one commit.
    """

    exclusive = False

    def __init__(self, scheme: str, root: str, *, field: str, fs: Any = None) -> None:
        split_root(scheme, root, field=field)  # refuses what is above a repository
        super().__init__(scheme, root, field=field, fs=fs)
        self._field = field

    @override
    def open_read(self, rel: str) -> BinaryIO:
        self._resolve()
        return super().open_read(rel)

    @override
    def _refresh(self) -> None:
        super()._refresh()
        # The methods that list call an absent repository an empty folder.
        self._resolve()

    def _resolve(self) -> None:
        """Raise ConfigError for a repository or revision that is absent or may not be read, and for a wrong name."""
        try:
            self.fs.resolve_path(self.root)
        except (OSError, ValueError, NotImplementedError) as error:
            if (refusal := self.refusal(error)) is None:
                raise
            raise refusal from error

    @override
    def refusal(self, error: Exception) -> ConfigError | None:
        if (described := self._describe_refusal(error)) is None:
            return None
        return ConfigError(described[0], field=self._field, value=f"{self.scheme}://{self.root}", remedy=described[1])

    def _describe_refusal(self, error: Exception) -> tuple[str, str] | None:
        """The failure and its remedy; None for an absent file and for a failure of the network."""
        if isinstance(error, ValueError | NotImplementedError):
            return f"This is not an address on the Hub: {first_line(error)}", "Correct the name."
        if not isinstance(error, OSError):
            return None
        # By the classes' names, because importing them belongs to `trainer_lib.hub`.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        names = {cls.__name__ for cls in type(cause).__mro__}
        if "OfflineModeIsEnabled" in names:
            remedy = "Unset HF_HUB_OFFLINE, or download the data to a folder and name that."
            return "HF_HUB_OFFLINE keeps it from being read.", remedy
        code, words = (None, None) if cause is None else vendor_answer(cause)
        if "RevisionNotFoundError" in names:
            return "The repository has no such revision.", "Name a branch, a tag or a commit of it."
        if "RepositoryNotFoundError" in names or code in ("401", "403"):
            remedy = "Check the name; where it is private or gated, set HF_TOKEN to a token that may read it."
            said = (words or "").strip().rstrip(".")
            what = "There is no such repository, or it may not be read"
            return f"{what}: the Hub answers {code}{f' ({said})' if said else ''}.", remedy
        if "HFValidationError" in names:
            return f"This is not an address on the Hub: {first_line(cause)}", "Correct the name."  # type: ignore[arg-type]
        return None

    @override
    def _make_parents(self, path: str) -> None:
        raise _read_only(path)

    @override
    def delete(self, rel: str) -> None:
        raise _read_only(self.path(rel))

    @override
    def delete_tree(self, rel: str) -> None:
        raise _read_only(self.path(rel))


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, "a repository on the Hub is only read here", path)
