"""The stages are ordinary Prefect tasks: usable in a user's own flow, with a stage of their own between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from flows.spec.spec import load_spec
from tasks.evaluate import evaluate
from tasks.prepare_data import prepare_data
from tasks.stage import manifest as _manifests
from tasks.stage.runner import StageContext, StageOutput, run_stage, stage_key
from tasks.stage.task import stage_task
from tasks.train import train
from tests.support.toy import project


@stage_task("count-rows")
def count_rows(storage: str, data: dict[str, Any]) -> dict[str, Any]:
    """A sixth stage: committed, verified and cached like the others."""

    def work(context: StageContext) -> StageOutput:
        rows = {name: split["rows"] for name, split in data["meta"]["splits"].items()}
        return StageOutput([context.store.write_bytes("rows.txt", repr(rows).encode())], metrics=rows)

    return run_stage(stage_key("count-rows", {"data": data["content_digest"]}), storage, work)


def test_a_users_flow_with_a_stage_of_its_own(prefect_server: str, tmp_path: Path) -> None:
    overrides = ["prepare.launch=in_process", "train.launch=in_process"]
    spec = load_spec(project(tmp_path / "project"), overrides)

    @flow(name="mine")
    def mine() -> dict[str, Any]:
        recipe, storage = spec.recipe, spec.storage
        data = prepare_data(spec.prepare, recipe=recipe, storage=storage)
        rows = count_rows.submit(storage, data)
        model = train.with_options(retries=1)(spec.train, recipe=recipe, storage=storage, data=data)
        metrics = evaluate(spec.evaluate_config(), recipe=recipe, storage=storage, data=data, model=model)
        return {"rows": rows.result()["metrics"], "error": metrics["metrics"]["test"]["error"]}

    first = mine()
    assert first["rows"] == {"train": 64, "test": 16}
    _manifests._verified.clear()
    before = sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json")
    assert mine() == first
    assert sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json") == before
    assert len([path for path in before if "stages" in path.parts and "checkpoints" not in path.parts]) == 4


def test_a_stage_runs_alone(prefect_server: str, tmp_path: Path) -> None:
    spec = load_spec(project(tmp_path / "project"), ["prepare.launch=in_process"])
    manifest = prepare_data(spec.prepare, recipe=spec.recipe, storage=spec.storage)
    assert manifest["meta"]["info"] == {"slope": 2.0}
    assert manifest["metrics"] == {"train_rows": 64, "test_rows": 16}
