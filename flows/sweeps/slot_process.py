"""The processes of a sweep's slots, as the command that owns them sees them (`trainflow.flows.sweeps.trial_slot` is in
them)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class SlotProcess:
    """One slot's process, in a session of its own: Ctrl-C reaches us, and we stop it.

    Attributes:
        number: of the slot, from 0; a process that takes the place of a dead one has its number.
        log: the file of what it prints.
    """

    def __init__(self, number: int, orders: Mapping[str, Any], folder: Path) -> None:
        self.number = number
        self.log = folder / f"slot-{number + 1}.log"
        self.is_replaced = False
        self._partial = b""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainflow.flows.sweeps.trial_slot"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        assert self.process.stdout is not None  # noqa: S101 - likewise
        self.output = self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(orders)}\n".encode())
            self.process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def read(self) -> bytes:
        """What it wrote since the last look; empty at its end."""
        return b"" if self.output.closed else os.read(self.output.fileno(), 1 << 16)

    def split(self, data: bytes) -> list[bytes]:
        """The whole lines of it."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines

    def let_begin(self) -> None:
        """Have a slot that waits with its trial begin it."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(b".")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Ask it to save what is at work, and to end."""
        if self.is_alive:
            self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for its end; end it at once after that time, or when another interruption comes."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        finally:
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self.process.wait()


class UnseenTrials:
    """Takes note of which slot is at work on which trial, and shows it nowhere."""

    def begin(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        """A slot has claimed a trial."""

    def end(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        """The trial of a slot has ended."""

    def lose(self, slot: SlotProcess, why: str) -> None:
        """A slot has ended, and with it the trial that it was at work on, if any."""

    def stop(self) -> None:
        """All slots are ended."""


@contextlib.contextmanager
def listening(slots: list[SlotProcess]) -> Iterator[selectors.BaseSelector]:
    """What tells which of the slots have written something."""
    with selectors.DefaultSelector() as ready:
        for slot in slots:
            ready.register(slot.output, selectors.EVENT_READ, slot)
        yield ready
