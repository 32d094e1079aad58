"""Launches that Slurm places: submission, the queue, every way in which a job ends, and the driver's own end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.engine_launch import Launch
from tests.support.launched import Owner, request, wait_until
from tests.support.repository import ROOT
from tests.support.stand_ins import slurm
from trainer_lib.engines.base import Job
from trainer_lib.engines.slurm import Slurm
from trainer_lib.errors import (
    CodeError,
    ConfigError,
    InfrastructureError,
    Interrupted,
    OutOfMemoryError,
    Preempted,
    TrainflowError,
)
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import PreparedData, Request


class FakeSlurm:
    """A cluster of two machines. `set` and `unset` make and remove the files that change what its programs say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (folder / "tmp").mkdir()
        for name in (*slurm.PROGRAMS, "requeue", "daemon"):
            command = f'exec {sys.executable} -I -S {Path(slurm.__file__)} {folder} {name} "$@"'
            (programs / name).write_text(f"#!/bin/sh\n{command}\n")
            (programs / name).chmod(0o755)
        self.path = str(programs)
        self.set("machines", "2")
        self._daemon = subprocess.Popen([f"{programs}/daemon"], start_new_session=True, stdin=subprocess.DEVNULL)

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink()

    def calls(self, program: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [line for line in lines if line.split()[0] == program]

    def jobs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "jobs").glob("*") if (path / "state.json").exists())

    def state(self, number: str = "1") -> str:
        return str(slurm.state_of(self.folder, number)["state"])

    def wait_for(self, state: str, number: str = "1", timeout: float = 60.0) -> None:
        wait_until(lambda: number in self.jobs() and self.state(number) == state, timeout)

    def take(self, state: str, number: str = "1", *, kind: int = signal.SIGTERM, by: str = "") -> None:
        """End a job: its tasks are asked to end, and have a while for it, or killed; then it is in that state."""
        slurm.set_state(self.folder, number, state=state, by=by)
        slurm.signal_tasks(self.folder, number, kind)
        wait_until(lambda: not slurm.signal_tasks(self.folder, number, 0), 60)

    def requeue(self, number: str = "1") -> None:
        """Take the machines of a job, and put it back into the queue, from which it starts again."""
        self.take("PENDING", number)
        subprocess.run([f"{self.path}/requeue", number], check=True)

    def close(self) -> None:
        for number in self.jobs():
            self.take("CANCELLED", number, kind=signal.SIGKILL)
        self.set("stop")
        self._daemon.wait(30)


SLOW_RECIPE = """
import time

def prepare(options, out):
    time.sleep(3)
    return {"t": [{"x": 1}]}

def build_model(options, data): ...
"""

QUICK_RECIPE = SLOW_RECIPE.replace("time.sleep(3)", "")

SlurmLaunch = partial(Launch, engine="slurm")


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    cluster = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{cluster.path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield cluster
    cluster.close()


def leftovers(asked: Request[Any]) -> list[str]:
    return sorted(path.name for path in (Path(asked.output) / "attempts" / "slurm").glob("*"))


def waiting(tmp_path: Path) -> tuple[Request[Any], Callable[[Launch], None]]:
    """A request whose worker waits, and what waits for that worker."""
    asked = request(tmp_path)

    def ready(started: Launch) -> None:
        wait_until(lambda: (tmp_path / "ready-0").exists() or started.error is not None, 60)

    return asked, ready


def test_an_error_of_the_recipe_is_that_of_the_launch(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked = request(tmp_path, "def prepare(options, out):\n    raise KeyError('gone')\n\ndef build_model(o, d): ...\n")
    failure = SlurmLaunch(asked, max_restarts=3).failure()
    assert isinstance(failure, CodeError)
    assert "KeyError: 'gone'" in failure.message
    assert fake_slurm.jobs() == ["1"]


@pytest.mark.parametrize(
    ("state", "expected", "message"),
    [
        ("PREEMPTED", Preempted, "Slurm took the machines of job 1 back"),
        ("OUT_OF_MEMORY", OutOfMemoryError, "job 1 had no memory left"),
        ("TIMEOUT", InfrastructureError, "The time limit of job 1 was reached"),
    ],
)
def test_how_a_job_ends_is_how_the_launch_ends(
    tmp_path: Path, fake_slurm: FakeSlurm, state: str, expected: type[Any], message: str
) -> None:
    fake_slurm.set("hold")
    asked = request(tmp_path)
    started = SlurmLaunch(asked)
    fake_slurm.wait_for("PENDING")
    fake_slurm.take(state)
    failure = started.failure()
    assert type(failure) is expected
    assert re.search(message, str(failure))
    assert leftovers(asked) == []


def test_a_lost_job_is_placed_again_within_max_restarts(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked, ready = waiting(tmp_path)
    started = SlurmLaunch(asked, max_restarts=1)
    ready(started)
    (tmp_path / "ready-0").unlink()
    fake_slurm.take("NODE_FAIL", kind=9)
    ready(started)
    assert fake_slurm.jobs() == ["1", "2"]
    fake_slurm.take("NODE_FAIL", "2", kind=9)
    failure = started.failure()
    assert type(failure) is InfrastructureError
    assert re.search(r"job 2 on n\[1-2\] ended: a machine failed", str(failure))
    assert leftovers(asked) == []
    (again,) = started.reported("warning")
    assert again["message"].endswith("Starting again (1 of 1).")


def test_a_job_goes_on_after_it_was_put_back_into_the_queue_and_says_where_it_was_cancelled(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, fake_slurm: FakeSlurm
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    started = SlurmLaunch(asked, {"STEP_S": "0.1"}, nodes=2, grace_s=30.0)
    started.wait_for("save")
    fake_slurm.requeue()
    started.wait_for("resume")
    started.stop.set()
    failure = started.failure()
    assert isinstance(failure, Interrupted)
    assert failure.step is not None
    assert (Path(asked.output) / "checkpoints" / f"checkpoint-{failure.step}").is_dir()
    assert fake_slurm.calls("scancel")[0] == "scancel --signal=USR2 1"
    assert fake_slurm.jobs() == ["1"]
    assert leftovers(asked) == []
    assert SlurmLaunch(asked, nodes=2).join().resumed_from == failure.step
    assert tiny.weights(asked.output) == uninterrupted_weights


def test_what_does_not_end_when_it_is_asked_to_is_cancelled(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked, ready = waiting(tmp_path)
    started = SlurmLaunch(asked, {"MODE": "deaf"}, grace_s=1.0)
    ready(started)
    started.stop.set()
    assert isinstance(started.failure(), Interrupted)
    assert fake_slurm.calls("scancel")[0] == "scancel --signal=USR2 1"


def test_a_job_that_waits_is_cancelled_at_once(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.set("hold")
    started = SlurmLaunch(request(tmp_path))
    fake_slurm.wait_for("PENDING")
    started.wait_for("wait")
    started.stop.set()
    assert isinstance(started.failure(), Interrupted)
    assert fake_slurm.state() == "CANCELLED"


def test_after_a_kill_the_same_command_takes_the_job_up(
    tmp_path: Path, prepared_data: PreparedData, uninterrupted_weights: str, fake_slurm: FakeSlurm
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    fake_slurm.set("hold")
    owner = Owner(tmp_path, asked, engine="slurm", processes=1, nodes=2, grace_s=5.0)
    fake_slurm.wait_for("PENDING")
    placed = Path(asked.output) / "attempts" / "slurm" / "placed.json"
    wait_until(lambda: json.loads(placed.read_text())["job"] == "1", 30)
    owner.process.kill()
    owner.process.wait()
    assert owner.gone() == []
    fake_slurm.unset("hold")  # the job starts, runs and ends while no process watches it
    fake_slurm.wait_for("COMPLETED", timeout=150)
    assert SlurmLaunch(asked, nodes=2).join().global_step == 36
    assert fake_slurm.jobs() == ["1"]
    assert tiny.weights(asked.output) == uninterrupted_weights
    assert leftovers(asked) == []


@pytest.mark.parametrize(
    "record",
    [
        {"folder": "../outside", "job": "1"},
        {"folder": "/", "job": "1"},
        {"folder": "job", "job": "--user=root"},
        {"folder": "..", "job": None},
        ["job"],
    ],
)
def test_a_planted_record_of_a_job_removes_no_folder_elsewhere_and_cancels_nothing(
    tmp_path: Path, fake_slurm: FakeSlurm, record: Any
) -> None:
    engine = Slurm()
    engine._base = tmp_path / "slurm"
    for folder in (tmp_path / "outside", engine._base / "job"):
        folder.mkdir(parents=True)
        (folder / "job.json").write_text('{"request": {}}')
    (engine._base / "placed.json").write_text(json.dumps(record))
    assert not engine._take_up()
    assert (tmp_path / "outside" / "job.json").exists()
    assert fake_slurm.jobs() == []


def test_a_job_whose_number_was_never_read_is_found_by_its_name(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked, ready = waiting(tmp_path)
    fake_slurm.set("unanswered")
    started = SlurmLaunch(asked)
    ready(started)
    fake_slurm.take("CANCELLED", by="by 1000")
    failure = started.failure()
    assert isinstance(failure, Interrupted)
    assert "job 1 was cancelled by 1000" in failure.message
    assert leftovers(asked) == []
    assert fake_slurm.jobs() == ["1"]


def test_a_job_of_other_settings_is_ended_before_another_is_submitted(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    owner = Owner(tmp_path, request(tmp_path, options={"n": 1}), engine="slurm", processes=1, grace_s=5.0)
    owner.wait_for(tmp_path / "ready-0")
    owner.process.kill()
    owner.process.wait()
    assert owner.gone() == []
    (tmp_path / "ready-0").unlink()
    started = SlurmLaunch(request(tmp_path, options={"n": 2}))
    wait_until(lambda: (tmp_path / "ready-0").exists(), 60)
    assert [fake_slurm.state(number) for number in fake_slurm.jobs()] == ["CANCELLED", "RUNNING"]
    started.stop.set()
    assert isinstance(started.failure(), Interrupted)


def test_a_slurm_that_is_silent_or_forgets_is_waited_for(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    started = SlurmLaunch(request(tmp_path, SLOW_RECIPE))
    fake_slurm.wait_for("RUNNING")
    fake_slurm.set("silent")
    time.sleep(1.0)
    fake_slurm.unset("silent")
    fake_slurm.set("forgets")
    fake_slurm.set("unaccounted")
    assert started.join().splits["t"].rows == 1


def test_a_job_that_no_machines_can_run_does_not_wait(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.set("hold", "PartitionConfig")
    asked = request(tmp_path)
    failure = SlurmLaunch(asked, nodes=5).failure()
    assert isinstance(failure, ConfigError)
    assert "PartitionConfig. The cluster offers debug: 2 machine(s) with 2 CPUs, and 5 machine(s)" in failure.message
    assert fake_slurm.state() == "CANCELLED"
    assert leftovers(asked) == []


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Requested node configuration is not available", ConfigError),
        ("unrecognized option '--partiton=gpu'\nTry \"sbatch --help\" for more information", ConfigError),
        ("Job violates accounting/QOS policy (job submit limit)", InfrastructureError),
    ],
)
def test_a_refusal_says_what_the_cluster_offers(
    tmp_path: Path, fake_slurm: FakeSlurm, reason: str, expected: type[TrainflowError]
) -> None:
    fake_slurm.set("refuse", f"sbatch: error: Batch job submission failed: {reason}")
    failure = SlurmLaunch(request(tmp_path), nodes=1, engine_options={"partition": "debug"}).failure()
    assert type(failure) is expected
    if expected is ConfigError:
        assert f"{reason.splitlines()[0]}. The cluster offers debug: 2 machine(s)" in failure.message
        assert failure.field == "train.launch.engine_options"


def test_a_storage_that_the_machines_do_not_see(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.set("unshared")
    asked = request(tmp_path)
    failure = SlurmLaunch(asked, max_restarts=3).failure()
    assert type(failure) is ConfigError
    assert failure.message == "The job 1 ended on n[1-2] before it had written into its folder."
    assert failure.field == "train.launch.engine_options.folder"
    assert failure.value == f"{asked.output}/attempts/slurm"
    assert "that all machines of the cluster see" in str(failure.remedy)
    assert fake_slurm.jobs() == ["1"]
    assert leftovers(asked) == []


def test_a_store_needs_a_folder_for_what_jobs_write(fake_slurm: FakeSlurm) -> None:
    job = Job({"output": "s3://bucket/runs/train"}, LaunchConfig(engine="slurm", processes=1), {}, shared=False)
    with pytest.raises(ConfigError, match="the storage is not one") as caught:
        Slurm().place(job)
    assert caught.value.field == "train.launch.engine_options.folder"
    assert caught.value.remedy == "Name a folder that all machines of the cluster see."
    assert fake_slurm.calls("sbatch") == []


def test_a_job_is_submitted_as_the_options_say_with_its_files_in_the_folder_that_they_name(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.set("hold")
    fake_slurm.set("machines", "1")
    asked = request(tmp_path, QUICK_RECIPE)
    options = {"folder": str(tmp_path / "seen by all"), "partition": "gpu", "time": "01:00:00", "requeue": True}
    started = SlurmLaunch(asked, nodes="1:4", grace_s=30.0, engine_options=options)
    fake_slurm.wait_for("PENDING")
    started.wait_for("wait")
    [base] = (tmp_path / "seen by all").iterdir()  # one for each output
    wait_until(lambda: json.loads((base / "placed.json").read_text())["job"] == "1", 30)
    folder = base / json.loads((base / "placed.json").read_text())["folder"]
    assert sorted(path.name for path in folder.iterdir()) == ["job.json", "run.sh"]
    fake_slurm.unset("hold")
    assert started.join().splits["t"].rows == 1
    waits = [event["message"] for event in started.reported("wait")]
    assert waits[0] == "job 1 waits in Slurm's queue (Resources)"
    assert "job 1 runs on n[1-2]" in waits
    [submitted] = fake_slurm.calls("sbatch")
    flags = ("partition=gpu", "time=01:00:00", "requeue ", "nodes=1-4", "signal=USR2@40", f"output={folder}/job.out")
    assert [flag for flag in flags if f"--{flag}" not in submitted] == []
    assert "--folder" not in submitted
    assert (fake_slurm.state(), fake_slurm.calls("scancel")) == ("COMPLETED", [])
    assert not (Path(asked.output) / "attempts" / "slurm").exists()
    assert list(base.iterdir()) == []
