"""The stages are ordinary Prefect tasks: usable in a user's own flow, with a stage of their own between two."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.serializers import JSONSerializer

from examples.own_flow.flow import count_rows, own_flow
from flows.spec.spec import load_spec
from tasks.configs import TrainConfig
from tasks.prepare_data import prepare_data
from tasks.stage import manifest as _manifests
from tasks.stage.facts import PrepareFacts, TrainFacts
from tasks.stage.runner import StageContext, StageManifest
from tasks.train import train
from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainer_lib.requests import PreparedSplit
from trainer_lib.storage import FileEntry


def test_a_users_flow_with_a_stage_of_its_own(prefect_server: str, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    overrides = ["prepare.launch=in_process", "train.launch=in_process", f"publish.to={hub}"]
    # Without the stage between them, train would look for this split.
    spec = load_spec(project(tmp_path / "project"), [*overrides, "train.train_split=absent"])

    first = own_flow(spec)
    assert (first["rows"], first["trained on"]) == ({"train": 64, "test": 16}, "train")
    assert (first["predicted"], first["metrics"].keys()) == (16, {"test"})
    assert first["published"].startswith(str(hub))
    assert {"README.md", "model.safetensors"} <= {each.name for each in Path(first["published"]).iterdir()}
    _manifests._verified.clear()
    before = sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json")
    assert own_flow(spec) == first
    assert sorted(path for path in Path(spec.storage).rglob("*") if path.name == "COMMIT.json") == before
    assert len([path for path in before if "stages" in path.parts and "checkpoints" not in path.parts]) == 6


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
