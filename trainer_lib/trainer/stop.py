"""A request to stop: SIGTERM or SIGINT sets a flag; every rank reads it at the same step boundary.

One process reads the flag at the boundary, at no cost. With several, each step starts one asynchronous all-reduce of an
integer on the CPU side of the process group and reads it when the step ends: the message travels while the step
computes, and all ranks read one answer. Training stops at most one step after the request.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from trainer_lib.distributed import Communicator, Pending


class StopAgreed(Exception):  # control flow inside the Trainer; never leaves it
    """All ranks have agreed to stop."""


class StopRequest:
    """Installs signal handlers for a `with` block, in the main thread only, and restores the old ones.

    A second SIGTERM changes nothing: the save under way continues. A second SIGINT raises KeyboardInterrupt, because a
    person at the keyboard wants the program to end: a save that it interrupts is not committed.

    Args:
        comm: all ranks.
        on_sigterm: handle SIGTERM as well as SIGINT.
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
        """Whether this process received a request; other ranks may not know of it yet."""
        return self._requested

    def request(self) -> None:
        """Request a stop from within the program."""
        self._requested = True

    def begin_step(self) -> None:
        """Start to exchange the flags of all ranks. Collective."""
        self._pending = self._comm.any_later(self._requested)

    def agreed(self) -> bool:
        """Whether to stop, equal on every rank; call it after `begin_step`. Collective."""
        if self._comm.world_size == 1:
            self._agreed = self._requested
        elif self._pending is not None:
            self._agreed = self._agreed or self._pending.result()
            self._pending = None
        return self._agreed

    def check_in_evaluation(self) -> None:
        """Between two batches of an evaluation: raise StopAgreed when any rank received a request. Collective."""
        # No step is under way to hide the exchange, so it blocks here; an evaluation is too long to wait for its end.
        self._agreed = self._agreed or self._comm.any(self._requested)
        if self._agreed:
            raise StopAgreed
