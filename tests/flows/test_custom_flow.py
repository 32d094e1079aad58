"""The stages are ordinary Prefect tasks: usable in a user's own flow, with a stage of their own between two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.serializers import JSONSerializer

from flows.spec.spec import load_spec
from tasks.configs import TrainConfig
from tasks.evaluate import evaluate
from tasks.prepare_data import prepare_data
from tasks.stage import manifest as _manifests
from tasks.stage.facts import PrepareFacts, StageFacts, TrainFacts
from tasks.stage.runner import StageAttempt, StageContext, StageManifest, StageOutput, run_stage, stage_key
from tasks.stage.task import stage_task
from tasks.train import train
from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainer_lib.requests import PreparedSplit
from trainer_lib.storage import FileEntry


@dataclass(frozen=True)
class RowFacts(StageFacts, stage="count-rows"):
    """What the stage below states about its result."""

    largest: str


@stage_task("count-rows")
def count_rows(context: StageContext, data: StageManifest[PrepareFacts]) -> StageManifest[RowFacts]:
    """A sixth stage: committed, verified and cached like the others."""

    def work(attempt: StageAttempt) -> StageOutput:
        rows = {name: split.rows for name, split in data.facts.splits.items()}
        file = attempt.store.write_bytes("rows.txt", repr(rows).encode())
        return StageOutput([file], metrics=rows, facts=RowFacts(max(rows, key=rows.__getitem__)))

    return run_stage(stage_key("count-rows", {"data": data.content_digest}), context, work)


def test_a_users_flow_with_a_stage_of_its_own(prefect_server: str, tmp_path: Path) -> None:
    overrides = ["prepare.launch=in_process", "train.launch=in_process"]
    spec = load_spec(project(tmp_path / "project"), overrides)

    @flow(name="mine")
    def mine() -> dict[str, Any]:
        context = StageContext(name="mine", recipe=spec.recipe, storage=spec.storage)
        data = prepare_data(spec.prepare, context)
        rows = count_rows.submit(context, data)
        model = train.with_options(retries=1)(spec.train, context, data)
        metrics = evaluate.submit(spec.evaluate_config(), context, data, model)
        counted = rows.result()
        return {"rows": counted.metrics, "largest": counted.facts.largest, "error": metrics.result().metrics["test"]}

    first = mine()
    assert (first["rows"], first["largest"]) == ({"train": 64, "test": 16}, "train")
    _manifests._verified.clear()
    before = sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json")
    assert mine() == first
    assert sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json") == before
    assert len([path for path in before if "stages" in path.parts and "checkpoints" not in path.parts]) == 4


def test_a_stage_runs_alone(prefect_server: str, tmp_path: Path) -> None:
    spec = load_spec(project(tmp_path / "project"), ["prepare.launch=in_process"])
    manifest = prepare_data(spec.prepare, StageContext(name="mine", recipe=spec.recipe, storage=spec.storage))
    assert manifest.facts.info == {"slope": 2.0}
    assert manifest.metrics == {"train_rows": 64, "test_rows": 16}


def test_manifests_pass_through_prefects_json_results(prefect_server: str, tmp_path: Path) -> None:
    context = StageContext(name="mine", recipe="recipe.py", storage=str(tmp_path))
    split = PreparedSplit(3, ("data/train/00000.arrow",), {"x": "float32"})
    facts, files = PrepareFacts({"train": split}), (FileEntry("a", 1, "s"),)
    data = StageManifest("prepare-data", "k", "u", "d", files, {"rows": 3}, facts)
    counted = count_rows.fn(context, data)
    serializer = JSONSerializer()
    for manifest in (data, counted):
        assert serializer.loads(serializer.dumps(manifest)) == manifest


def test_a_manifest_of_another_stage_is_refused(tmp_path: Path) -> None:
    context = StageContext(name="mine", recipe="recipe.py", storage=str(tmp_path))
    wrong: StageManifest = StageManifest("train", "k", "u", "d", facts=TrainFacts())
    with pytest.raises(ConfigError, match="The manifest of prepare-data is needed here"):
        train.fn(TrainConfig(), context, wrong)
