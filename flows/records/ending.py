"""The end of a flow's body, for its caller: Prefect's own record needs a server, and may come late or never.

Once every stage is committed a signal comes too late to stop anything: the run only closes, so it closes undisturbed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer_lib.base.restore_process import signals_kept
from trainer_lib.errors import Interrupted, Pruned

if TYPE_CHECKING:
    from trainflow.flows.records.results import PipelineResult

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
_PATIENCE = 3  # the third signal does not wait for anything
_log = logging.getLogger(__name__)
_expected: ContextVar[Ending | None] = ContextVar("trainflow_ending", default=None)


class StopRequest(threading.Event):
    """Set by the caller of a flow, from any thread: the running stage saves and ends, and the run ends as pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = "Ended early."  # why, as a sentence

    def ask(self, reason: str) -> None:
        """Ask for the end."""
        self.reason = reason
        self.set()


@dataclass(eq=False)
class Ending:
    """The end of a flow's body."""

    is_expected: bool = True  # whether there is a caller that reads this
    outlives_flow: bool = False  # whether that caller continues after the flow, and calls `finish`
    stop: StopRequest = field(default_factory=StopRequest)  # with which the caller ends the run early
    # Whether the caller sees to what MLflow does not have at the end; the run waits for nothing.
    delivers_later: bool = False
    # Called once the run only closes, so that the caller's own handlers leave it undisturbed, too.
    on_closing: Callable[[], None] = lambda: None
    # Set as soon as the body has come to its end; None before.
    result: PipelineResult | None = field(default=None, init=False)
    # The signal that ended it; its argument names another one than Ctrl-C.
    interrupt: KeyboardInterrupt | None = field(default=None, init=False)
    _afterwards: list[Callable[[], None]] = field(default_factory=list)

    def take_cancel(self, interrupt: KeyboardInterrupt) -> bool:
        """Keep what interrupts the body; whether it is a cancel, which the caller raises again.

        Another signal than Ctrl-C has its name in the exception: it ends the run as Crashed.
        """
        self.interrupt = interrupt
        return self.is_expected and not interrupt.args

    def do_afterwards(self, action: Callable[[], None]) -> None:
        """Do something once Prefect knows how the flow ended; at once, where no caller waits for that."""
        if self.outlives_flow:
            self._afterwards.append(action)
        else:
            action()

    def finish(self) -> None:
        """Do what had to wait until Prefect knows how the flow ended."""
        while self._afterwards:
            self._afterwards.pop()()

    def run_unless_pruned(self, work: Callable[[StopRequest], None]) -> None:
        """Do the work; the end that the caller asked for is raised as `Pruned`."""
        try:
            work(self.stop)
        except Interrupted as error:
            if not self.stop.is_set():
                raise
            raise Pruned(self.stop.reason, step=error.step, remedy="The sweep continues.") from error

    def close_undisturbed(self) -> None:
        """From now on let signals wait; the third one ends the process at once."""
        self.on_closing()
        # Python lets only the main thread set handlers; without a caller nothing would put them back.
        if self.is_expected and threading.current_thread() is threading.main_thread():
            note = _patient_handler()
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, note)


@contextlib.contextmanager
def expect_ending(stop: StopRequest | None = None, **more: Any) -> Iterator[Ending]:
    """Receive the ending of the flow that is called inside the block; `more` as `Ending` takes it."""
    ending = Ending(outlives_flow=True, stop=stop or StopRequest(), **more)
    token = _expected.set(ending)
    try:
        # Those of before the flow come back: what `close_undisturbed` replaces are partly Prefect's.
        with signals_kept(*_SIGNALS):
            yield ending
    finally:
        _expected.reset(token)


def expect_until_exit() -> None:
    """Let this process's only flow close undisturbed; nothing is put back, because the process ends with it."""
    _expected.set(Ending())


def expected_ending() -> Ending:
    """The ending that a caller expects; one that nothing reads when there is no such caller."""
    return _expected.get() or Ending(is_expected=False)


def _patient_handler() -> Callable[[int, FrameType | None], None]:
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) >= _PATIENCE:
            os._exit(Interrupted.exit_code)
        if len(received) == 1:
            with contextlib.suppress(Exception):  # the terminal may be gone
                _log.warning("Every stage is committed: the run only closes, and ends as complete.")

    return note
