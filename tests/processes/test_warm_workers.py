"""Workers that start before their launch: like any other once it begins, and gone with whatever ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny
from tests.support.launched import request, wait_until
from tests.support.repository import ROOT
from trainer_lib.launch import warm
from trainer_lib.launch.base import launch
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.variables import worker_environment
from trainer_lib.protocol.requests import PreparedData

ONE = LaunchConfig(kind="process", processes=1, grace_s=2.0, threads=1)
SHOWS = """
import json, os, sys
from pathlib import Path
state = {
    "command": [sys.argv[0], *sys.orig_argv[:-1]],
    "variables": {name: value for name, value in os.environ.items() if not name.startswith("TRAINFLOW_")},
    "mark": f"TRAINFLOW_RUN_DIR={os.environ['TRAINFLOW_RUN_DIR']}" in Path("/proc/self/environ").read_text(),
    "files": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
}
Path(__file__).with_name("state.json").write_text(json.dumps(state))
Path(__file__).with_name("pid").write_text(str(os.getpid()))

def prepare(options, out):
    return {"train": [{"x": 1}]}
"""


@pytest.fixture(autouse=True)
def none_waits() -> Iterator[None]:
    yield
    warm.close()


def start(folder: Path, **env: str) -> dict[str, Any]:
    """Prepare a row; returns what the worker shows, with its pid."""
    launch(request(folder, SHOWS), ONE, env=env, on_line=lambda line: None, on_event=lambda event: None)
    return {**json.loads((folder / "state.json").read_text()), "pid": int((folder / "pid").read_text())}


def waiting() -> list[int]:
    guards = [psutil.Process(worker._guard.pid) for worker in warm._waiting]
    wait_until(lambda: all(guard.children() for guard in guards), 20)
    return [child.pid for guard in guards for child in guard.children()]


def test_a_worker_that_waited_is_like_any_other(tmp_path: Path) -> None:
    """Its launch sends the variables; the one that is expected next starts with it."""
    cold = start(tmp_path, MLFLOW_RUN_ID="one")
    warm.expect([("prepare", ONE)] * 2)
    for _ in range(2):
        [pid] = waiting()
        assert start(tmp_path, MLFLOW_RUN_ID="one") == {**cold, "pid": pid}
    assert waiting() == []
    assert start(tmp_path)["pid"] != pid


def test_training_in_a_worker_that_waited_gives_the_same_bits(tmp_path: Path, prepared_data: PreparedData) -> None:
    warm.expect([("train", replace(ONE, grace_s=20.0))])
    digests = []
    for kind in ("process", "in_process"):
        asked = tiny.train_request(tmp_path / kind, prepared_data, str(tmp_path / kind / "train"), max_steps=4)
        tiny.run(asked, kind=kind, processes=1)
        assert not warm._waiting
        digests.append(tiny.weights(asked.output))
    assert digests[0] == digests[1]


def test_a_launch_that_would_begin_otherwise_starts_its_own(tmp_path: Path) -> None:
    warm.expect([("prepare", ONE)])
    [worker] = warm._waiting
    patient, own = replace(ONE, grace_s=3.0), worker_environment(ONE, {})
    for verb, config, environment in (
        ("predict", ONE, own),
        ("prepare", ONE, worker_environment(ONE, {"OMP_STACKSIZE": "4M"})),  # torch reads it when it is imported
        ("prepare", patient, worker_environment(patient, {})),
    ):
        assert warm.take(verb, config, environment) is None
    with contextlib.chdir(tmp_path):
        assert warm.take("prepare", ONE, own) is None
    taken = warm.take("prepare", ONE, own)
    assert taken is worker
    taken.close()


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(kind="torchrun", processes=2),
        LaunchConfig(kind="process", processes=1, env={warm.SWITCH: "0"}),
        LaunchConfig(engine="slurm", processes=1),
    ],
)
def test_what_one_process_here_does_not_do_is_not_expected(config: LaunchConfig) -> None:
    warm.expect([("train", config)])
    assert not warm._waiting


def test_one_that_was_killed_is_replaced_by_the_launch(tmp_path: Path) -> None:
    warm.expect([("prepare", ONE)])
    [pid] = waiting()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: warm._waiting[0]._guard.poll() is not None, 20)
    assert start(tmp_path)["pid"] != pid


def test_one_without_a_launch_ends_with_its_folder() -> None:
    warm.expect([("prepare", ONE)])
    [pid], folder = waiting(), warm._waiting[0].run_dir.path
    warm.close()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_one_ends_with_its_owner() -> None:
    code = (
        "import time\nfrom trainer_lib.launch import warm\n"
        "from trainer_lib.launch.settings.config import LaunchConfig\n"
        "warm.expect([('prepare', LaunchConfig(kind='process', processes=1))])\n"
        "print(warm._waiting[0].run_dir.path, flush=True)\ntime.sleep(300)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        run_dir = RunDir(Path(owner.stdout.readline().strip()))
        wait_until(lambda: len(run_dir.find_processes()) == 2, 20)
        owner.kill()
        wait_until(lambda: not run_dir.find_processes(), 20)
    run_dir.remove()
