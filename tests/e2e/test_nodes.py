"""One command started once on each of two machines, as Slurm or Kubernetes would: one leads, the other takes part."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.command import TRAINFLOW, trainflow
from tests.support.toy import project

ONLY_TRAIN = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")


TRAIN_JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "{rank}", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
             "PET_MASTER_PORT": "{port}"}  # fmt: skip
RANKS = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "{port}"}  # fmt: skip


def run_on_both(folder: Path, variables: dict[str, str]) -> list[tuple[int, str]]:
    """The same command on two machines; exit code and output of each, the leading one first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("train.launch.kind=environment", "train.launch.processes=1", "train.launch.join_timeout_s=90")
    command = [*TRAINFLOW, "run", str(folder / "pipeline.yaml"), *launch, *ONLY_TRAIN]
    started = []
    for rank in (1, 0):
        (folder / f"tmp-{rank}").mkdir(exist_ok=True)
        job = {name: value.format(rank=rank, port=port) for name, value in variables.items()}
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, **job, "TMPDIR": str(folder / f"tmp-{rank}")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=150)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)][::-1]


def test_a_job_of_two_machines_trains_together_and_the_second_time_does_nothing(tmp_path: Path) -> None:
    project(tmp_path)
    (code, led), (other_code, followed) = run_on_both(tmp_path, TRAIN_JOB)
    assert (code, other_code) == (0, 0), led + followed
    assert "taking part in what 127.0.0.1:" in followed
    [manifest] = (tmp_path / "store" / "stages" / "train").glob("*/COMMIT.json")
    assert '"world_size": 2' in manifest.read_text()
    (code, led), (other_code, followed) = run_on_both(tmp_path, RANKS)
    assert (code, other_code) == (0, 0), led + followed
    assert "cached" in led


def test_join_says_that_nobody_leads(tmp_path: Path) -> None:
    done = trainflow("join", "127.0.0.1:9", "--processes", "1", "--timeout", "1", env={"TMPDIR": str(tmp_path)})
    assert done.code == 18, done.err
    assert "No machine leads there" in done.out + done.err


@pytest.mark.parametrize("setting", ["nodes=2", "kind=environment"])
def test_several_machines_are_for_training_only(setting: str, tmp_path: Path) -> None:
    project(tmp_path)
    done = trainflow("run", tmp_path / "pipeline.yaml", f"prepare.launch.{setting}", cwd=tmp_path)
    assert done.code == 2
    assert f"prepare.launch.{setting.partition('=')[0]}" in done.err
