"""A signal at a known moment: a process reports that it has reached a phase, and waits there for the signal.

The test's process watches a folder (`Signaller`); a process under test calls `Phase.reached` where the signal should
arrive, which writes its pid there and goes on once the signal was sent. It works in any thread: the signal itself is
handled in the main one, whatever that is doing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LIMIT_S = 30.0


class Phase:
    """One moment, in a folder that the test watches. Only the process of `rank` stops there, and only once."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self.was_reached = False

    def reached(self, *_: Any) -> None:
        """Report that the phase is reached and wait for the signal."""
        if self.was_reached or os.environ.get("RANK", "0") != str(self._rank):
            return
        self.was_reached = True
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / "pid.tmp"
        draft.write_text(str(os.getpid()))
        draft.rename(self._folder / "pid")
        deadline = time.monotonic() + LIMIT_S
        while not (self._folder / "sent").exists():
            assert time.monotonic() < deadline, "nobody sent a signal"
            time.sleep(0.005)


class Signaller:
    """Sends a signal, once per folder below `root`, to the process that reports its phase."""

    def __init__(self, root: Path, number: signal.Signals = signal.SIGTERM) -> None:
        self._root = root
        self._number = number
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signaller")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            for pid in self._root.glob("*/pid"):
                sent = pid.with_name("sent")
                if not sent.exists():
                    os.kill(int(pid.read_text()), self._number)
                    sent.touch()
