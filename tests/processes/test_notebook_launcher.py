"""A notebook's function on forked processes: it need not be importable, and failures come back typed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import wait_until
from tests.support.repository import ROOT

# Each runs in a process of its own: forking this one, with all its threads, would prove nothing about a notebook.
HEAD = """
import os, sys, time
from pathlib import Path
from trainer_lib.errors import TrainflowError
from trainer_lib.launch import notebook_launcher
"""
TRAINS = """
from tests.support.toys import classification_rows
from tests.support.training import trainer

ROWS = classification_rows(26)  # a notebook's own data, made before, and found by what is forked

def train(folder):
    one = trainer(folder, ROWS, max_steps=4, per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True)
    one.train()
    return {"world": one._trainflow.comm.world_size, "loss": one.state.log_history[-1]["train_loss"]}

print("here", notebook_launcher(train, (os.environ["OUT"],), num_processes=2))
print("left", "RANK" in os.environ, __import__("torch").distributed.is_initialized())
"""
RETURNS = """
def main():
    rank = os.environ["RANK"]
    {what}

try:
    print("value", notebook_launcher(main, num_processes=2))
except TrainflowError as error:
    print(type(error).__name__, error.rank, error.message)
"""
WAITS = """
def main():
    Path(os.environ['OUT'], os.environ['RANK']).write_text(str(os.getpid())); time.sleep(300)

notebook_launcher(main, num_processes=2)
"""


def start(code: str, out: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OUT": str(out)}
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    with start(TRAINS, tmp_path) as notebook:
        said, errors = notebook.communicate(timeout=100)
    assert notebook.returncode == 0, errors
    [here] = [line for line in said.splitlines() if line.startswith("here")]
    assert here.startswith("here {'world': 2, 'loss': ")
    assert "left False False" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("return {'rank': rank, 'of': os.environ['WORLD_SIZE']}", "value {'rank': '0', 'of': '2'}"),
        ("return object()", "value None"),
        ("if rank == '1': raise KeyError('gone')\n    time.sleep(300)", "CodeError 1 KeyError: 'gone'"),
        (
            "if rank == '1': os.kill(os.getpid(), 9)\n    time.sleep(300)",
            "InfrastructureError 1 Rank 1 was killed by SIGKILL (9).",
        ),
        (
            "if rank == '1': os._exit(3)\n    time.sleep(300)",
            "InfrastructureError 1 Rank 1 ended with exit code 3 and recorded no reason.",
        ),
    ],
)
def test_what_comes_back_from_forked_processes(what: str, said: str, tmp_path: Path) -> None:
    with start(RETURNS.format(what=what), tmp_path) as notebook:
        out, errors = notebook.communicate(timeout=60)
    assert out.strip() == said, errors


def test_children_end_with_a_notebook_that_is_killed(tmp_path: Path) -> None:
    with start(WAITS, tmp_path) as notebook:
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), 30)
        notebook.send_signal(signal.SIGKILL)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), 10)
