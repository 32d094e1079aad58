"""Slurm's notice of preemption, which every process of a step gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

WORKER = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from trainer_lib.errors import Preempted
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.worker import session

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


@pytest.mark.skipif(sys.platform != "linux", reason="lists processes in /proc")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_it_stops_the_worker_and_ends_no_process_that_the_worker_started(method: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), method, str(tmp_path)]
    done = subprocess.run(
        command, env={"PATH": "/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "preempted None False\n", done.stderr
