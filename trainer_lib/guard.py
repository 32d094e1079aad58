"""The guard: one small process between the owner of a launch and everything it starts. Standard library only.

Run by file path (``python -I -S guard.py --run-dir D --grace 45 -- command…``), in a session of its own::

    owner --pipe--> guard ----> torchrun ----> workers (each in a session of its own)

Its standard input is a pipe whose only write end belongs to the owner, so the kernel reports the owner's end, however
it ended. The guard is the *subreaper* of its descendants (Linux): orphans become its children, none can hide, and all
are gone when it has no child left. On other systems it lists its descendants three times a second. A process is
identified by (pid, start time), so a recycled pid is never signalled.

    end of file on the pipe    SIGTERM to the workers, SIGKILL to what is left after `grace` seconds; 0: SIGKILL at once
    "stop"                     as above, while the owner continues reading the output
    "stacks"                   SIGUSR1 to the workers: each writes its threads' stacks into the run directory
    "kill"                     SIGKILL to everything now
    the command ends           as "stop", for the processes that the command left behind

It writes ``guard.json`` (how the command ended) into the run directory, if it has one, and exits with the command's own
code, or with 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

# Numbers of linux/prctl.h, which Python's library does not have.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# In the environment of what a launch starts, as "pid:start": its owner, and its guard.
OWNER = "TRAINFLOW_OWNER"
GUARD = "TRAINFLOW_GUARD"
SNAPSHOT_S = 0.3
LEFTOVERS_S = 3.0


class Process(NamedTuple):
    """A process, identified uniquely: `start` is in clock ticks since boot, or a date on systems without /proc."""

    pid: int
    start: str


def process_table() -> dict[int, tuple[int, str, str]]:
    """Return pid -> (parent pid, start time, state letter) of every visible process."""
    if not Path("/proc/self/stat").exists():
        return _table_from_ps()
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (twice as fast as pathlib, and run three times a second)
        if name.isdigit():
            row = _read_stat(int(name))
            if row is not None:
                table[int(name)] = row
    return table


def start_time(pid: int) -> str | None:
    """Return the start time of a living process; None if there is none with this pid, or only a zombie."""
    row = _row_of(pid)
    return None if row is None or row[2] in "ZX" else row[1]


def is_alive(process: Process) -> bool:
    """Whether this process still runs, and not a later one with its pid."""
    return start_time(process.pid) == process.start


def is_gone(process: Process) -> bool:
    """Whether this process has certainly ended; False where the system hides the processes of other users (hidepid)."""
    row = _row_of(process.pid)
    if row is not None:
        return row[2] in "ZX" or row[1] != process.start
    if process.pid <= 0:  # to a kill these are groups of processes
        return True
    try:
        os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's
        return False
    # It is there, and was not read: no descriptor is free.
    return False


def send_signal(process: Process, number: int) -> None:
    """Signal the process unless it has ended."""
    if is_alive(process):  # between this look and the kill, all pids would have to be used up to hit another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def kill(processes: Iterable[Process]) -> None:
    """Send SIGKILL to all, the youngest first: none lives to see its parent's end and acts on it."""
    by_age = sorted(processes, key=lambda process: (len(process.start), process.start, process.pid))
    for process in reversed(by_age):
        send_signal(process, signal.SIGKILL)


def descendants(root: int) -> set[Process]:
    """Return all living descendants of the process `root`, without `root` itself."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[Process] = set()
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        if table[pid][2] not in "ZX":
            found.add(Process(pid, table[pid][1]))
        queue.extend(children.get(pid, ()))
    return found


def _row_of(pid: int) -> tuple[int, str, str] | None:
    return _read_stat(pid) if Path("/proc/self/stat").exists() else _table_from_ps().get(pid)


def read_process(path: Path) -> Process | None:
    """Return the process recorded in a ``.pid`` file, "pid start"; None if there is none."""
    try:
        pid, start = path.read_text().split(maxsplit=1)
        return Process(int(pid), start)
    except (OSError, ValueError):
        return None


def _read_stat(pid: int) -> tuple[int, str, str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The program's name, in parentheses, may contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), fields[19], fields[0]  # ppid, starttime and state of proc(5), counted after the name


def _table_from_ps() -> dict[int, tuple[int, str, str]]:
    listing = subprocess.run(
        ["/bin/ps", "-A", "-o", "pid=,ppid=,state=,lstart="],
        capture_output=True,
        text=True,
        check=False,
        env={"LC_ALL": "C"},
    )
    rows = (line.split(None, 3) for line in listing.stdout.splitlines())
    return {int(row[0]): (int(row[1]), row[3].strip(), row[2][0]) for row in rows if len(row) == 4}


def prctl(option: int, value: int) -> bool:
    """Call Linux's process control; False on other systems, where the pipe and the snapshots of pids do the work."""
    return sys.platform == "linux" and int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0


class Guard:
    """Starts one command, keeps track of its descendants, and ends them all."""

    def __init__(self, run_dir: Path | None, grace_s: float, command: list[str]) -> None:
        self.run_dir = run_dir
        self.grace_s = grace_s
        self.command = command
        self.wake = os.pipe()
        self.child = 0
        self.status: int | None = None
        self.subreaper = False
        self.seen: set[Process] = set()
        self.deadline: float | None = None  # when SIGKILL follows, once a stop was asked for
        self.pipe_open = True
        self._hurried = False
        self._pending = b""

    def run_command(self) -> int:
        """Start the command, and stay until it and all that it started is gone. Returns the guard's exit code."""
        self._listen_for_signals()
        self._start()
        while self._has_processes_left():
            if self.status is not None:
                self._end_leftovers()
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self._kill()
            self._wait()
        return self._finish()

    def _listen_for_signals(self) -> None:
        """Let SIGCHLD wake the loop, and SIGTERM and SIGHUP stop the command. The owner handles a terminal's SIGINT."""
        for end in self.wake:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Slurm's notice reaches every process of a step: the workers handle it, and what starts them has to stay.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop())

    def _start(self) -> None:
        self.subreaper = prctl(PR_SET_CHILD_SUBREAPER, 1)
        guard = os.getpid()
        environment = {**os.environ, GUARD: f"{guard}:{start_time(guard)}"}
        # A fork instead of Popen: SIGCHLD is handled here, where one waitpid reaps the command and adopted orphans.
        pid = os.fork()
        if pid == 0:
            self._become_command(guard, environment)
        self.child = pid

    def _become_command(self, guard: int, environment: dict[str, str]) -> NoReturn:
        """Turn the forked child into the command, which dies with the guard and gets no input."""
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guard:  # the guard died before the call above, so no signal will come
                os._exit(127)
            # An exec keeps ignored signals ignored, so the command would inherit the guard's.
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvpe(self.command[0], self.command, environment)  # noqa: S606 (an argument list, no shell)
        except OSError as error:
            os.write(2, f"cannot start {self.command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _wait(self) -> None:
        wake = self.wake[0]
        sources = [wake, 0] if self.pipe_open else [wake]
        # SIGCHLD and the pipe report everything to a subreaper; its long timeout only covers a lost wake-up.
        timeout = SNAPSHOT_S if self.deadline is not None or not self.subreaper else 5.0
        ready, _, _ = select.select(sources, [], [], timeout)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        if 0 in ready:
            self._obey(os.read(0, 4096))

    def _obey(self, data: bytes) -> None:
        if not data:
            self.pipe_open = False
            self._stop()
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line == b"stop":
                self._stop()
            elif line == b"kill":
                self._kill()
            elif line == b"stacks":
                self._signal_workers(signal.SIGUSR1)

    def _stop(self) -> None:
        if self.deadline is not None:
            return
        if self.grace_s <= 0:
            self._kill()  # a worker that gets a SIGTERM first tells those of other machines to stop as well
            return
        self.deadline = time.monotonic() + self.grace_s
        self._signal_workers(signal.SIGTERM)

    def _end_leftovers(self) -> None:
        """End what the command left behind: workers after the usual grace period, other processes after a short one."""
        self._stop()
        # Once: another turn must not move the deadline again.
        if not self._hurried and not self._workers():
            self._hurried = True
            self.deadline = min(self.deadline or 0.0, time.monotonic() + LEFTOVERS_S)
            for process in self._living():
                send_signal(process, signal.SIGTERM)

    def _signal_workers(self, number: int) -> None:
        """Signal the workers directly: torchrun would pass a SIGTERM on, but allows them only 30 s to save.

        Before any worker has recorded itself, every process gets a SIGTERM; none gets a SIGUSR1, which would end it.
        """
        workers = self._workers()
        if not workers and number == signal.SIGTERM:
            workers = self._living()
        for process in workers:
            send_signal(process, number)

    def _workers(self) -> set[Process]:
        """Return the living descendants that have recorded themselves as workers."""
        paths = self.run_dir.glob("worker-*.pid") if self.run_dir is not None else ()
        return self._living() & {process for process in map(read_process, paths) if process is not None}

    def _kill(self) -> None:
        """Send SIGKILL to every descendant; the loop repeats it, since one may have forked in the meantime."""
        self.deadline = time.monotonic() + SNAPSHOT_S
        kill(self._living())

    def _living(self) -> set[Process]:
        self.seen = {process for process in self.seen if is_alive(process)} | descendants(os.getpid())
        return self.seen

    def _has_processes_left(self) -> bool:
        """Reap ended children and keep the command's status. False once no child and no seen descendant is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.child:
                    self.status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return not self.subreaper and bool(self._living())
        if not self.subreaper:
            self._living()
        return True

    def _finish(self) -> int:
        status = 127 if self.status is None else self.status
        if self.run_dir is not None:
            temporary = self.run_dir / "guard.json.tmp"
            with contextlib.suppress(OSError):  # the owner may have removed the run directory already
                temporary.write_text(json.dumps({"code": status, "time": time.time()}))
                temporary.replace(self.run_dir / "guard.json")
        # As a shell counts: 128 and the signal's number.
        return status if status >= 0 else 128 - status


def main(argv: list[str]) -> int:
    """Parse the command line and guard the command in it."""
    parser = argparse.ArgumentParser(prog="guard")
    parser.add_argument("--run-dir", type=Path, help="without it nothing is written")
    parser.add_argument("--grace", type=float, required=True, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    return Guard(options.run_dir, options.grace, options.command).run_command()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
