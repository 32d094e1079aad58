"""Trackers that `train.args.report_to` names keep their files beside the checkpoints, outside of the stage's result."""

from __future__ import annotations

import json
from pathlib import Path

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
