"""What the MLflow run of a pipeline says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.plan import Plan
from flows.results import PipelineResult, StageOutcome
from flows.run_notes import NOTE, describe_end, describe_experiment, settings_files, tracked_params
from flows.spec.spec import load_spec
from tests.support.toy import project
from trainer_lib.errors import CodeError
from trainer_lib.trackers.mlflow_client import FAILURE_TAG
from trainer_lib.trackers.params import flatten_params


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
    result.error, result.stages = None, [StageOutcome("train", "ran", "new")]
    tags = describe_end(result, "abc")
    assert (tags[FAILURE_TAG], tags["trainflow.failed_stage"]) == (None, None)
    assert "| train | ran |" in (tags[NOTE] or "")
