"""`trainflow` as a user starts it: a process, its output, its exit code, and what it left running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.support.repository import ROOT

TRAINFLOW = [sys.executable, "-c", "from trainflow.flows.cli.main import main; main()"]


def command_words(process: psutil.Process) -> list[str]:
    """The words with which a process was started; none of one that has ended or is not ours."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def ok(self) -> Done:
        """Itself, which has to have ended well."""
        assert self.code == 0, self.out + self.err
        return self

    def failure(self, code: int = 2, title: str = "bad input") -> dict[str, str]:
        """The message with which it failed, by its rows; checked for what every message must have."""
        assert self.code == code, self.out + self.err
        assert "Traceback" not in self.out + self.err
        first, *lines = self.err.splitlines()
        assert first == f"✗ {title}"
        rows = dict(re.findall(r"^  (where|why|do|more) +(\S.*)$", "\n".join(lines), re.M))
        assert {"where", "why", "do"} <= set(rows), self.err
        return rows


def trainflow(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """Run the command to its end; `env` is added to ours."""
    done = subprocess.run(
        [*TRAINFLOW, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=160,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def python(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 160
) -> subprocess.CompletedProcess[str]:
    """Run Python, which finds this repository, with these words; it has to end well."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command in the test's process, which is done in a twentieth of the time."""
    from trainflow.flows.cli.main import main
    from trainflow.tasks.stage import manifest

    def run(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
        code: object = 0
        manifest._verified.clear()  # as in a new process
        capsys.readouterr()
        with mock.patch.dict(os.environ, env or {}), contextlib.chdir(cwd or Path.cwd()):
            try:
                main([*map(str, arguments)])
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


class Running:
    """A command that is still running; its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout: float = 90) -> str:
        """Wait until `text` has been printed, and return its line."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in self.output.splitlines():
                if text in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{text!r} was not printed (exit code {self.process.poll()}):\n{self.output}")

    def stop(self, number: int = signal.SIGINT, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def running(
    *arguments: str | Path,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> Iterator[Running]:
    """A command, or a file in its place, in a session of its own; killed at the end if it still runs."""
    command = TRAINFLOW if program is None else [sys.executable, str(program)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
        )
    try:
        yield Running(process, log)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def engine(home: Path) -> Iterator[dict[str, str]]:
    """Keep an embedded server in `home` up; commands with the yielded variables use it, and start in half the time."""
    program = (
        "import sys\n"
        "from trainflow.flows.server.api import prefect_api, quiet_environment\n"
        "quiet_environment()\n"
        "with prefect_api():\n"
        "    print('up', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    env = {"PREFECT_HOME": str(home)}
    process = start_script(program, env=env)
    try:
        assert answer(process) == "up", f"no engine (exit code {process.wait()})"
        yield env
    finally:
        process.communicate(timeout=30)


def start_script(code: str, *words: str, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    """A script in another process, which the test talks to."""
    environ, pipe = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, subprocess.PIPE
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True, bufsize=1, **more)


def answer(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line, if any, and read one."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line)
    return process.stdout.readline().strip()
