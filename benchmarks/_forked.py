"""Work in a forked process that may be killed at any moment by a real SIGKILL, without importing torch again.

The parent imports everything, starts no thread, and never computes; each child starts where the imports ended. Memory
that both share says what a child did when it was killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HANG_S = 120.0
POLL_S = 0.0005
_FACTS = struct.Struct("<bii64s64s512s")  # phase, step, resumed from, two digests, what went wrong


@dataclass(frozen=True)
class Facts:
    """A child's message in shared memory.

    Attributes:
        phase: a number that the work chose.
        step: optimizer steps done.
        resumed: the step it went on from; -1: it did not come so far.
        state, everything: digests of what it ended with; empty before.
        error: the last line of its traceback.
    """

    phase: int = 0
    step: int = 0
    resumed: int = -1
    state: str = ""
    everything: str = ""
    error: str = ""


class Board:
    """The memory that parent and child share; written field by field, so that a kill never loses an earlier one."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _FACTS.size)
        self._facts = Facts()

    def write(self, **changes: int | str) -> None:
        """Change some of the facts."""
        self._facts = Facts(**{**vars(self._facts), **changes})
        texts = (getattr(self._facts, name).encode()[:512] for name in ("state", "everything", "error"))
        self._memory[:] = _FACTS.pack(self._facts.phase, self._facts.step, self._facts.resumed, *texts)

    def read(self) -> Facts:
        """The facts as they are now."""
        phase, step, resumed, *texts = _FACTS.unpack(self._memory[:])
        return Facts(phase, step, resumed, *(text.rstrip(b"\0").decode(errors="replace") for text in texts))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


@dataclass(frozen=True)
class End:
    """The end of a child: `code` 0 when its work was done, `killed` when we did it; `seconds` it lived."""

    code: int
    killed: bool
    seconds: float
    facts: Facts


Moment = Callable[[Facts, float], bool]
"""Decides when to kill a child, from the facts that it wrote and the seconds that it has lived."""


def fork(work: Callable[[Board], None], *, kill_when: Moment | None) -> End:
    """Run `work` in a child, and kill it with SIGKILL when `kill_when` says so, unless it has ended before.

    Raises:
        RuntimeError: this process has threads, or the child has not ended after `HANG_S` seconds.
    """
    if found := _threads():
        raise RuntimeError(f"A process with threads must not be forked: {found}")
    board = Board()
    board.write()
    started = time.perf_counter()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, board, ours)
    os.close(theirs)
    try:
        killed = hung = False
        while not killed and not select.select([ours], [], [], POLL_S)[0]:
            seconds = time.perf_counter() - started
            hung = seconds > HANG_S
            killed = hung or (kill_when is not None and kill_when(board.read(), seconds))
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(ours)
    code = os.waitstatus_to_exitcode(status)
    if hung:
        raise RuntimeError(f"The work did not end within {HANG_S:.0f} s.")
    facts = board.read()
    board.close()
    return End(code, killed and code == -signal.SIGKILL, time.perf_counter() - started, facts)


def _threads() -> list[str]:
    """Return the names of this process's other threads, except jemalloc's (from pyarrow), which survives a fork."""
    tasks = [path for path in Path("/proc/self/task").glob("*") if path.name != str(os.getpid())]
    names = [(path / "comm").read_text(encoding="ascii").strip() for path in tasks]
    return [name for name in names if name != "jemalloc_bg_thd"]


def _child(work: Callable[[Board], None], board: Board, ours: int) -> None:
    """Live a child's life and never return. Its end of the pipe closes however it ends."""
    code = 1
    try:
        os.close(ours)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        work(board)
        code = 0
    except BaseException as error:
        board.write(error=traceback.format_exception_only(error)[-1].strip().splitlines()[0][:500])
    finally:
        os._exit(code)
