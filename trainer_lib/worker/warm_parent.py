"""A process that has torch loaded and forks one guard for each launch that its owner sends.

``python -u -m trainer_lib.worker.warm_parent <descriptor of the owner's socket> <verbs> <room>``, started by
`trainer_lib.launch.warm`.

It never has a thread and runs no operator of torch. It ends at the end of its socket, that is with its owner, and when
it was idle for a while.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer_lib import guard
from trainer_lib.base.json_text import parse_json
from trainer_lib.guard import Guard, start_time
from trainer_lib.launch.warm import REFUSED
from trainer_lib.machines import forked
from trainer_lib.worker import session  # noqa: F401 (its exit handler has to run last, so it is registered first)

IDLE_S = 60.0
# What workers and agents import: pandas because pyarrow does, at its first conversion of a list.
MODULES = (
    *("numpy.random", "torch.distributed.run", "trainer_lib.machines.seeds", "trainer_lib.worker.assembly"),
    *("trainer_lib.data.shards", "trainer_lib.worker.train", "trainer_lib.worker.evaluate", "pandas"),
)
# What each rank imports at its first optimizer step, which is a third of all: loaded at the first launch of the verb;
# where the owner has announced the verb, while the workers of an earlier launch are at work.
LATER = {"train": ("torch._dynamo",), "probe": ("torch._dynamo",)}


def main(argv: list[str]) -> int:
    """Serve the owner until it ends. In a forked process, run what was asked for instead."""
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to every process of a step; the workers handle them
    if not _load(MODULES) or not _is_fit():
        return REFUSED
    try:
        WarmParent(socket.socket(fileno=int(argv[0])), argv[1].split(",")).serve()
    except forked.Become as asked:
        forked.run_program(asked.command, asked.environment)
        return 0
    except Unfit:
        os._exit(REFUSED)
    os._exit(0)  # an orderly end would only take torch apart


class Unfit(Exception):
    """This process cannot be forked any more."""


def _load(modules: Iterable[str]) -> bool:
    """Import the modules; False if one of them left a thread, whose locks a forked process would keep for ever."""
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        with contextlib.suppress(ModuleNotFoundError):  # pandas is optional
            importlib.import_module(name)
    if not new:
        return True
    # Libraries that can be forked, like OpenBLAS, end their threads at a fork.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    gc.collect()
    gc.freeze()  # a child's collections would copy the pages of all that they look at
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _is_fit() -> bool:
    torch, seeds = sys.modules["torch"], sys.modules["trainer_lib.machines.seeds"]
    return seeds.is_supported() and not torch.accelerator.is_available() and forked.prepare_parent()


class WarmParent:
    """Takes launches from the owner's socket, forks their guards, and reports how each of them ended."""

    def __init__(self, channel: socket.socket, verbs: Iterable[str]) -> None:
        self._channel = channel
        self._expected = [module for verb in verbs for module in LATER.get(verb, ())]
        # By a descriptor that is readable once the guard has ended: its pid, and where its owner hears of it.
        self._ends: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> None:
        """Return when the owner has ended, or when nothing happened for `IDLE_S` seconds."""
        while True:
            patience = None if self._ends else IDLE_S
            ready = select.select([self._channel.fileno(), *self._ends], [], [], patience)[0]
            if not ready:
                return
            for end in self._ends.keys() & set(ready):
                self._report_end(end)
            if self._channel.fileno() in ready:
                if not self._take_launch():
                    return
                if not _load(self._expected):
                    raise Unfit

    def _take_launch(self) -> bool:
        """Fork a guard for the next launch; False at the end of the socket."""
        data, descriptors = _receive(self._channel)
        if not data:
            return False
        file, control, output, answer, folder, *held = descriptors
        with os.fdopen(file) as text:
            text.seek(0)
            asked = parse_json(text.read())
        told = socket.socket(fileno=answer)
        verb = asked["command"][-2]  # of a worker and of an agent
        if not _load(LATER.get(verb, ())):
            raise Unfit(verb)
        pid = os.fork()
        if pid == 0:
            self._leave()
            _become_guard(asked, control, output, told, folder)
        # What the launch holds is open in the guard alone, and in what it starts.
        for end in (control, output, folder, *held):
            os.close(end)
        self._ends[os.pidfd_open(pid)] = (pid, told)
        return True

    def _report_end(self, end: int) -> None:
        pid, told = self._ends.pop(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        with told, contextlib.suppress(OSError):  # the owner may have ended
            told.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())

    def _leave(self) -> None:
        """Close what is the parent's, in a forked child."""
        self._channel.close()
        for end, (_, told) in self._ends.items():
            os.close(end)
            told.close()


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    numbers = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(64, socket.CMSG_LEN(8 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return data, list(numbers)


def _become_guard(asked: dict[str, Any], control: int, output: int, told: socket.socket, folder: int) -> None:
    """Guard the command in this forked process, in a session of its own, as ``guard.py`` does."""
    os.setsid()
    os.fchdir(folder)
    os.umask(asked["umask"])
    for source, target in ((control, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for end in (control, output, folder):
        os.close(end)
    run_dir, grace_s, command = Path(asked["run_dir"]), float(asked["grace_s"]), list(asked["command"])
    forked.take_environment(asked["environment"])
    shown = [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), "--run-dir", str(run_dir)]
    forked.show_command([*shown, "--grace", str(grace_s), "--", *command])
    with told:
        told.send(json.dumps({"pid": os.getpid(), "start": start_time(os.getpid())}).encode())
    code = 1
    try:
        code = Guard(run_dir, grace_s, command, become=forked.become).run_command()
    except forked.Become:
        code = -1
        raise
    except BaseException:
        traceback.print_exc()
    finally:
        if code >= 0:
            os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
