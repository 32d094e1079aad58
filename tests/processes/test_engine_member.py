"""The member of an engine whose machine is lost: it must not pass for one that was asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import wait_until
from trainer_lib import guard
from trainer_lib.engines.base import Job
from trainer_lib.launch import LaunchConfig

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells of a parent's end")


def _handles(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [caught] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return bool(caught >> (number - 1) & 1)


def test_a_member_whose_guard_is_killed_ends_without_a_word(tmp_path: Path) -> None:
    """Ray kills the guard when its machine is lost, and the kernel tells the member by SIGTERM."""
    job = tmp_path / "job.json"
    job.write_text(Job({}, LaunchConfig(processes=1), {}, shared=False).to_text())
    member = [sys.executable, "-m", "trainer_lib.engines.member", "follow", str(job), "--guarded"]
    member += ["--nodes", "2", "--address", str(tmp_path / "never")]
    command = [sys.executable, "-I", "-S", guard.__file__, "--grace", "0", "--", *member]
    env = {**os.environ, "PYTHONPATH": str(Path(guard.__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as started:
        wait_until(lambda: any(_handles(each.pid, signal.SIGUSR2) for each in guard.descendants(started.pid)), 60)
        [process] = guard.descendants(started.pid)
        started.kill()
        assert started.stdout is not None
        assert started.stdout.read() == b""  # its end is that of the member
    wait_until(lambda: guard.is_gone(process), 20)


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
