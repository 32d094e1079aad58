"""The spool: a run's records on the local disk, on their way to a tracking server.

A *session* is a folder in which one process keeps what it logs about one run, in order::

    <root>/<nanoseconds>-<pid>-<random>/        <root> is <storage>/spool/<uid>: users have private folders
        session.json    where it goes: the server's address without credentials, the run; without it there is no session
        points.jsonl    one record per line, appended: points, tags, parameters, files, the end
        files/          the bytes of logged files that lie nowhere else
        state.json      what the server has; the process that delivers replaces it as a whole
        reserve         room on the disk for what is logged last, should the disk become full
        lock            locked (fcntl) until the process closes the session or dies
    <root>/<token>.run  the server's run behind a token: a run has its token before the server is reached
    <root>/delivery     locked (fcntl) by the one process that delivers

Any process of the user may deliver, also sessions that another one still writes. What others own or may write is left
alone, because a session says which of the files here are sent. A point has its timestamp from here, so a point
that was sent before its process died can be recognized on the server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_record, read_json
from trainer_lib.base.records import from_record
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainer_lib.storage.local import make_folders
from trainer_lib.trackers.jsonl import append_whole

SPOOL_DIR = "TRAINFLOW_SPOOL_DIR"
# Of a pipeline's run, for its workers: JSON with its token and its experiment.
TRACKED_RUN = "TRAINFLOW_TRACKED_RUN"
KEPT_BYTES = 16 << 20  # records kept in memory while the disk is full
_RESERVE_BYTES = 64 << 10
_SETTLE_S = 60.0  # a session that was being made for so long belongs to a process that is gone
_KEPT_S = 30 * 86400.0  # damaged sessions, and tokens, are removed after a month
# fcntl locks exclude other processes only, so this set keeps the threads of this one apart.
_HELD: set[Path] = set()
_held = threading.Lock()
_TOKEN = re.compile(r"[\w-]{0,64}")
_KEPT = re.compile(r"\d{6}")  # a name that `keep_file` gave
_UNREADABLE: set[Path] = set()  # sessions that were named in a warning
_log = logging.getLogger(__name__)


def spool_root(output_dir: str | None) -> Path:
    """Return the sessions' folder: `TRAINFLOW_SPOOL_DIR`, `.spool` in a local output folder, or one of the user's."""
    if configured := os.environ.get(SPOOL_DIR):
        return Path(configured)
    if output_dir:
        with contextlib.suppress(ConfigError):
            store = Store.open(output_dir, field="output_dir")
            if store.is_local:
                return own_spool(store.local_path() / ".spool")
    name = hashlib.sha256((output_dir or str(Path.cwd())).encode()).hexdigest()[:16]
    return user_data_dir() / "spool" / name


def own_spool(shared: Path) -> Path:
    """Return this user's sessions' folder in a folder where every user of a storage has one."""
    return shared / str(os.geteuid())


def is_private(path: Path) -> bool:
    """Whether a folder is this user's alone to write, and no link."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def make_private(root: Path) -> None:
    """Make a spool, and the folder above it as open as the storage is, so that others have spools there as well.

    Raises OSError when the disk cannot be written, or another user can write the spool.
    """
    if root.name == str(os.geteuid()) and not root.parent.is_dir():
        make_folders(root.parent)
        with contextlib.suppress(OSError):  # another user makes it; sticky: nobody can take another's spool away
            root.parent.chmod(stat.S_IMODE(root.parent.parent.stat().st_mode) | stat.S_ISVTX)
    make_folders(root, 0o700)
    if not is_private(root):
        raise PermissionError(errno.EPERM, "The folder is another user's, or others can write it", str(root))


def user_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/trainflow`, the user's folder for files that have no better place."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trainflow"


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass
class State:
    """The part of a session that the server has, by offsets in points.jsonl; of points it may have more.

    `files_offset` is that of files. `run_id` is set once the session is attached to a run. `closed` is "FINISHED",
    "FAILED" or "KILLED"; None while the run continues, and when its process died. `end_ms` is in milliseconds since
    1970.
    """

    offset: int = 0
    files_offset: int = 0
    run_id: str | None = None
    closed: str | None = None
    end_ms: int | None = None


@dataclass
class Session:
    """One folder of the spool: written by the process that made it, delivered by any."""

    path: Path
    head: dict[str, Any]  # what session.json holds
    state: State = field(default_factory=State)
    over: bool = False  # whether its process had closed it, or was gone, when `stored` read it
    limit: int = 0  # bytes of points.jsonl at that moment, everything included if it was over
    _lock: int = -1
    _points: int = -1
    _unwritten: bytearray = field(default_factory=bytearray)
    _files: int = 0
    _writing: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    # -- writing ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, root: Path, head: Mapping[str, Any]) -> Session:
        """Make a new, empty session. Raises OSError when the disk is full or cannot be written."""
        make_private(root)
        # Behind those that are there, also after the clock was put back: sessions are delivered in this order.
        newest = max((path.name.partition("-")[0] for path in root.glob("*-*")), default="0")
        stamp = max(time.time_ns(), int(newest) + 1 if newest.isdecimal() else 0)
        name = f"{stamp:020d}-{os.getpid()}-{os.urandom(2).hex()}"
        session = cls(root / name, dict(head))
        session.path.mkdir(mode=0o700)
        try:
            session._lock = _lock_file(session.path / "lock")
            if session._lock < 0:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            (session.path / "reserve").write_bytes(bytes(_RESERVE_BYTES))
            session._points = os.open(session.path / "points.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            _write_json(session.path / "session.json", session.head)  # last: other processes read it from now on
        except OSError:
            session.close()
            session.remove()
            raise
        return session

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record in a single unbuffered write, so that kill -9 tears at most the last line.

        Raises OSError when the disk cannot be written. The record is then kept in memory (at most 16 MiB of them), and
        the next call writes it first.
        """
        line = _line_of(record)
        with self._writing:
            data = bytes(self._unwritten) + line if self._unwritten else line
            try:
                append_whole(self._points, data)
            except OSError:
                self._unwritten = bytearray(data if len(data) <= KEPT_BYTES else b"")
                raise
            if self._unwritten:
                self._unwritten.clear()

    def write_last(self, record: Mapping[str, Any]) -> None:
        """Write the last record, on a full disk into the room that was kept for it; how a run ended is never lost.

        Raises OSError when the disk cannot be written: records that wait in memory are lost, this one if it does not
        fit, either.
        """
        try:
            self.write(record)
        except OSError:
            (self.path / "reserve").unlink(missing_ok=True)
            try:
                append_whole(self._points, bytes(self._unwritten) or _line_of(record))
            except OSError:
                append_whole(self._points, _line_of(record))
                raise

    def keep_file(self, content: bytes | Path) -> str:
        """Keep a copy of a file, or bytes, in the session, and return its name there. Raises OSError."""
        with self._writing:
            self._files += 1
            name = f"{self._files:06d}"
        folder = self.path / "files"
        folder.mkdir(mode=0o700, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_bytes(content)
        return name

    def kept_file(self, name: str) -> Path:
        """Return the path of a kept file. Raises FileNotFoundError for what is not one, such as a link out of here."""
        path = self.path / "files" / name
        if not _KEPT.fullmatch(name) or path.resolve() != self.path.resolve() / "files" / name or not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "The session has no such file", str(path))
        return path

    def is_of_storage(self, url: str) -> bool:
        """Whether a folder is in the storage of this spool; one in the user's own folder is of a remote storage."""
        root = self.path.parent
        storage = root.parents[1] if root.name == str(os.geteuid()) else root.parent
        return root.is_relative_to(user_data_dir()) or Path(url).resolve().is_relative_to(storage.resolve())

    def close(self) -> None:
        """End the writing: the process that delivers takes the session to be over. Safe to repeat."""
        if self._points >= 0:
            os.close(self._points)
            self._points = -1
        _unlock_file(self.path / "lock", self._lock)
        self._lock = -1

    # -- delivering ---------------------------------------------------------------------------------------------------

    @classmethod
    def stored(cls, root: Path) -> list[Session]:
        """Return the sessions of a spool, oldest first; remove what a crash or a full disk has left half-made."""
        found = []
        for path in sorted(root.glob("*-*")) if root.is_dir() else []:
            if path.suffix:
                _remove_old(path, _KEPT_S)
                continue
            session = cls(path, {})
            try:
                if not is_private(root) or not is_private(path):
                    raise PermissionError(errno.EPERM, "it is another user's, or others can write it")
                session.head = read_json(path / "session.json", dict)
                if not _TOKEN.fullmatch(str(session.head.get("token", ""))):
                    raise ValueError("a token is the name of a file")
                session.state = _read_state(path)
                # In this order: nothing is written once it is over.
                session.over = session.is_over()
                session.limit = (path / "points.jsonl").stat().st_size
            except FileNotFoundError:  # half made, or removed a moment ago
                _remove_old(path, _SETTLE_S)
                continue
            except (ValueError, TypeError):
                if session.is_over():
                    session.set_aside("damaged")
                continue
            except OSError as error:  # another user's, or of a store that fails now
                if path not in _UNREADABLE:
                    _log.warning("What %s holds for MLflow is left there; it cannot be read: %s", path, error.strerror)
                _UNREADABLE.add(path)
                continue
            found.append(session)
        return found

    def is_over(self) -> bool:
        """Whether its process has closed it or is gone; then nothing is written to it any more."""
        lock = _lock_file(self.path / "lock")
        _unlock_file(self.path / "lock", lock)
        return lock >= 0

    def written_ms(self) -> int:
        """When the last record was written, in milliseconds since 1970."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "points.jsonl").stat().st_mtime_ns // 1_000_000
        return now_ms()

    def read(self, offset: int, limit: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the records of the whole lines between an offset and a limit, with the offsets behind them.

        The limit is the session's unless one is given. A line that is not a record, because a crash has torn it,
        yields an empty one.
        """
        limit = self.limit if limit is None else limit
        with contextlib.suppress(FileNotFoundError), (self.path / "points.jsonl").open("rb") as file:
            file.seek(offset)
            for line in file:
                offset += len(line)
                if not line.endswith(b"\n") or offset > limit:
                    return
                yield parse_record(line), offset

    def save_state(self) -> None:
        """Write state.json. Raises OSError."""
        _write_json(self.path / "state.json", vars(self.state))

    def remove(self) -> None:
        """Delete the folder, after the server has everything."""
        shutil.rmtree(self.path, ignore_errors=True)

    def set_aside(self, why: str) -> None:
        """Keep the folder for a person to look at, for a month, under a name that no process delivers."""
        aside = self.path.with_name(f"{self.path.name}.{why}")
        with contextlib.suppress(OSError):
            self.path = self.path.rename(aside)


@dataclass(frozen=True)
class Waiting:
    """The part of a spool that its server does not have yet: points of metrics and files of so many runs.

    The end of a run is neither. `servers` are addresses as the commands that logged had them.
    """

    root: Path
    runs: int
    points: int
    files: int
    servers: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = [counted(count, word) for count, word in ((self.points, "point"), (self.files, "file")) if count]
        runs = counted(self.runs, "run")
        return f"{runs} ({', '.join(counts)})" if counts else f"the end of {runs}"


def count_waiting(root: Path) -> Waiting | None:
    """Count what waits in sessions that are over; None when nothing does."""
    sessions = [session for session in Session.stored(root) if session.over]
    points = files = 0
    for session in sessions:
        points += sum(len(record.get("m") or ()) for record, _ in session.read(session.state.offset))
        waiting = session.read(session.state.files_offset)
        files += sum(bool(record.keys() & {"file", "model"}) for record, _ in waiting)
    runs = {session.head.get("token") or session.head.get("run_id") for session in sessions}
    servers = {str(session.head.get("tracking_uri")) for session in sessions}
    return Waiting(root, len(runs), points, files, tuple(sorted(servers))) if sessions else None


@contextlib.contextmanager
def sole_delivery(root: Path) -> Iterator[bool]:
    """Hold the right to deliver a spool inside the block; yields False while another thread or process has it."""
    lock = _lock_file(root / "delivery") if root.is_dir() else -1
    try:
        yield lock >= 0
    finally:
        _unlock_file(root / "delivery", lock)


def known_run(root: Path, token: str) -> dict[str, str]:
    """Return `run_id` and `experiment_id` behind a token; empty while the server was never reached."""
    with contextlib.suppress(OSError, ValueError):
        return {str(key): str(value) for key, value in read_json(root / f"{token}.run", dict).items()}
    return {}


def note_run(root: Path, token: str, run_id: str, experiment_id: str) -> None:
    """Record which run of the server a token stands for. Raises OSError."""
    _write_json(root / f"{token}.run", {"run_id": run_id, "experiment_id": experiment_id})
    for old in root.glob("*.run*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                old.unlink()


def _line_of(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _read_state(path: Path) -> State:
    # None yet, or a power failure has emptied it: what was sent is found out from the server.
    with contextlib.suppress(FileNotFoundError, ValueError):
        return from_record(State, read_json(path / "state.json", dict), ignore_unknown=True)
    return State()


def _remove_old(path: Path, after_s: float) -> None:
    """Remove a session that was never finished making, or was set aside, once it is so many seconds old."""
    with contextlib.suppress(OSError, ValueError):
        if time.time() - int(path.name.partition("-")[0]) / 1e9 > after_s:
            shutil.rmtree(path, ignore_errors=True)


def _lock_file(path: Path) -> int:
    """Lock a file for this thread; -1 while another thread or process holds it, or its folder is gone."""
    with _held:
        # Opening it again would be enough to lose the lock: fcntl drops a process's locks with any close of the file.
        if path in _HELD:
            return -1
        handle = -1
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if handle >= 0:
                os.close(handle)
            return -1
        _HELD.add(path)
        return handle


def _unlock_file(path: Path, handle: int) -> None:
    if handle >= 0:
        with _held:
            _HELD.discard(path)
            os.close(handle)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
