"""The promise of the README: kill -9 anything, run the same command, get the weights of an uninterrupted run."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.command import command_words
from tests.support.launched import wait_until
from tests.support.repository import ROOT

COMMAND = [
    str(Path(sys.executable).with_name("trainflow")),
    "run",
    str(ROOT / "examples" / "digits" / "pipeline.yaml"),
    "train.args.num_train_epochs=3",
    "train.args.save_steps=4",
    "train.args.warmup_steps=4",
    "train.launch.processes=2",
    "train.eval_split=null",
    "train.args.eval_strategy=no",
    "evaluate.enabled=false",
    "predict.enabled=false",
    "publish.enabled=false",
]


class Pipeline:
    """The command on one storage folder, in a session of its own: a kill meant for it cannot reach the test."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.log = folder / "log"

    def start(self) -> psutil.Popen:
        command = [*COMMAND, f"storage={self.storage}"]
        with self.log.open("ab") as log:
            return psutil.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def newest_step(self) -> int:
        """The newest committed step; 0 before the first."""
        commits = self.storage.glob("stages/train/*/checkpoints/checkpoint-*/COMMIT.json")
        return max((int(commit.parent.name.removeprefix("checkpoint-")) for commit in commits), default=0)

    def model_digest(self) -> str:
        """The SHA-256 of the weights of the one train stage, which is committed."""
        [model] = self.storage.glob("stages/train/*/model/model.safetensors")
        assert (model.parent.parent / "COMMIT.json").exists()
        return hashlib.sha256(model.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    pipeline = Pipeline(tmp_path_factory.mktemp("uninterrupted"))
    assert pipeline.start().wait(600) == 0, pipeline.log.read_text()
    return pipeline


def workers(process: psutil.Process) -> list[psutil.Process]:
    """The two that train, not those that supervise them."""
    words = {child: " ".join(command_words(child)) for child in process.children(recursive=True)}
    supervisors = ("torch.distributed.run", "guard.py")
    return [
        child
        for child, text in words.items()
        if "trainer_lib.worker train" in text and not any(name in text for name in supervisors)
    ]


@pytest.mark.timeout(240)
def test_a_run_killed_in_each_of_its_processes_ends_with_the_weights_of_an_uninterrupted_one(
    uninterrupted: Pipeline, tmp_path: Path
) -> None:
    """A worker: the run resumes by itself. Then the flow: the same command resumes.

    The launcher is killed in tests/distributed/test_launch_nodes.py.
    """
    last, draw = uninterrupted.newest_step(), random.Random(1)
    pipeline = Pipeline(tmp_path)
    prepared = Path("stages", "prepare-data")
    shutil.copytree(uninterrupted.storage / prepared, pipeline.storage / prepared)  # only training can be killed
    process = pipeline.start()

    def training_after(step: int) -> Callable[[], bool]:
        return lambda: pipeline.newest_step() >= step and bool(workers(process))

    wait_until(training_after(draw.randrange(4, last // 4)), 120)
    victim = draw.choice(workers(process))
    victim.kill()
    psutil.wait_procs([victim], timeout=45)
    wait_until(training_after(draw.randrange(last * 3 // 5, last * 3 // 4)), 120)
    family = process.children(recursive=True)
    process.kill()
    assert process.wait(45) != 0
    assert psutil.wait_procs(family, timeout=45)[1] == [], "a process outlives the run"
    assert pipeline.start().wait(600) == 0, pipeline.log.read_text()
    assert pipeline.model_digest() == uninterrupted.model_digest()
