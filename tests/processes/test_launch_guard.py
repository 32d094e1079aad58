"""The guard's view of processes: by pid and start time, from /proc or from ps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_lib import guard
from trainer_lib.guard import Process, descendants, is_alive, send_signal, start_time

GUARD = [sys.executable, "-I", "-S", guard.__file__]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "100"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_its_pid_and_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    start = start_time(sleeper.pid)
    assert start is not None
    assert is_alive(Process(sleeper.pid, start))
    assert not is_alive(Process(sleeper.pid, "1"))
    send_signal(Process(sleeper.pid, "1"), signal.SIGKILL)  # a recycled pid: left alone
    assert sleeper.poll() is None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(sleeper.pid) is None  # a zombie is dead


def test_descendants_reach_into_other_sessions() -> None:
    shell = subprocess.Popen(["sh", "-c", "setsid sleep 100 & wait"])
    try:
        deadline = time.monotonic() + 10
        while not any(_name(process) == "sleep" for process in descendants(os.getpid())):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for process in descendants(shell.pid):  # not only the launch's: the session's servers are among them
            send_signal(process, signal.SIGKILL)
        shell.wait()


def _name(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_ps_tells_the_same_as_proc(sleeper: subprocess.Popen[bytes]) -> None:
    table = guard._table_from_ps()
    parent, start, state = table[sleeper.pid]
    assert (parent, state) == (os.getpid(), "S")
    assert start


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 128 + 9), ("true", 0)])
def test_exit_code_is_the_commands_own(tmp_path: Path, command: str, code: int) -> None:
    # Its input stays open until it has ended: end of file tells the guard that its owner is gone.
    with subprocess.Popen(
        [*GUARD, "--run-dir", str(tmp_path), "--grace", "1", "--", "sh", "-c", command], stdin=subprocess.PIPE
    ) as guarded:
        assert guarded.wait(60) == code
    assert json.loads((tmp_path / "guard.json").read_text())["code"] == (code if code < 128 else 128 - code)


def test_command_that_cannot_be_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GUARD, "--run-dir", str(tmp_path), "--grace", "1", "--", "/no/such/program"], stdin=-1, capture_output=True
    )
    assert done.returncode == 127
    assert b"cannot start /no/such/program" in done.stderr


@pytest.mark.parametrize("subreaper", [True, False])
def test_end_of_file_ends_everything_even_without_a_subreaper(tmp_path: Path, subreaper: bool) -> None:
    """Without one (other systems than Linux), descendants are known from the snapshots only."""
    ready = tmp_path / "ready"
    script = (
        f"trap '' TERM; (sleep 100 & echo $! > {ready}.tmp; mv {ready}.tmp {ready};"
        f" while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; touch {tmp_path}/gone); sleep 100"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(Path(guard.__file__).parent)!r}); import guard\n"
        f"if not {subreaper}: guard.prctl = lambda *_: False\n"
        f"sys.exit(guard.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--run-dir", str(tmp_path), "--grace", "0.5", "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    orphan = Process(int(ready.read_text()), start_time(int(ready.read_text())) or "")
    time.sleep(4 * guard.SNAPSHOT_S)  # it looks three times a second, and the orphan's parent lives
    everybody = {*descendants(process.pid), orphan}
    (tmp_path / "go").touch()
    while not (tmp_path / "gone").exists():
        time.sleep(0.02)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(map(is_alive, everybody)):
        assert time.monotonic() < deadline, everybody
        time.sleep(0.02)
