"""The owner's side of a warm parent: a process with torch loaded, from which the processes of launches are forked.

::

    owner --socket--> warm parent --fork--> guard --fork--> worker                 (one process)
                                            guard --fork--> agent --fork--> workers

The parent (`trainer_lib.worker.warm_parent`) is a child of the owner and ends at the socket's end, so it cannot outlive
it. It has no thread, holds nothing of the user's, and ends by itself when it has been idle. A launch sends it a private
file with the command and the variables, and the ends of the guard's pipes; all else is as if the guard had been started
from its file. Whatever goes wrong before the guard has answered, the launch starts its processes as without it.

A parent takes as long to start as one worker. So one is started for several workers, for the second launch of its kind
in a process, or where the caller announces launches (`expect`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from trainer_lib.base.json_text import parse_json
from trainer_lib.guard import Process, is_alive, is_stopped, send_signal
from trainer_lib.launch.config import LaunchConfig
from trainer_lib.launch.gpu_selection import has_accelerator
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.variables import worker_environment

# What a process takes from its surroundings when it starts, and what must be equal for a fork to replace a start.
#
# A forked process has read some variables and limits already, when its parent was started. Here they are collected, so
# that two starts with equal conditions are the same start.


SWITCH = "TRAINFLOW_WARM"
# What Python, torch, numpy and their C libraries read while they are imported; a test records it.
# fmt: off
FAMILIES = (
    "ACC_", "AOT", "ARROW_", "ATEN_", "COMPILE_", "CUTEDSL_", "CUTLASS_", "DNNL_", "DUMP_", "ENABLE_",
    "FAKE_", "FX_", "GFORTRAN_", "GLIBC_", "GOMP_", "GOTO_", "INDUCTOR_", "INTEL_", "I_MPI_", "JE_",
    "KINETO_", "KMP_", "LC_", "LD_", "LOG_", "MALLOC_", "MKL", "MPI_", "MPMATH_", "NPY_", "NUMBA_",
    "NUMEXPR_", "NUMPY_", "NVPL_", "OMPI_", "OMP_", "ONEDNN_", "OPENBLAS_", "OPENSSL_", "PANDAS_",
    "PARTITIONER_", "PT2_", "PYTHON", "PYTORCH_", "SAGE_", "SSL", "SYMPY_", "TORCH", "TRITON_", "UNSAFE_",
    "VECLIB_", "XDG_", "_PYTHON", "__PYVENV",
)
NAMES = frozenset((
    "AZURE_LOG_LEVEL", "CI", "CXX", "HOME", "LANG", "LANGUAGE", "LNAME", "LOGLEVEL", "LOGNAME", "PATH",
    "TEMP", "TMP", "TMPDIR", "TZ", "USER", "USERNAME",
))
# fmt: on
# The fields of proc(5) that a child inherits.
_INHERITED = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed")
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def can_be_warm(environment: Mapping[str, str]) -> bool:
    """Whether workers with these variables may be forked: on Linux, without an accelerator, unless switched off."""
    return (
        sys.platform == "linux"
        and hasattr(os, "pidfd_open")
        and environment.get(SWITCH, "1") != "0"
        and "PYTHON_EXEC" not in environment  # torchrun would start that interpreter
        and not has_accelerator(environment)
    )


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter and torch read while they start."""
    return {name: value for name, value in sorted(environment.items()) if name in NAMES or name.startswith(FAMILIES)}


def read_conditions(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return all that a process with these variables would inherit now and could not change later, as texts."""
    import resource  # a module of Unix

    variables = [f"{name}={value}" for name, value in read_variables(environment).items()]
    status = _read("/proc/thread-self/status").splitlines()
    inherited = [line for line in status if line.partition(":")[0] in (*_INHERITED, *_CAPABILITIES)]
    numbers = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
    limits = [f"limit {number}: {resource.getrlimit(number)}" for number in numbers]
    spaces = [f"{path.name}: {path.readlink()}" for path in sorted(Path("/proc/thread-self/ns").iterdir())]
    others = [_read("/proc/thread-self/cgroup"), _read("/proc/self/oom_score_adj"), sys.executable]
    others += [f"nice {os.getpriority(os.PRIO_PROCESS, 0)}", f"mask {sorted(signal.pthread_sigmask(0, []))}"]
    # A relative folder on the path is found from the working directory.
    if any(not part.startswith("/") for part in environment.get("PYTHONPATH", "/").split(":")):
        others.append(str(Path.cwd()))
    return (*variables, *inherited, *limits, *spaces, *others)


def read_umask() -> int:
    """Return the mask of new files' permissions, which `os.umask` could only read by changing it."""
    rows = (line.partition(":") for line in _read("/proc/self/status").splitlines())
    return next((int(value, 8) for name, _, value in rows if name == "Umask"), 0o022)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


ROOM = "TRAINFLOW_ROOM"  # the last variable of a parent: its children write their own variables over it
ROOM_BYTES = 64 * 1024
TITLE_BYTES = 4096
START_S = 60.0  # for the parent's imports on a busy machine
POLL_S = 0.05
ANSWER_S = 1.0  # for a parent's report of a guard that has ended
END_S = 0.5  # for the end of a parent that waits for launches; it has nothing to save
MOST = 2  # parents of one process: one for the stages with one worker, one for those with several


class GuardProcess(Protocol):
    """What a supervisor needs of a guard; `subprocess.Popen` has it."""

    pid: int

    @property
    def returncode(self) -> int | Any:
        """How it ended; negative for a signal; None while it lives."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Where the guard takes its commands."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What the guard's processes print."""

    def poll(self) -> int | None:
        """Return how it ended; None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedGuard:
    """A guard that a warm parent has forked: its parent reports how it ended."""

    def __init__(
        self,
        process: Process,
        parent: subprocess.Popen[bytes],
        answer: socket.socket,
        stdin: int,
        stdout: int,
        run_dir: RunDir,
    ) -> None:
        self.pid = process.pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self._process = process
        self._parent = parent
        self._answer = answer
        self._run_dir = run_dir

    def poll(self) -> int | None:
        """Return how it ended; None while it lives."""
        if self.returncode is None:
            ended = not is_alive(self._process)
            code = None
            if ended and not self._has_answer(0.0):
                # Its parent answers soon, unless a signal has stopped it.
                self._parent.send_signal(signal.SIGCONT)
                # Later if it imports something, and what the guard wrote last says as much.
                if (code := self._read_code()) is None:
                    self._has_answer(ANSWER_S)
            told = _receive(self._answer) if code is None and self._has_answer(0.0) else None
            if told is not None:
                self._end(int(told["code"]))
            elif ended:
                self._end(-signal.SIGKILL if code is None else code)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("guard", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        send_signal(self._process, signal.SIGKILL)

    def _has_answer(self, timeout: float) -> bool:
        return bool(select.select([self._answer], [], [], timeout)[0])

    def _read_code(self) -> int | None:
        """Return its code as the guard itself wrote it last; None if it was killed before."""
        ended = self._run_dir.read_json("guard.json")
        code = None if ended is None else int(ended["code"])
        return code if code is None or code >= 0 else 128 - code

    def _end(self, code: int) -> None:
        self.returncode = code
        self._answer.close()


class _Parent:
    """A warm parent and the socket that it lives by."""

    def __init__(self, environment: Mapping[str, str], verbs: Iterable[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # pyarrow's second allocator would start a thread; what is forked takes the launch's own variables.
        variables = {"JE_ARROW_MALLOC_CONF": "background_thread:false", **read_variables(environment)}
        variables[ROOM] = " " * ROOM_BYTES  # the last one
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-u", "-m", "trainer_lib.worker.warm_parent", str(theirs.fileno())),
                    ",".join(verbs),
                    " " * TITLE_BYTES,  # room for the children's own command lines
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel = ours
        self.used = time.monotonic()

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Send a launch, by a file in memory: variables hold secrets. Raises OSError if the parent has ended."""
        self.used = time.monotonic()
        file = os.memfd_create("launch")
        try:
            with os.fdopen(os.dup(file), "w") as text:
                json.dump(request, text)
            socket.send_fds(self._channel, [b"launch"], [file, *descriptors])
        finally:
            os.close(file)

    def close(self) -> None:
        """End it: it has no reason to live without its socket. The guards that it forked live on."""
        self._channel.close()

    def reap(self) -> None:
        """Wait until it has ended; one that was stopped by a signal, or still imports torch, is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if is_stopped(self.process.pid) else END_S)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class _Parents:
    """The warm parents of this process, by the conditions under which they were started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[tuple[str, ...], _Parent] = {}
        self._seen: set[tuple[str, ...]] = set()
        self._refused: set[tuple[str, ...]] = set()

    def find(self, environment: Mapping[str, str], *, start: bool, verbs: Iterable[str] = ()) -> _Parent | None:
        """Return a parent for these variables; None if there is none, and none is worth a start.

        Args:
            verbs: what it will be asked for, if it is started now.
        """
        conditions = read_conditions(environment)
        with self._lock:
            parent = self._living.get(conditions)
            if parent is not None:
                if (code := parent.process.poll()) is None:
                    return parent
                if code == REFUSED:
                    self._refused.add(conditions)
                self._drop(conditions)  # it was idle for long, or it was killed
            worth, again = start or conditions in self._seen, conditions in self._refused
            self._seen.add(conditions)
            if not worth or again:
                return None
            for old in sorted(self._living, key=lambda each: self._living[each].used)[: 1 - MOST]:
                self._drop(old)
            self._living[conditions] = parent = _Parent(environment, verbs)
            return parent

    def refuse(self, parent: _Parent) -> None:
        """Forget a parent that did not answer, and start no other under its conditions if it ended by itself."""
        with self._lock:
            for conditions in [each for each, living in self._living.items() if living is parent]:
                if parent.process.poll() == REFUSED:
                    self._refused.add(conditions)
                self._drop(conditions)

    def close(self) -> None:
        """End all of them, and count launches from the first again."""
        with self._lock:
            self._seen.clear()
            for conditions in list(self._living):
                self._drop(conditions)

    def forget(self) -> None:
        """Let go of the parents of the process that this one was forked from."""
        for parent in self._living.values():
            parent.close()
            parent.process.returncode = 0  # or its end would be reported to be missing here
        self._lock = threading.Lock()
        self._living.clear()

    def _drop(self, conditions: tuple[str, ...]) -> None:
        parent = self._living.pop(conditions)
        parent.close()
        parent.reap()


REFUSED = 3  # exit code of a parent that found itself unfit: it has a thread, or torch sees an accelerator
_parents = _Parents()
atexit.register(_parents.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_parents.forget)


def expect(launches: Mapping[str, LaunchConfig]) -> None:
    """Start warm parents for launches that will follow, so that they import torch meanwhile; where that is worth it.

    Args:
        launches: by the worker's verb, or the name of its stage.

    Variables of a launch that torch reads at its import have to stand in its configuration or in this process.
    """
    environments: dict[tuple[str, ...], dict[str, str]] = {}
    workers: Counter[tuple[str, ...]] = Counter()
    verbs: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for verb, config in launches.items():
        environment = worker_environment(config, {})
        if _may_fork(config, environment):
            conditions = read_conditions(environment)
            environments[conditions] = environment
            workers[conditions] += int(config.processes)
            verbs[conditions].append(verb)
    for conditions, number in workers.most_common(MOST):
        if number > 1:
            with contextlib.suppress(OSError):
                _parents.find(environments[conditions], start=True, verbs=verbs[conditions])


def close() -> None:
    """End this process's warm parents. Launches that still run go on."""
    _parents.close()


def start_guard(
    config: LaunchConfig,
    run_dir: RunDir,
    command: list[str],
    environment: Mapping[str, str],
    held: tuple[int, ...] = (),
) -> ForkedGuard | None:
    """Have a warm parent fork the guard of a launch; None if that is not possible or not worth it.

    Args:
        held: open files that the guard and its command inherit.
    """
    if not _may_fork(config, environment):
        return None
    for _ in range(2):  # a parent may end while it is asked; the second one is new
        with contextlib.suppress(OSError):
            parent = _parents.find(environment, start=int(config.processes) > 1)
            if parent is None:
                return None
            started = _start(parent, config.grace_s, run_dir, command, environment, held)
            if started is not None:
                return started
    return None


def _may_fork(config: LaunchConfig, environment: Mapping[str, str]) -> bool:
    here = config.engine is None and not config.several_nodes
    return here and config.kind in ("process", "torchrun") and can_be_warm(environment)


def _start(
    parent: _Parent,
    grace_s: float,
    run_dir: RunDir,
    command: list[str],
    environment: Mapping[str, str],
    held: tuple[int, ...],
) -> ForkedGuard | None:
    request = {
        "run_dir": str(run_dir.path),
        "grace_s": grace_s,
        "command": command,
        "environment": dict(environment),
        "umask": read_umask(),
    }
    answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (control, stdin), (stdout, output) = os.pipe(), os.pipe()
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    taken = False
    try:
        try:
            with contextlib.suppress(OSError):  # the parent has ended; the answer's end is closed then, too
                parent.send(request, [control, output, theirs.fileno(), folder, *held])
        finally:
            theirs.close()
            for end in (control, output, folder):
                os.close(end)
        process = _await_guard(parent, answer)
        if process is not None:
            taken = True
            return ForkedGuard(process, parent.process, answer, stdin, stdout, run_dir)
        _parents.refuse(parent)
        return None
    finally:
        if not taken:
            for end in (stdin, stdout):
                os.close(end)
            # The guard's input has ended: if it does start, it ends at once.
            while _await_answer(parent, answer) is not None:
                pass
            answer.close()


def _await_guard(parent: _Parent, answer: socket.socket) -> Process | None:
    """Return the guard that the parent has forked; None if there is none, and will be none."""
    told = _await_answer(parent, answer)
    return None if told is None else Process(int(told["pid"]), str(told["start"]))


def _await_answer(parent: _Parent, answer: socket.socket) -> dict[str, Any] | None:
    deadline = time.monotonic() + START_S
    while not select.select([answer], [], [], 1.0)[0]:
        if is_stopped(parent.process.pid) or time.monotonic() > deadline:
            parent.process.kill()  # its end ends the answer
    return _receive(answer)


def _receive(answer: socket.socket) -> dict[str, Any] | None:
    try:
        data = answer.recv(4096)
    except ConnectionError:
        return None
    told: dict[str, Any] | None = parse_json(data) if data else None
    return told
