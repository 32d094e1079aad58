"""Workers that share the parts of one job (`trainer_lib.locks.shared_parts`), seen from outside."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from trainer_lib.locks.lease import Holder


def find_worker(folder: Path, process: subprocess.Popen[Any], finished: str, wanted: int) -> Holder | None:
    """Wait for a number of finished parts, and return a worker that works on another one.

    Args:
        folder: the job's.
        process: the command that started the workers.
        finished: the pattern of what is there for each finished part, below `folder`.
        wanted: how many of them to wait for.

    Returns:
        The worker; None where the command ended before.
    """
    while process.poll() is None:
        if len(list(folder.glob(finished))) >= wanted:
            for path in folder.glob("claims/*/*/WRITING.json"):
                with contextlib.suppress(FileNotFoundError):
                    if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                        return holder
        time.sleep(0.002)
    return None


class SpentBelow:
    """Measures, while its ``with`` block is executed, what all processes below this one spend.

    Attributes:
        seconds: of processor time, known after the block. A process counts up to the last look, 20 ms apart.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spent: dict[psutil.Process, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._before = dict(self._spent)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        self.seconds = sum(spent - self._before.get(process, 0.0) for process, spent in self._spent.items())

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._spent[process] = times.user + times.system

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._look()
