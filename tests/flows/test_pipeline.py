"""The whole flow on a toy: what runs, what does not, why, and what is left when it fails."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import run_pipeline
from flows.results import STAGES, PipelineResult
from flows.spec import PipelineSpec, load_spec
from flows.why import explain
from tasks import _launching, _manifests, _progress
from tasks._manifests import StageManifest
from tests.support.toy import RECIPE, project
from trainer_lib.errors import CodeError, ConfigError, DataError, Interrupted

IN_PROCESS = ("prepare.launch=in_process", "train.launch=in_process")
ALL = set(STAGES)
AFTER_TRAIN = ALL - {"prepare-data"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A project that has run once; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "project"
    result = run_pipeline(load_spec(project(folder), (*IN_PROCESS, "tracking.enabled=true")))
    result.raise_for_error()
    assert ran(result) == ALL
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    _manifests._verified.clear()  # as in a new process
    shutil.copytree(finished, tmp_path / "project")
    return tmp_path / "project"


def spec_of(folder: Path, *overrides: str) -> PipelineSpec:
    return load_spec(folder / "pipeline.yaml", (*IN_PROCESS, *overrides))


def run(folder: Path, *overrides: str, **how: Any) -> PipelineResult:
    return run_pipeline(spec_of(folder, *overrides), **how)


def ran(result: PipelineResult) -> set[str]:
    return {outcome.stage for outcome in result.stages if outcome.status == "ran"}


def reason(result: PipelineResult, stage: str) -> str:
    outcome = result.outcome(stage)
    assert outcome is not None
    return outcome.reason


def stage_folder(folder: Path, stage: str) -> Path:
    [found] = (folder / "store" / "stages" / stage).iterdir()
    return found


def test_an_unchanged_spec_starts_nothing(folder: Path) -> None:
    told: list[dict[str, Any]] = []
    [report] = folder.glob("store/runs/*/report.html")
    before = report.read_text()
    with _progress.subscribe(told.append):
        result = run(folder)
    assert [outcome.status for outcome in result.stages] == ["cached"] * 5
    assert report.read_text() == before  # it still tells of the run that did the work
    assert result.report_url == str(report)
    assert {event["status"] for event in told} == {"cached"}
    assert all(one.hit for one in explain(spec_of(folder)))


@pytest.mark.parametrize(
    "override", ["train.args.logging_steps=3", "train.args.save_steps=3", "train.launch.threads=2", "train.retries=1"]
)
def test_settings_that_change_no_result_run_nothing(folder: Path, override: str) -> None:
    assert ran(run(folder, override)) == set()


def test_the_same_global_batch_cut_up_otherwise_runs_nothing(folder: Path) -> None:
    assert ran(run(folder, "train.args.per_device_train_batch_size=2")) == set()


def test_a_training_argument_runs_train_and_what_follows_but_not_prepare(folder: Path) -> None:
    planned = {one.stage: one for one in explain(spec_of(folder, "train.args.learning_rate=1e-2"))}
    assert str(planned["train"].differences[0]) == "args.learning_rate: 0.05 -> 0.01"
    result = run(folder, "train.args.learning_rate=1e-2")
    assert ran(result) == AFTER_TRAIN
    assert reason(result, "train") == "args.learning_rate: 0.05 -> 0.01"
    assert reason(result, "evaluate").startswith("model changed")
    assert ran(run(folder)) == set()  # the earlier result is still there


def test_prepares_options_run_everything(folder: Path) -> None:
    result = run(folder, "prepare.options.rows=48")
    assert ran(result) == ALL
    assert reason(result, "prepare-data") == "options.rows: 64 -> 48"
    assert reason(result, "train").startswith("data changed")


@pytest.mark.parametrize("stage", STAGES)
def test_deleting_one_stage_runs_that_stage_only(folder: Path, stage: str) -> None:
    shutil.rmtree(folder / "store" / "stages" / stage)
    if stage == "push-to-hub":
        shutil.rmtree(folder / "store" / "hub")
    result = run(folder)
    assert ran(result) == {stage}  # what it makes is the same, bit for bit: what follows is kept
    assert reason(result, stage) == "never run before"


@pytest.mark.parametrize(
    ("stage", "pattern"),
    [
        ("prepare-data", "data/train/*.arrow"),
        ("train", "model/model.safetensors"),
        ("evaluate", "metrics.json"),
        ("predict", "predictions/test/*.parquet"),
    ],
)
def test_truncating_one_file_runs_its_stage_again_and_names_the_file(folder: Path, stage: str, pattern: str) -> None:
    [file, *_] = sorted(stage_folder(folder, stage).glob(pattern))
    file.write_bytes(file.read_bytes()[:-1])
    planned = {one.stage: one for one in explain(spec_of(folder))}
    assert file.name in planned[stage].reason
    result = run(folder)
    assert ran(result) == {stage}
    assert "damaged" in reason(result, stage)
    assert file.name in reason(result, stage)


def test_an_edited_line_of_the_recipe_runs_all_and_a_comment_none(folder: Path) -> None:
    recipe = folder / "recipe.py"
    recipe.write_text("# a comment\n" + recipe.read_text())
    assert ran(run(folder)) == set()
    recipe.write_text(recipe.read_text().replace("abs(p.predictions", "2 * abs(p.predictions"))
    result = run(folder)
    assert {"prepare-data", "train", "evaluate", "predict"} <= ran(result)
    assert reason(result, "train") == "recipe.recipe.py changed"


def test_a_stage_with_its_own_recipe_is_edited_alone(folder: Path) -> None:
    own = folder / "metrics.py"
    own.write_text(RECIPE)
    assert ran(run(folder, f"evaluate.recipe={own}")) <= {"evaluate", "push-to-hub"}
    own.write_text(RECIPE.replace("abs(p.predictions", "2 * abs(p.predictions"))
    result = run(folder, f"evaluate.recipe={own}")
    assert ran(result) == {"evaluate", "push-to-hub"}
    assert reason(result, "evaluate") == "recipe.metrics.py changed"


def test_force_runs_a_stage_again(folder: Path) -> None:
    result = run(folder, force=["evaluate"])
    assert ran(result) == {"evaluate"}
    assert reason(result, "evaluate") == "forced"


def test_one_stage_alone_and_a_later_start(folder: Path) -> None:
    only = run(folder, "predict.rows_per_file=3", only="predict")
    assert ran(only) == {"predict"}
    assert {outcome.stage for outcome in only.stages} == ALL
    later = run(folder, "evaluate.splits=[train, test]", start="evaluate")
    assert ran(later) == {"evaluate", "push-to-hub"}


def test_only_and_start_demand_what_comes_before(folder: Path) -> None:
    result = run(folder, "train.args.seed=5", only="evaluate")
    assert isinstance(result.error, ConfigError)
    assert (result.error.field, result.error.value) == ("--only", "evaluate")
    assert "train" in result.error.message
    unknown = run(folder, start="trian")
    assert isinstance(unknown.error, ConfigError)
    assert unknown.error.field == "--from"


def test_stages_that_are_switched_off_are_left_out(folder: Path) -> None:
    result = run(folder, "predict.enabled=false", "evaluate.enabled=false", "train.args.seed=9")
    assert ran(result) == {"train", "push-to-hub"}
    assert reason(result, "predict") == "switched off in the spec"


def broken(folder: Path, old: str, new: str) -> None:
    recipe = folder / "recipe.py"
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "stage", "kind", "words"),
    [
        ('out.info["slope"] = 2.0', "raise KeyError('no such column')", "prepare-data", CodeError, "no such column"),
        ("points(rows, 0)", "points(0, 0)", "prepare-data", DataError, "train"),
        ('"x": [x]', '"x": [float("nan")]', "prepare-data", DataError, "x"),
        ("y = self.linear(x.float())", "raise ValueError('wrong shape')", "train", CodeError, "wrong shape"),
        ('return {"error"', 'return {"error": 1 / 0, "e"', "evaluate", CodeError, "division by zero"),
    ],
)
def test_a_failure_comes_back_typed_and_leaves_nothing_that_counts_as_done(
    folder: Path, old: str, new: str, stage: str, kind: type[Exception], words: str
) -> None:
    broken(folder, old, new)
    shutil.rmtree(folder / "store")
    result = run(folder)
    assert type(result.error) is kind
    assert words in str(result.error)
    failed = STAGES.index(stage)
    statuses = [outcome.status for outcome in result.stages]
    assert statuses == ["ran"] * failed + ["failed"] + ["skipped"] * (4 - failed)
    assert not list((folder / "store" / "stages" / stage).glob("*/COMMIT.json"))
    assert Path(result.report_url or "").is_file()
    with pytest.raises(kind):
        result.raise_for_error()
    json.dumps(result.to_dict())


def test_a_storage_that_cannot_be_written_is_bad_input(folder: Path) -> None:
    result = run(folder, "storage=/proc/nowhere")
    assert isinstance(result.error, ConfigError)
    assert result.error.field == "storage"


def test_the_run_folder_holds_what_another_machine_needs(folder: Path) -> None:
    [run_folder] = (folder / "store" / "runs").iterdir()
    assert (run_folder / "source" / "recipe.py").read_text() == (folder / "recipe.py").read_text()
    assert load_spec(run_folder / "spec.yaml", IN_PROCESS).name == "toy"
    assert "<html" in (run_folder / "report.html").read_text()


def test_ctrl_c_passes_through_and_the_next_run_continues(folder: Path) -> None:
    shutil.rmtree(folder / "store" / "stages" / "evaluate")

    def interrupt(event: dict[str, Any]) -> None:
        if event["stage"] == "evaluate" and event.get("status") == "started":
            raise KeyboardInterrupt

    with _progress.subscribe(interrupt), pytest.raises(KeyboardInterrupt):
        run(folder)
    assert ran(run(folder)) == {"evaluate"}


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_the_same_code_runs_on_other_stores(
    s3_server: object, folder: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    first = run(folder, f"storage={url}/store")
    first.raise_for_error()
    assert ran(first) == ALL
    assert ran(run(folder, f"storage={url}/store")) == set()
    manifests = {outcome.stage: StageManifest.from_dict(outcome.manifest or {}) for outcome in first.stages}
    local = StageManifest.from_dict(run(folder).outcome("train").manifest or {})  # type: ignore[union-attr]
    assert manifests["train"].content_digest == local.content_digest
    manifests["predict"].store().delete(manifests["predict"].files[0].path)
    _manifests._verified.clear()
    assert ran(run(folder, f"storage={url}/store")) == {"predict"}


# -- MLflow -----------------------------------------------------------------------------------------------------------


def tracked(folder: Path, *overrides: str) -> PipelineResult:
    return run(folder, "tracking.enabled=true", *overrides)


def mlflow_run(result: PipelineResult) -> Any:
    from mlflow import MlflowClient

    assert result.mlflow_run_id is not None
    return MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id)


def test_one_mlflow_run_per_pipeline_run(folder: Path) -> None:
    first = tracked(folder)
    assert ran(first) == set()
    whole = mlflow_run(first)  # nothing ran: the finished run stands for it
    assert whole.info.status == "FINISHED"
    assert {"loss", "test_error"} <= set(whole.data.metrics)

    other = tracked(folder, "train.args.learning_rate=1e-2")
    assert other.mlflow_run_id != first.mlflow_run_id
    assert {"loss", "test_error"} <= set(mlflow_run(other).data.metrics)
    partly = tracked(folder, "train.args.learning_rate=1e-2", "predict.rows_per_file=5")
    assert mlflow_run(partly).data.tags["trainflow.origin_run"] == other.mlflow_run_id
    assert "test_error" in mlflow_run(partly).data.metrics  # of a cached stage

    shutil.rmtree(folder / "store" / "runs")
    shown = tracked(folder)  # everything is cached, but no run is known that shows it
    assert ran(shown) == set()
    assert mlflow_run(shown).data.tags["trainflow.origin_run"] == first.mlflow_run_id


def test_a_failed_run_is_failed_and_taken_up_again(folder: Path) -> None:
    recipe = (folder / "recipe.py").read_text()
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    failed = tracked(folder)
    assert mlflow_run(failed).info.status == "FAILED"
    again = tracked(folder)
    assert again.mlflow_run_id == failed.mlflow_run_id  # the same spec and code: the same run goes on
    (folder / "recipe.py").write_text(recipe)
    assert mlflow_run(tracked(folder)).info.status == "FINISHED"


def test_ctrl_c_ends_the_mlflow_run_as_killed(folder: Path) -> None:
    shutil.rmtree(folder / "store" / "stages" / "evaluate")
    spec = spec_of(folder, "tracking.enabled=true")

    def interrupt(event: dict[str, Any]) -> None:
        if event["stage"] == "evaluate" and event.get("status") == "started":
            raise KeyboardInterrupt

    with _progress.subscribe(interrupt), pytest.raises(KeyboardInterrupt):
        run_pipeline(spec)
    [path] = (folder / "store" / "runs").glob("*/run.json")
    record = json.loads(path.read_text())
    assert record["status"] == "KILLED"
    result = tracked(folder)
    assert result.mlflow_run_id == record["mlflow_run_id"]
    assert mlflow_run(result).info.status == "FINISHED"


# -- retries ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_started_again(folder: Path) -> None:
    once = f"__import__('pathlib').Path({str(folder / 'once')!r})"
    kill = f"{once}.exists() or ({once}.touch(), __import__('os').kill(__import__('os').getpid(), 9))"
    broken(folder, 'out.info["slope"] = 2.0', f'out.info["slope"] = 2.0\n    {kill}')
    result = run_pipeline(load_spec(folder / "pipeline.yaml", ["prepare.options.rows=9"]), only="prepare")
    result.raise_for_error()
    manifest = StageManifest.from_dict(result.stages[0].manifest or {})
    assert manifest.meta["attempt"] == 2
    record = json.loads(Path(manifest.url, "attempts", "0001.end.json").read_text())
    assert record["error"]["class"] == "InfrastructureError"
    assert "SIGKILL" in record["error"]["message"]
    assert record["decision"] == "retry 1 of 3"


def test_when_memory_runs_out_the_same_training_is_done_in_smaller_pieces(folder: Path) -> None:
    check = "assert not self.training or len(x) <= 2 or exhausted()\n            y = self.linear"
    broken(folder, "y = self.linear", check)
    broken(
        folder,
        "def compute_metrics",
        "def exhausted():\n    raise MemoryError('too many rows')\n\n\ndef compute_metrics",
    )
    result = tracked(folder, "evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")
    result.raise_for_error()
    trained = StageManifest.from_dict(result.outcome("train").manifest or {})  # type: ignore[union-attr]
    assert (trained.meta["rung"], trained.meta["attempt"]) == (2, 3)
    assert (trained.meta["global_step"], trained.meta["global_samples"]) == (8, 64)
    assert "halved 2 times" in mlflow_run(result).data.tags["trainflow.train.rung"]
    assert ran(tracked(folder, "evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")) == set()


# -- in processes of their own ----------------------------------------------------------------------------------------


def test_the_stages_run_in_processes_of_their_own_and_only_there_is_torch(folder: Path) -> None:
    lines: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "line":
            lines.append(event["message"])

    broken(folder, "return Line()", "import os\n\n    print('worker', os.getpid(), os.getppid())\n    return Line()")
    with _progress.subscribe(listen):
        result = run_pipeline(load_spec(folder / "pipeline.yaml", ["evaluate.enabled=false", "predict.enabled=false"]))
    result.raise_for_error()
    manifest = StageManifest.from_dict(result.stages[1].manifest or {})
    assert manifest.meta["global_step"] == 8
    assert any(line.startswith("worker") for line in lines)


def test_a_cancel_in_prefects_ui_stops_the_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run
    from prefect.states import Cancelling

    monkeypatch.setattr(_launching, "_ASK_EVERY_S", 0.1)
    broken(folder, "x = draw.uniform(-1, 1)", "x = draw.uniform(-1, 1) * (__import__('time').sleep(1) is None)")
    asked: list[str] = []

    def cancel(event: dict[str, Any]) -> None:
        if event["event"] == "start" and not asked:
            asked.append(flow_run.id or "")
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(uuid.UUID(flow_run.id), Cancelling())

    with _progress.subscribe(cancel):
        result = run_pipeline(load_spec(folder / "pipeline.yaml", ["prepare.options.rows=7"]))
    assert isinstance(result.error, Interrupted)
    assert [outcome.status for outcome in result.stages] == ["failed"] + ["skipped"] * 4
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(uuid.UUID(asked[0])).state
    assert state is not None
    assert state.is_cancelled()
