"""The local disk as a store: every write is fsynced, `create` is exclusive, and free space is known."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import StorageError
from trainer_lib.storage.outages import FolderGoneError, free_bytes
from trainer_lib.storage.urls import FileInfo

T = TypeVar("T")
_PINNED = "TRAINFLOW_PINNED_FOLDERS"  # JSON: [path, device, inode] of each, for this process and those that it starts
_TRIES = 30
_PAUSE_S = 0.01
_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC
_NAMED: set[Path] = set()  # folders behind links that a warning has named
_log = logging.getLogger(__name__)
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalBackend:
    """A folder on a mounted disk. Nothing is listed, written or removed across a link below `top`."""

    exclusive = True

    def __init__(self, root: Path, top: Path | None = None) -> None:
        self.root = root
        self._top = top or root

    def path(self, rel: str) -> Path:
        """Return the full path of a relative one."""
        return self.root / rel if rel else self.root

    def child(self, rel: str) -> LocalBackend:
        """Return the backend of a folder below."""
        return LocalBackend(self.path(rel), self._top)

    def refusal(self, error: Exception) -> None:
        """Nothing: a disk refuses in no words of its own."""

    @contextlib.contextmanager
    def _opened(self, folder: Path) -> Iterator[int]:
        """Open a folder step by step from `top`: no link is crossed, even if another process makes it just now."""
        path = self._top if folder.is_relative_to(self._top) else folder
        descriptor = os.open(path, _FOLDER)
        try:
            for part in folder.relative_to(path).parts:
                path /= part
                outer = descriptor
                try:
                    descriptor = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=outer)
                except OSError:
                    if path.is_symlink() and path.is_dir():
                        raise _link_error(path) from None
                    raise
                os.close(outer)
            yield descriptor
        finally:
            os.close(descriptor)

    def _write(self, path: Path, write: Callable[[], T]) -> T:
        """Make the folder and write, but neither behind a link nor through one into another file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._opened(path.parent):
            if path.is_symlink() and (path.is_file() or not path.exists()):
                raise _link_error(path)
        return _in_folder(path.parent, write)

    def size(self, rel: str) -> int:
        """Return the bytes of a regular file."""
        path = self.path(rel)
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return path.stat().st_size

    def files(self, rel: str) -> list[FileInfo]:
        """List the regular files below; links to files and to folders are left out."""
        found: list[FileInfo] = []
        if not self._is_folder(rel):
            return found
        for folder, _, names in os.walk(self.path(rel), onerror=_raise_unlisted):
            for name in names:
                path = Path(folder, name)
                # A file may vanish between the walk and the stat, such as a lease that is released.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and not path.is_symlink():
                        found.append(FileInfo(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return found

    def links(self) -> list[str]:
        """List the links to files, to folders and to nothing; follow none."""
        walk = os.walk(self.root) if self._is_folder("") else ()
        found = [Path(folder, name) for folder, folders, names in walk for name in (*folders, *names)]
        return [path.relative_to(self.root).as_posix() for path in found if path.is_symlink()]

    def names(self, rel: str) -> list[str]:
        """List the names directly below; links are left out unless they lead to a file."""
        if not self._is_folder(rel):
            return []
        try:
            with os.scandir(self.path(rel)) as entries:
                return [entry.name for entry in entries if not entry.is_symlink() or Path(entry.path).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _is_folder(self, rel: str) -> bool:
        path = self.path(rel)
        try:
            with self._opened(path):
                return True
        except StorageError as error:
            if path not in _NAMED:
                _log.warning("What is behind a symbolic link of a storage is not looked at: %s", error.field)
            _NAMED.add(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return False

    def open_read(self, rel: str) -> BinaryIO:
        """Open a regular file; refuse a pipe or a device, which could block for ever."""
        path = self.path(rel)
        # Without blocking: opening a pipe waits for its writer, before anything can be checked.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            missing = IsADirectoryError if stat.S_ISDIR(mode) else FileNotFoundError
            raise missing(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENOENT, "No such file", str(path))
        return cast(BinaryIO, os.fdopen(descriptor, "rb"))

    def read_ranges(self, rel: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the ranges one after the other."""
        with self.open_read(rel) as stream:
            for start, end in ranges:
                stream.seek(start)
                yield stream.read(end - start)

    def open_write(self, rel: str) -> BinaryIO:
        """Open a buffered file; the entries of new folders above it are durable at once."""
        path = self.path(rel)
        return self._write(path, lambda: path.open("wb"))

    def finish(self, stream: BinaryIO) -> None:
        """Flush, fsync and close; `sync` makes the folder's entry durable."""
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()

    def abort(self, stream: BinaryIO, rel: str) -> None:
        """Close and remove the partial file."""
        # Closing flushes, which fails again on a full disk, but it closes the descriptor all the same.
        with contextlib.suppress(OSError, ValueError):
            stream.close()
        with contextlib.suppress(OSError):
            self.path(rel).unlink(missing_ok=True)

    def create(self, rel: str, data: bytes) -> bool:
        """Write a small file unless one is there: hard-link a finished, fsynced draft, which fails if the name exists.

        A plain ``open(..., "xb")`` is exclusive too, but a crash between it and the write leaves an empty file behind.
        It serves only the file systems that have no hard links.
        """
        path = self.path(rel)
        return self._write(path, lambda: self._create(path, data))

    def _create(self, path: Path, data: bytes) -> bool:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            _write_new(draft, data)
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                return self._create_in_place(path, data)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(path.parent)
        return True

    def _create_in_place(self, path: Path, data: bytes) -> bool:
        try:
            path.open("xb").close()
        except FileExistsError:
            return False
        try:
            # The name is ours now, so what is left of a failed write must go.
            _write_new(path, data, flags=os.O_TRUNC)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
        return True

    def replace(self, rel: str, data: bytes) -> None:
        """Write a draft, fsync it, and rename it: neither a reader nor a crash meets half of the bytes."""
        path = self.path(rel)
        self._write(path, lambda: _replace(path, data))
        _sync_folder(path.parent)

    def delete(self, rel: str) -> None:
        """Unlink the file and make its absence durable: a deleted commit file must not return after a power cut."""
        path = self.path(rel)
        try:
            with self._opened(path.parent) as folder:
                os.unlink(path.name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        _sync_folder(path.parent)

    def delete_tree(self, rel: str) -> None:
        """Remove a folder; of a link, remove only the link."""
        path = self.path(rel)
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._opened(path.parent))
                kind = os.lstat(path.name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                return
            (shutil.rmtree if stat.S_ISDIR(kind.st_mode) else os.unlink)(path.name, dir_fd=folder)

    def free_bytes(self) -> int | None:
        """Return the bytes that an unprivileged process may still write on the disk of this folder."""
        return free_bytes(self.root)

    def sync_file(self, rel: str) -> None:
        """Fsync a file; `sync` makes the folder's entry durable."""
        with self.open_read(rel) as stream:
            os.fsync(stream.fileno())

    def sync(self) -> None:
        """Fsync every folder of the tree, and the folder that holds it."""
        if not self.root.is_dir():
            return
        for folder, _, _ in os.walk(self.root):
            _sync_folder(Path(folder))
        _sync_folder(self.root.parent)  # the entry of the folder itself


def _raise_unlisted(error: OSError) -> None:
    """Raise the error of a folder whose files would be missing, but of none that has vanished or is of a system."""
    name = Path(error.filename).name
    if not isinstance(error, FileNotFoundError | NotADirectoryError) and name[:1] != "." and name != "lost+found":
        raise OSError(error.errno, f"{error.filename}: {error.strerror}", error.filename) from error


def _link_error(path: Path) -> StorageError:
    what = "This is a symbolic link. Nothing is written or removed behind one inside a storage."
    remedy = "Move what it leads to here, or remove the link. The storage itself may be a link."
    return StorageError(what, field=str(path), remedy=remedy)


def _in_folder(folder: Path, write: Callable[[], T]) -> T:
    """Make a folder and write into it; again if another process removes it, or a draft in it, at that moment."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            make_folders(folder)
            return write()
        time.sleep(_PAUSE_S)
    make_folders(folder)
    return write()


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(draft, data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


_pinning = threading.Lock()


@contextlib.contextmanager
def pinned(folder: Path) -> Iterator[None]:
    """Inside the block, never make `folder` again after it was renamed or removed, nor in processes started there."""
    make_folders(folder)
    pin = [str(folder), *_identity(folder)]
    with _pinning:
        os.environ[_PINNED] = json.dumps([*_pins(), pin])
    try:
        yield
    finally:
        with _pinning:
            (pins := _pins()).remove(pin)
            os.environ[_PINNED] = json.dumps(pins)
            if not pins:
                del os.environ[_PINNED]


def _pins() -> list[list[Any]]:
    return parse_json(os.environ.get(_PINNED) or "[]", list)


def _identity(folder: Path) -> list[int]:
    try:
        about = folder.stat()
    except FileNotFoundError:
        return []
    return [about.st_dev, about.st_ino]


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make folders as `makedirs` does, and make the entries of new ones durable; `mode` is that of a new `path`.

    Raises FolderGoneError where `path` lies in a pinned folder that was renamed or removed, and OSError.
    """
    missing = []
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for root, *identity in _pins() if missing else ():
        if path.is_relative_to(root) and _identity(Path(root)) != identity:
            raise FolderGoneError(errno.ESTALE, os.strerror(errno.ESTALE), root)
    for folder in reversed(missing):
        # Another process may be making the same folders.
        folder.mkdir(mode if folder == path else 0o777, exist_ok=True)
        _sync_folder(folder.parent)


def _write_new(path: Path, data: bytes, *, flags: int = os.O_EXCL) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
    with cast(BinaryIO, os.fdopen(descriptor, "wb")) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE mounts cannot fsync a folder; they keep the order of metadata themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
