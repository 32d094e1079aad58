"""A thread that ends a worker whose parent or guard is gone."""

from __future__ import annotations

import os
import signal
import threading

from typing_extensions import override

from trainer_lib.guard import GUARD, OWNER, Process, descendants, is_alive, send_signal

POLL_S = 1.0


class ParentWatch(threading.Thread):
    """Stops this process when its parent changes (torchrun died) or the guard is gone: SIGTERM, grace, SIGKILL.

    A guard that was stopped (SIGSTOP) cannot see that the owner is gone: it is woken, and then does.

    Args:
        grace_s: seconds the main thread gets to reach a step boundary and save.
    """

    def __init__(self, grace_s: float) -> None:
        super().__init__(name="trainflow-parent-watch", daemon=True)
        self._grace_s = grace_s
        self._parent = os.getppid()
        self._guard, self._owner = _recorded(GUARD), _recorded(OWNER)
        self._done = threading.Event()

    @override
    def run(self) -> None:
        while not self._done.wait(POLL_S):
            if self._guard is not None and self._owner is not None and not is_alive(self._owner):
                send_signal(self._guard, signal.SIGCONT)
            if os.getppid() != self._parent or (self._guard is not None and not is_alive(self._guard)):
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._done.wait(self._grace_s):
                    for process in descendants(os.getpid()):
                        send_signal(process, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def close(self) -> None:
        """Stop watching: this process is about to end anyway."""
        self._done.set()


def _recorded(variable: str) -> Process | None:
    pid, _, start = os.environ.get(variable, "").partition(":")
    return Process(int(pid), start) if pid.isdigit() else None
