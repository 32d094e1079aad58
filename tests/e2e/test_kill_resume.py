"""The promise of the README: kill -9 anything, run the same command, get the weights of an uninterrupted run."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support.chaos import Pipeline, kill_in_turn
from tests.support.repository import ROOT

SPEC = ROOT / "examples" / "digits" / "pipeline.yaml"
SMALL = (
    "train.args.num_train_epochs=3",
    "train.args.save_steps=4",
    "train.args.warmup_steps=4",
    "train.launch.processes=2",
    "train.eval_split=null",
    "train.args.eval_strategy=no",
    "evaluate.enabled=false",
    "predict.enabled=false",
    "publish.enabled=false",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    pipeline = Pipeline(str(SPEC), folder / "storage", SMALL, folder / "log")
    assert pipeline.finish() == 0, pipeline.log.read_text()
    return pipeline


@pytest.mark.timeout(240)
def test_a_run_killed_in_each_of_its_processes_ends_with_the_weights_of_an_uninterrupted_one(
    uninterrupted: Pipeline, tmp_path: Path
) -> None:
    """A worker, then the launcher: the run goes on by itself. Then the flow: the same command goes on."""
    last, draw = uninterrupted.newest_step(), random.Random(1)
    moments = {
        "worker": draw.randrange(4, last // 4),
        "launcher": draw.randrange(last // 3, last // 2),
        "flow": draw.randrange(last * 3 // 5, last * 3 // 4),
    }
    pipeline = Pipeline(str(SPEC), tmp_path / "storage", SMALL, tmp_path / "log")
    pipeline.take_prepared_data(uninterrupted)
    kill = kill_in_turn(pipeline, moments)
    assert kill.alive_after_kill == 0
    assert kill.digest == uninterrupted.model_digest()
    assert kill.commands == 2  # the last kill hit a run in progress
    said = pipeline.log.read_text()
    lost = ("Rank [01] was killed by SIGKILL", "The (launcher|guard process) was killed by SIGKILL")
    for how in (*lost, "continues from step"):
        assert re.search(how, said), said
