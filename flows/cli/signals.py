"""Ctrl-C and SIGTERM, made into failures that say what to do next.

Inside `stoppable` both end the work as KeyboardInterrupt, from the main thread: the launcher then asks its workers to
save and stop, and ends what is left. Outside they are typed: `Interrupted` (exit code 130) and `Preempted` (19).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from trainer_lib.base.restore_process import signals_kept
from trainer_lib.errors import Interrupted, Preempted

_SAY = {
    signal.SIGINT: "Stopping: running work is saved first. Ctrl-C again to end it at once.",
    signal.SIGTERM: "Asked to stop (SIGTERM): running work is saved first.",
    signal.SIGUSR2: "Notice of preemption (SIGUSR2): running work is saved first.",
    signal.SIGHUP: "The terminal is gone (SIGHUP): running work is saved first.",
}
_PATIENCE = 3  # the third signal does not wait for anything


@dataclass
class Stop:
    """The signals that a command has received; after its work they come too late, and only the third one ends it."""

    received: list[int] = field(default_factory=list)
    too_late: bool = False

    def come_too_late(self) -> None:
        """Let no further signal interrupt what is left."""
        self.too_late = True


@contextlib.contextmanager
def stoppable(say: Callable[[str], None], *, remedy: str) -> Iterator[Stop]:
    """Let SIGINT, SIGTERM, SIGUSR2 and SIGHUP end the block in good order; yields what has been received.

    Args:
        say: shows one line, at the first signal.
        remedy: how to continue later: of `Interrupted`, after Ctrl-C, and of `Preempted`, after the others.
    """
    stop = Stop()
    received = stop.received

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) >= _PATIENCE:  # the workers' guards see our end
            if sys.stdout.isatty():  # whose cursor a display has hidden
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
            os._exit(Interrupted.exit_code)
        if stop.too_late:
            return
        if len(received) == 1:
            with contextlib.suppress(Exception):  # the terminal may be gone
                say(_SAY[signal.Signals(number)])
        # In the main thread this interrupts whatever it waits for. A flow tells Ctrl-C from the others by the name.
        raise KeyboardInterrupt(*([] if number == signal.SIGINT else [signal.Signals(number).name]))

    try:
        with _handled(receive):
            yield stop
    except KeyboardInterrupt as interrupt:
        if received and received[0] != signal.SIGINT:
            name = signal.Signals(received[0]).name
            raise Preempted(f"Asked to stop ({name}). What is committed stays.", remedy=remedy) from interrupt
        raise Interrupted("Interrupted (Ctrl-C). What is committed stays.", remedy=remedy) from interrupt


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """End the block quietly on Ctrl-C or SIGTERM: the proper end of a command that serves."""
    with contextlib.suppress(Interrupted, Preempted), stoppable(lambda _: None, remedy=""):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install the handlers inside the block; a signal that is ignored from the start (nohup) stays ignored."""
    with signals_kept(*_SAY):
        # Python lets only the main thread set handlers; a notebook may call a command from another one.
        if threading.current_thread() is threading.main_thread():
            for number in _SAY:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, handler)
        yield
