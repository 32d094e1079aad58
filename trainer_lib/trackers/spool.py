"""Metric points on the local disk, on their way to a tracking server.

A *session* is a folder that one process writes while it tracks one attempt at training::

    <root>/<nanoseconds>-<pid>-<random>/
        session.json    the destination of the points: tracking URI, run, parameters
        points.jsonl    one {"t": <ms since 1970>, "s": <step>, "m": {key: value}} per log call, appended
        state.json      how much has been sent, and how the attempt ended; the sender replaces it as a whole
        lock            locked (fcntl) as long as the process lives

A point gets its timestamp here, when it is written. A server that keeps points unique by (key, timestamp, step, value)
can therefore receive a line twice without harm, and "send, then record the offset" delivers exactly once even if the
process is killed between the two. A session whose lock is free belonged to a process that is gone: the next process
with this spool sends the rest and removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store

SPOOL_DIR = "TRAINFLOW_SPOOL_DIR"
READ_BYTES = 1 << 20
# fcntl locks exclude other processes only, so this set keeps the threads of this one apart.
_HELD: set[Path] = set()
_held = threading.Lock()


def spool_root(output_dir: str | None) -> Path:
    """Return the sessions' folder: `TRAINFLOW_SPOOL_DIR`, `.spool` in a local output folder, or one of the user's."""
    if configured := os.environ.get(SPOOL_DIR):
        return Path(configured)
    if output_dir:
        with contextlib.suppress(ConfigError):
            store = Store.open(output_dir, field="output_dir")
            if store.is_local:
                return store.local_path() / ".spool"
    name = hashlib.sha256((output_dir or str(Path.cwd())).encode()).hexdigest()[:16]
    return user_data_dir() / "spool" / name


def user_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/trainflow`, the user's folder for files that have no better place."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trainflow"


class Point(NamedTuple):
    """One value of one metric; `timestamp` is in milliseconds since 1970, `step` counts optimizer steps."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class State:
    """What has happened to a session.

    Attributes:
        offset: bytes of points.jsonl that the server has.
        floor: per key, the last step that the server had when sending started; a resumed run repeats the points up to
            it, and they are not sent again. None: nothing was sent yet.
        closed: "FINISHED", "FAILED" or "KILLED"; None while the attempt runs, and when its process died.
        end_ms: the end of the attempt, in milliseconds since 1970.
    """

    offset: int = 0
    floor: dict[str, int] | None = None
    closed: str | None = None
    end_ms: int | None = None


@dataclass
class Session:
    """One folder of the spool, locked by this process."""

    path: Path
    head: dict[str, Any]
    state: State = field(default_factory=State)
    _lock: int = -1
    _points: int = -1

    @classmethod
    def create(cls, root: Path, head: Mapping[str, Any]) -> Session:
        """Make a new, empty session. Raises OSError when the disk is full or cannot be written."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(2).hex()}"
        # Under this name no other process takes it for a leftover before its lock is ours.
        session = cls(root / f"{name}.new", dict(head))
        session.path.mkdir(mode=0o700)
        session._acquire()
        session.save_head()
        session._points = os.open(session.path / "points.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        session._move(root / name)
        return session

    @classmethod
    def leftovers(cls, root: Path) -> list[Session]:
        """Lock and return the sessions of processes that are gone, oldest first: `remove` or `release` each of them."""
        found = []
        for path in sorted(root.glob("*-*")) if root.is_dir() else []:
            session = cls(path, {})
            if path.suffix or not session._acquire():
                continue
            try:
                session.head = json.loads((path / "session.json").read_bytes())
                session.state = State(**json.loads((path / "state.json").read_bytes()))
            except FileNotFoundError:
                if not session.head:  # killed before it wrote its destination, and so before its first point
                    session.remove()
                    continue
            except (ValueError, TypeError):
                session.set_aside("damaged")
                continue
            found.append(session)
        return found

    def append(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line in a single unbuffered write, so that kill -9 tears at most the last line. Raises OSError."""
        line = json.dumps({"t": time.time_ns() // 1_000_000, "s": step, "m": dict(metrics)}, separators=(",", ":"))
        data = line.encode() + b"\n"
        if os.write(self._points, data) != len(data):
            os.write(self._points, b"\n")  # the disk is full: end the torn line, so that the next one is whole
            raise OSError(28, "No space left on device")

    def read(self, offset: int, limit: int = 1000) -> tuple[list[Point], int]:
        """Return about `limit` points of the whole lines from byte `offset` on, and the offset behind those lines."""
        try:
            with (self.path / "points.jsonl").open("rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
                while data and b"\n" not in data and (more := file.read(READ_BYTES)):
                    data += more
        except FileNotFoundError:
            return [], offset
        points: list[Point] = []
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n") or len(points) >= limit:
                break
            offset += len(line)
            # A torn line is skipped: `append` reported that its step was not logged.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                record = json.loads(line)
                points += [Point(k, float(v), int(record["t"]), int(record["s"])) for k, v in record["m"].items()]
        return points, offset

    def save_head(self) -> None:
        """Write session.json."""
        self._replace("session.json", self.head)

    def save_state(self) -> None:
        """Write state.json."""
        self._replace("state.json", vars(self.state))

    def remove(self) -> None:
        """Delete the folder, after the server has everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def set_aside(self, why: str) -> None:
        """Keep the folder for a person to look at, under a name that no later process touches."""
        with contextlib.suppress(OSError):
            self._move(self.path.with_name(f"{self.path.name}.{why}"))
        self.release()

    def release(self) -> None:
        """Unlock the folder and leave it as it is."""
        with _held:
            _HELD.discard(self.path)
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def end_writing(self) -> None:
        """Close the file of points. `release` does not: the sending thread must not close what another writes to."""
        if self._points >= 0:
            os.close(self._points)
            self._points = -1

    def _acquire(self) -> bool:
        with _held:
            if self.path in _HELD:
                return False
            try:
                self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another process holds it, or has just removed the folder
                if self._lock >= 0:
                    os.close(self._lock)
                    self._lock = -1
                return False
            _HELD.add(self.path)
            return True

    def _move(self, path: Path) -> None:
        self.path.rename(path)
        with _held:
            _HELD.discard(self.path)
            _HELD.add(path)
            self.path = path

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        draft = self.path / f"{name}.{threading.get_ident()}"
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path / name)
