"""A request to stop: SIGTERM or SIGINT sets a flag; every rank learns of it at the same step boundary.

With one process the flag is read at the boundary, at no cost. With several, each step starts one asynchronous
all-reduce of one integer on the CPU side of the group and reads it at the step's end: it travels while the step
computes, and all ranks read the same answer. A request is thus obeyed one step later at most.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from trainer_lib.distributed import Communicator, Pending


class StopAgreed(Exception):  # control flow inside the Trainer; never leaves it
    """All ranks know of the request, in the middle of an evaluation."""


class StopRequest:
    """Installs the handlers for the length of a `with` block, in the main thread only, and restores the old ones.

    A second SIGTERM changes nothing: the save under way goes on. A second SIGINT is a KeyboardInterrupt: somebody is at
    the keyboard and means it; a save cut short is not committed, the one before it is intact.
    """

    def __init__(self, comm: Communicator, *, on_sigterm: bool = True) -> None:
        self._comm = comm
        self._signals = [signal.SIGINT, signal.SIGTERM] if on_sigterm else [signal.SIGINT]
        self._old: dict[int, Any] = {}
        self._requested = False
        self._agreed = False
        self._pending: Pending | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._requested:
            raise KeyboardInterrupt
        self._requested = True

    @property
    def requested(self) -> bool:
        """Whether this process was asked; the others may not know yet."""
        return self._requested

    def request(self) -> None:
        """Ask for a stop from within the program."""
        self._requested = True

    def begin_step(self) -> None:
        """Send this rank's flag; collective."""
        self._pending = self._comm.any_later(self._requested)

    def agreed(self) -> bool:
        """Whether to stop, the same on every rank; collective, after `begin_step`."""
        if self._comm.world_size == 1:
            self._agreed = self._requested
        elif self._pending is not None:
            self._agreed = self._agreed or self._pending.result()
            self._pending = None
        return self._agreed

    def check_in_evaluation(self) -> None:
        """Raise StopAgreed when a rank was asked to stop; collective, between batches of an evaluation."""
        self._agreed = self._agreed or self._comm.any(self._requested)
        if self._agreed:
            raise StopAgreed
