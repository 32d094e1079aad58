"""Launches on a real Slurm of two machines, which are processes of this one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.engine_launch import Launch
from tests.support.launched import Owner, wait_until
from tests.support.repository import ROOT
from tests.support.slurm_cluster import slurm_cluster
from trainer_lib.errors import Interrupted
from trainer_lib.protocol.requests import PreparedData

pytestmark = [pytest.mark.needs("slurm"), pytest.mark.timeout(400)]

SlurmLaunch = partial(Launch, engine="slurm", nodes=2, grace_s=20.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture(autouse=True)
def _use_cluster(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)


def _jobs() -> list[tuple[str, str]]:
    """Number and state of every job, the oldest first."""
    command = ["squeue", "--noheader", "--states=all", "--format=%A %T"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(tuple(line.split()) for line in done.stdout.splitlines())  # type: ignore[misc]


def _new_jobs(before: list[tuple[str, str]]) -> list[str]:
    known = {number for number, _ in before}
    return [state for number, state in _jobs() if number not in known]


def test_two_machines_train_what_two_processes_train(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str
) -> None:
    before = _jobs()
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = SlurmLaunch(asked, engine_options={"partition": "low", "time": 10})
    result = started.join(200)
    assert (result.world_size, result.global_step) == (2, 36)
    assert tiny.weights(asked.output) == uninterrupted_weights
    assert any(event["message"].endswith("runs on n[1-2]") for event in started.reported("wait"))
    assert _new_jobs(before) == ["COMPLETED"]


def test_cancelling_saves(tmp_path: Path, prepared_data: PreparedData) -> None:
    before = _jobs()
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = SlurmLaunch(asked, {"STEP_S": "0.2"})
    started.wait_for("save")
    started.stop.set()
    failure = started.failure()
    assert isinstance(failure, Interrupted)
    assert (Path(asked.output) / "checkpoints" / f"checkpoint-{failure.step}").is_dir()
    assert len(_new_jobs(before)) == 1


def test_after_a_kill_the_same_command_takes_the_job_up(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str
) -> None:
    before = _jobs()
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    owner = Owner(tmp_path, asked, engine="slurm", processes=1, nodes=2, grace_s=20.0)
    placed = Path(asked.output) / "attempts" / "slurm" / "placed.json"
    wait_until(lambda: placed.exists() and json.loads(placed.read_text())["job"] is not None, 60)
    owner.process.kill()
    owner.process.wait()
    assert owner.gone() == []
    assert SlurmLaunch(asked).join(200).global_step == 36
    assert _new_jobs(before) == ["COMPLETED"]
    assert tiny.weights(asked.output) == uninterrupted_weights


@pytest.mark.parametrize("partition", ["low", "requeued"])
def test_a_job_that_makes_room_for_another_goes_on_afterwards(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, partition: str
) -> None:
    """In one partition Slurm cancels it, in the other it puts it back into the queue."""
    before = _jobs()
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    options = {"partition": partition, "requeue": True}
    started = SlurmLaunch(asked, {"STEP_S": "0.1"}, engine_options=options)
    started.wait_for("save")
    command = ["srun", "--partition=high", "--nodes=2", "--exclusive", "--time=1", "sleep", "1"]
    subprocess.run(command, check=True, env=dict(os.environ), capture_output=True, timeout=120)
    if partition == "requeued":
        # Slurm lets it wait for two minutes otherwise.
        number = next(number for number, state in _jobs() if state == "PENDING")
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)
        assert started.join(300).global_step == 36
        assert "PENDING" not in _new_jobs(before)
    else:
        failure = started.failure()
        assert failure.exit_code == 19
        assert SlurmLaunch(asked).join(200).resumed_from is not None
    assert tiny.weights(asked.output) == uninterrupted_weights
