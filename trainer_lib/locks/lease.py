"""A lease admits one process at a time to a folder; a dead or stopped holder is replaced and cannot commit afterwards.

A lease is a file ``lease/<epoch>.json``, created exclusively; the highest epoch holds the folder. Its holder renews
``lease/<epoch>.beat`` from a thread and writes ``lease/<epoch>.released`` at the end. Another process takes epoch + 1

- at once, if the holder has released it, or lived on this machine and is gone (its pid is free, or belongs to a
  process with another start time);
- else after it has itself watched the beat stand still for the time-to-live. No two clocks are ever compared.

The epoch is a fencing token (M. Kleppmann, "How to do distributed locking", 2016): a pause of any length is harmless,
because the holder compares its epoch with the newest one before it commits.

A holder that was stopped and wakes up later finds the higher epoch in `Lease.ensure_held`, which is called right before
a commit. On stores without exclusive create (see `Store.exclusive`) two processes that take an epoch in the same
milliseconds may both believe they have it; `ensure_held` lets only the one whose file stayed commit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from typing_extensions import override

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import DamagedError, LeaseLostError, StorageError, StorageGoneError, TrainflowError
from trainer_lib.guard import Process, is_gone, start_time
from trainer_lib.storage import Store
from trainer_lib.storage.outages import gone

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"([0-9]{8,})\.(json|beat|released)")
_LIMIT = 4096  # bytes of a record
_MAX_TTL_S = 3600.0  # of a reader's mark, the longest that is written


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, a claim or a mark, with enough detail to see whether it still runs."""

    id: str  # unique to this holding
    machine: str  # host name, boot id and pid namespace; a pid means the same process only within all three
    pid: int
    started: str  # when the process started; distinguishes it from a later process with the same pid
    since: str  # when the holding began, ISO-8601, UTC
    ttl_s: float  # seconds without a beat after which another process may take over

    @classmethod
    def this_process(cls, ttl_s: float = 0.0) -> Holder:
        """Make a new holding by this process."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(uuid.uuid4().hex, _machine(), pid, start_time(pid) or "", since, ttl_s)

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder | None:
        """Parse what `to_bytes` rendered; None for anything else."""
        try:
            record = parse_json(data, dict)
            holder = cls(**record)
            texts = (holder.id, holder.machine, holder.started, holder.since)
            is_valid = all(isinstance(text, str) for text in texts) and isinstance(holder.pid, int)
            is_valid = is_valid and 0 <= holder.pid < 1 << 32 and holder.id.isalnum()  # the id is the name of a beat
            # A file of unknown origin must not lock a folder for longer.
            is_valid = is_valid and type(holder.ttl_s) in (int, float) and 0 <= holder.ttl_s <= _MAX_TTL_S
            return holder if is_valid else None
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """Render the holder as JSON."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it ran on this machine and is gone. False when unknown."""
        # The start time too, because pids are used again.
        return bool(self.started) and self.machine == _machine() and is_gone(Process(self.pid, self.started))

    def is_alive(self) -> bool:
        """Whether the process certainly runs: it is on this machine and there. False when unknown."""
        return bool(self.started) and self.machine == _machine() and start_time(self.pid) == self.started

    def __str__(self) -> str:
        host = self.machine.partition("/")[0]
        return f"process {self.pid} on {host}, since {self.since}"


class Heartbeat:
    """A process whose sign of life a thread renews every `period_s` inside a ``with`` block.

    Subclasses renew it in `_beat`, and take it away in `_end`. The first beat's error is raised, a later one logged.
    """

    def __init__(self, period_s: float, whose: str) -> None:
        self._period_s = period_s
        self._whose = whose
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="trainflow-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_beating()
        with contextlib.suppress(TrainflowError):  # a store that is out of reach: the sign of life grows old
            self._end()

    def _beat(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _stop_beating(self) -> None:
        """Return once no beat is under way; harmless when repeated."""
        self._stopped.set()
        self._thread.join()

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self._beat()
            except TrainflowError as error:  # the next beat may succeed
                _LOG.warning("The sign of life of %s could not be renewed: %s", self._whose, error)


class Lease(Heartbeat):
    """A folder that this process holds until `release`; best used in a ``with`` block."""

    def __init__(self, folder: Store, epoch: int, holder: Holder) -> None:
        self.epoch = epoch  # the number of this holding of the folder, from 1
        # Whether another process is known to have taken over; updated at every beat. Work should stop then.
        self.lost = False
        self._folder = folder
        self._holder = holder
        self._is_over = False
        super().__init__(holder.ttl_s / 3, "a lease")  # two beats may fail before it expires
        self._thread.name = f"trainflow-lease-{epoch}"
        _write_beat(folder, epoch)
        self._thread.start()

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        except BaseException:  # a signal: what it interrupted is done all the same
            self.release()
            raise

    def ensure_held(self) -> None:
        """Raise unless the folder is still ours; call it right before a commit.

        Raises LeaseLostError, StorageGoneError, and StorageError: then nothing may be committed either.
        """
        if not self._stopped.is_set() and self._is_ours():
            return
        self.lost = True
        newest = _newest(self._folder)
        if newest == 0:
            raise gone(self._folder.url.removesuffix("/lease"))
        other = _read_holder(self._folder, newest) if newest != self.epoch else None
        what = f"Another process has taken this folder over ({other or 'unknown'}), so our work on it is not committed."
        remedy = "Nothing is lost: the other process finishes the work. Run the command again to get its result."
        raise LeaseLostError(what, field=self._folder.url, remedy=remedy)

    def release(self) -> None:
        """Stop the beat and let other processes in; never raises, because it runs while an error propagates."""
        if self._is_over:
            return
        self._stop_beating()
        if self.lost:
            return
        try:
            self._folder.write_bytes(_name(self.epoch, "released"), b"")
        except StorageGoneError:
            return
        except StorageError as error:
            _LOG.warning("A lease could not be released; it expires by itself: %s", error)
            _forget(self._folder, self.epoch, self._holder)
        self._is_over = True

    def remove(self) -> None:
        """End the lease and remove every trace of it: for the holder that has removed the folder itself."""
        if self._stopped.is_set():
            return
        self._is_over = True
        self._stop_beating()
        if self.lost or not self._is_ours():
            return  # another process has taken over, which may be making the folder again
        # Our epoch goes last: until then no other process can take the folder.
        for name in sorted(self._folder.children(), key=lambda name: name == _name(self.epoch, "json")):
            self._folder.delete(name)
        if self._folder.is_local:
            with contextlib.suppress(OSError):  # another process may be filling it again
                self._folder.local_path().rmdir()
                self._folder.local_path().parent.rmdir()

    def _is_ours(self) -> bool:
        if _newest(self._folder) != self.epoch:
            return False
        return read_small(self._folder, _name(self.epoch, "json")) == self._holder.to_bytes()

    @override
    def _beat(self) -> None:
        if self._is_ours():
            _write_beat(self._folder, self.epoch)
        else:  # not renewed: the other holder's beat must not be mistaken for ours
            self.lost = True
            self._stopped.set()


def acquire_lease(
    store: Store,
    *,
    ttl_s: float = 30.0,
    wait: Callable[[], bool] | None = None,
    on_wait: Callable[[Holder | None], None] | None = None,
    poll_s: float = 0.5,
) -> Lease | None:
    """Acquire the lease of a folder; wait while another process holds it. None when `wait` returned True.

    Args:
        ttl_s: seconds without a beat after which other processes may take over from us.
        wait: called while waiting; True means that the work is done (a manifest appeared), so no lease is needed.
        on_wait: called once per holder that we wait for (None when its record cannot be read).
        poll_s: seconds between two looks.

    Raises StorageError when the store cannot be read or written.
    """
    folder = store.child("lease")
    watch = _Watch(folder, ttl_s)
    waited = False
    while True:
        newest = _newest(folder)
        if watch.is_free(newest):
            lease = _take_epoch(folder, newest + 1, ttl_s)
            if lease is not None:
                # Looked at once more: the holder may have finished the work before it let go.
                if waited and wait is not None and wait():
                    lease.release()
                    return None
                return lease
            continue  # another process was faster: look again which
        if wait is not None and wait():
            return None
        if on_wait is not None and not watch.is_reported:
            watch.is_reported = True
            on_wait(watch.holder)
        waited = True
        time.sleep(poll_s)


def find_holder(store: Store) -> Holder | None:
    """Find which process holds a folder, at one look; None when it is free, or its holder is known to be gone."""
    folder = store.child("lease")
    newest = _newest(folder)
    if newest == 0 or folder.exists(_name(newest, "released")):
        return None
    holder = _read_holder(folder, newest)
    return None if holder is None or holder.is_gone() else holder


def read_small(store: Store, name: str) -> bytes | None:
    """Read a record or a beat; None when it is absent, no bytes when it is too large to be one."""
    try:
        return store.read_if_exists(name, limit=_LIMIT)
    except DamagedError:
        return b""


class _Watch:
    """Observations of the holder by a waiting process, timed by its own clock; `is_reported`: `on_wait` knows it."""

    def __init__(self, folder: Store, ttl_s: float) -> None:
        self.holder: Holder | None = None
        self._folder = folder
        self._ttl_s = ttl_s
        self._epoch = 0
        self._beat: bytes | None = None
        self._since = 0.0
        self.is_reported = False

    def is_free(self, epoch: int) -> bool:
        """Whether the holder of the newest epoch has released it, is gone, or missed its beats for too long."""
        if epoch == 0 or self._folder.exists(_name(epoch, "released")):
            return True
        beat = read_small(self._folder, _name(epoch, "beat"))
        if epoch != self._epoch or beat != self._beat:
            self.is_reported = self.is_reported and epoch == self._epoch
            # monotonic, and only ever compared with itself: clocks of machines differ.
            self._epoch, self._beat, self._since = epoch, beat, time.monotonic()
            self.holder = _read_holder(self._folder, epoch)
        if self.holder is not None and self.holder.is_gone():
            return True
        ttl_s = self._ttl_s if self.holder is None else self.holder.ttl_s
        return time.monotonic() - self._since >= ttl_s


def _take_epoch(folder: Store, epoch: int, ttl_s: float) -> Lease | None:
    holder = Holder.this_process(ttl_s)
    name, data = _name(epoch, "json"), holder.to_bytes()
    try:
        # The read covers a create that succeeded and whose answer was lost.
        if not folder.create(name, data) and read_small(folder, name) != data:
            return None
        if _newest(folder) != epoch:
            # Our look was long ago: this epoch came, went and was cleaned up since. The newest is never cleaned up.
            folder.delete(name)
            return None
        lease = Lease(folder, epoch, holder)
    except BaseException:
        # This process runs on, so for a whole time-to-live others would take the epoch to be in use.
        _forget(folder, epoch, holder)
        raise
    with contextlib.suppress(StorageError):
        for old in folder.children():
            if 0 < _epoch(old) < epoch or old.endswith(".tmp"):  # a draft of a process that was killed
                folder.delete(old)
    return lease


def _forget(folder: Store, epoch: int, holder: Holder) -> None:
    """Remove our own epoch again, whole or torn, if the store allows it."""
    name = _name(epoch, "json")
    with contextlib.suppress(StorageError):
        held = read_small(folder, name)
        if held and holder.to_bytes().startswith(held):
            folder.delete(name)


def _write_beat(folder: Store, epoch: int) -> None:
    folder.write_bytes(_name(epoch, "beat"), uuid.uuid4().hex.encode())


def _name(epoch: int, kind: str) -> str:
    return f"{epoch:08d}.{kind}"


def _epoch(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else 0


def _newest(folder: Store) -> int:
    """The highest epoch that was ever taken in this folder; 0 for none."""
    return max((_epoch(name) for name in folder.children() if name.endswith(".json")), default=0)


def _read_holder(folder: Store, epoch: int) -> Holder | None:
    try:
        return Holder.from_bytes(read_small(folder, _name(epoch, "json")) or b"")
    except StorageError:
        return None


def _machine() -> str:
    """Host name, boot id and pid namespace: containers share a host name, and pids are reused after a boot."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        # Containers number their processes from 1.
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  # pathlib would call it a path
    return "/".join(parts)
