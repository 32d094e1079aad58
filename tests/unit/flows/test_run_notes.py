"""What the MLflow run of a pipeline says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import run_notes
from flows.plan import Plan
from flows.results import PipelineResult, StageOutcome
from flows.run_notes import NOTE, describe_end, describe_experiment, describe_start, settings_files, tracked_params
from flows.spec.spec import load_spec
from tests.support.toy import project
from trainer_lib.errors import CodeError
from trainer_lib.hub.card import Card, render_card
from trainer_lib.trackers.mlflow_client import FAILURE_TAG
from trainer_lib.trackers.params import flatten_params

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


def test_the_experiment_is_described_by_what_is_published(plan: Plan) -> None:
    text = describe_experiment(plan.spec)
    assert text == "Runs of the pipeline **toy** (recipe.py).\n\nLines through points."


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
    assert "\n\ntest_accuracy **0.9877** (0.93 to 0.99)\n\n" in (tags[NOTE] or "")


def test_planted_secrets_are_in_nothing_that_mlflow_or_a_card_shows(tmp_path: Path) -> None:
    spec = load_spec(project(tmp_path / "project"))
    assert len(PLANTED) >= 30
    for secret in PLANTED:
        publish = spec.publish.model_copy(update={"description": f"It was made with {secret} once."})
        prepare = spec.prepare.model_copy(update={"options": {"rows": 64, "note": secret}})
        plan = Plan.of(spec.model_copy(update={"publish": publish, "prepare": prepare}))
        result = PipelineResult("toy", "k" * 64, f"s3://bucket/{secret}", [StageOutcome("train", "failed", secret)])
        result.error = CodeError(f"it broke: {secret}", field="x", value=secret)
        card = Card(
            title=secret, description=spec.publish.description, arguments={"note": secret}, sources={secret: ""}
        )
        shown = json.dumps(
            [
                flatten_params(tracked_params(plan)),
                settings_files(plan),
                describe_experiment(plan.spec),
                describe_end(result, "abc"),
                render_card(card),
            ]
        )
        assert secret not in shown and json.dumps(secret)[1:-1] not in shown, secret


def test_the_page_of_the_run_in_prefect_is_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.context import FlowRunContext

    flow_run = SimpleNamespace(flow_run=SimpleNamespace(id="f-1"))
    monkeypatch.setattr(FlowRunContext, "get", lambda: flow_run)
    result = PipelineResult("toy", "k" * 64, "store")
    monkeypatch.setattr(run_notes, "configured_api", lambda: "http://host:4200/api")
    assert describe_start(result, "abc")["trainflow.prefect_url"] == "http://host:4200/runs/flow-run/f-1"
    monkeypatch.setattr(run_notes, "configured_api", lambda: None)
    tags = describe_start(result, "abc")
    assert (tags["trainflow.prefect_flow_run"], "trainflow.prefect_url" in tags) == ("f-1", False)


def test_names_of_strangers_are_no_markup_in_the_note(tmp_path: Path) -> None:
    odd = "<script>\x1b]0;x\x07</script>\u202e![x](http://h/p)"
    result = PipelineResult("toy", "ab" * 32, str(tmp_path))
    evaluated = {"stage": "evaluate", "metrics": {"test": {f"test_{odd}": 0.5}}, "url": str(tmp_path)}
    result.stages.append(StageOutcome("evaluate", "ran", odd, manifest=evaluated))
    result.error = CodeError(odd)
    note = describe_end(result, "ab" * 8)[NOTE]
    assert note is not None and "0.5" in note
    assert all(line.isprintable() for line in note.split("\n"))
    assert "<" not in note and "](http://h" not in note
