"""The owner's side of a launch: start the guard, pass on what comes, and end everything when it is time."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer_lib import guard
from trainer_lib.launch.kernel_oom import OomWatch
from trainer_lib.launch.run_dir import RunDir

T = TypeVar("T")

POLL_S = 0.2
STACKS_S = 2.0  # how long a hung worker gets to write down where it is
NODES_STACKS_S = 5.0  # the same when other machines have to be asked
TAIL_LINES = 60
LINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ending:
    """How a launch came to its end.

    Attributes:
        code: exit code of the guard; negative: the signal that killed it.
        cancelled: the owner asked for the end.
        hung_s: seconds without progress after which it was ended; None when that was not the reason.
        out_of_memory: the kernel killed something for memory just before.
        step: the last step that an event reported.
        tail: the last lines printed.
    """

    code: int
    cancelled: bool
    hung_s: float | None
    out_of_memory: bool
    step: int | None
    tail: str


@dataclass
class Listener:
    """Who hears of a launch: printed lines, progress events; and who may ask for its end."""

    on_line: Callable[[str], None]
    on_event: Callable[[dict[str, Any]], None]
    should_cancel: Callable[[], bool]

    def quiet(self) -> Listener:
        """The same, for the time of ending: a callback that fails must not keep us from ending the rest."""
        return Listener(_quietly(self.on_line), _quietly(self.on_event), self.should_cancel)


class Supervisor:
    """Runs one command under a guard."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        run_dir: RunDir,
        grace_s: float,
        timeout_s: float | None,
        listener: Listener,
    ) -> None:
        self._command = command
        self._environment = environment
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._listener = listener
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._step: int | None = None
        self._cancelled = False
        self._progressed = time.monotonic()
        self._alone = not (run_dir.path / "launch.json").exists()

    def run_command(self) -> Ending:
        """Start the command and stay with it until nothing of it is left."""
        oom = OomWatch()
        arguments = ["--run-dir", str(self._run_dir.path), "--grace", str(self._grace_s), "--", *self._command]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self._environment),
            start_new_session=True,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        try:
            if self._guard.stdout is not None:
                self._selector.register(self._guard.stdout, selectors.EVENT_READ)
            self._run_dir.record_process("guard", self._guard.pid)
            hung_s = self._watch(oom)
        except BaseException:
            self._end()
            raise
        finally:
            self._close()
        return Ending(
            code=self._guard.returncode,
            cancelled=self._cancelled,
            hung_s=hung_s,
            out_of_memory=oom.has_risen(),
            step=self._step,
            tail="\n".join(self._tail),
        )

    def _watch(self, oom: OomWatch) -> float | None:
        """Until the guard has ended. Returns how long nothing had moved when that was the reason to end it."""
        hung_s = None
        self._progressed = time.monotonic()
        while self._guard.poll() is None:
            self._listen(POLL_S)
            oom.sample_counters()
            if not self._cancelled and self._listener.should_cancel():
                self._cancelled = True
                self._run_dir.mark_cancelled()
                self._tell("stop")
            silent_s = time.monotonic() - self._progressed
            if self._timeout_s is not None and hung_s is None and silent_s > self._timeout_s:
                hung_s = silent_s
                self._run_dir.request_stacks()
                self._tell("stacks")
                self._listen_for(STACKS_S if self._alone else NODES_STACKS_S)
                self._tell("kill")
        self._drain()
        return hung_s

    def _listen(self, timeout: float) -> None:
        """Pass on what is printed and reported within `timeout` seconds."""
        output = self._guard.stdout
        if output is None or output.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout)
        elif self._selector.select(timeout):
            data = os.read(output.fileno(), LINE_BYTES)
            if data:
                self._split(data)
            else:
                self._selector.unregister(output)
                output.close()
        for event in self._run_dir.read_new_events():
            self._progressed = time.monotonic()
            step = event.get("step")
            self._step = step if isinstance(step, int) else self._step
            self._listener.on_event(event)

    def _listen_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._guard.poll() is None:
            self._listen(POLL_S)

    def _split(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(self._partial) > LINE_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._progressed = time.monotonic()
            self._tail.append(text)
            self._listener.on_line(text)

    def _drain(self) -> None:
        """What was still in the pipe, and the end of a guard that was killed: its workers end by themselves, or now."""
        if self._guard.returncode < 0:
            self._run_dir.end_processes(self._grace_s)
        deadline = time.monotonic() + 1.0
        while self._guard.stdout is not None and not self._guard.stdout.closed and time.monotonic() < deadline:
            self._listen(POLL_S)
        self._listen(0)
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _tell(self, word: str) -> None:
        with contextlib.suppress(OSError):  # a guard that has just ended reads no more
            if self._guard.stdin is not None:
                self._guard.stdin.write(f"{word}\n".encode())

    def _end(self) -> None:
        """End everything because the caller is leaving: gracefully, unless it insists by a second interruption."""
        self._listener = self._listener.quiet()
        self._run_dir.mark_cancelled()
        try:
            self._tell("stop")
            while self._guard.poll() is None:
                self._listen(POLL_S)
        finally:
            self._tell("kill")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(10)
            self._guard.kill()
            self._guard.wait()
            self._run_dir.end_processes(0)

    def _close(self) -> None:
        self._selector.close()
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _quietly(callback: Callable[[T], None]) -> Callable[[T], None]:
    def call(value: T) -> None:
        with contextlib.suppress(Exception):
            callback(value)

    return call
