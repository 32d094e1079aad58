"""The order in which launches of one machine and user get its devices.

::

    ~/.local/state/trainflow/devices/<machine>/
        lock                      locked while tickets are read or written
        <when>-<process>.json     the ticket of one launch: its devices, what it does, whether it waits

A launch locks its ticket (flock), and the processes that it starts inherit the open file. So the kernel unlocks it when
the last of them has ended, however that was, and not before. A ticket that another process can lock is out of use, and
is removed. Launches with a device in common get it in the order in which they asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.paths import state_folder
from trainer_lib.errors import Interrupted
from trainer_lib.guard import OWNER, is_stopped, start_time
from trainer_lib.locks.file_lock import try_lock

POLL_S = 0.2
_LOCK = "lock"
_LIMIT = 16_384


@dataclass(frozen=True)
class Ticket:
    """A launch that uses devices, or waits for them.

    Attributes:
        devices: their names, such as "GPU 0".
        what: what the launch does, for people.
        pid, started: the process that asked.
        since: when it asked or, once it has the devices, when it got them; seconds of the Unix epoch.
        waits: whether it waits.
    """

    devices: tuple[str, ...]
    what: str
    pid: int
    started: str
    since: float
    waits: bool = True

    def __str__(self) -> str:
        return f"{self.what} (process {self.pid})"


class Queue:
    """The tickets of this machine.

    Raises:
        OSError: their folder cannot be made or written.
    """

    def __init__(self) -> None:
        self._folder = state_folder("devices") / socket.gethostname()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    @contextlib.contextmanager
    def draw(self, devices: Sequence[str], what: str, should_cancel: Callable[[], bool]) -> Iterator[Place]:
        """Draw a ticket, which is kept for the length of the block.

        Raises:
            OSError: it cannot be written. Interrupted: `should_cancel` was true.
        """
        pid = os.getpid()
        ticket = Ticket(tuple(devices), what, pid, start_time(pid) or "", time.time())
        # The names sort in the order of asking: this clock is the machine's, and never goes back.
        path = self._folder / f"{time.monotonic_ns():020d}-{pid}-{uuid.uuid4().hex[:8]}.json"
        with self._locked(should_cancel):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            place = Place(path, descriptor, ticket)
            try:
                try_lock(descriptor)  # no other process knows the file yet
                place.write()
            except BaseException:
                place.close()
                raise
        try:
            yield place
        finally:
            place.close()

    def find_before(self, place: Place, limit: int, should_cancel: Callable[[], bool]) -> list[Ticket]:
        """Return the launches that `place` has to wait for; with none of them, it has the devices from now on.

        Args:
            limit: launches that may use one of its devices at a time.

        Raises:
            Interrupted: `should_cancel` was true.
        """
        with self._locked(should_cancel):
            found = self._find_before(place, limit)
            if not found:
                place.ticket = replace(place.ticket, waits=False, since=time.time())
                place.write()
        return found

    def _find_before(self, place: Place, limit: int) -> list[Ticket]:
        others = [
            (path, ticket)
            for path, ticket in self._living()
            # A worker that launches something uses the devices of the launch that it belongs to.
            if path != place.path and f"{ticket.pid}:{ticket.started}" != os.environ.get(OWNER)
        ]
        at_work: list[Ticket] = []
        for device in place.ticket.devices:
            users = [ticket for _, ticket in others if device in ticket.devices and not ticket.waits]
            at_work += [ticket for ticket in users if len(users) >= limit and ticket not in at_work]
        earlier = [
            ticket
            for path, ticket in others
            if ticket.waits and path.name < place.path.name and set(ticket.devices) & set(place.ticket.devices)
        ]
        # One that Ctrl-Z has stopped does not hold up the others.
        return at_work or [ticket for ticket in earlier if not is_stopped(ticket.pid)]

    def _living(self) -> Iterator[tuple[Path, Ticket]]:
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                if not _remove_if_unused(path):
                    record = parse_json(path.read_bytes()[:_LIMIT])
                    yield path, Ticket(**{**record, "devices": tuple(record["devices"])})

    @contextlib.contextmanager
    def _locked(self, should_cancel: Callable[[], bool]) -> Iterator[None]:
        while not try_lock(self._lock):
            if should_cancel():
                raise Interrupted("Cancelled.", remedy="The same command continues.")
            time.sleep(POLL_S / 10)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Place:
    """A ticket of this process, and the open file that locks it."""

    def __init__(self, path: Path, descriptor: int, ticket: Ticket) -> None:
        self.path = path
        self.descriptor = descriptor
        self.ticket = ticket

    def write(self) -> None:
        """Write the ticket as it is now."""
        data = json.dumps(asdict(self.ticket)).encode()
        os.pwrite(self.descriptor, data, 0)
        os.ftruncate(self.descriptor, len(data))

    def close(self) -> None:
        """Give the devices back, unless a process that inherited them is still there."""
        os.close(self.descriptor)
        with contextlib.suppress(OSError):
            _remove_if_unused(self.path)


def _remove_if_unused(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        if unused := try_lock(descriptor):
            path.unlink(missing_ok=True)
        return unused
    finally:
        os.close(descriptor)
