"""A sixth stage is a row of the stage table, its settings, a task and a verb; stages are tasks of a user's own flow."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.serializers import JSONSerializer
from pydantic import Field

from examples.own_flow.flow import count_rows, own_flow
from tests.support.runs import ran, reason, run, spec_of, succeeded
from tests.support.toy import project
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.requests import PreparedSplit, Request
from trainer_lib.storage import FileEntry, Store
from trainflow.flows import stages
from trainflow.flows.cli import presentation
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.stages import Stage
from trainflow.tasks.configs import Launch, LaunchSettings, StageSettings, setting
from trainflow.tasks.keys.keys import StageKey, settings_fields, stage_key
from trainflow.tasks.stage import manifest as _manifests
from trainflow.tasks.stage import progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import PrepareFacts, StageFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import common_fields, launch_request
from trainflow.tasks.tracking.mlflow_run import TrackedRun


# -- the verb: what the worker does -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class CountResult:
    """The file written, and the number of rows in it."""

    files: tuple[FileEntry, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class CountRequest(Request[CountResult], verb="count_rows", result=CountResult):
    """Write down how many rows each split has."""

    rows: dict[str, int]


def count_in_worker(work: Any) -> CountResult:
    request = work.request
    work.events.emit("progress", step=1, max_steps=1, message="counting")
    file = Store.open(request.output).write_bytes("rows.txt", repr(request.rows).encode())
    return CountResult((file,), sum(request.rows.values()))


# -- the task ---------------------------------------------------------------------------------------------------------
class CountConfig(StageSettings):
    """Settings of the sixth stage, its section `count` of the spec."""

    enabled: bool = setting(affects="nothing", default=True)
    splits: list[str] = setting(affects="result", default_factory=list, description="Splits to count; none: all.")
    launch: Launch = setting(affects="nothing", default=LaunchSettings(kind="in_process"))


class SixStagesSpec(PipelineSpec):
    """The pipeline's spec with the section of the sixth stage."""

    count: CountConfig = Field(default=CountConfig(), description="From splits to their number of rows.")


@dataclass(frozen=True)
class CountFacts(StageFacts, stage="count-all-rows"):
    """The number of rows of all splits."""

    rows: int


def count_key(config: CountConfig, context: StageContext, data: StageManifest) -> StageKey:
    recipe = context.resolver.closure(context.recipe, context.root).files
    return stage_key("count-all-rows", {**settings_fields(config, recipe=recipe), "data": data.content_digest})


@stage_task("count-all-rows")
def count_all_rows(
    config: CountConfig, context: StageContext, data: StageManifest[PrepareFacts]
) -> StageManifest[CountFacts]:
    def work(attempt: StageAttempt) -> StageOutput:
        rows = {name: split.rows for name, split in data.facts.splits.items() if name in (config.splits or [name])}
        request = CountRequest(**common_fields(config, context, attempt), rows=rows)
        result = launch_request(request, config.launch, context, attempt)
        return StageOutput(list(result.files), metrics={"counted": result.rows}, facts=CountFacts(result.rows))

    return run_stage(count_key(config, context, data), context, work, retries=config.retries)


def track_count(run: TrackedRun, manifest: StageManifest[CountFacts], ran: bool) -> None:
    run.set_tags({"rows": str(manifest.facts.rows)})


# -- the row ----------------------------------------------------------------------------------------------------------

ROW = Stage(
    name="count-all-rows",
    section="count",
    config=lambda spec: getattr(spec, "count"),  # noqa: B009 - only `SixStagesSpec` has it
    task=f"{__name__}:count_all_rows",
    key=count_key,
    inputs={"data": "prepare-data"},
    places=lambda manifest: {"rows": f"{manifest.url}/rows.txt"},
    track=track_count,
)


@pytest.fixture
def six_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = stages.TABLE[:2], stages.TABLE[2:]
    monkeypatch.setattr(stages, "TABLE", (*before, ROW, *after))
    monkeypatch.setattr("trainflow.flows.spec.spec.PipelineSpec", SixStagesSpec)
    verb = ModuleType("trainer_lib.worker.count_rows")
    verb.run = count_in_worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, verb.__name__, verb)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[count_in_worker.__module__])


def tags_of(result: PipelineResult) -> dict[str, Any]:
    found = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id or "")
    return {**found.data.tags, **found.data.metrics}


@pytest.mark.usefixtures("six_stages")
def test_a_sixth_stage_is_planned_run_tracked_shown_and_cached(folder: Path) -> None:
    planned = Plan.of(spec_of(folder)).reasons
    assert list(planned) == ["prepare-data", "train", "count-all-rows", "evaluate", "predict", "push-to-hub"]
    assert (planned["count-all-rows"].hit, planned["count-all-rows"].reason) == (False, "never run before")

    events: list[dict[str, Any]] = []
    with progress.subscribe(events.append):
        first = succeeded(folder, "tracking.enabled=true")
    assert ran(first) == {"count-all-rows"}, "the other five are committed"
    shown = [event for event in events if event["stage"] == "count-all-rows"]
    assert [event["status"] for event in shown if event["event"] == "stage"] == ["started", "committed"]
    assert [event["message"] for event in shown if event["event"] == "progress"] == ["counting"]

    outcome = first.outcome("count-all-rows")
    assert outcome is not None
    assert Path(outcome.places["rows"]).read_text() == "{'train': 64, 'test': 16}"
    assert any("rows.txt" in line.plain for line in presentation.summary(first, ["trainflow", "ui"]))
    page = Path(first.report_url or "").read_text()
    assert all(text in page for text in ("count-all-rows", "rows.txt", "counted"))
    tracked = tags_of(first)
    assert (tracked["rows"], tracked["count-all-rows/counted"]) == ("80", 80.0)
    assert tracked["trainflow.count-all-rows"] == (outcome.manifest or {})["key"][:16]

    again = run(folder, "tracking.enabled=true")
    assert ran(again) == set()
    assert reason(again, "count-all-rows").startswith("committed ")


@pytest.mark.usefixtures("six_stages")
def test_a_sixth_stage_is_chosen_forced_and_explained_like_the_others(folder: Path) -> None:
    assert ran(run(folder, only="count")) == {"count-all-rows"}
    assert ran(run(folder, force=["count-all-rows"])) == {"count-all-rows"}
    changed = Plan.of(spec_of(folder, "prepare.options.rows=48")).reasons
    assert changed["count-all-rows"].reason.startswith("prepare-data runs first")
    data = {"prepare-data": StageManifest("prepare-data", "", "", "d" * 64)}
    before = Plan.of(spec_of(folder)).key_of("count-all-rows", data)
    (folder / "recipe.py").write_text((folder / "recipe.py").read_text() + "\nMORE = 1\n")
    after = Plan.of(spec_of(folder)).key_of("count-all-rows", data)
    assert after.digest != before.digest
    assert {name for name in before.fields if after.fields[name] != before.fields[name]} == {"recipe"}


@pytest.mark.usefixtures("six_stages")
def test_a_sixth_stage_takes_its_settings_from_the_spec(folder: Path) -> None:
    spec = folder / "pipeline.yaml"
    spec.write_text(spec.read_text() + "\ncount:\n  splits: [test]\n")
    outcome = run(folder, only="count").outcome("count-all-rows")
    assert outcome is not None
    assert Path(outcome.places["rows"]).read_text() == "{'test': 16}"
    why = Plan.of(spec_of(folder, "count.splits=[train]")).reasons
    assert [name for name, each in why.items() if not each.hit and name == "count-all-rows"] == ["count-all-rows"]
    assert "splits" in why["count-all-rows"].reason
    assert "count-all-rows" not in Plan.of(spec_of(folder, "count.enabled=false")).reasons
    with pytest.raises(ConfigError, match="splits") as caught:
        spec_of(folder, "count.split=[test]")
    assert caught.value.field == "count.split"


# -- in a user's own flow ---------------------------------------------------------------------------------------------
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


def test_manifests_pass_through_prefects_json_results(prefect_server: str, tmp_path: Path) -> None:
    context = StageContext(name="mine", recipe="recipe.py", storage=str(tmp_path))
    split = PreparedSplit(3, ("data/train/00000.arrow",), {"x": "float32"})
    facts, files = PrepareFacts({"train": split}), (FileEntry("a", 1, "s"),)
    data = StageManifest("prepare-data", "k", "u", "d", files, {"rows": 3}, facts)
    counted = count_rows.fn(context, data)
    serializer = JSONSerializer()
    for manifest in (data, counted):
        assert serializer.loads(serializer.dumps(manifest)) == manifest
