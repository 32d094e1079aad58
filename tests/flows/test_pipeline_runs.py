"""What a run leaves behind when it fails, is stopped, is retried, is tracked, and works on other stores."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelling

from tests.support.command import trainflow
from tests.support.mlflow_store import client, fresh_store, points, runs
from tests.support.runs import ALL, artifacts_of, broken, newest_flow_run, newest_state, ran, reason, run, spec_of
from tests.support.toy import project
from trainer_lib.errors import CodeError, ConfigError, Interrupted
from trainer_lib.storage import Store
from trainflow.flows.following import change_mixture
from trainflow.flows.pipeline import run_pipeline
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import list_runs
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports import run_record
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.model.model_lineage import describe_lineage
from trainflow.tasks.prefect import prefect_client
from trainflow.tasks.prefect.prefect_client import quick_client
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest

PATIENCE_S = 60.0


def test_a_mistake_before_the_first_training_step_leaves_no_run_in_mlflow(folder: Path) -> None:
    known = len(runs(f"sqlite:///{folder / 'store' / 'mlflow.db'}"))
    broken(folder, "y = self.linear(x)", "raise ValueError('wrong shape')")
    failed = run(folder, "tracking.enabled=true", "train.args.seed=77")
    assert isinstance(failed.error, CodeError)
    assert (failed.mlflow_run_id, failed.mlflow_waiting) == (None, None)
    assert len(runs(f"sqlite:///{folder / 'store' / 'mlflow.db'}")) == known


def test_the_same_code_runs_on_s3_and_leaves_no_credentials_there(folder: Path, s3_url: str) -> None:
    first = run(folder, f"storage={s3_url}/store")
    first.raise_for_error()
    assert ran(first) == ALL
    assert ran(run(folder, f"storage={s3_url}/store")) == set()
    manifests = {outcome.stage: StageManifest.from_dict(outcome.manifest or {}) for outcome in first.stages}
    local = StageManifest.from_dict(run(folder).outcome("train").manifest or {})  # type: ignore[union-attr]
    assert manifests["train"].content_digest == local.content_digest
    manifests["predict"].store().delete(manifests["predict"].files[0].path)
    assert ran(run(folder, f"storage={s3_url}/store")) == {"predict"}
    store, secret = Store.open(s3_url), os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert [info.path for info in store.list() if secret in store.read_bytes(info.path)] == []


# -- MLflow -----------------------------------------------------------------------------------------------------------
def tracked(folder: Path, *overrides: str) -> PipelineResult:
    return run(folder, "tracking.enabled=true", *overrides)


def mlflow_run(result: PipelineResult) -> Any:
    assert result.mlflow_run_id is not None
    return MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id)


def test_a_committed_training_says_that_no_tracker_gets_it(folder: Path) -> None:
    warned = Plan.of(spec_of(folder, "train.args.report_to=[mlflow, wandb]")).warnings["train"]
    assert [each.partition(",")[0] for each in warned] == ["Nothing is logged to wandb (train.args.report_to)"]
    assert Plan.of(spec_of(folder, "train.args.report_to=[mlflow, jsonl]")).warnings["train"] == []


def test_one_mlflow_run_per_pipeline_run(folder: Path) -> None:
    first = tracked(folder)
    assert ran(first) == set()
    whole = mlflow_run(first)  # nothing ran: the finished run stands for it
    assert whole.info.status == "FINISHED"
    assert {"train/loss", "test/error"} <= set(whole.data.metrics)

    other = tracked(folder, "train.args.learning_rate=1e-2")
    assert other.mlflow_run_id != first.mlflow_run_id
    assert {"train/loss", "test/error"} <= set(mlflow_run(other).data.metrics)
    partly = tracked(folder, "train.args.learning_rate=1e-2", "predict.rows_per_file=5")
    assert mlflow_run(partly).data.tags["trainflow.origin_run"] == other.mlflow_run_id
    assert "test/error" in mlflow_run(partly).data.metrics  # of a cached stage
    again = tracked(folder, "train.args.learning_rate=1e-2", "predict.rows_per_file=5")
    curves = [points(str(each.tracking_uri), each.mlflow_run_id or "", "train/loss") for each in (other, partly, again)]
    assert len(curves[0]) > 1
    assert curves[0] == curves[1] == curves[2], "of a cached training, once"

    shutil.rmtree(folder / "store" / "runs")
    shown = tracked(folder)  # everything is cached, but no run is known that shows it
    assert ran(shown) == set()
    assert mlflow_run(shown).data.tags["trainflow.origin_run"] == first.mlflow_run_id


def test_prefect_mlflow_and_the_report_show_the_name_of_a_run_and_how_it_went(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What nothing waits for takes longer on a busy machine than a run would grant it.
    monkeypatch.setattr(run_record, "LIMIT_S", PATIENCE_S)
    monkeypatch.setattr(prefect_client, "quick_client", lambda: quick_client(PATIENCE_S))
    result = tracked(folder, "train.args.learning_rate=1e-2")
    shown, in_prefect = mlflow_run(result), newest_flow_run()
    assert result.run_name == shown.info.run_name == in_prefect.name == "toy-lr0.01-2"

    goodput = shown.data.metrics["train/goodput"]
    assert 0 < goodput <= 1
    text = Path(result.report_url or "").read_text()
    assert f"{goodput:.1%} of " in text
    assert "Where the time of training went" in text

    ended = {f"{stage}-progress" for stage in ran(result)}
    wanted = {"summary", "loss", *ended}

    def is_complete(found: Mapping[str, Any]) -> bool:
        return wanted <= set(found) and all(found[key].data == 100 for key in ended)

    found = artifacts_of(in_prefect.id)
    deadline = time.monotonic() + PATIENCE_S
    while not is_complete(found) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = artifacts_of(in_prefect.id)
    assert {key: found[key].data for key in ended} == dict.fromkeys(ended, 100)
    assert set(found) == wanted
    assert found["train-progress"].description.startswith("step 8/8, loss ")
    kinds = {key: found[key].type for key in ("summary", "loss", "train-progress")}
    assert kinds == {"summary": "markdown", "loss": "image", "train-progress": "progress"}
    assert str(result.mlflow_run_id) in found["summary"].data
    assert "| error |" in found["summary"].data
    assert found["loss"].data.startswith("data:image/svg+xml;base64,")


def test_a_failed_run_is_failed_and_taken_up_again(folder: Path) -> None:
    # Prefect writes the exception that ends a flow, whatever the flow persists, by default as a pickle in base64.
    results = Path(get_current_settings().results.local_storage_path)
    recipe, before = (folder / "recipe.py").read_text(), set(results.rglob("*"))
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    failed = tracked(folder)
    written = [path for path in set(results.rglob("*")) - before if path.is_file()]
    assert [json.loads(path.read_bytes())["__exc_type__"] for path in written] == ["trainer_lib.errors.CodeError"]
    assert mlflow_run(failed).info.status == "FAILED"
    tags = mlflow_run(failed).data.tags
    assert (tags["trainflow.failed_stage"], "division by zero" in tags["trainflow.failure"]) == ("evaluate", True)
    assert "trainflow resume" in tags["mlflow.note.content"]
    past = list_runs(str(folder / "store"))[0]
    assert (past.status, past.failed, past.mlflow_run_id) == ("FAILED", "evaluate", failed.mlflow_run_id)
    assert list(past.stages) == ["prepare-data", "train", "predict"]
    assert tracked(folder).mlflow_run_id == failed.mlflow_run_id  # the same spec and code: the same run resumes
    (folder / "recipe.py").write_text(recipe)
    assert mlflow_run(tracked(folder)).info.status == "FINISHED"


def test_a_damaged_publication_is_seen_by_why_and_made_again_in_an_mlflow_run_that_names_it(folder: Path) -> None:
    first = tracked(folder)
    [published] = (folder / "store" / "hub" / "toy" / "revisions").iterdir()
    (published / "README.md").write_text("short")
    [planned] = [each for each in Plan.of(spec_of(folder)).reasons.values() if not each.hit]
    result = tracked(folder)
    assert ran(result) == {planned.stage} == {"push-to-hub"}
    assert reason(result, "push-to-hub") == planned.reason
    assert "is gone, or not as it was published" in planned.reason
    assert result.mlflow_run_id != first.mlflow_run_id
    shown = mlflow_run(result)
    [again] = [each for each in published.parent.iterdir() if each != published]
    assert shown.info.status == "FINISHED"
    assert shown.data.tags["trainflow.published_revision"] == again.name
    assert shown.data.tags["trainflow.origin_run"] == first.mlflow_run_id
    assert tracked(folder).mlflow_run_id == result.mlflow_run_id


def test_ctrl_c_passes_through_ends_the_mlflow_run_as_killed_and_the_next_run_continues(folder: Path) -> None:
    shutil.rmtree(folder / "store" / "stages" / "evaluate")
    spec = spec_of(folder, "tracking.enabled=true")

    def interrupt(event: dict[str, Any]) -> None:
        if event["stage"] == "evaluate" and event.get("status") == "started":
            raise KeyboardInterrupt

    with _progress.subscribe(interrupt), pytest.raises(KeyboardInterrupt):
        run_pipeline(spec)
    assert newest_state() == "Cancelled"
    [path] = (folder / "store" / "runs").glob("*/run.json")
    record = json.loads(path.read_text())
    assert record["status"] == "KILLED"
    result = tracked(folder)
    assert (ran(result), newest_state()) == ({"evaluate"}, "Completed")
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
    assert manifest.attempt == 2
    record = json.loads(Path(manifest.url, "attempts", "0001.end.json").read_text())
    assert record["error"]["class"] == "InfrastructureError"
    assert "SIGKILL" in record["error"]["message"]
    assert record["decision"] == "retry 1 of 3"


def test_when_memory_runs_out_the_same_training_is_done_in_smaller_pieces(folder: Path) -> None:
    check = "assert not self.training or len(x) <= 2 or exhausted()\n            y = self.linear"
    exhausted = "def exhausted():\n    raise MemoryError('too many rows')\n\n\n"
    broken(folder, "y = self.linear", check)
    broken(folder, "def compute_metrics", f"{exhausted}def compute_metrics")
    # A size that is given is not the Trainer's to halve.
    off = [f"{stage}.enabled=false" for stage in ("evaluate", "predict", "publish")]
    chosen = ["train.args.per_device_train_batch_size=8", *off]
    result = tracked(folder, *chosen)
    result.raise_for_error()
    trained = StageManifest.from_dict(result.outcome("train").manifest or {})  # type: ignore[union-attr]
    assert (trained.batch_halvings, trained.attempt) == (2, 3)
    assert (trained.facts.global_step, trained.facts.global_samples) == (8, 64)
    assert "halved 2 times" in mlflow_run(result).data.tags["trainflow.train.batch_halvings"]
    assert ran(tracked(folder, *chosen)) == set()


# -- in processes of their own ----------------------------------------------------------------------------------------
def test_a_cancel_in_prefects_ui_stops_the_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_client, "EVERY_S", 0.1)
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


# -- the loss is drawn whatever logging_steps is ----------------------------------------------------------------------

LOSS = re.compile(r"<h3>Loss</h3>.*?</svg>", re.DOTALL)
FAILS = (
    'return {"loss": ((y - labels) ** 2).mean()',
    'self.calls = getattr(self, "calls", 0) + 1\n            if self.calls > 6:\n'
    '                raise ValueError("the seventh step")\n            return {"loss": ((y - labels) ** 2).mean()',
)


@pytest.fixture
def fresh(tmp_path: Path, prefect_server: str) -> Path:
    return project(tmp_path / "project").parent


def page(result: PipelineResult) -> str:
    return Path(result.report_url or "").read_text()


def test_a_training_that_logs_nothing_has_a_curve_of_every_step(fresh: Path) -> None:
    result = run(fresh, "train.args.logging_steps=1000", "predict.enabled=false", "publish.enabled=false")
    assert result.ok
    [losses] = fresh.glob("store/stages/train/*/losses.json")
    assert [entry["step"] for entry in json.loads(losses.read_text())] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(LOSS.findall(page(result))) == 1


@pytest.mark.parametrize(
    ("edit", "words", "logging_steps", "curves"),
    [
        (FAILS, "the seventh step", 1, 1),
        (("y = self.linear(x)", "raise ValueError('wrong shape')"), "wrong shape", 1, 0),
    ],
    ids=["logged", "before the first step"],
)
def test_a_training_that_fails_has_the_curve_until_then(
    fresh: Path, edit: tuple[str, str], words: str, logging_steps: int, curves: int
) -> None:
    broken(fresh, *edit)
    result = run(fresh, f"train.args.logging_steps={logging_steps}")
    assert words in str(result.error)
    assert ran(result) == {"prepare-data"}
    assert len(LOSS.findall(page(result))) == curves


# -- what became of the champion --------------------------------------------------------------------------------------
def report_of(result: PipelineResult) -> str:
    result.raise_for_error()
    assert result.report_url is not None
    return " ".join(Path(result.report_url).read_text().split())


def test_the_report_has_the_comparison_with_the_champion(fresh: Path, tmp_path: Path) -> None:
    uri = fresh_store(tmp_path / "mlflow")
    wanted: tuple[str, ...] = ("tracking.enabled=true", f"tracking.uri={uri}", "register.name=toy-line")
    wanted += ("register.metric=test_error", "register.greater_is_better=false", "publish.enabled=false")
    first = report_of(run(fresh, *wanted, "train.args.max_steps=2"))
    assert ">toy-line version 1. It is the first champion.</p>" in first
    better = run(fresh, *wanted, "train.args.max_steps=60")
    text = report_of(better)
    assert "toy-line version 2. test_error is better than that of version 1" in text
    assert '<td class="number">1</td><td>test_error</td>' in text
    assert "<td>replaced</td>" in text
    assert int(client(uri).get_model_version_by_alias("toy-line", "champion").version) == 2
    # The copy in MLflow is that of the run's folder.
    [kept] = [each.path for each in client(uri).list_artifacts(better.mlflow_run_id) if each.path == "report.html"]
    logged: Any = client(uri).get_run(better.mlflow_run_id).info.artifact_uri
    assert "<td>replaced</td>" in (Path(logged.removeprefix("file://")) / kept).read_text()
    worse = report_of(run(fresh, *wanted, "train.args.max_steps=3"))
    assert '<td class="number">2</td><td>test_error</td>' in worse
    assert "<td>kept</td>" in worse


def test_a_server_that_is_away_holds_up_no_report(fresh: Path) -> None:
    away = ("tracking.enabled=true", "tracking.uri=http://127.0.0.1:9", "register.name=toy-line")
    text = report_of(run(fresh, *away, "publish.enabled=false"))
    assert "toy-line: MLflow had not answered when this was written." in text


# -- files of trackers ------------------------------------------------------------------------------------------------
def test_files_of_trackers_stay_and_are_not_part_of_the_result(folder: Path) -> None:
    reports = ("train.args.report_to=[jsonl, tensorboard]", "train.args.logging_steps=1", "train.args.seed=5")
    run(folder, *reports).raise_for_error()
    [stage] = [path.parent for path in folder.glob("store/stages/train/*/checkpoints/metrics.jsonl")]
    stage = stage.parent
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
    settings = ("train.args.report_to=wandb", "train.args.logging_steps=1", "train.args.seed=6")
    trainflow("run", "pipeline.yaml", "--only", "train", *settings, "evaluate.enabled=false", cwd=folder).ok()
    [kept] = (tmp_path / "wandb").rglob("*.wandb")
    content = kept.read_bytes()
    assert content.count(b"train/loss") >= 8 and b"train/learning_rate" in content


# -- mixtures ---------------------------------------------------------------------------------------------------------
MIXED = """
import json
import os
from pathlib import Path

import torch

from trainer_lib import TrainerCallback


def prepare(options, out):
    def rows(most):
        for name, source in zip(out.mixture, out.sources):
            for line in Path(source).read_text().split()[:most]:
                yield {"x": [float(line)], "labels": int(float(line) > 0), "source": name}

    return {"train": rows(None), "test": rows(5)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 2)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if labels is None else {"loss": loss, "logits": logits}


def build_model(options, data):
    return Net()


class Change(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        stage = Path(args.output_dir).parent
        if state.global_step == 3 and "b" in os.environ.get("CHANGED", ""):
            (stage / "mixture.json").write_text(json.dumps({"id": "1", "weights": {"b": 3.0}}))
        if state.global_step == 6 and os.environ.pop("FAILS", None):
            raise ValueError("the power is gone")


def callbacks(options):
    return [Change()]
"""
MIXED_SPEC = """
name: mixed
recipe: recipe.py
storage: store
prepare:
  mixture:
    sources: [{source: data/a.txt, weight: 0.5}, {source: data/b.txt, weight: 0.5}]
train:
  args: {seed: 1, max_steps: 12, global_batch_size: 8, learning_rate: 5e-2, save_steps: 4, logging_steps: 2}
evaluate: {metrics: [accuracy], slices: [source]}
publish: {enabled: false}
tracking: {enabled: false}
"""
TRAINED = "evaluate.enabled=false"


def write_mixed(folder: Path) -> None:
    (folder / "data").mkdir()
    for name, shift in (("a", -30), ("b", -70)):
        (folder / "data" / f"{name}.txt").write_text(" ".join(str((7 * row + shift) % 100 - 50) for row in range(90)))
    (folder / "recipe.py").write_text(MIXED)
    (folder / "pipeline.yaml").write_text(MIXED_SPEC)


def test_a_changed_weight_counts_from_a_checkpoint_on_and_is_in_the_lineage(
    tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training whose weights change is the one whose schedule says so, also when it fails behind the change."""
    write_mixed(tmp_path)

    def trained(*overrides: str) -> StageManifest[TrainFacts]:
        result = run(tmp_path, "predict.enabled=false", *overrides)
        result.raise_for_error()
        outcome = result.outcome("train")
        assert outcome is not None
        return StageManifest.from_dict(outcome.manifest or {}).with_facts(TrainFacts)

    def weights(manifest: StageManifest[TrainFacts]) -> str:
        return next(each.sha256 for each in manifest.files if each.path == "model/model.safetensors")

    plain = trained()
    [measured] = (tmp_path / "store" / "stages" / "evaluate").glob("*/metrics.json")
    assert {"accuracy/source/a", "accuracy/source/b"} <= set(json.loads(measured.read_text())["test"])
    history = json.loads(plain.store().read_bytes("history.json"))
    assert all({"loss", "loss_a", "loss_b"} <= set(entry) for entry in history[:6])
    scheduled = trained("prepare.mixture.schedule={4: {b: 3.0}}", TRAINED)
    monkeypatch.setenv("CHANGED", "b")
    changed = trained(f"storage={tmp_path / 'other'}", TRAINED)
    monkeypatch.setenv("FAILS", "1")
    assert not run(tmp_path, f"storage={tmp_path / 'third'}", TRAINED).ok
    resumed = trained(f"storage={tmp_path / 'third'}", TRAINED)
    assert resumed.facts.resumed_from == 4
    assert len({weights(manifest) for manifest in (scheduled, changed, resumed)}) == 1
    assert weights(plain) != weights(changed)
    assert history[:2] == json.loads(changed.store().read_bytes("history.json"))[:2]
    assert resumed.facts.mixture == changed.facts.mixture
    assert changed.facts.mixture == ({"step": 4, "weights": {"a": pytest.approx(1 / 7), "b": pytest.approx(6 / 7)}},)
    assert describe_lineage("mixed", [changed]).arguments["mixture"] == list(changed.facts.mixture)
    monkeypatch.delenv("CHANGED")
    monkeypatch.setenv("FAILS", "1")
    spec = spec_of(tmp_path, f"storage={tmp_path / 'fourth'}", TRAINED)
    with pytest.raises(ConfigError, match="No data is prepared"):
        change_mixture(spec, {"b": 3.0})
    assert not run(tmp_path, f"storage={tmp_path / 'fourth'}", TRAINED).ok
    with pytest.raises(ConfigError, match="no such source"):
        change_mixture(spec, {"c": 3.0})
    change_mixture(spec, {"b": 3.0})  # while it trains, as here while it waits
    assert [change["step"] for change in trained(f"storage={tmp_path / 'fourth'}", TRAINED).facts.mixture] == [8]
    with pytest.raises(ConfigError, match="has ended"):
        change_mixture(spec, {"b": 3.0})
