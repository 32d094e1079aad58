"""The promise of the README: kill -9 anything, run the same command, get the weights of an uninterrupted run."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.command import Cli, command_words, running
from tests.support.launched import wait_until
from tests.support.repository import ROOT

SETTINGS = (
    *("train.args.num_train_epochs=2", "train.args.save_steps=4", "train.args.warmup_steps=4"),
    *("prepare.launch=in_process", "train.launch.processes=2", "train.eval_split=null", "train.args.eval_strategy=no"),
    *("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false", "tracking.enabled=false"),
)


def words(storage: Path) -> tuple[str | Path, ...]:
    """The command that trains on one storage folder."""
    return ("run", ROOT / "examples" / "digits" / "pipeline.yaml", f"storage={storage}", *SETTINGS)


def newest_step(storage: Path) -> int:
    """The newest committed step; 0 before the first."""
    commits = storage.glob("stages/train/*/checkpoints/checkpoint-*/COMMIT.json")
    return max((int(commit.parent.name.removeprefix("checkpoint-")) for commit in commits), default=0)


def model_digest(storage: Path) -> str:
    """The SHA-256 of the weights of the one train stage, which is committed."""
    [commit] = storage.glob("stages/train/*/COMMIT.json")
    return hashlib.sha256((commit.parent / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(240)
def test_a_killed_run_that_is_run_again_has_the_weights_of_an_uninterrupted_one(tmp_path: Path, cli: Cli) -> None:
    """The flow is killed here; a worker and the launcher in tests/distributed/test_launch_nodes.py."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    cli(*words(whole)).ok()
    prepared = Path("stages", "prepare-data")
    shutil.copytree(whole / prepared, killed / prepared)  # only training can be killed
    some = random.Random(1).randrange(8, newest_step(whole) * 3 // 5)
    with running(*words(killed), log=tmp_path / "log") as command:
        wait_until(lambda: newest_step(killed) >= some or command.process.poll() is not None, 120)
        family = psutil.Process(command.process.pid).children(recursive=True)
        assert sum("trainer_lib.worker train" in " ".join(command_words(child)) for child in family) >= 2
        command.process.kill()
        assert command.process.wait(45) != 0
    assert psutil.wait_procs(family, timeout=45)[1] == [], "a process outlives the run"
    assert list(killed.glob("stages/train/*/COMMIT.json")) == []
    cli(*words(killed)).ok()
    assert model_digest(killed) == model_digest(whole)
