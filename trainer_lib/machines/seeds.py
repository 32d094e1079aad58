"""Workers that torchrun starts without an interpreter: forked before the agent has a thread, started by a pipe.

A forked copy of a process with threads may hang on a lock that one of them held. The agent's store has threads, so the
agent forks its workers first; each waits for the command and the variables that torchrun works out for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import api

from trainer_lib.base.json_text import parse_json
from trainer_lib.machines.forked import become

POLL_S = 0.02
_HOOK = "get_subprocess_handler"  # torch calls this for each worker


def is_supported() -> bool:
    """Whether this version of torch has the place where the processes are handed to it."""
    return hasattr(api, _HOOK)


class Seed:
    """A forked process that waits to become a worker; towards torch, the handler of a subprocess, and the subprocess.

    Attributes:
        returncode: how it ended; negative for a signal; None while it lives.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe
        self.returncode: int | None = None

    @property
    def proc(self) -> Seed:
        """The process itself, where torch's handler holds a `Popen`."""
        return self

    def grow(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the worker."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.pipe, "w") as pipe:  # it may have been killed
            json.dump({"command": list(command), "environment": dict(environment)}, pipe)

    def poll(self) -> int | None:
        """Return how it ended; None while it lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(POLL_S)
        return code

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Signal the worker and what it started in its session."""
        os.killpg(self.pid, death_sig)


def sow(processes: int) -> list[Seed]:
    """Fork the processes of that many workers. This process must not have a thread."""
    seeds: list[Seed] = []
    for _ in range(processes):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Only the agent may hold the writing ends, or its death would not end the pipes.
            for end in (writer, *(seed.pipe for seed in seeds)):
                os.close(end)
            _wait_to_grow(reader)
        os.close(reader)
        seeds.append(Seed(pid, writer))
    return seeds


@contextlib.contextmanager
def growing(seeds: Sequence[Seed]) -> Iterator[None]:
    """While the block runs, torchrun starts the forked processes instead of new interpreters."""
    if not seeds:
        yield
        return

    def start(entrypoint: str, args: Sequence[Any], env: Mapping[str, str], *, local_rank_id: int, **_: Any) -> Seed:
        seed = seeds[local_rank_id]
        seed.grow([entrypoint, *map(str, args)], {**os.environ, **env})
        return seed

    before = getattr(api, _HOOK)
    setattr(api, _HOOK, start)
    try:
        yield
    finally:
        setattr(api, _HOOK, before)


def _wait_to_grow(pipe: int) -> NoReturn:
    os.setsid()  # as torchrun starts a worker
    try:
        with os.fdopen(pipe) as file:
            asked = parse_json(file.read())
    except (OSError, ValueError):  # the agent has ended
        os._exit(1)
    become(asked["command"], asked["environment"])
