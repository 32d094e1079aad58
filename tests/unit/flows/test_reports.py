"""What a report, an MLflow run and a page of Prefect show of a run: notes, curves, pictures, tables, data."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.toy import project
from trainer_lib.errors import CodeError, GateError
from trainer_lib.evaluation.outcomes import summarize_outcomes
from trainer_lib.hub.card import Card, render_card
from trainer_lib.protocol.requests import PreparedSplit
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.mlflow_client import FAILURE_TAG
from trainer_lib.trackers.names import flatten_params
from trainflow.flows.cli.commands import execution
from trainflow.flows.planning.full_plan import FullPlan, read_conversations
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.results import PipelineResult, StageOutcome, read_training_history
from trainflow.flows.reports import report, run_record, run_tracking
from trainflow.flows.reports.report import Panel, Section, describe_conversations, describe_data, render_report
from trainflow.flows.reports.run_tracking import (
    NOTE,
    describe_end,
    describe_experiment,
    describe_start,
    log_outcomes,
    settings_files,
    tracked_params,
)
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.spec.sweep_settings import TRIAL
from trainflow.tasks.model.outcome_tables import read_answers
from trainflow.tasks.prefect.prefect_internals import settings_for_every_thread
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.progress import publish

_LETTERS = "a1B2c3D4e5F6g7H8"
PLANTED = [
    *(f"hf_{letter * 2}{_LETTERS * 2}" for letter in "abcde"),
    *(f"sk-{letter}{_LETTERS * 2}" for letter in "abcde"),
    *(f"glpat-{letter}{_LETTERS}{_LETTERS[:4]}" for letter in "abc"),
    *(f"ghp_{letter * 4}{_LETTERS * 2}" for letter in "abc"),
    *("AKIA" + letter * 16 for letter in "ABC"),
    *("AIza" + (letter + "1B2c") * 7 for letter in "abc"),
    *(f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl{letter}" for letter in "abc"),
    *(f"https://me{letter}:p4ssw0rd{letter}@host/x" for letter in "abcde"),
    *(f"postgresql://user:hunter2{letter}@db/mlflow" for letter in "ab"),
]
HISTORY = [{"step": step, "loss": 1 / step} for step in range(1, 9)]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    spec = project(tmp_path / "project")
    return Plan.of(load_spec(spec, ("publish.description=Lines through points.", "train.options={note: sk-abc}")))


def test_parameters_are_the_effective_settings_that_decide_the_results(plan: Plan) -> None:
    params = flatten_params(tracked_params(plan))
    wanted = {
        "recipe": "recipe.py",
        "prepare.options.rows": "64",
        "train.args.learning_rate": "0.05",
        "train.args.global_batch_size": "8",
        "train.args.seed": "1",
        "train.args.max_steps": "8",
        "train.args.save_steps": "4",
        "train.processes": "1",
        "train.args.lr_scheduler_type": "linear",
        "evaluate.splits": "[test]",
    }
    assert wanted.items() <= params.items()
    assert params["train.args.optim"].startswith("adamw")
    assert not [name for name in params if ".launch." in name or name.startswith(("publish", "register", "tracking"))]
    assert not [name for name in params if name.startswith("evaluate.args")]  # train's, and there already
    assert "None" not in params.values()


def test_the_whole_spec_and_every_argument_are_files(plan: Plan) -> None:
    files = settings_files(plan)
    assert "Lines through points." in files["settings/spec.yaml"]
    assert '"logging_steps": "2"' in files["settings/arguments.json"]
    assert describe_experiment(plan.spec) == "Runs of the pipeline **toy** (recipe.py).\n\nLines through points."


def test_a_failure_is_a_tag_and_in_the_description_and_goes_with_the_next_success() -> None:
    result = PipelineResult("toy", "k" * 64, "store", [StageOutcome("train", "failed", "it broke")])
    result.error = CodeError("it broke: https://me:s3cret@host/x")
    tags = describe_end(result, "abc")
    assert tags[FAILURE_TAG] == "CodeError: it broke: https://***@host/x"
    assert tags["trainflow.failed_stage"] == "train"
    assert "trainflow resume abc --storage store" in (tags[NOTE] or "")
    assert "s3cret" not in str(tags)
    measured = {"metrics": {"test": {"accuracy": 0.98765, "runtime": 3.0, "accuracy_low": 0.93, "accuracy_high": 0.99}}}
    result.error = None
    result.stages = [StageOutcome("train", "ran", "new"), StageOutcome("evaluate", "ran", "new", 1.0, measured)]
    tags = describe_end(result, "abc")
    assert (tags[FAILURE_TAG], tags["trainflow.failed_stage"]) == (None, None)
    assert "| train | ran |" in (tags[NOTE] or "")
    assert "| accuracy | 0.9877 (0.93 to 0.99) |" in (tags[NOTE] or "")


def test_planted_secrets_are_in_nothing_that_mlflow_or_a_card_shows(tmp_path: Path) -> None:
    spec = load_spec(project(tmp_path / "project"))
    assert len(PLANTED) >= 30
    publish = spec.publish.model_copy(update={"description": f"It was made with {' and '.join(PLANTED)} once."})
    prepare = spec.prepare.model_copy(update={"options": {"rows": 64, "notes": PLANTED}})
    plan = Plan.of(spec.model_copy(update={"publish": publish, "prepare": prepare}))
    settings = [flatten_params(tracked_params(plan)), settings_files(plan), describe_experiment(plan.spec)]
    for secret in PLANTED:
        result = PipelineResult("toy", "k" * 64, f"s3://bucket/{secret}", [StageOutcome("train", "failed", secret)])
        result.error = CodeError(f"it broke: {secret}", field="x", value=secret)
        card = Card(title=secret, description=secret, arguments={"note": secret}, sources={secret: ""})
        shown = json.dumps([settings, describe_end(result, "abc"), render_card(card)])
        assert secret not in shown and json.dumps(secret)[1:-1] not in shown, secret


def test_the_page_of_the_run_in_prefect_is_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.context import FlowRunContext

    flow_run = SimpleNamespace(flow_run=SimpleNamespace(id="f-1"))
    monkeypatch.setattr(FlowRunContext, "get", lambda: flow_run)
    result = PipelineResult("toy", "k" * 64, "store")
    monkeypatch.setattr(run_tracking, "configured_api", lambda: "http://host:4200/api")
    assert describe_start(result, "abc")["trainflow.prefect_url"] == "http://host:4200/runs/flow-run/f-1"
    monkeypatch.setattr(run_tracking, "configured_api", lambda: None)
    tags = describe_start(result, "abc")
    assert (tags["trainflow.prefect_flow_run"], "trainflow.prefect_url" in tags) == ("f-1", False)


def test_names_of_strangers_are_no_markup_in_the_note(tmp_path: Path) -> None:
    odd = "<script>\x1b]0;x\x07</script>\u202e![x](http://h/p)"
    evaluated = {"stage": "evaluate", "metrics": {odd: {f"test_{odd.replace('/', '')}": 0.5}}, "url": str(tmp_path)}
    result = PipelineResult("toy", "ab" * 32, str(tmp_path), [StageOutcome("evaluate", "ran", odd, manifest=evaluated)])
    result.error = CodeError(odd)
    note = describe_end(result, "ab" * 8)[NOTE]
    assert note is not None and "0.5" in note
    assert all(line.isprintable() for line in note.split("\n"))
    assert "<" not in note and "](http://h" not in note


def live_result(**more: Any) -> PipelineResult:
    manifest = {"metrics": {"test": {"accuracy": 0.5, "loss": math.nan}}, "facts": {}}
    stages = [
        StageOutcome("train", "ran", "args|seed: 1 -> 2", 12.0, None, {"model": "/data/model"}),
        StageOutcome("evaluate", "ran", "never run before", 2.0, manifest),
    ]
    return PipelineResult("toy", "k" * 64, "/data", stages, report_url="/data/runs/k/report.html", **more)


def test_the_report_is_written_when_a_stage_has_ended(tmp_path: Path) -> None:
    plan = Plan.of(load_spec(project(tmp_path / "project"), ["train.args.learning_rate=0.125"]))
    record = run_record.RunRecord(plan, PipelineResult("toy", "k" * 64, plan.spec.storage))
    record.folder, page = Store.open(tmp_path / "run"), tmp_path / "run" / report.REPORT
    with run_record.collect_history(record):
        publish({"event": "log", "stage": "train", "step": 2, "max_steps": 8, "logs": {"loss": 0.5}})
        publish({"event": "log", "stage": "train", "step": 4, "max_steps": 8, "logs": {"loss": 0.25}})
        assert not page.exists(), "a training that has not ended"
        record.note_stage(StageManifest("train", "k", str(tmp_path / "absent"), ""))
    text = page.read_text()
    for part in (">Running<", "<svg", "train.args.learning_rate", "0.125", "cores"):
        assert part in text
    assert "learning_rate: 0.125" in text, "the spec"


def test_prefect_gets_a_summary_and_the_curve() -> None:
    gates = [{"metric": "test_accuracy", "requirement": ">= 0.9", "value": 0.5, "passed": False}]
    failed = live_result(gates=gates, error=GateError("The model is not published."))
    found = {each["key"]: each["data"] for each in run_record.make_artifacts(failed, report.draw_charts(HISTORY))}
    assert set(found) == {"summary", "loss"}
    # A reason does not end its cell.
    for part in ("args\\|seed", "`/data/model`", "`/data/runs/k/report.html`", "GateError", "| loss | nan |"):
        assert part in found["summary"]
    assert "| test_accuracy | >= 0.9 | 0.5 | failed |" in found["summary"]
    assert found["loss"].startswith("data:image/svg+xml;base64,")
    # Links are made to web addresses alone.
    text = run_record.make_artifacts(live_result(run_url="https://mlflow/x", mlflow_run_id="f"), {})[0]["data"]
    assert "[https://mlflow/x](https://mlflow/x)" in text
    assert report.draw_charts([]) == {}


def test_a_server_that_hangs_costs_a_moment_and_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "LIMIT_S", 0.5)
    monkeypatch.setattr(run_record, "current_flow_run_id", lambda: "00000000-0000-0000-0000-000000000001")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        from prefect.settings import PREFECT_API_URL

        with settings_for_every_thread({PREFECT_API_URL: address}):
            began = time.monotonic()
            with run_record.run_artifacts(cast(Any, SimpleNamespace(result=live_result(), charts={}))):
                pass
            assert time.monotonic() - began < 10
    for thread in threading.enumerate():
        if thread.name == "trainflow-artifacts":
            thread.join(30)  # its connection is gone with the server


@pytest.fixture
def stage(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "stage")


def test_the_steps_behind_the_last_log_are_part_of_the_history(stage: Store) -> None:
    assert read_training_history(stage) == []
    stage.write_bytes("history.json", b'[{"loss": 1.0, "step": 4}, {"train_loss": 0.9, "step": 6}]')
    stage.write_bytes("losses.json", b'[{"step": 5, "loss": 0.5}, {"step": 6, "loss": "NaN"}]')
    assert [entry.get("loss") for entry in read_training_history(stage)] == [1.0, None, 0.5, "NaN"]


class Run:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.tags: dict[str, str] = {}
        self.set_tags = self.tags.update

    def log_file(self, content: Any, path: str) -> None:
        self.files[path] = content


def _logged(outcomes: Any, metrics: dict[str, Any], **tags: str) -> Run:
    """What is logged of a manifest of evaluate with these outcomes of the split test."""
    run, content = Run(), json.dumps(outcomes).encode()
    store = SimpleNamespace(read_bytes=lambda path, limit: content)
    files = [SimpleNamespace(path="outcomes/test.json")]
    evaluation: Any = SimpleNamespace(metrics=metrics, files=files, store=lambda: store)
    spec = {"name": "toy", "recipe": "recipe.py", "storage": "s", "tracking": {"tags": tags}}
    log_outcomes(PipelineSpec.model_validate(spec), cast(Any, run), evaluation, {"classes": ["no", "yes"]})
    return run


def test_classes_have_a_matrix_a_calibration_and_their_hardest_rows() -> None:
    labels = np.array([0, 1] * 20)
    scores = np.eye(2)[labels] * 3
    scores[7] = [4.0, 0.0]
    slices = {"test": {"accuracy": 0.9, "accuracy/sex/a": 1.0, "rows/sex/a": 30, "rows/sex/b": 10}}
    outcomes = summarize_outcomes(scores, labels) or {}
    shown = _logged({**outcomes, "inputs": {"7": {"text": "the text"}}}, slices)
    for name, width in (("test", 5), ("hardest-test", 5), ("confused-test", 5)):
        table = json.loads(shown.files[f"samples/{name}.json"])
        assert (table["columns"][-1], len(table["columns"])) == ("input", width)
        assert [row[-1] for row in table["data"] if row[0] == 7] == ["the text"]
    run = _logged(outcomes, slices)
    assert set(run.files) == {
        "plots/confusion-test.svg",
        "plots/reliability-test.svg",
        "plots/roc-test.svg",
        "plots/precision-recall-test.svg",
        "samples/test.json",
        "samples/hardest-test.json",
        "samples/confused-test.json",
        "samples/slices-test-sex.json",
    }
    for name in ("confusion", "reliability", "roc", "precision-recall"):
        assert run.files[f"plots/{name}-test.svg"].startswith(b"<svg")
    hardest = json.loads(run.files["samples/hardest-test.json"])
    assert hardest["columns"] == ["row_id", "label", "prediction", "nats"]
    assert hardest["data"][0][:3] == [7, "yes", "no"]
    sliced = json.loads(run.files["samples/slices-test-sex.json"])
    assert sliced == {"columns": ["sex", "rows", "accuracy"], "data": [["a", 30, 1.0], ["b", 10, None]]}
    tables = [each["path"] for each in json.loads(run.tags["mlflow.loggedArtifacts"])]
    names = ("test", "hardest-test", "confused-test", "slices-test-sex")
    assert tables == [f"samples/{name}.json" for name in names]


def test_numbers_have_residuals_and_older_outcomes_are_still_drawn() -> None:
    truth = np.linspace(0, 1, 40, dtype=np.float32)
    found = summarize_outcomes(truth + 0.1, truth)
    assert found is not None
    run = _logged(found, {"test": {"rmse": 0.1}})
    assert set(run.files) == {"plots/residuals-test.svg", "samples/test.json", "samples/hardest-test.json"}
    assert json.loads(run.files["samples/hardest-test.json"])["columns"][3] == "absolute_error"
    older = {name: value for name, value in found.items() if name != "hardest"}
    assert set(_logged(older, {}).files) == {"plots/residuals-test.svg", "samples/test.json"}
    for outcomes in ({"kind": "classes"}, {"kind": "numbers", "measured": "x"}):  # not worth a failed run
        assert _logged(outcomes, {}).files == {}


def test_a_trial_of_a_sweep_has_tables_and_no_pictures() -> None:
    labels, values = np.array([0, 1] * 20), np.linspace(0, 1, 20)
    for outcomes in (summarize_outcomes(np.eye(2)[labels] * 3, labels), summarize_outcomes(values + 0.01, values)):
        run = _logged(outcomes, {}, **{TRIAL: "3"})
        assert set(run.files) == {"samples/test.json", "samples/hardest-test.json"}


WARNING = "Split 'test' has no row whose 'label' is <b>2</b>, and 20 % of the rows of 'train' have."
STATISTICS = {
    "train": {
        "label": {"rows": 12, "min": 0, "max": 2, "sum": 12, "counts": {"0": 3, "1": 6, "2": 3}},
        "row_id": {"rows": 12, "min": 0, "max": 9, "sum": 30},
        "words": {"rows": 12, "shortest": 2, "longest": 8000, "elements": 54},
        "age": {"rows": 12, "min": -1.5, "max": 99.0, "sum": 600.0},
    },
    "test": {"year": {"rows": 1234, "counts": {str(year): 100 - year for year in range(11)}}},
}


def _prepared(folder: Path, statistics: dict[str, Any] | None, *warnings: str) -> StageManifest:
    store, files = Store.open(folder), []
    if statistics is not None:
        files.append(store.write_bytes("statistics.json", json.dumps(statistics).encode()))
    facts = PrepareFacts({"train": PreparedSplit(12)}, warnings=warnings)
    return StageManifest("prepare-data", "ab" * 32, str(folder), "cd" * 32, tuple(files), facts=facts)


def test_statistics_in_words(tmp_path: Path) -> None:
    assert describe_data(_prepared(tmp_path, STATISTICS, WARNING)) == [
        ("train.label", "12 rows; 1: 6, 0: 3, 2: 3"),
        ("train.words", "12 rows; length 2 to 8,000, on average 4.5"),
        ("train.age", "12 rows; -1.5 to 99, on average 50"),
        ("test.year", "1,234 rows; " + ", ".join(f"{n}: {100 - n}" for n in range(10)) + " and 1 more"),
    ]


def test_data_without_statistics_has_none_and_of_many_columns_some_are_shown(tmp_path: Path) -> None:
    assert describe_data(None) == []
    assert describe_data(_prepared(tmp_path, None)) == []
    damaged = _prepared(tmp_path, STATISTICS, WARNING)
    empty, cut = {"rows": 0, "min": 0, "max": 0, "sum": 0}, {"rows": 1, "longest": 2}
    for content in ("{", "[1]", *(json.dumps({"train": {"x": column}}) for column in (empty, cut))):
        (tmp_path / "statistics.json").write_text(content)
        assert describe_data(damaged) == [], content
    (tmp_path / "statistics.json").unlink()
    assert describe_data(damaged) == []
    for columns, last in ((40, []), (43, [("statistics.json", "has 3 more columns")])):
        many = {"train": {f"c{number}": {"rows": 1} for number in range(columns)}}
        rows = describe_data(_prepared(tmp_path, many))
        assert (len(rows[:40]), rows[40:]) == (40, last)


def test_the_report_and_the_summary_show_warnings(tmp_path: Path) -> None:
    prepared = _prepared(tmp_path, STATISTICS, WARNING)
    result = PipelineResult("digits", "ab" * 32, str(tmp_path))
    result.stages.append(StageOutcome("prepare-data", "ran", "never run before", manifest=prepared.to_dict()))
    assert StageManifest.from_dict(prepared.to_dict()).facts.warnings == (WARNING,)
    page = render_report(result.to_dict(), sections=[Section.of_pairs("Data", describe_data(prepared))])
    assert "<h2>Data</h2>" in page
    assert "<td>prepare-data</td><td><code>Split &#39;test&#39; has no row whose &#39;label&#39; is &lt;b&gt;2" in page
    assert "length 2 to 8,000, on average 4.5" in page
    text = report.render_summary(result)
    assert "| prepare-data | Split 'test' has no row whose 'label' is &lt;b>2&lt;/b>, and 20 % of" in text
    result.stages[0] = StageOutcome("prepare-data", "failed", "no rows")
    assert "Warnings" not in report.render_summary(result)


SHOWN = [
    {"place": "chats.jsonl, row 0", "parts": [["user: <b>one?\n", False], ["1", True], ["\n", False]]},
    {"place": "chats.jsonl, row 1", "parts": [["two\n" * 20, False], ["2", True]]},
]
SUMMARY = "8 conversations: 8 in the shape messages."


def _conversations(folder: Path, content: str) -> StageManifest:
    entry = Store.open(folder).write_bytes("assets/conversations.json", content.encode())
    facts = PrepareFacts({"train": PreparedSplit(12)}, info={"summary": [SUMMARY]})
    return StageManifest("prepare-data", "ab" * 32, str(folder), "cd" * 32, (entry,), facts=facts)


@pytest.mark.parametrize("content", ['[{"prompt": "<b>?", "before": "x", "after": "y"}]', "[1]", "{", "[]"])
def test_answers_before_and_after_training_are_shown_side_by_side(content: str, tmp_path: Path) -> None:
    entry = Store.open(tmp_path).write_bytes("artifacts/prompts.json", content.encode())
    evaluation = StageManifest("evaluate", "ab" * 32, str(tmp_path), "cd" * 32, (entry,), facts=EvaluateFacts())
    tables = list(read_answers(evaluation))
    assert tables == ([(["prompt", "before", "after"], [["<b>?", "x", "y"]])] if "prompt" in content else [])
    shown = Section("Answers", [Panel(columns=columns, rows=rows) for columns, rows in tables])
    page = render_report(PipelineResult("chats", "ab" * 32, str(tmp_path)).to_dict(), sections=[shown])
    assert ("<td>&lt;b&gt;?</td><td>x</td><td>y</td>" in page) == bool(tables)


def test_conversations_are_shown_with_what_is_trained_marked(tmp_path: Path) -> None:
    prepared = _conversations(tmp_path, json.dumps(SHOWN))
    sections = [Section.of_pairs("Data", describe_data(prepared)), describe_conversations(read_conversations(prepared))]
    page = render_report(PipelineResult("chats", "ab" * 32, str(tmp_path)).to_dict(), sections=sections)
    assert "<pre>user: &lt;b&gt;one?\n<mark>1</mark>\n</pre>" in page
    assert f"<td>summary</td><td><code>{SUMMARY}" in page
    reasons: Any = SimpleNamespace(reasons={"prepare-data": SimpleNamespace(manifest=prepared)})
    full: Any = FullPlan(reasons, cast("Any", None), ())
    lines = [line.plain for line in execution._data(full)]
    trained = ["  trained      chats.jsonl, row 0", "    user: <b>one?", "    ⟦1⟧"]
    assert lines[:4] == [f"  data         {SUMMARY}", *trained]
    assert lines[-1] == "    and 9 more lines"


@pytest.mark.parametrize("content", ["{", "[1]", '[{"place": "p"}]', '[{"place": "p", "parts": [1]}]'])
def test_damaged_conversations_are_left_out(tmp_path: Path, content: str) -> None:
    assert read_conversations(_conversations(tmp_path, content)) == []
    assert read_conversations(None) == []
