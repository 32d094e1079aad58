"""Forked processes in place of new interpreters: what makes one equal to ``python -u -m <module> <arguments>``.

A warm parent (`trainer_lib.worker.warm_parent`) has imported torch and nothing of the user's. What is forked from it
takes the variables of its launch, draws new seeds where an interpreter would, shows its own command line and variables
in /proc, and leaves every frame of the parent before it runs the module, so that it also ends as an interpreter does.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainer_lib.launch.run_dir import MARK
from trainer_lib.launch.warm import ROOM


class Become(BaseException):
    """Raised in a forked process: its first frame then runs this command."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(" ".join(command))
        self.command = command
        self.environment = environment


def become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Leave all frames of this forked process, and run the command in the first one (`run_program`)."""
    raise Become(command, environment)


def run_program(command: list[str], environment: dict[str, str]) -> None:
    """Run ``python … -m module arguments`` in this forked process; a `Become` in it replaces it by the next command."""
    while True:
        take_environment(environment)
        show_command(command)
        _renew()
        module, *arguments = command[command.index("-m") + 1 :]
        sys.argv, sys.orig_argv = [module, *arguments], list(command)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Become as following:
            command, environment = following.command, following.environment
        else:
            return


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's variables, also where /proc shows them: a launch's processes are found by its mark."""
    os.environ.clear()
    os.environ.update(environment)
    if _place is not None:
        # The mark first: what does not fit is left out.
        names = sorted(environment, key=lambda name: name != MARK)
        entries = [os.fsencode(f"{name}={environment[name]}") for name in names]
        _place.write_variables([entry for entry in entries if entry not in _place.kept])


def show_command(command: list[str]) -> None:
    """Show this command line in /proc and in `ps`."""
    if _place is not None:
        _place.write_arguments([os.fsencode(part) for part in command])


def is_forked() -> bool:
    """Whether this process is a warm parent or was forked from one."""
    return _place is not None


def prepare_parent() -> bool:
    """Find the place where /proc shows what this process and its children write. False if this system shows none."""
    global _place
    _place = _Place.find()
    return _place is not None


class _Place:
    """The memory that the kernel shows as /proc/PID/cmdline and environ: what the interpreter was started with.

    C libraries may keep pointers into it, so only the arguments and one variable, `ROOM`, made for this, are written.
    """

    def __init__(self, arguments: tuple[int, int], variables: tuple[int, int], kept: frozenset[bytes]) -> None:
        self.kept = kept
        self._arguments = arguments
        self._variables = variables

    @classmethod
    def find(cls) -> _Place | None:
        """Return the place; None if the kernel does not tell where it is."""
        stat = Path("/proc/self/stat").read_text(errors="replace")
        fields = stat[stat.rindex(")") + 2 :].split()
        # arg_start, arg_end, env_start and env_end of proc(5), counted after the name.
        first, last, begin, end = map(int, fields[45:49])
        shown = Path("/proc/self/environ").read_bytes()
        offset = shown.find(f"\0{ROOM}=".encode()) + 1
        if not first < last <= begin < end or offset == 0:
            return None
        kept = frozenset(entry for entry in shown[:offset].split(b"\0") if entry)
        return cls((first, last), (begin + offset, end), kept)

    def write_arguments(self, arguments: list[bytes]) -> None:
        self._write(self._arguments, arguments)

    def write_variables(self, variables: list[bytes]) -> None:
        self._write(self._variables, variables)

    @staticmethod
    def _write(place: tuple[int, int], entries: list[bytes]) -> None:
        begin, end = place
        data = b""
        for entry in entries:
            if len(data) + len(entry) + 1 <= end - begin:
                data += entry + b"\0"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


_place: _Place | None = None


def _renew() -> None:
    """Give this process what a new interpreter has of its own. (`random` draws a new seed at each fork by itself.)"""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.invalidate_caches()
    # Each of them is drawn when the module is imported.
    for name, draw in _DRAWN.items():
        if name in sys.modules:
            draw(sys.modules[name])


_DRAWN: dict[str, Callable[[Any], object]] = {
    "torch": lambda torch: torch.default_generator.seed(),
    "numpy.random": lambda random: random.seed(),
    "multiprocessing.process": lambda process: setattr(process.current_process(), "authkey", os.urandom(32)),
}
