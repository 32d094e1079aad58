"""Trackers that `train.args.report_to` names keep their files beside the checkpoints, outside of the stage's result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import trainflow
from tests.support.runs import ran, run


def test_files_of_trackers_stay_and_are_not_part_of_the_result(folder: Path) -> None:
    reports = ("train.args.report_to=[jsonl, tensorboard]", "train.args.logging_steps=1", "train.args.seed=5")
    result = run(folder, *reports)
    result.raise_for_error()
    outcome = result.outcome("train")
    assert outcome is not None and outcome.manifest is not None
    stage = Path(outcome.manifest["url"])
    steps = [json.loads(line)["step"] for line in (stage / "checkpoints" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 1 and steps == sorted(steps)
    assert any((stage / "checkpoints" / "runs").iterdir())
    committed = {file["path"] for file in json.loads((stage / "COMMIT.json").read_text())["files"]}
    assert not {path for path in committed if "metrics.jsonl" in path or "runs" in path}
    assert ran(run(folder, *reports)) == set()


@pytest.mark.needs("wandb")
def test_wandb_offline_keeps_the_curve_of_a_pipelines_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    settings = (
        "train.args.report_to=wandb",
        "train.args.logging_steps=1",
        "train.args.seed=6",
        "evaluate.enabled=false",
    )
    done = trainflow("run", "pipeline.yaml", "--only", "train", *settings, cwd=folder)
    assert done.code == 0, done.err
    [kept] = (tmp_path / "wandb").rglob("*.wandb")
    content = kept.read_bytes()
    assert content.count(b"train/loss") >= 8 and b"train/learning_rate" in content
