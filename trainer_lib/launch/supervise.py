"""The owner's side of a launch: start the guard, pass its output and events on, and end everything in time."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_lib import guard
from trainer_lib.launch.run_dir import RunDir

POLL_S = 0.2
STACKS_S = 2.0  # time for hung workers to write their stacks
TAIL_LINES = 60
LINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ending:
    """The end of a launch: the guard's exit code, or minus the signal that killed it, and what was seen before.

    `hung_s`: seconds without progress, if that is why the launch was ended. `out_of_memory`: the kernel killed a
    process for memory just before the end. `step`, `tail`: the last step that an event reported, and the last lines
    printed.
    """

    code: int
    cancelled: bool
    hung_s: float | None
    out_of_memory: bool
    step: int | None
    tail: str


@dataclass
class Listener:
    """Callbacks for the output, the progress events and the cancellation of a launch."""

    on_line: Callable[[str], None]
    on_event: Callable[[dict[str, Any]], None]
    should_cancel: Callable[[], bool]


def start_guard(
    command: list[str], environment: Mapping[str, str], run_dir: RunDir, grace_s: float, held: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the guard of a command; both inherit the open files `held`."""
    arguments = ["--run-dir", str(run_dir.path), "--grace", str(grace_s), "--", *command]
    # -I -S: the guard needs the standard library only, and no folder of the user's can shadow a module of it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        pass_fds=held,
        start_new_session=True,  # Ctrl-C in a terminal reaches the owner only, which decides how to end the rest
        bufsize=0,
    )


@dataclass
class Supervisor:
    """Watches one command under its guard, from `start_guard`; hung workers have `stacks_s` to write their stacks."""

    start: Callable[[], subprocess.Popen[bytes]]
    run_dir: RunDir
    grace_s: float
    timeout_s: float | None
    listener: Listener
    stacks_s: float = STACKS_S

    def __post_init__(self) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._step: int | None = None
        self._cancelled = False
        self._ignored: tuple[type[Exception], ...] = ()  # of the callbacks' errors
        self._progressed = time.monotonic()

    def run_command(self) -> Ending:
        """Start the command and stay until nothing of it is left."""
        oom = OomWatch()
        self._guard = self.start()
        self._selector = selectors.DefaultSelector()
        try:
            if self._guard.stdout is not None:
                self._selector.register(self._guard.stdout, selectors.EVENT_READ)
            self.run_dir.record_process("guard", self._guard.pid)
            hung_s = self._watch(oom)
        except BaseException:
            self._end()
            raise
        finally:
            self._selector.close()
            for pipe in (self._guard.stdin, self._guard.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        return Ending(
            code=self._guard.returncode,
            cancelled=self._cancelled,
            hung_s=hung_s,
            out_of_memory=oom.has_risen(),
            step=self._step,
            tail="\n".join(self._tail),
        )

    def _watch(self, oom: OomWatch) -> float | None:
        """Watch until the guard has ended. Returns the seconds without progress, if they are the reason for its end."""
        hung_s = None
        self._progressed = time.monotonic()
        while self._guard.poll() is None:
            self._listen(POLL_S)
            oom.sample_counters()
            if not self._cancelled and self.listener.should_cancel():
                self._cancelled = True
                self.run_dir.mark_cancelled()
                self._command_guard("stop")
            silent_s = time.monotonic() - self._progressed
            # Any line or event counts as a sign of life.
            if self.timeout_s is not None and hung_s is None and silent_s > self.timeout_s:
                hung_s = silent_s
                self.run_dir.request_stacks()
                self._command_guard("stacks")
                deadline = time.monotonic() + self.stacks_s
                while time.monotonic() < deadline and self._guard.poll() is None:
                    self._listen(POLL_S)
                self._command_guard("kill")
        self._drain()
        return hung_s

    def _listen(self, timeout: float) -> None:
        """Pass on the lines and events of the next `timeout` seconds."""
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
        for event in self.run_dir.read_new_events():
            self._progressed = time.monotonic()
            step = event.get("step")
            self._step = step if isinstance(step, int) else self._step
            with contextlib.suppress(*self._ignored):
                self.listener.on_event(event)

    def _split(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        # A line without an end must not grow without bound.
        if len(self._partial) > LINE_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._progressed = time.monotonic()
            self._tail.append(text)
            with contextlib.suppress(*self._ignored):
                self.listener.on_line(text)

    def _drain(self) -> None:
        """Read the rest of the pipe. If the guard itself was killed, end its workers after the grace period."""
        if self._guard.returncode < 0:
            self.run_dir.end_processes(self.grace_s)
        # One second: a process that inherited the pipe may keep it open for ever.
        deadline = time.monotonic() + 1.0
        while self._guard.stdout is not None and not self._guard.stdout.closed and time.monotonic() < deadline:
            self._listen(POLL_S)
        self._listen(0)
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _command_guard(self, word: str) -> None:
        with contextlib.suppress(OSError):  # the guard may have just ended
            if self._guard.stdin is not None:
                self._guard.stdin.write(f"{word}\n".encode())
                # A guard that was stopped (SIGSTOP) would never read it.
                os.kill(self._guard.pid, signal.SIGCONT)

    def _end(self) -> None:
        """End everything, since the caller leaves: gracefully, until a second interruption kills at once."""
        # The caller's own callback may have raised what brought us here; now nothing may interrupt the end.
        self._ignored = (Exception,)
        self.run_dir.mark_cancelled()
        try:
            self._command_guard("stop")
            while self._guard.poll() is None:
                self._listen(POLL_S)
        finally:
            self._command_guard("kill")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(10)
            self._guard.kill()
            self._guard.wait()
            self.run_dir.end_processes(0)


SAMPLE_S = 2.0


class OomWatch:
    """Watches the ``oom_kill`` counter of our control group (v2), or of the machine where we have none.

    A group's counter is of its own processes. The machine's also counts those of other groups and users, so only a rise
    in the last seconds before a death counts: call `sample_counters` while the workers run; `has_risen` compares with a
    sample at least `SAMPLE_S` seconds old. `root` is the folder that holds /proc and /sys.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = _counter_file(root)
        self._older = self._newer = _count(self._file)
        self._sampled = time.monotonic()

    def sample_counters(self) -> None:
        """Read the counters again when the last sample is old enough. Cheap; call it often."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            self._older, self._newer = self._newer, _count(self._file)
            self._sampled = now

    def has_risen(self) -> bool:
        """Whether the kernel killed a process for memory since the sample before the last."""
        # Not the newest sample: the kernel may count the kill a moment before we look.
        return _count(self._file) > self._older


def _counter_file(root: Path) -> Path:
    """Return memory.events of our group; without one, the machine's vmstat file."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            events = root / "sys/fs/cgroup" / path.strip("/") / "memory.events"
            if controllers == "" and events.exists():
                return events
    return root / "proc/vmstat"


def _count(path: Path) -> int:
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
