"""The promise of the README: kill -9 anything, run the same command, get the weights of an uninterrupted run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.chaos import Pipeline, kill_once
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
@pytest.mark.parametrize("victim", ["worker", "launcher", "flow"])
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    victim: str, uninterrupted: Pipeline, tmp_path: Path
) -> None:
    last = uninterrupted.newest_step()
    pipeline = Pipeline(str(SPEC), tmp_path / "storage", SMALL, tmp_path / "log")
    pipeline.take_prepared_data(uninterrupted)
    kill = kill_once(pipeline, victim, after_step=random.Random(victim).randrange(4, last - 8), pause_s=0.05)
    assert kill.alive_after_kill == 0
    assert kill.digest == uninterrupted.model_digest()
    if victim == "flow":
        assert kill.commands == 2  # the kill hit a run in progress
