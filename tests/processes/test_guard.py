"""The guard: what it knows of processes, how a command and a member end, and what Slurm's notice reaches."""

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

from tests.support.launched import wait_until
from tests.support.repository import ROOT
from trainer_lib import guard
from trainer_lib.engines.base import Job
from trainer_lib.guard import Process, descendants, is_alive, send_signal, start_time
from trainer_lib.launch.settings.config import LaunchConfig

GUARD = [sys.executable, "-I", "-S", guard.__file__]
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "100"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_its_pid_and_its_start(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    start = start_time(sleeper.pid)
    assert start is not None
    assert is_alive(Process(sleeper.pid, start))
    assert not is_alive(Process(sleeper.pid, "1"))
    send_signal(Process(sleeper.pid, "1"), signal.SIGKILL)  # a recycled pid: left alone
    assert sleeper.poll() is None
    parent, start, state = guard._table_from_ps()[sleeper.pid]
    (tmp_path / "worker-0.pid").write_text(f"{sleeper.pid} {start}")  # a date, which has spaces
    assert guard.read_process(tmp_path / "worker-0.pid") == Process(sleeper.pid, start)
    assert (parent, state) == (os.getpid(), "S") and start
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(sleeper.pid) is None  # a zombie is dead


def test_descendants_reach_into_other_sessions() -> None:
    shell = subprocess.Popen(["sh", "-c", "setsid sleep 100 & wait"])
    try:
        wait_until(lambda: any(_name(process) == "sleep" for process in descendants(os.getpid())), 10)
    finally:
        for process in descendants(shell.pid):  # not only the launch's: the session's servers are among them
            send_signal(process, signal.SIGKILL)
        shell.wait()


def _name(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 128 + 9), ("true", 0)])
def test_exit_code_is_the_commands_own(tmp_path: Path, command: str, code: int) -> None:
    # Its input stays open until it has ended: end of file tells the guard that its owner is gone.
    with subprocess.Popen(
        [*GUARD, "--run-dir", str(tmp_path), "--grace", "1", "--", "sh", "-c", command], stdin=subprocess.PIPE
    ) as guarded:
        assert guarded.wait(60) == code
    assert json.loads((tmp_path / "guard.json").read_text())["code"] == (code if code < 128 else 128 - code)


def test_command_that_cannot_be_started(tmp_path: Path) -> None:
    command = [*GUARD, "--run-dir", str(tmp_path), "--grace", "1", "--", "/no/such/program"]
    done = subprocess.run(command, stdin=-1, capture_output=True)
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
    wait_until(ready.exists, 20)
    orphan = Process(int(ready.read_text()), start_time(int(ready.read_text())) or "")
    time.sleep(4 * guard.SNAPSHOT_S)  # it looks three times a second, and the orphan's parent lives
    everybody = {*descendants(process.pid), orphan}
    (tmp_path / "go").touch()
    wait_until((tmp_path / "gone").exists, 20)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, everybody)), 5)


# ------------------------------------------------------------------------------------------- the member of an engine
def _handles(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [caught] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return bool(caught >> (number - 1) & 1)


@LINUX
def test_a_member_whose_guard_is_killed_ends_without_a_word(tmp_path: Path) -> None:
    """Ray kills the guard when its machine is lost: the member must not pass for one that was asked to stop."""
    job = tmp_path / "job.json"
    job.write_text(Job({}, LaunchConfig(processes=1), {}, shared=False).to_text())
    member = [sys.executable, "-m", "trainer_lib.engines.member", "follow", str(job), "--guarded"]
    member += ["--nodes", "2", "--address", str(tmp_path / "never")]
    command = [*GUARD, "--grace", "0", "--", *member]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as started:
        wait_until(lambda: any(_handles(each.pid, signal.SIGUSR2) for each in descendants(started.pid)), 60)
        [process] = descendants(started.pid)
        started.kill()
        assert started.stdout is not None
        assert started.stdout.read() == b""  # its end is that of the member
    wait_until(lambda: guard.is_gone(process), 20)


@LINUX
def test_a_guard_without_grace_kills_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is asked to stop tells those of other machines, within the moment before it is killed."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(guard, "send_signal", lambda process, number: sent.append((process.pid, number)))
    with subprocess.Popen(["sleep", "100"]) as first, subprocess.Popen(["sleep", "100"]) as second:
        watching = guard.Guard(None, 0.0, ["true"])
        watching._obey(b"")
        for end in watching.wake:
            os.close(end)
        first.kill()
        second.kill()
    ours = [each for each in sent if each[0] in (first.pid, second.pid)]
    # The youngest first: a process that sees its parent's end may act on it.
    assert ours == [(second.pid, signal.SIGKILL), (first.pid, signal.SIGKILL)]
    assert {number for _, number in sent} == {signal.SIGKILL}


# ---------------------------------------------------------------- Slurm's notice, which every process of a step gets
WORKER = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from trainer_lib.errors import Preempted
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.worker.process import session

def work(ready):
    ready.set()
    time.sleep(60)

if __name__ == "__main__":
    session._set_up_signals(RunDir(Path(sys.argv[2])), 0)
    context = multiprocessing.get_context(sys.argv[1])
    ready = context.Event()
    child = context.Process(target=work, args=(ready,), daemon=True)
    child.start()
    ready.wait(60)
    try:
        others = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in (*others, os.getpid()):
            os.kill(int(pid), signal.SIGUSR2)
        while True:
            time.sleep(0.05)
    except Preempted:
        child.join(0.3)
        states = [Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] for pid in others]
        print("preempted", child.exitcode, "Z" in states, flush=True)
    child.kill()
"""


@LINUX
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_notice_stops_the_worker_and_ends_no_process_that_the_worker_started(method: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), method, str(tmp_path)]
    env = {"PATH": "/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "preempted None False\n", done.stderr
