"""Workers that are started before their launch, so that they import torch while an earlier stage runs.

`expect` announces launches that will follow. For the first of them a guard and a worker are started at once, with the
variables of its configuration: the worker imports what its verb needs, and waits at a socket for the variables of the
launch, which are its owner's alone to send. A launch that fits takes it, and the next one is started. A launch that
finds none starts its processes as ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer_lib.errors import TrainflowError
from trainer_lib.guard import OWNER, start_time
from trainer_lib.launch.run_dir import MARK, WARM_SOCKET, RunDir
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.variables import worker_environment
from trainer_lib.launch.supervise import start_guard

SWITCH = "TRAINFLOW_WARM"
END_S = 5.0
# Variables that differ from launch to launch: nothing reads them while a worker imports its modules.
_LATE = ("TRAINFLOW_", "MLFLOW_", "PREFECT_")


class WarmWorker:
    """A guard and a worker that wait for their launch. `run_dir` is the folder that the launch will have."""

    def __init__(self, verb: str, config: LaunchConfig) -> None:
        self.verb = verb
        self.run_dir = RunDir.make()
        self._config = config
        self._environment = worker_environment(config, {})
        self._folder = Path.cwd()
        self._is_used = False
        self._channel, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            own = {**launch_variables(self.run_dir), WARM_SOCKET: str(number)}
            self._guard = start_guard(
                worker_command(verb, self.run_dir),
                self._environment | own,
                self.run_dir,
                config.grace_s,
                held=(number,),
            )
        self.run_dir.record_process("guard", self._guard.pid)

    def fits(self, config: LaunchConfig, environment: Mapping[str, str]) -> bool:
        """Whether a worker with these variables would begin as this one did, which must still be there."""
        here = self._environment
        changed = {name for name in here.keys() | environment.keys() if here.get(name) != environment.get(name)}
        same = config.kind == self._config.kind and config.grace_s == self._config.grace_s
        is_here = Path.cwd() == self._folder and self._guard.poll() is None
        return same and is_here and all(name.startswith(_LATE) for name in changed)

    def begin(self, environment: Mapping[str, str], held: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Send the variables, and files for the worker to hold; return its guard, or None where it has ended."""
        if self._guard.poll() is not None:
            return None
        data = json.dumps(dict(environment)).encode()
        self._channel.settimeout(END_S)
        try:
            self._channel.sendall(data[socket.send_fds(self._channel, [data], held) :])
        except OSError:
            return None
        self._channel.close()  # the end of what is sent
        self._is_used = True
        return self._guard

    def close(self) -> None:
        """End it where no launch has used it."""
        self.let_go()
        if self._is_used:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        self._guard.kill()
        self._guard.wait()
        self.run_dir.remove()

    def let_go(self) -> None:
        """Close this process's ends, at which the guard and the worker end."""
        self._channel.close()
        for pipe in () if self._is_used else (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                pipe.close()


_lock = threading.Lock()
_expected: list[tuple[str, LaunchConfig]] = []
_waiting: list[WarmWorker] = []  # at most one: it has torch in memory


def expect(launches: Iterable[tuple[str, LaunchConfig]]) -> None:
    """Have workers start before their launches, in this order, where a launch has one process on this machine.

    Verbs and resolved configurations replace those of an earlier call.
    """
    with _lock:
        _expected[:] = [(verb, config) for verb, config in launches if _can_be_warm(config)]
        if _waiting and _expected and _waiting[0].verb == _expected[0][0]:
            del _expected[0]  # it was started by an earlier call
        _start_next()


def take(verb: str, config: LaunchConfig, environment: Mapping[str, str]) -> WarmWorker | None:
    """Return the worker that waits for such a launch, and start the next one; the caller closes it."""
    with _lock:
        if not _waiting or verb != _waiting[0].verb or not _waiting[0].fits(config, environment):
            return None
        taken = _waiting.pop()
        _start_next()
        return taken


def close() -> None:
    """End the worker that waits, and expect no launch any more."""
    with _lock:
        _expected.clear()
        while _waiting:
            _waiting.pop().close()


def worker_command(verb: str, run_dir: RunDir) -> list[str]:
    """Return the command line of a worker that needs no launcher."""
    return [sys.executable, "-P", "-u", "-m", "trainer_lib.worker", verb, str(run_dir.path)]


def launch_variables(run_dir: RunDir) -> dict[str, str]:
    """Return the variables by which the processes of a launch, and their owner, are found."""
    return {MARK: str(run_dir.path), OWNER: f"{os.getpid()}:{start_time(os.getpid())}"}


def _can_be_warm(config: LaunchConfig) -> bool:
    here = config.engine is None and not config.several_nodes and config.kind == "process"
    return here and {**os.environ, **config.env}.get(SWITCH, "1") != "0"


def _start_next() -> None:
    while _expected and not _waiting:
        with contextlib.suppress(OSError, TrainflowError):  # the launch meets it again, and says so
            _waiting.append(WarmWorker(*_expected.pop(0)))


def _forget() -> None:
    """Close, in a forked process, the ends that belong to the parent: they would keep its workers alive."""
    global _lock
    _lock = threading.Lock()
    _expected.clear()
    while _waiting:
        _waiting.pop().let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
